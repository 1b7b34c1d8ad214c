"""A stateful story of several engines and shared shards, in which every copy lands in a memory that is checked.

The bytes of a page are derived from its key. A copy may land at any time between the store and the
proof that its process is gone. The ranks of an engine hold the latent plane alike, so they share one
region and take turns writing it; each has a region of its own besides. What is judged here is what
readers see; that the answers themselves are right is the business of ``core_story``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sharedmirror import errors
from sharedmirror.types import Plane, Role
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_driver import attach_arguments
from tests.daemon.durable_driver import DurableDriver

T = TypeVar("T")
ENGINES, WORLD, PAGES = ("e", "f", "g"), 2, 8
KEYS = [b"k%d" % number for number in range(9)]
"""In prefix order: each key hangs on the one before."""
REFUSALS = ("stale_lease", "cleared", "no_pages", "ranks_missing", "shard_mismatch", "not_resumed")
Body = dict[str, Any]
Pick = st.integers(0, 11)


@dataclass
class Copy:
    """A copy under way into one region of a page."""

    region: int
    page: int
    generation: int
    content: bytes


@dataclass
class Member:
    """One process; ``gone`` when nothing of it can write any more."""

    session: int
    engine: str
    rank: int | None
    regions: list[Body] = field(default_factory=list)
    flying: list[Copy] = field(default_factory=list)
    stored: dict[int, bool] = field(default_factory=dict)
    """Leases into which it has stored, and whether with the right bytes."""
    refused: set[int] = field(default_factory=set)
    """Leases of which it said that it never stores there again."""
    life: str = "attached"


@dataclass
class Writing:
    """A lease and the keys whose bytes belong into its pages."""

    id: int
    engine: str
    pages: list[int]
    generations: list[int]
    keys: list[bytes]
    writers: list[int]
    sealed: bool


@dataclass
class Reading:
    """A hit, with the key of each page, and the workers that may be loading under it."""

    id: int
    engine: str
    pages: dict[int, bytes]
    loaders: set[int]


class SharingStory(RuleBasedStateMachine):
    """Engines over one pool; the memory is (region, page) to bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = DurableDriver()
        self.memory: dict[tuple[int, int], bytes] = {}
        self.members: dict[int, Member] = {}
        self.writings: list[Writing] = []
        self.readings: list[Reading] = []

    # -- helpers ---------------------------------------------------------------------------------

    def alive(self, engine: str | None = None) -> list[Member]:
        return [m for m in self.members.values() if m.life == "attached" and engine in (None, m.engine)]

    def ask(self, member: Member, op: str, **arguments: Any) -> Body | None:
        """Ask; None for a refusal that may come at any time."""
        try:
            return self.driver.ask(member.session, op, **arguments)
        except errors.SharedMirrorError as error:
            assert error.code in REFUSALS, f"{op} {arguments}: {error!r}"
            return None

    def land(self, member: Member, copies: list[Copy]) -> None:
        """Copies arrive; a page that was granted again, or is readable, must never be hit by one."""
        table = self.driver.table()
        for copy in copies:
            member.flying.remove(copy)
            where = f"page {copy.page} of generation {copy.generation}"
            assert table.generations[copy.page] == copy.generation, f"4: a copy landed in {where}, granted again"
            state = PageState(table.states[copy.page])
            assert state in (PageState.LEASED, PageState.QUARANTINED), f"4: a copy landed in {where}, {state.name}"
            self.memory[copy.region, copy.page] = copy.content

    def copies_into(self, member: Member, writing: Writing) -> list[Copy]:
        granted = dict(zip(writing.pages, writing.generations, strict=True))
        return [copy for copy in member.flying if granted.get(copy.page) == copy.generation]

    def wrong_bytes(self, pages: dict[int, bytes]) -> Iterator[str]:
        """Say which of the pages do not hold what their keys stand for, in any region."""
        for region in self.driver.pool().regions:
            for page, key in pages.items():
                if self.memory.get((region.id, page)) != key:
                    yield f"page {page} of region {region.id} has {self.memory.get((region.id, page))!r}, not {key!r}"

    # -- processes -------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        for engine in ENGINES:
            self.revive(engine)

    @rule(engine=st.sampled_from(ENGINES), max_held=st.sampled_from([None, 4, 9]))
    def revive(self, engine: str, max_held: int | None = None) -> None:
        """Start what an engine misses; a rank whose forerunner may still be there is refused."""
        here = {member.rank for member in self.alive(engine)}
        asked = []
        wait_s = 0.0 if self.members else 5.0
        for rank in [rank for rank in range(WORLD) if rank not in here]:
            planes = [Plane("latent", 0, 1, 1024, 4).to_wire(), Plane("k", rank, WORLD, 1024, 4).to_wire()]
            session = self.driver.hello()
            body = attach_arguments(engine=engine, rank=rank, planes=planes, num_host_pages=PAGES, wait_s=wait_s)
            asked.append((Member(session, engine, rank), self.driver.send(session, "attach", **body)))
        for member, request in asked:
            body = self.driver.replies[member.session, request]
            if "error" in body:
                assert body["error"]["code"] == "engine_busy", body
                self.driver.disconnect(member.session)
            else:
                member.regions = body["regions"]
                self.members[member.session] = member
        if None not in here:
            head = Member(self.driver.hello(Role.SCHEDULER), engine, None)
            self.driver.ask(head.session, "attach", pool="p", engine=engine, max_held=max_held)
            self.members[head.session] = head

    @precondition(lambda self: len(self.alive()) > 6)
    @rule(pick=Pick, how=st.sampled_from(["killed", "doubted", "detached"]))
    def end(self, pick: int, how: str) -> None:
        """A process dies, leaves a fork behind, or leaves in peace."""
        member = _one(self.alive(), pick)
        if how == "detached":
            self.land(member, list(member.flying))
            self.driver.ask(member.session, "detach", unmapped=True)
            member.life = "gone"
            return
        self._kill(member, how == "doubted")

    def _kill(self, member: Member, doubted: bool) -> None:
        self.driver.disconnect(member.session)
        member.life = "killed"
        if doubted:
            self.driver.died(member.session)

    @precondition(lambda self: any(member.life == "killed" for member in self.members.values()))
    @rule(pick=Pick)
    def prove(self, pick: int) -> None:
        """Nothing is left of a dead process."""
        member = _one([member for member in self.members.values() if member.life == "killed"], pick)
        member.flying.clear()
        self.driver.gone(member.session)
        member.life = "gone"

    @rule()
    def restart(self) -> None:
        """The daemon is killed and starts again; all come back, and the dead are looked at again."""
        self.driver = self.driver.restarted()
        for member in self.members.values():
            if member.life == "attached":
                leases = [w.id for w in self.writings] if member.rank is None else []
                hits = [r.id for r in self.readings] if member.rank is None else []
                self.driver.resume(member.session, leases, hits)

    @rule(pick=Pick)
    def answer(self, pick: int) -> None:
        """A worker finishes what is under way for what was revoked or released, and says so."""
        workers = [member for member in self.alive() if member.rank is not None and self.driver.pushes[member.session]]
        if workers:
            member = workers[pick % len(workers)]
            pushes = self.driver.pushes.pop(member.session)
            leases = [number for push in pushes for number in push.get("leases", [])]
            some = [[push["lease"], push["pages"]] for push in pushes if push["push"] == "revoked_pages"]
            named = {*leases, *(lease for lease, _ in some)}
            for writing in self.writings:
                if writing.id in named:
                    self.land(member, self.copies_into(member, writing))
                    member.refused.add(writing.id)
            hits = [number for push in pushes for number in push.get("hits", [])]
            for reading in self.readings:
                if reading.id in hits:
                    reading.loaders.discard(member.session)
            self.driver.ask(member.session, "drained", leases=leases, hits=hits, pages=some)

    # -- writing ---------------------------------------------------------------------------------

    @rule(
        engine=st.sampled_from(ENGINES),
        first=st.integers(0, 8),
        count=st.integers(1, 3),
        way=st.sampled_from(["reserve", "reserve", "lease"]),
    )
    def write(self, engine: str, first: int, count: int, way: str) -> None:
        heads = [member for member in self.alive(engine) if member.rank is None]
        if not heads:
            return
        keys = KEYS[first : first + count]
        parent = KEYS[first - 1] if first else None
        arguments: Body = {"keys": keys, "parent": parent} if way == "reserve" else {"n": len(keys)}
        body = self.ask(heads[0], way, **arguments)
        if body is not None and body.get("lease"):
            wanted = body.get("keys", keys)
            writers = list(self.driver.state.leases[body["lease"]].writers.values())
            self.writings.append(
                Writing(
                    body["lease"], engine, body["pages"], body["generations"], wanted, writers, sealed=way == "reserve"
                )
            )

    @precondition(lambda self: self.writings)
    @rule(pick=Pick, which=Pick, right=st.sampled_from([True] * 7 + [False]))
    def store(self, pick: int, which: int, right: bool) -> None:
        """One rank begins its copies: its own plane, and of the shared one the pages whose turn it is.

        Only rank 1 may have other bytes than it says: that both err alike is not to be found out.
        """
        writing = _one(self.writings, which)
        self._store(self.members[_one(writing.writers, pick)], writing, right)

    def _store(self, member: Member, writing: Writing, right: bool) -> None:
        if member.life != "attached" or writing.id in member.stored or self._revoked(member, writing):
            return
        right = right or member.rank == 0
        member.stored[writing.id] = right
        for page, generation, key in zip(writing.pages, writing.generations, writing.keys, strict=True):
            for region in member.regions:
                ranks = region["ranks"]
                if ranks[page % len(ranks)] == member.rank:
                    content = key if right or len(ranks) == 1 else b"wrong"
                    member.flying.append(Copy(region["id"], page, generation, content))

    def _revoked(self, member: Member, writing: Writing) -> bool:
        """Whether the rank was told, or will be, that it must not store there."""
        lease = self.driver.state.leases.get(writing.id)
        return (
            writing.id in member.refused
            or lease is None
            or bool(lease.revoked)
            or lease.number != self.driver.pool().number
        )

    @precondition(lambda self: any(member.flying for member in self.members.values()))
    @rule(pick=Pick, count=st.integers(1, 6))
    def arrive(self, pick: int, count: int) -> None:
        """Some copies land, also those of a dead process whose end is not proven."""
        member = _one([member for member in self.members.values() if member.flying], pick)
        self.land(member, member.flying[:count])

    @precondition(lambda self: self.writings)
    @rule(which=Pick, ranks=st.sampled_from([[0, 1], [1, 0], [0], [1]]))
    def commit(self, which: int, ranks: list[int]) -> None:
        """Ranks store, if they have not, and commit once all has landed, with the checksums of what they share."""
        self._commit(_one(self.writings, which), ranks)

    def _commit(self, writing: Writing, ranks: list[int]) -> None:
        for member in [self.members[number] for number in writing.writers if self.members[number].rank in ranks]:
            self._store(member, writing, True)
            if member.life == "attached" and writing.id in member.stored and not self._revoked(member, writing):
                self.land(member, self.copies_into(member, writing))
                right = member.stored[writing.id]
                checks = [
                    [page, region["id"], zlib.crc32(key if right else b"wrong")]
                    for region in member.regions
                    if len(region["ranks"]) > 1
                    for page, key in zip(writing.pages, writing.keys, strict=True)
                ]
                self.ask(member, "commit", lease=writing.id, pages=None, checks=checks)

    @rule(
        engine=st.sampled_from(ENGINES),
        first=st.integers(0, 6),
        count=st.integers(1, 3),
        way=st.sampled_from(["reserve", "lease"]),
        ranks=st.sampled_from([[0, 1], [0, 1], [1]]),
        right=st.sampled_from([True] * 5 + [False]),
    )
    def cache(self, engine: str, first: int, count: int, way: str, ranks: list[int], right: bool) -> None:
        """The whole way of an engine, or all of it but for a rank that is late. ``lease`` makes duplicates."""
        before = len(self.writings)
        self.revive(engine)
        self.write(engine, first, count, way)
        for writing in self.writings[before:]:
            if way == "lease":
                self._seal(writing, 0)
            self._store(self.members[writing.writers[1]], writing, right)
            self._commit(writing, ranks)

    @rule(engine=st.sampled_from(ENGINES), first=st.integers(0, 6), doubted=st.booleans(), rank=st.integers(0, 1))
    def die_writing(self, engine: str, first: int, doubted: bool, rank: int) -> None:
        """A rank is killed with copies under way: they may go on in a fork of it."""
        before = len(self.writings)
        self.revive(engine)
        self.write(engine, first, 3, "reserve")
        for writing in self.writings[before:]:
            member = self.members[writing.writers[rank]]
            self._store(member, writing, True)
            if member.life == "attached":
                self._kill(member, doubted)

    @precondition(lambda self: any(not writing.sealed for writing in self.writings))
    @rule(pick=Pick, which=Pick)
    def seal(self, pick: int, which: int) -> None:
        self._seal(_one([writing for writing in self.writings if not writing.sealed], which), pick)

    def _seal(self, writing: Writing, pick: int) -> None:
        writing.sealed = True
        members = self.alive(writing.engine)
        if members:
            parent = KEYS[KEYS.index(writing.keys[0]) - 1] if writing.keys[0] != KEYS[0] else None
            self.ask(_one(members, pick), "seal", lease=writing.id, keys=writing.keys, pages=None, parent=parent)

    @precondition(lambda self: self.writings)
    @rule(pick=Pick, which=Pick, some=st.booleans())
    def abort(self, pick: int, which: int, some: bool) -> None:
        writing = _one(self.writings, which)
        members = self.alive(writing.engine)
        if members:
            self.ask(_one(members, pick), "abort", lease=writing.id, pages=writing.pages[:1] if some else None)

    # -- reading ---------------------------------------------------------------------------------

    @rule(
        engine=st.sampled_from(ENGINES),
        first=st.integers(0, 8),
        count=st.integers(1, 4),
        mode=st.sampled_from(["prefix", "each"]),
        known=st.sampled_from([True, True, True, False]),
    )
    def lookup(self, engine: str, first: int, count: int, mode: str, known: bool) -> None:
        """Of keys that are there, or of any."""
        heads = [member for member in self.alive(engine) if member.rank is None]
        there = sorted(self.driver.table().index)
        if known and there:
            first = KEYS.index(_one(there, first))
        keys = KEYS[first : first + count]
        body = self.ask(heads[0], "lookup", keys=keys, mode=mode) if heads else None
        if body is not None and body["hit"]:
            pages = {page: key for page, key in zip(body["pages"], keys, strict=False) if page >= 0}
            launch = self.driver.state.hits[body["hit"]].incarnation
            loaders = {worker.id for worker in self.driver.state.workers(launch) if worker.may_copy}
            self.readings.append(Reading(body["hit"], engine, pages, loaders))

    @precondition(lambda self: self.readings)
    @rule(pick=Pick, which=Pick)
    def release(self, pick: int, which: int) -> None:
        """The workers may still load until each has answered."""
        reading = _one(self.readings, which)
        members = self.alive(reading.engine)
        if members:
            self.ask(_one(members, pick), "release", hits=[reading.id])
            there = [key for key in reading.pages.values() if key in self.driver.table().index]
            self.ask(_one(members, pick), "evict", keys=there)  # as soon as it may be

    @precondition(lambda self: self.alive())
    @rule(
        pick=Pick, first=st.integers(0, 8), op=st.sampled_from(["touch", "evict", "touch", "evict", "touch", "clear"])
    )
    def forget(self, pick: int, first: int, op: str) -> None:
        member = _one(self.alive(), pick)
        self.ask(member, op, **({} if op == "clear" else {"keys": KEYS[first : first + 2]}))

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def readers_see_the_bytes_of_the_key(self) -> None:
        """Of every readable key, and of every page that is pinned, readable or not."""
        state = self.driver.state
        if not state.pools:
            return
        found = {page: key for key, page in self.driver.table().index.items()}
        wrong = list(self.wrong_bytes(found))
        assert not wrong, f"5: readable is {wrong}"
        gone = {number for number, member in self.members.items() if member.life == "gone"}
        for reading in self.readings:
            reading.loaders -= gone
        self.readings = [reading for reading in self.readings if reading.id in state.hits or reading.loaders]
        for reading in self.readings:
            wrong = list(self.wrong_bytes(reading.pages))
            assert not wrong, f"6: in hit {reading.id} {wrong}"
        ours = {copy.generation for member in self.members.values() for copy in member.flying}
        self.writings = [w for w in self.writings if w.id in state.leases or ours & set(w.generations)]

    @invariant()
    def one_copy_serves_all_ranks(self) -> None:
        for pool in self.driver.state.pools.values():
            assert sorted(region.ranks for region in pool.regions) == [(0,), (0, 1), (1,)]

    def teardown(self) -> None:
        """When all processes are proven gone, nothing is leased, pinned or in doubt."""
        for member in self.members.values():
            if member.life == "attached":
                self.driver.disconnect(member.session)
            if member.life != "gone":
                self.driver.gone(member.session)
        state = self.driver.state
        assert (state.leases, state.hits, state.sessions, state.incarnations) == ({}, {}, {}, {}), (
            "4: something is left"
        )
        if state.pools:
            counts = self.driver.table().counts
            assert counts[PageState.LEASED] == counts[PageState.QUARANTINED] == len(self.driver.table().pins) == 0


def _one(found: list[T], pick: int) -> T:
    return found[pick % len(found)]
