"""Arena memory in this process: mapped, and viewed as tensors.

What it keeps:

- a region's extents lie one behind the other in this address space, on a 2 MiB boundary;
- a region that may grow has addresses for all that it may have; where it has no memory now, its bytes read as
  zeros, and no other mapping of this process can come to lie there;
- a mapping lives as long as any tensor over it, and its end is reported exactly once;
- memory is never unmapped while it is registered with the driver;
- every failing call gives a MemoryFault with its reason, and leaves nothing mapped or registered.

A forked child inherits the mappings (a dead parent's lock must live as long as they do), but never
unregisters or reports: those belong to the process that made them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sharedmirror.errors import MemoryFault
from sharedmirror.registration import HostRegistration
from sharedmirror.types import REGION_ALIGNMENT_BYTES

__all__ = ["RegionMapping"]

Extent = tuple[int, int, int]
"""(arena index, byte offset in the arena, bytes)."""

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_log = logging.getLogger("sharedmirror")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class RegionMapping:
    """One region, contiguous in this process.

    ``fds`` are the arenas' descriptors, ``extents`` the region's parts in order. ``size_bytes`` (None: what
    the extents have) is what the region may have one day. ``on_gone`` is called once, from whatever thread
    drops the last view, after the memory was unmapped; it must not block and must not raise.

    ``extend`` and ``cut`` may not be called by two threads at once. Raises MemoryFault when an extent lies
    outside its arena or cannot be mapped.
    """

    def __init__(
        self,
        fds: Sequence[int],
        extents: Sequence[Extent],
        on_gone: Callable[[], None] | None = None,
        *,
        size_bytes: int | None = None,
    ) -> None:
        self.backed_bytes = sum(length for _, _, length in extents)
        self.size_bytes = max(self.backed_bytes, size_bytes or 0)
        _check_extents(fds, extents)
        self.address = _reserve(self.size_bytes)
        try:
            self._map(fds, extents, 0)
            self._empty(self.backed_bytes, self.size_bytes)
        except BaseException:
            _munmap(self.address, self.size_bytes)
            raise

        # Only a subclass of a ctypes array can be watched by weakref.
        class Owner(ctypes.c_ubyte * self.size_bytes):  # type: ignore[misc]
            pass

        owner = Owner.from_address(self.address)
        self._owner = weakref.ref(owner)
        self._registrations: list[HostRegistration] = []
        self._end = weakref.finalize(
            owner, _unmap, self.address, self.size_bytes, self._registrations, os.getpid(), on_gone
        )
        # At exit the kernel does it; doing it earlier would pull memory from under running threads.
        self._end.atexit = False
        self._bytes: torch.Tensor | None = torch.frombuffer(owner, dtype=torch.uint8)

    @property
    def bytes(self) -> torch.Tensor:
        """The region as a 1-D uint8 tensor; views of it keep the mapping alive."""
        if self._bytes is None:
            raise MemoryFault("the region was released")
        return self._bytes

    def register(self, device: torch.device, levels: Sequence[int] = ()) -> HostRegistration:
        """Register the region with the CUDA driver; the caller closes the registration before ``release``.

        ``levels`` are the sizes in bytes that a region which grows may have.
        """
        edges = [self.address + level for level in levels if level < self.size_bytes] if levels else None
        registration = HostRegistration(self.address, self.backed_bytes, device, edges=edges)
        self._registrations.append(registration)
        return registration

    def extend(self, fds: Sequence[int], extents: Sequence[Extent]) -> None:
        """Map what ``extents``, the region's parts from its beginning, have beyond ``backed_bytes``."""
        more, start = [], 0
        for arena, offset, length in extents:
            seen = min(length, max(0, self.backed_bytes - start))
            if seen < length:
                more.append((arena, offset + seen, length - seen))
            start += length
        if start > self.size_bytes:
            raise MemoryFault(f"the region has extents of {start} bytes and addresses for {self.size_bytes}")
        if not more:
            return
        _check_extents(fds, more)
        with self._kept() as mapped:
            if mapped:
                before, self.backed_bytes = self.backed_bytes, start
                try:
                    self._map(fds, more, before)
                    for registration in self._registrations:
                        registration.extend(self.address + start)
                except BaseException:
                    self._cut(before)
                    raise

    def cut(self, size_bytes: int) -> None:
        """Keep the first ``size_bytes``; the rest is unregistered and unmapped, and reads as zeros from now on."""
        with self._kept() as mapped:
            if mapped and size_bytes < self.backed_bytes:
                self._cut(size_bytes)

    def _cut(self, size_bytes: int) -> None:
        for registration in self._registrations:
            registration.cut(self.address + size_bytes)
        self._empty(size_bytes, self.backed_bytes)
        self.backed_bytes = size_bytes

    @contextmanager
    def _kept(self) -> Iterator[bool]:
        """Keep the mapping from going meanwhile; tells whether it is there: else something else may lie there."""
        owner = self._owner()
        try:
            yield owner is not None
        finally:
            del owner  # the frames of an error live as long as the error

    def _map(self, fds: Sequence[int], extents: Sequence[Extent], at: int) -> None:
        for arena, offset, length in extents:
            flags = _MAP_SHARED | _MAP_FIXED
            _mmap(self.address + at, length, _PROT_READ | _PROT_WRITE, flags, fds[arena], offset)
            at += length

    def _empty(self, start: int, end: int) -> None:
        if start < end:
            flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _mmap(self.address + start, end - start, _PROT_READ, flags, -1, 0)

    def release(self) -> bool:
        """Drop this object's own view; return whether the mapping is gone now."""
        self._bytes = None
        return not self._end.alive


def _check_extents(fds: Sequence[int], extents: Sequence[Extent]) -> None:
    if not extents:
        raise MemoryFault("the region has no extents")
    for arena, offset, length in extents:
        if not 0 <= arena < len(fds):
            raise MemoryFault(f"an extent is in arena {arena}; there are {len(fds)}")
        if offset < 0 or length <= 0 or offset % REGION_ALIGNMENT_BYTES or length % REGION_ALIGNMENT_BYTES:
            raise MemoryFault(f"an extent of {length} bytes at {offset} is not made of whole 2 MiB pieces")
        # A mapping beyond the end of its file would be a SIGBUS at the first touch.
        try:
            size = os.fstat(fds[arena]).st_size
        except OSError as error:
            raise MemoryFault(f"arena {arena} cannot be examined: {error.strerror}", errno=error.errno) from error
        if offset + length > size:
            raise MemoryFault(f"an extent ends at {offset + length}; arena {arena} has {size} bytes")


def _reserve(size_bytes: int) -> int:
    """Return the 2 MiB aligned address of ``size_bytes`` of reserved, inaccessible address space."""
    padded = size_bytes + REGION_ALIGNMENT_BYTES
    start = _mmap(None, padded, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    aligned = -(-start // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
    if aligned > start:
        _munmap(start, aligned - start)
    if aligned + size_bytes < start + padded:
        _munmap(aligned + size_bytes, start + padded - aligned - size_bytes)
    return aligned


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, length, protection, flags, fd, offset)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise MemoryFault(
            f"mmap of {length} bytes failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})", errno=code
        )
    return int(mapped)


def _munmap(address: int, length: int) -> None:
    if _libc.munmap(address, length) != 0:
        code = ctypes.get_errno()
        raise MemoryFault(
            f"munmap of {length} bytes failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})", errno=code
        )


def _unmap(
    address: int, length: int, registrations: list[HostRegistration], pid: int, on_gone: Callable[[], None] | None
) -> None:
    """End a mapping; memory that the driver will not let go of stays mapped, and is not reported as gone."""
    try:
        for registration in registrations:
            registration.close()
        _munmap(address, length)
    except MemoryFault as fault:
        _log.error("mapping_kept address=%#x bytes=%d reason=%s", address, length, fault)
        return
    if on_gone is not None and os.getpid() == pid:
        on_gone()
