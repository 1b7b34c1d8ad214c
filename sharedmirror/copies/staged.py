"""The engine that moves pages at the speed of the link and leaves the GPU to the model.

Kernels gather and scatter in the device's own memory, a few blocks at a time through slots that stay in
its cache; copy engines do the long haul. Small calls are one kernel that reads or writes host memory;
calls whose bytes lie in long stretches anyway are copies and nothing else (``plan.choose_route``), and so are
those that come before the kernels are compiled.

Kept here, beside what ``interface`` asks for: a call costs the CPU a few microseconds per chunk and
never waits for the device; stores and loads have streams and slots of their own, so that both may
be under way at once. A call whose submission fails waits for what it had submitted, then raises.

Host memory is registered with the driver before it appears in a geometry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from sharedmirror.copies.driver import Driver
from sharedmirror.copies.interface import Event, Geometry, Stream
from sharedmirror.copies.kernels import MoveKernels
from sharedmirror.copies.lane import ID_ROOM, Lane
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import (
    Ramp,
    Route,
    choose_route,
    head_pages,
    plan_plain,
    plan_staged,
    sort_by_frame,
    starts_by_kernel,
)
from sharedmirror.copies.submission import CopyTables, DirectTables, LaunchTables, Lines
from sharedmirror.copies.view import Addresses, build_view, layered_view
from sharedmirror.errors import ClosedError, CopyError, UsageError

__all__ = ["CudaCompletion", "StagedEngine"]

SLOT_BYTES = 48 << 20
SLOTS = 2
"""Large slots, because a matmul kernel that fills every multiprocessor for 0.7 ms lets others in only between two
kernels: with slots of 8 MiB 12 GB/s were left beside such a chain, with 32 MiB 44. Their size did not change by
how much a memory-bound chain slows down (1.05 to 1.06 in stores, 1.08 in loads, for 8 to 32 MiB)."""
DIRECT_BLOCKS = 132
"""Blocks of a small call's kernel: reading over the link needs many words under way."""
MAX_PAGES = ID_ROOM // 4
_PLAIN_COPIES = 1 << 20
"""Copies that one call plans at most where it has no kernels: one a page and plane."""
_LEGACY_STREAMS = (0, 1)
_POLL_S, _LONGEST_POLL_S = 20e-6, 5e-3


