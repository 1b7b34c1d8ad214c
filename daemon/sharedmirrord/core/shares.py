"""Who may have how much of a pool: owners of pages, fair shares, and what an engine may hold.

The owner of a page is the engine, by its name, that leased it. An engine is attached while a session of
it lives. Its fair share is an equal part of the pool: within it, an attached engine loses no page while
another one is over its own. What an engine holds (open leases, pins of its hits) cannot be evicted, so
that has a bound of its own.

Owners are no more durable than the order of use: after a restart sealed pages belong to nobody.
"""

from __future__ import annotations

from sharedmirrord.core.model import Incarnation, Pool, State


def recount(state: State, pool: Pool) -> None:
    """Note which engines are attached and their shares, after a session came or ended or the pool's memory changed."""
    table = pool.table
    if table is None:
        return
    names = attached(state, pool)
    for name, number in list(pool.owners.items()):
        if name not in names and not table.owned.get(number):
            del pool.owners[name]
            table.forget_owner(number)
    for name in sorted(names):
        owner_of(pool, name)
    pool.attached = frozenset(pool.owners[name] for name in names)
    pool.share = max(1, (pool.visible_pages - 1) // max(1, len(names)))


def attached(state: State, pool: Pool) -> set[str]:
    """Return the names of the engines with a living session in the pool."""
    return {
        state.incarnations[session.incarnation].engine
        for session in state.sessions.values()
        if session.pool == pool.id and session.lives and session.incarnation is not None
    }


def owner_of(pool: Pool, engine: str) -> int:
    """Return the number under which an engine owns pages; a new one where it has none."""
    number = pool.owners.get(engine)
    if number is None:
        taken = set(pool.owners.values())
        number = pool.owners[engine] = next(n for n in range(1, len(taken) + 2) if n not in taken)
    return number


def pages_to_hold(pool: Pool, incarnation: Incarnation, wanted: int) -> int:
    """Return how many pages must have memory, so that ``wanted`` more are within an engine's share; 0: any number."""
    if incarnation.max_held is not None or len(pool.attached) < 2:
        return 0
    return (incarnation.held + wanted) * len(pool.attached) + 1


def may_hold(pool: Pool, incarnation: Incarnation) -> int:
    """Return how many pages an engine may hold; an engine alone that named no bound has none."""
    if incarnation.max_held is not None:
        return incarnation.max_held
    return pool.share if len(pool.attached) > 1 else 1 << 62
