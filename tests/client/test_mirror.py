"""The mirror on CPU tensors against a real daemon: what engines call, and what they may do wrong.

The contract of one class, told in the order in which it is used, so it stays in one module.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sharedmirror import attachment
from sharedmirror import mirror as mirror_module
from sharedmirror.adapter import DevicePool
from sharedmirror.copies import geometry
from sharedmirror.copies.pairs import Ids
from sharedmirror.errors import (
    ArenaFull,
    CallTimeout,
    ClosedError,
    CopyError,
    DaemonUnavailable,
    ForkedError,
    InstanceChanged,
    LayoutError,
    MemoryFault,
    PageError,
    ProtocolError,
    RankError,
    StaleLease,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.layout import PlaneSpec, PoolLayout
from sharedmirror.mirror import SharedHostMirror, flat_bytes_per_host_page
from sharedmirror.types import Lease
from tests.client.fake_channel import POISON, FakeDaemon

DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
PAGE, DEVICE_PAGES = 4, 6


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    fake = FakeDaemon()
    yield fake
    fake.close()
    gc.collect()
    assert "memfd:sharedmirror-test" not in Path("/proc/self/maps").read_text()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("sharedmirror")] == []


def random_rows(seed: int, rows: int, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(row, dtype=int)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(rows, *row)


def make_pool(dtype: torch.dtype = torch.float16, row: tuple[int, ...] = (3, 5)) -> Any:
    """Two KV layers of odd row sizes around one state layer."""
    kv = [random_rows(seed, DEVICE_PAGES * PAGE, row, dtype) for seed in range(4)]
    slab = (random_rows(7, DEVICE_PAGES, (3,), torch.uint8), random_rows(8, DEVICE_PAGES, (2, 2), torch.float32))

    def get_state_buffers(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer != 1:
            raise ValueError("no state")
        return slab

    return SimpleNamespace(
        page_size=PAGE,
        k_buffer=[kv[0], None, kv[1]],
        v_buffer=[kv[2], None, kv[3]],
        state_slabs=[slab],
        get_state_buffers=get_state_buffers,
    )


def attach(daemon: FakeDaemon, pool: Any = None, count: int | None = 8, **options: Any) -> SharedHostMirror:
    return SharedHostMirror(make_pool() if pool is None else pool, count, _open=daemon.open, **options)


def arena_mappings() -> int:
    """Mappings of the arena beside the fake daemon's own."""
    return Path("/proc/self/maps").read_text().count("memfd:sharedmirror-test") - 1


class Model:
    """What arena and device must hold, computed with numpy from the attach reply alone."""

    def __init__(self, daemon: FakeDaemon, pool: DevicePool) -> None:
        self.daemon, self.pool = daemon, pool
        self.region = daemon.region()
        self.device = [self.bytes_of(tensor).copy() for tensor in pool.tensors]

    @staticmethod
    def bytes_of(tensor: torch.Tensor) -> Any:
        return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)

    def places(self) -> list[Any]:
        """Return the daemon's placements in plane order; they were announced layer by layer."""
        order, _ = self.pool.copy_order()
        return [self.daemon.reply["planes"][order.index(plane)] for plane in range(len(order))]

    def copy(self, pairs: list[tuple[int, int]], to_host: bool) -> None:
        for spec, device, (_, base, stride) in zip(self.pool.layout.planes, self.device, self.places(), strict=True):
            size = spec.slice_bytes
            for page, frame in pairs:
                at = base + frame * stride
                if to_host:
                    self.region[at : at + size] = device[page * size : (page + 1) * size]
                else:
                    device[page * size : (page + 1) * size] = self.region[at : at + size]

    def check(self) -> None:
        """Compare every byte, those beside the slices too."""
        assert np.array_equal(self.daemon.region(), self.region)
        for tensor, expected in zip(self.pool.tensors, self.device, strict=True):
            assert np.array_equal(self.bytes_of(tensor), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["slab", "page"])
@pytest.mark.parametrize("frames", [1, 3])
def test_raw_copies_are_exact(daemon: FakeDaemon, dtype: torch.dtype, layout: str, frames: int) -> None:
    pool = make_pool(dtype, (3, 5))
    with attach(daemon, pool, layout=layout, frames_per_page=frames) as mirror:
        model = Model(daemon, DevicePool.from_pool(pool))
        assert (model.region[: 4 << 20] == POISON).all()
        out = [(5, 7), (0, 0), (1, 6), (2, 3)] if frames == 1 else [(5, 23), (0, 0), (1, 22), (2, 9)]
        mirror.store_pages(out, None)
        model.copy(out, to_host=True)
        model.check()
        back = [(3, out[0][1]), (5, out[2][1]), (0, out[3][1])]
        mirror.load_pages(np.array(back), None)
        model.copy(back, to_host=False)
        model.check()
        events = mirror.load_pages_with_events([(4, out[0][1])], None)
        model.copy([(4, out[0][1])], to_host=False)
        model.check()
        assert len(events) == len(mirror.tensor_pairs) == 6
        assert all(event.query() for event in events)


