"""Looking up, pinning, releasing, evicting by name, clearing."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import KeyInputError, NoPages, StaleLease, UsageError
from sharedmirror.types import Role
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_driver import Driver, Engine, attach_arguments, snapshot


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def engine(driver: Driver) -> Engine:
    return driver.engine()


def pending(driver: Driver, engine: Engine, *keys: bytes) -> dict[str, Any]:
    """Reserve keys that nobody commits."""
    return driver.ask(engine.scheduler, "reserve", keys=list(keys))


def test_prefix_is_the_longest_readable_one(driver: Driver, engine: Engine) -> None:
    first, second = engine.cache(b"a", b"b")
    engine.cache(b"d")
    pending(driver, engine, b"c")
    answer = engine.lookup(b"a", b"b", b"c", b"d", b"e")
    assert answer["pages"] == [first, second]
    assert answer["states"] == "hhpmm", "what lies behind the prefix is no hit"
    assert driver.table().pins == {first: 1, second: 1}
    assert (driver.pool().hits, driver.pool().misses) == (2, 3)


def test_each_key_by_itself(driver: Driver, engine: Engine) -> None:
    first, second = engine.cache(b"a", b"b")
    pending(driver, engine, b"c")
    answer = engine.lookup(b"x", b"b", b"c", b"a", mode="each")
    assert answer["pages"] == [-1, second, -1, first]
    assert answer["states"] == "mhph"


@pytest.mark.parametrize("mode", ["prefix", "each"])
def test_without_a_hit_nothing_is_pinned(driver: Driver, engine: Engine, mode: str) -> None:
    answer = engine.lookup(b"x", mode=mode)
    assert answer["hit"] == 0
    assert driver.state.hits == {}


def test_a_bad_lookup_pins_nothing(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    before = snapshot(driver.state)
    for keys, mode, error in (([b"a", b"a"], "each", KeyInputError), ([b"a"], "any", UsageError)):
        with pytest.raises(error):
            driver.ask(engine.scheduler, "lookup", keys=keys, mode=mode)
    assert snapshot(driver.state) == before


def test_contains_and_touch_pin_nothing(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    pending(driver, engine, b"c")
    assert driver.ask(engine.scheduler, "contains", keys=[b"a", b"c", b"x", b"a"])["states"] == "hpmh"
    assert driver.ask(engine.scheduler, "touch", keys=[b"a", b"c", b"x", b"a"])["touched"] == 2
    assert driver.table().pins == {}


@pytest.mark.parametrize("how", ["touch", "lookup"])
def test_use_saves_a_chain_from_eviction(driver: Driver, engine: Engine, how: str) -> None:
    engine.cache(b"a", b"b")
    engine.cache(b"x", b"y")
    if how == "touch":
        driver.ask(engine.scheduler, "touch", keys=[b"b"])
    else:
        engine.release(engine.lookup(b"a", b"b")["hit"])
    assert engine.lease(3)["evicted"] == [b"y", b"x"]


# -- pins (invariant 6) --------------------------------------------------------------------------


def test_a_pinned_page_is_never_evicted(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    with pytest.raises(NoPages, match="1 are pinned"):
        engine.lease(5)
    assert driver.ask(engine.scheduler, "evict", keys=[b"a"]) | {"id": 0} == {
        "evicted": [], "pinned": [b"a"], "id": 0
    }  # fmt: skip
    engine.release(hit)
    assert engine.lease(5)["evicted"] == [b"a"]


def test_pins_stay_until_every_worker_has_drained(driver: Driver, engine: Engine) -> None:
    (page,) = engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    engine.drained(0, hits=[hit])
    driver.ask(engine.scheduler, "release", hits=[hit])
    assert [push["hits"] for push in driver.pushes[engine.workers[0]]] == [[hit]]
    engine.drained(1, hits=[hit])
    assert driver.table().pins == {page: 1}, "what was said before the release does not count"
    engine.drained(0, hits=[hit])
    assert driver.table().pins == {}


def test_each_hit_pins_by_itself(driver: Driver, engine: Engine) -> None:
    (page,) = engine.cache(b"a")
    first, second = engine.lookup(b"a")["hit"], engine.lookup(b"a")["hit"]
    engine.release(first)
    assert driver.table().pins == {page: 1}
    engine.release(second)
    assert driver.table().pins == {}


@pytest.mark.parametrize("end", ["died", "gone", "detach"])
def test_pins_of_an_ended_holder_wait_for_the_workers(driver: Driver, engine: Engine, end: str) -> None:
    (page,) = engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    if end == "detach":
        driver.ask(engine.scheduler, "detach")
    else:
        driver.disconnect(engine.scheduler)
        assert driver.state.hits[hit].released is False, "it may come back"
        getattr(driver, end)(engine.scheduler)
    engine.drained(0, hits=[hit])
    assert driver.table().pins == {page: 1}
    driver.died(engine.workers[1])
    assert driver.table().pins == {page: 1}, "a fork of the worker may still load"
    driver.gone(engine.workers[1])
    assert driver.table().pins == {}


def test_a_worker_that_detached_is_not_waited_for(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    driver.ask(engine.workers[0], "detach", unmapped=False)
    driver.ask(engine.scheduler, "release", hits=[hit])
    engine.drained(1, hits=[hit])
    assert driver.state.hits == {}


def test_a_worker_that_came_after_the_lookup_is_waited_for(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    driver.kill(engine.workers[1])
    new = driver.ask(driver.hello(), "attach", **attach_arguments(rank=1))["session"]
    driver.ask(engine.scheduler, "release", hits=[hit])
    engine.drained(0, hits=[hit])
    assert hit in driver.state.hits
    driver.ask(new, "drained", leases=[], hits=[hit])
    assert driver.state.hits == {}


def test_a_worker_that_comes_after_the_release_is_told_of_it(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    driver.ask(engine.scheduler, "release", hits=[hit])
    driver.died(engine.workers[1])
    new = driver.ask(driver.hello(), "attach", **attach_arguments(rank=1))
    assert new["released"] == [hit]
    assert new["hits"] == []


def test_releasing_again_changes_nothing(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    driver.ask(engine.scheduler, "release", hits=[hit])
    before = snapshot(driver.state)
    driver.ask(engine.scheduler, "release", hits=[hit, 77_777])
    assert snapshot(driver.state) == before


def test_invariant_9_a_foreign_hit_is_refused_and_nothing_is_released(driver: Driver, engine: Engine) -> None:
    other = driver.engine("f")
    engine.cache(b"a")
    mine, foreign = engine.lookup(b"a")["hit"], other.lookup(b"a")["hit"]
    before = snapshot(driver.state)
    with pytest.raises(StaleLease, match=f"hit {foreign} belongs to another engine"):
        driver.ask(engine.scheduler, "release", hits=[mine, foreign])
    assert snapshot(driver.state) == before


def test_another_scheduler_of_the_engine_may_release(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    other = driver.hello(Role.SCHEDULER)
    driver.ask(other, "attach", pool="p", engine="e")
    driver.ask(other, "release", hits=[hit])
    assert driver.state.hits[hit].released
    assert driver.state.sessions[engine.scheduler].hits == set()


# -- evict and clear -----------------------------------------------------------------------------


def test_evict_by_name(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    answer = driver.ask(engine.scheduler, "evict", keys=[b"a", b"nobody"])
    assert (answer["evicted"], answer["pinned"]) == ([b"a"], [])
    assert driver.table().index.keys() == {b"b"}


def test_evict_by_name_ends_a_wait_for_pages(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b", b"c", b"d", b"e")
    hit = engine.lookup(b"e", mode="each")["hit"]
    other = driver.hello(Role.SCHEDULER)
    driver.ask(other, "attach", pool="p", engine="e")
    asked = driver.send(other, "lease", n=4, wait_s=5.0)
    assert driver.waits(other, asked), "everything is the prefix of a pinned page"
    driver.ask(engine.scheduler, "evict", keys=[b"a", b"b", b"c", b"d"])
    assert len(driver.result(other, asked)["pages"]) == 4
    assert driver.state.hits[hit].pages == [driver.table().index[b"e"]]


def test_clear_makes_all_keys_vanish(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    assert driver.ask(engine.scheduler, "clear")["freed"] == 2
    assert engine.lookup(b"a", b"b")["states"] == "mm"
    assert driver.pool().number == 2
    assert driver.table().counts[PageState.FREE] == 5


def test_clear_leaves_pinned_pages_readable(driver: Driver, engine: Engine) -> None:
    first, second = engine.cache(b"a", b"b")
    hit = engine.lookup(b"a")["hit"]
    assert driver.ask(engine.scheduler, "clear")["freed"] == 1
    assert PageState(driver.table().states[first]) is PageState.SEALED
    assert engine.lookup(b"a")["states"] == "m"
    (again,) = engine.cache(b"a")
    assert again != first
    engine.release(hit)
    assert PageState(driver.table().states[first]) is PageState.FREE
    assert engine.lookup(b"a")["pages"] == [again]


def test_clear_revokes_what_has_its_keys_already(driver: Driver, engine: Engine) -> None:
    keyed = pending(driver, engine, b"a")
    bare = engine.lease(1)
    engine.commit(keyed["lease"], ranks=[0])
    driver.ask(engine.scheduler, "clear")
    assert engine.lookup(b"a")["states"] == "m"
    assert [push["leases"] for push in driver.pushes[engine.workers[1]]] == [[keyed["lease"]]]
    engine.drained(1, leases=[keyed["lease"]])
    assert keyed["lease"] not in driver.state.leases
    driver.ask(engine.scheduler, "abort", lease=bare["lease"])
    for rank in range(2):
        engine.drained(rank, leases=[bare["lease"]])
    assert driver.table().counts[PageState.FREE] == 5


def test_clear_concerns_one_pool(driver: Driver, engine: Engine) -> None:
    other = driver.engine("g", pool="q")
    engine.cache(b"a")
    other.cache(b"a")
    driver.ask(engine.scheduler, "clear")
    assert other.lookup(b"a")["states"] == "h"


@pytest.mark.parametrize("mode", ["prefix", "each"])
def test_a_lookup_waits_for_keys_that_are_being_written(driver: Driver, engine: Engine, mode: str) -> None:
    lease = pending(driver, engine, b"a", b"b")["lease"]
    asking = driver.engine("other").scheduler
    request = driver.send(asking, "lookup", keys=[b"a", b"b", b"c"], mode=mode, wait_s=5)
    engine.commit(lease, ranks=[0])
    assert driver.waits(asking, request)
    engine.commit(lease, ranks=[1])
    assert driver.result(asking, request)["states"] == "hhm"


def test_the_wait_ends_early_when_the_last_writer_fails(driver: Driver, engine: Engine) -> None:
    (page,) = engine.cache(b"a")
    pending(driver, engine, b"b")
    asking = driver.engine("other").scheduler
    request = driver.send(asking, "lookup", keys=[b"a", b"b"], wait_s=5)
    assert driver.waits(asking, request)
    driver.kill(engine.workers[0])
    answer = driver.result(asking, request)
    assert (answer["pages"], answer["states"]) == ([page], "hm")


def test_at_the_end_of_the_wait_the_answer_is_what_there_is(driver: Driver, engine: Engine) -> None:
    (page,) = engine.cache(b"a")
    pending(driver, engine, b"b")
    asking = driver.engine("other").scheduler
    request = driver.send(asking, "lookup", keys=[b"a", b"b"], wait_s=5)
    driver.tick(6)
    answer = driver.result(asking, request)
    assert (answer["pages"], answer["states"]) == ([page], "hp")
    assert driver.table().pins == {page: 1}
