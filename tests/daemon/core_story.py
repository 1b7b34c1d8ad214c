"""The stateful test of the core: engines that lease, commit, look up, die and come back in any order."""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from sharedmirror.types import Role
from sharedmirrord.core import machine
from tests.daemon.core_driver import attach_arguments, snapshot
from tests.daemon.core_invariants import CoreInvariants
from tests.daemon.core_model import ModelSession

T = TypeVar("T")
KEYS = [b"k%d" % i for i in range(7)]
WORLDS = {"a": 2, "b": 1}
PAGES = {"a": 6, "b": 4}
ENGINES = [("a", "e"), ("a", "f"), ("b", "e")]
Pick = st.integers(0, 11)
"""Chooses one of however many candidates there are."""
Mostly = st.sampled_from([True, True, True, False])
Few = st.lists(st.integers(0, 5), max_size=3, unique=True)


class CoreStory(CoreInvariants):
    """Two pools of few pages, three engines, and whatever can happen to them."""

    def talking(self) -> list[ModelSession]:
        """Sessions that can send: a dead process may have left requests on its socket."""
        return [s for s in self.model.sessions.values() if s.connected and s.life in ("attached", "dead")]

    def workers(self) -> list[ModelSession]:
        return [s for s in self.talking() if s.rank is not None]

    def lease_number(self, pick: int) -> int:
        """An open lease, mostly; sometimes one that is over."""
        numbers = [*self.model.leases, *self.model.leases, *self.model.ended_leases[-2:]]
        return numbers[pick % len(numbers)] if numbers else 1

    def lease_pages(self, lease: int, some: list[int] | None) -> list[int] | None:
        pages = self.model.leases[lease].pages if lease in self.model.leases else [1]
        return None if some is None else sorted({pages[at % len(pages)] for at in some})

    # -- processes -------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        for pool, engine in ENGINES:
            for rank in range(WORLDS[pool]):
                self.spawn(ENGINES.index((pool, engine)), rank, 5)
            self.spawn(ENGINES.index((pool, engine)), 2, 0)

    @rule(
        which=st.integers(0, 2),
        rank=st.integers(0, 2),
        wait_s=st.sampled_from([0, 5]),
        max_held=st.sampled_from([None, 5, 1]),
    )
    def spawn(self, which: int, rank: int, wait_s: int, max_held: int | None = 5) -> None:
        """Start a rank, or a scheduler for a rank that there is not."""
        pool, engine = ENGINES[which]
        role = Role.WORKER if rank < WORLDS[pool] else Role.SCHEDULER
        session = self.driver.hello(role)
        self.joining[session, 1] = role, rank if role is Role.WORKER else None
        self.driver.requests[session] = 1
        arguments: dict[str, Any] = {"pool": pool, "engine": engine, "wait_s": wait_s}
        if role is Role.WORKER:
            arguments = attach_arguments(rank=rank, world_size=WORLDS[pool], num_host_pages=PAGES[pool], **arguments)
        else:
            arguments["max_held"] = self.bounds[session] = max_held
        self.last[session] = 1, "attach", arguments
        self.observe(machine.Request(session, 1, "attach", arguments))

    def _pick(self, pick: int, *lives: str) -> ModelSession | None:
        found = [s for s in self.model.sessions.values() if s.life in lives]
        return found[pick % len(found)] if found else None

    @rule(which=st.integers(0, 2))
    def revive(self, which: int) -> None:
        """Start what an engine misses, so that stories go on after deaths."""
        for rank in range(WORLDS[ENGINES[which][0]] + 1):
            here = [s for s in self.talking() if s.life == "attached" and self.names[s.id] == ENGINES[which]]
            if not any(s.rank == rank or (s.rank is None and rank == WORLDS[ENGINES[which][0]]) for s in here):
                self.spawn(which, rank, 0)

    @rule(pick=Pick, how=st.lists(st.sampled_from(["disconnect", "die", "prove"]), min_size=1, max_size=3))
    def end(self, pick: int, how: list[str]) -> None:
        """A process ends: what the daemon learns of it, and in which order."""
        living = [s for s in self.model.sessions.values() if s.id in self.driver.state.sessions]
        session = _one(living, pick) if living else None
        for step in how:
            if session is None or session.id not in self.driver.state.sessions:
                return
            if step == "die":
                self.model.ended(session.id, "dead")
                self.observe(machine.Died(session.id, ("lock",), (99,)))
                continue
            for key in [key for key in self.judge.questions if key[0] == session.id]:
                del self.judge.questions[key]
            if step == "prove":
                self.model.ended(session.id, "gone")
                self.observe(machine.Gone(session.id))
            elif session.connected:
                self.model.disconnected(session.id)
                self.observe(machine.Disconnected(session.id))

    @precondition(lambda self: len(self.talking()) > 3)
    @rule(pick=Pick, unmapped=st.booleans())
    def detach(self, pick: int, unmapped: bool) -> None:
        session = _one(self.talking(), pick)
        if session.life == "attached":
            self.ask(session, "detach", unmapped=unmapped)

    @precondition(lambda self: any(s.life == "detached" for s in self.model.sessions.values()))
    @rule(pick=Pick)
    def unmap(self, pick: int) -> None:
        session = _one([s for s in self.model.sessions.values() if s.life == "detached"], pick)
        if session.id in self.driver.state.sessions and session.connected:
            self.ask(session, "unmapped")

    @precondition(lambda self: self.driver.state.waiters or self.model.leases)
    @rule(seconds=st.sampled_from([0.5, 4, 1000]))
    def time_passes(self, seconds: float) -> None:
        self.driver.now += seconds
        self.observe(machine.Tick())

    def bound(self) -> bool:
        return bool(self.talking()) and any(pool.binding for pool in self.model.pools.values())

    # -- writing ---------------------------------------------------------------------------------

    @precondition(lambda self: self.talking())
    @rule(pick=Pick, n=st.sampled_from([1, 2, 3, 4, 5, 3, 4, 5, 0, 6]), wait_s=st.sampled_from([0, 0, 5]))
    def lease(self, pick: int, n: int, wait_s: int) -> None:
        self.ask(_one(self.talking(), pick), "lease", n=n, wait_s=wait_s)

    @precondition(lambda self: self.talking())
    @rule(pick=Pick, first=st.integers(0, 6), count=st.integers(1, 4), wait_s=st.sampled_from([0, 0, 5]))
    def reserve(self, pick: int, first: int, count: int, wait_s: int) -> None:
        parent = KEYS[first - 1] if first else None
        self.ask(_one(self.talking(), pick), "reserve", keys=KEYS[first : first + count], parent=parent, wait_s=wait_s)

    def bare(self) -> list[int]:
        """Leases without any key."""
        return [number for number, lease in self.model.leases.items() if not lease.keys]

    def member_of(self, lease: int, pick: int, own: bool) -> ModelSession:
        """A session of the engine that has the lease, or any."""
        known = self.model.leases.get(lease)
        own_sessions = [s for s in self.talking() if own and known and s.incarnation == known.incarnation]
        return _one(own_sessions or self.talking(), pick)

    def writer_of(self, lease: int, pick: int, own: bool) -> ModelSession:
        """One of the lease's writers, or any worker."""
        numbers = self.model.leases[lease].writers.values() if own and lease in self.model.leases else ()
        return _one([s for s in self.workers() if s.id in numbers] or self.workers(), pick)

    @precondition(lambda self: self.workers())
    @rule(pick=Pick, which=Pick, some=st.none() | Few, own=Mostly)
    def commit(self, pick: int, which: int, some: list[int] | None, own: bool) -> None:
        lease = self.lease_number(which)
        self.ask(self.writer_of(lease, pick, own), "commit", lease=lease, pages=self.lease_pages(lease, some))

    @precondition(lambda self: any(s.rank is None for s in self.talking()))
    @rule(
        pick=Pick,
        way=st.sampled_from(["reserve", "reserve", "seal"]),
        first=st.integers(0, 6),
        count=st.integers(1, 3),
        late=st.sampled_from([None, None, 0]),
    )
    def cache(self, pick: int, way: str, first: int, count: int, late: int | None) -> None:
        """The whole way of an engine, or all of it but the commits of one rank.

        ``reserve`` asks what is there already; ``lease`` and ``seal`` do not, and make duplicates.
        """
        session = _one([s for s in self.talking() if s.rank is None], pick)
        before = set(self.model.leases)
        keys, parent = KEYS[first : first + count], KEYS[first - 1] if first else None
        if way == "reserve":
            self.ask(session, "reserve", keys=keys, parent=parent, wait_s=0)
        else:
            self.ask(session, "lease", n=len(keys), wait_s=0)
        for number in self.model.leases.keys() - before:
            if way == "seal":
                self.ask(session, "seal", lease=number, keys=keys, pages=None, parent=parent)
            self.commit_as_all(list(self.model.leases).index(number), late)

    @precondition(lambda self: self.model.leases)
    @rule(which=Pick, skip=st.sampled_from([None, None, 0, 1]))
    def commit_as_all(self, which: int, skip: int | None) -> None:
        """What engines do: every rank commits all that it may."""
        lease = _one(list(self.model.leases.values()), which)
        for rank, number in lease.writers.items():
            session = self.model.sessions[number]
            if rank != skip and session.life == "attached" and lease.id in self.model.leases:
                self.ask(session, "commit", lease=lease.id, pages=None)

    @precondition(lambda self: self.talking())
    @rule(pick=Pick, which=Pick, some=st.none() | Few, first=st.integers(0, 6), own=Mostly)
    def seal(self, pick: int, which: int, some: list[int] | None, first: int, own: bool) -> None:
        if own and not self.bare():
            self.lease(pick, 2, 0)
        bare = self.bare()
        lease = _one(bare, which) if bare and own else self.lease_number(which)
        pages = self.lease_pages(lease, some)
        known = self.model.leases.get(lease)
        count = len(pages) if pages is not None else len(known.pages) if known is not None else 1
        session = self.member_of(lease, pick, own)
        keys, parent = KEYS[first : first + count], KEYS[first - 1] if first else None
        self.ask(session, "seal", lease=lease, keys=keys, pages=pages, parent=parent)

    @precondition(lambda self: self.talking())
    @rule(pick=Pick, which=Pick, some=st.none() | Few, own=Mostly)
    def abort(self, pick: int, which: int, some: list[int] | None, own: bool) -> None:
        lease = self.lease_number(which)
        self.ask(self.member_of(lease, pick, own), "abort", lease=lease, pages=self.lease_pages(lease, some))

    @precondition(lambda self: self.workers())
    @rule(pick=Pick, which=Pick, some=st.none() | Few, own=Mostly)
    def drain_lease(self, pick: int, which: int, some: list[int] | None, own: bool) -> None:
        """Also for what nobody revoked: that must not count as evidence."""
        lease = self.lease_number(which)
        pages = self.lease_pages(lease, some)
        whole = [lease] if pages is None else []
        entries = [] if pages is None or lease not in self.model.leases else [[lease, pages]]
        self.ask(self.writer_of(lease, pick, own), "drained", leases=whole, hits=[], pages=entries)

    # -- reading ---------------------------------------------------------------------------------

    @precondition(lambda self: self.talking())
    @rule(
        pick=Pick,
        op=st.sampled_from(["lookup", "lookup", "contains", "touch"]),
        first=st.integers(0, 6),
        count=st.integers(1, 4),
        mode=st.sampled_from(["prefix", "each"]),
    )
    def read(self, pick: int, op: str, first: int, count: int, mode: str) -> None:
        arguments: dict[str, Any] = {"keys": KEYS[first : first + count]}
        self.ask(_one(self.talking(), pick), op, **arguments, **({"mode": mode} if op == "lookup" else {}))

    @precondition(bound)
    @rule(pick=Pick, which=Pick, count=st.integers(1, 3))
    def find(self, pick: int, which: int, count: int) -> None:
        """Look up what is there."""
        readers = [s for s in self.talking() if self.model.pools[s.pool].binding]
        if readers:
            session = _one(readers, pick)
            keys = sorted(self.model.pools[session.pool].binding)
            first = which % len(keys)
            self.ask(session, "lookup", keys=keys[first : first + count], mode="prefix")

    @precondition(lambda self: self.model.hits and self.talking())
    @rule(pick=Pick, which=Pick)
    def release(self, pick: int, which: int) -> None:
        hit = _one(list(self.model.hits.values()), which)
        own = [s for s in self.talking() if s.incarnation == hit.incarnation]
        session = _one(own if own and pick else self.talking(), pick)
        self.ask(session, "release", hits=[hit.id])

    @precondition(lambda self: self.model.hits and self.workers())
    @rule(pick=Pick, which=Pick)
    def drain_hit(self, pick: int, which: int) -> None:
        hit = _one(list(self.model.hits.values()), which)
        self.ask(_one(self.workers(), pick), "drained", leases=[], hits=[hit.id], pages=[])

    @precondition(bound)
    @rule(pick=Pick, first=st.integers(0, 6), count=st.integers(1, 3), clear=st.integers(0, 3))
    def evict_or_clear(self, pick: int, first: int, count: int, clear: int) -> None:
        session = _one(self.talking(), pick)
        if clear == 3:
            self.ask(session, "clear")
        else:
            self.ask(session, "evict", keys=KEYS[first : first + count])

    @precondition(lambda self: self.last)
    @rule(pick=Pick, back=st.integers(0, 2))
    def invariant_8_the_same_request_gives_the_same_answer(self, pick: int, back: int) -> None:
        numbers = [n for n in self.last if n in self.driver.state.sessions and (n, self.last[n][0]) in self.answers()]
        if not numbers or any(waiter.session == _one(numbers, pick) for waiter in self.driver.state.waiters):
            return
        session = _one(numbers, pick)
        request, op, arguments = self.last[session]
        given, before = self.answers()[session, request], snapshot(self.driver.state)
        if request - back < 1:
            return
        again = self.driver.repeat(session, request - back, op, **arguments)
        self.answers()[session, request] = given
        if back:
            assert again.get("error", {}).get("code") == "stale_request", f"invariant 8: an older request got {again}"
        else:
            assert again == given, f"invariant 8: {op} got {given}, then {again}"
        assert snapshot(self.driver.state) == before, f"invariant 8: repeating {op} changed something"

    def answers(self) -> dict[tuple[int, int], dict[str, Any]]:
        return self.driver.replies


def _one(found: list[T], pick: int) -> T:
    return found[pick % len(found)]
