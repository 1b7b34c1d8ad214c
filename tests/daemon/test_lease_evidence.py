"""Pages of a lease are freed on evidence of every writer, and stale leases change nothing (invariants 4 and 9)."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import (
    Cleared,
    PageError,
    ProtocolError,
    StaleLease,
)
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


# -- abort and evidence (invariant 4) ------------------------------------------------------------


def test_an_aborted_page_waits_for_every_rank(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    number, (page,) = lease["lease"], lease["pages"]
    driver.ask(engine.scheduler, "abort", lease=number)
    assert [push["leases"] for push in driver.pushes[engine.workers[0]]] == [[number]]
    engine.drained(0, leases=[number])
    engine.drained(0, leases=[number])
    assert state_of(driver, page) is LEASED
    engine.drained(1, leases=[number])
    assert state_of(driver, page) is FREE


def test_a_commit_is_evidence_too(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    engine.commit(lease["lease"], ranks=[0])
    driver.ask(engine.scheduler, "abort", lease=lease["lease"])
    engine.drained(1, leases=[lease["lease"]])
    assert state_of(driver, lease["pages"][0]) is FREE


def test_aborting_again_changes_nothing(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)["lease"]
    driver.ask(engine.scheduler, "abort", lease=lease)
    before, pushed = snapshot(driver.state), len(driver.pushes[engine.workers[0]])
    driver.ask(engine.scheduler, "abort", lease=lease)
    assert snapshot(driver.state) == before
    assert len(driver.pushes[engine.workers[0]]) == pushed


def test_part_of_a_lease_is_revoked_by_page(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(2)
    number, (first, second) = lease["lease"], lease["pages"]
    driver.ask(engine.scheduler, "abort", lease=number, pages=[first])
    (push,) = driver.pushes[engine.workers[0]]
    assert (push["push"], push["lease"], push["pages"]) == ("revoked_pages", number, [first])
    for rank in range(2):
        engine.drained(rank, pages=[[number, [first, second]]])
    assert (state_of(driver, first), state_of(driver, second)) == (FREE, LEASED)
    driver.ask(engine.scheduler, "seal", lease=number, keys=[b"a"], pages=[second])
    assert engine.commit(number)["sealed"] == [second]


@pytest.mark.parametrize(
    "pages", [[[[1], [1]]], [[{}, [1]]], [[None, [1]]], [["x", [1]]], [[-1, [1]]], [3], "x", [[1]]]
)
def test_nonsense_in_drained_is_refused(driver: Driver, engine: Engine, pages: Any) -> None:
    engine.lease(1)
    before = snapshot(driver.state)
    with pytest.raises(ProtocolError):
        engine.drained(0, pages=pages)
    assert snapshot(driver.state) == before


def test_a_page_that_is_not_in_the_lease_makes_the_whole_drained_void(driver: Driver, engine: Engine) -> None:
    """Half of it must not count: the other half would never be said again."""
    engine.cache(b"a")
    hit, lease, other = engine.lookup(b"a")["hit"], engine.lease(1)["lease"], engine.lease(1)["lease"]
    driver.ask(engine.scheduler, "release", hits=[hit])
    driver.ask(engine.scheduler, "abort", lease=lease)
    before = snapshot(driver.state)
    with pytest.raises(PageError):
        engine.drained(0, leases=[lease], hits=[hit], pages=[[other, [0]]])
    assert snapshot(driver.state) == before


def test_drained_for_what_nobody_revoked_is_no_evidence(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    for rank in range(2):
        engine.drained(rank, leases=[lease["lease"]])
    driver.ask(engine.scheduler, "abort", lease=lease["lease"])
    assert state_of(driver, lease["pages"][0]) is LEASED


def test_only_the_writer_itself_can_say_drained(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    driver.disconnect(engine.workers[1])
    driver.died(engine.workers[1])
    new = driver.ask(driver.hello(), "attach", **attach_arguments(rank=1))
    assert lease["lease"] in new["revoked"]
    engine.drained(0, leases=[lease["lease"]])
    driver.ask(new["session"], "drained", leases=[lease["lease"]], hits=[])
    driver.ask(engine.scheduler, "drained", leases=[lease["lease"]], hits=[])
    assert state_of(driver, lease["pages"][0]) is QUARANTINED


# -- the end of a writer or an owner -------------------------------------------------------------


def test_a_dead_writer_quarantines_what_it_had_not_committed(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(2)
    number, (first, second) = lease["lease"], lease["pages"]
    engine.commit(number, [first], ranks=[1])
    driver.disconnect(engine.workers[1])
    assert state_of(driver, second) is LEASED, "a closed socket proves nothing"
    driver.died(engine.workers[1])
    assert (state_of(driver, first), state_of(driver, second)) == (LEASED, QUARANTINED)
    engine.drained(0, leases=[number], pages=[[number, [second]]])
    assert state_of(driver, second) is QUARANTINED
    driver.gone(engine.workers[1])
    assert (state_of(driver, first), state_of(driver, second)) == (LEASED, FREE)


def test_what_a_dead_writer_had_committed_goes_on(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    driver.ask(engine.scheduler, "seal", lease=lease["lease"], keys=[b"a"])
    engine.commit(lease["lease"], ranks=[1])
    driver.disconnect(engine.workers[1])
    driver.died(engine.workers[1])
    assert engine.commit(lease["lease"], ranks=[0])["sealed"] == lease["pages"]


def test_proof_without_doubt_before_it(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    driver.kill(engine.workers[1])
    assert state_of(driver, lease["pages"][0]) is LEASED
    engine.drained(0, leases=[lease["lease"]])
    assert state_of(driver, lease["pages"][0]) is FREE


def test_detach_is_evidence(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    for worker in engine.workers:
        assert state_of(driver, lease["pages"][0]) is LEASED
        driver.ask(worker, "detach", unmapped=False)
    assert state_of(driver, lease["pages"][0]) is FREE


@pytest.mark.parametrize("end", ["died", "gone", "detach"])
def test_nobody_is_left_to_seal_when_the_owner_ends(driver: Driver, engine: Engine, end: str) -> None:
    lease = engine.lease(1)
    if end == "detach":
        driver.ask(engine.scheduler, "detach")
    else:
        getattr(driver, end)(engine.scheduler)
    with pytest.raises(StaleLease):
        engine.commit(lease["lease"])
    for rank in range(2):
        engine.drained(rank, leases=[lease["lease"]])
    assert state_of(driver, lease["pages"][0]) is FREE


def test_time_is_no_evidence(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)
    driver.ask(engine.scheduler, "abort", lease=lease["lease"])
    driver.tick(1e9)
    assert state_of(driver, lease["pages"][0]) is LEASED


# -- stale leases (invariant 9) ------------------------------------------------------------------


@pytest.mark.parametrize("op", ["commit", "seal", "abort"])
@pytest.mark.parametrize("how", ["over", "foreign", "never"])
def test_invariant_9_a_stale_lease_changes_nothing(driver: Driver, engine: Engine, op: str, how: str) -> None:
    other = driver.engine("f")
    lease = engine.lease(1)["lease"]
    if how == "over":
        driver.ask(engine.scheduler, "seal", lease=lease, keys=[b"a"])
        engine.commit(lease)
    if how == "never":
        lease = 99_999
    asker = other if how == "foreign" else engine
    before = snapshot(driver.state)
    with pytest.raises(StaleLease, match=f"lease {lease}"):
        session = asker.workers[0] if op == "commit" else asker.scheduler
        driver.ask(session, op, lease=lease, **({"keys": [b"b"]} if op == "seal" else {}))
    assert snapshot(driver.state) == before


@pytest.mark.parametrize("op", ["commit", "seal"])
def test_invariant_9_a_revoked_lease_changes_nothing(driver: Driver, engine: Engine, op: str) -> None:
    lease = engine.lease(1)["lease"]
    driver.ask(engine.scheduler, "abort", lease=lease)
    before = snapshot(driver.state)
    with pytest.raises(StaleLease, match="aborted, revoked or sealed"):
        session = engine.workers[0] if op == "commit" else engine.scheduler
        driver.ask(session, op, lease=lease, **({"keys": [b"b"]} if op == "seal" else {}))
    assert snapshot(driver.state) == before


@pytest.mark.parametrize("op", ["commit", "seal"])
def test_invariant_9_a_cleared_lease_changes_nothing(driver: Driver, engine: Engine, op: str) -> None:
    lease = engine.lease(1)["lease"]
    driver.ask(engine.scheduler, "clear")
    before = snapshot(driver.state)
    with pytest.raises(Cleared, match="abort it"):
        session = engine.workers[0] if op == "commit" else engine.scheduler
        driver.ask(session, op, lease=lease, **({"keys": [b"b"]} if op == "seal" else {}))
    assert snapshot(driver.state) == before
    driver.ask(engine.scheduler, "abort", lease=lease)


def test_a_rank_that_came_later_is_no_writer(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)["lease"]
    driver.kill(engine.workers[1])
    new = driver.ask(driver.hello(), "attach", **attach_arguments(rank=1))["session"]
    with pytest.raises(StaleLease, match="without this process as a writer"):
        driver.ask(new, "commit", lease=lease)
    with pytest.raises(StaleLease, match="without this process as a writer"):
        driver.ask(engine.scheduler, "commit", lease=lease)
