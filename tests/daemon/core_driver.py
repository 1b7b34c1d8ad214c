"""Drives the pure core without sockets, clocks or memory: a fake daemon's rim for tests.

After every event it checks what must always hold: the tables' own invariants, and that the writes so
far, replayed, say all that the state knows (crash recovery stands on that).
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from sharedmirror import errors
from sharedmirror.types import Plane, Role
from sharedmirrord.core import machine
from sharedmirrord.core.durable import NO_PAGE, CreateTable, Delete, DropTable, Put, SetSlots, Slot, Write
from sharedmirrord.core.model import Effects, OpenLease, Peer, Pool, State, each_bit
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.regions import ArenaSpace
from sharedmirrord.core.transitions import PageState
from tests.daemon.followers import Followers
from tests.daemon.table_problems import problems

MIB = 1 << 20


def packed(value: Any) -> bytes:
    """Return the bytes that a record store would keep; raises TypeError for what msgpack cannot hold."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


class Records:
    """What a record store would hold: the replay of all writes."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, bytes]] = defaultdict(dict)
        self.tables: dict[int, list[Slot]] = {}

    def replay(self, writes: Iterable[Write]) -> None:
        for write in writes:
            if isinstance(write, Put):
                self.values[write.kind][write.id] = packed(write.value)
            elif isinstance(write, Delete):
                self.values[write.kind].pop(write.id, None)
            elif isinstance(write, CreateTable):
                self.tables[write.pool] = [Slot(page, 0, 0, 0, b"", NO_PAGE, 0) for page in range(write.pages)]
            elif isinstance(write, DropTable):
                del self.tables[write.pool]
            else:
                assert isinstance(write, SetSlots)
                for slot in write.slots:
                    self.tables[write.pool][slot.page] = slot

    def differences(self, state: State) -> list[str]:
        """Return where a replay of the writes would not give what ``state`` holds."""
        attached = {s.id: s for s in state.sessions.values() if s.incarnation is not None}
        ready = {pool.id: pool for pool in state.pools.values() if pool.ready}
        expected = {
            "session": {number: packed(s.record()) for number, s in attached.items()},
            "result": {number: packed(s.last_reply) for number, s in attached.items()},
            "incarnation": {number: packed(i.record()) for number, i in state.incarnations.items()},
            "pool": {number: packed(pool.record()) for number, pool in ready.items()},
            "marks": {number: packed(pool.marks()) for number, pool in ready.items()},
            "hit": {number: packed(hit.record()) for number, hit in state.hits.items()},
            "commit": {
                lease.id << 16 | rank: packed(lease.commit_record(rank))
                for lease in state.leases.values()
                for rank in lease.committed
            },
        }
        found = [
            f"record {kind} {number}: stored {self.values[kind].get(number)!r}, state has {values.get(number)!r}"
            for kind, values in expected.items()
            for number in values.keys() | self.values[kind].keys()
            if values.get(number) != self.values[kind].get(number)
        ]
        if unpacked(self.values["counter"][0]) < state.next_id:
            found.append("an id was given out that the durable counter does not cover")
        if self.values["lease"].keys() != state.leases.keys():
            found.append(f"stored leases {sorted(self.values['lease'])}, open ones {sorted(state.leases)}")
            return found
        for pool in ready.values():
            if pool.table is not None:
                found += self._table_differences(state, pool, pool.table)
        return found

    def _table_differences(self, state: State, pool: Pool, table: PageTable) -> list[str]:
        found: list[str] = []
        slots = self.tables[pool.id]
        generations = [slot.generation for slot in slots]
        leased: set[int] = set()
        for lease in state.leases.values():
            if lease.pool == pool.id:
                found += self._lease_differences(lease, slots, leased, generations)
        pinned = {page for hit in state.hits.values() if hit.pool == pool.id for page in hit.pages}
        for page in range(1, pool.num_host_pages or 0):
            slot, now = slots[page], PageState(table.states[page])
            if generations[page] != table.generations[page]:
                found.append(f"page {page}: stored generation {generations[page]}, is {table.generations[page]}")
            if page in leased or now in (PageState.LEASED, PageState.QUARANTINED):
                if (page in leased) != (now in (PageState.LEASED, PageState.QUARANTINED)):
                    found.append(f"page {page} is {now.name}; covered by a lease record: {page in leased}")
                continue
            bound = slot.state == PageState.SEALED and slot.number == pool.number
            kept = slot.state == PageState.SEALED and page in pinned
            swept = table.sweeping and table.index.get(table.keys[page] or b"") != page  # or will be, at the next event
            if (now is PageState.SEALED) != (bound or kept) and not swept:
                found.append(f"page {page} is {now.name}, its slot is {slot}, number {pool.number}")
            key = slot.key if bound else None
            if key is not None and (table.index.get(key) != page or table.keys[page] != key):
                found.append(f"page {page}: its slot has a key that the table does not bind to it")
        keys = {slot.key for slot in slots if slot.page not in leased and slot.state == PageState.SEALED}
        found += [f"no slot holds key {key!r}" for key in table.index if key not in keys]
        return found

    def _lease_differences(
        self, lease: OpenLease, slots: Sequence[Slot], leased: set[int], generations: list[int]
    ) -> list[str]:
        value = unpacked(self.values["lease"][lease.id])
        now = unpacked(packed(lease.record()))
        fixed = ("pool", "incarnation", "owner", "number", "pages", "generations", "writers", "by_reserve")
        found = [
            f"lease {lease.id}: {name} is {now[name]}, stored {value[name]}"
            for name in fixed
            if now[name] != value[name]
        ]
        bits = 0
        for at in each_bit(int.from_bytes(value["open"], "little")):
            page = lease.pages[at]
            if lease.generations[at] > slots[page].generation:
                if page in leased:
                    found.append(f"page {page} is covered by two lease records")
                bits |= 1 << at
                leased.add(page)
                generations[page] = lease.generations[at]
        if bits != lease.open:
            found.append(f"lease {lease.id} has open {bin(lease.open)}, records give {bin(bits)}")
        if int.from_bytes(value["revoked"], "little") & bits != lease.revoked & bits:
            found.append(f"lease {lease.id} has other revoked pages than its record")
        for name, words in (("keys", lease.keys), ("parents", lease.parents)):
            stored = value[name] or [None] * len(words)
            if any(stored[at] != words[at] for at in each_bit(bits)):
                found.append(f"lease {lease.id}: stored {name} {stored}, state has {words}")
        return found


def snapshot(state: State) -> bytes:
    """Return all that the state means, without the last answers; equal bytes mean that nothing changed."""
    tables = [
        (t.states, t.generations, t.keys, t.index, t.pins, t.counts, t.evictions, t._free, t._parents, t._children,
         t._used, t._owners, t.owned)
        for t in (pool.table for pool in state.pools.values())
        if t is not None
    ]  # fmt: skip
    pools = [replace(pool, table=None) for pool in state.pools.values()]
    sessions = [replace(session, last_request=0, last_reply=None) for session in state.sessions.values()]
    rest = [state.incarnations, state.current, state.leases, state.hits, state.waiters, state.next_id, state.ended]
    # Through repr, so that equal values give equal bytes whether or not they are one object.
    return repr((tables, pools, sessions, rest)).encode()


class Driver:
    """One core with a fake clock. ``ask`` raises the typed error that a client would get."""

    def __init__(self, memory_bytes: int = 64 * MIB, *, ready: bool = True, nodes: Sequence[int] = ()) -> None:
        self.state = State(ArenaSpace(memory_bytes, nodes))
        self.now = 1000.0
        self.records = Records()
        self.replies: dict[tuple[int, int], dict[str, Any]] = {}
        self.pushes: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.forgotten: list[int] = []
        self.requests: dict[int, int] = defaultdict(int)
        self.followers = Followers()
        if ready:
            self.apply(machine.Ready())

    def apply(self, event: machine.Event) -> Effects:
        """Apply one event, make its writes durable, collect what it sends and check the state."""
        effects = machine.apply(self.state, event, self.now)
        self.records.replay(effects.writes)
        for session, body in effects.replies:
            # Through bytes, as on the channel: later changes of the state must not show in an answer.
            self.replies[session, body["id"]] = pickle.loads(pickle.dumps(body))
        for session, body in effects.pushes:
            self.pushes[session].append(unpacked(packed(body)))
        self.forgotten += effects.forgotten
        self.check()
        return effects

    def check(self) -> None:
        found = [p for pool in self.state.pools.values() if pool.table for p in problems(pool.table)]
        found += self.followers.problems(self.state)
        assert found == [], found
        differences = self.records.differences(self.state)
        assert differences == [], f"records: {differences}"

    # -- processes -------------------------------------------------------------------------------

    def hello(self, role: Role = Role.WORKER, pid: int | None = None) -> int:
        session = self.state.new_id()
        peer = Peer(pid if pid is not None else 10_000 + session, 1000, 5, b"t" * 16)
        self.apply(machine.Hello(session, peer, role))
        return session

    def disconnect(self, session: int) -> Effects:
        return self.apply(machine.Disconnected(session))

    def died(self, session: int, missing: tuple[str, ...] = ("lock",), holders: tuple[int, ...] = (77,)) -> Effects:
        return self.apply(machine.Died(session, missing, holders))

    def gone(self, session: int) -> Effects:
        return self.apply(machine.Gone(session))

    def kill(self, session: int) -> None:
        """End a process with all the proof that there can be."""
        self.disconnect(session)
        self.gone(session)

    def tick(self, seconds: float) -> Effects:
        self.now += seconds
        return self.apply(machine.Tick())

    # -- requests --------------------------------------------------------------------------------

    def send(self, session: int, op: str, **arguments: Any) -> int:
        """Send a request and return its id; it may have to wait for its answer."""
        self.requests[session] += 1
        self.apply(machine.Request(session, self.requests[session], op, arguments))
        return self.requests[session]

    def waits(self, session: int, request: int) -> bool:
        return (session, request) not in self.replies

    def result(self, session: int, request: int) -> dict[str, Any]:
        """Return the answer to a request; raises the error that it is."""
        body = self.replies[session, request]
        if "error" in body:
            raise errors.from_wire(body["error"])
        return body

    def ask(self, session: int, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request that must be answered at once, and return or raise the answer."""
        request = self.send(session, op, **arguments)
        assert not self.waits(session, request), f"{op} waits"
        return self.result(session, request)

    def repeat(self, session: int, request: int, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request under an id of one's choice and return the raw answer."""
        self.replies.pop((session, request), None)
        self.apply(machine.Request(session, request, op, arguments))
        return self.replies[session, request]

    def attach(self, session: int, **changes: Any) -> int:
        """Send ``attach``; returns the request id."""
        return self.send(session, "attach", **attach_arguments(**changes))

    def engine(self, engine: str = "e", *, world_size: int = 2, scheduler: bool = True, **changes: Any) -> Engine:
        """Attach all ranks of an engine and its scheduler."""
        workers = [self.hello() for _ in range(world_size)]
        sent = [
            (worker, self.attach(worker, engine=engine, rank=rank, world_size=world_size, wait_s=5.0, **changes))
            for rank, worker in enumerate(workers)
        ]
        replies = [self.result(*request) for request in sent]
        head = 0
        if scheduler:
            head = self.hello(Role.SCHEDULER)
            named = {name: changes[name] for name in ("pool", "launch", "max_held") if name in changes}
            self.ask(head, "attach", **({"pool": "p", "engine": engine} | named))
        return Engine(self, engine, workers, head, replies)

    def pool(self, name: str = "p") -> Pool:
        (pool,) = [pool for pool in self.state.pools.values() if pool.name == name]
        return pool

    def table(self, name: str = "p") -> PageTable:
        table = self.pool(name).table
        assert table is not None
        return table


def attach_arguments(**changes: Any) -> dict[str, Any]:
    """Return what a worker's ``attach`` says, by default as rank 0 of 2 in a leased pool of 6 pages."""
    arguments: dict[str, Any] = {
        "pool": "p", "tag": "", "engine": "e", "launch": None, "rank": 0, "world_size": 2, "page_size": 4,
        "frames_per_page": 1, "kind": "leased", "layout": "page", "num_host_pages": 6,
    } | changes  # fmt: skip
    shard, shards = arguments["rank"], max(1, arguments["world_size"])
    arguments.setdefault("planes", [Plane("k", shard, shards, 1024, 4).to_wire()])
    return arguments


@dataclass
class Engine:
    """The attached processes of one engine."""

    driver: Driver
    name: str
    workers: list[int]
    scheduler: int
    replies: list[dict[str, Any]]

    def lease(self, n: int) -> dict[str, Any]:
        return self.driver.ask(self.scheduler, "lease", n=n)

    def commit(self, lease: int, pages: list[int] | None = None, ranks: Iterable[int] | None = None) -> dict[str, Any]:
        """Commit as each rank in turn and return the last answer."""
        last: dict[str, Any] = {}
        for rank in range(len(self.workers)) if ranks is None else ranks:
            last = self.driver.ask(self.workers[rank], "commit", lease=lease, pages=pages)
        return last

    def drained(self, rank: int, leases: Sequence[int] = (), hits: Sequence[int] = (), **more: Any) -> None:
        self.driver.ask(self.workers[rank], "drained", leases=list(leases), hits=list(hits), **more)

    def cache(self, *keys: bytes, parent: bytes | None = None) -> list[int]:
        """Make keys readable as one chain and return their pages."""
        lease = self.lease(len(keys))
        self.driver.ask(self.scheduler, "seal", lease=lease["lease"], keys=list(keys), parent=parent)
        assert sorted(self.commit(lease["lease"])["sealed"]) == sorted(lease["pages"])
        pages: list[int] = lease["pages"]
        return pages

    def lookup(self, *keys: bytes, mode: str = "prefix") -> dict[str, Any]:
        return self.driver.ask(self.scheduler, "lookup", keys=list(keys), mode=mode)

    def release(self, hit: int) -> None:
        """Release a hit and drain it on every rank."""
        self.driver.ask(self.scheduler, "release", hits=[hit])
        for rank in range(len(self.workers)):
            self.drained(rank, hits=[hit])