class CudaCompletion:
    """Complete when its event is."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """Return whether every copy is complete; raises CopyError."""
        with _device_errors():
            return bool(self._event.query())

    def wait(self, timeout_s: float | None) -> bool:
        """Block until done, at most ``timeout_s`` seconds; return done(). Raises CopyError."""
        if timeout_s is None:
            with _device_errors():
                self._event.synchronize()
            return True
        begin = time.monotonic()
        while not self.done():
            waited = time.monotonic() - begin
            if waited >= timeout_s:
                return False
            # Late by a thirtieth at most.
            time.sleep(min(max(_POLL_S, waited / 32), _LONGEST_POLL_S, timeout_s - waited))
        return True


class StagedEngine:
    """Copies between CUDA tensors and registered host memory.

    ``slots`` staging slots of ``slot_bytes`` (at least 128 KiB) are allocated for each direction. Calls cannot be
    captured in a CUDA graph: they use streams and page ids that the next call uses again.
    """

    def __init__(self, geometry: Geometry, *, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self._geometry: Geometry | None = geometry
        index = geometry.device.index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._addresses = Addresses.of(geometry)
        layered = layered_view(self._addresses, geometry.order, geometry.event_after)
        self._whole = Lines(build_view(self._addresses, [geometry.order]), self._device)
        self._layered = Lines(layered, self._device)
        self._event_groups = [layered.group_of_plane[geometry.order[after - 1]] for after in geometry.event_after]
        with torch.cuda.device(self._device):
            self._driver = Driver(self._device.index)
            with self._driver:
                self._store = Lane(self._driver, self._device, slots, slot_bytes)
                self._load = Lane(self._driver, self._device, slots, slot_bytes)
                self._lanes: tuple[Lane, ...] = (self._store, self._load)
                self._small = self._driver.reads_registered_memory
            # Tables are up, and memory that the allocator handed over has no earlier user any more.
            torch.cuda.synchronize(self._device)
        self._kernels = MoveKernels(self._driver, self._device, [*self._whole.view.tables, *layered.tables])

    def wait_for_kernels(self) -> bool:
        """Block until the kernels are compiled; return whether they are. Without them copies are slower."""
        return self._kernels.settle()

    def store(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> CudaCompletion:
        """Copy device to host, as if enqueued on ``stream``; raises CopyError."""
        return CudaCompletion(self._submit(self._store, device_pages, host_frames, stream)[-1])

    def load(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> CudaCompletion:
        """Copy host to device, as if enqueued on ``stream``; raises CopyError."""
        return CudaCompletion(self._submit(self._load, device_pages, host_frames, stream)[-1])

    def load_with_events(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> list[Event]:
        """Like load; one event per plane; planes of one group share theirs."""
        events = self._submit(self._load, device_pages, host_frames, stream, layered=True)
        return [events[min(group, len(events) - 1)] for group in self._event_groups]

    def drain(self) -> None:
        """Block until every copy ever submitted is complete; raises CopyError."""
        for lane in self._lanes:
            with lane.lock:
                events = lane.ids.events()
            with _device_errors():
                for event in events:
                    event.synchronize()

    def close(self) -> None:
        """Drain, and let go of streams, staging and tensors; raises CopyError, and keeps them then."""
        if self._geometry is None:
            return
        with self._store.lock, self._load.lock:
            geometry, self._geometry = self._geometry, None
        try:
            self._kernels.settle()
            self.drain()
            with self._driver:
                for lane in self._lanes:
                    lane.synchronize()
                for lane in self._lanes:
                    lane.destroy()
            self._driver.close()
        except BaseException:
            self._geometry = geometry
            raise
        for lane in self._lanes:
            lane.release()
        self._lanes = ()
        self._whole.release()
        self._layered.release()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _submit(
        self, lane: Lane, pages: Ids, frames: Ids, stream: Stream, *, layered: bool = False
    ) -> list[torch.cuda.Event]:
        """Enqueue all copies; return the events of the view's groups, or fewer that come later."""
        outer, kernels = self._stream(stream), self._kernels.ready
        most = MAX_PAGES if kernels else max(1, _PLAIN_COPIES // len(self._addresses.slice_bytes))
        if len(pages) > most:
            for low in range(0, len(pages), most):
                high = low + most
                last = self._submit(lane, pages[low:high], frames[low:high], outer, layered=layered)[-1]
            return [last]
        if len(pages) == 0:
            return [outer.record_event()]
        route = choose_route(self._addresses, pages, frames) if kernels else Route.PLAIN
        lines = self._layered if layered else self._whole
        with lane.lock, self._ready(lane, outer):
            if route is Route.DIRECT and self._small:
                return [self._direct(lane, pages, frames, outer)]
            if route is Route.PLAIN:
                events = self._plain(lane, lines, pages, frames, outer)
            else:
                events = self._staged(lane, lines, pages, frames, outer)
            outer.wait_event(events[-1])
            return events

    def _direct(self, lane: Lane, pages: Ids, frames: Ids, outer: torch.cuda.Stream) -> torch.cuda.Event:
        """Kernels only, on the caller's own stream where that may be."""
        legacy = outer.cuda_stream in _LEGACY_STREAMS
        stream = lane.compute[0] if legacy else outer.cuda_stream
        ids, _ = lane.ids.put(pages, frames)
        if legacy:
            lane.follow(outer.cuda_stream, stream)
        count = len(pages)
        self._launch_direct(lane, self._whole, 1, (ids, ids + 8 * count, count), stream)
        event = lane.event(stream) if legacy else outer.record_event()
        lane.ids.taken(event)
        if legacy:
            outer.wait_event(event)
        return event

    def _launch_direct(self, lane: Lane, lines: Lines, groups: int, ids: tuple[int, int, int], stream: int) -> None:
        """Move the first groups straight between device and host; ``ids``: addresses of pages and frames, count."""
        key = lines is self._whole, groups
        tables = lane.direct.get(key)
        if tables is None:
            kernels = self._kernels.all(lines.view.tables, to_dense=lane is self._store, direct=True)
            tables = lane.direct[key] = DirectTables(self._driver, kernels, lines, groups, DIRECT_BLOCKS)
        tables.submit(ids, stream)

    def _plain(
        self, lane: Lane, lines: Lines, pages: Ids, frames: Ids, outer: torch.cuda.Stream
    ) -> list[torch.cuda.Event]:
        """Copies alone."""
        copies = CopyTables(
            self._driver, plan_plain(lines.view, pages, frames, self._addresses.edges), lane is self._store
        )
        lane.ids.put()
        lane.follow(outer.cuda_stream, lane.copies)
        events = []
        for group in range(len(lines.view.groups) - 1):
            copies.submit(group, lane.copies)
            events.append(lane.event(lane.copies))
        lane.ids.taken(events[-1])
        return events

    def _staged(
        self, lane: Lane, lines: Lines, pages: Ids, frames: Ids, outer: torch.cuda.Stream
    ) -> list[torch.cuda.Event]:
        """Chunk by chunk: kernel, then copies, in a store; copies, then kernel, in a load."""
        to_host = lane is self._store
        view, count, first = lines.view, len(pages), lane.next_slot
        compute, kernel_stream = lane.compute[first], lane.compute[first - 1]
        pages, frames = sort_by_frame(pages, frames)
        # A kernel that moves the beginning straight away keeps the link busy while the rest is planned.
        groups = int(self._small and starts_by_kernel(view))
        head = count if groups else self._small * head_pages(view, count)
        host, ids = lane.ids.put(pages, frames[:head])
        events: list[torch.cuda.Event] = []
        lane.follow(outer.cuda_stream, compute if to_host else lane.copies, kernel_stream)
        if head:
            self._launch_direct(lane, lines, groups or 1, (host, host + 8 * count, head), kernel_stream)
        if groups:
            events.append(lane.event(kernel_stream))
            # Nothing shares the link with the layers that the model waits for.
            lane.follow(kernel_stream, lane.copies)
        elif head:
            pages, frames = pages[head:], frames[head:]
            host, ids = host + 8 * head, ids + 8 * head
        self._driver.copy(ids, host, 8 * len(pages), compute)
        lane.follow(compute, *lane.compute)
        chunks = lines.cuts.get(frames, lane.slot_bytes, groups, Ramp.UP if to_host else Ramp.DOWN)
        plan = plan_staged(chunks, frames, lane.slots, first, self._addresses.edges)
        kernels = self._kernels.all(view.tables, to_dense=to_host, direct=False)
        launches = LaunchTables(self._driver, kernels, lines, chunks, lane, ids)
        copies = CopyTables(self._driver, plan, to_host)
        for chunk in range(len(chunks.launches)):
            slot = lane.next_slot
            compute, free = lane.compute[slot], lane.free[slot]
            lane.next_slot = (slot + 1) % len(lane.slots)
            if to_host:
                self._driver.wait(compute, free)
                launches.submit(chunk)
                lane.follow(compute, lane.copies)
                copies.submit(chunk, lane.copies)
                self._driver.record(free, lane.copies)
            else:
                self._driver.wait(lane.copies, free)
                copies.submit(chunk, lane.copies)
                lane.follow(lane.copies, compute)
                launches.submit(chunk)
                self._driver.record(free, compute)
            if chunk + 1 in chunks.group_ends:
                if not to_host:
                    lane.join(compute)
                elif head:
                    lane.follow(kernel_stream, lane.copies)
                events.append(lane.event(lane.copies if to_host else compute))
        lane.ids.taken(events[-1])
        return events

    @contextmanager
    def _ready(self, lane: Lane, outer: torch.cuda.Stream) -> Iterator[None]:
        """Make the context current; after an error, wait for what was submitted, then raise it as CopyError."""
        if self._geometry is None:
            raise ClosedError("the copy engine is closed")
        with self._driver:
            try:
                yield
            except BaseException:
                with suppress(CopyError, RuntimeError):
                    lane.synchronize()
                    outer.synchronize()
                with _device_errors():
                    raise

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if not isinstance(stream, torch.cuda.Stream):
            raise UsageError(f"stream is {stream!r}; give a torch.cuda.Stream, or None for the current one")
        if stream.device != self._device:
            raise UsageError(f"the stream belongs to {stream.device} and the pool to {self._device}")
        return stream


@contextmanager
def _device_errors() -> Iterator[None]:
    """Turn torch's device errors, which are RuntimeErrors, into CopyError."""
    try:
        yield
    except RuntimeError as error:
        raise CopyError(f"the device reported an error during a copy: {error}") from error
