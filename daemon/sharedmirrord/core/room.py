"""Who has the arena's room, and who makes way when another needs it.

A pool that no session can map any more is idle: it is kept warm until another pool needs its room. Then
the idle pools that were left longest ago go, as many as are needed, and only if that is enough.

Where that is not enough, elastic pools in use give back what they have above their fair share: the arena
is shared out evenly, and what a pool cannot use, or cannot do without, counts for the others.
"""

from __future__ import annotations

from sharedmirror.errors import ArenaBusy
from sharedmirrord.core.durable import Delete, DropTable
from sharedmirrord.core.model import Effects, Pool, Session, State

Bounds = tuple[int, int]
"""The least and the most bytes that a pool can have."""


def users(state: State, pool: Pool) -> list[Session]:
    """Return the sessions that may still map a pool, however their processes ended."""
    return [session for session in state.sessions.values() if session.pool == pool.id]


def idle(state: State) -> list[Pool]:
    """Return the pools that nobody can map, the one that was left longest ago first."""
    used = {session.pool for session in state.sessions.values()}
    found = [pool for pool in state.pools.values() if pool.ready and pool.id not in used]
    return sorted(found, key=lambda pool: (pool.used, pool.id))


def available_bytes(state: State) -> int:
    """Return the bytes that are free or in idle pools."""
    return state.space.free_bytes + sum(pool.size_bytes for pool in idle(state))


def reclaim(state: State, needed_bytes: int, asker: Pool, out: Effects) -> bool:
    """Make ``needed_bytes`` free by dropping idle pools; drops none, and returns False, if that is not enough."""
    if state.space.free_bytes >= needed_bytes:
        return True
    if available_bytes(state) < needed_bytes:
        return False
    for pool in idle(state):
        freed = drop(state, pool, out)
        out.notes.append(f"event=pool_reclaimed pool={pool.name!r} tag={pool.tag!r} bytes={freed} for={asker.name!r}")
        if state.space.free_bytes >= needed_bytes:
            break
    return True


def drop(state: State, pool: Pool, out: Effects) -> int:
    """Give the memory and the cache of an idle pool up; returns the bytes freed."""
    held = [lease.pool for lease in state.leases.values()] + [hit.pool for hit in state.hits.values()]
    if pool.id in held:
        raise RuntimeError(f"pool {pool.name!r} has leases or hits and no session")
    for region in pool.regions:
        for _arena, offset, size_bytes in region.extents:
            state.space.release(offset, size_bytes)
    del state.pools[pool.id]
    if pool.table is not None:
        out.writes.append(DropTable(pool.id))
    out.writes += [Delete("pool", pool.id), Delete("marks", pool.id)]
    state.moved = True
    return pool.size_bytes


# -- fair shares ---------------------------------------------------------------------------------


def bounds(pool: Pool) -> Bounds:
    """Return the least and the most bytes of a pool that is ready."""
    elastic = pool.elastic
    if elastic is None:
        return pool.size_bytes, pool.size_bytes
    return elastic.size_bytes(elastic.level(elastic.least)), elastic.size_bytes(elastic.most)


def fair_level(state: State, asker: Bounds | None = None) -> int:
    """Return the bytes up to which each pool in use may go, so that all of them, bounded, fit into the arena.

    ``asker`` are the bounds of one that is not ready yet.
    """
    used = {session.pool for session in state.sessions.values()}
    ranges = [bounds(pool) for pool in state.pools.values() if pool.ready and pool.id in used]
    ranges += [asker] if asker is not None else []
    low, high = 0, state.space.size_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(least, min(middle, most)) for least, most in ranges) <= state.space.size_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def ask(state: State, needed_bytes: int, asker: Pool, asker_bounds: Bounds | None = None) -> list[Pool]:
    """Have elastic pools above their fair share give back until ``needed_bytes`` will be there.

    Returns those that are giving; none, and changes nothing, when it would not be enough.
    """
    level = fair_level(state, asker_bounds)
    missing = needed_bytes - available_bytes(state)
    givers = []
    for pool in state.pools.values():
        elastic = pool.elastic
        if elastic is None or pool is asker or not pool.ready or not users(state, pool):
            continue
        missing -= elastic.size_bytes(elastic.backed) - elastic.size_bytes(elastic.target)
        lowest = min(elastic.within(level), elastic.target)
        spare = elastic.size_bytes(elastic.target) - elastic.size_bytes(lowest)
        givers.append((spare, pool, elastic, lowest))
    if missing > sum(spare for spare, *_ in givers):
        return []
    for _, _, elastic, lowest in sorted(givers, key=lambda giver: -giver[0]):
        while missing > 0 and elastic.target > lowest:
            before = elastic.size_bytes(elastic.target)
            elastic.target = max(lowest, elastic.below(elastic.target))
            missing -= before - elastic.size_bytes(elastic.target)
    return [pool for _, pool, elastic, _ in givers if elastic.giving]


def attach_waits(state: State) -> bool:
    """Whether an attach waits for room: while it does, no pool grows."""
    return any(isinstance(waiter.error, ArenaBusy) for waiter in state.waiters)


def demanded(state: State, pool: Pool) -> bool:
    """Whether somebody waits for room that ``pool`` gives back, or would take from it."""
    if attach_waits(state):
        return True
    others = (other.elastic for other in state.pools.values() if other is not pool)
    return any(elastic is not None and elastic.wanted > elastic.backed for elastic in others)
