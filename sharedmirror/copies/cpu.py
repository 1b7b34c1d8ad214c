"""The engine for CPU tensors: whole batches at a time, complete on return.

A call becomes jobs, which a few threads of the engine's own share by bytes. A job is one of

- a plain copy, where both ids rise together for 32 KiB or more (a single large slice included);
- a gather into a run of pages, or a scatter out of one, where one side is in runs;
- a gather into a small buffer and a scatter out of it, where both sides are scattered. This touches
  memory twice, but costs no Python call per page.

Gathers and scatters are torch operations on the widest words that fit, kept below the size from which
torch would spread them over its own threads: those wait for each other after every operation, and
where another process holds one of the cores each wait costs a time slice (measured: 0.05 GB/s instead
of 3). All of these operations let the interpreter lock go while they move bytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sharedmirror.copies.interface import Event, Geometry, PlaneGeometry, Stream
from sharedmirror.copies.pairs import Ids, merge_runs
from sharedmirror.copies.reference import CompletedEvent, Done

__all__ = ["CpuEngine"]

LONG_RUN_BYTES = 32 << 10
"""From here on the fixed cost of one Python copy is small beside the copy itself."""
PIECE_BYTES = 4 << 20
"""Longest single copy, so that the threads end together."""
BATCH_BYTES = 1 << 20
"""Copies are handed to a thread in batches, so that preparing them takes little time beside them."""
PARALLEL_BYTES = 1 << 20
"""Waking a thread costs about as much as copying half of this."""
SERIAL_WORDS = (32 << 10) - 1
"""Torch spreads operations on more words than this over its own threads."""
BUFFER_BYTES = 512 << 10
"""Fits the second-level cache beside the data that streams through it."""
MAX_THREADS = 8

_WORDS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Bytes = npt.NDArray[np.uint8]
Batch = tuple[int, list[tuple[int, int, int]]]
"""Rows in all, and (source row, target row, rows) of each copy."""
Job = tuple[int, Callable[[], object]]
"""Bytes to move, and what moves them."""


@dataclass(frozen=True, eq=False)
class _Plane:
    """One plane in two dresses: numpy bytes for plain copies, torch words for gathers and scatters."""

    device_bytes: Bytes
    host_bytes: Bytes
    device_words: torch.Tensor
    host_words: torch.Tensor
    slice_bytes: int

    def bytes(self, to_host: bool) -> tuple[Bytes, Bytes]:
        """Source and target."""
        return (self.device_bytes, self.host_bytes) if to_host else (self.host_bytes, self.device_bytes)

    def words(self, to_host: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and target."""
        return (self.device_words, self.host_words) if to_host else (self.host_words, self.device_words)


