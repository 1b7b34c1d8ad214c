"""Pools that nobody can map make room for others: the one left longest ago first, as many as are needed, or none."""

from __future__ import annotations

import pytest

from sharedmirror.errors import ArenaFull
from sharedmirror.types import Plane
from sharedmirrord.core import machine
from sharedmirrord.core.model import Effects
from tests.conftest import Processes, Starter
from tests.daemon.core_driver import MIB, Driver, Engine
from tests.daemon.durable_driver import DurableDriver

PAGES = 32
"""Of 64 KiB: 2 MiB."""
PLANES = [Plane("k", 0, 1, 64 << 10, 4).to_wire()]


class Notes(DurableDriver):
    """A driver that keeps the lines for the log."""

    notes: list[str]

    def apply(self, event: machine.Event) -> Effects:
        effects = super().apply(event)
        self.notes = [*getattr(self, "notes", []), *effects.notes]
        return effects


@pytest.fixture
def driver() -> Notes:
    return Notes(8 * MIB)


def leave(driver: Driver, engine: Engine) -> None:
    for session in [*engine.workers, engine.scheduler]:
        driver.kill(session)
    driver.now += 1


def names(driver: Driver) -> list[str]:
    return sorted(pool.name for pool in driver.state.pools.values())


def used_one_after_another(driver: Driver, *pools: str) -> None:
    """Make pools of 2 MiB; they are left in this order, whatever the order in which they were made."""
    engines = {
        pool: driver.engine(pool, pool=pool, world_size=1, planes=PLANES, num_host_pages=PAGES)
        for pool in sorted(pools)
    }
    for pool in pools:
        engines[pool].cache(b"a", b"b")
        leave(driver, engines[pool])


def test_an_idle_pool_is_kept_while_there_is_room(driver: Notes) -> None:
    used_one_after_another(driver, "b", "a")
    driver.engine("c", pool="c", world_size=1, planes=PLANES, num_host_pages=2 * PAGES)
    assert names(driver) == ["a", "b", "c"]
    assert driver.engine("a", pool="a", world_size=1, planes=PLANES, num_host_pages=PAGES).lookup(b"a")["states"] == "h"


def test_the_one_left_longest_ago_goes_first(driver: Notes) -> None:
    used_one_after_another(driver, "b", "c", "a")
    driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=2 * PAGES)
    assert names(driver) == ["a", "c", "d"]
    assert driver.notes == [f"event=pool_reclaimed pool='b' tag='' bytes={2 * MIB} for='d'"]


def test_coming_back_counts_as_use(driver: Notes) -> None:
    used_one_after_another(driver, "b", "c", "a")
    leave(driver, driver.engine("b", pool="b", world_size=1, planes=PLANES, num_host_pages=PAGES))
    driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=2 * PAGES)
    assert names(driver) == ["a", "b", "d"]


def test_as_many_go_as_are_needed(driver: Notes) -> None:
    used_one_after_another(driver, "b", "c", "a")
    driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=3 * PAGES)
    assert names(driver) == ["a", "d"]


def test_none_goes_when_all_would_not_be_enough(driver: Notes) -> None:
    used_one_after_another(driver, "b", "c")
    driver.engine("busy", pool="busy", world_size=1, planes=PLANES, num_host_pages=PAGES)
    with pytest.raises(ArenaFull, match=f"has {6 * MIB} of {8 * MIB} bytes free or in pools that nobody uses"):
        driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=4 * PAGES)
    assert names(driver) == ["b", "busy", "c"]
    assert driver.notes == []


@pytest.mark.parametrize("how", ["detached", "died"])
def test_a_pool_that_somebody_may_still_map_is_not_idle(driver: Notes, how: str) -> None:
    engine = driver.engine(world_size=1, planes=PLANES, scheduler=False, num_host_pages=2 * PAGES)
    if how == "died":
        driver.died(engine.workers[0])
    else:
        driver.ask(engine.workers[0], "detach", unmapped=False)
    with pytest.raises(ArenaFull):
        driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=3 * PAGES)
    driver.gone(engine.workers[0])
    driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=3 * PAGES)
    assert names(driver) == ["d"]


def test_half_of_what_is_left_counts_idle_pools(driver: Notes) -> None:
    used_one_after_another(driver, "b", "c", "a")
    engine = driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=None)
    assert engine.replies[0]["num_host_pages"] == PAGES  # half of 8 MiB, less 2 MiB for rounding
    assert names(driver) == ["a", "b", "c", "d"]


def test_a_static_pool_that_nobody_uses_goes_too(driver: Notes) -> None:
    static = driver.engine(
        "s", pool="s", world_size=1, planes=PLANES, kind="static", scheduler=False, num_host_pages=PAGES
    )
    driver.kill(static.workers[0])
    driver.engine("d", pool="d", world_size=1, planes=PLANES, num_host_pages=4 * PAGES)
    assert names(driver) == ["d"]


def test_a_restart_begins_the_waiting_anew(driver: Notes) -> None:
    used_one_after_another(driver, "b", "c")
    driver.now += 100
    after = driver.restarted()
    assert {pool.used for pool in after.state.pools.values()} == {driver.now}


def test_the_log_says_what_went_for_whom(start: Starter, processes: Processes) -> None:
    daemon = start(memory="8MiB")
    (first,) = processes.engine(daemon.socket, pool="first", num_host_pages=1000)
    first.kill()
    daemon.wait_status(lambda status: status["sessions"] == [])
    processes.engine(daemon.socket, pool="second", num_host_pages=1500, engine="1")
    assert [pool["name"] for pool in daemon.status()["pools"]] == ["second"]
    assert f"event=pool_reclaimed pool='first' tag='' bytes={4 * MIB} for='second'" in daemon.log()
