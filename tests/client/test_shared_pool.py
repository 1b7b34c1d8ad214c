"""Two engines of two ranks each on one pool at once, all of them real processes: what they share, and what not."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror import KeyState, Lease, connect
from sharedmirror.control import Client, Hit
from sharedmirror.errors import NoPages, PageError, StaleLease, UsageError
from tests.client.test_end_to_end import PAGES, Rank

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Worker

HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS
Until = Callable[..., Any]
SHARE = (PAGES - 1) // 2


# -- with mirrors: bytes -------------------------------------------------------------------------


class Engine:
    """Two ranks as processes with mirrors, and the scheduler. Key ``n`` stands for the bytes of ``made(n)``."""

    def __init__(self, ranks: list[Rank], client: Client) -> None:
        self.ranks, self.client = ranks, client

    def store(self, lease: Lease | None, keys: Sequence[int]) -> None:
        """Make each key's bytes in a device page of each rank, and store them."""
        assert lease is not None
        for key, page in zip(keys, lease.pages, strict=True):
            for number, rank in enumerate(self.ranks):
                rank.ask("remake", 10 * key + number)
                rank.ask("store", lease, [(1, page)])

    def commit(self, lease: Lease | None) -> list[Any]:
        return [rank.ask("commit", lease) for rank in self.ranks]

    def write(self, *keys: int) -> None:
        """Reserve, store, commit."""
        for key in keys:
            lease = self.client.reserve([b"%d" % key]).lease
            self.store(lease, [key])
            self.commit(lease)

    def check(self, hit: Hit, keys: Sequence[int]) -> None:
        """Load a hit's pages and compare every byte with what the keys stand for."""
        assert len(hit) == len(keys)
        for key, page in zip(keys, hit.pages, strict=True):
            for number, rank in enumerate(self.ranks):
                rank.ask("remake", 10 * key + number)
                wanted = rank.ask("page", 1)
                rank.ask("fill", 0)
                rank.ask("load", hit, [(6, page)])
                assert all(torch.equal(a, b) for a, b in zip(rank.ask("page", 6), wanted, strict=True))
                assert all(bool(tensor.any()) for tensor in wanted)


@pytest.fixture(scope="module")
def engines(shared_daemon: Daemon) -> Iterator[tuple[Engine, Engine]]:
    options: dict[str, Any] = {"name": "mirrors", "pages": "leased", "layout": "page"}
    names = ("e", "f")
    found = {name: [Rank(shared_daemon, rank, 2, engine=name, **options) for rank in (0, 1)] for name in names}
    for name in names:
        for rank in found[name]:
            assert rank.result() == "attached"
    with contextlib.ExitStack() as stack:
        e, f = (stack.enter_context(connect(shared_daemon.socket, "mirrors", name, max_held=PAGES)) for name in names)
        yield Engine(found["e"], e), Engine(found["f"], f)
    for name in names:
        for rank in found[name]:
            rank.close()


@pytest.fixture
def pair(engines: tuple[Engine, Engine], shared_daemon: Daemon) -> Iterator[tuple[Engine, Engine]]:
    """Two engines over an empty pool of 7 pages."""
    yield engines
    engines[0].client.clear()
    shared_daemon.wait_pages("mirrors", free=PAGES - 1, leased=0, pinned=0)


def test_a_page_of_one_engine_is_loaded_by_the_other(pair: tuple[Engine, Engine]) -> None:
    e, f = pair
    e.write(1, 2)
    f.write(3)
    keys = [b"1", b"2", b"3"]
    with f.client.lookup(keys) as hit:
        f.check(hit, [1, 2, 3])
    with e.client.lookup(keys) as hit:
        e.check(hit, [1, 2, 3])


def test_an_engine_that_streams_takes_nothing_from_one_within_its_share(
    pair: tuple[Engine, Engine], shared_daemon: Daemon
) -> None:
    e, f = pair
    kept = range(1, SHARE + 1)
    f.write(*kept)
    e.write(*range(10, 40))
    shown = shared_daemon.pool("mirrors")["engines"]
    assert shown["f"] == {"owned": SHARE, "held": 0, "max_held": PAGES, "share": SHARE}
    assert shown["e"]["owned"] == PAGES - 1 - SHARE
    with f.client.lookup([b"%d" % key for key in kept]) as hit:
        f.check(hit, kept)
    # There is a page more than two shares, and the one that streams has it: it goes first.
    f.write(8)
    assert e.client.contains([b"36", b"37", b"38", b"39"]) == (MISS, HIT, HIT, HIT)
    assert f.client.contains([b"1", b"2", b"3", b"8"]) == (HIT,) * 4


