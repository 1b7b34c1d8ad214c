"""Elastic pools grow before they evict, and give back while processes are attached."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import ArenaBusy, ArenaFull, NoPages, PoolMismatch, UsageError
from sharedmirror.types import Plane
from sharedmirrord.core import growth, machine
from sharedmirrord.core.elastic import Elastic
from sharedmirrord.core.model import Effects
from sharedmirrord.core.recover import DamagedRecords, recover
from sharedmirrord.core.report import report
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_driver import MIB, Driver, Engine
from tests.daemon.durable_driver import DurableDriver

KIB = 1 << 10
PLANES = [Plane("k", 0, 1, 64 * KIB, 4).to_wire()]
STEP = 32
"""Pages of 64 KiB in 2 MiB."""


class Notes(DurableDriver):
    """A driver that keeps the lines for the log, and the memory that processes map."""

    notes: list[str]

    def apply(self, event: machine.Event) -> Effects:
        effects = super().apply(event)
        self.notes = [*getattr(self, "notes", []), *effects.notes]
        return effects

    def elastic(self, name: str = "p") -> Elastic:
        found = self.pool(name).elastic
        assert found is not None
        return found

    def backed(self, name: str = "p") -> int:
        return self.elastic(name).backed

    def shrinks(self, session: int) -> list[tuple[int, int]]:
        return [(push["number"], push["pages"]) for push in self.pushes[session] if push["push"] == "shrink"]

    def answer(self, *sessions: int) -> None:
        """Have processes unmap what they were told to, until they are told no more."""
        done: set[tuple[int, int]] = set()
        while found := [(s, number) for s in sessions for number, _ in self.shrinks(s) if (s, number) not in done]:
            for session, number in found:
                done.add((session, number))
                self.ask(session, "shrunk", number=number)


@pytest.fixture
def driver() -> Notes:
    return Notes(16 * MIB)


def engine(driver: Driver, name: str, count: Any = (2, 8 * STEP), **changes: Any) -> Engine:
    return driver.engine(name, pool=name, world_size=1, planes=PLANES, num_host_pages=count, **changes)


def keys(first: int, end: int) -> list[bytes]:
    return [b"k%d" % number for number in range(first, end)]


def leave(driver: Driver, engine: Engine) -> None:
    for session in [*engine.workers, engine.scheduler]:
        driver.kill(session)


def waiting(driver: Driver, name: str, count: Any) -> tuple[int, int]:
    worker = driver.hello()
    request = driver.attach(
        worker, engine=name, pool=name, world_size=1, planes=PLANES, num_host_pages=count, wait_s=30.0
    )
    return worker, request


# -- what may be asked for


@pytest.mark.parametrize("change", [{"layout": "slab"}, {"kind": "static"}])
def test_only_leased_pools_in_page_layout_can_be_elastic(driver: Notes, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="only a leased pool with layout 'page' can"):
        engine(driver, "a", scheduler=False, **change)
    assert driver.state.pools == {}


@pytest.mark.parametrize("count", [(1, 9), (9, 8), (2, 1 << 33)])
def test_odd_bounds_are_refused(driver: Notes, count: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="the least is 2"):
        engine(driver, "a", count)


def test_who_comes_later_must_ask_for_the_same(driver: Notes) -> None:
    engine(driver, "a")
    with pytest.raises(PoolMismatch, match=r"num_host_pages \(2, 256\), rank 0 asks for 9"):
        driver.ask_attach(driver.hello(), pool="a", engine="z", world_size=1, planes=PLANES, num_host_pages=9)
    engine(driver, "b", 32)
    with pytest.raises(PoolMismatch, match=r"num_host_pages 32, rank 0 asks for \(2, 9\)"):
        driver.ask_attach(driver.hello(), pool="b", engine="z", world_size=1, planes=PLANES, num_host_pages=(2, 9))
    reply = driver.ask_attach(driver.hello(), pool="a", engine="z", world_size=1, planes=PLANES, num_host_pages=None)
    assert (reply["num_host_pages"], reply["backed"]) == (256, 32)


def test_more_than_the_arena_ever_has_is_refused(driver: Notes) -> None:
    with pytest.raises(ArenaFull, match=f"asks for 257 pages .* {16 * MIB} of {16 * MIB} bytes free"):
        engine(driver, "a", (2, 257))


# -- growing


def test_a_pool_begins_small_and_tells_where_it_may_grow(driver: Notes) -> None:
    (reply,) = engine(driver, "a").replies
    assert (reply["num_host_pages"], reply["backed"]) == (256, STEP)
    (region,) = reply["regions"]
    assert (region["bytes"], region["max_bytes"]) == (2 * MIB, 16 * MIB)
    assert region["levels"] == [n * 2 * MIB for n in range(1, 9)]
    assert driver.state.space.free_bytes == 14 * MIB


def test_it_grows_before_it_evicts_and_only_then(driver: Notes) -> None:
    a = engine(driver, "a", (2, 3 * STEP))
    a.cache(*keys(0, STEP - 1))
    assert driver.backed("a") == STEP
    a.cache(*keys(STEP - 1, STEP + 1))
    assert driver.backed("a") == 2 * STEP
    a.cache(*keys(STEP + 1, 3 * STEP - 1))
    assert (driver.backed("a"), driver.table("a").evictions) == (3 * STEP, 0)
    a.cache(b"one more")
    assert (driver.backed("a"), driver.table("a").evictions) == (3 * STEP, 1)
    assert driver.notes[0] == f"event=pool_grown pool='a' tag='' pages={2 * STEP} bytes={2 * MIB}"


def test_it_grows_as_far_as_there_is_room_and_evicts_for_the_rest(driver: Notes) -> None:
    a = engine(driver, "a")
    engine(driver, "b", 5 * STEP)
    a.cache(*keys(0, 3 * STEP - 10))
    assert driver.backed("a") == 3 * STEP
    a.lease(20)
    assert (driver.backed("a"), driver.table("a").evictions) == (3 * STEP, 11)


def test_a_new_pool_keeps_its_pages_over_a_restart(driver: Notes) -> None:
    a = engine(driver, "a")
    a.cache(*keys(0, 50))
    lease = a.lease(20)
    after = driver.restarted()
    assert after.backed("a") == 3 * STEP
    assert after.table("a").counts[PageState.RESERVED] == 1 + 5 * STEP
    for session in [*a.workers, a.scheduler]:
        after.resume(session)
    a.driver = after
    assert a.lookup(*keys(0, 50))["states"] == "h" * 50
    a.commit(lease["lease"])


def test_it_reclaims_idle_pools_to_grow(driver: Notes) -> None:
    a = engine(driver, "a")
    leave(driver, engine(driver, "b", 6 * STEP))
    a.cache(*keys(0, 2 * STEP))
    assert (driver.backed("a"), [pool.name for pool in driver.state.pools.values()]) == (3 * STEP, ["a"])
    assert f"event=pool_reclaimed pool='b' tag='' bytes={12 * MIB} for='a'" in driver.notes


def test_two_engines_share_what_has_memory_and_it_grows_with_their_shares(driver: Notes) -> None:
    a = engine(driver, "a")
    z = driver.engine("z", pool="a", world_size=1, planes=PLANES, num_host_pages=None)
    assert driver.pool("a").share == (STEP - 1) // 2
    held = a.lease(20)
    assert (driver.backed("a"), driver.pool("a").share) == (2 * STEP, STEP - 1)
    with pytest.raises(NoPages, match="may hold 31"):
        z.lease(5 * STEP)
    assert driver.backed("a") == 2 * STEP, "the largest share would not do"
    z.lease(4 * STEP - 1)
    assert (driver.backed("a"), driver.pool("a").share) == (8 * STEP, 4 * STEP - 1)
    driver.ask(z.scheduler, "abort", lease=max(driver.state.leases), pages=None)
    z.drained(0, [max(driver.state.leases)])
    driver.ask(a.scheduler, "abort", lease=held["lease"], pages=None)
    a.drained(0, [held["lease"]])
    waiting(driver, "b", 4 * STEP)
    driver.answer(a.workers[0], z.workers[0])
    assert (driver.backed("a"), driver.pool("a").share) == (4 * STEP, 2 * STEP - 1)


def test_a_worker_asks_what_it_may_map(driver: Notes) -> None:
    a = engine(driver, "a")
    a.lease(2 * STEP)
    found = driver.ask(a.workers[0], "extents")
    (region,) = found["regions"]
    assert (found["backed"], region["bytes"]) == (3 * STEP, 6 * MIB)
    assert sum(length for _, _, length in region["extents"]) == 6 * MIB
    with pytest.raises(UsageError, match="only a worker"):
        driver.ask(a.scheduler, "extents")


def test_ranks_with_regions_of_their_own_grow_together(driver: Notes) -> None:
    planes = [[Plane("k", rank, 2, size, 4).to_wire()] for rank, size in enumerate((64 * KIB, 48 * KIB))]
    planes = [[*own, Plane("latent", 0, 1, 16 * KIB, 4).to_wire()] for own in planes]
    workers = [driver.hello(), driver.hello()]
    sent = [
        driver.attach(worker, rank=rank, planes=planes[rank], num_host_pages=(2, 100), wait_s=5.0)
        for rank, worker in enumerate(workers)
    ]
    replies = [driver.result(*pair) for pair in zip(workers, sent, strict=True)]
    assert [len(reply["regions"]) for reply in replies] == [2, 2]
    assert driver.backed() == STEP
    driver.ask(workers[0], "lease", n=40)
    assert driver.backed() == 2 * STEP
    assert [region.size_bytes for region in driver.pool().regions] == [4 * MIB, 2 * MIB, 4 * MIB]


# -- giving back


def full(driver: Driver, name: str = "a") -> Engine:
    """An engine whose pool has taken the whole arena, sealed."""
    found = engine(driver, name)
    found.cache(*keys(0, 8 * STEP - 1))
    return found


def test_a_pool_above_its_share_makes_room_for_one_that_attaches(driver: Notes) -> None:
    a = full(driver)
    worker, request = waiting(driver, "b", (2 * STEP, 4 * STEP))
    assert driver.waits(worker, request)
    ((number, pages),) = driver.shrinks(a.workers[0])
    assert (pages, driver.backed("a"), driver.elastic("a").visible) == (7 * STEP, 8 * STEP, 7 * STEP)
    driver.ask(a.workers[0], "shrunk", number=number)
    assert driver.waits(worker, request)
    driver.answer(a.workers[0])
    assert (driver.backed("a"), driver.backed("b")) == (6 * STEP, 2 * STEP)
    assert driver.result(worker, request)["backed"] == 2 * STEP
    assert driver.table("a").evictions == 2 * STEP
    assert f"event=pool_shrunk pool='a' tag='' pages={7 * STEP} bytes={2 * MIB}" in driver.notes


def test_who_waits_in_vain_is_told_who_gives_back(driver: Notes) -> None:
    full(driver)
    worker, request = waiting(driver, "b", 4 * STEP)
    driver.tick(31)
    with pytest.raises(
        ArenaBusy, match=r"needs 8388608 bytes; 0 of 16777216 .* pools \['a'\] are giving back"
    ) as caught:
        driver.result(worker, request)
    assert caught.value.retryable and caught.value.ids["pools"] == ["a"]


def test_a_share_is_not_taken(driver: Notes) -> None:
    full(driver)
    with pytest.raises(ArenaFull, match="asks for 256 pages"):
        engine(driver, "b", 7 * STEP + 32)
    assert not driver.elastic("a").giving
    a, worker = driver.pool("a"), driver.hello()
    request = driver.attach(worker, engine="b", pool="b", world_size=1, planes=PLANES, num_host_pages=128, wait_s=9)
    assert driver.waits(worker, request) and a.elastic is not None and a.elastic.target == 4 * STEP


def test_pages_in_use_go_when_they_are_free(driver: Notes) -> None:
    a = engine(driver, "a")
    a.cache(*keys(0, 7 * STEP - 1))
    held = a.lease(STEP)
    assert held["pages"][-1] == 8 * STEP - 1
    pinned = a.lookup(b"k%d" % (7 * STEP - 2), mode="each")
    assert pinned["pages"] == [7 * STEP - 1]
    waiting(driver, "b", (2 * STEP, 4 * STEP))
    assert driver.shrinks(a.workers[0]) == []
    driver.ask(a.scheduler, "abort", lease=held["lease"], pages=held["pages"][:-1])
    a.drained(0, pages=[[held["lease"], held["pages"][:-1]]])
    assert driver.shrinks(a.workers[0]) == []
    driver.ask(a.scheduler, "seal", lease=held["lease"], keys=[b"late"], pages=held["pages"][-1:])
    a.commit(held["lease"])
    assert a.lookup(b"late", mode="each")["states"] == "m", "sealed, and evicted at once"
    driver.answer(a.workers[0])
    assert driver.backed("a") == 7 * STEP, "the next level has a page that is pinned"
    a.release(pinned["hit"])
    driver.answer(a.workers[0])
    assert (driver.backed("a"), driver.backed("b")) == (6 * STEP, 2 * STEP)


def test_a_pool_that_gives_back_grants_nothing_that_goes(driver: Notes) -> None:
    a = full(driver)
    worker, _ = waiting(driver, "b", (2 * STEP, 4 * STEP))
    lease = a.lease(10)
    assert max(lease["pages"]) < 7 * STEP
    assert driver.backed("a") == 8 * STEP
    driver.answer(a.workers[0])
    assert driver.backed("b") == 2 * STEP


def test_when_nobody_wants_the_room_it_is_kept(driver: Notes) -> None:
    a = engine(driver, "a")
    a.cache(*keys(0, 7 * STEP - 1))
    held = a.lease(STEP)
    worker, _ = waiting(driver, "b", (2 * STEP, 4 * STEP))
    driver.kill(worker)
    driver.ask(a.scheduler, "abort", lease=held["lease"], pages=held["pages"][1:])
    a.drained(0, pages=[[held["lease"], held["pages"][1:]]])
    again = a.lease(STEP - 1)
    assert (driver.table("a").evictions, driver.elastic("a").giving) == (STEP, False), "but for the level below"
    assert max(again["pages"]) > 6 * STEP and driver.backed("a") == 8 * STEP


def test_a_worker_that_never_answers_keeps_the_memory_until_it_is_gone(driver: Notes) -> None:
    a = full(driver)
    other = driver.hello()
    driver.ask_attach(other, pool="a", engine="z", world_size=1, planes=PLANES, num_host_pages=None)
    worker, request = waiting(driver, "b", (STEP, 4 * STEP))
    driver.answer(a.workers[0])
    driver.disconnect(other)
    driver.died(other)
    assert driver.waits(worker, request)
    driver.gone(other)
    assert driver.result(worker, request)["backed"] == STEP


def test_a_worker_that_left_and_still_maps_must_answer(driver: Notes) -> None:
    a = full(driver)
    other = driver.hello()
    driver.ask_attach(other, pool="a", engine="z", world_size=1, planes=PLANES, num_host_pages=None)
    driver.ask(other, "detach", unmapped=False)
    worker, request = waiting(driver, "b", (STEP, 4 * STEP))
    driver.answer(a.workers[0])
    assert driver.waits(worker, request)
    driver.answer(other)
    assert driver.result(worker, request)["backed"] == STEP


def test_who_attaches_meanwhile_maps_only_what_stays(driver: Notes) -> None:
    a = full(driver)
    worker, request = waiting(driver, "b", (STEP, 4 * STEP))
    reply = driver.ask_attach(driver.hello(), pool="a", engine="z", world_size=1, planes=PLANES, num_host_pages=None)
    assert (reply["backed"], reply["regions"][0]["bytes"]) == (7 * STEP, 14 * MIB)
    driver.answer(a.workers[0])
    assert not driver.waits(worker, request)


@pytest.mark.parametrize("answered", [False, True])
def test_a_restart_in_the_midst_asks_again(driver: Notes, answered: bool) -> None:
    a = full(driver)
    other = driver.hello()
    driver.ask_attach(other, pool="a", engine="z", world_size=1, planes=PLANES, num_host_pages=None)
    waiting(driver, "b", (STEP, 4 * STEP))
    ((number, pages),) = driver.shrinks(a.workers[0])
    if answered:
        driver.ask(a.workers[0], "shrunk", number=number)
    after = driver.restarted()
    after.pushes.clear()
    assert (after.backed("a"), after.elastic("a").visible) == (8 * STEP, 7 * STEP)
    for session in (a.workers[0], a.scheduler, other):
        after.resume(session)
    assert after.shrinks(a.workers[0]) == after.shrinks(other) == [(number, pages)]
    after.answer(a.workers[0])
    assert after.backed("a") == 8 * STEP
    after.answer(other)
    assert after.backed("a") == 7 * STEP


def test_nothing_is_evicted_for_others_while_survivors_are_awaited(driver: Notes) -> None:
    a = full(driver)
    after = driver.restarted()
    after.resume(a.workers[0])
    worker, request = waiting(after, "b", (STEP, 4 * STEP))
    assert after.table("a").evictions == 0 and after.waits(worker, request)
    after.resume(a.scheduler)
    after.answer(a.workers[0])
    assert after.result(worker, request)["backed"] == STEP


def test_a_pool_below_its_share_grows_at_the_cost_of_one_above(driver: Notes) -> None:
    a = full(driver)
    worker, request = waiting(driver, "b", (STEP, 8 * STEP))
    driver.answer(a.workers[0])
    driver.result(worker, request)
    assert (driver.backed("a"), driver.backed("b")) == (7 * STEP, STEP)
    b = Engine(driver, "b", [worker], worker, [])
    with pytest.raises(NoPages, match="31 free and 0 sealed pages, .*; 32 of 256 have memory"):
        b.lease(2 * STEP)
    assert driver.elastic("a").target == 5 * STEP
    own = a.lease(1)
    assert driver.elastic("a").backed == 7 * STEP, "what is given back is not taken again"
    assert own["pages"][0] < 5 * STEP, "what is to go is not granted"
    a.cache(b"z")
    driver.ask(a.scheduler, "abort", lease=own["lease"], pages=None)
    a.drained(0, [own["lease"]])
    driver.answer(a.workers[0])
    assert (driver.backed("a"), driver.backed("b")) == (5 * STEP, 3 * STEP)
    assert len(b.lease(2 * STEP)["pages"]) == 2 * STEP
    request = driver.send(worker, "lease", n=3 * STEP, wait_s=5.0)
    driver.answer(a.workers[0])
    assert (driver.backed("a"), driver.backed("b")) == (4 * STEP, 4 * STEP), "no further than an equal share"
    assert driver.waits(worker, request)


def test_what_one_cannot_use_counts_for_the_others(driver: Notes) -> None:
    a = full(driver)
    worker, request = waiting(driver, "b", STEP)
    driver.answer(a.workers[0])
    assert not driver.waits(worker, request)
    worker, request = waiting(driver, "c", (STEP, 8 * STEP))
    driver.answer(a.workers[0])
    driver.ask(worker, "lease", n=STEP - 1)
    driver.send(worker, "lease", n=5 * STEP)
    assert driver.elastic("a").target == 4 * STEP, "of 14 MiB that b leaves, 7 each, in whole steps"


def test_a_step_with_more_pages_than_one_event_looks_at(driver: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_EVICT_PAGES", 20)
    a = full(driver)
    worker, request = waiting(driver, "b", STEP)
    assert driver.state.giving and machine.next_deadline(driver.state) == 0.0
    assert (driver.table("a").evictions, driver.shrinks(a.workers[0])) == (20, [])
    driver.tick(0)
    assert (driver.state.giving, driver.table("a").evictions) == (False, STEP)
    driver.answer(a.workers[0])
    assert not driver.waits(worker, request)


def test_the_status_tells_how_far_a_pool_is(driver: Notes) -> None:
    a = full(driver)
    waiting(driver, "b", (2 * STEP, 4 * STEP))
    told, forming = report(driver.state, driver.now)["pools"]
    names = ("num_host_pages", "min_host_pages", "backed_pages", "giving_back_pages", "giving_back_awaits")
    pid = driver.state.sessions[a.workers[0]].peer.pid
    assert [told[name] for name in names] == [8 * STEP, 2, 8 * STEP, 2 * STEP, [pid]]
    assert [forming[name] for name in names] == [4 * STEP, 2 * STEP, None, 0, []]


# -- records that contradict each other


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: [1, *e[1:]], "has 1 to 256 pages"),
        (lambda e: [300, *e[1:]], "has 300 to 256 pages"),
        (lambda e: [*e[:2], 100, e[3]], "has memory for 100"),
        (lambda e: [*e[:2], 7 * STEP, None], "has other regions than pages"),
        (lambda e: [*e[:3], [1 << 40, 7 * STEP]], "gives back down to 224 of 256"),
        (lambda e: [*e[:3], [1, 8 * STEP]], "gives back down to 256 of 256"),
        (lambda e: [*e[:3], [1, 7 * STEP + 1]], "gives back down to 225"),
        (lambda e: [*e[:3], [1, 6 * STEP]], "is in use and has no memory"),
        (lambda e: [*e[:3], "x"], "contradict each other"),
        (lambda e: [0, 0], "contradict each other"),
    ],
)
def test_damaged_records_are_refused(driver: Notes, change: Any, words: str) -> None:
    full(driver)
    waiting(driver, "b", (STEP, 4 * STEP))
    records = dict(driver.store.records())
    ((key, value),) = [(key, value) for key, value in records.items() if key[0] == "pool"]
    records[key] = value | {"elastic": change(value["elastic"])}
    with pytest.raises(DamagedRecords, match=words):
        recover(records, driver.store.slots, 16 * MIB, 5.0)


def test_a_lease_of_a_page_without_memory_is_refused(driver: Notes) -> None:
    a = engine(driver, "a")
    a.lease(3)
    records = dict(driver.store.records())
    ((key, value),) = [(key, value) for key, value in records.items() if key[0] == "lease"]
    records[key] = value | {"pages": [1, 2, 40]}
    with pytest.raises(DamagedRecords, match="page 40, which has no memory"):
        recover(records, driver.store.slots, 16 * MIB, 5.0)
