"""The straightforward engine for CUDA tensors: one asynchronous copy per run of pages and plane.

Work goes on the caller's stream itself, which makes its order exact. Only where that is the legacy
null stream, on which nothing of ours may run, it goes on a stream of our own that waits for the null
stream and that the null stream waits for.

Every copy is between contiguous bytes: torch moves anything else through temporaries, which would
neither be asynchronous nor ordered. A copy that failed to be submitted leaves earlier ones of its
call under way; they are waited for before the error is raised.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sharedmirror.copies.interface import Event, Geometry, PlaneGeometry, Stream
from sharedmirror.copies.pairs import Ids, merge_runs
from sharedmirror.errors import CopyError, UsageError

__all__ = ["CudaCompletion", "CudaEngine"]

_POLL_S = 50e-6
_TRACKED_EVENTS = 64


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
        deadline, pause = time.monotonic() + timeout_s, _POLL_S
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1e-3)
        return True


class CudaEngine:
    """Copies between CUDA tensors and registered host memory with ``copy_``."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry: Geometry | None = geometry
        self._device = geometry.device
        self._own = torch.cuda.Stream(self._device)
        self._lock = threading.Lock()
        self._events: list[torch.cuda.Event] = []

    def store(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> CudaCompletion:
        """Copy device to host, as if enqueued on ``stream``; raises CopyError."""
        return CudaCompletion(self._submit(device_pages, host_frames, stream, to_host=True)[-1])

    def load(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> CudaCompletion:
        """Copy host to device, as if enqueued on ``stream``; raises CopyError."""
        return CudaCompletion(self._submit(device_pages, host_frames, stream, to_host=False)[-1])

    def load_with_events(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> list[Event]:
        """Like load; one event per plane, each recorded once and never again."""
        recorded = self._submit(device_pages, host_frames, stream, to_host=False, every_plane=True)
        return [recorded[count - 1] for count in self._open().event_after]

    def drain(self) -> None:
        """Block until every copy ever submitted is complete; raises CopyError."""
        with self._lock:
            events, self._events = self._events, []
        with _device_errors():
            for event in events:
                event.synchronize()
            self._own.synchronize()

    def close(self) -> None:
        """Drain, and let go of every tensor; raises CopyError, and keeps them then."""
        self.drain()
        self._geometry = None

    def _open(self) -> Geometry:
        if self._geometry is None:
            raise UsageError("the copy engine is closed")
        return self._geometry

    def _submit(
        self, device_pages: Ids, host_frames: Ids, stream: Stream, *, to_host: bool, every_plane: bool = False
    ) -> list[torch.cuda.Event]:
        """Enqueue all copies; return the events recorded after each plane, or the last one alone."""
        geometry = self._open()
        runs = [array.tolist() for array in merge_runs(device_pages, host_frames)]
        events: list[torch.cuda.Event] = []
        with _device_errors(), self._ordered(stream) as work:
            try:
                for plane in (geometry.planes[index] for index in geometry.order):
                    for page, frame, rows in zip(*runs, strict=True):
                        _copy_run(plane, page, frame, rows, geometry.host_edges, to_host)
                    if every_plane:
                        events.append(work.record_event())
                if not every_plane:
                    events.append(work.record_event())
            except BaseException:
                work.synchronize()
                raise
        self._track(events[-1])
        return events

    @contextmanager
    def _ordered(self, stream: Stream) -> Iterator[torch.cuda.Stream]:
        """Make current the stream on which work counts as enqueued on ``stream``."""
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if not isinstance(stream, torch.cuda.Stream):
            raise UsageError(f"stream is {stream!r}; give a torch.cuda.Stream, or None for the current one")
        if stream.device != self._device:
            raise UsageError(f"the stream belongs to {stream.device} and the pool to {self._device}")
        if stream.cuda_stream != 0:
            with torch.cuda.stream(stream):
                yield stream
            return
        self._own.wait_stream(stream)
        try:
            with torch.cuda.stream(self._own):
                yield self._own
        finally:
            stream.wait_stream(self._own)

    def _track(self, event: torch.cuda.Event) -> None:
        with self._lock:
            if len(self._events) >= _TRACKED_EVENTS:
                self._events = [each for each in self._events if not each.query()]
            self._events.append(event)


def _copy_run(plane: PlaneGeometry, page: int, frame: int, rows: int, edges: tuple[int, ...], to_host: bool) -> None:
    width, stride = plane.slice_bytes, plane.host_stride
    if rows > 1 and not width == stride == plane.device_stride:
        for row in range(rows):
            _copy_run(plane, page + row, frame + row, 1, edges, to_host)
        return
    device, host = plane.device[page : page + rows].view(-1), plane.host[frame : frame + rows].view(-1)
    start, low = plane.host_base + frame * stride, 0
    for edge in _edges_between(edges, start, rows * width):
        _copy(device[low : edge - start], host[low : edge - start], to_host)
        low = edge - start
    _copy(device[low:], host[low:], to_host)


def _copy(device: torch.Tensor, host: torch.Tensor, to_host: bool) -> None:
    if to_host:
        host.copy_(device, non_blocking=True)
    else:
        device.copy_(host, non_blocking=True)


def _edges_between(edges: tuple[int, ...], start: int, length: int) -> tuple[int, ...]:
    """Return the edges strictly inside ``length`` bytes from address ``start``."""
    return edges[bisect_right(edges, start) : bisect_right(edges, start + length - 1)]


@contextmanager
def _device_errors() -> Iterator[None]:
    """Turn torch's device errors, which are RuntimeErrors, into CopyError."""
    try:
        yield
    except RuntimeError as error:
        raise CopyError(f"the device reported an error during a copy: {error}") from error
