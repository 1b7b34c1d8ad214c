"""An engine with real mirrors over kills of its daemon: no error that it did not ask for, no wrong byte."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror.channel import Channel
from sharedmirror.control import Client, connect
from sharedmirror.errors import CallTimeout, ClosedError, DaemonUnavailable, InstanceChanged
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import Role
from tests.daemon.comeback import POOL, Comeback

if TYPE_CHECKING:
    from tests.conftest import Starter

PAGE_SIZE, DEVICE_PAGES, RANKS, KILLS = 4, 8, 2, 10
HOST_PAGES = 8193
"""Room for all that is stored: a key that is not found was lost."""


def content(key: bytes, rank: int, plane: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((key, rank, plane)) % (1 << 62))
    return torch.randint(0, 256, like.shape, dtype=torch.uint8, generator=generator)


class Rank:
    """One worker: its tensors and its mirror."""

    def __init__(self, socket: str, rank: int, layout: str) -> None:
        self.rank = rank
        planes = [torch.zeros(DEVICE_PAGES * PAGE_SIZE, 24, dtype=torch.uint8) for _ in range(4)]
        pool = SimpleNamespace(page_size=PAGE_SIZE, k_buffer=planes[:2], v_buffer=planes[2:])
        self.mirror = SharedHostMirror(
            pool, HOST_PAGES, socket=socket, rank=rank, world_size=RANKS, pages="leased", layout=layout
        )
        self.pages = [plane.view(DEVICE_PAGES, PAGE_SIZE, 24) for plane in planes]

    def store(self, lease: Any, keys: list[bytes]) -> None:
        for at, key in enumerate(keys):
            for plane, pages in enumerate(self.pages):
                pages[at] = content(key, self.rank, plane, pages[at])
        self.mirror.store(lease, list(enumerate(lease.pages))).wait(20)
        self.mirror.commit(lease)

    def load(self, hit: Any, keys: list[bytes]) -> int:
        """Load a hit and compare every byte; returns the number of pages."""
        for pages in self.pages:
            pages.zero_()
        pairs = [(at, page) for at, page in enumerate(hit.pages) if page >= 0]
        self.mirror.load(hit, pairs).wait(20)
        for at, _ in pairs:
            for plane, pages in enumerate(self.pages):
                assert torch.equal(pages[at], content(keys[at], self.rank, plane, pages[at])), (keys[at], plane)
        return len(pairs)


@pytest.fixture
def life(start: Starter) -> Comeback:
    return Comeback(start)


@pytest.fixture
def ranks(life: Comeback, request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    layout = getattr(request, "param", "page")
    found: list[Rank] = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(Rank(life.socket, rank, layout)))
        for rank in range(RANKS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == RANKS
    yield sorted(found, key=lambda rank: rank.rank)
    with ExitStack() as stack:
        for rank in found:
            stack.callback(rank.mirror.close)
    gc.collect()


def store_and_load(client: Client, ranks: list[Rank], number: int) -> int:
    """Publish eight keys in one of two ways, read old ones; returns how many pages were verified."""
    keys = [b"%d.%d" % (number, at) for at in range(8)]
    lease = client.reserve(keys).lease if number % 2 else client.lease(8)
    assert lease is not None
    for rank in ranks:
        rank.store(lease, keys)
    if not number % 2:
        assert client.seal(lease, keys).sealed == lease.pages
    verified = 0
    for old in (number, number // 2):
        keys = [b"%d.%d" % (old, at) for at in range(8)]
        with client.lookup(keys, "each") as hit:
            assert len(hit) == 8, "sealed pages were lost"
            verified += sum(rank.load(hit, keys) for rank in ranks)
    return verified


@pytest.mark.parametrize("ranks", ["page", "slab"], indirect=True)
def test_an_engine_sees_nothing_of_ten_kills(life: Comeback, ranks: list[Rank]) -> None:
    stop = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        while kills < KILLS:
            time.sleep(0.05 + 0.03 * kills)
            life.daemon.kill()
            kills += 1
            # Every other one dies on its way to be ready.
            life.again(state=None if kills % 2 else "ready")
        stop.set()

    killer = threading.Thread(target=kill)
    with connect(life.socket, timeout_s=20) as client:
        held = None
        killer.start()
        number = verified = 0
        while not stop.is_set() or number < 5:
            verified += store_and_load(client, ranks, number)
            if held is None:
                keys = [b"0.%d" % at for at in range(8)]
                held = client.lookup(keys)
            number += 1
        killer.join()
        # What was pinned in the first life of the daemon is still what it was.
        assert held is not None
        assert sum(rank.load(held, keys) for rank in ranks) == 8 * RANKS
        held.release()
        assert kills == KILLS and verified >= 5 * 8 * RANKS
        assert life.daemon.status()["daemon"]["epoch"] > KILLS // 2
        life.daemon.wait_pages(POOL, leased=0, quarantined=0, pinned=0)


def test_copies_under_way_are_untouched_by_a_death(life: Comeback, ranks: list[Rank]) -> None:
    with connect(life.socket, timeout_s=20) as client:
        lease = client.lease(4)
        life.daemon.kill()
        keys = [b"%d" % at for at in range(4)]
        for rank in ranks:
            for at, key in enumerate(keys):
                for plane, pages in enumerate(rank.pages):
                    pages[at] = content(key, rank.rank, plane, pages[at])
            transfer = rank.mirror.store(lease, list(enumerate(lease.pages)))
            transfer.wait(20)
            assert rank.mirror.commit(lease, wait=False) is None
        # The commits wait for the daemon, not for their caller.
        life.again()
        while any(rank.mirror.poll().waiting for rank in ranks):
            time.sleep(0.01)
        assert client.seal(lease, keys).sealed == lease.pages
        with client.lookup(keys) as hit:
            assert sum(rank.load(hit, keys) for rank in ranks) == 4 * RANKS


def test_while_the_daemon_is_away_calls_wait_their_time_and_are_retryable(life: Comeback, ranks: list[Rank]) -> None:
    with connect(life.socket, timeout_s=0.3) as client:
        lease = client.lease(2)
        life.daemon.kill()
        began = time.monotonic()
        with pytest.raises(DaemonUnavailable, match=f"the daemon on {life.socket} is away") as caught:
            client.contains([b"k"])
        assert caught.value.retryable
        assert time.monotonic() - began >= 0.2, "the call did not wait for a restart"
        with pytest.raises(DaemonUnavailable):
            ranks[0].mirror._attachment.channel.call("contains", keys=[b"k"], timeout_s=0.3)
        ranks[0].mirror.store(lease, [(0, lease.pages[0])]).wait(20)
        life.again()
        assert client.contains([b"k"])
        # What the calls that failed had asked for may be asked again.
        for rank in ranks:
            rank.store(lease, [b"a", b"b"])
        assert client.seal(lease, [b"a", b"b"]).sealed == lease.pages


def test_a_stopped_daemon_is_a_timeout_and_what_it_answers_late_is_given_back(
    life: Comeback, ranks: list[Rank]
) -> None:
    with connect(life.socket, timeout_s=0.3) as client:
        life.daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(CallTimeout, match="has not answered in time") as caught:
            client.lease(5)
        assert caught.value.retryable
        life.daemon.process.send_signal(signal.SIGCONT)
        assert len(client.lease(4).pages) == 4
        client.contains([])
        life.daemon.wait_pages(POOL, leased=4)


def test_a_release_that_got_no_answer_can_be_said_again(life: Comeback, ranks: list[Rank]) -> None:
    with connect(life.socket, timeout_s=0.3) as client:
        store_and_load(client, ranks, 0)
        hit, other = client.lookup([b"0.0"]), client.lookup([b"0.1"])
        life.daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(CallTimeout):
            hit.release()
        with pytest.raises(CallTimeout):
            client.release([other])
        life.restart()
        hit.release()
        client.release([other])
        life.daemon.wait_pages(POOL, pinned=0, sealed=8)


def test_another_instance_closes_a_mirror_for_good(life: Comeback, ranks: list[Rank]) -> None:
    client = connect(life.socket, timeout_s=20)
    store_and_load(client, ranks, 0)
    lease = client.lease(1)
    hit = client.lookup([b"0.0"])
    for rank in ranks:  # so that only the daemon can refuse the commit
        rank.mirror.store(lease, [(0, lease.pages[0])]).wait(20)
    life.daemon.status()
    names = life.daemon.segments()
    life.daemon.kill()
    # The files by which the living sessions forbid --reset vanish.
    shutil.rmtree(f"{life.socket}.sessions")
    life.again("--reset")
    life.daemon.status()
    assert not set(life.daemon.segments()) & set(names)
    with pytest.raises(InstanceChanged) as caught:
        client.contains([b"0.0"])
    assert not caught.value.retryable
    for _ in range(2):
        with pytest.raises(InstanceChanged):
            client.lease(1)
        for rank in ranks:
            with pytest.raises(InstanceChanged):
                rank.mirror.commit(lease)
            with pytest.raises(InstanceChanged):
                rank.mirror.store(lease, [(0, lease.pages[0])])
            with pytest.raises(InstanceChanged):
                rank.mirror.load(hit, [(0, hit.pages[0])])
            with pytest.raises(InstanceChanged):
                rank.mirror.poll()
    client.close()
    with pytest.raises(ClosedError):
        client.lease(1)
    # Nobody came back to the new instance as what he was.
    assert life.daemon.status()["sessions"] == [] and life.daemon.status()["pools"] == []
    with Channel.open(life.socket, role=Role.OBSERVER) as channel:
        assert channel.epoch == 1
