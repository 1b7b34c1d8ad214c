"""What a restart must not change, as plain values; and what must hold of any state, by its own words.

``durable_view`` leaves out what is rebuilt or asked for again after a restart: whether a session's
process has ended, which ranks have drained, and the order of eviction. ``state_problems`` names the
invariant that is broken.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack

from sharedmirror.types import AWAY_HITS, PoolKind
from sharedmirrord.core import shares
from sharedmirrord.core.model import OpenLease, Pool, SessionState, State
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import PageState
from tests.daemon.table_problems import problems

HELD = (PageState.LEASED, PageState.QUARANTINED)
ALIVE = (SessionState.ATTACHED, SessionState.LOST)


def plain(value: Any) -> Any:
    """Return the value as it comes back from a record."""
    return msgpack.unpackb(msgpack.packb(value, use_bin_type=True), raw=False, strict_map_key=False)


def bits(number: int) -> list[int]:
    return [at for at in range(number.bit_length()) if number >> at & 1]


def durable_view(state: State) -> dict[str, Any]:
    """Return what must be the same after a restart."""
    return {
        "pools": {pool.id: _pool(pool) for pool in state.pools.values() if pool.ready},
        "free": list(state.space._free),
        "incarnations": {i.id: [i.record(), sorted(i.sessions)] for i in state.incarnations.values()},
        "sessions": {
            s.id: plain([s.record(), s.last_request, s.last_reply, sorted(s.leases), sorted(s.hits)])
            for s in state.sessions.values()
            if s.incarnation is not None
        },
        "leases": {lease.id: _lease(lease) for lease in state.leases.values()},
        "hits": {hit.id: plain(hit.record()) for hit in state.hits.values()},
    }


def _pool(pool: Pool) -> dict[str, Any]:
    view: dict[str, Any] = {"record": plain(pool.record()), "marks": pool.marks(), "planes": dict(pool.planes)}
    view |= {"regions": list(pool.regions), "places": dict(pool.places), "pending": dict(pool.pending)}
    table = pool.table
    if table is not None:
        kept = table.pins.keys() | set(table.index.values())
        # A cleared page that nobody pins is free, whether or not it was swept up already.
        states = ["held" if s in HELD else "kept" if page in kept else "free" for page, s in enumerate(table.states)]
        view |= {"states": states, "generations": list(table.generations), "keys": dict(table.index)}
        view |= {"pins": dict(table.pins), "parents": {page: table._parent(page) for page in table.index.values()}}
    return view


def _lease(lease: OpenLease) -> dict[str, Any]:
    pages = bits(lease.open)
    return {
        "of": [lease.pool, lease.incarnation, lease.owner, lease.number, lease.by_reserve, dict(lease.writers)],
        "pages": [list(lease.pages), list(lease.generations)],
        "open": pages,
        "keys": [[lease.keys[at], lease.parents[at] if lease.keys[at] else None] for at in pages],
        "keyed": lease.keyed & lease.open,
        "revoked": lease.revoked & lease.open,
        "checks": {at: said for at, said in lease.checks.items() if lease.open >> at[0] & 1},
        "committed": {rank: done & lease.open for rank, done in lease.committed.items() if done & lease.open},
    }


def state_problems(state: State) -> list[str]:
    """Return what breaks an invariant, and what could never come to an end; empty when all is well."""
    found = [f"pool {p.id}: {text}" for p in state.pools.values() if p.table for text in problems(p.table)]
    for pool in state.pools.values():
        if pool.table is not None:
            found += _table_problems(state, pool, pool.table)
        found += _elastic_problems(state, pool)
    found += _region_problems(state)
    for lease in state.leases.values():
        found += _lease_problems(state, lease)
    found += _hit_problems(state)
    found += _share_problems(state)
    found += _session_problems(state)
    used = [*state.pools, *state.incarnations, *state.sessions, *state.leases]
    used += [number for number in state.hits if number < AWAY_HITS]
    if max(used, default=0) >= state.next_id or len(used) != len(set(used)):
        found.append(f"ids {sorted(used)} are not all different and below {state.next_id}")
    return found


def _table_problems(state: State, pool: Pool, table: PageTable) -> list[str]:
    found = []
    claims = Counter(
        lease.pages[at] for lease in state.leases.values() if lease.pool == pool.id for at in bits(lease.open)
    )
    for page in range(table.pages):
        now, generation = PageState(table.states[page]), table.generations[page]
        if page == 0 and now is not PageState.RESERVED:
            found.append(f"1: page {page} is {now.name}")
        if page and now is PageState.RESERVED and page < min(pool.visible_pages, table.limit):
            found.append(f"1: page {page} has memory and is {now.name}")
        if page >= pool.visible_pages and now not in (PageState.RESERVED, PageState.QUARANTINED):
            found.append(f"2: page {page} has no memory, or is about to lose it, and is {now.name}")
        if claims[page] > 1:
            found.append(f"2: page {page} is in {claims[page]} leases")
        if claims[page] and now not in HELD:
            found.append(f"2: page {page} is leased and {now.name}")
        if not claims[page] and now is PageState.LEASED:
            found.append(f"2: page {page} is LEASED and in no lease")
        if generation and generation >= pool.generation_high:
            found.append(f"3: page {page} has generation {generation}, the mark is {pool.generation_high}")
    pins = Counter(page for hit in state.hits.values() if hit.pool == pool.id for page in hit.pages)
    if dict(pins) != table.pins:
        found.append(f"6: hits pin {dict(pins)}, the table has {table.pins}")
    waiting = Counter(
        lease.keys[at]
        for lease in state.leases.values()
        if lease.pool == pool.id
        for at in bits(lease.open & lease.keyed & ~lease.revoked)
    )
    if dict(waiting) != pool.pending:
        found.append(f"5: keys {dict(waiting)} are being written, pending are {pool.pending}")
    return found


def _elastic_problems(state: State, pool: Pool) -> list[str]:
    elastic, name = pool.elastic, f"pool {pool.id}"
    if elastic is None:
        return []
    found = []
    sizes = [elastic.region_bytes(at, elastic.backed) for at in range(len(pool.regions))]
    if sizes != [sum(length for _, _, length in region.extents) for region in pool.regions]:
        found.append(f"2: {name} has memory for {elastic.backed} pages and other regions")
    if not elastic.level(elastic.least) <= elastic.target <= elastic.backed <= elastic.most:
        found.append(f"{name} has {elastic.backed} of {elastic.least} to {elastic.most}, going to {elastic.target}")
    workers = {s.id for s in state.sessions.values() if s.pool == pool.id and s.rank is not None}
    if elastic.awaited - workers or (elastic.awaited and elastic.told is None):
        found.append(f"2: {name} awaits {elastic.awaited}; its workers are {workers}, they were told {elastic.told}")
    if elastic.told is not None and not elastic.awaited and state.ready:
        found.append(f"2: {name} awaits nobody and keeps what it was to give back")
    return found


def _region_problems(state: State) -> list[str]:
    taken = sorted(extent for pool in state.pools.values() for region in pool.regions for extent in region.extents)
    found = [
        f"2: regions overlap at {start}"
        for (arena, offset, size), (after, start, _) in zip(taken, taken[1:], strict=False)
        if arena == after and offset + size > start
    ]
    if sum(size for _, _, size in taken) + state.space.free_bytes != state.space.size_bytes:
        found.append("2: regions and free room do not sum to the arena")
    return found


def _lease_problems(state: State, lease: OpenLease) -> list[str]:
    pool, name = state.pools.get(lease.pool), f"lease {lease.id}"
    if pool is None or pool.table is None or lease.incarnation not in state.incarnations:
        return [f"2: {name} is of no leased pool or no engine"]
    found = []
    for at in bits(lease.open):
        if not 0 < lease.pages[at] < pool.table.pages:
            found.append(f"2: {name} has page {lease.pages[at]}")
        elif pool.table.generations[lease.pages[at]] != lease.generations[at]:
            found.append(f"3: {name} has page {lease.pages[at]} under another generation than the table")
        if (lease.keys[at] is not None) != bool(lease.keyed >> at & 1):
            found.append(f"5: {name} does not know whether position {at} has a key")
    if lease.complete() & lease.keyed & ~lease.revoked or lease.evident() & lease.revoked:
        found.append(f"4: {name} has pages that should be sealed or freed")
    for rank in lease.missing_ranks() if lease.revoked & lease.open else ():
        writer = state.sessions.get(lease.writers[rank])
        if writer is None or not writer.may_copy:
            found.append(f"4: nobody can ever give evidence for rank {rank} of {name}: its pages are lost")
    owner = state.sessions.get(lease.owner)
    if owner is not None and lease.id not in owner.leases:
        found.append(f"{name} is not known to its owner")
    if owner is None and lease.open & ~lease.revoked:
        found.append(f"{name} has no owner and is not revoked")
    return found


def _hit_problems(state: State) -> list[str]:
    found = []
    for hit in state.hits.values():
        holder = state.sessions.get(hit.session)
        fence = hit.id >= AWAY_HITS and hit.released and not hit.pages
        if fence != (hit.id in state.fences):
            found.append(f"6: hit {hit.id} is a fence and does not count as one, or is none and does")
        if hit.released and not hit.awaited:
            found.append(f"6: hit {hit.id} is released, awaits nobody and is still there")
        if hit.awaited - state.sessions.keys():
            found.append(f"6: hit {hit.id} awaits sessions that are gone")
        if not hit.released and (holder is None or hit.id not in holder.hits):
            found.append(f"6: nobody holds hit {hit.id}: its pins are lost")
        if hit.incarnation not in state.incarnations or hit.pool not in state.pools:
            found.append(f"6: hit {hit.id} is of no engine or no pool")
    return found


def _share_problems(state: State) -> list[str]:
    """What the counters of holders and shares say must be what there is to count."""
    held: Counter[int] = Counter()
    for lease in state.leases.values():
        held[lease.incarnation] += lease.open.bit_count()
    for hit in state.hits.values():
        held[hit.incarnation] += len(hit.pages)
    found = [
        f"engine {i.engine} holds {held[i.id]} pages, counted are {i.held}"
        for i in state.incarnations.values()
        if held[i.id] != i.held
    ]
    for pool in state.pools.values():
        if pool.table is None:
            continue
        names = shares.attached(state, pool)
        if {pool.owners.get(name) for name in names} != set(pool.attached):
            found.append(f"pool {pool.id} counts {pool.attached} of {pool.owners} as attached, there are {names}")
        if pool.share != max(1, (pool.visible_pages - 1) // max(1, len(names))):
            found.append(f"pool {pool.id} has a fair share of {pool.share} for {len(names)} engines")
        if len(set(pool.owners.values())) != len(pool.owners) or pool.table.owned.keys() - {0, *pool.owners.values()}:
            found.append(f"pool {pool.id} has owners {pool.owners} and pages of {pool.table.owned}")
    return found


def _session_problems(state: State) -> list[str]:
    found = []
    for session in state.sessions.values():
        if session.incarnation is None:
            continue
        incarnation, pool = state.incarnations.get(session.incarnation), state.pools.get(session.pool or 0)
        if incarnation is None or pool is None or session.id not in incarnation.sessions:
            found.append(f"session {session.id} is of no engine or no pool")
        elif session.rank is not None and not 0 <= session.rank < pool.properties.world_size:
            found.append(f"session {session.id} is rank {session.rank}")
        if session.leases - state.leases.keys() or session.hits - state.hits.keys():
            found.append(f"session {session.id} holds leases or hits that are over")
    found += [
        f"incarnation {incarnation.id} has sessions that are gone"
        for incarnation in state.incarnations.values()
        if incarnation.sessions - state.sessions.keys() or set(incarnation.ranks.values()) - state.sessions.keys()
    ]
    for pool in state.pools.values():
        static = pool.properties.kind is PoolKind.STATIC
        if pool.holder is not None and (not static or pool.holder not in state.incarnations):
            found.append(f"pool {pool.id} is held by {pool.holder}")
        if static == (pool.table is not None) and pool.ready:
            found.append(f"pool {pool.id} is {pool.properties.kind.value} and has the wrong kind of table")
    return found
