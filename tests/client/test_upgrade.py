"""Weights change: a model's successor gets the room, also while both serve; and clearing a pool under load."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from sharedmirror import KeyState
from sharedmirror.errors import Cleared, StaleLease
from tests.client.rank_process import DEVICE_PAGES, PAGE_BYTES, Engine, engines, found
from tests.conftest import Daemon, Starter, until
from tests.daemon.comeback import Comeback

MIB = 1 << 20
STEP = 2 * MIB // PAGE_BYTES
"""Pages of a level, in which each of two ranks has 2 MiB."""
MOST = 7 * STEP
Make = Callable[..., Engine]


@pytest.fixture
def make(start: Starter) -> Iterator[Make]:
    with engines() as make:
        yield make


def keys(first: int, end: int) -> list[bytes]:
    return [b"key%d" % number for number in range(first, end)]


def fill(engine: Engine, count: int) -> None:
    for begin in range(0, count, STEP):
        engine.cache(keys(begin, min(begin + STEP, count)))


# -- a rolling upgrade


def test_a_rolling_upgrade(start: Starter, make: Make) -> None:
    daemon = start(memory="32MiB")
    a = make(daemon, "a", (2, MOST)).wait()
    fill(a, MOST - 1)
    assert daemon.pool("a")["backed_pages"] == MOST
    assert a.check(keys(0, MOST - 1)) == MOST - 1

    # B comes while A serves: A gives back, and both serve.
    kept = a.client.lookup(keys(0, STEP), "each")
    a.each("load_on_and_on", kept, found(kept, keys(0, STEP)))
    b = make(daemon, "b", (2 * STEP, MOST)).wait()
    fill(b, 3 * STEP)
    until(lambda: all(rank.ask("loads") > DEVICE_PAGES for rank in a.ranks))
    assert [wrong for _, wrong in a.each("stop")] == [0, 0]
    assert a.check(keys(0, STEP)) == STEP
    kept.release()
    # Half of the arena each, in whole levels.

    def even() -> bool:
        b.cache(keys(0, 4 * STEP - 1))
        return bool(daemon.pool("b")["backed_pages"] == 4 * STEP)

    until(even)
    b.cache(keys(0, 4 * STEP - 1))
    assert daemon.pool("a")["backed_pages"] == 4 * STEP
    a.cache([b"still served"])
    assert a.check([*keys(0, MOST), b"still served"]) > 3 * STEP
    assert b.check(keys(0, 4 * STEP - 1)) == 4 * STEP - 1
    assert "event=pool_shrunk pool='a'" in daemon.log() and "pool_reclaimed" not in daemon.log()

    # A goes; B has the room.
    evictions = daemon.pool("b")["evictions"]
    a.close()
    daemon.wait_status(lambda status: len(status["sessions"]) == 3)
    fill(b, MOST - 1)
    assert b.check(keys(0, MOST - 1)) == MOST - 1
    (pool,) = daemon.status()["pools"]
    assert (pool["name"], pool["backed_pages"], pool["evictions"]) == ("b", MOST, evictions)
    assert f"event=pool_reclaimed pool='a' tag='' bytes={4 * STEP * 2 * PAGE_BYTES} for='b'" in daemon.log()
    b.close()


def test_a_fixed_pool_gets_its_room_from_one_that_is_elastic(start: Starter, make: Make) -> None:
    daemon = start(memory="32MiB")
    a = make(daemon, "a", (2, MOST)).wait()
    fill(a, MOST - 1)
    b = make(daemon, "b", 5 * STEP).wait()
    fill(b, 5 * STEP - 1)
    assert b.check(keys(0, 5 * STEP - 1)) == 5 * STEP - 1
    assert 0 < a.check(keys(0, MOST - 1)) < 3 * STEP
    assert daemon.pool("a")["backed_pages"] == 3 * STEP
    assert [rank.ask("backed") for rank in a.ranks] == [3 * STEP] * 2


# -- what dies while memory is given back


def test_a_worker_that_dies_owing_its_answer_holds_nothing_up(start: Starter, make: Make) -> None:
    daemon = start(memory="32MiB")
    a = make(daemon, "a", (2, MOST)).wait()
    fill(a, MOST - 1)
    a.ranks[1].signal(signal.SIGSTOP)
    b = make(daemon, "b", 4 * STEP)
    daemon.wait_status(lambda status: status["pools"][0]["giving_back_awaits"] == [a.ranks[1].pid])
    assert daemon.pool("b")["state"] == "forming"
    # What rank 0 has unmapped is not another's yet.
    assert daemon.pool("a")["backed_pages"] == MOST
    a.ranks[1].signal(signal.SIGKILL)
    b.wait()
    fill(b, 4 * STEP - 1)
    assert b.check(keys(0, 4 * STEP - 1)) == 4 * STEP - 1


@pytest.mark.parametrize("stopped", [True, False])
def test_a_daemon_that_dies_while_memory_is_given_back(start: Starter, make: Make, stopped: bool) -> None:
    life = Comeback(start, failpoints="" if stopped else "reply.before=kill:90")
    a = make(life.daemon, "a", (2, MOST)).wait()
    fill(a, MOST - 1)
    if stopped:
        a.ranks[1].signal(signal.SIGSTOP)
    b = make(life.daemon, "b", 4 * STEP)
    if stopped:
        life.daemon.wait_status(lambda status: status["pools"][0]["giving_back_awaits"] == [a.ranks[1].pid])
        life.restart()
        pool = life.daemon.pool("a")
        assert pool["backed_pages"] == MOST and pool["giving_back_pages"] >= STEP
        a.ranks[1].signal(signal.SIGCONT)
    b.wait()
    fill(b, 4 * STEP - 1)
    assert b.check(keys(0, 4 * STEP - 1)) == 4 * STEP - 1
    assert a.check(keys(0, MOST - 1)) > 2 * STEP
    assert life.daemon.pool("a")["backed_pages"] == 4 * STEP
    a.close()
    b.close()


# -- the same pool with other weights


def test_clear_under_load(daemon: Daemon, make: Make) -> None:
    a = make(daemon, "a", 4 * STEP).wait()
    client = a.client
    a.cache(keys(0, 3 * STEP))
    hit = client.lookup(keys(0, STEP))
    a.each("load_on_and_on", hit, list(zip(keys(0, STEP), hit.pages, strict=True)))
    before, unsealed = client.reserve([b"r1", b"r2"]).lease, client.lease(2)
    assert before is not None
    stored = list(zip([b"r1", b"r2"], before.pages, strict=True))
    a.each("store", before, stored, False)
    a.each("store", unsealed, list(zip([b"u1", b"u2"], unsealed.pages, strict=True)), False)
    a.ranks[0].ask("commit", unsealed)

    client.clear()
    assert set(client.contains([*keys(0, 3 * STEP), b"r1", b"r2"])) == {KeyState.MISS}
    assert len(client.lookup(keys(0, STEP))) == 0
    with pytest.raises(Cleared, match="pool was cleared after lease"):
        client.seal(unsealed, [b"u1", b"u2"])
    with pytest.raises(StaleLease):
        a.ranks[1].ask("commit", before)
    client.abort(unsealed)
    # All other pages are written anew, under the same keys, while the loads go on.
    a.model = "other weights"
    daemon.wait_pages("a", leased=0)
    fresh = client.reserve(keys(0, 3 * STEP - 1), wait_s=20)
    assert fresh.lease is not None and not set(fresh.lease.pages) & set(hit.pages)
    assert len(fresh.granted) == 3 * STEP - 1
    a.each("store", fresh.lease, list(fresh.granted.items()))
    loads = [rank.ask("loads") for rank in a.ranks]
    until(lambda: all(rank.ask("loads") > count + DEVICE_PAGES for rank, count in zip(a.ranks, loads, strict=True)))
    assert [wrong for _, wrong in a.each("stop")] == [0, 0]
    assert daemon.pool("a")["pages"]["pinned"] == STEP
    hit.release()
    daemon.wait_pages("a", pinned=0, sealed=3 * STEP - 1, free=STEP)
    assert a.check(keys(0, 3 * STEP)) == 3 * STEP - 1


def test_another_tag_is_another_pool(daemon: Daemon, make: Make) -> None:
    old = make(daemon, "old", 2 * STEP, name="llama", tag="v1").wait()
    old.cache(keys(0, STEP))
    new = make(daemon, "new", 2 * STEP, name="llama", tag="v2").wait()
    assert set(new.client.contains(keys(0, STEP))) == {KeyState.MISS}
    new.cache(keys(0, STEP // 2))
    assert (old.check(keys(0, STEP)), new.check(keys(0, STEP))) == (STEP, STEP // 2)
    old.client.clear()
    assert (old.check(keys(0, STEP)), new.check(keys(0, STEP))) == (0, STEP // 2)
    tags = {(pool["name"], pool["tag"]): pool["pages"]["sealed"] for pool in daemon.status()["pools"]}
    assert tags == {("llama", "v1"): 0, ("llama", "v2"): STEP // 2}