class CpuEngine:
    """Copies between CPU tensors; ``stream`` is ignored, every call is complete on return.

    ``threads`` defaults to torch's number, at most 8.
    """

    def __init__(self, geometry: Geometry, threads: int | None = None) -> None:
        self._planes = [_dress(plane) for plane in geometry.planes]
        self._threads = max(1, min(MAX_THREADS, torch.get_num_threads() if threads is None else threads))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def store(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Done:
        """Copy device to host."""
        return self._move(device_pages, host_frames, to_host=True)

    def load(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Done:
        """Copy host to device."""
        return self._move(host_frames, device_pages, to_host=False)

    def load_with_events(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> list[Event]:
        """Copy host to device; every event is complete."""
        self.load(device_pages, host_frames, stream)
        return [CompletedEvent() for _ in self._planes]

    def drain(self) -> None:
        """Return at once: nothing outlasts its call."""

    def close(self) -> None:
        """Let go of every tensor and thread."""
        self._planes = []
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _move(self, source: Ids, target: Ids, *, to_host: bool) -> Done:
        rows = len(target)
        if rows == 0:
            return Done()
        total = rows * sum(plane.slice_bytes for plane in self._planes)
        threads = self._threads if total >= PARALLEL_BYTES else 1
        shares: list[list[Job]] = [[] for _ in range(threads)]
        begun = 0
        for job in self._jobs(source, target, to_host):
            shares[min(threads - 1, begun * threads // total)].append(job)
            begun += job[0]
        others = [self._executor().submit(_run, share) for share in shares[1:] if share]
        try:
            _run(shares[0])
        finally:
            # Also after an error: nothing may outlast the call.
            for other in others:
                other.result()
        return Done()

    def _jobs(self, source: Ids, target: Ids, to_host: bool) -> Iterator[Job]:
        runs = [array.tolist() for array in merge_runs(source, target)]
        mean_rows = len(target) / len(runs[0])
        gathers, scatters = _Runs(target, source), _Runs(source, target)
        batches: dict[int, list[Batch]] = {}
        for plane in self._planes:
            worth = 2 * LONG_RUN_BYTES / plane.slice_bytes
            if mean_rows * plane.slice_bytes >= LONG_RUN_BYTES:
                if plane.slice_bytes not in batches:
                    batches[plane.slice_bytes] = _batches(runs, plane.slice_bytes)
                yield from _copies(*plane.bytes(to_host), batches[plane.slice_bytes])
            elif gathers.mean_rows >= worth:
                yield from _gathers(*plane.words(to_host), gathers, plane.slice_bytes)
            elif scatters.mean_rows >= worth:
                yield from _scatters(*plane.words(to_host), scatters, plane.slice_bytes)
            else:
                yield from _moves(*plane.words(to_host), source, target, plane.slice_bytes)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="sharedmirror-copy")
            return self._pool


class _Runs:
    """Rows that are adjacent on one side, with the ids of the other side in the same order."""

    def __init__(self, rows: Ids, others: Ids) -> None:
        order = np.argsort(rows, kind="stable")
        rows, others = rows[order], others[order]
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        starts = np.concatenate((np.zeros(1, np.int64), cuts))
        self.starts: list[int] = rows[starts].tolist()
        self.bounds: list[int] = [*starts.tolist(), len(rows)]
        self.others = torch.from_numpy(others)
        self.mean_rows = len(rows) / len(starts)

    def pieces(self, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, ids of the other side) for pieces of at most ``step`` rows."""
        for at, start in enumerate(self.starts):
            low, high = self.bounds[at], self.bounds[at + 1]
            for piece in range(low, high, step):
                yield start + piece - low, self.others[piece : min(piece + step, high)]


def _batches(runs: list[list[int]], width: int) -> list[Batch]:
    """Return (rows, [(source row, target row, rows), ...]) for batches of about BATCH_BYTES."""
    step = max(1, PIECE_BYTES // width)
    enough = max(1, BATCH_BYTES // width)
    batches: list[Batch] = []
    held: list[tuple[int, int, int]] = []
    held_rows = 0
    for source_row, target_row, rows in zip(*runs, strict=True):
        for at in range(0, rows, step):
            count = min(step, rows - at)
            held.append((source_row + at, target_row + at, count))
            held_rows += count
            if held_rows >= enough:
                batches.append((held_rows, held))
                held, held_rows = [], 0
    if held:
        batches.append((held_rows, held))
    return batches


def _copies(source: Bytes, target: Bytes, batches: list[Batch]) -> Iterator[Job]:
    width = source.shape[1]
    for low in range(0, width, PIECE_BYTES):
        part = slice(low, min(low + PIECE_BYTES, width))
        for rows, batch in batches:
            yield rows * (part.stop - low), _copy(source[:, part], target[:, part], batch)


def _copy(source: Bytes, target: Bytes, batch: list[tuple[int, int, int]]) -> Callable[[], object]:
    def copy() -> None:
        for source_row, target_row, rows in batch:
            target[target_row : target_row + rows] = source[source_row : source_row + rows]

    return copy


def _gathers(source: torch.Tensor, target: torch.Tensor, runs: _Runs, slice_bytes: int) -> Iterator[Job]:
    for start, ids in runs.pieces(_serial_rows(source)):
        yield len(ids) * slice_bytes, _gather(source, ids, target[start : start + len(ids)])


def _gather(source: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.index_select(source, 0, ids, out=out)


def _scatters(source: torch.Tensor, target: torch.Tensor, runs: _Runs, slice_bytes: int) -> Iterator[Job]:
    for start, ids in runs.pieces(_serial_rows(source)):
        yield len(ids) * slice_bytes, _scatter(target, ids, source[start : start + len(ids)])


def _scatter(target: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.index_copy_(0, ids, source)


def _moves(source: torch.Tensor, target: torch.Tensor, taken: Ids, given: Ids, slice_bytes: int) -> Iterator[Job]:
    step = _serial_rows(source)
    both = zip(torch.from_numpy(taken).split(step), torch.from_numpy(given).split(step), strict=True)
    for source_ids, target_ids in both:
        yield len(source_ids) * slice_bytes, _through_buffer(source, source_ids, target, target_ids)


def _through_buffer(
    source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor
) -> Callable[[], object]:
    def move() -> None:
        buffer = _buffer(len(source_ids), source)
        torch.index_select(source, 0, source_ids, out=buffer)
        target.index_copy_(0, target_ids, buffer)

    return move


_local = threading.local()


def _buffer(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return this thread's buffer as ``rows`` rows of ``like``."""
    need = rows * like.shape[1] * like.element_size()
    held: torch.Tensor | None = getattr(_local, "held", None)
    if held is None or held.numel() < need:
        held = _local.held = torch.empty(max(need, BUFFER_BYTES), dtype=torch.uint8)
    return held[:need].view(like.dtype).view(rows, like.shape[1])


def _serial_rows(words: torch.Tensor) -> int:
    row = words.shape[1]
    return max(1, min(SERIAL_WORDS // row, BUFFER_BYTES // (row * words.element_size())))


def _run(jobs: list[Job]) -> None:
    for _, job in jobs:
        job()


def _dress(plane: PlaneGeometry) -> _Plane:
    device, host = plane.device, plane.host
    common = math.gcd(
        plane.slice_bytes, plane.device_base, plane.device_stride, plane.host_base, plane.host_stride,
        device.storage_offset(), host.storage_offset(),
    )  # fmt: skip
    word = next(dtype for size, dtype in _WORDS if common % size == 0)
    return _Plane(device.numpy(), host.numpy(), device.view(word), host.view(word), plane.slice_bytes)
