"""Segments that an earlier daemon of this socket left: adopt them, or remove them by rule.

Keeps invariant 12: a segment is unlinked only by its owner, with a sane header, while the instance
lock of its socket is held, and when no process can still map it. Whether one can is asked of the
session files: each is locked for as long as its process, or a fork of it, lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sharedmirror import paths
from sharedmirror.errors import EnvironmentFault, SharedMirrorError
from sharedmirrord import entries, failpoints, lifecycle, memory
from sharedmirrord.core.model import State
from sharedmirrord.core.recover import recover
from sharedmirrord.entries import StoreHeader
from sharedmirrord.records import RecordStore
from sharedmirrord.segment import Segment

log = logging.getLogger("sharedmirrord")

_RECORDS_SUFFIX = "-records"


class CannotAdopt(EnvironmentFault):
    """Raised when an earlier daemon's memory cannot be adopted; it is left as it is."""

    code = "cannot_adopt"


@dataclass(frozen=True)
class Leftover:
    """One instance's segments; ``header`` is None where ``problem`` says why it cannot be read."""

    records_name: str
    header: StoreHeader | None
    problem: str = ""

    @property
    def names(self) -> list[str]:
        """The names of all of the instance's segments that its header, or its own name, tells."""
        stem = self.records_name.removesuffix(_RECORDS_SUFFIX)
        arenas = [name for name, _ in self.header.arenas] if self.header else [f"{stem}-arena0"]
        return [*(name for name in arenas if name.startswith(stem)), self.records_name]

    @property
    def size_bytes(self) -> int:
        """Bytes that the segments take in /dev/shm now."""
        return sum(_used_bytes(name) for name in self.names)


def leftovers() -> Iterator[Leftover]:
    """Yield every instance of this uid that has records in /dev/shm, a living one too."""
    stem = f"{lifecycle.SEGMENT_PREFIX[1:]}{os.getuid()}-"
    for entry in sorted(os.listdir(memory.SHM_DIR)):
        if not (entry.startswith(stem) and entry.endswith(_RECORDS_SUFFIX)):
            continue
        try:
            with Segment.open(f"/{entry}") as segment:
                yield Leftover(segment.name, entries.read_header(segment))
        except SharedMirrorError as error:
            yield Leftover(f"/{entry}", None, error.message)


def of_socket(path: str) -> list[Leftover]:
    """Return the leftovers whose header names this socket; the caller holds its instance lock."""
    return [left for left in leftovers() if left.header is not None and left.header.socket == path]


def session_dir(header: StoreHeader) -> str:
    """Return the directory of an instance's session files: each instance has ids of its own."""
    return os.path.join(paths.session_dir(header.socket), header.instance.hex()[:12])


def remove_session_dir(header: StoreHeader) -> None:
    """Remove an instance's session files; the caller knows that none is needed any more."""
    shutil.rmtree(session_dir(header), ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(paths.session_dir(header.socket))


def live_sessions(header: StoreHeader) -> list[int]:
    """Return the sessions of an instance whose files are locked: processes that can still map the arena."""
    directory = session_dir(header)
    live = []
    with contextlib.suppress(FileNotFoundError):
        live = [
            int(name) for name in os.listdir(directory) if name.isdigit() and _locked(os.path.join(directory, name))
        ]
    return sorted(live)


def remove(left: Leftover) -> None:
    """Unlink a dead instance's segments; the caller holds its socket's instance lock.

    Raises CannotAdopt when the header is not sane or a process can still map the arena.
    """
    if left.header is None:
        raise CannotAdopt(f"{left.records_name} is not removed: {left.problem}")
    live = live_sessions(left.header)
    if live:
        raise CannotAdopt(
            f"{left.records_name} is not removed: sessions {live} of {left.header.socket} live on; "
            f"end their processes first"
        )
    for name in left.names:
        failpoints.reach("remove.segment")
        with contextlib.suppress(SharedMirrorError), Segment.open(name) as segment:
            segment.unlink()
    failpoints.reach("remove.sessions")
    remove_session_dir(left.header)
    log.info("event=removed segments=%s", ",".join(left.names))


def choose(path: str, *, reset: bool) -> Leftover | None:
    """Return what the daemon on ``path`` is to adopt, if anything; the caller holds the instance lock.

    What a changed boot or ``reset`` makes void is removed. Raises CannotAdopt when it is not certain.
    """
    found = of_socket(path)
    for left in list(found):
        reason = "reset" if reset else _void(left)
        if reason:
            log.warning("event=discarded instance=%s reason=%r", left.records_name, reason)
            remove(left)
            found.remove(left)
    if len(found) > 1:
        names = ", ".join(left.records_name for left in found)
        raise CannotAdopt(
            f"several instances claim {path}: {names}; remove them with `sharedmirror gc`, or use --reset"
        )
    return found[0] if found else None


def _void(left: Leftover) -> str:
    """Return why an instance holds nothing to adopt, or nothing."""
    if left.header is not None and left.header.boot_id != lifecycle.boot_id():
        return "it is of another boot"
    if not all(os.path.exists(memory.SHM_DIR + name) for name in left.names):
        return "its arena is gone"
    return ""


def restore(store: RecordStore) -> State:
    """Return the state that an adopted store describes; raises CannotAdopt."""
    arena_bytes = store.header.arenas[0][1]
    try:
        return recover(store.records(), store.slots, arena_bytes, time.monotonic())
    except SharedMirrorError as error:
        raise CannotAdopt(
            f"the memory of the daemon before cannot be adopted: {error.message}. Nothing was changed; "
            f"start with --reset to give its cache up and begin anew"
        ) from error


def _locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _used_bytes(name: str) -> int:
    try:
        return os.stat(memory.SHM_DIR + name).st_blocks * 512
    except OSError:
        return 0
