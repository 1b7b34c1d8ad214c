"""Giving a pool up: only when nothing can map it, and then all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sharedmirror.errors import PoolInUse, PoolMismatch, PoolNotFound
from sharedmirrord.core import machine
from tests.conftest import Daemon, Processes
from tests.daemon.core_driver import Driver, Engine


def drop(driver: Driver, name: str = "p", tag: str | None = None) -> None:
    driver.apply(machine.Drop(name, tag))


@pytest.fixture
def driver() -> Driver:
    return Driver()


def gone(driver: Driver, engine: Engine) -> None:
    for session in [*engine.workers, engine.scheduler]:
        driver.kill(session)


def test_a_pool_that_nobody_uses_gives_its_room_back(driver: Driver) -> None:
    before = driver.state.space.free_bytes
    engine = driver.engine()
    engine.cache(b"a", b"b")
    engine.lookup(b"a")
    engine.lease(1)
    gone(driver, engine)
    drop(driver)
    assert (driver.state.pools, driver.state.space.free_bytes) == ({}, before)
    assert driver.engine().lookup(b"a")["states"] == "m"


def test_a_pool_in_use_is_kept_and_its_users_are_named(driver: Driver) -> None:
    engine = driver.engine()
    engine.cache(b"a")
    for session in engine.workers:
        driver.kill(session)
    with pytest.raises(PoolInUse, match="in use by processes"):
        drop(driver)
    assert engine.lookup(b"a", mode="each")["states"] == "h"


@pytest.mark.parametrize("how", ["died", "detached"])
def test_a_process_that_may_still_map_the_pool_keeps_it(driver: Driver, how: str) -> None:
    engine = driver.engine(world_size=1, scheduler=False)
    if how == "died":
        driver.died(engine.workers[0], ("lock",), (77,))
    else:
        driver.ask(engine.workers[0], "detach", unmapped=False)
    with pytest.raises(PoolInUse):
        drop(driver)
    driver.gone(engine.workers[0])
    drop(driver)


def test_which_pool(driver: Driver) -> None:
    with pytest.raises(PoolNotFound, match="no pool 'p'"):
        drop(driver)
    for tag in ("one", "two"):
        gone(driver, driver.engine(tag, tag=tag))
    with pytest.raises(PoolMismatch, match="say which tag: \\['one', 'two'\\]"):
        drop(driver)
    drop(driver, tag="two")
    assert [pool.tag for pool in driver.state.pools.values()] == ["one"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = str(Path(sys.executable).with_name("sharedmirror"))
    return subprocess.run([tool, "drop", *arguments], capture_output=True, text=True, timeout=20)


def test_the_command(daemon: Daemon, processes: Processes) -> None:
    (worker,) = processes.engine(daemon.socket)
    refused = command("default", "--socket", daemon.socket)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert str(worker.pid) in refused.stderr
    worker.kill()
    daemon.wait_status(lambda status: status["sessions"] == [])
    dropped = command("default", "--socket", daemon.socket)
    assert dropped.returncode == 0 and "is dropped" in dropped.stdout
    assert daemon.status()["pools"] == []
    assert command("default", "--socket", daemon.socket + ".none").returncode == 3
