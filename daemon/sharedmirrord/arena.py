"""The arena: the shared memory for page data, with its huge pages, its prefault and its pins.

Invariants: an arena that was not created whole leaves nothing behind; no byte counts as ready before
its page exists, so that a full /dev/shm is a MemoryFault and never a SIGBUS; an arena is unmapped only
when no thread works on it.

It must not import torch, and CUDA only for ``pin="cuda"``. Calls that take long (``prefault``,
``close``) belong in a thread: the kernel works without the GIL there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Literal

from sharedmirror.errors import ClosedError, MemoryFault, UsageError
from sharedmirror.types import REGION_ALIGNMENT_BYTES
from sharedmirrord import memory, registration, syscalls
from sharedmirrord.core.regions import divide
from sharedmirrord.registration import CudaRegistration
from sharedmirrord.segment import Segment, leave

HugePages = Literal["auto", "always", "never"]
Pin = Literal["mlock", "cuda", "none"]

PIECE_BYTES = 64 << 20
"""What one thread populates at a time: the grain of progress and of stopping. A multiple of 2 MiB."""
MAX_THREADS = 32

_log = logging.getLogger(__name__)


class Arena:
    """The shared memory for page data: created at once, populated and pinned by ``prefault``.

    ``bytes_ready`` and ``pinned_bytes`` may be read from any thread at any time; setting ``stop`` ends
    a ``prefault`` after the pieces under way. As a context manager it closes and, unless ``keep`` is
    set, unlinks at the end.
    """

    def __init__(
        self,
        segment: Segment,
        address: int,
        *,
        huge: bool,
        must_be_huge: bool,
        pin: Pin,
        threads: int,
        cuda: CudaRegistration | None,
    ) -> None:
        self.keep = False
        self.stop = threading.Event()
        self._segment = segment
        self._address = address
        self._huge = huge
        self._must_be_huge = must_be_huge
        self._pin = pin
        self._threads = threads
        self._cuda = cuda
        self._busy = threading.Lock()
        self._count = threading.Lock()
        self._ready_bytes = 0
        self._pinned_bytes = 0
        self._huge_share = 0.0

    @classmethod
    def create(
        cls,
        name: str,
        size_bytes: int,
        *,
        huge_pages: HugePages = "auto",
        pin: Pin = "mlock",
        threads: int | None = None,
    ) -> Arena:
        """Create the arena ``name`` of ``size_bytes`` (a multiple of 2 MiB), without pages yet.

        ``threads`` is how many populate it; by default one per core that this process may use, at most
        32. Raises MemoryFault when the memory, the huge pages ("always") or CUDA cannot be had, and
        then leaves nothing behind.
        """
        if size_bytes <= 0 or size_bytes % REGION_ALIGNMENT_BYTES:
            raise UsageError(f"an arena has a positive multiple of {REGION_ALIGNMENT_BYTES} bytes, not {size_bytes}")
        if huge_pages not in ("auto", "always", "never") or pin not in ("mlock", "cuda", "none"):
            raise UsageError(f"huge_pages={huge_pages!r} and pin={pin!r} must be auto|always|never and mlock|cuda|none")
        if threads is not None and threads < 1:
            raise UsageError(f"threads={threads} must be at least 1")
        free = memory.shm_free()
        if free is not None and free < size_bytes:
            raise memory.shortage(name, size_bytes, 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return cls._over(lambda: Segment.create(name, size_bytes), size_bytes, huge_pages, pin, threads)

    @classmethod
    def adopt(
        cls,
        name: str,
        size_bytes: int,
        *,
        huge_pages: HugePages = "auto",
        pin: Pin = "mlock",
        threads: int | None = None,
    ) -> Arena:
        """Take over the arena ``name`` that an earlier daemon of this user left, with its pages.

        ``prefault`` then maps and pins them. Raises MemoryFault when it is gone or has another size.
        """
        with Segment.open(name) as found:
            if found.size_bytes != size_bytes:
                raise MemoryFault(f"the arena {name} has {found.size_bytes} bytes, its records say {size_bytes}")
        return cls._over(lambda: Segment.open(name), size_bytes, huge_pages, pin, threads)

    @classmethod
    def _over(
        cls, get: Callable[[], Segment], size_bytes: int, huge_pages: HugePages, pin: Pin, threads: int | None
    ) -> Arena:
        huge = _choose_huge_pages(huge_pages)
        with contextlib.ExitStack() as undo:
            cuda = undo.enter_context(contextlib.closing(CudaRegistration())) if pin == "cuda" else None
            segment = undo.enter_context(get())
            address = syscalls.map_aligned(segment.fd, size_bytes)
            undo.callback(syscalls.munmap, address, size_bytes)
            syscalls.madvise(address, size_bytes, syscalls.MADV_DONTDUMP)  # page contents belong in no core file
            if huge or huge_pages == "never":
                advice = syscalls.MADV_HUGEPAGE if huge else syscalls.MADV_NOHUGEPAGE
                syscalls.madvise(address, size_bytes, advice)
            _bind(address, size_bytes)
            undo.pop_all()
        cores = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        must = huge_pages == "always"
        arena = cls(segment, address, huge=huge, must_be_huge=must, pin=pin, threads=threads or cores, cuda=cuda)
        arena.keep = segment.keep
        return arena

    @property
    def name(self) -> str:
        """The name of the shared memory object."""
        return self._segment.name

    @property
    def fd(self) -> int:
        """The descriptor that clients get a duplicate of; -1 once closed."""
        return self._segment.fd

    @property
    def size_bytes(self) -> int:
        """The size of the arena in bytes."""
        return self._segment.size_bytes

    @property
    def bytes_ready(self) -> int:
        """Bytes whose pages exist by now; they are not in order until all are there."""
        return self._ready_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are locked or registered by now."""
        return self._pinned_bytes

    @property
    def pin(self) -> Pin:
        """How the arena is pinned: what was asked for, or "none" after ``mlock`` was refused."""
        return self._pin

    def huge_page_share(self) -> float:
        """Return the share (0 to 1) of huge pages, as last measured: after the first piece and at the end."""
        return self._huge_share

    def prefault(self, progress: Callable[[int], None] | None = None) -> bool:
        """Populate and pin the arena in threads; returns False when ``stop`` ended it early.

        ``progress`` is called in this thread with ``bytes_ready`` after each piece; it must not close
        the arena. Raises MemoryFault when /dev/shm is full, when ``huge_pages="always"`` got none, and
        when CUDA refuses. The arena then is to be closed.
        """
        report = progress or (lambda ready: None)
        with self._busy:
            if not self._address:
                raise ClosedError(f"the arena {self.name} is closed")
            if self._ready_bytes == self.size_bytes:
                return self._cuda is None or self._register(self._cuda)
            if self.stop.is_set():
                return False
            self._ready_bytes = self._pinned_bytes = 0  # an earlier run was stopped or failed
            if self._pin == "mlock":
                self._lock()
            # The first piece goes alone: it shows a full /dev/shm or missing huge pages before much is taken.
            if not self._prepare(0):
                return False
            self._measure_huge_pages()
            report(self.bytes_ready)
            if not self._prepare_rest(report):
                return False
            self._measure_huge_pages()
            return self._cuda is None or self._register(self._cuda)

    def close(self) -> None:
        """Stop a prefault, undo the pins and unmap; waits for the pieces under way. May be called again."""
        self.stop.set()
        with self._busy:
            address, self._address = self._address, 0
            if not address:
                return
            try:
                if self._cuda is not None:
                    self._cuda.close()
            finally:
                syscalls.munmap(address, self.size_bytes)
                self._pinned_bytes = 0
                self._segment.close()

    def unlink(self) -> None:
        """Remove the arena's name; processes that map it keep it. May be called again."""
        self._segment.unlink()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self, error)

    def _prepare_rest(self, report: Callable[[int], None]) -> bool:
        with ThreadPoolExecutor(self._threads, thread_name_prefix="prefault") as pool:
            # In turns from each NUMA node's part, so that the memory of all of them is filled at once.
            parts = divide(self.size_bytes, memory.memory_nodes())
            part_bytes = parts[0][2] if parts else self.size_bytes
            offsets = sorted(range(PIECE_BYTES, self.size_bytes, PIECE_BYTES), key=lambda offset: offset % part_bytes)
            pieces = [pool.submit(self._prepare, offset) for offset in offsets]
            try:
                for piece in as_completed(pieces):
                    if not piece.result():
                        break
                    report(self.bytes_ready)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return self.bytes_ready == self.size_bytes

    def _prepare(self, offset: int) -> bool:
        """Populate one piece; returns False when told to stop. Runs in many threads."""
        if self.stop.is_set():
            return False
        length = min(PIECE_BYTES, self.size_bytes - offset)
        try:
            syscalls.populate(self.fd, self._address + offset, offset, length)
        except OSError as error:
            raise memory.shortage(self.name, self.size_bytes, self.bytes_ready, error) from error
        with self._count:
            self._ready_bytes += length
            if self._pin == "mlock":
                self._pinned_bytes += length
        return True

    def _lock(self) -> None:
        """Lock the mapping before it has pages: locking piece by piece would stop the other threads each time."""
        refusal = syscalls.mlock_on_fault(self._address, self.size_bytes)
        if refusal:
            self._pin = "none"
            _log.warning(
                "event=mlock_refused arena=%s errno=%s remedy='LimitMEMLOCK=infinity in the unit, "
                "`ulimit -l unlimited`, or docker run --ulimit memlock=-1; workers pin their regions anyway'",
                self.name,
                errno.errorcode.get(refusal, refusal),
            )

    def _register(self, cuda: CudaRegistration) -> bool:
        for offset in range(self._pinned_bytes, self.size_bytes, registration.CHUNK_BYTES):
            if self.stop.is_set():
                return False
            length = min(registration.CHUNK_BYTES, self.size_bytes - offset)
            try:
                cuda.register(self._address + offset, length)
            except MemoryFault:
                self._pinned_bytes = 0
                raise
            self._pinned_bytes += length
        return True

    def _measure_huge_pages(self) -> None:
        # Without huge pages the answer is known, and the walk over small pages would take long.
        if not self._huge:
            return
        self._huge_share = memory.huge_bytes(self._address, self.size_bytes) / self.bytes_ready
        if self._huge_share == 1.0:
            return
        if self._must_be_huge and not self._huge_share:
            raise MemoryFault(
                f"huge_pages=always, but {self.name} got none: free memory lies in small pieces; "
                f"run `echo 1 > /proc/sys/vm/compact_memory` as root, or use huge_pages=auto"
            )
        _log.warning("event=few_huge_pages arena=%s share=%.3f", self.name, self._huge_share)


def _choose_huge_pages(asked: HugePages) -> bool:
    """Return whether to ask for huge pages; raises MemoryFault when they must be had and cannot."""
    policy = memory.huge_policy()
    if asked == "never" or policy.allowed:
        return asked != "never"
    if asked == "always":
        raise MemoryFault(
            f"huge_pages=always, but {memory.SHM_DIR} gives none (huge={policy.mount}, kernel: {policy.kernel}); "
            f"{policy.remedy} ({memory.HUGE_PAGE_GAIN})"
        )
    _log.info("event=no_huge_pages remedy=%r gain=%r", policy.remedy, memory.HUGE_PAGE_GAIN)
    return False


def _bind(address: int, size_bytes: int) -> None:
    """Give each NUMA node with memory its part of the arena, where there are several."""
    refused: dict[int, int] = {}
    for node, start, end in divide(size_bytes, memory.memory_nodes()):
        if error := syscalls.prefer(address + start, end - start, node):
            refused[node] = error
    if refused:
        _log.warning(
            "event=mbind_refused nodes=%s errno=%s remedy='allow CAP_SYS_NICE, and these nodes in cpuset.mems; "
            "until then their parts of the arena lie where they are touched'",
            list(refused),
            ",".join(sorted({errno.errorcode.get(error, str(error)) for error in refused.values()})),
        )
