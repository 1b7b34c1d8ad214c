"""Who has the arena's room, and how a pool gets more of it.

A pool that no session can map any more is idle: it is kept warm until another pool needs its room. Then
the idle pools that were left longest ago go, as many as are needed, and only if that is enough.
"""

from __future__ import annotations

from sharedmirrord.core.durable import Delete, DropTable
from sharedmirrord.core.model import Effects, Pool, Session, State


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
