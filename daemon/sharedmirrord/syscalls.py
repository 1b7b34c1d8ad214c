"""Memory calls of libc that Python does not offer: aligned shared mappings, pages, locks and NUMA nodes.

Invariants: ``populate`` never ends in SIGBUS, a lack of memory is an OSError; a mapping that fails
leaves no address range taken; a refusal that the caller may live with is returned as an errno.

Nothing here decides anything: no names, no policy, no log. It keeps no state and unmaps nothing by
itself; who maps a range unmaps it. ctypes lets go of the GIL, so calls that take long belong in a thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

from sharedmirror.errors import MemoryFault
from sharedmirror.types import REGION_ALIGNMENT_BYTES
from sharedmirrord import memory

MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_POPULATE_WRITE = 14, 15, 16, 23

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}

_MLOCK_ONFAULT = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
_libc.syscall.restype = ctypes.c_long


def map_aligned(fd: int, size_bytes: int) -> int:
    """Map ``fd`` shared at an address that is a multiple of 2 MiB, and return the address.

    Raises MemoryFault when there is no address space for it.
    """
    reserved_bytes = size_bytes + REGION_ALIGNMENT_BYTES
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _mmap(None, reserved_bytes, 0, private, -1)
    address = -(-reserved // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
    try:
        _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except MemoryFault:
        munmap(reserved, reserved_bytes)
        raise
    head_bytes = address - reserved
    if head_bytes:
        munmap(reserved, head_bytes)
    munmap(address + size_bytes, REGION_ALIGNMENT_BYTES - head_bytes)
    return address


def munmap(address: int, size_bytes: int) -> None:
    """Unmap a range; nobody may use it any more."""
    _libc.munmap(address, size_bytes)


def madvise(address: int, size_bytes: int, advice: int) -> int:
    """Advise the kernel on a range; returns 0 or the errno."""
    return 0 if _libc.madvise(address, size_bytes, advice) == 0 else ctypes.get_errno()


def mlock_on_fault(address: int, size_bytes: int) -> int:
    """Lock each page of a range in memory once it is there; returns 0 or the errno."""
    return 0 if _libc.mlock2(address, size_bytes, _MLOCK_ONFAULT) == 0 else ctypes.get_errno()


def populate(fd: int, address: int, offset: int, size_bytes: int) -> None:
    """Give each page of a shared mapping of ``fd`` its memory; raises OSError, never SIGBUS, when there is none."""
    while (error := madvise(address, size_bytes, MADV_POPULATE_WRITE)) in (errno.EINTR, errno.EAGAIN):
        pass
    if error == errno.EINVAL:
        # Before Linux 5.14. Not so on newer kernels: fallocate gives small pages only.
        os.posix_fallocate(fd, offset, size_bytes)
        _touch(address, size_bytes)
    elif error:
        raise OSError(error, os.strerror(error))


def address_of(mapping: mmap.mmap) -> int:
    """Return where a writable mapping lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def prefer(address: int, size_bytes: int, node: int) -> int:
    """Have the pages of a range lie on a NUMA ``node`` as long as it has room; returns 0 or the errno.

    For a shared mapping that holds in every process that maps these bytes.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_ulong(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(64 * words + 1),  # the kernel takes one bit less than it is told
        ctypes.c_ulong(0),
    )
    return 0 if result == 0 else ctypes.get_errno()


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryFault(f"{memory.show_bytes(size_bytes)} cannot be mapped: {reason}; check `ulimit -v`")
    return int(result)


def _touch(address: int, size_bytes: int) -> None:
    view = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
    view[:: mmap.PAGESIZE].tobytes()