@pytest.mark.parametrize("layout", ["slab", "page"])
def test_surface(daemon: FakeDaemon, layout: str) -> None:
    pool = make_pool()
    with attach(daemon, pool, layout=layout) as mirror:
        mine = [tensor for tensor, _ in mirror.tensor_pairs]
        expected = [pool.k_buffer[0], pool.k_buffer[2], pool.v_buffer[0], pool.v_buffer[2], *pool.state_slabs[0]]
        assert all(a is b for a, b in zip(mine, expected, strict=True))
        hosts = [host for _, host in mirror.tensor_pairs]
        if layout == "slab":
            assert [tuple(host.shape) for host in hosts] == [(32, 3, 5)] * 4 + [(8, 3), (8, 2, 2)]
            assert all(host.is_contiguous() for host in hosts)
        else:
            assert [tuple(host.shape) for host in hosts] == [(8, 4, 3, 5)] * 4 + [(8, 1, 3), (8, 1, 2, 2)]
        assert [host.dtype for host in hosts] == [tensor.dtype for tensor in mine]
        assert mirror.row_spans == (4, 4, 4, 4, 1, 1)
        assert (mirror.num_k_tensors, mirror.page_size, mirror.num_host_pages) == (2, 4, 8)
        assert mirror.bytes_per_host_page() == flat_bytes_per_host_page(pool) == 4 * 4 * 30 + 3 + 16
        assert mirror.tensor_index_of_layer(2) == 1
        with pytest.raises(ValueError, match="state layer"):
            mirror.tensor_index_of_layer(1)
        wrong: Any
        for wrong in (None, "x", 1.0, True):
            with pytest.raises(UsageError, match=f"a layer is a whole number, not {wrong!r}"):
                mirror.tensor_index_of_layer(wrong)
            with pytest.raises(UsageError, match=f"a layer is a whole number, not {wrong!r}"):
                mirror.state_tensor_indices_of_layer(wrong)
        assert mirror.state_tensor_indices_of_layer(1) == (4, 5)
        assert mirror.state_tensor_indices_of_layer(0) is None
        # The host tensor shows what a store wrote, through its own shape.
        mirror.store_pages([(3, 5)])
        for tensor, host, span in zip(mine, hosts, mirror.row_spans, strict=True):
            page = host[5 * span : 6 * span] if layout == "slab" else host[5]
            assert torch.equal(page.view(torch.uint8), tensor[3 * span : 4 * span].view(torch.uint8))


