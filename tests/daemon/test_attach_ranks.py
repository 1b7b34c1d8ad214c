"""A rank attached twice, and launches: who is refused, who waits, and for what proof."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import EngineBusy, ProtocolError, RankAttached, RankError, RanksMissing, UsageError
from sharedmirror.types import Role
from sharedmirrord.core.model import SessionState
from tests.daemon.core_driver import Driver, attach_arguments


@pytest.fixture
def driver() -> Driver:
    return Driver()


def join(driver: Driver, **changes: Any) -> dict[str, Any]:
    """Attach one more worker, which must be answered at once."""
    return driver.ask(driver.hello(), "attach", **attach_arguments(**changes))


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, 65536)])
def test_a_rank_must_fit_its_world(driver: Driver, rank: int, world_size: int) -> None:
    with pytest.raises(RankError):
        join(driver, rank=rank, world_size=world_size, planes=[["k", 0, 1, 64, 4]])


@pytest.mark.parametrize("kind", ["leased", "static"])
def test_a_living_rank_is_not_replaced(driver: Driver, kind: str) -> None:
    engine = driver.engine(kind=kind, scheduler=False)
    pid = driver.state.sessions[engine.workers[1]].peer.pid
    with pytest.raises(RankAttached, match=f"rank 1 .* attached by the living process {pid}") as caught:
        join(driver, rank=1, kind=kind)
    assert caught.value.ids == {"rank": 1, "pid": pid}


def test_a_rank_that_waits_is_attached_twice_as_well(driver: Driver) -> None:
    driver.attach(driver.hello(), rank=0, wait_s=5.0)
    with pytest.raises(RankAttached):
        join(driver, rank=0)


@pytest.mark.parametrize("kind", ["leased", "static"])
def test_a_lost_rank_is_waited_for(driver: Driver, kind: str) -> None:
    engine = driver.engine(kind=kind, scheduler=False)
    old, new = engine.workers[1], driver.hello()
    driver.disconnect(old)
    with pytest.raises(EngineBusy, match="still held by process") as caught:
        join(driver, rank=1, kind=kind)
    assert caught.value.ids["pids"] == [driver.state.sessions[old].peer.pid]
    asked = driver.attach(new, rank=1, kind=kind, wait_s=5.0)
    assert driver.waits(new, asked)
    driver.gone(old)
    assert driver.result(new, asked)["session"] == new


def test_a_leased_pool_admits_the_successor_of_an_ended_process(driver: Driver) -> None:
    engine = driver.engine()
    driver.disconnect(engine.workers[1])
    driver.died(engine.workers[1])
    assert join(driver, rank=1)["session"] != engine.workers[1]
    assert driver.state.sessions[engine.workers[1]].state is SessionState.DEAD


def test_a_static_pool_waits_for_the_proof(driver: Driver) -> None:
    engine = driver.engine(kind="static", scheduler=False)
    old, new = engine.workers[1], driver.hello()
    driver.disconnect(old)
    driver.died(old, missing=("lock",), holders=(4242,))
    with pytest.raises(EngineBusy, match=r"lock, may be held by \[4242\]") as caught:
        join(driver, rank=1, kind="static")
    assert 4242 in caught.value.ids["pids"]
    asked = driver.attach(new, rank=1, kind="static", wait_s=5.0)
    driver.gone(old)
    assert driver.result(new, asked)["session"] == new


def test_a_forerunner_that_was_killed_a_moment_ago_may_still_look_alive(driver: Driver) -> None:
    engine = driver.engine()
    old, new = engine.workers[1], driver.hello()
    asked = driver.attach(new, rank=1, wait_s=30.0)
    assert driver.waits(new, asked)
    driver.kill(old)
    assert driver.result(new, asked)["session"] == new


def test_the_grace_for_a_living_forerunner_is_short(driver: Driver) -> None:
    driver.engine()
    new = driver.hello()
    asked = driver.attach(new, rank=1, wait_s=30.0)
    driver.tick(1.0)
    with pytest.raises(RankAttached):
        driver.result(new, asked)


def test_the_wait_for_a_proof_is_as_long_as_was_asked(driver: Driver) -> None:
    """Its forerunner looks alive at first, then its socket closes: from then on its proof is waited for."""
    engine = driver.engine()
    old, new = engine.workers[1], driver.hello()
    asked = driver.attach(new, rank=1, wait_s=30.0)
    driver.now += 0.2
    driver.disconnect(old)
    driver.tick(5.0)
    assert driver.waits(new, asked), driver.replies.get((new, asked))
    driver.gone(old)
    assert driver.result(new, asked)["session"] == new


def test_a_detached_rank_can_be_taken_at_once(driver: Driver) -> None:
    engine = driver.engine()
    driver.ask(engine.workers[1], "detach", unmapped=False)
    assert join(driver, rank=1)["session"] != engine.workers[1]


def test_the_same_connection_does_not_attach_twice(driver: Driver) -> None:
    engine = driver.engine()
    with pytest.raises(UsageError, match="attached already"):
        driver.ask(engine.workers[0], "attach", **attach_arguments(rank=0))


def test_after_a_refusal_the_connection_may_try_again(driver: Driver) -> None:
    session = driver.hello()
    with pytest.raises(RanksMissing):
        driver.ask(session, "attach", **attach_arguments(rank=0))
    assert driver.ask(session, "attach", **attach_arguments(rank=0, world_size=1))["session"] == session


# -- launches ------------------------------------------------------------------------------------


def test_a_new_launch_waits_for_all_of_the_old_one(driver: Driver) -> None:
    old = driver.engine(launch="1")
    ranks = [driver.hello(), driver.hello()]
    with pytest.raises(EngineBusy, match="alive"):
        join(driver, rank=0, launch="2")
    asked = [driver.attach(session, rank=rank, launch="2", wait_s=9.0) for rank, session in enumerate(ranks)]
    for session in [*old.workers, old.scheduler]:
        assert driver.waits(ranks[0], asked[0])
        driver.disconnect(session)
        driver.died(session)
    assert [driver.result(*pair)["session"] for pair in zip(ranks, asked, strict=True)] == ranks
    assert len({driver.state.sessions[s].incarnation for s in [*ranks, *old.workers]}) == 2


def test_a_static_launch_waits_for_the_proof_of_all(driver: Driver) -> None:
    old = driver.engine(kind="static", launch="1", scheduler=False)
    new = driver.hello()
    asked = driver.attach(new, rank=0, kind="static", launch="2", wait_s=9.0)
    for session in old.workers:
        driver.disconnect(session)
        driver.died(session)
    assert driver.waits(new, asked)
    for session in old.workers:
        assert driver.waits(new, asked)
        driver.gone(session)
    assert driver.result(new, asked)["session"] == new


def test_the_scheduler_of_a_new_launch_waits_too(driver: Driver) -> None:
    old = driver.engine(launch="1")
    head = driver.hello(Role.SCHEDULER)
    asked = driver.send(head, "attach", pool="p", engine="e", launch="2", wait_s=9.0)
    assert driver.waits(head, asked)
    for session in [*old.workers, old.scheduler]:
        driver.kill(session)
    assert driver.result(head, asked)["session"] == head


def test_workers_follow_a_scheduler_that_named_no_launch(driver: Driver) -> None:
    old = driver.engine(launch="1")
    for session in [*old.workers, old.scheduler]:
        driver.kill(session)
    head = driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="p", engine="e")
    new = driver.engine(launch="2", scheduler=False)
    assert driver.state.sessions[new.workers[0]].incarnation == driver.state.sessions[head].incarnation


def test_without_launch_ids_the_living_engine_is_joined(driver: Driver) -> None:
    engine = driver.engine()
    driver.kill(engine.workers[0])
    new = join(driver, rank=0)["session"]
    assert driver.state.sessions[new].incarnation == driver.state.sessions[engine.workers[1]].incarnation


@pytest.mark.parametrize("launch", [0, False, [], b""])
def test_a_launch_id_is_text(driver: Driver, launch: Any) -> None:
    with pytest.raises(ProtocolError, match="launch"):
        join(driver, world_size=1, launch=launch)
