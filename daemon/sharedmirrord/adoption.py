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
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sharedmirror import paths
from sharedmirror.errors import EnvironmentFault, ProtocolError, SharedMirrorError
from sharedmirrord import entries, failpoints, lifecycle, memory
from sharedmirrord.core.model import State
from sharedmirrord.core.recover import recover
from sharedmirrord.entries import StoreHeader
from sharedmirrord.journal import HEADER_BYTES
from sharedmirrord.records import RecordStore
from sharedmirrord.segment import Segment

log = logging.getLogger("sharedmirrord")

_RECORDS_SUFFIX, _ARENA_SUFFIX = "-records", "-arena0"


class CannotAdopt(EnvironmentFault):
    """Raised when an earlier daemon's memory cannot be adopted; it is left as it is."""

    code = "cannot_adopt"


@dataclass(frozen=True)
class Leftover:
    """One instance's segments; ``header`` is None where ``problem`` says why it cannot be read."""

    records_name: str
    header: StoreHeader | None
    problem: str = ""
    unfinished: bool = False
    """Whether its daemon died before it had written the first header: there is nothing in it."""

    @property
    def names(self) -> list[str]:
        """The names of all of the instance's segments that its header, or its own name, tells."""
        stem = self.records_name.removesuffix(_RECORDS_SUFFIX)
        arenas = [name for name, _ in self.header.arenas] if self.header else [f"{stem}{_ARENA_SUFFIX}"]
        return [*(name for name in arenas if name.startswith(stem)), self.records_name]

    @property
    def size_bytes(self) -> int:
        """Bytes that the segments take in /dev/shm now."""
        return sum(_used_bytes(name) for name in self.names)


def leftovers() -> Iterator[Leftover]:
    """Yield every instance of this uid that has segments in /dev/shm, a living one too."""
    stem = f"{lifecycle.SEGMENT_PREFIX[1:]}{os.getuid()}-"
    mine = sorted(entry for entry in os.listdir(memory.SHM_DIR) if entry.startswith(stem))
    yield from _orphans(mine)
    for entry in mine:
        if not entry.endswith(_RECORDS_SUFFIX):
            continue
        try:
            with Segment.open(f"/{entry}") as segment:
                try:
                    yield Leftover(segment.name, entries.read_header(segment))
                except ProtocolError as error:
                    yield Leftover(segment.name, None, error.message, _is_unfinished(segment))
        except SharedMirrorError as error:
            yield Leftover(f"/{entry}", None, error.message)


def _orphans(entries_there: list[str]) -> Iterator[Leftover]:
    """Yield arenas whose records were removed by somebody else; a daemon makes records first and removes them last."""
    for entry in entries_there:
        arena, records = f"{memory.SHM_DIR}/{entry}", f"/{entry.removesuffix(_ARENA_SUFFIX)}{_RECORDS_SUFFIX}"
        if entry.endswith(_ARENA_SUFFIX) and records[1:] not in entries_there and os.path.exists(arena):
            yield Leftover(records, None, f"it is gone, so nothing tells whose {arena} is; remove that once unused")


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


def sweep_sessions(header: StoreHeader, known: Collection[int]) -> None:
    """Remove the files of sessions that have no record and that no process holds: they ended with a daemon."""
    directory = session_dir(header)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if name.isdigit() and int(name) not in known and not _locked(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def live_sessions(header: StoreHeader) -> list[int]:
    """Return the sessions of an instance whose files are locked: processes that can still map the arena."""
    directory = session_dir(header)
    live = []
    with contextlib.suppress(FileNotFoundError):
        live = [
            int(name) for name in os.listdir(directory) if name.isdigit() and _locked(os.path.join(directory, name))
        ]
    return sorted(live)


def _is_unfinished(segment: Segment) -> bool:
    # Who makes a segment holds it locked until its header is there, and to the end.
    if any(os.pread(segment.fd, HEADER_BYTES, 0)):
        return False
    try:
        fcntl.flock(segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_unfinished(left: Leftover) -> None:
    """Unlink records that never got a header; they name no arena, and nobody was ever given anything of them."""
    with contextlib.suppress(SharedMirrorError), Segment.open(left.records_name) as segment:
        if _is_unfinished(segment):
            segment.unlink()
            log.info("event=removed segments=%s reason=unfinished", left.records_name)


def _check_readable(path: str, reset: bool) -> None:
    """Raise CannotAdopt for records of this socket that cannot be read; its session files tell whose they are."""
    marks: list[str] = []
    with contextlib.suppress(OSError):
        marks = os.listdir(paths.session_dir(path))
    for left in list(leftovers()):
        mark = left.records_name.removesuffix(_RECORDS_SUFFIX).rpartition("-")[2]
        if left.unfinished:
            remove_unfinished(left)
        elif left.header is None and mark in marks:
            if not reset:
                raise _cannot_adopt(f"{left.records_name}: {left.problem}")
            log.warning("event=left_behind segments=%s reason=%r", ",".join(left.names), left.problem)
            # Given up for good: it must not stand in the way of what comes after it. Its segments stay.
            shutil.rmtree(os.path.join(paths.session_dir(path), mark), ignore_errors=True)


def _cannot_adopt(problem: str) -> CannotAdopt:
    return CannotAdopt(
        f"the memory of the daemon before cannot be adopted: {problem}. Nothing was changed; "
        f"start with --reset to give its cache up and begin anew"
    )


def open_store(segment: Segment) -> RecordStore:
    """Open an earlier daemon's records; raises CannotAdopt."""
    try:
        return RecordStore.open(segment)
    except ProtocolError as error:
        raise _cannot_adopt(error.message) from error


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
    _check_readable(path, reset)
    found = of_socket(path)
    for left in list(found):
        reason = "reset" if reset else _void(left)
        if reason:
            remove(left)
            log.warning("event=discarded instance=%s reason=%r", left.records_name, reason)
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
        return recover(store.records(), store.slots, arena_bytes, time.monotonic(), memory.memory_nodes())
    except SharedMirrorError as error:
        raise _cannot_adopt(error.message) from error


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