def test_request_and_defaults(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAREDMIRROR_LAUNCH_ID", "launch-7")
    with attach(daemon, count=None, tag="t", engine="e", name="n", rank=1, world_size=2, frames_per_page=2) as mirror:
        assert mirror.num_host_pages == 8
        assert mirror.bytes_per_host_page() == 2 * flat_bytes_per_host_page(make_pool())
    (request,) = daemon.said("attach")
    planes = request.pop("planes")
    assert request == {
        "pool": "n", "tag": "t", "engine": "e", "launch": "launch-7", "role": "worker", "rank": 1, "world_size": 2,
        "page_size": 4, "frames_per_page": 2, "kind": "static", "layout": "slab", "num_host_pages": None,
        "wait_s": 30.0,
    }  # fmt: skip
    names = [plane[0] for plane in planes]
    assert names.index("v0") == names.index("k0") + 1, "announced layer by layer"
    assert planes[0] == ["k0", 1, 2, 120, 4]
    assert ["ssm0", 1, 2, 16, 1] in planes
    assert [op for op, _ in daemon.calls] == ["attach", "detach"]
    assert daemon.said("detach") == [{"unmapped": True}]
    assert daemon.channels[0].closed


def test_rank_defaults_to_torch_distributed(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    attach(daemon).close()
    request = daemon.said("attach")[0]
    assert (request["rank"], request["world_size"]) == (3, 4)


def test_explicit_layout(daemon: FakeDaemon) -> None:
    storage = random_rows(1, DEVICE_PAGES, (50,), torch.uint8)
    layout = PoolLayout([PlaneSpec("kv", 32, 1, shard=0, shards=1), PlaneSpec("scale", 7, 1)], page_size=16)
    pool = DevicePool(layout, [storage[:, 1:33], storage[:, 40:47]])
    before = storage.clone()
    with attach(daemon, pool, layout="page", rank=1, world_size=2) as mirror:
        assert daemon.said("attach")[0]["planes"] == [["kv", 0, 1, 32, 1], ["scale", 1, 2, 7, 1]]
        mirror.store_pages([(page, page + 1) for page in range(6)])
        storage[:, 1:33], storage[:, 40:47] = 0, 0
        mirror.load_pages([(page, page + 1) for page in range(6)])
    assert torch.equal(storage, before)


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 2, "world_size": 2}, RankError, "rank 2 does not fit a world of 2"),
    ({"rank": -1, "world_size": 2}, RankError, "rank -1"),
    ({"rank": 0, "world_size": 0}, RankError, "world of 0"),
    ({"rank": "0"}, RankError, "rank is '0'; it must be a whole number"),
    ({"rank": 0.0, "world_size": 1}, RankError, "rank is 0.0"),
    ({"rank": 0, "world_size": "2"}, RankError, "world_size is '2'"),
    ({"rank": 0, "world_size": True}, RankError, "world_size is True"),
    ({"pages": "shared"}, UsageError, "'static' or 'leased'"),
    ({"layout": "rows"}, UsageError, "'slab' or 'page'"),
    ({"num_host_pages": 0}, UsageError, "num_host_pages is 0"),
    ({"num_host_pages": 2.0}, UsageError, "num_host_pages is 2.0"),
    ({"frames_per_page": 0}, UsageError, "frames_per_page is 0"),
    ({"frames_per_page": True}, UsageError, "frames_per_page is True"),
    ({"num_host_pages": 2**70}, UsageError, f"num_host_pages is {2**70}"),
    ({"num_host_pages": (2, 2**70), "pages": "leased", "layout": "page"}, UsageError, "num_host_pages is"),
    ({"frames_per_page": 2**70}, UsageError, f"frames_per_page is {2**70}"),
    ({"rank": 0, "world_size": 2**70}, UsageError, f"world_size is {2**70}"),
    ({"shard": 0}, UsageError, "shard is 0"),
    ({"shard": (0,)}, UsageError, r"shard is \(0,\)"),
]


