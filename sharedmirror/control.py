"""The control side: lease, reserve, seal, look up, release. What a scheduler needs, without torch.

Every call is one round trip for any number of pages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sharedmirror.away import Away
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    ClosedError,
    DaemonUnavailable,
    KeyInputError,
    SharedMirrorError,
    UsageError,
)
from sharedmirror.types import (
    MAX_KEY_BYTES,
    MAX_WAIT_S,
    Generation,
    HitId,
    KeyState,
    Lease,
    LeaseId,
    PageId,
    PoolId,
    Reservation,
    Role,
    Sealed,
    check_lease,
    check_text,
    check_timeout,
    launch_id,
)

log = logging.getLogger("sharedmirror")

_GOODBYE_S = 2.0
_PRUNE_AT = 1024
_KEY_LENGTHS = frozenset(range(1, MAX_KEY_BYTES + 1))
_INDEX_S, _INDEX_AGAIN_S = 1.0, 0.1
_STATES = {"h": KeyState.HIT, "p": KeyState.PENDING, "m": KeyState.MISS}


@dataclass
class Hit:
    """What a lookup found and pinned.

    ``pages`` are host pages in the order of the keys: in mode "prefix" those of the longest readable
    prefix, in mode "each" one a key, -1 where there is none. ``states`` tells hit, pending or miss for
    each key (in mode "prefix", keys behind the first that is not readable count as pending or miss).
    ``incarnation`` is the launch of the engine that holds it, 0 where it is not known.

    The pages stay until ``release``, or the end of a ``with``, and the loads under way are complete. A
    hit may be pickled to the workers; a copy cannot release.
    """

    id: HitId
    pool: PoolId
    pages: tuple[PageId, ...]
    states: tuple[KeyState, ...]
    incarnation: int = 0
    _client: Client | None = field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Let the pages go, in effect once all loads are complete; may be called again."""
        if self._client is not None and self.id:
            self._client._release([self.id])
        self._client = None  # not before: a daemon that was away is asked again

    def __len__(self) -> int:
        return sum(state is KeyState.HIT for state in self.states)

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._client is not None and self._client.closed:
            return  # the daemon released it when the client closed
        try:
            self.release()
        except Exception:
            if kind is None:
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}


@dataclass(frozen=True)
class Evicted:
    """What ``evict`` did: keys that are gone, and keys that stay because their pages are pinned."""

    evicted: tuple[bytes, ...]
    pinned: tuple[bytes, ...]


def connect(
    socket: str | None = None,
    name: str = "default",
    engine: str = "0",
    *,
    launch: str | None = None,
    timeout_s: float = 10.0,
    wait_s: float = 30.0,
    max_held: int | None = None,
) -> Client:
    """Connect to the pool ``name`` as the scheduler of ``engine``.

    ``launch`` tells this start of the engine from an earlier one; it defaults to
    ``$SHAREDMIRROR_LAUNCH_ID``. ``timeout_s`` bounds each call; ``wait_s`` bounds the wait for the
    engine's workers to create the pool.

    ``max_held`` bounds the pages that the engine holds at a time, in open leases and in hits that are not
    released and drained (a page in two hits counts twice). Lookups beyond it return shorter hits, leases
    raise NoPages. The default is the fair share: the pool over the engines attached, so all of it for an
    engine alone. Another scheduler of the engine that names a bound replaces it.

    Raises UsageError, DaemonUnavailable, PoolNotFound, PoolMismatch (several
    pools of this name), WrongPoolKind (a static pool) or EngineBusy.
    """
    wait_s = _wait(wait_s)
    timeout_s = check_timeout(timeout_s)
    check_text("name", name)
    check_text("engine", engine)
    launch = launch_id(launch)
    if max_held is not None and (isinstance(max_held, bool) or not isinstance(max_held, int) or max_held < 1):
        raise UsageError(f"max_held must be a positive number of pages, not {max_held!r:.40}")
    channel = Channel.open(socket, role=Role.SCHEDULER, timeout_s=timeout_s)
    try:
        body = channel.call("attach", pool=name, engine=engine, launch=launch, wait_s=wait_s, max_held=max_held)
    except BaseException:
        channel.close()
        raise
    return Client(
        channel, PoolId(body["pool"]), int(body["num_host_pages"]), int(body["mark"]), int(body.get("incarnation", 0))
    )


