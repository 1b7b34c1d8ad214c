"""Elastic pools get memory, and give it back while processes are attached.

Pages that are to go are granted no more; what of them is sealed and not pinned is evicted, what is in use is
withdrawn as soon as it is free. The memory goes level by level, from the end: when a whole level is withdrawn, the
workers are told (durably: one of them may unmap at any moment from then on). When each of
them has unmapped it, or is proven gone, its memory is free.

Keeps the second half of invariant 2: memory is used for another pool only when nobody maps it any more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sharedmirror.errors import UsageError
from sharedmirror.types import Role
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import room, shares
from sharedmirrord.core.durable import Put, SetSlots
from sharedmirrord.core.elastic import Elastic
from sharedmirrord.core.model import Effects, Pool, Region, Session, State
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import PageState

_EVICT_PAGES = 2048
"""Looked at in one event: a few milliseconds of work."""


# -- growing -------------------------------------------------------------------------------------


def grow(state: State, pool: Pool, wanted: int, out: Effects, least: int = 0) -> None:
    """Back more pages, so that ``wanted`` can be granted without an eviction, as far as there is room.

    At least ``least`` pages are to have memory, so that an engine's share of them is large enough; more than the
    pool may have are in vain.
    A pool below its fair share has others give back for what it misses; that comes later.
    """
    elastic, table = pool.elastic, pool.table
    if elastic is None or table is None or least > elastic.most:
        return
    if wanted > table.free and table.sweeping:
        table.sweep(wanted - table.free)
    elastic.wanted = 0

    def short() -> int:
        return max(0, wanted - table.free, least - elastic.backed)

    if not short():
        return
    demanded = room.demanded(state, pool)
    if elastic.giving and not demanded:
        _keep(elastic, table)
    if elastic.giving or elastic.backed == elastic.most or room.attach_waits(state):
        return
    most = elastic.within(room.fair_level(state)) if demanded else elastic.most
    _extend(state, pool, elastic, table, elastic.level(min(most, elastic.backed + short())), out)
    goal = elastic.level(min(elastic.within(room.fair_level(state)), elastic.backed + short()))
    if goal > elastic.backed:
        needed = elastic.size_bytes(goal) - elastic.size_bytes(elastic.backed)
        elastic.wanted = goal if room.ask(state, needed, pool) else 0


def _keep(elastic: Elastic, table: PageTable) -> None:
    """Nobody needs what the pool was to give back: keep all but what the workers were told to unmap."""
    elastic.todo, elastic.held = [], []
    elastic.target, limit = elastic.visible, table.limit
    table.set_limit(table.pages)
    table.provide(limit, elastic.visible)


def _extend(state: State, pool: Pool, elastic: Elastic, table: PageTable, goal: int, out: Effects) -> None:
    """Take memory up to the level ``goal``, or up to the highest level below it for which there is room."""
    level = goal
    while level > elastic.backed:
        needed = elastic.size_bytes(level) - elastic.size_bytes(elastic.backed)
        # Idle pools go only for all that is needed.
        if state.space.free_bytes >= needed or (level == goal and room.reclaim(state, needed, pool, out)):
            break
        level = elastic.below(level)
    else:
        return
    pool.regions = [_longer(state, region, elastic.region_bytes(at, level)) for at, region in enumerate(pool.regions)]
    table.provide(elastic.backed, level)
    elastic.backed = elastic.target = level
    shares.recount(state, pool)
    out.writes.append(Put("pool", pool.id, pool.record()))
    out.notes.append(f"event=pool_grown pool={pool.name!r} tag={pool.tag!r} pages={level} bytes={needed}")


def _longer(state: State, region: Region, size_bytes: int) -> Region:
    more = size_bytes - region.size_bytes
    have = [(offset, length) for _, offset, length in region.extents]
    wish = state.space.wish_of(have, shared=len(region.ranks) > 1)
    extents = state.space.allocate(more, wish, have) if more else []
    if extents is None:
        raise RuntimeError("the arena has less room than it counts")
    taken = tuple((0, at, size) for at, size in extents)
    return replace(region, extents=region.extents + taken, size_bytes=size_bytes)


def extents(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``extents``: what a worker may map now."""
    if session.rank is None or session.pool is None:
        raise UsageError("only a worker that is attached maps a pool", session=session.id)
    pool = state.pools[session.pool]
    return {"backed": pool.visible_pages, "regions": visible_regions(pool, session.rank)}


def visible_regions(pool: Pool, rank: int) -> list[dict[str, Any]]:
    """Return the regions of a rank as they travel, without what is about to go."""
    elastic, found = pool.elastic, []
    for at, region in enumerate(pool.regions):
        if rank in region.ranks:
            size_bytes = region.size_bytes if elastic is None else elastic.region_bytes(at, elastic.visible)
            kept, _ = _cut(region.extents, size_bytes)
            found.append({"id": region.id, "bytes": size_bytes, "extents": kept, "ranks": list(region.ranks)})
            if elastic is not None:
                found[-1]["max_bytes"] = elastic.region_bytes(at, elastic.most)
                found[-1]["levels"] = sorted({elastic.region_bytes(at, level) for level in elastic.levels})
    return found


