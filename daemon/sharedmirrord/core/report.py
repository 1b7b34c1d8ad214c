"""What ``status`` tells of the core, as plain values; see ``sharedmirror.cli`` for the schema."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sharedmirror.types import PoolKind
from sharedmirrord.core.model import OpenLease, Pool, Session, SessionState, State
from sharedmirrord.core.regions import frame_bytes
from sharedmirrord.core.transitions import PageState

OLD_LEASE_S = 600.0
"""A lease older than this raises an alarm, and nothing else: time is never evidence."""


def report(state: State, now: float) -> dict[str, Any]:
    """Return the parts of the status map that the core knows."""
    return {
        "pools": [_pool(state, pool) for pool in state.pools.values()],
        "sessions": [_session(state, session, now) for session in state.sessions.values() if session.pool is not None],
        "ended": [
            {
                "id": e.id,
                "pid": e.pid,
                "engine": e.engine,
                "role": e.role,
                "rank": e.rank,
                "pool": e.pool,
                "how": e.how,
                "ago_s": now - e.at,
            }
            for e in reversed(state.ended)
        ],  # fmt: skip
        "quarantine": [entry for lease in state.leases.values() for entry in _quarantine(state, lease)],
        "alarms": [{"code": code, "message": text} for p in state.pools.values() for code, text in p.alarms.items()]
        + [alarm for lease in state.leases.values() for alarm in _alarms(state, lease, now)],
    }


def _pool(state: State, pool: Pool) -> dict[str, Any]:
    properties = pool.properties
    ranks: dict[str, list[int]] = {}
    for incarnation in state.incarnations.values():
        held = [r for r, s in incarnation.ranks.items() if _lives(state, s) and state.sessions[s].pool == pool.id]
        if held:
            ranks[incarnation.engine] = sorted({*ranks.get(incarnation.engine, []), *held})
    count = pool.count
    bounds = count if isinstance(count, tuple) else (count, count)
    return {
        "id": pool.id,
        "name": pool.name,
        "tag": pool.tag,
        "kind": properties.kind.value,
        "layout": properties.layout.value,
        "page_size": properties.page_size,
        "frames_per_page": properties.frames_per_page,
        "world_size": properties.world_size,
        "num_host_pages": bounds[1],
        "min_host_pages": bounds[0],
        "backed_pages": pool.elastic.backed if pool.elastic else pool.num_host_pages,
        "giving_back_pages": pool.elastic.backed - pool.elastic.target if pool.elastic else 0,
        "giving_back_awaits": _pids(state, pool.elastic.awaited) if pool.elastic and pool.elastic.told else [],
        "bytes_per_host_page": pool.bytes_per_page,
        "bytes_saved_per_host_page": _saved(pool),
        "state": "ready" if pool.ready else "forming",
        "ranks_attached": ranks,
        "engines": _engines(state, pool),
        "pages": _counts(state, pool),
        "hits": pool.hits,
        "misses": pool.misses,
        "evictions": pool.table.evictions if pool.table else 0,
        "number": pool.number,
    }


def _pids(state: State, sessions: Iterable[int]) -> list[int]:
    return sorted(state.sessions[number].peer.pid for number in sessions)


def _engines(state: State, pool: Pool) -> dict[str, dict[str, int]]:
    """What each engine has of the pool: those that are attached, and those whose pages are still there."""
    table = pool.table
    if table is None:
        return {}
    held: dict[str, int] = {}
    limits: dict[str, int] = {}
    for incarnation in state.incarnations.values():
        if incarnation.pool_name == pool.name:
            held[incarnation.engine] = held.get(incarnation.engine, 0) + incarnation.held
            limits[incarnation.engine] = pool.share if incarnation.max_held is None else incarnation.max_held
    return {
        name: {
            "owned": table.owned.get(number, 0),
            "held": held.get(name, 0),
            "max_held": limits.get(name, 0),
            "share": pool.share if number in pool.attached else 0,
        }
        for name, number in sorted(pool.owners.items())
    }


def _saved(pool: Pool) -> int:
    """Bytes of a page that ranks would store more than once if they shared nothing."""
    if not pool.ready:
        return 0
    alone = sum(frame_bytes(planes) for planes in pool.planes.values()) * pool.properties.frames_per_page
    return alone - pool.bytes_per_page


def _lives(state: State, session_id: int) -> bool:
    session = state.sessions.get(session_id)
    return session is not None and session.lives


def _counts(state: State, pool: Pool) -> dict[str, int]:
    table = pool.table
    if table is not None:
        named = {state.name.lower(): table.counts[state] for state in PageState}
        return named | {"pinned": len(table.pins)}
    pages = (pool.num_host_pages or 1) - 1 if pool.ready else 0
    holder = state.incarnations.get(pool.holder) if pool.holder is not None else None
    members = [state.sessions[number] for number in holder.sessions] if holder else []
    doubtful = bool(members) and all(s.state is SessionState.DEAD for s in members)
    held = pool.properties.kind is PoolKind.STATIC and bool(members)
    return {
        "reserved": 1 if pool.ready else 0,
        "free": 0 if held else pages,
        "leased": pages if held and not doubtful else 0,
        "sealed": 0,
        "pinned": 0,
        "quarantined": pages if held and doubtful else 0,
    }


def _session(state: State, session: Session, now: float) -> dict[str, Any]:
    incarnation = state.incarnations[session.incarnation] if session.incarnation is not None else None
    return {
        "id": session.id,
        "pid": session.peer.pid,
        "uid": session.peer.uid,
        "engine": incarnation.engine if incarnation else "",
        "role": session.role.value,
        "rank": session.rank,
        "pool": state.pools[session.pool].name if session.pool is not None else "",
        "state": session.state.value,
        "age_s": now - session.since,
        "missing": list(session.missing),
        "holders": list(session.holders),
        "leases": [
            {
                "id": number,
                "pages": state.leases[number].open.bit_count(),
                "age_s": now - state.leases[number].since,
                "missing_ranks": state.leases[number].missing_ranks(),
                "revoked": bool(state.leases[number].revoked),
            }
            for number in sorted(session.leases)
        ],
        "pins": sum(len(state.hits[number].pages) for number in session.hits),
    }


def _quarantine(state: State, lease: OpenLease) -> list[dict[str, Any]]:
    entries = []
    for rank, number in lease.writers.items():
        session = state.sessions.get(number)
        open_bits = lease.open & ~(lease.committed.get(rank, 0) | lease.drained.get(rank, 0))
        if session is not None and session.state is SessionState.DEAD and open_bits:
            entries.append(
                {
                    "pool": state.pools[lease.pool].name,
                    "lease": lease.id,
                    "pages": open_bits.bit_count(),
                    "session": session.id,
                    "pid": session.peer.pid,
                    "missing": list(session.missing),
                    "holders": list(session.holders),
                }
            )
    return entries


def _alarms(state: State, lease: OpenLease, now: float) -> list[dict[str, str]]:
    age = now - lease.since
    if age < OLD_LEASE_S:
        return []
    pool, missing = state.pools[lease.pool].name, lease.missing_ranks()
    message = f"lease {lease.id} of pool {pool!r} is {age:.0f} s old; ranks {missing} have not committed"
    return [{"code": "old_lease", "message": message}]
