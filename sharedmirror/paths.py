"""Where the daemon's socket and the files beside it lie.

Daemon, client and CLI take these rules from here, so that they cannot disagree. Nothing here touches
the file system.
"""

from __future__ import annotations

import os

from sharedmirror.errors import EnvironmentFault, UsageError

SOCKET_VARIABLE = "SHAREDMIRROR_SOCKET"
MAX_SOCKET_PATH_BYTES = 107
"""What the kernel takes as the path of a Unix socket, in bytes."""


def default_socket() -> str:
    """Return the socket path that is used where none is given.

    ``$SHAREDMIRROR_SOCKET`` wins; else root has ``/run/sharedmirror/daemon.sock`` and others
    ``$XDG_RUNTIME_DIR/sharedmirror/daemon.sock``. Raises EnvironmentFault when a user other than root
    has no ``XDG_RUNTIME_DIR``.
    """
    chosen = os.environ.get(SOCKET_VARIABLE)
    if chosen:
        return chosen
    if os.geteuid() == 0:
        return "/run/sharedmirror/daemon.sock"
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime_dir:
        raise EnvironmentFault(
            f"there is no default socket: XDG_RUNTIME_DIR is unset for uid {os.geteuid()}; "
            f"set {SOCKET_VARIABLE}, or name the socket with --socket or socket=..."
        )
    return os.path.join(runtime_dir, "sharedmirror", "daemon.sock")


def check_socket_path(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as a string; raises UsageError when no Unix socket can have it."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"the socket must be a path, not {path!r:.80}")
    path = os.fspath(path)
    size = len(os.fsencode(path))
    if not size:
        raise UsageError("the socket path is empty")
    if "\0" in path:
        raise UsageError(f"the socket path {path!r} holds a null byte")
    if size > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"the socket path has {size} bytes and the limit is {MAX_SOCKET_PATH_BYTES}; choose a shorter one: {path}"
        )
    return path


def session_dir(socket: str) -> str:
    """Return the directory of the session files that prove a client's death."""
    return f"{socket}.sessions"


def lock_path(socket: str) -> str:
    """Return the file that the daemon of this socket keeps locked while it lives."""
    return f"{socket}.lock"
