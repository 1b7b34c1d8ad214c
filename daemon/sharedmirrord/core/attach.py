"""Sessions, ranks, engine incarnations and pools: who may come, what they must bring, how they end.

Handlers raise before they change anything, so that a retryable error can be tried again when
something has moved. A pool exists from its first attach and is ready when every rank of that engine
has announced its planes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sharedmirror.errors import (
    DaemonUnavailable,
    EngineBusy,
    PoolMismatch,
    PoolNotFound,
    RankAttached,
    RankError,
    RanksMissing,
    SharedMirrorError,
    UsageError,
)
from sharedmirror.types import Layout, Plane, PoolKind, Role
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import leases, shares
from sharedmirrord.core.durable import CreateTable, Put
from sharedmirrord.core.forming import allocate
from sharedmirrord.core.growth import visible_regions
from sharedmirrord.core.model import (
    Count,
    Effects,
    Incarnation,
    Peer,
    Pool,
    Properties,
    Session,
    SessionState,
    State,
)
from sharedmirrord.core.pages import PageTable

_MAX_PAGES = (1 << 32) - 2
_MAX_NODE = 65535


def hello(state: State, session_id: int, peer: Peer, role: Role, now: float) -> None:
    """Note a process that has shaken hands; it leaves no record until it attaches."""
    state.sessions[session_id] = Session(session_id, peer, role, since=now)


def attach(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
    """``attach``: become a rank of an engine in a pool, or its scheduler."""
    if session.state not in (SessionState.NEW, SessionState.WAITING):
        raise UsageError("this connection is attached already; open another one", session=session.id)
    session.state = SessionState.WAITING
    if not state.ready:
        raise DaemonUnavailable("the daemon is still prefaulting its arena; `sharedmirror status` shows how far it is")
    if session.role is Role.OBSERVER:
        raise UsageError("an observer cannot attach", session=session.id)
    if session.role is Role.SCHEDULER:
        body = _attach_scheduler(state, session, arguments, out)
    else:
        body = _attach_worker(state, session, arguments, out)
    state.pools[body["pool"]].used = now
    return body


# -- schedulers ----------------------------------------------------------------------------------


def _attach_scheduler(state: State, session: Session, arguments: dict[str, Any], out: Effects) -> dict[str, Any]:
    name, engine = arg.text(arguments, "pool"), arg.text(arguments, "engine")
    launch = arg.optional_text(arguments, "launch")
    max_held = arg.optional_integer(arguments, "max_held", 1)
    incarnation = _current(state, name, engine)
    pool = _pool_for_scheduler(state, name, engine, incarnation)
    leases.table_of(pool)
    incarnation = _join(state, name, engine, launch, None, static=False, out=out)
    if max_held is not None and max_held != incarnation.max_held:
        incarnation.max_held = max_held
        out.writes.append(Put("incarnation", incarnation.id, incarnation.record()))
        state.moved = True
    session.mark = state.new_id()
    _bind(state, session, pool, incarnation, out)
    return _description(pool) | {"session": session.id, "incarnation": incarnation.id, "mark": session.mark}


def _pool_for_scheduler(state: State, name: str, engine: str, incarnation: Incarnation | None) -> Pool:
    if incarnation is not None:
        for session_id in incarnation.sessions:
            number = state.sessions[session_id].pool
            if number is not None:
                return state.pools[number]
    named = [pool for pool in state.pools.values() if pool.name == name and pool.ready]
    if len(named) > 1:
        tags = sorted(pool.tag for pool in named)
        raise PoolMismatch(
            f"{len(named)} pools are named {name!r}, with tags {tags}; attach a worker of engine {engine!r} first"
        )
    if not named:
        raise PoolNotFound(
            f"no pool {name!r} is ready; it is created when all workers of an engine have attached", pool=name
        )
    return named[0]


# -- workers -------------------------------------------------------------------------------------


def _attach_worker(state: State, session: Session, arguments: dict[str, Any], out: Effects) -> dict[str, Any]:
    name, tag, engine = (arg.text(arguments, key, "") for key in ("pool", "tag", "engine"))
    launch = arg.optional_text(arguments, "launch")
    properties = _properties(arguments)
    rank = arg.integer(arguments, "rank", -(1 << 31), 1 << 31)
    if not 0 <= rank < properties.world_size:
        raise RankError(f"rank {rank} is outside a world of {properties.world_size}", rank=rank)
    planes = arg.planes(arguments, rank)
    pages = _count(arguments, properties)
    node = arg.optional_integer(arguments, "node", 0, _MAX_NODE)
    static = properties.kind is PoolKind.STATIC
    incarnation = _current(state, name, engine)
    if incarnation is not None:
        _check_tag(state, incarnation, session, name, tag)
        _check_rank(state, incarnation, session, rank, launch, static)
    pool = next((pool for pool in state.pools.values() if (pool.name, pool.tag) == (name, tag)), None)
    if pool is not None:
        _check_pool(pool, properties, pages, rank, planes)
    if pool is not None and static and pool.holder is not None:
        _check_holder(state, pool, name, engine, launch)
    if pool is not None and not pool.ready:
        _check_former(state, pool, incarnation, session)
    incarnation = _join(state, name, engine, launch, rank, static=static, out=out)
    if pool is None:
        pool = Pool(state.new_id(), name, tag, properties, None, incarnation.id)
        state.pools[pool.id] = pool
    if not pool.ready:
        _announce(state, pool, incarnation, session, rank, planes, pages, node)
        _form(state, pool, out)
    session.rank = rank
    incarnation.ranks[rank] = session.id
    if static and pool.holder != incarnation.id:
        pool.holder = incarnation.id
        out.writes.append(Put("pool", pool.id, pool.record()))
    _bind(state, session, pool, incarnation, out)
    state.moved = True
    return _welcome(state, pool, session, rank) | {"incarnation": incarnation.id}


def _properties(arguments: dict[str, Any]) -> Properties:
    try:
        layout = Layout(arg.text(arguments, "layout"))
        kind = PoolKind(arg.text(arguments, "kind"))
    except ValueError as error:
        raise UsageError(f"{error}; layouts are 'slab' and 'page', kinds 'static' and 'leased'") from None
    world_size = arg.integer(arguments, "world_size", -(1 << 31), 1 << 31)
    if not 1 <= world_size <= 65535:
        raise RankError(f"a world has 1 to 65535 ranks, not {world_size}", world_size=world_size)
    page_size = arg.integer(arguments, "page_size", 1)
    return Properties(page_size, world_size, layout, kind, arg.integer(arguments, "frames_per_page", 1, 1 << 20))


def _count(arguments: dict[str, Any], properties: Properties) -> Count | None:
    count = arg.page_count(arguments, _MAX_PAGES)
    kind, layout = properties.kind.value, properties.layout.value
    if isinstance(count, tuple) and (kind, layout) != ("leased", "page"):
        raise UsageError(
            f"num_host_pages {count} asks for a pool that grows and shrinks; this one is {kind} with layout "
            f"{layout!r}, and only a leased pool with layout 'page' can. Ask for one number of pages"
        )
    if count == 1 and properties.kind is PoolKind.LEASED:
        raise UsageError("num_host_pages is 1; a leased pool has at least 2, as its page 0 is never leased")
    return count


def _check_tag(state: State, incarnation: Incarnation, session: Session, name: str, tag: str) -> None:
    for other in incarnation.sessions:
        number = state.sessions[other].pool
        if number is not None and other != session.id and state.pools[number].tag != tag:
            raise PoolMismatch(
                f"engine {incarnation.engine!r} is attached to pool {name!r} with tag {state.pools[number].tag!r}, "
                f"this rank says {tag!r}; use another engine name for another tag"
            )
    for pool in state.pools.values():
        if (
            not pool.ready
            and pool.name == name
            and pool.former == incarnation.id
            and pool.announced
            and pool.tag != tag
        ):
            raise PoolMismatch(f"pool {name!r} is being formed with tag {pool.tag!r}, this rank says {tag!r}")


def _check_rank(
    state: State, incarnation: Incarnation, session: Session, rank: int, launch: str | None, static: bool
) -> None:
    if launch is not None and incarnation.launch is not None and launch != incarnation.launch:
        return  # the whole launch is asked about in _join
    holders = [incarnation.ranks.get(rank)]
    holders += [
        pool.announced.get(rank) for pool in state.pools.values() if not pool.ready and pool.former == incarnation.id
    ]
    for number in holders:
        holder = state.sessions.get(number) if number is not None else None
        if holder is None or holder is session or holder.state is SessionState.DETACHED:
            continue
        pid = holder.peer.pid
        if holder.state is SessionState.DEAD:
            if static:
                raise _busy(state, incarnation, [holder])
        elif holder.connected:
            raise RankAttached(
                f"rank {rank} of engine {incarnation.engine!r} is attached by the living process {pid}; "
                f"stop it, or use another engine name",
                rank=rank,
                pid=pid,
            )
        else:
            raise _busy(state, incarnation, [holder])


def _busy(
    state: State, incarnation: Incarnation, holders: Iterable[Session], remedy: str = "use another engine name"
) -> EngineBusy:
    words = []
    for holder in holders:
        held = f", may be held by {list(holder.holders)}" if holder.holders else ""
        words.append(f"process {holder.peer.pid} ({', '.join(holder.missing) or 'alive'}{held})")
    pids = sorted({h.peer.pid for h in holders} | {pid for h in holders for pid in h.holders})
    return EngineBusy(
        f"engine {incarnation.engine!r} of pool {incarnation.pool_name!r} is still held by {'; '.join(words)}: "
        f"its end is not proven. End these processes, or {remedy}",
        pids=pids,
    )


def _check_holder(state: State, pool: Pool, name: str, engine: str, launch: str | None) -> None:
    holder = state.incarnations.get(pool.holder) if pool.holder is not None else None
    if holder is None or not holder.sessions:
        return
    same = holder.engine == engine and (launch is None or holder.launch is None or launch == holder.launch)
    if not same or state.current.get((name, engine)) != holder.id:
        users = [state.sessions[number] for number in holder.sessions]
        raise _busy(state, holder, users, "use another pool name: one engine at a time holds a static pool")


_OTHERWISE = "give another model or configuration a tag or a pool name of its own, or `sharedmirror drop` this pool"


def _check_pool(pool: Pool, asked: Properties, pages: Count | None, rank: int, planes: tuple[Plane, ...]) -> None:
    have = pool.properties
    compared: list[tuple[str, object, object]] = [
        ("page size", have.page_size, asked.page_size),
        ("world size", have.world_size, asked.world_size),
        ("layout", have.layout.value, asked.layout.value),
        ("kind", have.kind.value, asked.kind.value),
        ("frames_per_page", have.frames_per_page, asked.frames_per_page),
    ]
    known_count = pool.count
    if pages is not None and known_count is not None:
        compared.append(("num_host_pages", known_count, pages))
    for what, mine, theirs in compared:
        if mine != theirs:
            raise PoolMismatch(
                f"pool {pool.name!r} has {what} {mine}, rank {rank} asks for {theirs}; {_OTHERWISE}",
                pool=pool.id, rank=rank,
            )  # fmt: skip
    known = pool.planes.get(rank)
    if pool.ready and known is not None and known != planes:
        what = _difference(known, planes)
        raise PoolMismatch(
            f"rank {rank} of pool {pool.name!r} came back with other planes: {what}; {_OTHERWISE}", rank=rank
        )


def _check_former(state: State, pool: Pool, incarnation: Incarnation | None, session: Session) -> None:
    others = set(pool.announced.values()) - {session.id}
    if (incarnation is None or incarnation.id != pool.former) and others & state.sessions.keys():
        raise RanksMissing(
            f"pool {pool.name!r} is being formed by another engine, some of whose ranks are missing; "
            f"try again when they are there, or end that engine",
            pool=pool.id,
        )


def _difference(known: tuple[Plane, ...], planes: tuple[Plane, ...]) -> str:
    if len(known) != len(planes):
        return f"it had {len(known)}, now {len(planes)}"
    at = next(i for i, (mine, theirs) in enumerate(zip(known, planes, strict=True)) if mine != theirs)
    return f"plane {at} was {known[at]}, now {planes[at]}"


# -- incarnations --------------------------------------------------------------------------------


def _current(state: State, name: str, engine: str) -> Incarnation | None:
    number = state.current.get((name, engine))
    return None if number is None else state.incarnations.get(number)


def _join(
    state: State, name: str, engine: str, launch: str | None, rank: int | None, *, static: bool, out: Effects
) -> Incarnation:
    """Return the living incarnation, or a new one once its forerunner may be left behind.

    A leased pool admits a successor when all processes of the forerunner have ended, though pages
    they may still write stay quarantined; a static one waits for the proof.
    """
    found = _current(state, name, engine)
    if found is not None:
        members = [state.sessions[number] for number in found.sessions | _announcers(state, found)]
        alive = [s for s in members if s.state not in (SessionState.DEAD, SessionState.DETACHED)]
        if launch is not None and found.launch is None and not any(s.role is Role.WORKER for s in members):
            found.launch = launch
            out.writes.append(Put("incarnation", found.id, found.record()))
        if launch is not None and found.launch != launch:
            blocking = members if static else alive
            if blocking:
                raise _busy(state, found, blocking)
        elif alive:
            return found
        elif members and static:
            raise _busy(state, found, members)
    created = Incarnation(state.new_id(), engine, name, launch)
    state.incarnations[created.id] = created
    state.current[name, engine] = created.id
    out.writes.append(Put("incarnation", created.id, created.record()))
    return created


def _announcers(state: State, incarnation: Incarnation) -> set[int]:
    forming = (pool for pool in state.pools.values() if not pool.ready and pool.former == incarnation.id)
    return {number for pool in forming for number in pool.announced.values() if number in state.sessions}


def _bind(state: State, session: Session, pool: Pool, incarnation: Incarnation, out: Effects) -> None:
    session.pool, session.incarnation = pool.id, incarnation.id
    session.state = SessionState.ATTACHED
    incarnation.sessions.add(session.id)
    shares.recount(state, pool)
    out.writes.append(Put("session", session.id, session.record()))


# -- forming a pool ------------------------------------------------------------------------------


def _announce(
    state: State,
    pool: Pool,
    incarnation: Incarnation,
    session: Session,
    rank: int,
    planes: tuple[Plane, ...],
    pages: Count | None,
    node: int | None,
) -> None:
    if pool.failure is not None and session.id in pool.announced.values():
        raise pool.failure
    if incarnation.id != pool.former:
        pool.former, pool.failure = incarnation.id, None
        pool.announced.clear()
        pool.planes.clear()
        pool.asked.clear()
        pool.nodes.clear()
    pool.announced[rank] = session.id
    pool.planes[rank] = planes
    pool.asked[rank] = pages
    pool.nodes[rank] = node


def _form(state: State, pool: Pool, out: Effects) -> None:
    """Make the pool ready if every rank has announced; raises RanksMissing, ArenaFull or ArenaBusy otherwise."""
    missing = [rank for rank in range(pool.properties.world_size) if rank not in pool.announced]
    if missing:
        raise RanksMissing(
            f"pool {pool.name!r} waits for ranks {missing} of {pool.properties.world_size} to attach; "
            f"start them, or name the world size that there is",
            ranks=missing,
        )
    try:
        allocate(state, pool, out)
    except SharedMirrorError as error:
        if not error.retryable:
            pool.failure = error
            state.moved = True
        raise
    pool.ready = True
    state.moved = True
    if pool.properties.kind is PoolKind.LEASED and pool.num_host_pages is not None:
        pool.table = PageTable(pool.num_host_pages, pool.visible_pages)
        out.writes.append(CreateTable(pool.id, pool.num_host_pages))
    out.writes += [Put("pool", pool.id, pool.record()), Put("marks", pool.id, pool.marks())]


def _description(pool: Pool) -> dict[str, Any]:
    return {
        "pool": pool.id,
        "num_host_pages": pool.num_host_pages,
        "frames_per_page": pool.properties.frames_per_page,
        "page_size": pool.properties.page_size,
    }


def _welcome(state: State, pool: Pool, session: Session, rank: int) -> dict[str, Any]:
    places = pool.places[rank]
    regions = visible_regions(pool, rank)
    order = {region["id"]: at for at, region in enumerate(regions)}
    revoked = [lease.id for lease in state.leases.values() if lease.pool == pool.id]
    return _description(pool) | {
        "session": session.id,
        "backed": pool.visible_pages,
        "regions": regions,
        "planes": [[order[region], base, stride] for region, base, stride in places],
        # Leases of before were granted without this process as a writer, and hits being released may lose their pages.
        "revoked": revoked,
        "lease_floor": state.next_id,
        "released": [hit.id for hit in state.hits.values() if hit.released],
        "hits": [hit.id for hit in state.hits.values() if hit.pool == pool.id and not hit.released],
        "hit_floor": state.next_id,
        # What its schedulers took while there was no daemon: below these numbers only what is open above.
        "away": [
            [other.mark, other.away]
            for other in map(state.sessions.__getitem__, state.incarnations[leases.incarnation_of(session)].sessions)
            if other.role is Role.SCHEDULER
        ],
    }
