"""How sessions come back and how they end: resume, detach, death and the proof of it.

Evidence flows from here to leases and hits: a session that detached or is proven gone can write and
read no more; one whose process has merely ended may have left forks, and its pages are in doubt.
"""

from __future__ import annotations

import hmac
from typing import Any

from sharedmirror.errors import InstanceChanged, PoolInUse, PoolMismatch, PoolNotFound, UsageError
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import away, growth, hits, leases, room, shares
from sharedmirrord.core.durable import Delete, Put
from sharedmirrord.core.model import Effects, Ended, Peer, Pool, Session, SessionState, State


def check_resume(state: State, number: int, peer: Peer) -> None:
    """Raise InstanceChanged unless ``peer`` is the process of session ``number``, with its token."""
    session = state.sessions.get(number)
    if session is None or session.state is SessionState.DEAD:
        raise InstanceChanged(f"session {number} has ended; attach again", session=number)
    known = session.peer
    same = peer.pid == known.pid and peer.start_time == known.start_time and peer.uid == known.uid
    if not same or not hmac.compare_digest(peer.token_hash, known.token_hash):
        raise InstanceChanged(f"session {number} belongs to another process; attach again", session=number)


def resume(
    state: State,
    session: Session,
    held_leases: list[int],
    held_hits: list[int],
    retry: int | None,
    out: Effects,
    claims: away.Claims | None = None,
) -> None:
    """A session is back. What it took and does not name is given up; what it owes is asked for again.

    ``retry`` is the request that it will repeat: the answer, which it has not seen, may name a lease or
    a hit that it could not name. ``claims`` is what it took while there was no daemon.
    """
    if session.last_reply is not None and session.last_request == retry:
        held_leases = [*held_leases, session.last_reply.get("lease", 0)]
        held_hits = [*held_hits, session.last_reply.get("hit", 0)]
    # The newest connection wins; what waited on the older one is repeated on this one.
    state.waiters = [waiter for waiter in state.waiters if waiter.session != session.id]
    session.connected = True
    if session.state is SessionState.LOST:
        session.state = SessionState.ATTACHED
    if claims is not None:
        held_hits = [*held_hits, *away.adopt(state, session, claims, out)]
    state.survivors.discard(session.id)
    state.moved = True
    for number in sorted(session.leases.difference(held_leases)):
        lease = state.leases[number]
        leases.revoke(state, lease, lease.open, out)
        leases.settle(state, lease, out)
    for number in sorted(session.hits.difference(held_hits)):
        hits.let_go(state, state.hits[number], out)
    if claims is not None:
        away.fence(state, session, claims.below, out)
    leases.ask_again(state, session, out)
    hits.ask_again(state, session, out)
    growth.ask_again(state, session, out)


def withdraw(state: State, session: Session, out: Effects) -> None:
    """An attach that was waiting is given up: take its announcement back."""
    for pool in [pool for pool in state.pools.values() if not pool.ready and session.id in pool.announced.values()]:
        pool.announced = {rank: holder for rank, holder in pool.announced.items() if holder != session.id}
        pool.planes = {rank: planes for rank, planes in pool.planes.items() if rank in pool.announced}
        pool.asked = {rank: count for rank, count in pool.asked.items() if rank in pool.announced}
        pool.nodes = {rank: node for rank, node in pool.nodes.items() if rank in pool.announced}
        state.moved = True
        if not pool.announced:
            del state.pools[pool.id]
    if session.state is SessionState.WAITING:
        session.state = SessionState.NEW
    _drop_empty_incarnations(state, out)


