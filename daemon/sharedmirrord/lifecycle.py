"""One daemon a socket: the instance lock, the socket file and the names of the segments.

The lock file beside the socket is held for the daemon's life. Who holds it may replace a dead
daemon's socket; a file that is no socket, or a socket that answers, is somebody else's and stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator

from sharedmirror.errors import EnvironmentFault

SEGMENT_PREFIX = "/sharedmirror-"
_BACKLOG = 512


class AlreadyRunning(EnvironmentFault):
    """Raised when a daemon lives on the socket; ``ids["pid"]`` is its process."""

    code = "already_running"


@contextlib.contextmanager
def instance_lock(path: str, socket_path: str) -> Iterator[None]:
    """Hold the daemon's lock; raises AlreadyRunning, naming the holder, or EnvironmentFault."""
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot open {path}: {error.strerror}; choose a --socket in a directory that this user may write"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _holder(fd)
            raise AlreadyRunning(
                f"a daemon with pid {pid} already serves {socket_path}; stop it, or choose another --socket", pid=pid
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # The file stays: removing it would let two daemons lock two files of one name.
        os.close(fd)


def _holder(fd: int) -> str:
    """Return the pid in the lock file. Right after its start the holder has not written it yet."""
    for _ in range(20):
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        if pid.isdigit() and os.path.exists(f"/proc/{pid}"):
            return pid
        time.sleep(0.05)
    return "unknown"


@contextlib.contextmanager
def listening_socket(path: str, *, for_others: bool) -> Iterator[socket.socket]:
    """Bind and listen at ``path``, replacing a dead daemon's socket; removes it at the end.

    ``for_others`` lets other uids connect, so that the daemon can decide by their credentials.
    """
    _clear_way(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o111 if for_others else 0o177)
    try:
        try:
            sock.bind(path)
        except OSError as error:
            sock.close()
            raise EnvironmentFault(f"cannot bind {path}: {error.strerror}") from None
    finally:
        os.umask(mask)
    bound = os.stat(path).st_ino
    try:
        sock.listen(_BACKLOG)
        yield sock
    finally:
        sock.close()
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == bound:
                os.unlink(path)


def _clear_way(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise EnvironmentFault(f"{path} exists and is no socket; remove it or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise EnvironmentFault(
                    f"{path} cannot be examined: {error.strerror}; choose another path with --socket"
                ) from None
        else:
            raise EnvironmentFault(f"another program answers on {path}; stop it or choose another path with --socket")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def segment_names(instance: bytes) -> tuple[str, str]:
    """Return the names of an instance's arena and of its records."""
    mark = f"{SEGMENT_PREFIX}{os.getuid()}-{instance[:6].hex()}"
    return f"{mark}-arena0", f"{mark}-records"


def boot_id() -> str:
    """Return the id of this boot of the machine, empty where it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as text:
            return text.read().strip()
    except OSError:
        return ""
