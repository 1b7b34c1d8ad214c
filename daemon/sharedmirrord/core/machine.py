"""``apply(state, event, now) -> effects``: the one way in which the core changes.

Events come in the order in which the rim saw them. A request that cannot be answered yet waits in
``state.waiters`` and is tried again, in order, whenever something has moved.

Keeps invariant 8 (the same request id gives the same answer) for a session's mutating requests, of
which one at a time may be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from sharedmirror.errors import ProtocolError, RankAttached, SharedMirrorError, StaleRequest, UsageError
from sharedmirror.types import Role
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import attach, growth, hits, leases, sessions
from sharedmirrord.core.durable import Put
from sharedmirrord.core.model import Effects, Peer, Session, SessionState, State, Waiter

_ID_STEP = 4096
_SWEEP_PAGES = 1024
"""Freed at one event after ``clear``: about half a millisecond of work."""
_DYING_GRACE_S = 1.0
"""How long a rank's forerunner, killed a moment ago, may still look alive."""


@dataclass(frozen=True)
class Hello:
    """A process has shaken hands."""

    session: int
    peer: Peer
    role: Role


@dataclass(frozen=True)
class Request:
    """A client asks; ``id`` grows within its session."""

    session: int
    id: int
    op: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Disconnected:
    """A session's socket is at its end."""

    session: int


@dataclass(frozen=True)
class Died:
    """A session's process has ended; ``missing`` and ``holders`` say why that proves nothing yet."""

    session: int
    missing: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gone:
    """A session's process, and every fork that shared its memory, is proven gone."""

    session: int


@dataclass(frozen=True)
class Resume:
    """A session's process is back on a new connection; the rim has asked ``sessions.check_resume``."""

    session: int
    leases: list[int]
    hits: list[int]
    retry: int | None = None


@dataclass(frozen=True)
class Drop:
    """An operator gives a pool up; ``apply`` raises the typed refusal. ``tag`` None: whichever there is."""

    name: str
    tag: str | None


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Stop:
    """The daemon is asked to stop: no more leases."""


@dataclass(frozen=True)
class Ready:
    """The arena's memory is there."""


Event: TypeAlias = Hello | Resume | Request | Disconnected | Died | Gone | Drop | Tick | Stop | Ready
Handler: TypeAlias = Callable[[State, Session, dict[str, Any], float, Effects], dict[str, Any]]


