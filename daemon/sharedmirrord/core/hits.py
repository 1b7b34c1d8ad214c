"""Looking up, pinning, releasing, evicting and clearing.

Keeps invariants 5 (only sealed pages are found) and 6 (a pinned page is never evicted; pins of a dead
holder stay until every worker of its engine has drained its loads or is proven gone).
"""

from __future__ import annotations

from typing import Any

from sharedmirror.errors import EnvironmentFault, StaleLease, UsageError
from sharedmirror.types import AWAY_HITS, split_away_hit
from sharedmirrord.core import arguments as arg
from sharedmirrord.core.durable import Delete, Put, SetSlots
from sharedmirrord.core.leases import incarnation_of, pool_of, refuse_to_free, revoke_keyed, table_of
from sharedmirrord.core.model import Effects, OpenHit, Pool, Session, State
from sharedmirrord.core.shares import may_hold


class _Pending(EnvironmentFault):
    """Raised while a lookup that may wait would find keys that are being written."""

    code = "pending"
    retryable = True


MISSING = -1
"""Stands in ``pages`` for a key without a readable page."""


def lookup(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``lookup``: find and pin. ``states`` has one letter a key: h(it), p(ending), m(iss).

    What the engine may not hold besides what it holds counts as a miss.
    """
    pool = pool_of(state, session)
    table = table_of(pool)
    keys = arg.keys(arguments)
    mode = arguments.get("mode", "prefix")
    if mode == "prefix":
        pages = table.find(keys)
        if MISSING in pages:
            del pages[pages.index(MISSING) :]
        found = pages
        states = "h" * len(pages) + _waiting(pool, keys[len(pages) :])
    elif mode == "each":
        pages = table.find(keys)
        found = [page for page in pages if page != MISSING]
        states = "".join(
            "h" if page != MISSING else "p" if key in pool.pending else "m"
            for key, page in zip(keys, pages, strict=True)
        )
    else:
        raise UsageError(f"mode must be 'prefix' or 'each', not {mode!r:.80}")
    incarnation = state.incarnations[incarnation_of(session)]
    room = max(0, may_hold(pool, incarnation) - incarnation.held)
    if len(found) > room:
        pages, states = _shorten(pages, states, room, mode)
        found = [page for page in pages if page != MISSING]
    elif arguments.get("wait_s") and _worth_waiting(states, mode):
        raise _Pending("keys are being written")
    pool.hits += len(found)
    pool.misses += len(keys) - len(found)
    if not found:
        return {"hit": 0, "pages": pages, "states": states}
    incarnation.held += len(found)
    hit = OpenHit(state.new_id(), pool.id, incarnation.id, session.id, found)
    table.use(found)
    table.pin(found)
    state.hits[hit.id] = hit
    session.hits.add(hit.id)
    out.writes.append(Put("hit", hit.id, hit.record()))
    return {"hit": hit.id, "pages": pages, "states": states}


def _shorten(pages: list[int], states: str, room: int, mode: str) -> tuple[list[int], str]:
    """Keep the first ``room`` pages that were found; the others, and with a prefix all keys behind it, are missed."""
    if mode == "prefix":
        return pages[:room], "h" * room + "m" * (len(states) - room)
    kept: list[int] = []
    letters = []
    for page, letter in zip(pages, states, strict=True):
        over = letter == "h" and room <= 0
        room -= letter == "h"
        kept.append(MISSING if over else page)
        letters.append("m" if over else letter)
    return kept, "".join(letters)


def _worth_waiting(states: str, mode: str) -> bool:
    """Whether keys that are being written would make the answer longer."""
    return states.lstrip("h").startswith("p") if mode == "prefix" else "p" in states


def _waiting(pool: Pool, keys: list[bytes]) -> str:
    pending = pool.pending
    return "".join("p" if key in pending else "m" for key in keys) if pending else "m" * len(keys)


def contains(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``contains``: the state of each key, pinning nothing."""
    pool = pool_of(state, session)
    index, pending = table_of(pool).index, pool.pending
    keys = arg.keys(arguments, distinct=False)
    return {"states": "".join("h" if key in index else "p" if key in pending else "m" for key in keys)}


def touch(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``touch``: mark readable keys and the chains they hang on as used now."""
    table = table_of(pool_of(state, session))
    found = [table.index[key] for key in arg.keys(arguments, distinct=False) if key in table.index]
    table.use(found)
    return {"touched": len(found)}


def release(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``release``: pins go once every worker of the engine has drained its loads under these hits."""
    found = [state.hits[number] for number in arg.integers(arguments, "hits") if number in state.hits]
    for hit in found:
        if hit.incarnation != session.incarnation:
            raise StaleLease(f"hit {hit.id} belongs to another engine", hit=hit.id)
    for hit in found:
        let_go(state, hit, out)
    return {}


def let_go(state: State, hit: OpenHit, out: Effects) -> None:
    """Begin the release of a hit; ends at once when no worker could be loading under it."""
    if hit.released:
        return
    hit.released = True
    hit.awaited = {worker.id for worker in state.workers(hit.incarnation) if worker.may_copy}
    holder = state.sessions.get(hit.session)
    if holder is not None:
        holder.hits.discard(hit.id)
    body = released(state, [hit.id])
    out.pushes += [(worker, body) for worker in hit.awaited]
    if not settle(state, hit, out):
        out.writes.append(Put("hit", hit.id, hit.record()))


def released(state: State, numbers: list[int]) -> dict[str, Any]:
    """Return what workers are told of hits that are over. For a fence: mark, number, and what is not over."""
    # Hits from the time without a daemon have higher numbers than any to come.
    floor = next((number for number in state.hits if number < AWAY_HITS), state.next_id)
    body: dict[str, Any] = {"push": "released", "hits": numbers, "hit_floor": floor}
    fences = []
    for number in state.fences.intersection(numbers):
        mark, below = split_away_hit(number)
        holder = state.sessions.get(state.hits[number].session)
        fences.append([number, mark, below, sorted(h for h in holder.hits if h >= AWAY_HITS) if holder else []])
    return body | {"fences": fences} if fences else body


def ask_again(state: State, session: Session, out: Effects) -> None:
    """Repeat the releases that a worker has not answered, as far as is known after a restart."""
    owed = [hit.id for hit in state.hits.values() if hit.released and session.id in hit.awaited]
    fences = [number for number in owed if number in state.fences]
    for numbers in ([number for number in owed if number not in state.fences], fences):
        if numbers:
            out.pushes.append((session.id, released(state, numbers)))


def drained(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> None:
    """The hit part of ``drained``: this worker loads no more under these hits."""
    for number in arg.integers(arguments, "hits"):
        hit = state.hits.get(number)
        if hit is not None and hit.released:
            hit.awaited.discard(session.id)
            settle(state, hit, out)


def worker_gone(state: State, session: Session, out: Effects) -> None:
    """A worker is proven gone, or has detached after draining: no load of it is under way."""
    for hit in list(state.hits.values()):
        if hit.released and session.id in hit.awaited:
            hit.awaited.discard(session.id)
            settle(state, hit, out)


def holder_ended(state: State, session: Session, out: Effects) -> None:
    """Begin the release of every hit that a session held."""
    for number in list(session.hits):
        let_go(state, state.hits[number], out)


def settle(state: State, hit: OpenHit, out: Effects) -> bool:
    """Take the pins back if nobody is awaited any more; returns whether that happened."""
    if not hit.released or hit.awaited:
        return False
    pool = state.pools[hit.pool]
    table = table_of(pool)
    freed = table.unpin(hit.pages)
    if freed:
        out.writes.append(SetSlots(pool.id, tuple(table.slot(page, pool.number) for page in freed)))
    del state.hits[hit.id]
    state.incarnations[hit.incarnation].held -= len(hit.pages)
    state.fences.discard(hit.id)
    out.writes.append(Delete("hit", hit.id))
    state.moved = True
    return True


def evict(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``evict``: free named keys; pinned ones stay and are named in the answer."""
    pool = pool_of(state, session)
    table = table_of(pool)
    evicted: list[bytes] = []
    pinned: list[bytes] = []
    pages: list[int] = []
    for key in arg.keys(arguments):
        page = table.index.get(key)
        if page is None:
            continue
        if page in table.pins:
            pinned.append(key)
            continue
        if not pages:
            refuse_to_free(state, pool, "an eviction")
        table.evict(page)
        pages.append(page)
        evicted.append(key)
    if pages:
        out.writes.append(SetSlots(pool.id, tuple(table.slot(page, pool.number) for page in pages)))
        state.moved = True
    return {"evicted": evicted, "pinned": pinned}


def clear(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``clear``: all keys vanish at once, by raising the pool's durable number."""
    pool = pool_of(state, session)
    refuse_to_free(state, pool, "a clear")
    freed = table_of(pool).clear()
    state.sweeping = True
    pool.number += 1
    out.writes.append(Put("marks", pool.id, pool.marks()))
    revoke_keyed(state, pool, out)
    state.moved = True
    return {"freed": freed}
