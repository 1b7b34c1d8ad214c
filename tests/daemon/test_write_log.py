"""A kill at any store to memory: each operation has happened wholly or not at all, and the run goes on.

A scripted run is logged store by store. For every prefix of the log, and for torn last stores, the
next daemon must find one of two states: the one before the operation under way, or the one after it.
Invariants 1 to 6 are ``state_problems``; 7 and 8 are the answers; 9 and 10 the two states.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from sharedmirror.types import Plane, Role
from sharedmirrord.core import machine
from sharedmirrord.core.model import Effects, Session, State
from sharedmirrord.core.transitions import PageState
from sharedmirrord.journal import ALIGNMENT_BYTES
from sharedmirrord.records import RecordStore
from tests.daemon.durable_driver import DurableDriver, recovered, recovered_from, stored_records
from tests.daemon.durable_view import durable_view, plain, state_problems
from tests.daemon.store_memory import ByteStorage, Store, kills, recording

TEARS = 6
"""How often a longer store is seen torn; chosen for the time that the tests take."""


@dataclass
class Step:
    """One event: how many stores were made when its answers went out, and what was durable then."""

    event: machine.Event | None
    stores: int
    view: dict[str, Any]
    answered: dict[int, dict[str, Any]]
    """The last answer of each session that is still there."""
    held: dict[int, tuple[list[int], list[int]]]
    """Leases and hits of each session that may come back."""


@dataclass
class Run:
    start: bytes = b""
    log: list[Store] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class LoggedDriver(DurableDriver):
    """Notes after each event what a kill must not lose."""

    def __init__(self) -> None:
        self.run: Run | None = None
        super().__init__()

    def apply(self, event: machine.Event) -> Effects:
        effects = super().apply(event)
        self.note(event)
        return effects

    def note(self, event: machine.Event | None) -> None:
        if self.run is not None:
            attached = [s for s in self.state.sessions.values() if s.incarnation is not None]
            answered = {s.id: plain(s.last_reply) for s in attached if s.last_reply is not None}
            held = {s.id: (sorted(s.leases), sorted(s.hits)) for s in attached}
            self.run.steps.append(Step(event, len(self.run.log), durable_view(self.state), answered, held))


def tell(driver: LoggedDriver) -> None:
    """A run in which everything happens that leaves a record."""
    e = driver.engine("e", num_host_pages=11, max_held=8)
    f = driver.engine("f", num_host_pages=11)
    driver.engine("s", world_size=1, pool="static", kind="static", scheduler=False, num_host_pages=3)
    ask = driver.ask
    e.cache(b"a", b"b", b"c")
    e.cache(b"d", parent=b"a")
    half = f.lease(3)
    f.commit(half["lease"], half["pages"][:2], ranks=[0])
    ask(f.scheduler, "seal", lease=half["lease"], keys=[b"x", b"y"], pages=half["pages"][:2])
    kept = e.lookup(b"a", b"b")
    loose = f.lookup(b"c", b"a", mode="each")
    f.commit(half["lease"], half["pages"][:1], ranks=[1])
    ask(f.scheduler, "release", hits=[loose["hit"]])
    again = ask(e.scheduler, "reserve", keys=[b"b", b"p", b"y"], parent=b"a")
    e.commit(again["lease"])
    driver.disconnect(f.workers[0])
    f.drained(1, hits=[loose["hit"]])
    driver.died(f.workers[0])
    f.drained(1, [half["lease"]])
    ask(e.scheduler, "evict", keys=[b"c", b"b"])
    many = ask(e.scheduler, "reserve", keys=[b"q%d" % i for i in range(3)], parent=None)
    e.commit(many["lease"], many["pages"][:1])
    ask(e.scheduler, "abort", lease=many["lease"], pages=many["pages"][1:2])
    driver.gone(f.workers[0])
    fresh = driver.hello()
    driver.ask_attach(fresh, engine="f", rank=0, num_host_pages=11)
    e.drained(0, pages=[[many["lease"], many["pages"][1:2]]])
    ask(e.scheduler, "clear")
    e.drained(0, [many["lease"]])
    e.drained(1, [many["lease"]], pages=[[many["lease"], many["pages"][1:2]]])
    waiting = driver.send(e.scheduler, "lease", n=8, wait_s=5.0)
    driver.tick(6.0)
    assert not driver.waits(e.scheduler, waiting)
    e.release(kept["hit"])
    f.drained(1, [half["lease"]])
    f.workers[0] = fresh
    f.cache(b"a", b"new")
    ask(driver.hello(Role.SCHEDULER), "attach", pool="p", engine="f", max_held=6)
    last = e.lease(5)
    e.commit(last["lease"], last["pages"][2:], ranks=[1])
    f.lookup(b"a", mode="each")
    ask(e.workers[0], "detach", unmapped=False)
    ask(e.workers[0], "unmapped")
    driver.disconnect(e.scheduler)
    driver.gone(e.scheduler)
    assert driver.state.leases[last["lease"]].revoked == 31
    assert any(driver.state.hits)


def big(driver: LoggedDriver, name: str, count: int | tuple[int, int], **changes: Any) -> int:
    """Begin to attach the one rank of an engine whose pages have 2 MiB; returns its session."""
    planes = [Plane("k", 0, 1, 2 << 20, 4).to_wire()]
    session = driver.hello()
    changes = {"engine": name, "pool": name, "world_size": 1, "planes": planes, "num_host_pages": count} | changes
    driver.attach(session, **changes)
    return session


def unmap(driver: LoggedDriver, *sessions: int) -> None:
    """Answer as these sessions what their pool gives back."""
    for session in sessions:
        pool = driver.state.pools[driver.state.sessions[session].pool or 0]
        while pool.elastic is not None and pool.elastic.told is not None and session in pool.elastic.awaited:
            driver.ask(session, "shrunk", number=pool.elastic.told[0])


def stretch(driver: LoggedDriver) -> None:
    """A pool grows, gives back while it is in use, and grows again at the cost of an idle one."""
    x, head = big(driver, "x", (2, 24)), driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="x", engine="x")
    driver.ask(head, "lease", n=5)
    lease = driver.ask(head, "reserve", keys=[b"x%d" % number for number in range(17)], parent=None)
    driver.ask(x, "commit", lease=lease["lease"], pages=None)
    z = big(driver, "x", (2, 24), engine="z")
    hit = driver.ask(head, "lookup", keys=[b"x16"], mode="each")
    y = big(driver, "y", 9, wait_s=5.0)
    unmap(driver, x)
    driver.ask(head, "release", hits=[hit["hit"]])
    driver.ask(x, "drained", leases=[], hits=[hit["hit"]])
    unmap(driver, x, z)
    driver.disconnect(z)
    driver.died(z)
    unmap(driver, x)
    driver.gone(z)
    unmap(driver, x)
    assert driver.state.sessions[y].pool is not None
    driver.kill(y)
    lease = driver.ask(head, "lease", n=18)
    driver.ask(head, "abort", lease=lease["lease"], pages=None)
    driver.ask(x, "drained", leases=[lease["lease"]], hits=[])
    assert {pool.name for pool in driver.state.pools.values()} == {"p", "static", "x"}


def wander(driver: LoggedDriver, rng: random.Random, steps: int) -> None:
    """Go on with whatever comes to mind; refusals are answers too."""
    keys = [b"a", b"b", b"x", b"new", b"w1", b"w2"]
    for _ in range(steps):
        state = driver.state
        for engine in ("e", "f"):
            ranks = {s.rank for s in state.sessions.values() if s.connected and names(state, s) == engine}
            for rank in {0, 1, None} - ranks:
                if rank is None:
                    driver.send(driver.hello(Role.SCHEDULER), "attach", pool="p", engine=engine)
                else:
                    driver.attach(driver.hello(), engine=engine, rank=rank, num_host_pages=11)
        session = rng.choice([number for number, s in state.sessions.items() if s.connected])
        worker = state.sessions[session].rank is not None
        lease = rng.choice(list(state.leases.values())) if state.leases else None
        hits = [number for number, hit in state.hits.items() if hit.incarnation == state.sessions[session].incarnation]
        some = [page for page in lease.pages if rng.random() < 0.5] if lease else []
        roll = rng.randrange(40)
        shrinking = [pool.elastic.told for pool in state.pools.values() if pool.elastic and pool.elastic.told]
        if roll == 0:
            driver.kill(session)
        elif roll == 4:
            big(driver, "y", rng.randrange(5, 25), wait_s=5.0)
        elif shrinking and roll < 14:
            driver.send(session, "shrunk", number=shrinking[0][0])
        elif roll == 1:
            driver.disconnect(session)
            driver.died(session)
        elif roll == 2:
            gone = [number for number, s in state.sessions.items() if not s.connected]
            driver.gone(rng.choice([*gone, session]))
        elif roll == 3:
            driver.send(session, "clear")
        elif worker and lease is not None and roll < 24:
            driver.send(session, "commit", lease=lease.id, pages=some if roll < 12 else None)
        elif worker:
            driver.send(session, "drained", leases=list(state.leases), hits=list(state.hits))
        elif roll < 10:
            driver.send(session, "reserve", keys=rng.sample(keys, 3), parent=rng.choice([None, *keys]))
        elif roll < 16:
            driver.send(session, "lease", n=rng.randrange(1, 4))
        elif roll < 20 and lease is not None:
            chosen = [lease.pages[at] for at in range(len(lease.pages)) if lease.open >> at & 1][:2]
            driver.send(session, "seal", lease=lease.id, keys=rng.sample(keys, len(chosen)), pages=chosen)
        elif roll < 24 and lease is not None:
            driver.send(session, "abort", lease=lease.id, pages=some or None)
        elif roll < 30:
            driver.send(session, "lookup", keys=rng.sample(keys, 3), mode="each")
        elif roll < 37:
            driver.send(session, "release", hits=hits[:2])
        else:
            driver.send(session, "evict", keys=rng.sample(keys, 2))


def names(state: State, session: Session) -> str:
    """Return the engine of an attached session."""
    return "" if session.incarnation is None else state.incarnations[session.incarnation].engine


@pytest.fixture(scope="module")
def run() -> Run:
    driver = LoggedDriver()
    driver.run = Run(driver.storage.image())
    driver.note(None)
    with recording(driver.storage) as driver.run.log:
        tell(driver)
        stretch(driver)
        wander(driver, random.Random(4), 800)
    return driver.run


def finish(driver: DurableDriver, held: dict[int, tuple[list[int], list[int]]], rng: random.Random) -> None:
    """The survivors resume, in any order, and go on until nothing of theirs is left."""
    sessions = [number for number in driver.state.sessions if number in held]
    rng.shuffle(sessions)
    for number in sessions:
        driver.resume(number, *held[number])
    for number in list(driver.state.sessions.keys() - held.keys()):
        driver.gone(number)
    assert driver.state.survivors == set()
    for session in list(driver.state.sessions.values()):
        if session.state.value == "detached":
            driver.gone(session.id)
    answer_pushes(driver)
    for session in list(driver.state.sessions.values()):
        driver.requests[session.id] = session.last_request
        if session.rank is None:
            driver.ask(session.id, "lookup", keys=[b"a", b"x", b"new"], mode="each")
            driver.send(session.id, "lease", n=2)
            driver.send(session.id, "reserve", keys=[b"late", b"a"], parent=None)
    for lease in list(driver.state.leases.values()):
        for writer in lease.writers.values():
            if writer in driver.state.sessions:
                driver.send(writer, "commit", lease=lease.id, pages=None)
    for session in list(driver.state.sessions.values()):
        if session.rank is None:
            driver.ask(session.id, "release", hits=sorted(session.hits))
            for number in sorted(session.leases):
                driver.ask(session.id, "abort", lease=number, pages=None)
    answer_pushes(driver)
    for pool in driver.state.pools.values():
        assert pool.elastic is None or not pool.elastic.giving
        if pool.table is not None:
            counts = pool.table.counts
            assert counts[PageState.LEASED] == counts[PageState.QUARANTINED] == len(pool.table.pins) == 0


def answer_pushes(driver: DurableDriver) -> None:
    while any(driver.pushes.values()):
        said, driver.pushes = driver.pushes, defaultdict(list)
        for number, bodies in said.items():
            session = driver.state.sessions.get(number)
            if session is not None and session.rank is not None:
                leases = [one for body in bodies for one in body.get("leases", ())]
                hits = [one for body in bodies for one in body.get("hits", ())]
                pages = [[body["lease"], body["pages"]] for body in bodies if body["push"] == "revoked_pages"]
                driver.ask(number, "drained", leases=leases, hits=hits, pages=pages)
                for body in bodies:
                    if body["push"] == "shrink":
                        driver.ask(number, "shrunk", number=body["number"])


def next_daemon(image: bytes) -> DurableDriver:
    driver = DurableDriver()
    driver.storage = ByteStorage(image)
    driver.store = RecordStore.open(driver.storage)
    driver.state = recovered(driver.store)
    driver.records = stored_records(driver.store)
    driver.apply(machine.Ready())
    return driver


def check_answers(state: State, step: Step) -> None:
    for number, answer in step.answered.items():
        session = state.sessions.get(number)
        if session is not None and session.last_reply is not None:
            newer = session.last_request > answer["id"]
            assert newer or session.last_reply == answer, f"invariant 7: the answer {answer} is lost"


def test_the_run_has_what_it_takes(run: Run) -> None:
    assert len(run.steps) > 500
    assert len({repr(step.view) for step in run.steps}) > 400
    shrinking = [
        p["record"]["elastic"][3] for s in run.steps for p in s.view["pools"].values() if p["record"]["elastic"]
    ]
    assert {type(told) for told in shrinking} == {list, type(None)}, "no pool gave back"
    headers = sum(not isinstance(store, int) and store[0] < ALIGNMENT_BYTES for store in run.log)
    assert headers > 3 * 3, "no checkpoint was written"
    *_, last = kills(run.log, 0, random.Random(0), run.start)
    assert durable_view(recovered_from(last[1])) == run.steps[-1].view


def test_a_kill_at_any_store_leaves_each_operation_whole_or_undone(run: Run) -> None:
    at = seen = 0
    generations: dict[tuple[int, int], int] = {}
    undone: set[int] = set()
    redone: set[int] = set()
    for made, image in kills(run.log, TEARS, random.Random(1), run.start):
        while at + 1 < len(run.steps) and run.steps[at + 1].stores <= made:
            at += 1
        state = recovered_from(image)
        seen += 1
        assert state_problems(state) == [], f"after store {made}, step {at}"
        view = durable_view(state)
        before, after = run.steps[at], run.steps[min(at + 1, len(run.steps) - 1)]
        assert view in (before.view, after.view), f"invariant 10: after store {made}, between {before} and {after}"
        if before.view != after.view and made > before.stores:
            (redone if view == after.view else undone).add(at)
        check_answers(state, before)
        for pool in state.pools.values():
            for page, generation in enumerate(pool.table.generations if pool.table else ()):
                assert generation >= generations.get((pool.id, page), 0), f"invariant 3: page {page} after store {made}"
                generations[pool.id, page] = generation
    assert seen > 5000
    # An operation is there with the third store of its commit; those with slots take more stores.
    assert len(undone) > 400 and len(redone) > 30


def test_the_survivors_go_on_after_a_kill_at_any_store(run: Run) -> None:
    at = seen = repeated = 0
    rng = random.Random(2)
    for made, image in kills(run.log, TEARS, rng, run.start):
        while at + 1 < len(run.steps) and run.steps[at + 1].stores <= made:
            at += 1
        if rng.random() < 0.9 or at + 1 >= len(run.steps):
            continue
        seen += 1
        before, after = run.steps[at], run.steps[at + 1]
        driver = next_daemon(image)
        event = after.event
        if isinstance(event, machine.Request) and event.session in driver.state.sessions:
            happened = durable_view(driver.state) == after.view != before.view
            leases, hits = before.held.get(event.session, ([], []))
            driver.resume(event.session, leases, hits, event.id)
            answer = driver.repeat(event.session, event.id, event.op, **event.arguments)
            if happened and event.op in machine.MUTATING:
                assert plain(answer) == after.answered.get(event.session, plain(answer)), "invariant 8"
                repeated += 1
        elif event is not None:
            # What the rim saw of a process it sees again.
            driver.apply(event)
        known = {s.id: (sorted(s.leases), sorted(s.hits)) for s in driver.state.sessions.values()}
        finish(driver, {number: known[number] for number in known.keys() & before.held.keys()}, rng)
    assert seen > 150 and repeated > 10


def test_a_kill_at_any_store_of_a_recovery_loses_nothing(run: Run) -> None:
    rng = random.Random(3)
    stores = 0
    for made, image in kills(run.log, TEARS, rng, run.start):
        if made % 4:
            continue
        storage = ByteStorage(image, len(image))
        with recording(storage) as log:
            first = durable_view(recovered(RecordStore.open(storage)))
        for _, later in kills(log, 1, rng, image):
            stores += 1
            if rng.random() < 0.5:
                assert durable_view(recovered_from(later)) == first
    assert stores > 100
