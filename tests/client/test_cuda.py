"""The CUDA side on a real device: order on streams, events, registration. Skipped without one."""

from __future__ import annotations

import gc
import glob
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sharedmirror import registration
from sharedmirror.errors import CallTimeout, MemoryFault, UsageError
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import Lease
from tests.client.fake_channel import FakeDaemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, DEVICE_PAGES, LAYERS = 4, 12, 3
LONG_CYCLES = 200_000_000
"""A tenth of a second: far longer than the copies it must hold back."""


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    fake = FakeDaemon()
    yield fake
    gc.collect()
    fake.close()


def make_pool(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", row: tuple[int, ...] = (3, 5)) -> Any:
    def rows(count: int, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        data = torch.randint(0, 256, (count, size), dtype=torch.uint8, device=device)
        return data.view(dtype).view(count, *shape)

    return SimpleNamespace(
        page_size=PAGE,
        k_buffer=[rows(DEVICE_PAGES * PAGE, *row) for _ in range(LAYERS)],
        v_buffer=[rows(DEVICE_PAGES * PAGE, *row) for _ in range(LAYERS)],
    )


def attach(daemon: FakeDaemon, pool: Any, **options: Any) -> SharedHostMirror:
    mirror = SharedHostMirror(pool, 16, _open=daemon.open, **options)
    assert mirror._engine.wait_for_kernels()  # type: ignore[attr-defined]
    return mirror


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8).cpu().reshape(-1)


def host_page(mirror: SharedHostMirror, plane: int, frame: int) -> torch.Tensor:
    host, span = mirror.tensor_pairs[plane][1], mirror.row_spans[plane]
    return as_bytes(host[frame] if mirror._layout.value == "page" else host[frame * span : (frame + 1) * span])


def device_page(mirror: SharedHostMirror, plane: int, page: int) -> torch.Tensor:
    span = mirror.row_spans[plane]
    return as_bytes(mirror.tensor_pairs[plane][0][page * span : (page + 1) * span])


def streams() -> list[Any]:
    return [None, "default", "side"]


def stream_of(name: str | None) -> Any:
    return {"default": torch.cuda.default_stream, "side": torch.cuda.Stream}[name]() if name else None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", ["slab", "page"])
@pytest.mark.parametrize("name", streams())
def test_round_trip_is_exact(daemon: FakeDaemon, dtype: torch.dtype, layout: str, name: str | None) -> None:
    pool = make_pool(dtype)
    with attach(daemon, pool, layout=layout) as mirror:
        before = daemon.region()
        pairs = [(3, 9), (4, 10), (5, 11), (0, 2), (11, 15)]
        mirror.store_pages(pairs, stream_of(name))
        torch.cuda.synchronize()
        touched = 0
        for plane in range(2 * LAYERS):
            for page, frame in pairs:
                assert torch.equal(host_page(mirror, plane, frame), device_page(mirror, plane, page))
                touched += len(host_page(mirror, plane, frame))
        assert 0 < np.count_nonzero(daemon.region() != before) <= touched
        saved = [tensor.clone() for tensor, _ in mirror.tensor_pairs]
        for tensor, _ in mirror.tensor_pairs:
            tensor.view(torch.uint8).zero_()
        mirror.load_pages(pairs, stream_of(name))
        torch.cuda.synchronize()
        for plane, old in enumerate(saved):
            tensor = mirror.tensor_pairs[plane][0]
            for page in range(DEVICE_PAGES):
                rows = slice(page * PAGE, (page + 1) * PAGE)
                expected = old[rows] if page in dict(pairs) else torch.zeros_like(old[rows].view(torch.uint8))
                assert torch.equal(as_bytes(tensor[rows]), as_bytes(expected))


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("layout", ["slab", "page"])
def test_copies_keep_their_place_on_the_stream(daemon: FakeDaemon, name: str | None, layout: str) -> None:
    pool = make_pool(torch.uint8)
    with attach(daemon, pool, layout=layout) as mirror:
        stream = stream_of(name) or torch.cuda.current_stream()
        tensor = pool.k_buffer[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            tensor.fill_(1)
            torch.cuda._sleep(LONG_CYCLES)
            tensor.fill_(2)
            mirror.store_pages([(1, 3), (2, 4), (7, 5)], stream if name else None)
            tensor.fill_(3)
            torch.cuda._sleep(LONG_CYCLES)
            mirror.load_pages([(9, 4)], stream if name else None)
            seen = tensor[9 * PAGE : 10 * PAGE].clone()
        assert not stream.query()
        stream.synchronize()
        assert all(host_page(mirror, 0, frame).unique().tolist() == [2] for frame in (3, 4, 5))
        assert seen.unique().tolist() == [2]
        assert device_page(mirror, 0, 1).unique().tolist() == [3]


def test_events_fence_layers(daemon: FakeDaemon) -> None:
    pool = make_pool(torch.uint8)
    with attach(daemon, pool) as mirror:
        mirror.store_pages([(page, page) for page in range(DEVICE_PAGES)])
        torch.cuda.synchronize()
        expected = [as_bytes(tensor) for tensor, _ in mirror.tensor_pairs]
        for tensor, _ in mirror.tensor_pairs:
            tensor.zero_()
        stream, reader = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_CYCLES)
        events = mirror.load_pages_with_events([(page, page) for page in range(DEVICE_PAGES)], stream)
        assert len(events) == 2 * LAYERS
        assert all(isinstance(event, torch.cuda.Event) and not event.query() for event in events)
        copies = []
        for layer in range(LAYERS):
            k = mirror.tensor_index_of_layer(layer)
            v = k + mirror.num_k_tensors
            events[v].wait(reader)
            with torch.cuda.stream(reader):
                copies += [(plane, mirror.tensor_pairs[plane][0].clone()) for plane in (k, v)]
        reader.synchronize()
        assert all(torch.equal(as_bytes(copy), expected[plane]) for plane, copy in copies)
        events[-1].synchronize()
        assert all(event.query() for event in events)
        again = mirror.load_pages_with_events([(0, 0)], stream)
        assert not set(map(id, events)) & set(map(id, again))


def test_registered_in_chunks_and_let_go(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "CHUNK_BYTES", 2 << 20)
    pool = SimpleNamespace(
        page_size=PAGE,
        k_buffer=[torch.randint(0, 255, (8 * PAGE, 99991), dtype=torch.uint8, device="cuda")],
        v_buffer=[torch.randint(0, 255, (8 * PAGE, 3), dtype=torch.uint8, device="cuda")],
    )
    for layout in ("slab", "page"):
        with attach(daemon, pool, layout=layout) as mirror:
            assert len(mirror._attachment.host_edges) >= 2
            host = mirror.tensor_pairs[0][1]
            assert host.is_pinned()
            pairs = [(page, page + 3) for page in range(8)]
            mirror.store_pages(pairs)
            kept = pool.k_buffer[0].clone()
            pool.k_buffer[0].zero_()
            mirror.load_pages(pairs)
            torch.cuda.synchronize()
            assert torch.equal(kept, pool.k_buffer[0])
        assert not host.is_pinned()
        assert host.view(torch.uint8).flatten()[0] >= 0
        del host


def test_a_failed_registration_leaves_nothing(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    first = registration.HostRegistration._call
    calls = []

    def fail_first(self: Any, name: str, *arguments: Any) -> Any:
        calls.append(name)
        if calls.count("cuMemHostRegister") == 1 and name == "cuMemHostRegister":
            return first(self, name, 0, 0, 0)  # the driver's own refusal
        return first(self, name, *arguments)

    monkeypatch.setattr(registration, "CHUNK_BYTES", 2 << 20)
    monkeypatch.setattr(registration.HostRegistration, "_call", fail_first)
    with pytest.raises(MemoryFault, match="cuMemHostRegister failed with CUDA_ERROR_"):
        attach(daemon, make_pool())
    assert daemon.said("detach") == [{"unmapped": True}]
    monkeypatch.undo()
    torch.cuda.synchronize()  # no error is left pending
    attach(daemon, make_pool()).close()


def test_transfers_complete_with_their_copies(daemon: FakeDaemon) -> None:
    with attach(daemon, make_pool(), pages="leased", layout="page") as mirror:
        lease: Any = Lease(1, 1, (3,), (1,))  # type: ignore[arg-type]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_CYCLES)
        transfer = mirror.store(lease, [(0, 3)], stream)
        assert not transfer.done()
        with pytest.raises(CallTimeout):
            transfer.wait(0.001)
        with pytest.raises(CallTimeout):
            mirror.commit(lease, timeout_s=0.001)
        mirror.commit(lease, wait=False)
        assert mirror.poll().waiting == 1
        transfer.wait(10)
        assert transfer.done()
        assert len(mirror.poll().sealed) == 1


def test_close_drains(daemon: FakeDaemon) -> None:
    pool = make_pool(torch.uint8)
    mirror = attach(daemon, pool)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
    mirror.store_pages([(0, 1)], stream)
    held = mirror.tensor_pairs[0][1]
    mirror.close()
    assert stream.query()
    assert torch.equal(held[PAGE : 2 * PAGE], pool.k_buffer[0][:PAGE].cpu())


def test_streams_that_are_none(daemon: FakeDaemon) -> None:
    with attach(daemon, make_pool()) as mirror:
        with pytest.raises(UsageError, match="torch.cuda.Stream"):
            mirror.store_pages([(0, 1)], 7)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_is_current(daemon: FakeDaemon) -> None:
    pool = make_pool(torch.uint8, device="cuda:1")
    with torch.cuda.device(0), attach(daemon, pool) as mirror:
        mirror.store_pages([(1, 3)])
        mirror.load_pages([(2, 3)], torch.cuda.Stream(device=1))
        torch.cuda.synchronize(1)
        assert torch.equal(device_page(mirror, 0, 1), device_page(mirror, 0, 2))
        with pytest.raises(UsageError, match="the stream belongs to cuda:0 and the pool to cuda:1"):
            mirror.store_pages([(0, 1)], torch.cuda.Stream(device=0))
        assert torch.cuda.current_device() == 0


def test_a_load_from_two_threads(daemon: FakeDaemon) -> None:
    from threading import Thread

    pool = make_pool(torch.uint8)
    with attach(daemon, pool) as mirror:
        expected = [as_bytes(tensor) for tensor, _ in mirror.tensor_pairs]
        mirror.store_pages([(page, page) for page in range(DEVICE_PAGES)])
        torch.cuda.synchronize()
        for tensor, _ in mirror.tensor_pairs:
            tensor.zero_()
        torch.cuda.synchronize()

        def load(part: int) -> None:
            mirror.load_pages([(page, page) for page in range(part, DEVICE_PAGES, 2)], torch.cuda.Stream())

        threads = [Thread(target=load, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert all(torch.equal(as_bytes(mirror.tensor_pairs[i][0]), expected[i]) for i in range(2 * LAYERS))


def test_the_node_of_this_machines_gpu() -> None:
    found: Any = torch.cuda.get_device_properties(0)
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    (path,) = glob.glob(f"/sys/bus/pci/devices/{place}/numa_node") or [""]
    if not path:
        pytest.skip(f"this machine shows no /sys/bus/pci/devices/{place}/numa_node")
    with open(path) as file:
        node = int(file.read())
    assert registration.device_node(torch.device("cuda", 0)) == (node if node >= 0 else None)
