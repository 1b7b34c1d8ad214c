"""``peek``: the index in shared memory says what the daemon says, through all that changes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.channel import Channel
from sharedmirror.control import Client, connect
from sharedmirror.errors import ClosedError, KeyInputError
from sharedmirror.types import KeyState, Role
from tests.daemon.comeback import POOL, Comeback, engine, keys_of, publish

if TYPE_CHECKING:
    from tests.client.conftest import Engine
    from tests.conftest import Daemon, Processes, Starter

Until = Callable[..., Any]

HIT, MISS = KeyState.HIT, KeyState.MISS


def indexed(client: Client, until: Until) -> None:
    """Wait until the client has the index: after a restart it is built first."""
    until(lambda: client._away.index is not None, "an index")


def test_peek_says_what_contains_says_over_anything_that_happens(
    start: Starter, processes: Processes, wait_until: Until
) -> None:
    rng = random.Random(7)
    life = Comeback(start)
    workers = engine(processes, life, world_size=1, pages=33)
    keys = [b"%d" % i for i in range(60)]
    seen: set[KeyState] = set()
    with connect(life.socket) as client, connect(life.socket) as other:
        for step in range(120):
            roll = rng.random()
            if roll < 0.6:
                lease = client.reserve(rng.sample(keys, 4)).lease
                if lease is not None:
                    workers[0].commit(lease)
            elif roll < 0.9:
                other.evict(rng.sample(keys, 4))
            elif roll < 0.95:
                other.clear()
            if step % 40 == 39:
                life.restart()
                life.wait_attached(3)
                for one in (client, other):
                    one.contains([])
                    indexed(one, wait_until)
            for one in (client, other):
                states = one.contains(keys)
                assert one.peek(keys) == states
                seen.update(states)
        assert seen == {HIT, MISS}


def test_a_key_is_there_when_its_seal_is_answered(one: Engine, wait_until: Until) -> None:
    indexed(one.client, wait_until)
    long, short = b"x" * 64, b"x" * 63
    one.write(long)
    assert one.client.peek([long, short, b"y", long]) == (HIT, MISS, MISS, HIT)
    assert one.client.peek([]) == ()
    reserved = one.client.reserve([b"pending"])
    assert one.client.peek([b"pending"]) == (MISS,)
    one.commit(reserved.lease)
    assert one.client.peek([b"pending"]) == (HIT,)


def test_bad_keys_and_a_closed_client_are_refused(shared_daemon: Daemon, one: Engine) -> None:
    for bad in (b"", b"x" * 65, "text"):
        with pytest.raises(KeyInputError):
            one.client.peek([bad])  # type: ignore[list-item]
    client = connect(shared_daemon.socket, one.name)
    client.close()
    with pytest.raises(ClosedError):
        client.peek([b"a"])


def test_without_an_index_the_daemon_is_asked(one: Engine) -> None:
    """As on a kernel that has no memfd, and for a moment after a restart."""
    one.write(b"a")
    one.client._away.close()
    one.client.reserve([b"pending"])
    assert one.client.peek([b"a", b"b", b"pending"]) == (HIT, MISS, MISS)


def test_the_index_lasts_while_the_daemon_is_dead(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life, world_size=1)
    with connect(life.socket, timeout_s=0.2) as client:
        publish(client, workers, keys_of(1, 2))
        life.daemon.kill()
        for _ in range(3):
            assert client.peek(keys_of(1, 2, 3)) == (HIT, HIT, MISS)
        life.again()
        life.wait_attached(2)
        assert client.contains(keys_of(1, 2, 3)) == client.peek(keys_of(1, 2, 3)) == (HIT, HIT, MISS)


def test_pools_have_indexes_of_their_own_and_a_dropped_pool_none(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    first = engine(processes, life, world_size=1)
    second = engine(processes, life, world_size=1, pages=9, pool="second", engine="b")
    with connect(life.socket) as one, connect(life.socket, "second", "b") as two:
        publish(one, first, keys_of(1))
        publish(two, second, keys_of(2))
        assert one.peek(keys_of(1, 2)) == (HIT, MISS)
        assert two.peek(keys_of(1, 2)) == (MISS, HIT)
    second[0].call("detach", unmapped=True)
    assert [pool["name"] for pool in life.daemon.status()["pools"]] == [POOL, "second"]
    with Channel.open(life.socket, role=Role.OBSERVER) as channel:
        channel.call("drop", pool="second", tag=None)
    maps = Path(f"/proc/{life.daemon.pid}/maps").read_text()
    assert maps.count("sharedmirror-index") == 1