def detach(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``detach``: the client has drained its streams; ``unmapped`` says whether its mapping is gone too."""
    unmapped = arg.flag(arguments, "unmapped", True)
    if session.state is SessionState.DETACHED:
        return {}
    if session.incarnation is None:
        raise UsageError("this connection is not attached", session=session.id)
    session.state = SessionState.DETACHED
    leases.writer_ended(state, session, True, out)
    leases.owner_ended(state, session, out)
    hits.holder_ended(state, session, out)
    hits.worker_gone(state, session, out)
    _leave_rank(state, session)
    if session.pool is not None:
        shares.recount(state, state.pools[session.pool])
    state.moved = True
    if unmapped:
        forget(state, session, "detached", now, out)
    else:
        out.writes.append(Put("session", session.id, session.record()))
    return {}


def pool_named(state: State, name: str, tag: str | None) -> Pool:
    """Return the pool of this name; ``tag`` None: whichever there is. Raises PoolNotFound or PoolMismatch."""
    pools = [pool for pool in state.pools.values() if pool.name == name and tag in (None, pool.tag)]
    if not pools:
        tagged = f" with tag {tag!r}" if tag is not None else ""
        raise PoolNotFound(f"there is no pool {name!r}{tagged}; `sharedmirror status` lists those there are", pool=name)
    if len(pools) > 1:
        raise PoolMismatch(
            f"{len(pools)} pools are named {name!r}; say which tag: {sorted(pool.tag for pool in pools)}"
        )
    return pools[0]


def drop(state: State, name: str, tag: str | None, out: Effects) -> int:
    """Give a pool's memory and cache up; returns the bytes freed.

    Raises PoolNotFound, PoolMismatch when several tags have this name, and PoolInUse while any process,
    however it ended, may still map the pool.
    """
    pool = pool_named(state, name, tag)
    users = room.users(state, pool)
    if users or not pool.ready:
        pids = sorted({session.peer.pid for session in users} | {pid for session in users for pid in session.holders})
        raise PoolInUse(f"pool {name!r} is in use by processes {pids}; end them first", pids=pids)
    return room.drop(state, pool, out)


def died(state: State, session: Session, now: float, out: Effects) -> None:
    """The process has ended, but a fork of it may still hold the mapping and its device's copies."""
    if session.state in (SessionState.DEAD, SessionState.DETACHED) or session.incarnation is None:
        return
    session.state = SessionState.DEAD
    leases.writer_ended(state, session, False, out)
    leases.owner_ended(state, session, out)
    hits.holder_ended(state, session, out)
    if session.pool is not None:
        shares.recount(state, state.pools[session.pool])
    state.moved = True


def gone(state: State, session: Session, now: float, out: Effects) -> None:
    """Nothing of the process is left: this is the evidence for all it could write or read."""
    how = "detached" if session.state is SessionState.DETACHED else "died"
    if session.incarnation is not None:
        leases.writer_ended(state, session, True, out)
        leases.owner_ended(state, session, out)
        hits.holder_ended(state, session, out)
        hits.worker_gone(state, session, out)
        if session.id in state.survivors:
            # Nobody knows what it took while there was no daemon, and gave to its workers.
            away.fence(state, session, away.ALL, out)
        _leave_rank(state, session)
    else:
        withdraw(state, session, out)
    forget(state, session, how, now, out)


def forget(state: State, session: Session, how: str, now: float, out: Effects) -> None:
    """Take a session, whose every trace is settled, out of the state."""
    incarnation = state.incarnations.get(session.incarnation) if session.incarnation is not None else None
    if incarnation is not None and session.pool is not None:
        pool = state.pools[session.pool]
        pool.used = now
        state.ended.append(
            Ended(
                session.id, session.peer.pid, incarnation.engine, session.role.value, session.rank, pool.name, how, now
            )
        )
        incarnation.sessions.discard(session.id)
        out.writes += [Delete("session", session.id), Delete("result", session.id)]
        _drop_empty_incarnations(state, out)
    growth.worker_gone(state, session)
    del state.sessions[session.id]
    if session.pool is not None:
        shares.recount(state, state.pools[session.pool])
    state.survivors.discard(session.id)
    state.waiters = [waiter for waiter in state.waiters if waiter.session != session.id]
    out.forgotten.append(session.id)
    state.moved = True


def _leave_rank(state: State, session: Session) -> None:
    if session.incarnation is not None and session.rank is not None:
        incarnation = state.incarnations[session.incarnation]
        if incarnation.ranks.get(session.rank) == session.id:
            del incarnation.ranks[session.rank]


def _drop_empty_incarnations(state: State, out: Effects) -> None:
    forming = {pool.former for pool in state.pools.values() if not pool.ready}
    used = {lease.incarnation for lease in state.leases.values()} | {hit.incarnation for hit in state.hits.values()}
    for number, incarnation in list(state.incarnations.items()):
        if incarnation.sessions or number in forming or number in used:
            continue
        del state.incarnations[number]
        if state.current.get((incarnation.pool_name, incarnation.engine)) == number:
            del state.current[incarnation.pool_name, incarnation.engine]
        out.writes.append(Delete("incarnation", number))
        for pool in state.pools.values():
            if pool.holder == number:
                pool.holder = None
                out.writes.append(Put("pool", pool.id, pool.record()))
