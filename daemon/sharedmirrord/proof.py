"""Proof of death: what the daemon holds of a client process, and what it may conclude.

A process is proven gone only when all three hold: its pidfd is readable, its socket is at its end,
and an exclusive lock on its session file succeeds. The client keeps a description of that file
locked and mapped for as long as it, or any fork of it, lives; so the lock falls with the last
process that could still map the arena. A pidfd alone is not enough: a live fork keeps a dead
worker's device copies going. Time is no evidence.

Must not: decide anything about pages. It only answers which evidence is missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
from dataclasses import dataclass

from sharedmirror.errors import ProtocolError

PROCESS = "process"
SOCKET = "socket"
LOCK = "lock"


@dataclass
class LifeWatch:
    """The evidence that the daemon holds of one session.

    ``pidfd`` is None where neither side could open one (before Linux 5.3): then the process's end
    cannot be proven.
    """

    path: str
    pidfd: int | None
    lock_fd: int
    inode: int
    connected: bool = True
    ended: bool = False
    """Set where the process was found ended without a pidfd: its pid is free, or another process's."""
    may_copy: bool = True
    """Whether it may map the arena. A scheduler does not: to have let go of its file is as good as its end."""

    @classmethod
    def create(cls, directory: str, session: int, pidfd: int | None) -> tuple[LifeWatch, int]:
        """Make the session's file; returns the watch and the descriptor to pass to the client.

        The caller closes that descriptor once it is sent. Raises OSError.
        """
        os.makedirs(directory, mode=0o700, exist_ok=True)
        path = os.path.join(directory, str(session))
        flags = os.O_RDWR | os.O_CLOEXEC
        theirs = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(theirs, mmap.PAGESIZE)
            fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ours = os.open(path, flags)
        except BaseException:
            os.close(theirs)
            os.unlink(path)
            raise
        return cls(path, pidfd, ours, os.fstat(ours).st_ino), theirs

    @classmethod
    def adopt(cls, directory: str, session: int, pid: int, started: int) -> LifeWatch:
        """Watch a session from before a restart of the daemon, whose process was ``pid``.

        Where the session's file is gone, or the pid could never be known, evidence stays missing.
        """
        path = os.path.join(directory, str(session))
        lock_fd = inode = -1
        with contextlib.suppress(OSError):
            lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            inode = os.fstat(lock_fd).st_ino
        pidfd = None
        ended = False
        if pid:
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
            # Asked after the pidfd is open: the pid cannot change hands any more.
            if start_time(pid) != started:
                ended = True
                if pidfd is not None:
                    os.close(pidfd)
                    pidfd = None
        return cls(path, pidfd, lock_fd, inode, connected=False, ended=ended)

    def missing(self) -> tuple[str, ...]:
        """Return which evidence of the end is missing; empty is the proof."""
        found = []
        if self.may_copy and not self.process_ended():
            found.append(PROCESS)
        if self.connected:
            found.append(SOCKET)
        if not self._lock_is_free():
            found.append(LOCK)
        return tuple(found)

    def process_ended(self) -> bool:
        """Whether the pidfd says that the process has ended."""
        if self.pidfd is None:
            return self.ended
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _lock_is_free(self) -> bool:
        if self.lock_fd < 0:
            return False
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.lock_fd, fcntl.LOCK_UN)
        return True

    def holders(self) -> tuple[int, ...]:
        """Return the processes that map the session's file, as far as /proc may be read. Slow."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return tuple(sorted(pid for pid in pids if _maps(pid, self.path, self.inode)))

    def close(self) -> None:
        """Let go of the descriptors and remove the session's file."""
        for fd in (self.pidfd, self.lock_fd):
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.pidfd, self.lock_fd = None, -1
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _maps(pid: int, path: str, inode: int) -> bool:
    # By inode: in another mount namespace the same file has another path.
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return any(f" {inode} " in line and os.path.basename(path) in line for line in maps)
    except OSError:
        return False


def pid_of_pidfd(pidfd: int) -> int:
    """Return the pid behind a pidfd as this namespace sees it, 0 where it has none here.

    Raises ProtocolError for a descriptor that is no pidfd, OSError when this process has none left.
    """
    try:
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as info:
            fields = dict(line.split(":", 1) for line in info if ":" in line)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise ProtocolError(f"the passed descriptor cannot be examined: {error.strerror}") from None
    if "Pid" not in fields:
        raise ProtocolError("the descriptor passed with hello is no pidfd")
    return max(0, int(fields["Pid"]))


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, 0 where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
