"""Shared memory objects by name: created whole or not at all, mapped with every page in place.

Invariants: a segment that was not created whole leaves nothing behind; ``map`` hands out no byte before
its page exists, so that a full /dev/shm is a MemoryFault and never a SIGBUS; only a name that still
means our own object is unlinked; a segment of another user is not opened.

It must not know what the bytes mean, and it is not thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from types import TracebackType
from typing import Protocol

import posix_ipc  # type: ignore[import-not-found, import-untyped, unused-ignore]

from sharedmirror.errors import ClosedError, MemoryFault, UsageError
from sharedmirrord import memory, syscalls

NAME_PREFIX = "/sharedmirror-"

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """What ``leave`` ends: a segment, or what holds one."""

    keep: bool

    @property
    def name(self) -> str:
        """The name of the shared memory object."""
        ...

    def unlink(self) -> None:
        """Remove the name."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


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
        check_name(name)
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
        check_name(name)
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
        """Make the object ``size_bytes`` long, without pages for what is new.

        Raises MemoryFault where /dev/shm has no room for them: they are not taken from others to find that out.
        """
        self._check_open()
        if size_bytes < self.size_bytes:
            raise UsageError(f"{self.name} has {self.size_bytes} bytes and cannot shrink to {size_bytes}")
        free, more = memory.shm_free(), size_bytes - self.size_bytes
        if free is not None and more > free:
            raise memory.shortage(self.name, more, 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        try:
            os.ftruncate(self.fd, size_bytes)
        except (OSError, OverflowError) as error:
            raise MemoryFault(
                f"{self.name} cannot be made {memory.show_bytes(size_bytes)} long: {error}",
                asked_bytes=size_bytes,
            ) from error
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Make the object ``size_bytes`` long; only for an end that no process has mapped: touching it kills."""
        self._check_open()
        if not 0 <= size_bytes <= self.size_bytes:
            raise UsageError(f"{self.name} has {self.size_bytes} bytes and cannot grow to {size_bytes} by shrinking")
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes

    def map(self, offset: int, length: int) -> memoryview:
        """Map ``length`` bytes from ``offset`` (a multiple of the page size), with every page in place.

        ``unmap`` and ``close`` release the view. Raises MemoryFault when /dev/shm is full; pages that were
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
            syscalls.populate(self.fd, syscalls.address_of(mapping), offset, length)
        except OSError as error:
            mapping.close()
            raise memory.shortage(self.name, length, 0, error) from error
        view = memoryview(mapping)
        self._maps.append((mapping, view))
        return view

    def unmap(self, view: memoryview) -> None:
        """Release a view that ``map`` returned, and its mapping; the pages stay with the segment.

        After ``close`` there is nothing left to do. Raises UsageError when the view is not from ``map``: a
        slice or a cast of it is another view.
        """
        if self.fd < 0:
            return
        index = next((index for index, (_, mapped) in enumerate(self._maps) if mapped is view), None)
        if index is None:
            raise UsageError(f"this view cannot be unmapped: it is none that {self.name} has mapped now")
        _release(*self._maps.pop(index))

    def close(self) -> None:
        """Release the views and the descriptor; the object and its name stay. May be called again."""
        maps, self._maps = self._maps, []
        for mapping, view in maps:
            _release(mapping, view)
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
        leave(self, error)


def check_name(name: str) -> None:
    """Raise UsageError when a segment cannot have this name."""
    if not name.startswith(NAME_PREFIX) or "/" in name[1:] or "\0" in name or len(os.fsencode(name)) > 255:
        raise UsageError(f"the name {name!r} must begin with {NAME_PREFIX}, have no other slash and at most 255 bytes")


def leave(owner: Owner, error: BaseException | None) -> None:
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


def _release(mapping: mmap.mmap, view: memoryview) -> None:
    # A slice that somebody still holds keeps its mapping; the memory goes with the last of them.
    with contextlib.suppress(BufferError):
        view.release()
        mapping.close()
