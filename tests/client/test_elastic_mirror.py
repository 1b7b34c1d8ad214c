"""A worker of a pool that grows and shrinks: it maps what it needs, when it needs it, and unmaps when it is told."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sharedmirror.errors import DaemonUnavailable, PageError, StaleLease, UsageError
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import Generation, Lease, LeaseId, PageId, PoolId
from tests.client.fake_channel import MIB2, FakeDaemon
from tests.conftest import until

LEVEL = 4
"""Pages in 2 MiB."""
PAGE_BYTES = MIB2 // LEVEL
LEVELS = [n * MIB2 for n in range(1, 5)]
MOST = 4 * LEVEL
ROWS = 4


class ElasticDaemon(FakeDaemon):
    """Gives pools some of their pages, the later ones from the arena's beginning on."""

    backed = LEVEL

    def attach(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["num_host_pages"] == (2, MOST)
        self.reply = {"session": 1, "pool": 1, "num_host_pages": MOST, "backed": self.backed}
        self.reply |= {"regions": [self.region_now()], "planes": [[0, 0, PAGE_BYTES], [0, PAGE_BYTES // 2, PAGE_BYTES]]}
        return self.reply

    def region_now(self) -> dict[str, Any]:
        extents = [[0, 8 * MIB2, MIB2], *([0, at * MIB2, MIB2] for at in range(self.backed // LEVEL - 1))]
        size_bytes = self.backed * PAGE_BYTES
        region = {"id": 7, "bytes": size_bytes, "extents": extents, "ranks": [0]}
        return region | {"max_bytes": MOST * PAGE_BYTES, "levels": LEVELS}

    def grow(self, pages: int) -> None:
        self.backed = pages
        self.answers["extents"] = {"backed": pages, "regions": [self.region_now()]}

    def page(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        start = 8 * MIB2 + number * PAGE_BYTES if number < LEVEL else (number - LEVEL) * PAGE_BYTES
        return self.arena[start : start + PAGE_BYTES]


@pytest.fixture
def daemon() -> Iterator[ElasticDaemon]:
    fake = ElasticDaemon()
    yield fake
    fake.close()
    gc.collect()
    assert "memfd:sharedmirror-test" not in Path("/proc/self/maps").read_text()


def make_pool() -> Any:
    made = torch.Generator().manual_seed(1)
    row = PAGE_BYTES // 2 // ROWS

    def tensor() -> torch.Tensor:
        return torch.randint(0, 256, (3 * ROWS, row), generator=made, dtype=torch.uint8)

    return SimpleNamespace(page_size=ROWS, k_buffer=[tensor()], v_buffer=[tensor()])


def attach(daemon: FakeDaemon, pool: Any = None, **options: Any) -> SharedHostMirror:
    options = {"pages": "leased", "layout": "page", **options}
    return SharedHostMirror(pool or make_pool(), (2, MOST), _open=daemon.open, **options)


def lease(number: int, *pages: int, generation: int = 1) -> Lease:
    generations = tuple(Generation(generation) for _ in pages)
    return Lease(LeaseId(number), PoolId(1), tuple(map(PageId, pages)), generations)


def holds(daemon: ElasticDaemon, host: int, pool: Any, device: int) -> bool:
    rows = slice(device * ROWS, (device + 1) * ROWS)
    expected = [tensor[rows].numpy().reshape(-1) for tensor in (pool.k_buffer[0], pool.v_buffer[0])]
    return bool((daemon.page(host) == np.concatenate(expected)).all())


def shrink(daemon: ElasticDaemon, number: int, pages: int) -> float | None:
    return daemon.channels[0].push(push="shrink", number=number, pages=pages, regions=[[7, pages * PAGE_BYTES], [8, 0]])


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        ((2, 16), {"layout": "slab"}, "pages='leased' and layout='slab'"),
        ((2, 16), {"pages": "static"}, "pages='static' and layout='page'"),
        ((1, 16), {}, "the least is 2 or more"),
        ((9, 8), {}, "the most not less"),
        ((2, 8, 9), {}, "two whole numbers"),
        ((2, 8.0), {}, "two whole numbers"),
        ((True, 8), {}, "two whole numbers"),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    daemon: ElasticDaemon, count: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        SharedHostMirror(make_pool(), count, _open=daemon.open, **{"pages": "leased", "layout": "page", **options})
    assert daemon.channels == []


def test_a_store_beyond_what_is_mapped_asks_once(daemon: ElasticDaemon) -> None:
    pool = make_pool()
    with attach(daemon, pool) as mirror:
        assert mirror.num_host_pages == MOST
        mirror.store(lease(1, 1, 3), [(0, 1), (1, 3)]).wait(5)
        assert daemon.said("extents") == []
        daemon.grow(3 * LEVEL)
        mirror.store(lease(2, 2, 11), [(2, 11), (1, 2)]).wait(5)
        mirror.store(lease(3, 10), [(0, 10)]).wait(5)
        assert len(daemon.said("extents")) == 1
        assert holds(daemon, 3, pool, 1) and holds(daemon, 11, pool, 2) and holds(daemon, 10, pool, 0)
        expected = pool.k_buffer[0][2 * ROWS :].clone()
        pool.k_buffer[0].zero_()
        mirror.load(SimpleNamespace(id=9, pool=1, pages=(11,)), [(2, 11)]).wait(5)
        assert torch.equal(pool.k_buffer[0][2 * ROWS :], expected)


def test_where_there_is_no_memory_tensors_hold_zeros(daemon: ElasticDaemon) -> None:
    with attach(daemon) as mirror:
        host = mirror.tensor_pairs[0][1]
        assert host.shape[0] == MOST
        assert host[0].any() and not host[LEVEL:].any()


def test_while_the_daemon_is_away_a_store_can_be_tried_again(daemon: ElasticDaemon) -> None:
    pool = make_pool()
    with attach(daemon, pool) as mirror:
        daemon.failures["extents"] = DaemonUnavailable("away")
        with pytest.raises(DaemonUnavailable) as caught:
            mirror.store(lease(1, 5), [(0, 5)])
        assert caught.value.retryable
        with pytest.raises(PageError, match="never stored"):
            mirror.commit(lease(1, 5))
        del daemon.failures["extents"]
        daemon.grow(2 * LEVEL)
        mirror.store(lease(1, 5), [(0, 5)]).wait(5)
        mirror.commit(lease(1, 5))
        assert holds(daemon, 5, pool, 0)


def test_what_may_not_be_copied_asks_for_no_memory(daemon: ElasticDaemon) -> None:
    with attach(daemon) as mirror:
        with pytest.raises(PageError, match="host page 9 is not in lease 1"):
            mirror.store(lease(1, 5), [(0, 9)])
        with pytest.raises(PageError, match="host page 9 is not in hit 4"):
            mirror.load(SimpleNamespace(id=4, pool=1, pages=(5,)), [(0, 9)])
        daemon.channels[0].push(push="revoked", leases=[2], lease_floor=0)
        with pytest.raises(StaleLease, match="revoked"):
            mirror.store(lease(2, 9), [(0, 9)])
        assert daemon.said("extents") == []


def test_a_page_that_lost_its_memory_has_no_lease_either(daemon: ElasticDaemon) -> None:
    with attach(daemon) as mirror:
        daemon.grow(LEVEL)
        with pytest.raises(StaleLease, match="host page 5 has no memory any more"):
            mirror.store(lease(1, 5), [(0, 5)])


def test_memory_is_unmapped_when_the_daemon_wants_it(daemon: ElasticDaemon) -> None:
    pool = make_pool()
    with attach(daemon, pool) as mirror:
        daemon.grow(3 * LEVEL)
        mirror.store(lease(1, 11), [(0, 11)]).wait(5)
        mirror.commit(lease(1, 11))
        host = mirror.tensor_pairs[0][1]
        assert host[11].any()
        assert shrink(daemon, 40, 2 * LEVEL) is None
        assert daemon.said("shrunk") == [{"number": 40}]
        assert not host[2 * LEVEL :].any() and host[2 * LEVEL - 1].any()
        daemon.page(11)[:] = 9
        assert not host[11].any()
        # It grows again, from other memory.
        mirror.store(lease(2, 11, generation=2), [(1, 11)]).wait(5)
        assert holds(daemon, 11, pool, 1)


def test_a_copy_that_is_under_way_there_comes_first(daemon: ElasticDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(daemon) as mirror:
        daemon.grow(2 * LEVEL)
        go_on = threading.Event()
        store = mirror._engine.store

        def slow(*arguments: Any) -> Any:
            assert go_on.wait(20)
            return store(*arguments)

        monkeypatch.setattr(mirror._engine, "store", slow)
        thread = threading.Thread(target=mirror.store, args=(lease(1, 7), [(0, 7)]))
        thread.start()
        until(lambda: mirror._ledger_of("test").copies_from(7))
        assert shrink(daemon, 40, LEVEL)
        assert daemon.said("shrunk") == []
        go_on.set()
        thread.join()
        assert mirror._answer() is None
        assert daemon.said("shrunk") == [{"number": 40}]


def test_an_answer_that_got_lost_is_repeated_and_nothing_is_unmapped_again(daemon: ElasticDaemon) -> None:
    pool = make_pool()
    with attach(daemon, pool) as mirror:
        daemon.grow(2 * LEVEL)
        mirror.store(lease(1, 7), [(0, 7)]).wait(5)
        mirror.commit(lease(1, 7))
        daemon.failures["shrunk"] = DaemonUnavailable("away")
        with pytest.raises(DaemonUnavailable):
            shrink(daemon, 40, LEVEL)
        # The daemon took it, and the pool has grown since.
        mirror.store(lease(2, 7, generation=2), [(2, 7)]).wait(5)
        mirror.commit(lease(2, 7, generation=2))
        del daemon.failures["shrunk"]
        shrink(daemon, 40, LEVEL)
        assert daemon.said("shrunk") == [{"number": 40}] * 2
        host = mirror.tensor_pairs[0][1]
        assert host[7].any() and mirror._attachment.backed == 2 * LEVEL


def test_a_closed_mirror_whose_tensors_are_held_gives_back_too(daemon: ElasticDaemon) -> None:
    mirror = attach(daemon)
    daemon.grow(2 * LEVEL)
    mirror.store(lease(1, 7), [(0, 7)]).wait(5)
    mirror.commit(lease(1, 7))
    host = mirror.tensor_pairs[0][1]
    mirror.close()
    assert daemon.said("detach") == [{"unmapped": False}] and host[7].any()
    shrink(daemon, 40, LEVEL)
    assert daemon.said("shrunk") == [{"number": 40}]
    assert not host[7].any() and host[LEVEL - 1].any()
    del host
    gc.collect()
    until(lambda: daemon.channels[0].closed)
    assert daemon.said("unmapped") == [{}]


def test_a_failed_copy_keeps_the_memory(daemon: ElasticDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = attach(daemon)
    daemon.grow(2 * LEVEL)

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(mirror._engine, "store", fails)
    with pytest.raises(RuntimeError):
        mirror.store(lease(1, 7), [(0, 7)])
    assert shrink(daemon, 40, LEVEL) and daemon.said("shrunk") == []
    assert mirror._attachment.backed == 2 * LEVEL
    mirror.close()
