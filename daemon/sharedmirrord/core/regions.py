"""Where planes lie: the two layouts, and which part of the arena a region takes.

Keeps invariant 2's second half (regions never overlap). Sizes and offsets are bytes; nothing here
knows an address or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sharedmirror.types import REGION_ALIGNMENT_BYTES, SLICE_ALIGNMENT_BYTES, Layout, Plane


def aligned(size_bytes: int, to: int) -> int:
    """Round up to a multiple of ``to``."""
    return -(-size_bytes // to) * to


@dataclass(frozen=True)
class Placement:
    """Slice of frame f of plane i: ``bases[i] + f * strides[i]`` from the region's start."""

    bases: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int


def place(planes: Sequence[Plane], frames: int, layout: Layout) -> Placement:
    """Lay ``frames`` slices of each plane into a region, rounded up to whole 2 MiB."""
    padded = [aligned(plane.slice_bytes, SLICE_ALIGNMENT_BYTES) for plane in planes]
    bases: list[int] = []
    end = 0
    if layout is Layout.PAGE:
        for size in padded:
            bases.append(end)
            end += size
        strides = [end] * len(planes)
        end *= frames
    else:
        # The slab's host tensor has the seed's contiguous shape, so slices follow one another unpadded.
        strides = [plane.slice_bytes for plane in planes]
        for stride in strides:
            bases.append(end)
            end += aligned(stride * frames, SLICE_ALIGNMENT_BYTES)
    return Placement(tuple(bases), tuple(strides), aligned(end, REGION_ALIGNMENT_BYTES))


def frame_bytes(planes: Iterable[Plane]) -> int:
    """Bytes of one frame with every slice padded to its alignment."""
    return sum(aligned(plane.slice_bytes, SLICE_ALIGNMENT_BYTES) for plane in planes)


class ArenaSpace:
    """First-fit allocation of an arena of ``size_bytes``."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes not allocated, in however many pieces."""
        return sum(size for _, size in self._free)

    def allocate(self, size_bytes: int) -> list[tuple[int, int]] | None:
        """Return extents (offset, bytes) that sum to ``size_bytes``, one if it can be; None when full."""
        for position, (offset, size) in enumerate(self._free):
            if size >= size_bytes:
                rest = [(offset + size_bytes, size - size_bytes)] if size > size_bytes else []
                self._free[position : position + 1] = rest
                return [(offset, size_bytes)]
        if self.free_bytes < size_bytes:
            return None
        extents: list[tuple[int, int]] = []
        while size_bytes:
            offset, size = self._free.pop(0)
            taken = min(size, size_bytes)
            if taken < size:
                self._free.insert(0, (offset + taken, size - taken))
            extents.append((offset, taken))
            size_bytes -= taken
        return extents

    def take(self, offset: int, size_bytes: int) -> None:
        """Allocate exactly this piece; raises ValueError when any of it is taken or outside."""
        for position, (start, size) in enumerate(self._free):
            if start <= offset and offset + size_bytes <= start + size:
                pieces = [(start, offset - start), (offset + size_bytes, start + size - offset - size_bytes)]
                self._free[position : position + 1] = [piece for piece in pieces if piece[1]]
                return
        raise ValueError(f"the arena piece of {size_bytes} bytes at {offset} is not free")

    def release(self, offset: int, size_bytes: int) -> None:
        """Give a piece back and merge it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, size_bytes)]):
            if merged and merged[-1][0] + merged[-1][1] > start:
                raise ValueError(f"arena piece at {start} is released twice")
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged
