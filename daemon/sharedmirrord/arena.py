"""The shared memory that the daemon owns: segments by name, and the arena with its prefault and pins.

Invariants: a segment that was not created whole leaves nothing behind; no byte is handed out before
its page exists, so that a full /dev/shm is a MemoryFault and never a SIGBUS; only a name that still
means our own object is unlinked; an arena is unmapped only when no thread works on it.

It must not import torch, and CUDA only for ``pin="cuda"``. Calls that take long (``prefault``,
``close``) belong in a thread: the kernel works without the GIL there, because ctypes lets go of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Literal, TypeVar

import posix_ipc  # type: ignore[import-not-found, import-untyped, unused-ignore]

from sharedmirror.errors import ClosedError, MemoryFault, UsageError
from sharedmirror.types import REGION_ALIGNMENT_BYTES
from sharedmirrord import memory

HugePages = Literal["auto", "always", "never"]
Pin = Literal["mlock", "cuda", "none"]

PIECE_BYTES = 64 << 20
"""What one thread populates at a time: the grain of progress and of stopping. A multiple of 2 MiB."""
CUDA_CHUNK_BYTES = 16 << 30
"""What one driver call registers: the driver refuses 512 GiB, and long calls stall other processes."""
MAX_THREADS = 32
NAME_PREFIX = "/sharedmirror-"

_HUGE_BYTES = REGION_ALIGNMENT_BYTES
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_DONTDUMP, _MADV_POPULATE_WRITE = 14, 15, 16, 23
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MPOL_INTERLEAVE = 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.syscall.restype = ctypes.c_long

_Owner = TypeVar("_Owner", "Segment", "Arena")


class Segment:
    """One POSIX shared memory object of mode 0600; ``fd`` is its descriptor, close-on-exec.

    As a context manager it closes and, unless ``keep`` is set, unlinks at the end. ``keep`` is False
    for a segment that was created, True for one that was opened.
    """

    def __init__(self, name: str, fd: int, *, keep: bool) -> None:
        self.name = name
        self.fd = fd
        self.keep = keep
        stats = os.fstat(fd)
        self.size_bytes = stats.st_size
        self._identity = (stats.st_dev, stats.st_ino)
        self._maps: list[tuple[mmap.mmap, memoryview]] = []

    @classmethod
    def create(cls, name: str, size_bytes: int) -> Segment:
        """Create the object ``name`` (it begins with ``/sharedmirror-``) of ``size_bytes``, without pages yet.

        Raises MemoryFault when the name is taken or the object cannot be made.
        """
        _check_name(name)
        try:
            fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
        except posix_ipc.ExistentialError as error:
            raise MemoryFault(
                f"the shared memory {name} exists already; if no daemon uses it, remove {memory.SHM_DIR}{name}",
                name=name,
            ) from error
        except (posix_ipc.Error, OSError) as error:
            raise MemoryFault(f"the shared memory {name} cannot be created: {error}; check {memory.SHM_DIR}") from error
        segment = cls(name, fd, keep=False)
        try:
            os.fchmod(fd, 0o600)
            segment.grow(size_bytes)
        except BaseException:
            segment.unlink()
            segment.close()
            raise
        return segment

    @classmethod
    def open(cls, name: str) -> Segment:
        """Open the object ``name`` that another process of this user left; raises MemoryFault when that cannot be."""
        _check_name(name)
        try:
            fd = posix_ipc.SharedMemory(name).fd
        except (posix_ipc.Error, OSError) as error:
            raise MemoryFault(f"the shared memory {name} cannot be opened: {error}", name=name) from error
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid():
            os.close(fd)
            raise MemoryFault(f"the shared memory {name} belongs to uid {owner}, this is uid {os.geteuid()}", name=name)
        return cls(name, fd, keep=True)

    def grow(self, size_bytes: int) -> None:
        """Make the object ``size_bytes`` long, without pages for what is new; it never shrinks."""
        self._check_open()
        if size_bytes < self.size_bytes:
            raise UsageError(f"{self.name} has {self.size_bytes} bytes and cannot shrink to {size_bytes}")
        try:
            os.ftruncate(self.fd, size_bytes)
        except (OSError, OverflowError) as error:
            raise MemoryFault(
                f"{self.name} cannot be made {memory.show_bytes(size_bytes)} long: {error}",
                asked_bytes=size_bytes,
            ) from error
        self.size_bytes = size_bytes

    def map(self, offset: int, length: int) -> memoryview:
        """Map ``length`` bytes from ``offset`` (a multiple of the page size), with every page in place.

        The view is released by ``close``. Raises MemoryFault when /dev/shm is full; pages that were
        had by then stay with the segment.
        """
        self._check_open()
        if offset < 0 or length <= 0 or offset % mmap.ALLOCATIONGRANULARITY or offset + length > self.size_bytes:
            raise UsageError(
                f"{length} bytes at {offset} cannot be mapped: {self.name} has {self.size_bytes} bytes "
                f"and offsets are multiples of {mmap.ALLOCATIONGRANULARITY}"
            )
        mapping = mmap.mmap(self.fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        try:
            _populate(self.fd, _address_of(mapping), offset, length)
        except OSError as error:
            mapping.close()
            raise memory.shortage(self.name, length, 0, error) from error
        view = memoryview(mapping)
        self._maps.append((mapping, view))
        return view

    def close(self) -> None:
        """Release the views and the descriptor; the object and its name stay. May be called again."""
        maps, self._maps = self._maps, []
        for mapping, view in maps:
            # A slice that somebody still holds keeps its mapping; the memory goes with the last of them.
            with contextlib.suppress(BufferError):
                view.release()
                mapping.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the name, if it still is this object's; who has it open keeps it. May be called again."""
        try:
            stats = os.stat(memory.SHM_DIR + self.name, follow_symlinks=False)
        except FileNotFoundError:
            return
        if (stats.st_dev, stats.st_ino) != self._identity:
            _log.warning("event=unlink_refused name=%s reason=the_name_is_another_object", self.name)
            return
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(self.name)

    def _check_open(self) -> None:
        if self.fd < 0:
            raise ClosedError(f"the shared memory {self.name} is closed")

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(self, error)


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
        cuda: _Cuda | None,
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
            cuda = undo.enter_context(contextlib.closing(_Cuda())) if pin == "cuda" else None
            segment = undo.enter_context(get())
            address = _map_aligned(segment.fd, size_bytes)
            undo.callback(_libc.munmap, address, size_bytes)
            _madvise(address, size_bytes, _MADV_DONTDUMP)  # page contents belong in no core file
            if huge or huge_pages == "never":
                _madvise(address, size_bytes, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)
            _spread(address, size_bytes)
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
                _libc.munmap(address, self.size_bytes)
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
        _leave(self, error)

    def _prepare_rest(self, report: Callable[[int], None]) -> bool:
        with ThreadPoolExecutor(self._threads, thread_name_prefix="prefault") as pool:
            pieces = [pool.submit(self._prepare, offset) for offset in range(PIECE_BYTES, self.size_bytes, PIECE_BYTES)]
            try:
                for piece in as_completed(pieces):
                    if not piece.result():
                        break
                    report(self.bytes_ready)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return self.bytes_ready == self.size_bytes

    def _prepare(self, offset: int) -> bool:
        """Populate and lock one piece; returns False when told to stop. Runs in many threads."""
        if self.stop.is_set():
            return False
        length = min(PIECE_BYTES, self.size_bytes - offset)
        try:
            _populate(self.fd, self._address + offset, offset, length)
        except OSError as error:
            raise memory.shortage(self.name, self.size_bytes, self.bytes_ready, error) from error
        with self._count:
            self._ready_bytes += length
        if self._pin == "mlock":
            self._lock(self._address + offset, length)
        return True

    def _lock(self, address: int, length: int) -> None:
        refusal = 0 if _libc.mlock(address, length) == 0 else ctypes.get_errno()
        with self._count:
            if not refusal:
                self._pinned_bytes += length
            elif self._pin == "mlock":
                self._pin = "none"
                _log.warning(
                    "event=mlock_refused arena=%s errno=%s pinned_bytes=%d remedy='LimitMEMLOCK=infinity in the unit, "
                    "`ulimit -l unlimited`, or docker run --ulimit memlock=-1; workers pin their regions anyway'",
                    self.name,
                    errno.errorcode.get(refusal, refusal),
                    self._pinned_bytes,
                )

    def _register(self, cuda: _Cuda) -> bool:
        for offset in range(self._pinned_bytes, self.size_bytes, CUDA_CHUNK_BYTES):
            if self.stop.is_set():
                return False
            length = min(CUDA_CHUNK_BYTES, self.size_bytes - offset)
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


class _Cuda:
    """The registration of memory with the driver; only ``pin="cuda"`` makes one.

    It holds the primary context of device 0 until ``close``. Any thread may call it, one at a time.
    """

    def __init__(self) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise MemoryFault("pin=cuda needs cuda.bindings: run `pip install 'sharedmirror[cuda]'`") from error
        self._chunks: list[int] = []
        self._device: Any = None
        try:
            self._call("cuInit", 0)
            device = self._call("cuDeviceGet", 0)
            self._context = self._call("cuDevicePrimaryCtxRetain", device)
        except RuntimeError as error:
            raise MemoryFault("pin=cuda finds no CUDA driver: install it, or use pin=mlock") from error
        self._device = device

    def register(self, address: int, size_bytes: int) -> None:
        """Register one chunk, portable and mapped; a refusal takes back all chunks and raises MemoryFault."""
        driver = self._driver
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._call("cuMemHostRegister", address, size_bytes, flags)
            self._chunks.append(address)
        except MemoryFault:
            self._unregister()
            raise
        finally:
            self._call("cuCtxPopCurrent")

    def close(self) -> None:
        """Take back all registrations and let go of the context."""
        device, self._device = self._device, None
        if device is None:
            return
        try:
            self._call("cuCtxPushCurrent", self._context)
            try:
                self._unregister()
            finally:
                self._call("cuCtxPopCurrent")
        finally:
            self._call("cuDevicePrimaryCtxRelease", device)

    def _unregister(self) -> None:
        chunks, self._chunks = self._chunks, []
        for address in chunks:
            code = self._driver.cuMemHostUnregister(address)[0]
            if int(code):
                _log.warning("event=unregister_failed address=%#x result=%s", address, getattr(code, "name", code))

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._driver, name)(*arguments)
        if int(code):
            label = getattr(code, "name", code)
            raise MemoryFault(f"pin=cuda: {name} failed with {label}; use pin=mlock, or see dmesg", result=int(code))
        return values[0] if values else None


def _check_name(name: str) -> None:
    if not name.startswith(NAME_PREFIX) or "/" in name[1:] or "\0" in name or len(os.fsencode(name)) > 255:
        raise UsageError(f"the name {name!r} must begin with {NAME_PREFIX}, have no other slash and at most 255 bytes")


def _leave(owner: _Owner, error: BaseException | None) -> None:
    """Close and unlink at the end of a ``with``; a failure here never hides the block's own exception."""
    try:
        try:
            if not owner.keep:
                owner.unlink()
        finally:
            owner.close()
    except Exception as failure:
        if error is None:
            raise
        _log.warning("event=cleanup_failed name=%s error=%r", owner.name, failure)


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


def _map_aligned(fd: int, size_bytes: int) -> int:
    """Map the object shared at an address that is a multiple of 2 MiB; returns the address."""
    reserved_bytes = size_bytes + _HUGE_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _mmap(None, reserved_bytes, 0, private, -1)
    address = -(-reserved // _HUGE_BYTES) * _HUGE_BYTES
    try:
        _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except MemoryFault:
        _libc.munmap(reserved, reserved_bytes)
        raise
    head_bytes = address - reserved
    if head_bytes:
        _libc.munmap(reserved, head_bytes)
    _libc.munmap(address + size_bytes, _HUGE_BYTES - head_bytes)
    return address


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryFault(f"{memory.show_bytes(size_bytes)} cannot be mapped: {reason}; check `ulimit -v`")
    return int(result)


def _madvise(address: int, length: int, advice: int) -> int:
    """Return 0 or the errno."""
    return 0 if _libc.madvise(address, length, advice) == 0 else ctypes.get_errno()


def _populate(fd: int, address: int, offset: int, length: int) -> None:
    """Give each page of a shared mapping of ``fd`` its memory; raises OSError, never SIGBUS, when there is none."""
    while (error := _madvise(address, length, _MADV_POPULATE_WRITE)) in (errno.EINTR, errno.EAGAIN):
        pass
    if error == errno.EINVAL:
        # Before Linux 5.14. Not so on newer kernels: fallocate gives small pages only.
        os.posix_fallocate(fd, offset, length)
        _touch(address, length)
    elif error:
        raise OSError(error, os.strerror(error))


def _touch(address: int, length: int) -> None:
    view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
    view[:: mmap.PAGESIZE].tobytes()


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _spread(address: int, size_bytes: int) -> None:
    """Interleave the pages over the NUMA nodes with memory, where there are several."""
    nodes = memory.memory_nodes()
    if len(nodes) > 1 and (error := _interleave(address, size_bytes, nodes)):
        _log.warning(
            "event=mbind_refused nodes=%s errno=%s remedy='allow CAP_SYS_NICE; pages now lie where they are touched'",
            nodes,
            errno.errorcode.get(error, error),
        )


def _interleave(address: int, size_bytes: int, nodes: list[int]) -> int:
    """Spread the pages over the NUMA ``nodes``; returns 0 or the errno."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_ulong(_MPOL_INTERLEAVE),
        mask,
        ctypes.c_ulong(64 * words + 1),  # the kernel takes one bit less than it is told
        ctypes.c_ulong(0),
    )
    return 0 if result == 0 else ctypes.get_errno()
