"""From durable records back to a state: what a restarted daemon knows of the time before.

Everything that was answered is in the records. What they do not hold is rebuilt (free lists, the key
index, chains) or asked for again (which ranks have drained). What a crash left in doubt is
quarantined, never guessed:

- a slot without a valid copy, with a generation above all that its pool ever granted;
- more than 1% of such slots in a pool, a page that two leases claim, or records that contradict each
  other are too much damage: DamagedRecords, and the daemon adopts nothing.

Sessions come back as lost. The rim then proves them gone, or they resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sharedmirror.errors import EnvironmentFault
from sharedmirror.types import Layout, Plane, PoolKind, Role
from sharedmirrord.core.durable import Slot
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
from sharedmirrord.core.transitions import PageState

MAX_DAMAGE = 0.01

Records = Mapping[tuple[str, int], Any]


class DamagedRecords(EnvironmentFault):
    """Raised when the durable records cannot be trusted; nothing was changed."""

    code = "damaged_records"


def recover(records: Records, slots: Callable[[int], Iterable[Slot | None]], arena_bytes: int, now: float) -> State:
    """Return the state that ``records`` and the page tables describe; raises DamagedRecords.

    ``slots(pool)`` yields a pool's slots in page order, None for one without a valid copy. The state
    is not ready, and grants by eviction wait for ``state.survivors``.
    """
    try:
        return _Recovery(records, slots, arena_bytes, now).run()
    except DamagedRecords:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedRecords(f"the daemon's records contradict each other: {error!r}") from error


class _Recovery:
    def __init__(self, records: Records, slots: Callable[[int], Iterable[Slot | None]], size: int, now: float) -> None:
        self._records = records
        self._slots = slots
        self._now = now
        self._state = State(ArenaSpace(size))

    def _each(self, kind: str) -> list[tuple[int, Any]]:
        return sorted((number, value) for (k, number), value in self._records.items() if k == kind)

    def run(self) -> State:
        state = self._state
        state.next_id = state.id_high = int(self._records.get(("counter", 0), 1))
        for number, value in self._each("incarnation"):
            incarnation = Incarnation(number, value["engine"], value["pool_name"], value["launch"])
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
        for pool in state.pools.values():
            if pool.table is not None:
                pool.table.rebuild()
        state.survivors = {s.id for s in state.sessions.values() if s.state is SessionState.LOST}
        return state

    # -- pools and their tables ------------------------------------------------------------------

    def _pool(self, number: int, value: dict[str, Any]) -> Pool:
        properties = Properties(
            value["page_size"],
            value["world_size"],
            Layout(value["layout"]),
            PoolKind(value["kind"]),
            value["frames_per_page"],
        )
        pool = Pool(number, value["name"], value["tag"], properties, value["num_host_pages"], former=0, ready=True)
        pool.number, pool.generation_high = self._records["marks", number]
        pool.planes = {rank: tuple(Plane(*plane) for plane in planes) for rank, planes in value["planes"]}
        pool.places = {rank: [(r, b, s) for r, b, s in places] for rank, places in value["places"]}
        pool.holder = value["holder"]
        pool.bytes_per_page = value["bytes_per_page"]
        for region, ranks, extents, size_bytes in value["regions"]:
            for _arena, offset, length in extents:
                self._state.space.take(offset, length)
            pool.regions.append(Region(region, tuple(ranks), tuple(map(tuple, extents)), size_bytes))
        if properties.kind is PoolKind.LEASED:
            pool.table = self._table(pool)
        return pool

    def _table(self, pool: Pool) -> PageTable:
        table = PageTable(int(pool.num_host_pages or 0))
        damaged = pages = 0
        for page, slot in enumerate(self._slots(pool.id)):
            pages += 1
            if page == 0:
                continue  # the null page never has a slot of its own
            if slot is None:
                damaged += 1
                pool.generation_high += 1
                table.restore(page, PageState.QUARANTINED, pool.generation_high - 1)
            elif slot.state == PageState.SEALED and slot.number == pool.number:
                table.restore(page, PageState.SEALED, slot.generation, slot.key, slot.parent, slot.parent_generation)
            else:
                # Cleared pages count as free; a hit that still pins one brings it back.
                table.restore(page, PageState.FREE, slot.generation)
        if pages != table.pages:
            raise DamagedRecords(f"pool {pool.name!r} has {table.pages} pages and a table of {pages}")
        if damaged > MAX_DAMAGE * pages:
            raise DamagedRecords(f"{damaged} of {pages} page records of pool {pool.name!r} are damaged")
        return table

    # -- sessions, leases, hits ------------------------------------------------------------------

    def _session(self, number: int, value: dict[str, Any]) -> None:
        state = self._state
        peer = Peer(value["pid"], value["uid"], value["start_time"], value["token_hash"])
        session = Session(number, peer, Role(value["role"]), since=self._now, connected=False)
        session.state = SessionState.DETACHED if value["detached"] else SessionState.LOST
        session.pool, session.incarnation, session.rank = value["pool"], value["incarnation"], value["rank"]
        result = self._records.get(("result", number))
        if result is not None:
            session.last_request, session.last_reply = result["id"], result
        incarnation = state.incarnations[value["incarnation"]]
        incarnation.sessions.add(number)
        if session.rank is not None and session.state is SessionState.LOST:
            incarnation.ranks[session.rank] = number
        state.sessions[number] = session

    def _lease(self, number: int, value: dict[str, Any]) -> None:
        state = self._state
        pool = state.pools[value["pool"]]
        count = len(value["pages"])
        lease = OpenLease(
            number,
            pool.id,
            value["incarnation"],
            value["owner"],
            self._now,
            value["number"],
            value["pages"],
            value["generations"],
            dict(value["writers"]),
            keys=value["keys"] or [None] * count,
            parents=value["parents"] or [None] * count,
            by_reserve=value["by_reserve"],
        )
        table = pool.table
        if table is None or state.incarnations.get(lease.incarnation) is None:
            raise DamagedRecords(f"lease {number} belongs to no leased pool, or to no engine")
        lease.positions = {page: at for at, page in enumerate(lease.pages)}
        for at in each_bit(int.from_bytes(value["open"], "little")):
            page, generation = lease.pages[at], lease.generations[at]
            if table.generations[page] >= generation and table.states[page] != PageState.QUARANTINED:
                continue  # its slot says how it ended
            if table.states[page] == PageState.LEASED:
                raise DamagedRecords(f"two leases claim page {page} of pool {pool.name!r}")
            lease.open |= 1 << at
            table.restore(page, PageState.LEASED, max(generation, table.generations[page]))
            if lease.keys[at] is not None:
                lease.keyed |= 1 << at
        lease.revoked = int.from_bytes(value["revoked"], "little") & lease.open
        for rank in lease.writers:
            bits = self._records.get(("commit", number << 16 | rank), b"")
            lease.committed[rank] = int.from_bytes(bits, "little")
            writer = state.sessions.get(lease.writers[rank])
            if writer is None or not writer.may_copy:
                lease.drained[rank] = lease.full  # proven gone, or detached, before the restart
        for at in each_bit(lease.keyed & ~lease.revoked):
            key = lease.keys[at]
            if key is not None:
                pool.pending[key] = pool.pending.get(key, 0) + 1
        state.leases[number] = lease
        owner = state.sessions.get(lease.owner)
        if owner is not None:
            owner.leases.add(number)

    def _hit(self, number: int, value: dict[str, Any]) -> None:
        state = self._state
        pool = state.pools[value["pool"]]
        if pool.table is None or state.incarnations.get(value["incarnation"]) is None:
            raise DamagedRecords(f"hit {number} belongs to no leased pool, or to no engine")
        hit = OpenHit(number, pool.id, value["incarnation"], value["session"], value["pages"], value["released"])
        pool.table.pin_again(hit.pages)
        state.hits[number] = hit
        holder = state.sessions.get(hit.session)
        if hit.released:
            hit.awaited = {worker.id for worker in state.workers(hit.incarnation) if worker.may_copy}
        elif holder is not None:
            holder.hits.add(number)