class Client:
    """The control calls of one pool. Made by ``connect``; a context manager.

    All calls raise DaemonUnavailable (retryable) when the daemon is away, ClosedError after ``close``
    and ForkedError in a forked child.
    """

    def __init__(self, channel: Channel, pool: PoolId, num_host_pages: int, mark: int, incarnation: int = 0) -> None:
        self.pool = pool
        self._incarnation = incarnation
        self.num_host_pages = num_host_pages
        self._channel = channel
        self._closed = False
        self._leases: set[int] = set()
        self._hits: set[int] = set()
        self._away = Away(mark)
        self._arrived: list[int] = []
        channel.held = lambda: (sorted(self._leases), sorted(self._hits))
        channel.away = self._away
        channel.on_answer = self._note
        again_s = self._fetch_index()
        channel.listen(self._fetch_index)
        if again_s is not None:
            channel.run_then()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _check_usable(self) -> None:
        self._channel.check_usable()
        if self._closed:
            raise ClosedError("this client is closed")

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        self._check_usable()
        while self._channel.late_answers:
            self._give_back(self._channel.late_answers.pop())
        return self._channel.call(op, **arguments)

    def _note(self, body: dict[str, Any]) -> None:
        """Keep what an answer gave, for a resume: what it does not name is given up."""
        if body.get("hit"):
            self._hits.add(body["hit"])
        if body.get("index") and self._arrived:
            self._take_index(self._arrived.pop())
        if body.get("lease"):
            self._leases.add(body["lease"])
            if len(self._leases) > _PRUNE_AT:
                self._leases = {number for number in self._leases if number >= body["lease_floor"]}

    def _fetch_index(self) -> float | None:
        """Ask for the index unless it is there; returns after how many seconds to ask again, or None."""
        if self._away.index is not None:
            return None
        try:
            body = self._channel.call("index", timeout_s=_INDEX_S, stay_away=lambda: True, fds=self._arrived)
            if self._away.index is not None:
                self._away.index.warm()
                return None
            return None if body["index"] == "none" else _INDEX_AGAIN_S
        except SharedMirrorError as error:
            # Coming back to the daemon is a reason to ask again; a daemon that has no indexes says so each time.
            log.debug("event=no_index reason=%r", error.message)
            return _INDEX_AGAIN_S if error.retryable and not self._channel.lost else None

    def _take_index(self, fd: int) -> None:
        try:
            self._away.take(fd, self.num_host_pages)
        except (OSError, SharedMirrorError) as error:
            log.warning("event=no_index reason=%r: keys are asked for by calls", str(error))

    def _give_back(self, body: dict[str, Any]) -> None:
        """Nobody got the answer to a call that timed out: what it took is given up."""
        if body.get("lease"):
            self._channel.call("abort", lease=body["lease"], pages=None)
        if body.get("hit"):
            self._channel.call("release", hits=[body["hit"]])

    def lease(self, n: int, *, wait_s: float = 0) -> Lease:
        """Lease ``n`` pages for writing by all ranks of the engine: all of them or none.

        Evicts what is least recently used; of an engine over its fair share first. Raises NoPages, after
        waiting up to ``wait_s`` seconds, also when the engine would hold too much or, over its own share,
        could only take from engines within theirs;
        RanksMissing while not all ranks are attached; UsageError for fewer than 1 or more than the pool
        leases.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 0 < n < 1 << 62:
            raise UsageError(f"a lease is of at least one page, not {n!r:.40}")
        return self._lease(self._call("lease", n=n, wait_s=_wait(wait_s)), None)

    def _lease(self, body: dict[str, Any], keys: tuple[bytes, ...] | None) -> Lease:
        pages: tuple[PageId, ...] = tuple(body["pages"])
        generations: tuple[Generation, ...] = tuple(body["generations"])
        return Lease(LeaseId(body["lease"]), self.pool, pages, generations, keys, self._incarnation)

    def reserve(self, keys: Sequence[bytes], parent: bytes | None = None, *, wait_s: float = 0) -> Reservation:
        """Lease pages for those of ``keys`` that are neither readable nor being written.

        ``keys`` are in prefix order; ``parent`` is the key before the first. The pages become readable
        with the last rank's commit. Raises as ``lease``, and KeyInputError.
        """
        body = self._call("reserve", keys=_keys(keys), parent=parent, wait_s=_wait(wait_s))
        wanted = tuple(body["keys"])
        lease = self._lease(body, wanted) if wanted else None
        granted = dict(zip(wanted, lease.pages, strict=True)) if lease else {}
        return Reservation(lease, granted, tuple(body["present"]), tuple(body["pending"]), tuple(body["evicted"]))

    def seal(
        self, lease: Lease, keys: Sequence[bytes], *, pages: Sequence[int] | None = None, parent: bytes | None = None
    ) -> Sealed:
        """Give ``keys``, in prefix order, to the lease's pages (or to ``pages`` of it).

        A page becomes readable at once if every rank has committed it, otherwise with the last commit.
        Raises KeyInputError for too few or bad keys, StaleLease for a page that is over or has a key,
        Cleared for a lease from before ``clear``.
        """
        named = None if pages is None else [int(page) for page in pages]
        body = self._call("seal", lease=check_lease("seal", lease).id, keys=_keys(keys), pages=named, parent=parent)
        return sealed_from(body)

    def lookup(self, keys: Sequence[bytes], mode: Literal["prefix", "each"] = "prefix", *, wait_s: float = 0) -> Hit:
        """Find readable pages and pin them: the longest prefix, or each key by itself.

        With ``wait_s``, waits that many seconds for keys that are being written and would make the answer
        longer; ends early when their last writer fails. Other calls of this client wait meanwhile: look up with
        one of its own. What the engine may not hold (``max_held``) is
        reported as a miss.

        While the daemon is gone the answer comes from the index, at once: what was readable when it ended
        is found and pinned, and stays so when the next daemon comes.
        """
        listed, wait_s = _keys(keys), _wait(wait_s)
        self._check_usable()
        found = self._away.lookup(listed, mode, whole=True) if self._channel.lost else None
        if found is None:
            try:
                body = self._call("lookup", stay_away=self._away.gone, keys=listed, mode=mode, wait_s=wait_s)
            except DaemonUnavailable:
                found = self._away.lookup(listed, mode, whole=False)
                if found is None:
                    raise
            else:
                return self._hit(HitId(body["hit"]), tuple(body["pages"]), body["states"])
        return self._hit(found.hit, found.pages, found.states)

    def _hit(self, hit: HitId, pages: tuple[PageId, ...], states: str) -> Hit:
        return Hit(hit, self.pool, pages, _states(states), self._incarnation, self)

    def peek(self, keys: Sequence[bytes]) -> tuple[KeyState, ...]:
        """Return HIT or MISS for each key by the index in shared memory: no call, and no daemon needed.

        A thousand keys take less than a millisecond. It is a hint: a key found may have been evicted a
        moment ago, and one not found may have been sealed; ``lookup`` confirms and pins, ``contains``
        asks the daemon. Without an index (an old kernel, or a daemon that has just come back) it asks too.
        """
        listed = _keys(keys)
        self._check_usable()
        index = self._away.index
        if index is None:
            return tuple([KeyState.HIT if state is KeyState.HIT else KeyState.MISS for state in self.contains(listed)])
        return tuple([KeyState.HIT if page else KeyState.MISS for page in index.find(listed)])

    def contains(self, keys: Sequence[bytes]) -> tuple[KeyState, ...]:
        """Return the state of each key; pins nothing."""
        return _states(self._call("contains", keys=_keys(keys))["states"])

    def touch(self, keys: Sequence[bytes]) -> int:
        """Mark readable keys, and the prefixes they hang on, as used now; returns how many were found."""
        return int(self._call("touch", keys=_keys(keys))["touched"])

    def abort(self, lease: Lease, pages: Sequence[int] | None = None) -> None:
        """Give a lease, or some of its pages, up. They are freed once every rank has drained."""
        named = None if pages is None else [int(page) for page in pages]
        self._call("abort", lease=check_lease("abort", lease).id, pages=named)

    def release(self, hits: Iterable[Hit]) -> None:
        """Release several hits in one round trip."""
        mine = [hit for hit in hits if hit._client is not None]
        self._release([hit.id for hit in mine if hit.id])
        for hit in mine:
            hit._client = None

    def _release(self, hits: list[HitId]) -> None:
        self._check_usable()
        if self._channel.lost and self._away.release(hits, self._hits):
            return
        try:
            self._call("release", stay_away=self._away.gone, hits=hits)
        except DaemonUnavailable:
            if not self._away.release(hits, self._hits):
                raise
        self._away.forget(hits)
        self._hits.difference_update(hits)

    def evict(self, keys: Sequence[bytes], *, wait_s: float = 0) -> Evicted:
        """Forget keys, whatever hangs on them; pinned pages stay and are named.

        Raises NotResumed, after waiting up to ``wait_s`` seconds, while processes from before a restart of
        the daemon may be loading.
        """
        body = self._call("evict", keys=_keys(keys), wait_s=_wait(wait_s))
        return Evicted(tuple(body["evicted"]), tuple(body["pinned"]))

    def clear(self, *, wait_s: float = 0) -> int:
        """Forget all keys of the pool at once, as after a change of weights; returns the pages freed.

        Pinned pages stay readable for those who hold them. Leases from before cannot be sealed. Raises
        NotResumed as ``evict``.
        """
        return int(self._call("clear", wait_s=_wait(wait_s))["freed"])

    def status(self) -> dict[str, Any]:
        """Return the daemon's status map; `sharedmirror status --json` prints the same."""
        status: dict[str, Any] = self._call("status")["status"]
        return status

    def close(self) -> None:
        """Detach and disconnect; leases still open are aborted, hits released. May be called again."""
        if self._closed:
            return
        try:
            self._channel.check_usable()
            self._closed = True
            self._channel.call("detach", timeout_s=min(_GOODBYE_S, self._channel.timeout_s), unmapped=True)
        except Exception:  # the daemon learns the same from the end of the socket and the process
            self._closed = True
        finally:
            self._channel.close()
            self._away.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"session={self._channel.session}"
        return f"<Client socket={self._channel.path!r} pool={self.pool} pages={self.num_host_pages} {state}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait(wait_s: float) -> float:
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= MAX_WAIT_S:
        raise UsageError(f"wait_s must be seconds from 0 to {MAX_WAIT_S}, not {wait_s!r:.40}")
    return wait_s


def _keys(keys: Sequence[bytes]) -> list[bytes]:
    if isinstance(keys, (bytes, str)):
        raise KeyInputError("keys must be a sequence of bytes, not one of them")
    listed = list(keys)
    # The quick test first: calls carry hundreds of keys, nearly always good ones.
    if set(map(type, listed)) <= {bytes} and set(map(len, listed)) <= _KEY_LENGTHS:
        return listed
    for position, key in enumerate(listed):
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise KeyInputError(
                f"the key at position {position} must be 1 to {MAX_KEY_BYTES} bytes, not {what}", position=position
            )
    return listed


def _states(states: str) -> tuple[KeyState, ...]:
    hits = len(states) - len(states.lstrip("h"))
    return (KeyState.HIT,) * hits + tuple(map(_STATES.__getitem__, states[hits:]))


def sealed_from(body: dict[str, Any]) -> Sealed:
    """Return the answer to ``seal`` or ``commit``."""
    return Sealed(tuple(body["sealed"]), tuple(body["pending"]), dict(body["duplicates"]))