@pytest.mark.parametrize(("options", "kind", "named"), BAD_OPTIONS)
def test_bad_options_reach_no_daemon(
    daemon: FakeDaemon, options: dict[str, Any], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        SharedHostMirror(make_pool(), _open=daemon.open, **options)
    assert daemon.channels == []


def test_a_pool_that_cannot_be_mirrored_reaches_no_daemon(daemon: FakeDaemon) -> None:
    pool = make_pool()
    pool.v_buffer[0] = pool.v_buffer[0][:-1]
    with pytest.raises(LayoutError, match="'v0'"):
        attach(daemon, pool)
    assert daemon.channels == []


def test_mps_is_refused_before_attach(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MemoryFault("MPS")

    monkeypatch.setattr(attachment, "refuse_mps", refuse)
    with pytest.raises(MemoryFault, match="MPS"):
        attachment.Attachment(daemon.open, None, lambda body: None, {}, (), torch.device("cuda", 0))
    assert daemon.channels == []


def damage_base(reply: dict[str, Any]) -> None:
    reply["planes"][-1][1] += 4 << 20


def damage_stride(reply: dict[str, Any]) -> None:
    reply["planes"][0][2] = 1


def damage_region(reply: dict[str, Any]) -> None:
    reply["planes"][0][0] = 1


def damage_alignment(reply: dict[str, Any]) -> None:
    reply["planes"][0][1] += 2


def damage_count(reply: dict[str, Any]) -> None:
    reply["planes"].pop()


def damage_layout(reply: dict[str, Any]) -> None:
    reply["planes"][0][2] += 16


def damage_sum(reply: dict[str, Any]) -> None:
    reply["regions"][0]["bytes"] += 1


def damage_keys(reply: dict[str, Any]) -> None:
    del reply["pool"]


def damage_extent(reply: dict[str, Any]) -> None:
    reply["regions"][0]["extents"][1][1] = 1 << 40


DAMAGES = [
    damage_base, damage_stride, damage_region, damage_alignment, damage_count, damage_layout, damage_sum, damage_keys
]  # fmt: skip


@pytest.mark.parametrize("damage", [*DAMAGES, damage_extent])
def test_a_damaged_reply_leaves_nothing(daemon: FakeDaemon, damage: Any) -> None:
    daemon.damage = damage
    with pytest.raises(MemoryFault if damage is damage_extent else ProtocolError):
        attach(daemon)
    assert daemon.said("detach") == [{"unmapped": True}]
    assert daemon.channels[0].closed
    assert arena_mappings() == 0


def test_a_refused_attach_closes_the_channel(daemon: FakeDaemon) -> None:
    daemon.failures["attach"] = ArenaFull("1 GiB asked, 1 MiB free")
    with pytest.raises(ArenaFull, match="1 GiB asked"):
        attach(daemon)
    assert [op for op, _ in daemon.calls] == ["attach"]
    assert daemon.channels[0].closed


def test_bad_pairs_copy_nothing(daemon: FakeDaemon) -> None:
    pool = make_pool()
    with attach(daemon, pool) as mirror:
        model = Model(daemon, DevicePool.from_pool(pool))
        for bad in (
            [(0, 1), (6, 2)],
            [(0, 1), (0, 8)],
            [(0, 1), (0, -1)],
            [(0, 1), (2, 1)],
            [(0, 1), (2,)],
            [(0, 1.5)],
        ):
            with pytest.raises(PageError):
                mirror.store_pages(bad)  # type: ignore[arg-type]
        for call in (mirror.load_pages, mirror.load_pages_with_events):
            with pytest.raises(PageError, match="device page 2 twice"):
                call([(2, 1), (2, 3)])
        model.check()


def test_the_null_page_holds_one_of_the_copies(daemon: FakeDaemon) -> None:
    pool = make_pool()
    with attach(daemon, pool) as mirror:
        mirror.store_pages([(1, 0), (2, 0), (3, 4)])
        for tensor, host in mirror.tensor_pairs[:4]:
            held = host[:4].view(torch.uint8)
            assert any(torch.equal(held, tensor[page * 4 : page * 4 + 4].view(torch.uint8)) for page in (1, 2))


def test_after_close(daemon: FakeDaemon) -> None:
    mirror = attach(daemon)
    mirror.close()
    mirror.close()
    assert len(daemon.said("detach")) == 1
    calls: list[Callable[[], object]] = [
        lambda: mirror.store_pages([]),
        lambda: mirror.load_pages([]),
        lambda: mirror.load_pages_with_events([]),
        lambda: mirror.tensor_pairs,
        lambda: mirror.poll(),
        lambda: mirror.__enter__(),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_views_outlive_close_and_their_end_is_reported(daemon: FakeDaemon) -> None:
    mirror = attach(daemon)
    mirror.store_pages([(2, 3)])
    held = mirror.tensor_pairs[0][1][12:16].view(torch.uint8)
    expected = held.clone()
    mirror.close()
    assert daemon.said("detach") == [{"unmapped": False}]
    assert torch.equal(held, expected)
    held.zero_()
    assert not daemon.channels[0].closed
    del held
    deadline = time.monotonic() + 10
    while not daemon.channels[0].closed and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [op for op, _ in daemon.calls[-2:]] == ["detach", "unmapped"]
    assert daemon.channels[0].closed
    for thread in threading.enumerate():
        if thread.name == "sharedmirror-farewell":
            thread.join()


def test_close_survives_a_dead_daemon(daemon: FakeDaemon) -> None:
    mirror = attach(daemon)
    daemon.failures["detach"] = DaemonUnavailable("gone")
    mirror.close()
    assert not daemon.channels[0].closed
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "sharedmirror-farewell"]
    del daemon.failures["detach"]
    thread.join(20)
    assert daemon.channels[0].closed
    assert daemon.said("detach")[-1] == {"unmapped": True}


def test_close_gives_up_where_the_daemon_refuses(daemon: FakeDaemon) -> None:
    mirror = attach(daemon)
    daemon.failures["detach"] = InstanceChanged("another")
    mirror.close()
    assert daemon.channels[0].closed


def test_what_the_end_revokes_is_not_answered(daemon: FakeDaemon) -> None:
    mirror = attach(daemon, pages="leased")
    mirror.store(lease_of(5, 3), [(0, 3)])
    channel = daemon.channels[-1]
    daemon.failures["drained"] = UsageError("this connection may only ask for status")
    with pytest.raises(UsageError):
        channel.push(push="revoked", leases=[5], lease_floor=0)
    mirror.close()
    channel.closed = False
    assert channel.push(push="revoked", leases=[5], lease_floor=0) is None


def test_exit_never_hides_the_users_exception(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryFault("kept")

    with pytest.raises(KeyError, match="mine"), attach(daemon) as mirror:
        place = mirror._attachment
        leave = place.leave
        monkeypatch.setattr(place, "leave", fail)
        raise KeyError("mine")
    leave()
    with pytest.raises(MemoryFault, match="kept"), attach(daemon) as mirror:
        place = mirror._attachment
        leave = place.leave
        monkeypatch.setattr(place, "leave", fail)
    leave()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_after_fork(daemon: FakeDaemon) -> None:
    mirror = attach(daemon)
    pid = os.fork()
    if pid == 0:
        refused = 0
        calls: list[Callable[[], object]] = [
            lambda: mirror.store_pages([]),
            lambda: mirror.load_pages([]),
            lambda: mirror.tensor_pairs,
            lambda: mirror.close(),
            lambda: mirror.poll(),
        ]
        for call in calls:
            try:
                call()
            except ForkedError:
                refused += 1
        os._exit(0 if refused == len(calls) and len(daemon.calls) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    mirror.store_pages([(0, 1)])
    mirror.close()


# -- leased pools --------------------------------------------------------------------------------


def lease_of(number: int, *pages: int, generation: int = 1, pool: int = 1) -> Lease:
    value: Any = Lease(number, pool, pages, (generation,) * len(pages))  # type: ignore[arg-type]
    return pickle.loads(pickle.dumps(value))  # type: ignore[no-any-return]


def hit_of(number: int, *pages: int, pool: int = 1) -> Any:
    return SimpleNamespace(id=number, pool=pool, pages=pages)


class SlowEngine:
    """Wraps an engine so that copies complete when told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.complete = threading.Event()
        self.error: CopyError | None = None
        self.drained = 0

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.complete.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        self.complete.wait(timeout_s)
        return self.done()

    def store(self, device: Ids, frames: Ids, stream: Any) -> SlowEngine:
        self.inner.store(device, frames, stream)
        return self

    def load(self, device: Ids, frames: Ids, stream: Any) -> SlowEngine:
        self.inner.load(device, frames, stream)
        return self

    def load_with_events(self, device: Ids, frames: Ids, stream: Any) -> list[Any]:
        raise NotImplementedError

    def drain(self) -> None:
        self.drained += 1
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.drain()
        self.inner.close()


@pytest.fixture
def leased(daemon: FakeDaemon) -> Iterator[SharedHostMirror]:
    with attach(daemon, pages="leased", layout="page") as mirror:
        yield mirror


@pytest.fixture
def slow(leased: SharedHostMirror) -> SlowEngine:
    engine = SlowEngine(leased._engine)
    leased._engine = engine
    return engine


def test_store_commit_load(daemon: FakeDaemon, leased: SharedHostMirror) -> None:
    model = Model(daemon, leased._pool)
    lease = lease_of(5, 3, 6, 2)
    transfer = leased.store(lease, [(0, 3), (5, 6), (2, 2)])
    transfer.wait(1.0)
    assert transfer.done()
    model.copy([(0, 3), (5, 6), (2, 2)], to_host=True)
    model.check()
    sealed = leased.commit(lease, pages=[3])
    assert sealed is not None
    assert sealed.sealed == (3,)
    leased.commit(lease)
    assert daemon.said("commit") == [{"lease": 5, "pages": [3]}, {"lease": 5, "pages": [2, 6]}]
    wrong: Any
    for wrong, said in (
        (5, "pages must be a sequence of host pages, not 5"),
        (["x"], "a host page must be .* not 'x'"),
    ):
        with pytest.raises(UsageError, match=f"commit: {said}"):
            leased.commit(lease, wrong)
    leased.load(hit_of(9, 3, -1, 6), np.array([[1, 6]])).wait()
    model.copy([(1, 6)], to_host=False)
    model.check()
    whole = lease_of(6, 1, 4)
    leased.store(whole, [(0, 1)])
    with pytest.raises(PageError, match="host page 4 of lease 6 was never stored by this rank"):
        leased.commit(whole)
    leased.store(whole, [(1, 4)])
    leased.commit(whole)
    assert daemon.said("commit")[-1] == {"lease": 6, "pages": None}


def test_frames_of_leased_pages(daemon: FakeDaemon) -> None:
    with attach(daemon, pages="leased", frames_per_page=2) as mirror:
        model = Model(daemon, mirror._pool)
        pairs = [(0, 6), (1, 7), (2, 5)]
        mirror.store(lease_of(1, 2, 3), pairs)
        model.copy(pairs, to_host=True)
        model.check()
        with pytest.raises(PageError, match="host page 4 is not in lease 1"):
            mirror.store(lease_of(1, 2, 3), [(0, 4), (1, 8)])
        with pytest.raises(PageError, match="host page 1 is not in hit 1"):
            mirror.load(hit_of(1, 2), [(0, 3)])
        model.check()


def test_stores_that_are_refused(daemon: FakeDaemon, leased: SharedHostMirror) -> None:
    model = Model(daemon, leased._pool)
    lease = lease_of(5, 3, 6)
    with pytest.raises(PageError, match="host page 4 is not in lease 5"):
        leased.store(lease, [(0, 3), (1, 4)])
    with pytest.raises(PageError, match="host page 0 is not in lease 5"):
        leased.store(lease, [(0, 0)])
    with pytest.raises(PageError, match="host frame 3 twice"):
        leased.store(lease, [(0, 3), (1, 3)])
    with pytest.raises(PageError, match="belongs to pool 2"):
        leased.store(lease_of(5, 3, pool=2), [(0, 3)])
    with pytest.raises(PageError, match="damaged"):
        leased.store(lease_of(8, 99), [(0, 3)])
    leased.store(lease, [(0, 3), (1, 6)])
    model.copy([(0, 3), (1, 6)], to_host=True)
    leased.commit(lease, [3])
    with pytest.raises(PageError, match="host page 3 of lease 5 was committed"):
        leased.store(lease, [(1, 6), (0, 3)])
    with pytest.raises(PageError, match="host page 3 of lease 5 was already committed"):
        leased.commit(lease, [3, 6])
    with pytest.raises(PageError, match="host page 7 is not in lease 5"):
        leased.commit(lease, [7])
    leased.commit(lease)
    # The lease is forgotten now; its pages are not.
    for page in (3, 6):
        with pytest.raises(PageError, match="was committed"):
            leased.store(lease, [(0, page)])
    with pytest.raises(PageError, match="no page left"):
        leased.commit(lease)
    model.check()
    assert leased._ledger is not None
    assert leased._ledger._leases == {}
    leased.store(lease_of(9, 3, generation=2), [(0, 3)])


def test_calls_of_the_other_kind(daemon: FakeDaemon, leased: SharedHostMirror) -> None:
    for raw in (leased.store_pages, leased.load_pages, leased.load_pages_with_events):
        with pytest.raises(WrongPoolKind, match="leased"):
            raw([(0, 1)])
    other = FakeDaemon()
    with attach(other) as static:
        calls: list[Callable[[], object]] = [
            lambda: static.store(lease_of(1, 1), []),
            lambda: static.load(hit_of(1, 1), []),
            lambda: static.commit(lease_of(1, 1)),
            lambda: static.poll(),
        ]
        for call in calls:
            with pytest.raises(WrongPoolKind, match="static"):
                call()
    other.close()


def test_commit_waits_for_this_ranks_copies(daemon: FakeDaemon, leased: SharedHostMirror, slow: SlowEngine) -> None:
    lease = lease_of(5, 3, 6)
    slow.complete.set()
    leased.store(lease, [(1, 6)]).wait(1.0)
    slow.complete.clear()
    transfer = leased.store(lease, [(0, 3)])
    assert not transfer.done()
    with pytest.raises(CallTimeout):
        transfer.wait(0.01)
    with pytest.raises(CallTimeout):
        leased.commit(lease, timeout_s=0.01)
    assert daemon.said("commit") == []
    for wrong in (None, "1", float("nan"), -1.0, 0, 10**20):
        with pytest.raises(UsageError, match="timeout_s must be seconds above 0"):
            leased.commit(lease, timeout_s=wrong)  # type: ignore[arg-type]
    # A commit that did not happen leaves the pages open; one of another page waits for nothing.
    leased.store(lease, [(1, 3)])
    leased.commit(lease, [6], timeout_s=0.01)
    releaser = threading.Timer(0.05, slow.complete.set)
    releaser.start()
    leased.commit(lease)
    assert slow.complete.is_set()
    releaser.join()
    assert daemon.said("commit") == [{"lease": 5, "pages": [6]}, {"lease": 5, "pages": [3]}]


def test_queued_commits_are_sent_by_poll(daemon: FakeDaemon, leased: SharedHostMirror, slow: SlowEngine) -> None:
    lease = lease_of(5, 3, 6)
    leased.store(lease, [(0, 3), (1, 6)])
    assert leased.commit(lease, wait=False) is None
    assert leased.poll().waiting == 1
    with pytest.raises(PageError, match="committed"):
        leased.store(lease, [(0, 3)])
    slow.complete.set()
    daemon.failures["commit"] = DaemonUnavailable("away")
    progress = leased.poll()
    assert (progress.sealed, progress.failed, progress.waiting) == ((), (), 1)
    daemon.failures.clear()
    progress = leased.poll()
    assert [number for number, _ in progress.sealed] == [5]
    assert progress.waiting == 0
    assert leased.poll().sealed == ()
    leased.store(lease_of(6, 1), [(0, 1)])
    leased.commit(lease_of(6, 1), wait=False)
    daemon.failures["commit"] = StaleLease("over")
    ((number, error),) = leased.poll().failed
    assert (number, error.code) == (6, "stale_lease")
    daemon.failures.clear()


def test_close_sends_queued_commits(daemon: FakeDaemon) -> None:
    with attach(daemon, pages="leased") as mirror:
        mirror.store(lease_of(5, 3), [(0, 3)])
        mirror.commit(lease_of(5, 3), wait=False)
    assert [op for op, _ in daemon.calls] == ["attach", "commit", "detach"]


def test_a_device_error_never_commits(daemon: FakeDaemon, leased: SharedHostMirror, slow: SlowEngine) -> None:
    lease = lease_of(5, 3, 6)
    transfer = leased.store(lease, [(0, 3), (1, 6)])
    leased.commit(lease, [3], wait=False)
    slow.error = CopyError("illegal address")
    for call in (transfer.done, transfer.wait, lambda: leased.commit(lease, [3])):
        with pytest.raises(CopyError, match="illegal address"):
            call()
    assert [error.code for _, error in leased.poll().failed] == ["copy"]
    slow.error = None
    # Once failed, always failed: and the lease is never reported as drained.
    with pytest.raises(CopyError):
        leased.commit(lease)
    assert daemon.channels[0].push(push="revoked", leases=[5], lease_floor=0) is not None
    assert daemon.said("commit") == daemon.said("drained") == []


def test_an_engine_that_refuses_the_work(
    leased: SharedHostMirror, slow: SlowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UsageError("the stream belongs to another device")

    def fail(*_: Any) -> Any:
        raise RuntimeError("half of it was submitted")

    lease = lease_of(5, 3, 6)
    monkeypatch.setattr(slow, "store", refuse)
    with pytest.raises(UsageError, match="another device"):
        leased.store(lease, [(0, 3)])
    leased.commit(lease, [3])
    monkeypatch.setattr(slow, "store", fail)
    with pytest.raises(RuntimeError, match="half"):
        leased.store(lease, [(0, 6)])
    with pytest.raises(CopyError, match="half"):
        leased.commit(lease)


def test_a_failed_drain_keeps_everything_attached(daemon: FakeDaemon) -> None:
    mirror = attach(daemon)
    engine = SlowEngine(mirror._engine)
    engine.error = CopyError("lost device")
    mirror._engine = engine
    with pytest.raises(CopyError, match="lost device"):
        mirror.close()
    assert daemon.said("detach") == []
    assert not daemon.channels[0].closed
    assert arena_mappings() > 0
    place = attachment._ABANDONED.pop()
    assert isinstance(place, attachment.Attachment)
    mirror._pairs = ()
    engine.inner.close()
    place.leave()


def test_revoked_while_copying(daemon: FakeDaemon, leased: SharedHostMirror, slow: SlowEngine) -> None:
    channel = daemon.channels[0]
    lease = lease_of(5, 3, 6)
    leased.store(lease, [(0, 3)])
    assert channel.push(push="revoked", leases=[5], lease_floor=0) is not None
    assert daemon.said("drained") == []
    with pytest.raises(StaleLease, match="lease 5 is over"):
        leased.store(lease, [(0, 6)])
    with pytest.raises(StaleLease):
        leased.commit(lease)
    slow.complete.set()
    assert channel.then is not None
    assert channel.then() is None
    assert daemon.said("drained") == [{"leases": [5], "hits": []}]
    assert channel.then() is None
    assert len(daemon.said("drained")) == 1
    with pytest.raises(StaleLease):
        leased.store(lease, [(0, 6)])
    # Even when its number is forgotten, its pages and generations are known to be over.
    channel.push(push="revoked", leases=[], lease_floor=5)
    with pytest.raises(StaleLease):
        leased.store(lease, [(0, 6)])
    leased.store(lease_of(7, 6, generation=2), [(0, 6)])
    assert leased.poll().revoked == (5,)
    assert leased.poll().revoked == ()


def test_revoked_before_it_was_opened(daemon: FakeDaemon, leased: SharedHostMirror) -> None:
    channel = daemon.channels[0]
    assert channel.push(push="revoked", leases=[8, 9], lease_floor=0) is None
    assert daemon.said("drained") == [{"leases": [8, 9], "hits": []}]
    channel.push(push="revoked", leases=[], lease_floor=9)
    assert leased._ledger is not None
    assert leased._ledger._revoked == {9}
    for number in (2, 8, 9):
        with pytest.raises(StaleLease):
            leased.store(lease_of(number, 3), [(0, 3)])
    leased.store(lease_of(10, 3), [(0, 3)])


def test_open_leases_below_the_floor_go_on(daemon: FakeDaemon, leased: SharedHostMirror) -> None:
    lease = lease_of(5, 3, 6)
    leased.store(lease, [(0, 3)])
    daemon.channels[0].push(push="revoked", leases=[7], lease_floor=8)
    leased.store(lease, [(0, 6)])
    leased.commit(lease)


def test_an_answer_that_got_lost_is_given_again(daemon: FakeDaemon, leased: SharedHostMirror) -> None:
    channel = daemon.channels[0]
    daemon.failures["drained"] = CallTimeout("late")
    with pytest.raises(CallTimeout):
        channel.push(push="revoked", leases=[8], lease_floor=0)
    daemon.failures.clear()
    assert channel.then is not None
    channel.then()
    assert daemon.said("drained") == [{"leases": [8], "hits": []}] * 2


def test_revoked_pages(daemon: FakeDaemon, leased: SharedHostMirror, slow: SlowEngine) -> None:
    channel = daemon.channels[0]
    lease = lease_of(5, 3, 6, 2)
    leased.store(lease, [(0, 3)])
    assert channel.push(push="revoked_pages", lease=5, pages=[3]) is not None
    with pytest.raises(StaleLease, match="host page 3 of lease 5 was revoked"):
        leased.store(lease, [(0, 3)])
    with pytest.raises(StaleLease, match="host page 3"):
        leased.commit(lease, [3])
    leased.store(lease, [(0, 6), (1, 2)])
    slow.complete.set()
    assert channel.then is not None
    assert channel.then() is None
    assert daemon.said("drained") == [{"leases": [], "hits": [], "pages": [[5, [3]]]}]
    leased.commit(lease)
    assert daemon.said("commit") == [{"lease": 5, "pages": [2, 6]}]
    # Of a lease that this rank has not opened yet, too.
    assert channel.push(push="revoked_pages", lease=8, pages=[4]) is None
    with pytest.raises(StaleLease, match="host page 4 of lease 8"):
        leased.store(lease_of(8, 4, 7), [(0, 4)])
    leased.store(lease_of(8, 4, 7), [(0, 7)])


def test_released_hits(daemon: FakeDaemon, leased: SharedHostMirror, slow: SlowEngine) -> None:
    channel = daemon.channels[0]
    with pytest.raises(PageError, match="host page 4 is not in hit 9"):
        leased.load(hit_of(9, 3, -1), [(0, 4)])
    with pytest.raises(PageError, match="belongs to pool 3"):
        leased.load(hit_of(9, 3, pool=3), [(0, 3)])
    leased.load(hit_of(9, 3, -1), [(0, 3)])
    assert channel.push(push="released", hits=[9, 11], hit_floor=0) is not None
    assert daemon.said("drained") == [{"leases": [], "hits": [11]}]
    for number in (9, 11):
        with pytest.raises(StaleLease, match="was released"):
            leased.load(hit_of(number, 3), [(1, 3)])
    slow.complete.set()
    assert channel.then is not None
    assert channel.then() is None
    assert daemon.said("drained")[-1] == {"leases": [], "hits": [9]}
    channel.push(push="released", hits=[], hit_floor=12)
    assert leased._ledger is not None
    assert (leased._ledger._released, leased._ledger._hits) == (set(), {})
    for number in (4, 9, 11):
        with pytest.raises(StaleLease):
            leased.load(hit_of(number, 3), [(1, 3)])
    leased.load(hit_of(12, 3), [(1, 3)])


def test_a_static_pool_that_is_taken_back(daemon: FakeDaemon) -> None:
    with attach(daemon) as mirror:
        engine = SlowEngine(mirror._engine)
        mirror._engine = engine
        daemon.channels[0].push(push="revoked", leases=[1], lease_floor=0)
        assert engine.drained == 1
        assert daemon.said("drained") == [{"leases": [1], "hits": []}]
        with pytest.raises(StaleLease, match="took this static pool back"):
            mirror.store_pages([(0, 1)])


def test_pushes_that_come_before_the_mirror_is_ready(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    build = geometry.build_geometry

    def early(*arguments: Any) -> Any:
        daemon.channels[0].on_push({"push": "revoked", "leases": [4], "lease_floor": 0})
        return build(*arguments)

    monkeypatch.setattr(mirror_module, "build_geometry", early)
    with attach(daemon, pages="leased") as mirror:
        assert daemon.said("drained") == [{"leases": [4], "hits": []}]
        with pytest.raises(StaleLease):
            mirror.store(lease_of(4, 1), [(0, 1)])


def test_many_threads(daemon: FakeDaemon) -> None:
    failures: list[BaseException] = []

    with attach(daemon, count=64, pages="leased", layout="page") as mirror:

        def work(number: int) -> None:
            try:
                for turn in range(10):
                    pages = [1 + number * 8 + i for i in range(6)]
                    lease = lease_of(100 * number + turn + 1, *pages, generation=turn + 1)
                    mirror.store(lease, list(zip(range(6), pages, strict=True)))
                    mirror.commit(lease, wait=bool(turn % 2))
                    mirror.poll()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        while mirror.poll().waiting:
            pass
        assert len(daemon.said("commit")) == 60
        for tensor, host in mirror.tensor_pairs[:4]:
            for number in range(6):
                mine = host[1 + number * 8 : 7 + number * 8].reshape(tensor.shape)
                assert torch.equal(mine.view(torch.uint8), tensor.view(torch.uint8))
