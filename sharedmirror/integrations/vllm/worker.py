"""A rank's side: copies between vLLM's blocks and the pools, in threads of its own.

What it keeps:

- vLLM's own thread is never made to wait for the daemon; ``wait`` waits for copies only;
- a load is reported as done only when every byte has arrived, and as failed only when no byte of it can
  arrive any more: vLLM gives the blocks to another request then;
- a store is committed when its copies are complete. One that cannot be made is not committed, so nobody
  ever reads it; vLLM is told that it is over, since it takes no other answer;
- orders from another instance of the daemon are refused;
- between ``pause`` and ``resume`` nothing reads or writes the device's blocks: they may be unmapped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from sharedmirror.errors import InstanceChanged, SharedMirrorError
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.integrations.vllm.orders import (
    LoadOrder,
    Pairs,
    StoreOrder,
    load_pairs,
    split_groups,
    store_pairs,
)
from sharedmirror.integrations.vllm.places import MirrorKeeper, Place
from sharedmirror.transfers import Transfer
from sharedmirror.types import Lease

__all__ = ["SharedMirrorWorker"]

_COMMIT_S = 2.0
_RETRY_S = 0.2

_log = init_logger("vllm.sharedmirror")


@dataclass(eq=False)
class _Job:
    """One order under way."""

    number: int
    blocks: GPULoadStoreSpec
    order: StoreOrder | LoadOrder
    ready: Any
    """What the device must have done before the first copy: a CUDA event, or None."""
    begun: float = field(default_factory=time.monotonic)
    copied: threading.Event = field(default_factory=threading.Event)
    settled: bool = False
    failed: bool = False
    bytes: int = 0
    ended: float = 0.0
    commits: list[tuple[Place, Lease]] = field(default_factory=list)

    def over(self, *, failed: bool = False) -> None:
        """No byte moves any more."""
        self.failed = self.failed or failed
        self.ended = time.monotonic()
        self.copied.set()


class _Lane:
    """A thread that does jobs in order."""

    def __init__(self, name: str, work: Callable[[_Job], None]) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._work(job)
            except Exception as error:  # the lane must live on, and vLLM must hear that the job is over
                _complain(self._thread.name, error)
                job.over(failed=True)
                job.settled = True


class SharedMirrorWorker(OffloadingWorker):
    """Copies for one rank. ``hide_failures`` is set by a connector that asks for ``take_failed`` itself."""

    def __init__(self, keeper: MirrorKeeper, device: torch.device, blocks_per_chunk: int, options: Options) -> None:
        self.hide_failures = False
        self._keeper = keeper
        self._device = device
        self._per_chunk = blocks_per_chunk
        self._options = options
        self._jobs: dict[int, _Job] = {}
        self._failed: set[str] = set()
        self._away = False
        self._closing = False
        self._paused = False
        self._stores = _Lane("sharedmirror-store", self._store)
        self._loads = _Lane("sharedmirror-load", self._load)
        self._commits = _Lane("sharedmirror-commit", self._commit)
        self._local = threading.local()

    # -- vLLM's thread ---------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begin to store blocks."""
        return self._submit(job_id, src_spec, dst_spec, self._stores)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begin to load blocks."""
        return self._submit(job_id, dst_spec, src_spec, self._loads)

    def _submit(self, number: int, blocks: GPULoadStoreSpec, order: LoadStoreSpec, lane: _Lane) -> bool:
        if not isinstance(order, (StoreOrder, LoadOrder)):
            raise TypeError(f"an order of this tier was expected, not {order!r}")
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        job = self._jobs[number] = _Job(number, blocks, order, ready)
        lane.put(job)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the orders that are over since the last call."""
        results = []
        for job in list(self._jobs.values()):
            if not job.copied.is_set() or not (job.settled or self._away):
                continue
            del self._jobs[job.number]
            success = True
            if isinstance(job.order, LoadOrder) and job.failed:
                self._failed.add(job.order.req_id)
                success = self.hide_failures
            size, seconds = (job.bytes, job.ended - job.begun) if job.bytes else (None, None)
            results.append(TransferResult(job.number, success, size, seconds))
        return results

    def take_failed(self) -> set[str]:
        """Return the requests whose loads failed, of those that ``get_finished`` has reported."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Block until the copies of these orders are over."""
        for number in job_ids:
            job = self._jobs.get(number)
            if job is not None:
                job.copied.wait()

    def pause(self) -> None:
        """Finish the copies under way, and until ``resume`` begin no other: stores are dropped, loads fail."""
        self._paused = True
        self.wait(set(self._jobs))

    def resume(self) -> None:
        """Copy again."""
        self._paused = False

    def shutdown(self) -> None:
        """Finish the copies under way, drop what has not begun, and leave the pools."""
        self._closing = True
        for lane in (self._stores, self._loads, self._commits):
            lane.close(timeout_s=_COMMIT_S + 1)
        self._keeper.close()

    # -- the lanes -------------------------------------------------------------------------------

    def _store(self, job: _Job) -> None:
        failed = False
        transfers: list[Transfer] = []
        try:
            if not (self._closing or self._paused):
                self._copy_out(job, transfers)
        except Exception as error:
            failed = True
            _complain("store", error)
            self._drain_device()
        failed = not self._over(transfers, "store") or failed
        if failed or self._closing:
            job.commits.clear()
        job.over(failed=failed)
        self._commits.put(job)

    def _copy_out(self, job: _Job, transfers: list[Transfer]) -> None:
        order = job.order
        assert isinstance(order, StoreOrder)
        with self._stream(job) as stream:
            for at, group, blocks, _ in self._groups(job):
                place = self._place(at, group.instance)
                pairs = store_pairs(blocks, group.lease.pages, self._per_chunk)
                transfers.append(place.mirror.store(group.lease, pairs, stream))
                job.commits.append((place, group.lease))
                job.bytes += _bytes(place, pairs)

    def _commit(self, job: _Job) -> None:
        for place, lease in job.commits:
            while not self._closing:
                try:
                    place.mirror.commit(lease, timeout_s=_COMMIT_S)
                    self._away = False
                    break
                except SharedMirrorError as error:
                    if not error.retryable:
                        _complain("commit", error)
                        break
                    self._away = True  # nobody waits for a daemon that is away
                    time.sleep(_RETRY_S)
        job.settled = True

    def _load(self, job: _Job) -> None:
        failed = False
        transfers: list[Transfer] = []
        try:
            late = time.monotonic() - job.begun > self._options.load_timeout_s
            if self._closing or self._paused or (late and self.hide_failures):  # the stock connector takes no failure
                raise TimeoutError("the load was not begun in time")
            self._copy_in(job, transfers)
        except Exception as error:
            failed = True
            _complain("load", error)
            self._drain_device()
        failed = not self._over(transfers, "load") or failed
        job.settled = True
        job.over(failed=failed)

    def _copy_in(self, job: _Job, transfers: list[Transfer]) -> None:
        with self._stream(job) as stream:
            for at, group, blocks, first in self._groups(job):
                pages = tuple(page for _, run in group.runs for page in run)
                pairs = load_pairs(blocks, pages, self._per_chunk, first)
                for pinned, run in group.runs:
                    place = self._place(at, pinned.instance)
                    part = pairs[np.isin(pairs[:, 1] // self._per_chunk, run)]
                    transfers.append(place.mirror.load(pinned, part, stream))
                    job.bytes += _bytes(place, part)

    def _over(self, transfers: list[Transfer], what: str) -> bool:
        """Wait for all copies, also after an error: one under way goes on in the blocks. Say whether all went well."""
        good = True
        for transfer in transfers:
            try:
                transfer.wait()
            except SharedMirrorError as error:
                good = False
                _complain(what, error)
        return good

    def _drain_device(self) -> None:
        """A call that failed half way may have left copies behind that no transfer stands for."""
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)

    def _groups(self, job: _Job) -> Iterator[tuple[int, Any, Any, int]]:
        """Yield (group, its order, device blocks, index of the first block) for groups with blocks."""
        blocks, groups = job.blocks, job.order.groups
        parts = split_groups(blocks.block_ids, list(blocks.group_sizes), list(blocks.block_indices), len(groups))
        for at, (part, first) in enumerate(parts):
            if len(part):
                if groups[at] is None:
                    raise InstanceChanged(f"nothing of cache group {at} is held any more")
                yield at, groups[at], part, first

    def _place(self, at: int, instance: str) -> Place:
        places = self._keeper.places
        if places is None or places[at].instance != instance:
            raise InstanceChanged("this rank is not attached to the daemon that the order is about")
        return places[at]

    @contextlib.contextmanager
    def _stream(self, job: _Job) -> Iterator[Any]:
        """Give this lane's own stream, behind what the device had to do when the order came."""
        if self._device.type != "cuda":
            yield None
            return
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)
        self._local.stream.wait_event(job.ready)
        yield self._local.stream


def _bytes(place: Place, pairs: Pairs) -> int:
    return len(pairs) * place.mirror.bytes_per_host_page() // place.mirror.frames_per_page


def _complain(what: str, error: Exception) -> None:
    if isinstance(error, (SharedMirrorError, TimeoutError)):
        _log.warning("event=%s_failed reason=%r", what, str(error))
    else:
        _log.exception("event=%s_failed", what)
