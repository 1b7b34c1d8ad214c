"""Where planes lie: the two layouts, which part of the arena is whose NUMA node's, and which part a region takes.

Keeps invariant 2's second half (regions never overlap). Sizes and offsets are bytes; nothing here
knows an address or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sharedmirror.types import REGION_ALIGNMENT_BYTES, SLICE_ALIGNMENT_BYTES, Layout, Plane

Wish: TypeAlias = int | Literal["shared"] | None
"""Where memory is wanted: on a NUMA node, on all of them in about equal parts, or anywhere."""

Piece: TypeAlias = tuple[int, int]
"""(offset in the arena, bytes)."""


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


def divide(size_bytes: int, nodes: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return (node, start, end) of each node's part of an arena, in order; nothing where there is nothing to divide.

    The parts are equal but for the last, which has the rest. Depends on nothing else, so that a daemon that adopts an
    arena finds the parts that another one made.
    """
    part_bytes = size_bytes // (max(1, len(nodes)) * REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
    if len(nodes) < 2 or not part_bytes:
        return ()
    bounds = [*range(0, len(nodes) * part_bytes, part_bytes), size_bytes]
    return tuple((node, bounds[at], bounds[at + 1]) for at, node in enumerate(nodes))


class ArenaSpace:
    """First-fit allocation of an arena of ``size_bytes``, divided among the NUMA ``nodes`` that have memory.

    What is wished is had as far as there is room; where a region comes to lie never decides whether it gets memory.
    """

    def __init__(self, size_bytes: int, nodes: Sequence[int] = ()) -> None:
        self.size_bytes = size_bytes
        self.parts = divide(size_bytes, nodes)
        """(node, start, end); empty with one node or none."""
        self._free: list[Piece] = [(0, size_bytes)] if size_bytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes not allocated, in however many pieces."""
        return sum(size for _, size in self._free)

    def allocate(self, size_bytes: int, wish: Wish = None, beside: Sequence[Piece] = ()) -> list[Piece] | None:
        """Return extents (offset, bytes) that sum to ``size_bytes``, as few as can be; None when full.

        ``beside`` is what the region has already: with the wish "shared" it counts for the equal parts.
        """
        if self.free_bytes < size_bytes:
            return None
        extents: list[Piece] = []
        for start, end, wanted_bytes in self._wanted(size_bytes, wish, beside):
            extents += self._fit(wanted_bytes, start, end)
        missing_bytes = size_bytes - sum(size for _, size in extents)
        return _joined(extents + self._fit(missing_bytes, 0, self.size_bytes))

    def wish_of(self, pieces: Sequence[Piece], *, shared: bool) -> Wish:
        """Return the wish for more memory of a region that has ``pieces``: it grows where it lies.

        One rank's region stays on the node where it begins: what lies elsewhere found no room there. A region that
        ranks share, and that is too small to show it, counts as one that lies on all nodes.
        """
        have = self._bytes_by_part(pieces)
        on = [node for (node, _, _), size in zip(self.parts, have, strict=True) if size]
        if shared and (len(on) > 1 or sum(have) < len(have) * REGION_ALIGNMENT_BYTES):
            return "shared"
        begin = pieces[0][0] if pieces else -1
        return next((node for node, start, end in self.parts if start <= begin < end), None)

    def _wanted(self, size_bytes: int, wish: Wish, beside: Sequence[Piece]) -> list[tuple[int, int, int]]:
        """Return (start, end, bytes) of what a wish wants from each part."""
        if wish != "shared":
            return [(start, end, size_bytes) for node, start, end in self.parts if node == wish]
        have, found = self._bytes_by_part(beside), []
        for at, (_, start, end) in enumerate(self.parts):
            left = len(self.parts) - at
            level = aligned(-(-(sum(have[at:]) + size_bytes) // left), REGION_ALIGNMENT_BYTES)
            wanted = min(size_bytes, max(0, level - have[at]))
            found.append((start, end, wanted))
            size_bytes -= wanted
        return found

    def _bytes_by_part(self, pieces: Sequence[Piece]) -> list[int]:
        return [
            sum(max(0, min(end, offset + size) - max(start, offset)) for offset, size in pieces)
            for _, start, end in self.parts
        ]

    def _fit(self, size_bytes: int, low: int, high: int) -> list[Piece]:
        """Allocate up to so many bytes between ``low`` and ``high``: in one piece, or in the first ones."""
        pieces = [(max(low, offset), min(high, offset + size)) for offset, size in self._free]
        pieces = [(start, end) for start, end in pieces if start < end]
        extents: list[Piece] = []
        for start, end in next(([(s, e)] for s, e in pieces if e - s >= size_bytes), pieces):
            taken = min(end - start, size_bytes)
            if taken:
                self.take(start, taken)
                extents.append((start, taken))
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


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces in the same order, those that follow one another without a gap as one."""
    joined: list[Piece] = []
    for offset, size in pieces:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined
