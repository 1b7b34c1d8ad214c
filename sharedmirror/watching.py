"""Following the keys of a pool: what is readable, then what becomes readable and what goes. For routers.

``watch`` has a connection of its own, needs no torch and joins no engine. It keeps no keys: each batch
is handed out and forgotten, so memory is bounded by one answer, whatever the reader does. A reader
that falls too far behind, or whose daemon or pool began anew, gets a gap and a new snapshot.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sharedmirror.channel import Channel
from sharedmirror.errors import CallTimeout, ClosedError, DaemonUnavailable, PoolNotFound, SharedMirrorError, UsageError
from sharedmirror.types import MAX_WAIT_S, Role, check_text

MAX_BATCH = 8192
_PAUSE_FIRST_S, _PAUSE_LAST_S = 0.01, 0.5


class ChangeKind(str, enum.Enum):
    """What a batch says of its keys."""

    SNAPSHOT = "snapshot"
    """They are readable; a page of the snapshot."""
    SYNCED = "synced"
    """The snapshot is complete: what was told so far makes the set of readable keys."""
    SEALED = "sealed"
    """They became readable."""
    EVICTED = "evicted"
    """They are readable no more."""
    CLEARED = "cleared"
    """No key is readable any more; the pool was cleared."""
    GAP = "gap"
    """What was told before is void. A snapshot follows."""


_KINDS = {"s": ChangeKind.SEALED, "e": ChangeKind.EVICTED, "c": ChangeKind.CLEARED}


class Position(NamedTuple):
    """A point in a pool's history; good for ``since`` as long as the daemon's epoch lasts. Plain data."""

    instance: str
    epoch: int
    pool: int
    sequence: int


@dataclass(frozen=True)
class Change:
    """A batch of keys to which the same happened, in order.

    ``position`` is where a later ``watch(since=...)`` can go on after this batch; None until a snapshot
    is complete. A key may be told twice, as in a snapshot and as sealed: that changes nothing.
    """

    kind: ChangeKind
    keys: tuple[bytes, ...]
    position: Position | None

    def apply_to(self, keys: set[bytes]) -> None:
        """Bring a set of readable keys up to date with this batch."""
        if self.kind in (ChangeKind.SNAPSHOT, ChangeKind.SEALED):
            keys.update(self.keys)
        elif self.kind is ChangeKind.EVICTED:
            keys.difference_update(self.keys)
        elif self.kind in (ChangeKind.CLEARED, ChangeKind.GAP):
            keys.clear()


def watch(
    socket: str | None = None,
    name: str = "default",
    tag: str | None = None,
    *,
    since: Position | None = None,
    poll_s: float = 0.05,
    batch: int = 4096,
    wait_s: float = 30.0,
    timeout_s: float = 10.0,
) -> Watch:
    """Follow the keys of the pool ``name``; iterate over what is returned.

    First come batches of the kind snapshot, with changes between them, then synced, then changes as they
    happen; with ``since``, the ``position`` of an earlier batch, only what happened after it, or a gap
    and a snapshot where that is no longer known. The daemon is asked every ``poll_s`` seconds, for up to
    ``batch`` keys. ``tag`` is needed where several pools have this name.

    ``wait_s`` bounds how long the pool, or the daemon after it was there, may be away before the iteration
    raises PoolNotFound or DaemonUnavailable; a restart of the daemon in that time is only a gap. ``timeout_s``
    bounds each call. Raises DaemonUnavailable at once when no daemon answers; the iteration raises PoolMismatch
    (which tag?) and WrongPoolKind (a static pool has no keys).
    """
    check_text("name", name)
    if tag:
        check_text("tag", tag)
    for what, value, low, high in (
        ("poll_s", poll_s, 0.001, MAX_WAIT_S),
        ("wait_s", wait_s, 0, MAX_WAIT_S),
        ("timeout_s", timeout_s, 0.001, MAX_WAIT_S),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise UsageError(f"{what} must be seconds from {low} to {high}, not {value!r:.40}")
    if type(batch) is not int or not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"batch must be a number of keys from 1 to {MAX_BATCH}, not {batch!r:.40}")
    return Watch(socket, name, tag, _checked(since), poll_s, batch, wait_s, timeout_s)


def _checked(since: Position | None) -> Position | None:
    if since is None:
        return None
    try:
        position = Position(*since)
    except TypeError:
        position = Position("", -1, -1, -1)
    numbers = position[1:]
    if not isinstance(position.instance, str) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise UsageError(f"since must be the position of an earlier batch, not {since!r:.80}")
    return position


class Watch:
    """An iterator of ``Change``, for one thread; made by ``watch``. A context manager.

    ``close`` may be called from any thread and ends the iteration. After an error it has ended too: call
    ``watch`` again, with ``since=watch.position``.
    """

    def __init__(
        self,
        socket: str | None,
        name: str,
        tag: str | None,
        since: Position | None,
        poll_s: float,
        batch: int,
        wait_s: float,
        timeout_s: float,
    ) -> None:
        self._socket, self._name, self._asked_tag = socket, name, tag
        self._tag = tag
        self._position = since
        self._poll_s, self._batch, self._wait_s, self._timeout_s = poll_s, batch, wait_s, timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._channel: Channel | None = None
        self._changes = self._follow(since)
        self._connect()

    @property
    def position(self) -> Position | None:
        """Where to go on after the batch that was handed out last; None while a snapshot is incomplete."""
        return self._position

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Change:
        change = next(self._changes)
        self._position = change.position
        return change

    def _follow(self, since: Position | None) -> Iterator[Change]:
        place, away = _Place(since), None
        try:
            while not self._ended.is_set():
                try:
                    body = self._ask(place)
                except SharedMirrorError as error:
                    if self._ended.is_set():
                        return
                    if isinstance(error, PoolNotFound) and place.at is not None:
                        yield Change(ChangeKind.GAP, (), None)
                        place = _Place(None)
                    away = away or _Away(self._wait_s)
                    away.check(error)
                    self._ended.wait(away.pause())
                    continue
                away = None
                if body["gap"]:
                    yield Change(ChangeKind.GAP, (), None)
                    place = _Place(None)
                    continue
                yield from place.take(body)
                if place.cursor is None and place.lag == 0:
                    self._ended.wait(self._poll_s)
        finally:
            self.close()

    # -- the connection --------------------------------------------------------------------------

    def _ask(self, place: _Place) -> dict[str, Any]:
        with self._lock:
            channel = self._channel
        channel = channel or self._connect()
        try:
            body = channel.call(
                "watch", pool=self._name, tag=self._tag, since=place.at, cursor=place.cursor, limit=self._batch
            )
        except (DaemonUnavailable, CallTimeout):
            self._disconnect()
            raise
        except PoolNotFound:
            self._tag = self._asked_tag
            raise
        # Another pool of this name must not end what was begun without a tag.
        self._tag = body["tag"]
        return body

    def _connect(self) -> Channel:
        channel = Channel.open(self._socket, role=Role.OBSERVER, timeout_s=self._timeout_s)
        with self._lock:
            if not self._ended.is_set():
                self._channel = channel
                return channel
        channel.close()
        raise ClosedError("this watch is closed")

    def _disconnect(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.interrupt()
            channel.close()

    def close(self) -> None:
        """End the iteration, also one that waits in another thread; may be called again."""
        if os.getpid() == self._pid:  # in a forked child the connection is the parent's
            self._ended.set()
            self._disconnect()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Place:
    """How far a reader has come, in the snapshot and in the events."""

    def __init__(self, at: Position | None) -> None:
        self.at = at
        self.cursor = 0 if at is None else None
        """Where the snapshot goes on; None when all of it was read."""
        self.lag = 0
        """Events that the daemon had beyond ``at``, as of the last answer."""
        self._partial = at is None
        self._goal: int | None = None
        """The sequence from which on the reader's set is right; -1 once that was said."""

    def take(self, body: dict[str, Any]) -> Iterator[Change]:
        """Yield what an answer says, in the order in which it is to be applied."""
        if self.cursor is not None or self._goal is None:
            # A page may hold keys that were sealed after the events read so far: only those events make it right.
            self._goal = body["newest"]
        at = self.at = Position(*body["position"])
        for letter, keys, sequence in body.get("events", ()):
            yield Change(_KINDS[letter], tuple(keys), None if self._partial else at._replace(sequence=sequence))
        if body.get("keys"):
            yield Change(ChangeKind.SNAPSHOT, tuple(body["keys"]), None)
        self.cursor = body.get("cursor")
        self.lag = body["newest"] - at.sequence
        if self.cursor is None and 0 <= self._goal <= at.sequence:
            self._partial, self._goal = False, -1
            yield Change(ChangeKind.SYNCED, (), at)


class _Away:
    """How long the daemon, or the pool, has been away."""

    def __init__(self, wait_s: float) -> None:
        self._until = time.monotonic() + wait_s
        self._pause_s = _PAUSE_FIRST_S

    def check(self, error: SharedMirrorError) -> None:
        """Raise ``error`` unless it may pass in the time that is left."""
        if not isinstance(error, (DaemonUnavailable, CallTimeout, PoolNotFound)) or time.monotonic() >= self._until:
            raise error

    def pause(self) -> float:
        """Return how long to wait before the next try, in seconds."""
        pause_s = min(self._pause_s, max(0.0, self._until - time.monotonic()))
        self._pause_s = min(2 * self._pause_s, _PAUSE_LAST_S)
        return pause_s
