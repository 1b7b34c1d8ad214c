"""``apply``: answers and their repetition, waiting, stopping, ids that never repeat."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import DaemonUnavailable, NoPages, ProtocolError, UsageError
from sharedmirror.types import Role
from sharedmirrord.core import machine
from sharedmirrord.core.durable import Put
from sharedmirrord.core.machine import MUTATING, REPEATABLE
from sharedmirrord.core.model import SessionState, State
from sharedmirrord.core.regions import ArenaSpace
from tests.daemon.core_driver import Driver, Engine, attach_arguments, snapshot


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def engine(driver: Driver) -> Engine:
    return driver.engine()


def second_scheduler(driver: Driver) -> int:
    session = driver.hello(Role.SCHEDULER)
    driver.ask(session, "attach", pool="p", engine="e")
    return session


# -- the same request gives the same answer (invariant 8) ----------------------------------------


MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("lease", {"n": 2}),
    ("lease", {"n": 99}),
    ("reserve", {"keys": [b"x", b"y"]}),
    ("lookup", {"keys": [b"a"]}),
    ("evict", {"keys": [b"a"]}),
    ("clear", {}),
    ("release", {"hits": [1]}),
    ("commit", {"lease": 1}),
    ("seal", {"lease": 1, "keys": []}),
    ("abort", {"lease": 1}),
    ("detach", {"unmapped": False}),
]


@pytest.mark.parametrize(("op", "arguments"), MUTATIONS)
def test_invariant_8_a_repeated_request_gets_the_same_answer(
    driver: Driver, engine: Engine, op: str, arguments: dict[str, Any]
) -> None:
    engine.cache(b"a")
    request = driver.send(engine.scheduler, op, **arguments)
    answer, before = driver.replies[engine.scheduler, request], snapshot(driver.state)
    assert driver.repeat(engine.scheduler, request, op, **arguments) == answer
    assert snapshot(driver.state) == before
    older = driver.repeat(engine.scheduler, request - 1, op, **arguments)
    assert older["error"]["code"] == "stale_request"
    assert older["error"]["ids"] == {"request": request - 1}
    assert snapshot(driver.state) == before


def test_every_mutating_request_is_tried_again_here() -> None:
    assert {op for op, _ in MUTATIONS} | {"attach"} == MUTATING.keys()
    assert not MUTATING.keys() & REPEATABLE.keys()


def test_an_attach_can_be_repeated(driver: Driver) -> None:
    session = driver.hello()
    answer = driver.ask(session, "attach", **attach_arguments(world_size=1))
    assert driver.repeat(session, 1, "attach", **attach_arguments(world_size=1)) == answer


def test_answers_are_records(driver: Driver, engine: Engine) -> None:
    """A restarted daemon must be able to repeat them."""
    engine.lease(1)
    last = driver.state.sessions[engine.scheduler]
    assert last.last_reply == driver.replies[engine.scheduler, last.last_request]
    driver.check()  # compares them with the records


def test_requests_that_change_nothing_have_no_memory(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    request = driver.send(engine.scheduler, "contains", keys=[b"a"])
    engine.release(engine.lookup(b"a")["hit"])
    assert driver.repeat(engine.scheduler, request, "contains", keys=[b"b"])["states"] == "m"


# -- waiting -------------------------------------------------------------------------------------


def test_one_request_at_a_time(driver: Driver, engine: Engine) -> None:
    engine.lease(5)
    asked = driver.send(engine.scheduler, "lease", n=1, wait_s=5.0)
    with pytest.raises(ProtocolError, match="still waiting; one at a time"):
        driver.ask(engine.scheduler, "contains", keys=[b"a"])
    assert driver.waits(engine.scheduler, asked)


def test_the_next_deadline_is_the_first(driver: Driver, engine: Engine) -> None:
    assert machine.next_deadline(driver.state) is None
    engine.lease(5)
    other = second_scheduler(driver)
    driver.send(engine.scheduler, "lease", n=1, wait_s=9.0)
    driver.send(other, "lease", n=1, wait_s=4.0)
    assert machine.next_deadline(driver.state) == driver.now + 4.0
    driver.tick(4.0)
    assert machine.next_deadline(driver.state) == driver.now + 5.0


def test_any_late_event_ends_a_wait_that_is_over(driver: Driver, engine: Engine) -> None:
    engine.lease(5)
    asked = driver.send(engine.scheduler, "lease", n=1, wait_s=1.0)
    driver.now += 2
    driver.hello()
    with pytest.raises(NoPages):
        driver.result(engine.scheduler, asked)


def test_who_waited_first_is_served_first(driver: Driver, engine: Engine) -> None:
    held = engine.lease(5)["lease"]
    other = second_scheduler(driver)
    first = driver.send(engine.scheduler, "lease", n=3, wait_s=9.0)
    second = driver.send(other, "lease", n=3, wait_s=9.0)
    # A worker may abort for its engine while the scheduler waits.
    driver.ask(engine.workers[0], "abort", lease=held)
    for rank in range(2):
        engine.drained(rank, leases=[held])
    assert len(driver.result(engine.scheduler, first)["pages"]) == 3
    assert driver.waits(other, second)


def test_a_wait_ends_with_its_socket(driver: Driver, engine: Engine) -> None:
    held = engine.lease(5)["lease"]
    other = second_scheduler(driver)
    asked = driver.send(other, "lease", n=1, wait_s=9.0)
    driver.disconnect(other)
    driver.ask(engine.scheduler, "abort", lease=held)
    for rank in range(2):
        engine.drained(rank, leases=[held])
    assert driver.waits(other, asked)
    assert driver.state.leases == {}
    assert driver.state.waiters == []


@pytest.mark.parametrize("wait_s", [-1, 86401, float("nan"), "5", True])
def test_a_wait_has_bounds(driver: Driver, engine: Engine, wait_s: Any) -> None:
    with pytest.raises(ProtocolError, match="wait_s must be seconds"):
        driver.ask(engine.scheduler, "lease", n=1, wait_s=wait_s)


def test_what_is_no_use_waiting_for_is_answered_at_once(driver: Driver, engine: Engine) -> None:
    with pytest.raises(UsageError):
        driver.ask(engine.scheduler, "lease", n=99, wait_s=60.0)


# -- stopping ------------------------------------------------------------------------------------


def test_stop_answers_who_waits_and_grants_no_more(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(5)["lease"]
    other = second_scheduler(driver)
    asked = driver.send(other, "lease", n=1, wait_s=60.0)
    driver.apply(machine.Stop())
    with pytest.raises(DaemonUnavailable, match="stopping"):
        driver.result(other, asked)
    with pytest.raises(DaemonUnavailable, match="stopping"):
        driver.ask(other, "lease", n=1, wait_s=60.0)
    driver.ask(engine.scheduler, "seal", lease=lease, keys=[b"%d" % i for i in range(5)])
    assert len(engine.commit(lease)["sealed"]) == 5, "what is under way may end"


def test_stop_answers_ranks_that_wait_for_others(driver: Driver) -> None:
    session = driver.hello()
    asked = driver.attach(session, wait_s=60.0)
    driver.apply(machine.Stop())
    assert driver.replies[session, asked]["error"]["code"] == "ranks_missing"


# -- odd requests --------------------------------------------------------------------------------


def test_an_unknown_call(driver: Driver, engine: Engine) -> None:
    with pytest.raises(ProtocolError, match="there is no call 'fly'"):
        driver.ask(engine.scheduler, "fly")


def test_a_session_that_has_ended(driver: Driver, engine: Engine) -> None:
    driver.ask(engine.scheduler, "detach")
    with pytest.raises(UsageError, match="this session has ended"):
        driver.ask(engine.scheduler, "lease", n=1)


@pytest.mark.parametrize("op", [*MUTATING, *REPEATABLE])
def test_no_request_without_arguments_breaks_the_core(driver: Driver, engine: Engine, op: str) -> None:
    for session in (driver.hello(), engine.workers[0], engine.scheduler):
        request = driver.send(session, op)
        assert not driver.waits(session, request)


@pytest.mark.parametrize("value", [None, True, -1, 1 << 80, 0.5, "x", b"x", [], [[]], [{}], {}, [None, b"", "x"]])
@pytest.mark.parametrize("op", [*MUTATING, *REPEATABLE])
def test_nonsense_never_breaks_the_core(driver: Driver, engine: Engine, op: str, value: Any) -> None:
    """Every argument that any call reads, one at a time among good ones."""
    engine.cache(b"a")
    lease = engine.lease(2)["lease"]
    good = {**attach_arguments(rank=1), "lease": lease, "n": 1, "keys": [b"x"], "pages": [1], "hits": [], "leases": []}
    names = ["lease", "n", "keys", "pages", "parent", "hits", "leases", "mode", "unmapped"]
    names = [*attach_arguments(), "wait_s"] if op == "attach" else names
    for name in names:
        session = driver.hello() if op == "attach" else engine.workers[0]
        if session in driver.state.sessions:
            driver.send(session, op, **(good | {name: value}))


def test_events_of_sessions_that_are_gone_are_nothing(driver: Driver, engine: Engine) -> None:
    driver.kill(engine.workers[0])
    before = snapshot(driver.state)
    for event in (machine.Disconnected, machine.Died, machine.Gone):
        driver.apply(event(engine.workers[0]))
    assert snapshot(driver.state) == before


def test_death_is_told_again_with_new_holders(driver: Driver, engine: Engine) -> None:
    driver.died(engine.workers[0], ("lock",), (1, 2))
    driver.died(engine.workers[0], ("lock",), (2,))
    session = driver.state.sessions[engine.workers[0]]
    assert (session.state, session.holders) == (SessionState.DEAD, (2,))


# -- ids -----------------------------------------------------------------------------------------


def test_no_id_is_given_out_above_the_durable_counter(driver: Driver) -> None:
    writes = 0
    for _ in range(9000):
        session = driver.state.new_id()
        effects = machine.apply(driver.state, machine.Tick(), driver.now)
        writes += sum(isinstance(write, Put) and write.kind == "counter" for write in effects.writes)
        driver.records.replay(effects.writes)
        assert session < driver.state.id_high
    driver.check()
    assert 2 <= writes <= 4, "rarely, and in time"


def test_ids_never_repeat_after_a_restart(driver: Driver) -> None:
    used = {driver.hello() for _ in range(5)}
    again = State(ArenaSpace(0), next_id=driver.state.id_high, id_high=driver.state.id_high)
    assert again.new_id() > max(used)
    effects = machine.apply(again, machine.Tick(), 0.0)
    assert [write.id for write in effects.writes if isinstance(write, Put) and write.kind == "counter"] == [0]
    assert again.id_high > again.next_id