def _drained(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    entries = [] if arguments.get("pages") is None else arguments["pages"]
    if not isinstance(entries, list) or any(not isinstance(entry, list) or len(entry) != 2 for entry in entries):
        raise ProtocolError("pages must be a list of [lease, pages]")
    for lease, pages in entries:
        arg.integer({"lease": lease}, "lease")
        arg.integers({"pages": pages}, "pages")
    leases.drained(state, session, arguments, now, out)
    hits.drained(state, session, arguments, now, out)
    return {}


def _unmapped(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    if session.state is not SessionState.DETACHED:
        raise UsageError("unmapped is said after detach", session=session.id)
    sessions.forget(state, session, "detached", now, out)
    return {}


MUTATING: dict[str, Handler] = {
    "attach": attach.attach,
    "detach": sessions.detach,
    "lease": leases.grant,
    "reserve": leases.reserve,
    "commit": leases.commit,
    "seal": leases.seal,
    "abort": leases.abort,
    "lookup": hits.lookup,
    "release": hits.release,
    "evict": hits.evict,
    "clear": hits.clear,
}
"""Requests whose answers are kept for a retry."""

REPEATABLE: dict[str, Handler] = {
    "contains": hits.contains,
    "touch": hits.touch,
    "drained": _drained,
    "extents": growth.extents,
    "shrunk": growth.shrunk,
    "unmapped": _unmapped,
}
"""Requests that may be asked again without harm."""


def apply(state: State, event: Event, now: float) -> Effects:
    """Apply one event; ``now`` is monotonic, in seconds."""
    out = Effects()
    if isinstance(event, Request):
        _request(state, event, now, out)
    elif isinstance(event, Hello):
        attach.hello(state, event.session, event.peer, event.role, now)
    elif isinstance(event, Resume):
        sessions.resume(state, state.sessions[event.session], event.leases, event.hits, event.retry, out)
    elif isinstance(event, Drop):
        sessions.drop(state, event.name, event.tag, out)
    elif isinstance(event, Stop):
        state.stopping = state.moved = True
    elif isinstance(event, Ready):
        state.ready = state.moved = True
    elif not isinstance(event, Tick):
        _life(state, event, now, out)
    if state.sweeping:
        _sweep(state)
    _expire(state, now, out)
    growth.advance(state, out)
    while state.moved and state.waiters:
        state.moved = False
        _retry(state, now, out)
        growth.advance(state, out)
    state.moved = False
    if state.next_id > state.id_high:
        state.id_high = state.next_id + _ID_STEP
        out.writes.append(Put("counter", 0, state.id_high))
    return out


def next_deadline(state: State) -> float | None:
    """Return the time at which there is something to do without an event: a waiter's end, or pages to look at."""
    if state.sweeping or state.giving:
        return 0.0
    return min((waiter.deadline for waiter in state.waiters), default=None)


def _sweep(state: State) -> None:
    """Free some cleared pages. They leave no write: the pool's number says that they are free."""
    tables = [pool.table for pool in state.pools.values() if pool.table is not None and pool.table.sweeping]
    for table in tables:
        state.moved |= bool(table.sweep(_SWEEP_PAGES))
    state.sweeping = any(table.sweeping for table in tables)


def _life(state: State, event: Disconnected | Died | Gone, now: float, out: Effects) -> None:
    session = state.sessions.get(event.session)
    if session is None:
        return
    if isinstance(event, Gone):
        sessions.gone(state, session, now, out)
    elif isinstance(event, Died):
        session.missing, session.holders = event.missing, event.holders
        sessions.died(state, session, now, out)
    else:
        session.connected = False
        state.waiters = [waiter for waiter in state.waiters if waiter.session != session.id]
        if session.incarnation is None:
            sessions.withdraw(state, session, out)
            sessions.forget(state, session, "left", now, out)
        elif session.state is SessionState.ATTACHED:
            session.state = SessionState.LOST
        state.moved = True


def _request(state: State, event: Request, now: float, out: Effects) -> None:
    session = state.sessions.get(event.session)
    if session is None:
        out.replies.append((event.session, _failure(event.id, UsageError("this session has ended; connect again"))))
        return
    if any(waiter.session == session.id for waiter in state.waiters):
        error = ProtocolError("a request of this session is still waiting; one at a time")
        out.replies.append((session.id, _failure(event.id, error)))
        return
    mutating = event.op in MUTATING
    if mutating and event.id <= session.last_request:
        out.replies.append((session.id, _repeat(session, event.id)))
        return
    try:
        wait_s = arg.seconds(event.arguments, "wait_s")
    except SharedMirrorError as error:
        out.replies.append((session.id, _failure(event.id, error)))
        return
    waiter = Waiter(
        session.id, event.id, event.op, event.arguments, now + wait_s, now + wait_s, UsageError("not tried")
    )
    if not _try(state, session, waiter, now, out):
        state.waiters.append(waiter)


def _repeat(session: Session, request: int) -> dict[str, Any]:
    if request == session.last_request and session.last_reply is not None:
        return session.last_reply
    error = StaleRequest(
        f"request {request} is older than request {session.last_request}, the last one answered", request=request
    )
    return _failure(request, error)


def _try(state: State, session: Session, waiter: Waiter, now: float, out: Effects) -> bool:
    """Handle a request; False when it has to wait."""
    handler = MUTATING.get(waiter.op) or REPEATABLE.get(waiter.op)
    try:
        if handler is None:
            raise ProtocolError(f"there is no call {waiter.op!r:.80}")
        body = handler(state, session, waiter.arguments, now, out)
    except SharedMirrorError as error:
        grace = isinstance(error, RankAttached)
        deadline = min(waiter.limit, session.since + _DYING_GRACE_S) if grace else waiter.limit
        if (error.retryable or grace) and deadline > now and not state.stopping:
            waiter.error, waiter.deadline = error, deadline
            return False
        _answer(state, session, waiter, _failure(waiter.request, error), out)
        return True
    body["id"] = waiter.request
    _answer(state, session, waiter, body, out)
    return True


def _answer(state: State, session: Session, waiter: Waiter, body: dict[str, Any], out: Effects) -> None:
    if waiter.op == "attach" and "error" in body:
        sessions.withdraw(state, session, out)
    if waiter.op in MUTATING:
        session.last_request, session.last_reply = waiter.request, body
        if session.id in state.sessions and session.incarnation is not None:
            out.writes.append(Put("result", session.id, body))
    out.replies.append((session.id, body))


def _expire(state: State, now: float, out: Effects) -> None:
    late = [waiter for waiter in state.waiters if waiter.deadline <= now]
    if late:
        state.waiters = [waiter for waiter in state.waiters if waiter.deadline > now]
    for waiter in late:
        # Once more, with no time left: the answer is what there is now.
        waiter.arguments = {**waiter.arguments, "wait_s": 0}
        if not _try(state, state.sessions[waiter.session], waiter, now, out):
            state.waiters.append(waiter)


def _retry(state: State, now: float, out: Effects) -> None:
    # A handler may end other sessions, and with them their waiters: never work on a stale copy.
    for waiter in list(state.waiters):
        if waiter in state.waiters and _try(state, state.sessions[waiter.session], waiter, now, out):
            state.waiters = [other for other in state.waiters if other is not waiter]


def _failure(request: int, error: SharedMirrorError) -> dict[str, Any]:
    return {"id": request, "error": error.to_wire()}


__all__ = [
    "MUTATING",
    "REPEATABLE",
    "Died",
    "Disconnected",
    "Drop",
    "Event",
    "Gone",
    "Hello",
    "Ready",
    "Request",
    "Resume",
    "Stop",
    "Tick",
    "apply",
    "next_deadline",
]