def test_leases_and_hits_of_another_engine_are_refused_by_the_ranks(pair: tuple[Engine, Engine]) -> None:
    e, f = pair
    f.write(1)
    lease = f.client.lease(1)
    with f.client.lookup([b"1"]) as hit:
        for rank in e.ranks:
            with pytest.raises(StaleLease, match=f"lease {lease.id} belongs to another engine"):
                rank.ask("store", lease, [(1, lease.pages[0])])
            with pytest.raises(StaleLease, match=f"hit {hit.id} belongs to another engine"):
                rank.ask("load", hit, [(1, hit.pages[0])])
        f.check(hit, [1])
    f.client.abort(lease)


def test_of_a_hit_that_found_nothing_nothing_is_loaded(pair: tuple[Engine, Engine]) -> None:
    e, f = pair
    with f.client.lookup([b"nobody's"]) as hit:
        f.ranks[0].ask("load", hit, [])
        with pytest.raises(PageError, match="host page 1 is not in the hit, which found nothing"):
            f.ranks[0].ask("load", hit, [(1, 1)])


def test_two_engines_complete_the_same_key_and_both_go_on(pair: tuple[Engine, Engine]) -> None:
    e, f = pair
    leases = [engine.client.lease(2) for engine in pair]
    for engine, lease in zip(pair, leases, strict=True):
        engine.store(lease, [1, 2])
        engine.client.seal(lease, [b"1", b"2"])
    assert e.client.contains([b"1", b"2"]) == (PENDING, PENDING)
    first = f.commit(leases[1])[-1]
    assert (first.sealed, first.duplicates) == (leases[1].pages, {})
    last = e.commit(leases[0])[-1]
    assert last.sealed == ()
    assert last.duplicates == dict(zip(leases[0].pages, leases[1].pages, strict=True))
    for engine in pair:
        with engine.client.lookup([b"1", b"2"]) as hit:
            assert hit.pages == leases[1].pages
            engine.check(hit, [1, 2])
    e.write(3)
    with f.client.lookup([b"1", b"2", b"3"]) as hit:
        f.check(hit, [1, 2, 3])


def test_reserve_tells_what_the_other_writes_and_a_lookup_waits_for_it(pair: tuple[Engine, Engine]) -> None:
    e, f = pair
    reserved = e.client.reserve([b"1", b"2"])
    e.store(reserved.lease, [1, 2])
    theirs = f.client.reserve([b"1", b"2", b"3"])
    assert (theirs.pending, tuple(theirs.granted)) == ((b"1", b"2"), (b"3",))
    f.store(theirs.lease, [3])
    f.commit(theirs.lease)
    done: list[Hit] = []
    thread = threading.Thread(target=lambda: done.append(f.client.lookup([b"1", b"2", b"3"], wait_s=20)))
    thread.start()
    e.commit(reserved.lease)
    thread.join()
    with done[0] as hit:
        f.check(hit, [1, 2, 3])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_two_engines_do_the_bytes_are_those_of_the_keys(pair: tuple[Engine, Engine], seed: int) -> None:
    rng = random.Random(seed)
    held: list[tuple[Engine, Lease]] = []
    found = 0
    for _ in range(60):
        engine = rng.choice(pair)
        first = rng.randrange(9)
        keys = list(range(first, first + rng.randrange(1, 4)))
        names = [b"%d" % key for key in keys]
        roll = rng.random()
        with contextlib.suppress(NoPages):
            if roll < 0.4:
                reserved = engine.client.reserve(names, parent=b"%d" % (first - 1) if first else None)
                if reserved.lease is not None:
                    wanted = [int(key) for key in reserved.granted]
                    engine.store(reserved.lease, wanted)
                    held.append((engine, reserved.lease))
            elif roll < 0.5:
                lease = engine.client.lease(len(keys))
                engine.store(lease, keys)
                engine.client.seal(lease, names)
                held.append((engine, lease))
            elif roll < 0.9:
                with engine.client.lookup(names) as hit:
                    engine.check(hit, keys[: len(hit)])
                    found += len(hit)
            elif roll < 0.95:
                engine.client.evict(names)
        while held and (rng.random() < 0.5 or len(held) > 2):
            owner, lease = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.8:
                owner.commit(lease)
            else:
                owner.ranks[0].ask("commit", lease)
                owner.client.abort(lease)
    for owner, lease in held:
        owner.client.abort(lease)
    assert found > 5


# -- without mirrors: counting, bounds and deaths -------------------------------------------------


class Bare:
    """Two worker processes and a scheduler."""

    def __init__(self, workers: list[Worker], client: Client) -> None:
        self.workers, self.client = workers, client

    def write(self, *keys: bytes) -> tuple[int, ...]:
        lease = self.client.lease(len(keys))
        self.client.seal(lease, keys)
        for worker in self.workers:
            worker.commit(lease)
        return lease.pages


Attach = Callable[..., Bare]


@pytest.fixture
def attach(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Attach]:
    """Attach engines of two ranks to one pool of 8 pages to lease."""
    with contextlib.ExitStack() as stack:

        def one(engine: str, **options: Any) -> Bare:
            workers = processes.engine(shared_daemon.socket, 2, answers=True, pool=name, engine=engine)
            return Bare(workers, stack.enter_context(connect(shared_daemon.socket, name, engine, **options)))

        yield one


