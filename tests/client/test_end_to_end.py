"""Mirrors, a scheduler and a real daemon together: bytes that come back, and wrong use that does not harm."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_tracker
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharedmirror import KeyState, Lease, PlaneSpec, PoolLayout, SharedHostMirror, connect
from sharedmirror.adapter import DevicePool
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    ArenaFull,
    ClosedError,
    ForkedError,
    PageError,
    PoolMismatch,
    RankAttached,
    RankError,
    ShardMismatch,
    StaleLease,
    WrongPoolKind,
)
from sharedmirror.types import Role
from tests.conftest import PATIENCE_S, Daemon, Starter, until

PAGE, PAGES = 16, 8
# Its descriptor stays open: before the tests that count descriptors, not in the first of them.
multiprocessing.resource_tracker.ensure_running()
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def make_pool(seed: int = 0, page_size: int = PAGE, pages: int = PAGES, width: int = 24) -> SimpleNamespace:
    made = torch.Generator().manual_seed(seed)

    def tensor() -> torch.Tensor:
        return torch.randint(-100, 100, (pages * page_size, 2, width), generator=made, dtype=torch.int16)

    return SimpleNamespace(page_size=page_size, k_buffer=[tensor(), tensor()], v_buffer=[tensor(), tensor()])


def tensors(pool: SimpleNamespace) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer]


def page(tensor: torch.Tensor, number: int, size: int = PAGE) -> torch.Tensor:
    return tensor[number * size : (number + 1) * size]


def mirror_of(daemon: Daemon, pool: Any, count: int | None = PAGES, **options: Any) -> SharedHostMirror:
    return SharedHostMirror(pool, count, socket=daemon.socket, **options)


# -- ranks as processes --------------------------------------------------------------------------


def rank_main(pipe: Connection, socket: str, rank: int, world_size: int, options: dict[str, Any]) -> None:
    pool = make_pool(seed=0 if options.get("shard") else rank)
    with SharedHostMirror(pool, PAGES, socket=socket, rank=rank, world_size=world_size, **options) as mirror:
        pipe.send("attached")
        while (command := pipe.recv()) != "close":
            try:
                pipe.send(do(mirror, pool, *command))
            except Exception as error:
                pipe.send(error)
    pipe.send("closed")


def do(mirror: SharedHostMirror, pool: SimpleNamespace, what: str, *arguments: Any) -> Any:
    if what == "store":
        mirror.store(*arguments).wait(PATIENCE_S)
    elif what == "load":
        mirror.load(*arguments).wait(PATIENCE_S)
    elif what == "commit":
        return mirror.commit(*arguments)
    elif what == "commit_later":
        mirror.commit(*arguments, wait=False)
        return until(lambda: mirror.poll().sealed)
    elif what == "fill":
        for tensor in tensors(pool):
            tensor.fill_(arguments[0])
    elif what == "remake":
        for tensor, made in zip(tensors(pool), tensors(make_pool(*arguments)), strict=True):
            tensor.copy_(made)
    elif what == "host":
        return [host[arguments[0]].clone() for _, host in mirror.tensor_pairs]
    elif what == "page":
        return [page(tensor, *arguments).clone() for tensor in tensors(pool)]
    return None


class Rank:
    def __init__(self, daemon: Daemon, rank: int, world_size: int, **options: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, daemon.socket, rank, world_size, options)
        self.process = spawn.Process(target=rank_main, args=arguments)
        self.process.start()
        theirs.close()

    def result(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the rank does not answer"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.result()

    def close(self) -> None:
        self.pipe.send("close")
        assert self.result() == "closed"
        self.process.join(PATIENCE_S)
        self.process.close()
        self.pipe.close()


@pytest.fixture
def ranks(daemon: Daemon) -> Iterator[list[Rank]]:
    engine = [Rank(daemon, rank, 2, pages="leased", layout="page") for rank in (0, 1)]
    for rank in engine:
        assert rank.result() == "attached"
    yield engine
    for rank in engine:
        rank.close()


def test_pages_stored_by_two_ranks_come_back(daemon: Daemon, ranks: list[Rank]) -> None:
    keys = [b"first", b"second"]
    with connect(daemon.socket) as client:
        reservation = client.reserve(keys)
        assert isinstance(reservation.lease, Lease)
        assert set(reservation.granted) == set(keys)
        pairs = list(zip([1, 2], reservation.lease.pages, strict=True))
        before = [rank.ask("page", 1) for rank in ranks]
        for rank in ranks:
            rank.ask("store", reservation.lease, pairs)
        assert ranks[0].ask("commit", reservation.lease).pending == reservation.lease.pages
        assert client.contains(keys) == (KeyState.PENDING, KeyState.PENDING)
        assert ranks[1].ask("commit", reservation.lease).sealed == reservation.lease.pages
        with client.lookup([*keys, b"third"]) as hit:
            assert len(hit) == 2
            for rank in ranks:
                rank.ask("load", hit, [(6, hit.pages[0]), (7, hit.pages[1])])
        for rank, stored in zip(ranks, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(rank.ask("page", 6), stored, strict=True))
        daemon.wait_pages("default", pinned=0, sealed=2)


def test_a_commit_that_does_not_wait_is_sent_by_poll(daemon: Daemon, ranks: list[Rank]) -> None:
    with connect(daemon.socket) as client:
        lease = client.lease(1)
        for rank in ranks:
            rank.ask("store", lease, [(0, lease.pages[0])])
            ((number, _),) = rank.ask("commit_later", lease)
            assert number == lease.id
        assert client.seal(lease, [b"k"]).sealed == lease.pages


def test_an_aborted_lease_takes_no_more_stores_and_its_pages_are_free_again(daemon: Daemon, ranks: list[Rank]) -> None:
    with connect(daemon.socket) as client:
        lease = client.lease(3)
        pairs = [(0, lease.pages[0])]
        ranks[0].ask("store", lease, pairs)
        client.abort(lease)
        daemon.wait_pages("default", leased=0, free=PAGES - 1)
        for rank in ranks:
            with pytest.raises(StaleLease):
                rank.ask("store", lease, pairs)


@pytest.fixture
def sharers(daemon: Daemon) -> Iterator[list[Rank]]:
    """Two ranks that hold the same bytes."""
    engine = [Rank(daemon, rank, 2, pages="leased", layout="page", shard=(0, 1)) for rank in (0, 1)]
    for rank in engine:
        assert rank.result() == "attached"
    yield engine
    for rank in engine:
        if not rank.pipe.closed:
            rank.close()


def test_a_closed_mirror_of_shared_planes_keeps_no_memory(daemon: Daemon) -> None:
    mirrors: list[SharedHostMirror] = []

    def attach(rank: int) -> None:
        options: Any = {"rank": rank, "world_size": 2, "pages": "leased", "layout": "page", "shard": (0, 1)}
        mirrors.append(mirror_of(daemon, make_pool(), **options))

    threads = [threading.Thread(target=attach, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mirror in mirrors:
        mirror.close()
    daemon.wait_status(lambda status: not status["sessions"], "both ranks have left, though their mirrors are held")
    assert len(mirrors) == 2


def test_shared_planes_are_stored_once_by_turns(daemon: Daemon, sharers: list[Rank]) -> None:
    status = daemon.status()["pools"][0]
    alone = 4 * PAGE * 2 * 24 * 2
    assert status["bytes_per_host_page"] == alone
    assert status["bytes_saved_per_host_page"] == alone
    with connect(daemon.socket) as client:
        lease = client.lease(4)
        pairs = list(zip([4, 5, 6, 7], lease.pages, strict=True))
        before = [sharers[0].ask("page", number) for number in (4, 5, 6, 7)]
        for host_page in lease.pages:
            assert all(not stored.any() for stored in sharers[0].ask("host", host_page))
        sharers[0].ask("store", lease, pairs)
        written = [any(stored.any() for stored in sharers[1].ask("host", host_page)) for host_page in lease.pages]
        assert written == [host_page % 2 == 0 for host_page in lease.pages], "the other pages are the other rank's turn"
        sharers[1].ask("store", lease, pairs)
        for rank in sharers:
            rank.ask("commit", lease)
        keys = [bytes([65 + number]) for number in range(4)]
        assert client.seal(lease, keys).sealed == lease.pages
        for rank in sharers:
            rank.ask("fill", 0)
        with client.lookup(keys) as hit:
            for rank in sharers:
                rank.ask("load", hit, list(zip([4, 5, 6, 7], hit.pages, strict=True)))
                for number, stored in zip((4, 5, 6, 7), before, strict=True):
                    loaded = rank.ask("page", number)
                    assert all(torch.equal(a, b) for a, b in zip(loaded, stored, strict=True))


def test_planes_marked_as_shared_by_mistake_are_never_sealed(daemon: Daemon, sharers: list[Rank]) -> None:
    sharers[1].ask("fill", 9)
    with connect(daemon.socket) as client:
        reservation = client.reserve([b"k"])
        assert reservation.lease is not None
        pairs = [(3, reservation.lease.pages[0])]
        for rank in sharers:
            rank.ask("store", reservation.lease, pairs)
        sharers[0].ask("commit", reservation.lease)
        with pytest.raises(ShardMismatch, match="ranks 0 and 1 hold different bytes"):
            sharers[1].ask("commit", reservation.lease)
        assert client.contains([b"k"]) == (KeyState.MISS,)
        daemon.wait_pages("default", leased=0, sealed=0)
        assert [alarm["code"] for alarm in daemon.status()["alarms"]] == ["shard_mismatch"]
    for rank in sharers:
        rank.close()
    daemon.wait_status(lambda status: not status["sessions"], "all have left")
    with Channel.open(daemon.socket, role=Role.OBSERVER) as observer:
        observer.call("drop", pool="default", tag=None)
    assert daemon.status()["alarms"] == []


def test_wrong_stores_and_loads_are_refused_by_each_rank(daemon: Daemon, ranks: list[Rank]) -> None:
    with connect(daemon.socket) as client:
        lease = client.lease(2)
        outside = next(number for number in range(1, PAGES) if number not in lease.pages)
        with pytest.raises(PageError, match=f"host page {outside} is not in lease"):
            ranks[0].ask("store", lease, [(0, outside)])
        with pytest.raises(PageError, match="comes twice|twice|repeated"):
            ranks[0].ask("store", lease, [(0, lease.pages[0]), (1, lease.pages[0])])
        with pytest.raises(PageError, match="never stored by this rank"):
            ranks[0].ask("commit", lease)
        for rank in ranks:
            rank.ask("store", lease, [(0, lease.pages[0]), (1, lease.pages[1])])
            rank.ask("commit", lease)
        with pytest.raises(PageError, match="committed by this rank"):
            ranks[0].ask("store", lease, [(0, lease.pages[0])])
        client.seal(lease, [b"a", b"b"])
        with client.lookup([b"a"]) as hit, pytest.raises(PageError, match="not in hit"):
            ranks[1].ask("load", hit, [(0, lease.pages[1])])
        daemon.wait_pages("default", pinned=0)
        with pytest.raises(StaleLease):
            ranks[1].ask("load", hit, [(0, hit.pages[0])])


# -- one rank, in this process -------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slab", "page"])
def test_a_static_pool_keeps_its_bytes_for_the_next_engine(daemon: Daemon, layout: str) -> None:
    pool = make_pool()
    kept = [tensor.clone() for tensor in tensors(pool)]
    with mirror_of(daemon, pool, layout=layout) as mirror:
        mirror.store_pages([(number, PAGES - 1 - number) for number in range(PAGES)])
    for tensor in tensors(pool):
        tensor.zero_()
    with mirror_of(daemon, pool, layout=layout) as mirror:
        events = mirror.load_pages_with_events([(number, PAGES - 1 - number) for number in range(PAGES)])
        assert len(events) == 4 and all(event.query() for event in events)
    assert all(torch.equal(a, b) for a, b in zip(tensors(pool), kept, strict=True))


def test_the_page_count_left_open(start: Starter) -> None:
    daemon = start(memory="64MiB")
    pool = make_pool(width=1024)
    with mirror_of(daemon, pool, None, pages="leased") as mirror:
        chosen = mirror.num_host_pages
        status = daemon.status()
        assert 0 < status["arena"]["bytes_allocated"] <= status["arena"]["bytes_total"] // 2
        assert (chosen + 32) * mirror.bytes_per_host_page() > 32 << 20
    with mirror_of(daemon, pool, None, pages="leased") as again:
        assert again.num_host_pages == chosen


def test_an_arena_too_small_says_bytes_asked_and_free(daemon: Daemon) -> None:
    pool = make_pool()
    with pytest.raises(ArenaFull) as caught:
        mirror_of(daemon, pool, 1_000_000)
    free = daemon.status()["arena"]["bytes_free"]
    assert caught.value.ids["free"] == free
    assert str(free) in str(caught.value) and str(caught.value.ids["asked"]) in str(caught.value)
    assert daemon.status()["pools"] == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"pool": make_pool(page_size=8)}, "page size 16.* 8"),
        ({"pages": PAGES + 1}, "num_host_pages 8.* 9"),
        ({"world_size": 2}, "world size 1.* 2"),
        ({"layout": "page"}, "layout slab.* page"),
        ({"kind": "leased"}, "kind static.* leased"),
        ({"frames_per_page": 2}, "frames_per_page 1.* 2"),
        ({"pool": make_pool(width=32)}, "other planes.*1536.*2048"),
    ],
)
def test_a_rank_that_differs_is_refused_with_both_values(daemon: Daemon, changed: dict[str, Any], says: str) -> None:
    mirror_of(daemon, make_pool()).close()
    options: dict[str, Any] = {"pool": make_pool(), "pages": PAGES, "kind": "static"} | changed
    pool, pages, kind = options.pop("pool"), options.pop("pages"), options.pop("kind")
    with pytest.raises(PoolMismatch, match=says):
        SharedHostMirror(pool, pages, socket=daemon.socket, pages=kind, **options)


def test_a_tag_that_differs_within_an_engine_is_refused_with_both_values(daemon: Daemon) -> None:
    with mirror_of(daemon, make_pool(), tag="one"), pytest.raises(PoolMismatch, match="'one'.*'two'"):
        mirror_of(daemon, make_pool(), tag="two")


def test_another_tag_of_another_engine_is_another_pool(daemon: Daemon) -> None:
    with mirror_of(daemon, make_pool(), tag="one"), mirror_of(daemon, make_pool(), tag="two", engine="other"):
        assert len(daemon.status()["pools"]) == 2


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (2, 2), (0, 0)])
def test_a_rank_outside_its_world(daemon: Daemon, rank: int, world_size: int) -> None:
    with pytest.raises(RankError):
        mirror_of(daemon, make_pool(), rank=rank, world_size=world_size)


def test_a_rank_attached_twice_names_the_living_process(daemon: Daemon) -> None:
    with mirror_of(daemon, make_pool()), pytest.raises(RankAttached, match=str(os.getpid())):
        mirror_of(daemon, make_pool())


def test_raw_copies_and_leases_are_kept_apart(daemon: Daemon) -> None:
    with mirror_of(daemon, make_pool(), pages="leased") as mirror:
        for call in (mirror.store_pages, mirror.load_pages, mirror.load_pages_with_events):
            with pytest.raises(WrongPoolKind, match="leased"):
                call([(0, 0)])
    with mirror_of(daemon, make_pool(), name="static"), pytest.raises(WrongPoolKind, match="static"):
        connect(daemon.socket, name="static", wait_s=0)


def test_host_pages_of_several_frames(daemon: Daemon) -> None:
    pool = make_pool()
    kept = [tensor.clone() for tensor in tensors(pool)]
    with mirror_of(daemon, pool, 5, pages="leased", layout="page", frames_per_page=4) as mirror:
        with connect(daemon.socket) as client:
            lease = client.lease(1)
            frames = [lease.pages[0] * 4 + sub for sub in range(4)]
            mirror.store(lease, list(zip([3, 2, 1, 0], frames, strict=True)))
            mirror.commit(lease)
            client.seal(lease, [b"four"])
            for tensor in tensors(pool):
                tensor.zero_()
            with client.lookup([b"four"]) as hit:
                frames = [hit.pages[0] * 4 + sub for sub in range(4)]
                mirror.load(hit, list(zip([3, 2, 1, 0], frames, strict=True))).wait(PATIENCE_S)
    assert all(torch.equal(a[: 4 * PAGE], b[: 4 * PAGE]) for a, b in zip(tensors(pool), kept, strict=True))


def test_explicit_planes_of_one_shard_are_stored_once(daemon: Daemon) -> None:
    layout = PoolLayout([PlaneSpec("latent", 576, PAGE, shard=0, shards=1)], PAGE)
    pool = DevicePool(layout, [torch.zeros((PAGES * PAGE, 576), dtype=torch.uint8)])
    with mirror_of(daemon, pool, 32, layout="page") as mirror:
        assert mirror.bytes_per_host_page() == 576 * PAGE
        assert daemon.status()["pools"][0]["bytes_per_host_page"] == 576 * PAGE


def test_use_after_close(daemon: Daemon) -> None:
    mirror = mirror_of(daemon, make_pool())
    host = mirror.tensor_pairs[0][1]
    host.fill_(7)
    mirror.close()
    mirror.close()
    with pytest.raises(ClosedError):
        mirror.store_pages([(0, 0)])
    assert bool((host == 7).all())
    daemon.wait_status(lambda status: [s["state"] for s in status["sessions"]] == ["detached"])
    del host
    daemon.wait_status(lambda status: status["sessions"] == [])


@forks
def test_a_forked_child_is_refused_and_the_parent_goes_on(daemon: Daemon) -> None:
    with mirror_of(daemon, make_pool()) as mirror:
        child = os.fork()
        if child == 0:
            try:
                mirror.store_pages([(0, 0)])
            except ForkedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        mirror.store_pages([(0, 0)])


def test_the_callers_exception_is_not_hidden(daemon: Daemon) -> None:
    with pytest.raises(KeyError, match="mine"), mirror_of(daemon, make_pool()):
        raise KeyError("mine")
    assert daemon.status()["sessions"] == []
