"""From durable records back to a state: what a restarted daemon knows of the time before.

Everything that was answered is in the records. What they do not hold is rebuilt (free lists, the key
index, chains) or asked for again (which ranks have drained). What a crash left in doubt is
quarantined, never guessed:

- a page whose slot has no valid copy stays quarantined for good, with a generation above all that its
  pool ever granted: only the slot could tell which lease or hit the page belongs to;
- more than 1% of such slots in a pool, a page that two leases claim, or records that contradict each
  other are too much damage: DamagedRecords, and the daemon adopts nothing.

Sessions come back as lost. The rim then proves them gone, or they resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sharedmirror.errors import EnvironmentFault, SharedMirrorError
from sharedmirror.types import AWAY_HITS, Layout, PoolKind, Role
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import away, shares
from sharedmirrord.core.durable import Slot
from sharedmirrord.core.elastic import Elastic
from sharedmirrord.core.model import (
    Incarnation,
    OpenHit,
    OpenLease,
    Peer,
    Pool,
    Properties,
    Region,
    Session,
    SessionState,
    State,
    each_bit,
)
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.regions import ArenaSpace
from sharedmirrord.core.room import users
from sharedmirrord.core.transitions import PageState

MAX_DAMAGE = 0.01
_SMALL_PAGE_BYTES = 64
_WITH_IDS = ("incarnation", "pool", "session", "lease", "hit")

Records = Mapping[tuple[str, int], Any]


class DamagedRecords(EnvironmentFault):
    """Raised when the durable records cannot be trusted; nothing was changed."""

    code = "damaged_records"


def recover(
    records: Records,
    slots: Callable[[int], Iterable[Slot | None]],
    arena_bytes: int,
    now: float,
    nodes: Sequence[int] = (),
) -> State:
    """Return the state that ``records`` and the page tables describe; raises DamagedRecords.

    ``nodes`` are the NUMA nodes with memory. ``slots(pool)`` yields a pool's slots in page order, None for one
    without a valid copy. The state
    is not ready, and grants by eviction wait for ``state.survivors``.
    """
    try:
        return _Recovery(records, slots, ArenaSpace(arena_bytes, nodes), now).run()
    except DamagedRecords:
        raise
    except (
        SharedMirrorError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, MemoryError
    ) as error:  # fmt: skip
        raise DamagedRecords(f"the daemon's records contradict each other: {error!r}") from error


def _must(condition: object, what: str) -> None:
    if not condition:
        raise DamagedRecords(f"the daemon's records contradict each other: {what}")


class _Recovery:
    def __init__(
        self, records: Records, slots: Callable[[int], Iterable[Slot | None]], space: ArenaSpace, now: float
    ) -> None:
        self._records = records
        self._slots = slots
        self._now = now
        self._state = State(space)
        self._damaged: dict[int, set[int]] = {}
        """Pages without a valid slot, by pool."""
        self._claims: dict[int, dict[int, int]] = {}
        """The highest generation under which a lease's record names a page, by pool."""

    def _each(self, kind: str) -> list[tuple[int, Any]]:
        return sorted((number, value) for (k, number), value in self._records.items() if k == kind)

    def run(self) -> State:
        state = self._state
        self._counter()
        for _, value in self._each("lease"):
            claims = self._claims.setdefault(value["pool"], {})
            for page, generation in zip(value["pages"], value["generations"], strict=False):
                claims[page] = max(generation, claims.get(page, 0))
        for number, value in self._each("incarnation"):
            launch = None if value["launch"] is None else arg.text(value, "launch")
            incarnation = Incarnation(number, arg.text(value, "engine"), arg.text(value, "pool_name"), launch)
            incarnation.max_held = arg.optional_integer(value, "max_held", 1)
            state.incarnations[number] = incarnation
            state.current[incarnation.pool_name, incarnation.engine] = number
        for number, value in self._each("pool"):
            state.pools[number] = self._pool(number, value)
        for number, value in self._each("session"):
            self._session(number, value)
        for number, value in self._each("lease"):
            self._lease(number, value)
        for number, value in self._each("hit"):
            self._hit(number, value)
        self._count_held()
        for pool in state.pools.values():
            if pool.table is not None:
                pool.table.rebuild()
            if pool.elastic is not None and pool.elastic.told is not None:
                # Who answered before is asked once more.
                pool.elastic.awaited = {s.id for s in users(state, pool) if s.role is Role.WORKER}
            shares.recount(state, pool)
        state.survivors = {s.id for s in state.sessions.values() if s.state is SessionState.LOST}
        return state

    def _count_held(self) -> None:
        state = self._state
        for lease in state.leases.values():
            state.incarnations[lease.incarnation].held += lease.open.bit_count()
        for hit in state.hits.values():
            state.incarnations[hit.incarnation].held += len(hit.pages)

    def _counter(self) -> None:
        used = [number for kind, number in self._records if kind in _WITH_IDS]
        used += [region[0] for _, value in self._each("pool") for region in value["regions"]]
        _must(len(used) == len(set(used)) and min(used, default=1) > 0, "an id is used twice")
        away = {number for kind, number in self._records if kind == "hit" and number >= AWAY_HITS}
        counted = max((number for number in used if number not in away), default=0)
        counter = arg.integer({"counter": self._records.get(("counter", 0), 1)}, "counter", counted + 1, AWAY_HITS - 1)
        self._state.next_id = self._state.id_high = counter

    # -- pools and their tables ------------------------------------------------------------------

    def _pool(self, number: int, value: dict[str, Any]) -> Pool:
        properties = Properties(
            arg.integer(value, "page_size", 1),
            arg.integer(value, "world_size", 1, 65535),
            Layout(value["layout"]),
            PoolKind(value["kind"]),
            arg.integer(value, "frames_per_page", 1),
        )
        name, tag, pages = arg.text(value, "name"), arg.text(value, "tag"), arg.integer(value, "num_host_pages", 1)
        pool = Pool(number, name, tag, properties, pages, former=0, ready=True, used=self._now)
        clears, high = self._records["marks", number]
        marks = {"number": clears, "high": high}
        pool.number, pool.generation_high = arg.integer(marks, "number", 1), arg.integer(marks, "high")
        pool.holder = arg.optional_integer(value, "holder")
        _must(pool.holder is None or pool.holder in self._state.incarnations, f"nobody is the holder of pool {number}")
        pool.bytes_per_page = arg.integer(value, "bytes_per_page")
        self._place(pool, value)
        if value.get("elastic") is not None:
            pool.elastic = self._elastic(pool, value["elastic"])
        if properties.kind is PoolKind.LEASED:
            pool.table = self._table(pool, pages)
        return pool

    def _place(self, pool: Pool, value: dict[str, Any]) -> None:
        pool.planes = {rank: arg.planes({"planes": planes}, rank) for rank, planes in value["planes"]}
        pool.places = {rank: [(r, b, s) for r, b, s in places] for rank, places in value["places"]}
        for region, ranks, extents, size_bytes in value["regions"]:
            for arena, offset, length in extents:
                _must(arena == 0 and length > 0, f"region {region} has an extent of {length} bytes")
                self._state.space.take(offset, length)
            pool.regions.append(Region(region, tuple(ranks), tuple(map(tuple, extents)), size_bytes))
            _must(size_bytes == sum(length for _, _, length in extents), f"region {region} is no sum of its extents")
        world, known = range(pool.properties.world_size), {region.id: region for region in pool.regions}
        _must(sorted(pool.planes) == sorted(pool.places) == list(world), f"pool {pool.id} lacks ranks")
        for rank in world:
            _must(len(pool.planes[rank]) == len(pool.places[rank]), f"rank {rank} of pool {pool.id} lacks planes")
            for region, base, stride in pool.places[rank]:
                inside = 0 <= base < known[region].size_bytes and 0 < stride and rank in known[region].ranks
                _must(inside, f"a plane of rank {rank} of pool {pool.id} lies outside its region")

    def _elastic(self, pool: Pool, value: list[Any]) -> Elastic:
        least, step, backed, told = value
        named = {"least": least, "step": step, "backed": backed}
        least, step, backed = (arg.integer(named, name, 1) for name in named)
        most, frames = pool.num_host_pages or 0, pool.properties.frames_per_page
        strides = {region: stride for places in pool.places.values() for region, _, stride in places}
        page_bytes = tuple(strides[region.id] * frames for region in pool.regions)
        _must(2 <= least <= most and most // step <= 1 << 20, f"pool {pool.id} has {least} to {most} pages by {step}")
        elastic = Elastic(least, most, step, page_bytes, backed)
        _must(backed in elastic.levels and backed >= elastic.level(least), f"pool {pool.id} has memory for {backed}")
        sizes = [elastic.region_bytes(at, backed) for at in range(len(page_bytes))]
        _must(sizes == [region.size_bytes for region in pool.regions], f"pool {pool.id} has other regions than pages")
        if told is not None:
            number, stay = told
            known = 0 < number < self._state.next_id and elastic.level(least) <= stay < backed
            _must(known and stay in elastic.levels, f"pool {pool.id} gives back down to {stay} of {backed} pages")
            elastic.told, elastic.target = (number, stay), stay
        return elastic

    def _table(self, pool: Pool, pages: int) -> PageTable:
        # A table takes about as much memory as so small a page: count before it is taken.
        if pages > self._state.space.size_bytes // _SMALL_PAGE_BYTES:
            self._check_length(pool, pages, sum(1 for _ in self._slots(pool.id)))
        table = PageTable(pages, pool.visible_pages)
        damaged = self._damaged[pool.id] = set()
        claims = self._claims.get(pool.id, {})
        free, sealed, number = PageState.FREE, PageState.SEALED, pool.number
        highest = count = 0
        for page, slot in enumerate(self._slots(pool.id)):
            count += 1
            if page == 0 or page >= pages:
                continue  # the null page never has a slot of its own
            if slot is None:
                damaged.add(page)
                continue
            _, state, generation, since, key, parent, parent_generation = slot
            if generation > highest:
                highest = generation
            if page >= pool.visible_pages:
                over = state == free or (state == sealed and since != number)
                _must(over, f"page {page} of pool {pool.id} is in use and has no memory")
                table.restore(page, PageState.RESERVED, generation)
                continue
            # A page that was evicted for a lease has no slot of its own since: the lease counts, not the old key.
            if state == sealed and since == number and claims.get(page, 0) <= generation:
                table.restore(page, sealed, generation, key, parent, parent_generation)
            elif state in (free, sealed):
                # Cleared pages count as free; a hit that still pins one brings it back.
                table.restore(page, free, generation)
            else:
                damaged.add(page)
        self._check_length(pool, pages, count)
        _must(highest <= max(0, pool.generation_high - 1), f"pool {pool.id} has granted a generation above its mark")
        if len(damaged) > MAX_DAMAGE * pages:
            raise DamagedRecords(f"{len(damaged)} of {pages} page records of pool {pool.name!r} are damaged")
        for page in sorted(damaged):
            table.restore(page, PageState.QUARANTINED, pool.generation_high)
            pool.generation_high += 1
        return table

    @staticmethod
    def _check_length(pool: Pool, pages: int, count: int) -> None:
        if pages != count:
            raise DamagedRecords(f"pool {pool.name!r} has {pages} pages and a table of {count}")

    # -- sessions, leases, hits ------------------------------------------------------------------

    def _session(self, number: int, value: dict[str, Any]) -> None:
        state = self._state
        pid, uid, start_time = (arg.integer(value, name) for name in ("pid", "uid", "start_time"))
        _must(isinstance(value["token_hash"], bytes), f"session {number} has no token")
        session = Session(number, Peer(pid, uid, start_time, value["token_hash"]), Role(value["role"]), since=self._now)
        session.connected = False
        session.state = SessionState.DETACHED if arg.flag(value, "detached", False) else SessionState.LOST
        session.pool, session.incarnation, session.rank = value["pool"], value["incarnation"], value["rank"]
        session.mark = arg.integer({"mark": 0} | value, "mark", 0, AWAY_HITS)
        session.away = arg.integer({"away": 0} | value, "away", 0, away.ALL)
        pool, incarnation = state.pools[value["pool"]], state.incarnations[value["incarnation"]]
        if session.role is Role.WORKER:
            arg.integer(value, "rank", 0, pool.properties.world_size - 1)
        _must((session.role is Role.WORKER) == (session.rank is not None), f"session {number} has an odd rank")
        result = self._records.get(("result", number))
        if result is not None:
            for name in ("id", "lease", "hit"):
                arg.integer({name: 0} | result, name)
            session.last_request, session.last_reply = result["id"], result
        incarnation.sessions.add(number)
        if session.rank is not None and session.state is SessionState.LOST:
            incarnation.ranks[session.rank] = number
        state.sessions[number] = session

    def _lease(self, number: int, value: dict[str, Any]) -> None:
        state = self._state
        pool = state.pools[value["pool"]]
        table = pool.table
        if table is None or value["incarnation"] not in state.incarnations:
            raise DamagedRecords(f"lease {number} belongs to no leased pool, or to no engine")
        pages, generations = arg.integers(value, "pages"), arg.integers(value, "generations")
        count = len(pages)
        lease = OpenLease(
            number,
            pool.id,
            value["incarnation"],
            arg.integer(value, "owner"),
            self._now,
            arg.integer(value, "number"),
            pages,
            generations,
            dict(value["writers"]),
            keys=value["keys"] or [None] * count,
            parents=value["parents"] or [None] * count,
            by_reserve=arg.flag(value, "by_reserve", False),
        )
        self._check_lease(lease, pool, table)
        charged = shares.owner_of(pool, state.incarnations[lease.incarnation].engine)
        lease.positions = {page: at for at, page in enumerate(pages)}
        named = int.from_bytes(value["open"], "little")
        _must(named <= lease.full, f"lease {number} has pages open that it never had")
        for at in each_bit(named):
            page, generation = pages[at], generations[at]
            if page in self._damaged[pool.id]:
                continue
            if table.states[page] == PageState.LEASED:
                raise DamagedRecords(f"two leases claim page {page} of pool {pool.name!r}")
            if table.generations[page] >= generation:
                continue  # its slot says how it ended
            _must(table.states[page] != PageState.RESERVED, f"lease {number} has page {page}, which has no memory")
            lease.open |= 1 << at
            table.restore(page, PageState.LEASED, generation, owner=charged)
            if lease.keys[at] is not None:
                lease.keyed |= 1 << at
        lease.revoked = int.from_bytes(value["revoked"], "little") & lease.open
        self._evidence(lease)
        for at in each_bit(lease.keyed & ~lease.revoked):
            key = lease.keys[at]
            if key is not None:
                pool.pending[key] = pool.pending.get(key, 0) + 1
        state.leases[number] = lease
        owner = state.sessions.get(lease.owner)
        if owner is not None:
            owner.leases.add(number)
        _must(owner is not None or lease.revoked == lease.open, f"nobody owns lease {number}")

    @staticmethod
    def _check_lease(lease: OpenLease, pool: Pool, table: PageTable) -> None:
        pages, words = lease.pages, [*lease.keys, *lease.parents]
        for word in words:
            if word is not None:
                arg.check_key(word)
        _must(pages and len(set(pages)) == len(pages), f"lease {lease.id} has no pages, or one twice")
        _must(0 < min(pages) and max(pages) < table.pages, f"lease {lease.id} has pages outside of pool {pool.id}")
        same = len(pages) == len(lease.generations) == len(lease.keys) == len(lease.parents)
        _must(same, f"lease {lease.id} has other generations or keys than pages")
        _must(max(lease.generations) < pool.generation_high, f"lease {lease.id} has a generation above the pool's mark")
        _must(sorted(lease.writers) == list(range(pool.properties.world_size)), f"lease {lease.id} lacks writers")

    def _evidence(self, lease: OpenLease) -> None:
        for rank, writer in lease.writers.items():
            record = self._records.get(("commit", lease.id << 16 | rank))
            if record is not None:
                bits, said = record
                lease.committed[rank] = int.from_bytes(bits, "little") & lease.full
                lease.checks |= {(position, region): (checksum, rank) for position, region, checksum in said}
            session = self._state.sessions.get(writer)
            _must(session is None or session.rank == rank, f"lease {lease.id} has another process as its rank {rank}")
            if session is None or not session.may_copy:
                # A session's record goes, or says that it has detached, only with the proof.
                lease.drained[rank] = lease.full
        due = lease.complete() & lease.keyed & ~lease.revoked | lease.evident() & lease.revoked
        _must(not due, f"lease {lease.id} has pages that are sealed or freed and are not")

    def _hit(self, number: int, value: dict[str, Any]) -> None:
        state = self._state
        pool = state.pools[value["pool"]]
        if pool.table is None or value["incarnation"] not in state.incarnations:
            raise DamagedRecords(f"hit {number} belongs to no leased pool, or to no engine")
        pages = arg.integers(value, "pages")
        _must(len(set(pages)) == len(pages), f"hit {number} pins a page twice")
        holder, released = arg.integer(value, "session"), arg.flag(value, "released", False)
        _must(pages or (released and number >= AWAY_HITS), f"hit {number} pins no page and is no fence")
        # A damaged page needs no pin: nobody gets it again.
        pages = [page for page in pages if page not in self._damaged[pool.id]]
        hit = OpenHit(number, pool.id, value["incarnation"], holder, pages, released)
        pool.table.pin_again(hit.pages)
        state.hits[number] = hit
        if hit.released and number >= AWAY_HITS and not pages:
            state.fences.add(number)
        if hit.released:
            hit.awaited = {worker.id for worker in state.workers(hit.incarnation) if worker.may_copy}
            _must(hit.awaited, f"hit {number} is released and awaits nobody")
        else:
            state.sessions[holder].hits.add(number)