def _cut(extents: tuple[tuple[int, int, int], ...], size_bytes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the first ``size_bytes`` of the extents, and the rest."""
    kept: list[list[int]] = []
    rest: list[list[int]] = []
    for arena, offset, length in extents:
        taken = min(length, size_bytes)
        if taken:
            kept.append([arena, offset, taken])
        if taken < length:
            rest.append([arena, offset + taken, length - taken])
        size_bytes -= taken
    return kept, rest


# -- giving back ---------------------------------------------------------------------------------


def advance(state: State, out: Effects) -> None:
    """Go on with what pools give back, and let those grow for which it was given."""
    pools = [(pool, pool.elastic, pool.table) for pool in state.pools.values() if pool.elastic and pool.table]
    state.giving = False
    for pool, elastic, table in pools:
        if elastic.giving:
            _give(state, pool, elastic, table, out)
    wanting = [(pool, elastic, table) for pool, elastic, table in pools if elastic.wanted > elastic.backed]
    if not wanting:
        return
    for pool, elastic, table in wanting:
        # An attach that waits comes first: its pool cannot even begin.
        if not room.attach_waits(state) and not elastic.giving and room.users(state, pool):
            before = elastic.backed
            _extend(state, pool, elastic, table, elastic.wanted, out)
            state.moved |= elastic.backed > before
    if not any(elastic.giving for _, elastic, _ in pools):
        for _, elastic, _ in wanting:
            elastic.wanted = 0


def _give(state: State, pool: Pool, elastic: Elastic, table: PageTable, out: Effects) -> None:
    while elastic.giving:
        if elastic.told is None:
            level = max(elastic.target, elastic.below(elastic.backed))
            if not _withdraw(state, pool, elastic, table, level, out):
                return
            _tell(state, pool, elastic, level, out)
        if elastic.awaited:
            return
        _finish(state, pool, elastic, table, out)


def _withdraw(state: State, pool: Pool, elastic: Elastic, table: PageTable, level: int, out: Effects) -> bool:
    """Withdraw what can be of the pages from ``level`` on; returns whether that is all of them."""
    if state.waited_for(pool.id):
        return False  # nothing is evicted now, and a process that comes back may still read what it found
    if table.limit != elastic.target:
        in_use = (PageState.LEASED, PageState.SEALED, PageState.QUARANTINED)
        more = range(elastic.target, min(table.limit, elastic.backed))
        elastic.todo[:0] = [page for page in more if table.states[page] in in_use]
        table.set_limit(elastic.target)
    looked_at = [*elastic.held, *elastic.todo[-_EVICT_PAGES:]]
    del elastic.todo[-_EVICT_PAGES:]
    evicted = [page for page in looked_at if _evictable(table, page)]
    for page in evicted:
        table.evict(page)
    if evicted:
        out.writes.append(SetSlots(pool.id, tuple(table.slot(page, pool.number) for page in evicted)))
    table.withdraw()
    elastic.held = [page for page in looked_at if table.states[page] != PageState.RESERVED]
    state.giving |= bool(elastic.todo)
    return max([*elastic.held, *elastic.todo[-1:]], default=0) < level


def _evictable(table: PageTable, page: int) -> bool:
    # What was cleared is freed by the sweep, or with its last pin.
    bound = table.states[page] == PageState.SEALED and page not in table.pins
    return bound and table.index.get(table.keys[page] or b"") == page


def _tell(state: State, pool: Pool, elastic: Elastic, level: int, out: Effects) -> None:
    elastic.told = state.new_id(), level
    shares.recount(state, pool)
    elastic.awaited = {session.id for session in room.users(state, pool) if session.role is Role.WORKER}
    out.writes.append(Put("pool", pool.id, pool.record()))
    out.pushes += [(session, _push(pool, elastic, elastic.told)) for session in sorted(elastic.awaited)]


def _push(pool: Pool, elastic: Elastic, told: tuple[int, int]) -> dict[str, Any]:
    number, pages = told
    sizes = [[region.id, elastic.region_bytes(at, pages)] for at, region in enumerate(pool.regions)]
    return {"push": "shrink", "number": number, "pages": pages, "regions": sizes}


def _finish(state: State, pool: Pool, elastic: Elastic, table: PageTable, out: Effects) -> None:
    """Nobody maps the end any more: its memory is free."""
    if elastic.told is None:
        raise RuntimeError(f"pool {pool.name!r} gives back what nobody was told of")
    _, level = elastic.told
    freed = pool.size_bytes
    regions = []
    for at, region in enumerate(pool.regions):
        size_bytes = elastic.region_bytes(at, level)
        kept, rest = _cut(region.extents, size_bytes)
        for _arena, offset, length in rest:
            state.space.release(offset, length)
        regions.append(replace(region, extents=tuple((a, b, c) for a, b, c in kept), size_bytes=size_bytes))
    pool.regions = regions
    elastic.backed, elastic.told = level, None
    elastic.target = min(elastic.target, level)
    if not elastic.giving:
        table.set_limit(table.pages)
    out.writes.append(Put("pool", pool.id, pool.record()))
    freed -= pool.size_bytes
    out.notes.append(f"event=pool_shrunk pool={pool.name!r} tag={pool.tag!r} pages={level} bytes={freed}")
    state.moved = True


def shrunk(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``shrunk``: this process has unmapped what it was told to unmap."""
    number = arg.integer(arguments, "number")
    elastic = None if session.pool is None else state.pools[session.pool].elastic
    if elastic is not None and elastic.told is not None and elastic.told[0] == number:
        elastic.awaited.discard(session.id)
    return {}


def worker_gone(state: State, session: Session) -> None:
    """Nothing of a process is left: it maps nothing."""
    pool = state.pools.get(session.pool) if session.pool is not None else None
    if pool is not None and pool.elastic is not None:
        pool.elastic.awaited.discard(session.id)


def ask_again(state: State, session: Session, out: Effects) -> None:
    """Repeat what a worker that comes back has not answered."""
    pool = state.pools.get(session.pool) if session.pool is not None else None
    elastic = None if pool is None else pool.elastic
    if pool is not None and elastic is not None and elastic.told is not None and session.id in elastic.awaited:
        out.pushes.append((session.id, _push(pool, elastic, elastic.told)))
