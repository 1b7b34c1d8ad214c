"""Leases: all or nothing, committed by every rank, freed on evidence and never before."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import (
    KeyInputError,
    NoPages,
    PageError,
    ProtocolError,
    RanksMissing,
    StaleLease,
    UsageError,
)
from sharedmirror.types import Role
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_driver import Driver, Engine, attach_arguments, snapshot

FREE, LEASED, SEALED, QUARANTINED = PageState.FREE, PageState.LEASED, PageState.SEALED, PageState.QUARANTINED


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def engine(driver: Driver) -> Engine:
    return driver.engine()


def state_of(driver: Driver, page: int) -> PageState:
    return PageState(driver.table().states[page])


# -- granting ------------------------------------------------------------------------------------


def test_a_lease_is_all_or_nothing(driver: Driver, engine: Engine) -> None:
    engine.lease(3)
    before = snapshot(driver.state)
    with pytest.raises(NoPages, match="3 pages were asked for; pool 'p' has 2 free and 0 sealed") as caught:
        engine.lease(3)
    assert caught.value.ids == {"asked": 3}
    assert snapshot(driver.state) == before
    assert len(engine.lease(2)["pages"]) == 2


@pytest.mark.parametrize(("n", "says"), [(0, "at least one page"), (6, "leases 5 at most")])
def test_a_lease_of_none_or_of_more_than_the_pool(engine: Engine, n: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engine.lease(n)


def test_a_lease_evicts_and_says_what(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b", b"c")
    lease = engine.lease(4)
    assert lease["evicted"] == [b"c", b"b"]
    assert driver.table().evictions == 2


def test_a_lease_needs_every_rank(driver: Driver, engine: Engine) -> None:
    driver.kill(engine.workers[1])
    with pytest.raises(RanksMissing, match=r"engine 'e' .* ranks \[1\] are not attached; start") as caught:
        engine.lease(1)
    assert caught.value.ids["ranks"] == [1]


def test_a_lease_waits_for_pages(driver: Driver, engine: Engine) -> None:
    held = engine.lease(5)["lease"]
    other = driver.hello(Role.SCHEDULER)
    driver.ask(other, "attach", pool="p", engine="e")
    asked = driver.send(other, "lease", n=2, wait_s=5.0)
    driver.ask(engine.scheduler, "abort", lease=held)
    engine.drained(0, leases=[held])
    assert driver.waits(other, asked)
    engine.drained(1, leases=[held])
    assert len(driver.result(other, asked)["pages"]) == 2


def test_a_lease_waits_for_a_rank_that_comes_back(driver: Driver, engine: Engine) -> None:
    driver.kill(engine.workers[1])
    asked = driver.send(engine.scheduler, "lease", n=2, wait_s=5.0)
    assert driver.waits(engine.scheduler, asked)
    driver.ask(driver.hello(), "attach", **attach_arguments(rank=1))
    assert len(driver.result(engine.scheduler, asked)["pages"]) == 2


def test_waiting_for_pages_ends_with_its_time(driver: Driver, engine: Engine) -> None:
    engine.lease(5)
    asked = driver.send(engine.scheduler, "lease", n=1, wait_s=5.0)
    driver.tick(4.9)
    assert driver.waits(engine.scheduler, asked)
    driver.tick(0.2)
    with pytest.raises(NoPages):
        driver.result(engine.scheduler, asked)


# -- commit and seal -----------------------------------------------------------------------------


def test_a_page_is_readable_after_key_and_every_commit(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(2)
    number, pages = lease["lease"], lease["pages"]
    answer = driver.ask(engine.scheduler, "seal", lease=number, keys=[b"a", b"b"])
    assert (answer["sealed"], answer["pending"]) == ([], pages)
    answer = engine.commit(number, ranks=[0])
    assert (answer["sealed"], answer["pending"]) == ([], pages)
    assert engine.lookup(b"a", b"b")["states"] == "pp"
    answer = engine.commit(number, ranks=[1])
    assert (answer["sealed"], answer["pending"]) == (pages, [])
    assert engine.lookup(b"a", b"b")["pages"] == pages


def test_the_seal_may_come_last(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    assert engine.commit(lease["lease"])["sealed"] == []
    assert driver.ask(engine.scheduler, "seal", lease=lease["lease"], keys=[b"a"])["sealed"] == lease["pages"]


def test_one_rank_that_commits_twice_is_one_rank(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)["lease"]
    driver.ask(engine.scheduler, "seal", lease=lease, keys=[b"a"])
    assert engine.commit(lease, ranks=[0, 0])["sealed"] == []


def test_parts_of_a_lease(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(3)
    number, (first, second, third) = lease["lease"], lease["pages"]
    driver.ask(engine.scheduler, "seal", lease=number, keys=[b"b"], pages=[second])
    assert engine.commit(number, [second, first])["sealed"] == [second]
    with pytest.raises(StaleLease, match=f"page {second} of lease"):
        engine.commit(number, [second], ranks=[0])
    driver.ask(engine.scheduler, "seal", lease=number, keys=[b"c", b"a"], pages=[third, first], parent=b"b")
    assert engine.commit(number)["sealed"] == [third]
    assert number not in driver.state.leases
    assert driver.table().index == {b"a": first, b"b": second, b"c": third}


def test_a_later_page_with_the_same_key_is_freed(driver: Driver, engine: Engine) -> None:
    (winner,) = engine.cache(b"a")
    lease = engine.lease(1)
    driver.ask(engine.scheduler, "seal", lease=lease["lease"], keys=[b"a"])
    answer = engine.commit(lease["lease"])
    assert (answer["sealed"], answer["duplicates"]) == ([], [[lease["pages"][0], winner]])
    assert state_of(driver, lease["pages"][0]) is FREE


def test_the_first_that_is_whole_wins_not_the_first_that_was_sealed(driver: Driver, engine: Engine) -> None:
    slow, quick = engine.lease(1), engine.lease(1)
    driver.ask(engine.scheduler, "seal", lease=slow["lease"], keys=[b"a"])
    driver.ask(engine.scheduler, "seal", lease=quick["lease"], keys=[b"a"])
    engine.commit(quick["lease"])
    assert engine.lookup(b"a")["pages"] == quick["pages"]
    assert engine.commit(slow["lease"])["duplicates"] == [[slow["pages"][0], quick["pages"][0]]]


def test_a_key_twice_in_one_lease(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(2)
    first, second = lease["pages"]
    for page in (first, second):
        driver.ask(engine.scheduler, "seal", lease=lease["lease"], keys=[b"a"], pages=[page])
    answer = engine.commit(lease["lease"])
    assert (answer["sealed"], answer["duplicates"]) == ([first], [[second, first]])


SEALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keys": [b"a"]}, KeyInputError, "1 keys for 2 pages"),
    ({"keys": [b"a", b"b", b"c"]}, KeyInputError, "3 keys for 2 pages"),
    ({"keys": [b"a", b"a"]}, KeyInputError, "position 1 comes twice"),
    ({"keys": [b"a", b""]}, KeyInputError, "1 to 64 bytes"),
    ({"keys": [b"a", b"x" * 65]}, KeyInputError, "1 to 64 bytes, not 65"),
    ({"keys": [b"a", b"b"], "parent": b""}, KeyInputError, "1 to 64 bytes"),
    ({"keys": [b"a", b"b"], "pages": [1, 1]}, PageError, "named twice"),
    ({"keys": [b"a"], "pages": [5]}, PageError, "page 5 is not in lease"),
    ({"keys": [b"a"], "pages": [0]}, PageError, "page 0 is not in lease"),
    ({"keys": [b"a"], "pages": [-1]}, ProtocolError, "non-negative"),
    ({"keys": b"a"}, ProtocolError, "must be a list"),
]


@pytest.mark.parametrize(("arguments", "error", "says"), SEALS)
def test_a_bad_seal_changes_nothing(
    driver: Driver, engine: Engine, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    lease = engine.lease(2)["lease"]
    engine.commit(lease)
    before = snapshot(driver.state)
    with pytest.raises(error, match=says):
        driver.ask(engine.scheduler, "seal", lease=lease, **arguments)
    assert snapshot(driver.state) == before


@pytest.mark.parametrize("pages", [[0], [5], [1, 5]])
def test_a_commit_outside_the_lease_changes_nothing(driver: Driver, engine: Engine, pages: list[int]) -> None:
    lease = engine.lease(2)["lease"]
    before = snapshot(driver.state)
    with pytest.raises(PageError, match="is not in lease"):
        engine.commit(lease, pages)
    assert snapshot(driver.state) == before


# -- reserve -------------------------------------------------------------------------------------


def test_reserve_says_what_became_of_each_key(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    writing = driver.ask(engine.scheduler, "reserve", keys=[b"b"], parent=b"a")
    answer = driver.ask(engine.scheduler, "reserve", keys=[b"a", b"b", b"c"])
    assert (answer["present"], answer["pending"], answer["keys"]) == ([b"a"], [b"b"], [b"c"])
    assert len(answer["pages"]) == 1
    assert engine.commit(writing["lease"])["sealed"] == writing["pages"]
    assert engine.commit(answer["lease"])["sealed"] == answer["pages"]
    assert engine.lookup(b"a", b"b", b"c")["states"] == "hhh"


def test_reserve_of_what_is_all_there_leases_nothing(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    answer = driver.ask(engine.scheduler, "reserve", keys=[b"a", b"b"])
    assert "lease" not in answer
    assert driver.state.leases == {}


def test_reserve_evicts_neither_its_own_keys_nor_its_parent(driver: Driver, engine: Engine) -> None:
    engine.cache(b"p")
    engine.cache(b"a")
    engine.cache(b"x")
    engine.cache(b"y", b"z")
    answer = driver.ask(engine.scheduler, "reserve", keys=[b"a", b"b", b"c"], parent=b"p")
    assert set(answer["evicted"]) == {b"x", b"z"}
    with pytest.raises(NoPages):
        driver.ask(engine.scheduler, "reserve", keys=[b"a", b"d", b"e"], parent=b"p")


def test_a_key_of_an_aborted_reservation_is_free_again(driver: Driver, engine: Engine) -> None:
    lease = driver.ask(engine.scheduler, "reserve", keys=[b"a"])["lease"]
    driver.ask(engine.scheduler, "abort", lease=lease)
    assert engine.lookup(b"a")["states"] == "m"
    assert driver.ask(engine.scheduler, "reserve", keys=[b"a"])["keys"] == [b"a"]


def test_a_reservation_has_its_keys_already(driver: Driver, engine: Engine) -> None:
    lease = driver.ask(engine.scheduler, "reserve", keys=[b"a"])["lease"]
    with pytest.raises(StaleLease, match="has a key already"):
        driver.ask(engine.scheduler, "seal", lease=lease, keys=[b"b"])


# -- the rest ---------------------------------------------------------------------------------------


def test_nobody_leases_before_attach(driver: Driver) -> None:
    with pytest.raises(UsageError, match="attach to a pool first"):
        driver.ask(driver.hello(), "lease", n=1)


def test_generations_are_below_the_durable_mark(driver: Driver, engine: Engine) -> None:
    """Grant one page over and over, past the step in which the mark is raised."""
    for _ in range(2100):
        lease = engine.lease(5)["lease"]
        driver.ask(engine.scheduler, "abort", lease=lease)
        for rank in range(2):
            engine.drained(rank, leases=[lease])
        if driver.pool().generation_high > 2048:
            break
    assert max(driver.table().generations) < driver.pool().generation_high
