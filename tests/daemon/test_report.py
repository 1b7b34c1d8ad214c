"""What ``status`` says of the core."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sharedmirror import cli
from sharedmirrord.core.report import OLD_LEASE_S, report
from tests.daemon.core_driver import Driver, Engine, attach_arguments


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def engine(driver: Driver) -> Engine:
    return driver.engine()


def status(driver: Driver) -> dict[str, Any]:
    """Return the report; it must be plain enough for JSON."""
    found: dict[str, Any] = json.loads(json.dumps(report(driver.state, driver.now)))
    return found


def test_an_idle_daemon() -> None:
    assert status(Driver(ready=False)) == {"pools": [], "sessions": [], "ended": [], "quarantine": [], "alarms": []}


def test_a_pool(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    engine.lookup(b"a", b"x")
    engine.lease(1)
    (pool,) = status(driver)["pools"]
    assert pool.pop("id") == driver.pool().id
    assert pool == {
        "name": "p", "tag": "", "kind": "leased", "layout": "page", "page_size": 4, "frames_per_page": 1,
        "world_size": 2, "num_host_pages": 6, "bytes_per_host_page": 2048, "state": "ready",
        "min_host_pages": 6, "backed_pages": 6, "giving_back_pages": 0, "giving_back_awaits": [],
        "bytes_saved_per_host_page": 0,
        "ranks_attached": {"e": [0, 1]}, "hits": 1, "misses": 1, "evictions": 0, "number": 1,
        "engines": {"e": {"owned": 3, "held": 2, "max_held": 5, "share": 5}},
        "pages": {"reserved": 1, "free": 2, "leased": 1, "sealed": 2, "pinned": 1, "quarantined": 0},
    }  # fmt: skip


def test_every_field_is_documented(driver: Driver, engine: Engine) -> None:
    gone = driver.engine("f")
    engine.lease(1)
    gone.lease(1)
    driver.ask(gone.workers[1], "detach", unmapped=True)
    driver.disconnect(gone.workers[0])
    driver.died(gone.workers[0])
    driver.tick(OLD_LEASE_S + 1)
    said = status(driver)
    assert all(said.values()), "one of each"
    for pool in said["pools"]:
        del pool["ranks_attached"]
        pool["engines"] = list(pool["engines"].values())
    documented = set(re.findall(r"``(\w+)``", cli.__doc__ or ""))
    assert fields(said) - documented == set()


def fields(said: object) -> set[str]:
    """Return the names in a map and in all that it holds."""
    inner = said.values() if isinstance(said, dict) else said if isinstance(said, list) else ()
    return set(said if isinstance(said, dict) else ()).union(*map(fields, inner))


def test_a_forming_pool(driver: Driver) -> None:
    driver.attach(driver.hello(), wait_s=5.0)
    (pool,) = status(driver)["pools"]
    assert pool["state"] == "forming"
    assert set(pool["pages"].values()) == {0}
    assert status(driver)["sessions"] == []


def test_a_static_pool(driver: Driver) -> None:
    engine = driver.engine(kind="static", scheduler=False)
    counts = []
    for step in ("held", "lost", "doubt", "free"):
        for worker in engine.workers:
            if step == "lost":
                driver.disconnect(worker)
            if step == "doubt":
                driver.died(worker)
            if step == "free":
                driver.gone(worker)
        counts.append({name: n for name, n in status(driver)["pools"][0]["pages"].items() if n and name != "reserved"})
    assert counts == [{"leased": 5}, {"leased": 5}, {"quarantined": 5}, {"free": 5}]


def test_sessions(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    engine.lookup(b"a", b"b")
    lease = engine.lease(2)["lease"]
    engine.commit(lease, ranks=[0])
    driver.now += 3
    by_id = {session["id"]: session for session in status(driver)["sessions"]}
    assert by_id.keys() == {*engine.workers, engine.scheduler}
    head = by_id[engine.scheduler]
    assert (head["role"], head["rank"], head["engine"], head["pool"], head["pins"]) == ("scheduler", None, "e", "p", 2)
    assert head["leases"] == [{"id": lease, "pages": 2, "age_s": 3.0, "missing_ranks": [1], "revoked": False}]
    assert by_id[engine.workers[1]]["rank"] == 1
    assert by_id[engine.workers[1]]["state"] == "attached"
    assert by_id[engine.workers[1]]["pid"] == driver.state.sessions[engine.workers[1]].peer.pid


def test_the_states_of_a_session(driver: Driver, engine: Engine) -> None:
    worker = engine.workers[0]

    def state() -> Any:
        return {session["id"]: session for session in status(driver)["sessions"]}[worker]

    driver.disconnect(worker)
    assert state()["state"] == "lost"
    driver.died(worker, ("lock",), (4711,))
    assert (state()["state"], state()["missing"], state()["holders"]) == ("dead", ["lock"], [4711])
    driver.ask(engine.workers[1], "detach", unmapped=False)
    worker = engine.workers[1]
    assert state()["state"] == "detached"


def test_quarantine_says_what_is_missing_and_who_may_hold_it(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(3)["lease"]
    engine.commit(lease, [1], ranks=[1])
    driver.disconnect(engine.workers[1])
    driver.died(engine.workers[1], ("lock",), (4711,))
    assert status(driver)["quarantine"] == [
        {
            "pool": "p", "lease": lease, "pages": 2, "session": engine.workers[1],
            "pid": driver.state.sessions[engine.workers[1]].peer.pid, "missing": ["lock"], "holders": [4711],
        }
    ]  # fmt: skip
    assert status(driver)["pools"][0]["pages"]["quarantined"] == 2
    driver.gone(engine.workers[1])
    assert status(driver)["quarantine"] == []


def test_an_old_lease_is_an_alarm_and_nothing_more(driver: Driver, engine: Engine) -> None:
    lease = engine.lease(1)["lease"]
    engine.commit(lease, ranks=[1])
    driver.tick(OLD_LEASE_S - 1)
    assert status(driver)["alarms"] == []
    driver.tick(1)
    (alarm,) = status(driver)["alarms"]
    assert alarm["code"] == "old_lease"
    assert f"lease {lease} of pool 'p' is 600 s old; ranks [0] have not committed" in alarm["message"]
    assert lease in driver.state.leases


def test_the_last_hundred_ended_sessions_newest_first(driver: Driver) -> None:
    driver.engine()
    for number in range(110):
        session = driver.hello(pid=number)
        driver.ask(session, "attach", **attach_arguments(pool="q", world_size=1))
        driver.now += 1
        driver.kill(session)
    ended = status(driver)["ended"]
    assert [entry["pid"] for entry in ended] == list(range(109, 9, -1))
    assert [entry["ago_s"] for entry in ended] == list(range(100))
    assert {entry["how"] for entry in ended} == {"died"}
    assert ended[0].items() >= {"engine": "e", "role": "worker", "rank": 0, "pool": "q"}.items()


def test_ranks_of_two_launches_are_listed_once(driver: Driver, engine: Engine) -> None:
    for worker in engine.workers:
        driver.died(worker)
    driver.gone(engine.scheduler)
    driver.engine(scheduler=False)
    assert status(driver)["pools"][0]["ranks_attached"] == {"e": [0, 1]}
