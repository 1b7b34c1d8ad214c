"""Recovery gives back what was durable, asks again for what was not, and trusts nothing that is damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from sharedmirrord.core.transitions import PageState
from tests.daemon.core_story import CoreStory
from tests.daemon.durable_driver import DurableDriver
from tests.daemon.durable_view import durable_view, state_problems

Story = Callable[[DurableDriver], Any]
STORIES: list[Story] = []


def story(tell: Story) -> Story:
    STORIES.append(tell)
    return tell


@story
def nothing_happened(driver: DurableDriver) -> None:
    pass


@story
def attached_engines(driver: DurableDriver) -> None:
    driver.engine("e")
    driver.engine("f", pool="q", world_size=3, launch="first", layout="slab", num_host_pages=None, frames_per_page=2)
    driver.engine("g", pool="s", kind="static", scheduler=False)


@story
def a_pool_that_is_still_forming(driver: DurableDriver) -> None:
    driver.engine("e")
    waiting = driver.hello()
    driver.attach(waiting, pool="q", engine="f", rank=1, wait_s=5.0)


@story
def cached_chains(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=12)
    engine.cache(b"a", b"b", b"c")
    engine.cache(b"d", parent=b"a")
    driver.ask(engine.scheduler, "evict", keys=[b"c"])
    engine.cache(b"e", parent=b"not there yet")


@story
def keys_evicted_for_a_lease_that_is_open(driver: DurableDriver) -> None:
    """The slots of these pages still name the keys: the lease's record counts for more."""
    engine = driver.engine("e", num_host_pages=6)
    engine.cache(b"a", b"b", b"c")
    lease = engine.lease(4)
    assert set(lease["evicted"]) == {b"b", b"c"}
    engine.commit(lease["lease"], lease["pages"][:1])


@story
def evicted_keys_that_are_cached_again(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=6)
    engine.cache(b"a", b"b", b"c")
    lease = engine.lease(4)
    driver.ask(engine.scheduler, "abort", lease=lease["lease"], pages=lease["pages"][:3])
    for rank in (0, 1):
        engine.drained(rank, pages=[[lease["lease"], lease["pages"][:3]]])
    engine.cache(b"b", b"c")
    assert {b"b", b"c"} <= {slot.key for slot in driver.store.slots(driver.pool().id) if slot is not None}


@story
def leases_half_way(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=20)
    half = engine.lease(4)
    engine.commit(half["lease"], half["pages"][:3], ranks=[0])
    engine.commit(half["lease"], half["pages"][1:2], ranks=[1])
    driver.ask(engine.scheduler, "seal", lease=half["lease"], keys=[b"x", b"y"], pages=half["pages"][1:3], parent=b"w")
    driver.ask(engine.scheduler, "abort", lease=half["lease"], pages=half["pages"][3:])
    driver.ask(engine.scheduler, "reserve", keys=[b"r1", b"x", b"r2", b"y"], parent=b"x")
    done = engine.lease(2)
    driver.ask(engine.scheduler, "abort", lease=done["lease"])
    engine.drained(0, [done["lease"]])


@story
def pins_and_releases(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=12)
    engine.cache(b"a", b"b", b"c")
    engine.lookup(b"a", b"b")
    hit = engine.lookup(b"c", b"nowhere", b"a", mode="each")
    driver.ask(engine.scheduler, "release", hits=[hit["hit"]])
    engine.drained(1, hits=[hit["hit"]])
    engine.release(engine.lookup(b"b")["hit"] if engine.lookup(b"b") else 0)


@story
def a_cleared_pool_with_pins_and_leases(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=12)
    engine.cache(b"a", b"b", b"c")
    engine.lookup(b"a", b"b")
    engine.lookup(b"b", mode="each")
    driver.ask(engine.scheduler, "reserve", keys=[b"z"], parent=b"c")
    engine.lease(1)
    driver.ask(engine.scheduler, "clear")
    engine.cache(b"b", b"n")


@story
def dead_workers_in_every_degree(driver: DurableDriver) -> None:
    engine = driver.engine("e", world_size=3, num_host_pages=20)
    engine.cache(b"a", b"b")
    engine.lookup(b"a")
    lease = engine.lease(3)
    engine.commit(lease["lease"], lease["pages"][:1], ranks=[0])
    driver.disconnect(engine.workers[0])
    driver.disconnect(engine.workers[1])
    driver.died(engine.workers[1])
    driver.kill(engine.workers[2])
    again = driver.hello()
    driver.ask_attach(again, rank=1, world_size=3, num_host_pages=20)


@story
def a_dead_scheduler(driver: DurableDriver) -> None:
    engine = driver.engine("e")
    engine.cache(b"a")
    engine.lookup(b"a")
    engine.lease(2)
    driver.kill(engine.scheduler)


@story
def an_engine_that_left(driver: DurableDriver) -> None:
    engine = driver.engine("e")
    engine.cache(b"a")
    other = driver.engine("f")
    lease = other.lease(2)
    driver.ask(engine.workers[0], "detach", unmapped=True)
    driver.ask(other.workers[0], "detach", unmapped=False)
    assert lease["lease"] in driver.state.leases


@story
def generations_far_beyond_one_step(driver: DurableDriver) -> None:
    engine = driver.engine("e", world_size=1, num_host_pages=2)
    for number in range(1100):
        driver.state.pools[driver.pool().id].table.generations[1] += number > 5  # type: ignore[union-attr]
        engine.cache(b"%d" % number)


@pytest.fixture
def driver() -> DurableDriver:
    return DurableDriver()


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_everything_durable_comes_back(driver: DurableDriver, tell: Story) -> None:
    tell(driver)
    state = driver.recovered()
    assert durable_view(state) == durable_view(driver.state)
    assert state_problems(state) == []
    assert state.next_id >= driver.state.next_id
    assert not state.ready


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_a_second_recovery_gives_the_same(driver: DurableDriver, tell: Story) -> None:
    tell(driver)
    first = driver.recovered()
    after = driver.restarted()
    second = after.recovered()
    assert durable_view(second) == durable_view(first)
    assert second.survivors == first.survivors
    assert second.next_id >= first.next_id
    assert durable_view(after.restarted().recovered()) == durable_view(first)


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_nothing_is_left_when_all_processes_end_after_a_restart(driver: DurableDriver, tell: Story) -> None:
    tell(driver)
    after = driver.restarted()
    for session in list(after.state.sessions):
        after.died(session)
    for session in list(after.state.sessions):
        after.gone(session)
    assert (after.state.sessions, after.state.leases, after.state.hits, after.state.survivors) == ({}, {}, {}, set())
    for pool in after.state.pools.values():
        if pool.table is not None:
            counts = pool.table.counts
            assert counts[PageState.LEASED] == counts[PageState.QUARANTINED] == len(pool.table.pins) == 0


class RecoveryStory(CoreStory):
    """Whatever happened, a kill now would lose nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = DurableDriver()

    @invariant()
    def a_restart_gives_back_what_was_durable(self) -> None:
        assert isinstance(self.driver, DurableDriver)
        state = self.driver.recovered()
        assert durable_view(state) == durable_view(self.driver.state)
        assert state_problems(state) == []


TestRecoveryStory = RecoveryStory.TestCase
TestRecoveryStory.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
