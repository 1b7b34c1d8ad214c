"""Leases: grant, reserve, commit, seal, abort, and what a writer's end does to them.

Keeps invariants 2 (one lease a page), 4 (no page is granted again without evidence for every rank
that could write it) and 9 (a stale lease changes nothing). Every path that frees a leased page goes
through ``settle``, which asks ``OpenLease.evident``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sharedmirror.errors import (
    Cleared,
    DaemonUnavailable,
    KeyInputError,
    NoPages,
    NotResumed,
    PageError,
    RanksMissing,
    ShardMismatch,
    StaleLease,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.types import PoolKind
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import growth
from sharedmirrord.core.claims import Claim
from sharedmirrord.core.durable import Delete, Put, SetSlots
from sharedmirrord.core.model import (
    Effects,
    Incarnation,
    OpenLease,
    Pool,
    Session,
    SessionState,
    State,
    each_bit,
)
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.shares import may_hold, pages_to_hold
from sharedmirrord.core.transitions import PageState

_HIGH_STEP = 1024


def table_of(pool: Pool) -> PageTable:
    """Return the page table of a leased pool; raises WrongPoolKind for a static one."""
    if pool.properties.kind is not PoolKind.LEASED or pool.table is None:
        raise WrongPoolKind(f"pool {pool.name!r} is static: its engine hands out the pages itself", pool=pool.id)
    return pool.table


def pool_of(state: State, session: Session) -> Pool:
    """Return the pool that a session is attached to."""
    if session.pool is None or session.state is SessionState.DETACHED:
        raise UsageError("attach to a pool first", session=session.id)
    return state.pools[session.pool]


def _commit_id(lease: int, rank: int) -> int:
    return lease << 16 | rank


# -- granting ------------------------------------------------------------------------------------


def _writers(state: State, session: Session, pool: Pool) -> dict[int, int]:
    """Return rank to session for all ranks; a page needs every one of them to become whole."""
    incarnation = state.incarnations[incarnation_of(session)]
    attached = {
        rank: holder
        for rank, holder in incarnation.ranks.items()
        # After a restart of the daemon a rank that has not come back yet is still a rank.
        if state.sessions[holder].state is SessionState.ATTACHED or holder in state.survivors
    }
    missing = [rank for rank in range(pool.properties.world_size) if rank not in attached]
    if missing:
        raise RanksMissing(
            f"engine {incarnation.engine!r} cannot lease pages of pool {pool.name!r}: ranks {missing} are not "
            f"attached; start them, or start the engine anew",
            ranks=missing,
        )
    return attached


def _open(
    state: State,
    session: Session,
    pool: Pool,
    now: float,
    out: Effects,
    wanted: int,
    keys: list[bytes] | None = None,
    parents: list[bytes | None] | None = None,
    protected: set[int] | None = None,
) -> tuple[OpenLease, list[bytes]]:
    if state.stopping:
        raise DaemonUnavailable("the daemon is stopping and grants no more leases")
    table = table_of(pool)
    if wanted > table.pages - 1:
        raise UsageError(
            f"{wanted} pages were asked for; pool {pool.name!r} leases {table.pages - 1} at most", asked=wanted
        )
    writers = _writers(state, session, pool)
    incarnation = state.incarnations[incarnation_of(session)]
    growth.grow(state, pool, wanted, out, pages_to_hold(pool, incarnation, wanted))
    if incarnation.held + wanted > may_hold(pool, incarnation):
        raise _held_too_much(pool, incarnation, wanted)
    claim = Claim(pool.owners[incarnation.engine], pool.attached, pool.share)
    granted = table.grant(wanted, protected or (), may_evict=not state.waited_for(pool.id), claim=claim)
    if granted is None:
        raise _no_pages(state, pool, table, wanted, incarnation)
    incarnation.held += wanted
    pages, generations, evicted = granted
    lease = OpenLease(
        state.new_id(),
        pool.id,
        incarnation_of(session),
        session.id,
        now,
        pool.number,
        pages,
        generations,
        writers,
        keys=list(keys) if keys else [None] * wanted,
        parents=list(parents) if parents else [None] * wanted,
    )
    lease.open = lease.full
    lease.positions = dict(zip(pages, range(wanted), strict=True))
    if keys:
        lease.by_reserve = True
        lease.keyed = lease.full
        for key in keys:
            pool.pending[key] = pool.pending.get(key, 0) + 1
    state.leases[lease.id] = lease
    session.leases.add(lease.id)
    out.writes.append(Put("lease", lease.id, lease.record()))
    highest = max(generations)
    if highest >= pool.generation_high:
        pool.generation_high = highest + _HIGH_STEP
        out.writes.append(Put("marks", pool.id, pool.marks()))
    return lease, evicted


def _held_too_much(pool: Pool, incarnation: Incarnation, wanted: int) -> NoPages:
    limit = may_hold(pool, incarnation)
    why = "max_held" if incarnation.max_held is not None else f"its fair share of {len(pool.attached)} engines"
    return NoPages(
        f"{wanted} pages were asked for; engine {incarnation.engine!r} holds {incarnation.held} pages of pool "
        f"{pool.name!r} in leases and hits, and may hold {limit} ({why}). Release hits, commit or abort leases, "
        f"or connect with a larger max_held",
        asked=wanted,
        held=incarnation.held,
        max_held=limit,
    )


def _no_pages(state: State, pool: Pool, table: PageTable, wanted: int, incarnation: Incarnation) -> NoPages:
    free, sealed = table.counts[PageState.FREE], table.counts[PageState.SEALED]
    message = (
        f"{wanted} pages were asked for; pool {pool.name!r} has {free} free and {sealed} sealed pages, "
        f"of which {len(table.pins)} are pinned"
    )
    if pool.elastic is not None:
        message += f"; {pool.elastic.backed} of {table.pages} have memory"
    pids = state.waited_for(pool.id)
    if pids:
        message += f"; after a restart nothing is evicted until the processes {pids} have resumed or are proven gone"
    owned = table.owned.get(pool.owners[incarnation.engine], 0)
    if len(pool.attached) > 1 and owned + wanted > pool.share:
        message += (
            f"; engine {incarnation.engine!r} would be over its fair share, so the other engines keep theirs: "
            f"it has {owned} pages, and its share of {len(pool.attached)} engines is {pool.share}"
        )
    return NoPages(message, asked=wanted)


def refuse_to_free(state: State, pool: Pool, what: str) -> None:
    """Raise NotResumed while somebody may load sealed pages of the pool under a hit that is not known yet."""
    pids = state.waited_for(pool.id)
    if pids:
        raise NotResumed(
            f"{what} of pool {pool.name!r} must wait: after a restart nothing is freed until the processes {pids} "
            f"have resumed or are proven gone; end them, or let them run on",
            pids=pids,
        )


def incarnation_of(session: Session) -> int:
    """Return the incarnation of an attached session."""
    if session.incarnation is None:
        raise UsageError("attach to a pool first", session=session.id)
    return session.incarnation


def grant(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``lease``: n pages, all or none."""
    pool = pool_of(state, session)
    wanted = arg.integer(arguments, "n")
    if wanted < 1:
        raise UsageError("a lease has at least one page", asked=wanted)
    lease, evicted = _open(state, session, pool, now, out, wanted)
    return _granted(state, lease) | {"evicted": evicted}


def _granted(state: State, lease: OpenLease) -> dict[str, Any]:
    floor = next(iter(state.leases))
    return {"lease": lease.id, "pages": lease.pages, "generations": lease.generations, "lease_floor": floor}


def reserve(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``reserve``: pages for those of the keys that are neither readable nor being written."""
    pool = pool_of(state, session)
    table = table_of(pool)
    keys = arg.keys(arguments)
    parent = None if arguments.get("parent") is None else arg.check_key(arguments["parent"])
    index, pending = table.index, pool.pending
    parents = dict(zip(keys, [parent, *keys], strict=False))
    present = [key for key in keys if key in index]
    written = [key for key in keys if key in pending and key not in index]
    wanted = [key for key in keys if key not in index and key not in pending]
    known = {index[key] for key in present}
    if parent is not None and parent in index:
        known.add(index[parent])
    body: dict[str, Any] = {"present": present, "pending": written, "keys": wanted, "evicted": []}
    if wanted:
        lease, body["evicted"] = _open(
            state, session, pool, now, out, len(wanted), wanted, [parents[key] for key in wanted], known
        )
        body |= _granted(state, lease)
    table.use(known)
    return body


# -- commit, seal, abort -------------------------------------------------------------------------


def _lease_of(state: State, session: Session, arguments: dict[str, Any]) -> OpenLease:
    number = arg.integer(arguments, "lease")
    lease = state.leases.get(number)
    if lease is None:
        raise StaleLease(f"lease {number} is over: all its pages are sealed or freed", lease=number)
    if lease.incarnation != session.incarnation:
        raise StaleLease(f"lease {number} belongs to another engine or to an earlier launch of this one", lease=number)
    return lease


def _positions(lease: OpenLease, pages: Any) -> int:
    if pages is None:
        return lease.open
    bits = 0
    for page in arg.integers({"pages": pages}, "pages"):
        position = lease.positions.get(page)
        if position is None:
            raise PageError(f"page {page} is not in lease {lease.id}", page=page, lease=lease.id)
        bits |= 1 << position
    return bits


def _usable(state: State, lease: OpenLease, pages: Any) -> int:
    """Return the positions named, all of which must still be open; raises Cleared or StaleLease."""
    if lease.number != state.pools[lease.pool].number:
        raise Cleared(f"pool was cleared after lease {lease.id} was granted; abort it", lease=lease.id)
    if pages is not None and not pages:
        raise PageError(f"no page of lease {lease.id} is named", lease=lease.id)
    bits = _positions(lease, pages)
    usable = bits & lease.open & ~lease.revoked
    if not usable or (pages is not None and usable != bits):
        at = next(each_bit(bits & ~usable), 0)
        raise StaleLease(
            f"page {lease.pages[at]} of lease {lease.id} is over: aborted, revoked or sealed; nothing was changed",
            lease=lease.id,
            page=lease.pages[at],
        )
    return usable


def _answer(lease: OpenLease, named: int, done: tuple[list[int], list[list[int]]]) -> dict[str, Any]:
    pending = [lease.pages[at] for at in each_bit(named & lease.open & lease.keyed & ~lease.revoked)]
    return {"sealed": done[0], "pending": pending, "duplicates": done[1]}


def commit(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``commit``: this rank's copies into the pages are complete."""
    lease = _lease_of(state, session, arguments)
    if session.rank is None or lease.writers.get(session.rank) != session.id:
        raise StaleLease(f"lease {lease.id} was granted without this process as a writer", lease=lease.id)
    bits = _usable(state, lease, arguments.get("pages"))
    _compare(state, lease, session.rank, arg.checks(arguments), out)
    total = lease.committed.get(session.rank, 0) | bits
    lease.committed[session.rank] = total
    done = settle(state, lease, out)
    if lease.open:
        out.writes.append(Put("commit", _commit_id(lease.id, session.rank), lease.commit_record(session.rank)))
    return _answer(lease, bits, done)


def _compare(state: State, lease: OpenLease, rank: int, checks: list[list[int]], out: Effects) -> None:
    """Compare what ranks say of the bytes they share; pages that differ are revoked. Raises ShardMismatch."""
    for page, region, checksum in checks:
        position = lease.positions.get(page)
        if position is None:
            raise PageError(f"page {page} is not in lease {lease.id}", page=page, lease=lease.id)
        known, other = lease.checks.setdefault((position, region), (checksum, rank))
        if known != checksum:
            pool = state.pools[lease.pool]
            message = (
                f"ranks {other} and {rank} hold different bytes of page {page} in planes that are marked as shared "
                f"(region {region} of pool {pool.name!r}); "
                f"the page is not sealed. Correct the shards"
            )
            pool.alarms["shard_mismatch"] = message
            revoke(state, lease, 1 << position, out)
            settle(state, lease, out)
            raise ShardMismatch(message, page=page, ranks=[other, rank])


def seal(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``seal``: give keys to pages; they become readable when every writer has committed."""
    lease = _lease_of(state, session, arguments)
    named = arguments.get("pages")
    keys = arg.keys(arguments)
    parent = None if arguments.get("parent") is None else arg.check_key(arguments["parent"])
    pages = lease.pages if named is None else arg.integers(arguments, "pages")
    if len(keys) != len(pages):
        raise KeyInputError(f"{len(keys)} keys for {len(pages)} pages of lease {lease.id}", lease=lease.id)
    if len(set(pages)) != len(pages):
        raise PageError(f"a page of lease {lease.id} is named twice", lease=lease.id)
    bits = _usable(state, lease, pages)
    if bits & lease.keyed:
        page = lease.pages[next(each_bit(bits & lease.keyed))]
        raise StaleLease(f"page {page} of lease {lease.id} has a key already", lease=lease.id, page=page)
    pending = state.pools[lease.pool].pending
    for page, key in zip(pages, keys, strict=True):
        position = lease.positions[page]
        lease.keys[position], lease.parents[position] = key, parent
        pending[key] = pending.get(key, 0) + 1
        parent = key
    lease.keyed |= bits
    done = settle(state, lease, out)
    if lease.open:
        out.writes.append(Put("lease", lease.id, lease.record()))
    return _answer(lease, bits, done)


def abort(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``abort``: pages are freed once every rank has drained; aborting again changes nothing."""
    lease = _lease_of(state, session, arguments)
    revoke(state, lease, _positions(lease, arguments.get("pages")), out)
    settle(state, lease, out)
    return {}


def revoke(state: State, lease: OpenLease, bits: int, out: Effects) -> None:
    """Make pages unsealable and ask their writers to drain. ``settle`` frees them on evidence."""
    bits &= lease.open & ~lease.revoked
    if not bits:
        return
    _unpend(state.pools[lease.pool], lease, bits & lease.keyed)
    lease.revoked |= bits
    state.moved = True  # who waits for one of these keys waits no longer
    out.writes.append(Put("lease", lease.id, lease.record()))
    body = _revocation(state, lease, bits)
    out.pushes += [(writer, body) for writer in lease.writers.values() if writer in state.sessions]


def _revocation(state: State, lease: OpenLease, bits: int) -> dict[str, Any]:
    if lease.open & ~lease.revoked:
        return {"push": "revoked_pages", "lease": lease.id, "pages": [lease.pages[at] for at in each_bit(bits)]}
    return {"push": "revoked", "leases": [lease.id], "lease_floor": next(iter(state.leases), lease.id)}


def ask_again(state: State, session: Session, out: Effects) -> None:
    """Repeat the revocations that a writer has not answered, as far as is known after a restart."""
    for lease in state.leases.values():
        if session.rank is not None and lease.writers.get(session.rank) == session.id and lease.open & lease.revoked:
            out.pushes.append((session.id, _revocation(state, lease, lease.open & lease.revoked)))


def _unpend(pool: Pool, lease: OpenLease, bits: int) -> None:
    for at in each_bit(bits):
        key = lease.keys[at]
        if key is not None:
            left = pool.pending[key] - 1
            if left:
                pool.pending[key] = left
            else:
                del pool.pending[key]


def drained(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> None:
    """The lease part of ``drained``: this rank will never write under these generations again."""
    rank = session.rank
    said: list[tuple[OpenLease, Any]] = []
    whole = [(lease, None) for lease in arg.integers(arguments, "leases")]
    for number, pages in [*whole, *((entry[0], entry[1]) for entry in arguments.get("pages") or ())]:
        lease = state.leases.get(number)
        if lease is not None and rank is not None and lease.writers.get(rank) == session.id:
            if pages is not None:
                _positions(lease, pages)
            said.append((lease, pages))
    for lease, pages in said:
        if rank is not None and lease.id in state.leases:
            bits = lease.revoked if pages is None else _positions(lease, pages) & lease.revoked
            lease.drained[rank] = lease.drained.get(rank, 0) | bits
            settle(state, lease, out)


def settle(state: State, lease: OpenLease, out: Effects) -> tuple[list[int], list[list[int]]]:
    """Seal what is complete and free what is revoked and evident.

    Returns the pages sealed and, for those that lost their key to a page sealed before, the pair of
    freed page and winner.
    """
    pool = state.pools[lease.pool]
    table = table_of(pool)
    ready = lease.complete() & lease.keyed & ~lease.revoked
    if ready:
        _unpend(pool, lease, ready)
    sealed, linked, duplicates = table.seal(_entries(lease, ready))
    dead = lease.evident() & lease.revoked
    freed = [lease.pages[at] for at in each_bit(dead)]
    for page in freed:
        table.discard(page)
    lease.open &= ~(ready | dead)
    state.incarnations[lease.incarnation].held -= (ready | dead).bit_count()
    # A page sealed before its parent is linked only now, and its slot says so from now on.
    changed = [*sealed, *linked, *(page for page, _ in duplicates), *freed]
    if changed:
        out.writes.append(SetSlots(pool.id, tuple(table.slot(page, pool.number) for page in changed)))
        state.moved = True
    if not lease.open:
        _close(state, lease, out)
    return sealed, duplicates


def _entries(lease: OpenLease, bits: int) -> Iterator[tuple[int, bytes, bytes | None]]:
    for at in each_bit(bits):
        key = lease.keys[at]
        if key is None:
            raise RuntimeError(f"page {lease.pages[at]} of lease {lease.id} counts as keyed and has no key")
        yield lease.pages[at], key, lease.parents[at]


def _close(state: State, lease: OpenLease, out: Effects) -> None:
    if state.leases.pop(lease.id, None) is None:
        return
    owner = state.sessions.get(lease.owner)
    if owner is not None:
        owner.leases.discard(lease.id)
    out.writes.append(Delete("lease", lease.id))
    out.writes += [Delete("commit", _commit_id(lease.id, rank)) for rank in lease.writers]


# -- the end of a writer -------------------------------------------------------------------------


def writer_ended(state: State, session: Session, certain: bool, out: Effects) -> None:
    """A session can no longer commit. ``certain`` says that no copy of it can still land.

    Pages that it had not committed can never be sealed: they are revoked, and quarantined where its
    fate is unknown. What it had committed goes on.
    """
    for lease in list(state.leases.values()):
        rank = session.rank
        if rank is None or lease.writers.get(rank) != session.id:
            continue
        missing = lease.open & ~lease.committed.get(rank, 0) & ~lease.drained.get(rank, 0)
        if certain:
            lease.drained[rank] = lease.full
        else:
            table = table_of(state.pools[lease.pool])
            for at in each_bit(missing):
                table.doubt(lease.pages[at])
        revoke(state, lease, missing, out)
        settle(state, lease, out)


def owner_ended(state: State, session: Session, out: Effects) -> None:
    """Revoke what a session leased: nobody is left to seal or abort it."""
    for number in list(session.leases):
        lease = state.leases[number]
        revoke(state, lease, lease.open, out)
        settle(state, lease, out)


def revoke_keyed(state: State, pool: Pool, out: Effects) -> None:
    """After ``clear``: pages that already have their keys would be sealed under the old number."""
    for lease in list(state.leases.values()):
        if lease.pool == pool.id and lease.keyed:
            revoke(state, lease, lease.keyed, out)
            settle(state, lease, out)
