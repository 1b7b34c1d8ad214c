"""Planes that several ranks share: stored once, by turns, and checked by samples.

Ranks that bring the same plane and shard hold equal bytes and one host copy. In a leased pool each
page of it is stored by one of them, so that the node writes each page once and every link carries its
part. All of them commit every page; the page is readable when the last one has.

A plane marked as shared by mistake would be stored from one rank and loaded by all. So every rank
takes a checksum of its own bytes of some pages, the same pages on each rank, and sends it with the
commit; the daemon compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sharedmirror.copies.interface import Completion, CopyEngine, Event, Geometry, PlaneGeometry, Stream
from sharedmirror.copies.pairs import Ids
from sharedmirror.errors import CopyError
from sharedmirror.types import Lease

__all__ = ["Part", "PartsTogether", "Sample", "SharedStoreEngine", "subset", "take_samples"]

SAMPLE_ONE_IN = 8
"""Besides a lease's first page, one page in so many is compared."""


@dataclass(frozen=True, eq=False)
class Part:
    """The planes of one region, which ``writers`` ranks share; this rank is number ``index`` of them."""

    region: int
    planes: tuple[PlaneGeometry, ...]
    engine: CopyEngine
    writers: int
    index: int


def subset(geometry: Geometry, planes: Sequence[int]) -> Geometry:
    """Return the geometry of some planes, in the order in which they were."""
    chosen = set(planes)
    place = {plane: at for at, plane in enumerate(sorted(chosen))}
    order = tuple(place[plane] for plane in geometry.order if plane in chosen)
    after = tuple(order.index(at) + 1 for at in range(len(order)))
    picked = tuple(geometry.planes[plane] for plane in sorted(chosen))
    return Geometry(picked, geometry.device, order, after, geometry.host_edges)


class PartsTogether(Protocol):
    """Loads a part's planes together with the ranks that share them; see ``exchange``."""

    def load(self, number: int, device_pages: Ids, host_frames: Ids, stream: Stream) -> Completion | None:
        """Copy host to device; None, and nothing is done, when each rank is to load by itself."""
        ...

    def drain(self) -> None:
        """Block until every load is over; raises CopyError."""
        ...

    def close(self) -> None:
        """Drain, and let go; raises CopyError."""
        ...


class SharedStoreEngine:
    """Loads with ``whole``; stores each part's planes for the pages whose turn is this rank's.

    ``together`` loads the planes of ``parts[at]`` with other ranks; ``together`` and ``at`` are a pair.
    """

    def __init__(
        self, whole: CopyEngine, parts: Sequence[Part], frames_per_page: int,
        together: tuple[int, PartsTogether] | None = None,
    ) -> None:  # fmt: skip
        self._whole = whole
        self._parts = tuple(parts)
        self._frames_per_page = frames_per_page
        self._together = together

    def store(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Completion:
        """Copy device to host, this rank's share of it; raises CopyError."""
        pages = host_frames // self._frames_per_page
        submitted: list[Completion] = []
        for part in self._parts:
            mine = pages % part.writers == part.index
            if mine.any():
                submitted.append(part.engine.store(device_pages[mine], host_frames[mine], stream))
        return _All(submitted)

    def load(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Completion:
        """Copy host to device, every plane; raises CopyError."""
        return self._whole.load(device_pages, host_frames, stream)

    def load_together(self, number: int, device_pages: Ids, host_frames: Ids, stream: Stream) -> Completion:
        """Like load, with the ranks that make the same call for hit ``number``; raises PartMissing, RanksDisagree."""
        if self._together is None:
            return self.load(device_pages, host_frames, stream)
        at, exchange = self._together
        shared = exchange.load(number, device_pages, host_frames, stream)
        if shared is None:
            return self.load(device_pages, host_frames, stream)
        alone = [part.engine for number, part in enumerate(self._parts) if number != at]
        return _All([shared, *(engine.load(device_pages, host_frames, stream) for engine in alone)])

    def load_with_events(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> list[Event]:
        """Like load; return one event per plane, in ``tensor_pairs`` order."""
        return self._whole.load_with_events(device_pages, host_frames, stream)

    def drain(self) -> None:
        """Block until every copy ever submitted is complete; raises CopyError."""
        if self._together is not None:
            self._together[1].drain()
        for engine in self._engines():
            engine.drain()

    def close(self) -> None:
        """Drain, and let go of every tensor; raises CopyError."""
        self.drain()
        if self._together is not None:
            self._together[1].close()
        for engine in self._engines():
            engine.close()
        self._parts, self._together = (), None  # they hold views of host memory

    def _engines(self) -> list[CopyEngine]:
        engines = [self._whole, *(part.engine for part in self._parts)]
        return list({id(engine): engine for engine in engines}.values())


class _All:
    """Complete when every one of several is."""

    def __init__(self, several: list[Completion]) -> None:
        self._several = several

    def done(self) -> bool:
        """Return whether all are complete; raises CopyError, one that says that copies are over when all are."""
        over, fault = True, None
        for each in self._several:
            try:
                over &= each.done()
            except CopyError as error:
                if not error.settled:
                    raise
                fault = error
        if over and fault is not None:
            raise fault
        return over

    def wait(self, timeout_s: float | None) -> bool:
        """Block until all are done, at most ``timeout_s`` seconds for each; return done()."""
        for each in self._several:
            try:
                each.wait(timeout_s)
            except CopyError as error:
                if not error.settled:
                    raise
        return self.done()


@dataclass(frozen=True, eq=False)
class Sample:
    """A copy of this rank's own bytes of one page in one region's planes, under way to the host."""

    page: int
    region: int
    bytes: torch.Tensor
    event: torch.cuda.Event | None

    def to_wire(self) -> list[int]:
        """Return page, region and checksum; waits for the copy, which came before the page's own."""
        if self.event is not None:
            self.event.synchronize()
        return [self.page, self.region, zlib.crc32(self.bytes.numpy().tobytes())]


def take_samples(
    parts: Sequence[Part], lease: Lease, device_pages: Ids, host_frames: Ids, frames_per_page: int, stream: Stream
) -> list[Sample]:
    """Copy this rank's bytes of the pages to be compared, as if enqueued on ``stream``."""
    shared = [part for part in parts if part.writers > 1]
    if not shared:
        return []
    chosen = {
        page for page, generation in zip(lease.pages, lease.generations, strict=True) if _chosen(page, generation)
    }
    chosen.add(lease.pages[0])
    first = host_frames % frames_per_page == 0
    samples = []
    for device_page, frame in zip(device_pages[first].tolist(), host_frames[first].tolist(), strict=True):
        page = frame // frames_per_page
        if page in chosen:
            samples += [_sample(part, page, device_page, stream) for part in shared]
    return samples


def _chosen(page: int, generation: int) -> bool:
    return zlib.crc32(np.array([page, generation], dtype=np.int64).tobytes()) % SAMPLE_ONE_IN == 0


def _sample(part: Part, page: int, device_page: int, stream: Stream) -> Sample:
    device = part.planes[0].device.device
    slices = [plane.device[device_page] for plane in part.planes]
    if device.type != "cuda":
        return Sample(page, part.region, torch.cat(slices), None)
    with torch.cuda.stream(torch.cuda.current_stream(device) if stream is None else stream):
        together = torch.cat(slices)
        kept = torch.empty(together.shape, dtype=torch.uint8, pin_memory=True)
        kept.copy_(together, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return Sample(page, part.region, kept, event)