def test_commits_count_within_the_engine_that_leased(attach: Attach) -> None:
    e, f = attach("e"), attach("f")
    lease, theirs = e.client.lease(1), f.client.lease(1)
    e.client.seal(lease, [b"k"])
    f.client.seal(theirs, [b"k"])
    e.workers[0].commit(lease)
    with pytest.raises(StaleLease, match="belongs to another engine"):
        f.workers[1].commit(lease)
    f.workers[1].commit(theirs)
    assert e.client.contains([b"k"]) == f.client.contains([b"k"]) == (PENDING,)
    assert f.workers[0].commit(theirs)["sealed"] == list(theirs.pages)
    assert e.client.contains([b"k"]) == (HIT,)


def test_max_held_bounds_one_engine_and_the_other_goes_on(attach: Attach, shared_daemon: Daemon, name: str) -> None:
    e, f = attach("e", max_held=3), attach("f")
    pages = f.write(b"a", b"b", b"c", b"d")
    assert shared_daemon.pool(name)["engines"]["f"] == {"owned": 4, "held": 0, "max_held": 4, "share": 4}
    with e.client.lookup([b"a", b"b", b"c", b"d"]) as hit:
        assert (hit.pages, hit.states) == (pages[:3], (HIT, HIT, HIT, MISS))
        with e.client.lookup([b"d"]) as more:
            assert (len(more), more.states) == (0, (MISS,))
        with pytest.raises(NoPages, match=r"holds 3 pages .* may hold 3 \(max_held\)") as caught:
            e.client.reserve([b"e"], wait_s=0.05)
        assert caught.value.retryable
        with f.client.lookup([b"a", b"b", b"c", b"d"]) as theirs:
            assert len(theirs) == 4
        shared_daemon.wait_pages(name, pinned=3)
        assert len(f.client.lease(2).pages) == 2
    assert e.client.reserve([b"e"], wait_s=20).lease is not None
    assert shared_daemon.pool(name)["engines"]["e"] == {"owned": 1, "held": 1, "max_held": 3, "share": 4}


def test_an_engine_holds_its_fair_share_until_it_is_alone(attach: Attach) -> None:
    e, f = attach("e"), attach("f")
    with pytest.raises(NoPages, match=r"may hold 4 \(its fair share of 2 engines\)"):
        e.client.lease(5)
    f.client.close()
    for worker in f.workers:
        worker.kill()
    assert len(e.client.lease(8, wait_s=20).pages) == 8


@pytest.mark.parametrize("max_held", [0, -3, True, 2.5, "8"])
def test_a_bound_that_cannot_be_is_refused(shared_daemon: Daemon, max_held: Any) -> None:
    with pytest.raises(UsageError, match="max_held must be a positive number of pages"):
        connect(shared_daemon.socket, "nowhere", max_held=max_held, wait_s=0)


@pytest.mark.parametrize("way", ["reserve", "lease"])
def test_a_lookup_that_waits_ends_when_the_writer_of_the_other_engine_is_killed(
    attach: Attach, shared_daemon: Daemon, name: str, way: str
) -> None:
    e, f = attach("e"), attach("f")
    f.write(b"a")
    if way == "reserve":
        lease = e.client.reserve([b"b"], parent=b"a").lease
        assert lease is not None
    else:
        lease = e.client.lease(1)
        e.client.seal(lease, [b"b"], parent=b"a")
    e.workers[0].commit(lease)
    done: list[Hit] = []
    thread = threading.Thread(target=lambda: done.append(f.client.lookup([b"a", b"b"], wait_s=600)))
    thread.start()
    e.workers[1].kill()
    thread.join(20)
    assert done, "the lookup waits although nobody writes"
    assert done[0].states == (HIT, MISS)
    done[0].release()
    # Nothing of the dead writer is left in the way of the next one.
    assert f.client.reserve([b"b"], parent=b"a").granted.keys() == {b"b"}
    shared_daemon.wait_pages(name, leased=1)


def test_a_lookup_goes_on_waiting_for_the_writer_that_is_left(attach: Attach, shared_daemon: Daemon) -> None:
    e, f, g = attach("e"), attach("f"), attach("g", max_held=4)
    leases = [engine.client.lease(1) for engine in (e, f)]
    for engine, lease in zip((e, f), leases, strict=True):
        engine.client.seal(lease, [b"k"])
    done: list[Hit] = []
    thread = threading.Thread(target=lambda: done.append(g.client.lookup([b"k"], wait_s=600)))
    thread.start()
    e.workers[1].kill()
    killed = e.workers[1].pid
    shared_daemon.wait_status(lambda status: killed not in [session["pid"] for session in status["sessions"]])
    assert f.client.contains([b"k"]) == (PENDING,)
    for worker in f.workers:
        worker.commit(leases[1])
    thread.join(20)
    assert done and done[0].pages == leases[1].pages
    done[0].release()
