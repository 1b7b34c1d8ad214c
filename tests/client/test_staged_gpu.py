"""The staged engine on a GPU: every byte against the reference engine, and the order of copies.

Run by ``scripts/test-gpu``. A kernel that sleeps on the device makes a missing wait visible: without it, the
copy would be over long before the data is written, or would still read what comes later.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharedmirror.copies import lane as lane_module
from sharedmirror.copies import plan as plan_module
from sharedmirror.copies.interface import Geometry, PlaneGeometry
from sharedmirror.copies.reference import ReferenceEngine
from sharedmirror.errors import ClosedError, CopyError, UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

SLEEP_CYCLES = 200_000_000
"""About a tenth of a second."""
SIZES = (1, 2, 3, 8, 12, 16, 48, 100, 256, 1000, 4096, 5000, 16384, 20480, 70001, 300000)
ROUTES = ("direct", "plain", "staged")


def engine_of(geometry: Geometry, **options: Any) -> Any:
    from sharedmirror.copies.staged import StagedEngine

    engine = StagedEngine(geometry, **options)
    assert engine.wait_for_kernels()
    return engine


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return force(request.param, monkeypatch)


def force(route: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plan_module, "SMALL_BYTES", 1 << 40 if route == "direct" else -1)
    monkeypatch.setattr(plan_module, "PLAIN_BYTES", 0 if route == "plain" else 1 << 60)
    return route


def build(
    sizes: list[int], *, layout: str = "page", pages: int = 8, frames: int = 8, gap: int = 0, shift: int = 0,
    device: str = "cuda:0", seed: int = 0,
) -> Geometry:  # fmt: skip
    """Return planes in random bytes: ``gap`` bytes behind every slice on the device, ``shift`` before the first."""
    generator = torch.Generator().manual_seed(seed)
    padded = [-(-size // 16) * 16 for size in sizes]
    host = torch.empty(frames * sum(padded) + 16 * len(sizes) + 64, dtype=torch.uint8, pin_memory=True)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8, generator=generator))
    planes, start = [], 16
    for number, (size, room) in enumerate(zip(sizes, padded, strict=True)):
        bytes_ = torch.randint(0, 256, (shift + pages * (size + gap) + 64,), dtype=torch.uint8, generator=generator)
        on_device = bytes_.to(device)
        stride = size if layout == "slab" else sum(padded)
        planes.append(
            PlaneGeometry(
                f"plane{number}",
                torch.as_strided(on_device, (pages, size), (size + gap, 1), shift),
                torch.as_strided(host, (frames, size), (stride, 1), start),
            )
        )
        start += room if layout == "page" else -(-frames * size // 16) * 16
    order = tuple(plane for half in range(2) for plane in range(half, len(sizes), 2))
    after = [0] * len(sizes)
    for position, plane in enumerate(order, start=1):
        after[plane] = position
    after[-1] = len(order)
    return Geometry(tuple(planes), torch.device(device), order, tuple(after))


def everything(geometry: Geometry) -> list[torch.Tensor]:
    """Return all bytes of both sides, those between the slices too, on the CPU."""
    torch.cuda.synchronize(geometry.device)
    return [memory.to("cpu", copy=True) for memory in memories(geometry)]


def memories(geometry: Geometry) -> list[torch.Tensor]:
    tensors = [geometry.planes[0].host, *(plane.device for plane in geometry.planes)]
    return [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage()) for each in tensors]


def restore(geometry: Geometry, bytes_: list[torch.Tensor]) -> None:
    for memory, saved in zip(memories(geometry), bytes_, strict=True):
        memory.copy_(saved)
    torch.cuda.synchronize(geometry.device)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_byte_is_as_the_reference_leaves_it(data: st.DataObject, route: str) -> None:
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=6))
    if data.draw(st.booleans()):
        sizes = sizes[:1] * 6
    pages, frames = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    geometry = build(
        sizes,
        layout=data.draw(st.sampled_from(("slab", "page"))),
        pages=pages,
        frames=frames,
        gap=data.draw(st.sampled_from((0, 0, 16, 5))),
        shift=data.draw(st.sampled_from((0, 0, 4, 1))),
        seed=data.draw(st.integers(0, 1000)),
    )
    many = min(pages, frames)
    device_pages = ids(*data.draw(st.permutations(range(pages)))[:many])
    host_frames = ids(*data.draw(st.permutations(range(frames)))[:many])
    before = everything(geometry)
    engine = engine_of(geometry, slot_bytes=data.draw(st.sampled_from((128 << 10, 1 << 20))))
    reference = ReferenceEngine(geometry)
    for call in ("store", "load", "load_with_events"):
        getattr(reference, call)(device_pages, host_frames, None)
        wanted = everything(geometry)
        restore(geometry, before)
        getattr(engine, call)(device_pages, host_frames, torch.cuda.Stream())
        engine.drain()
        assert same(everything(geometry), wanted), f"{call} differs"
        restore(geometry, before)
    engine.close()


STREAMS: dict[str, Callable[[], torch.cuda.Stream]] = {
    "own": lambda: torch.cuda.Stream(),
    "legacy": lambda: torch.cuda.default_stream(),
}


@pytest.fixture(params=sorted(STREAMS))
def stream(request: pytest.FixtureRequest) -> torch.cuda.Stream:
    return STREAMS[request.param]()


@pytest.fixture(params=("page", "slab"))
def pair(request: pytest.FixtureRequest, route: str) -> Iterator[tuple[Geometry, Any]]:
    geometry = build([32768] * 16 + [1000], layout=request.param, pages=32, frames=32)
    engine = engine_of(geometry, slot_bytes=1 << 20)
    yield geometry, engine
    engine.close()


PAGES = np.random.default_rng(5).permutation(32)[:24].astype(np.int64)
FRAMES = np.random.default_rng(6).permutation(32)[:24].astype(np.int64)


def test_a_store_waits_for_the_kernels_before_it(pair: tuple[Geometry, Any], stream: torch.cuda.Stream) -> None:
    geometry, engine = pair
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for plane in geometry.planes:
            plane.device.fill_(7)
        completion = engine.store(PAGES, FRAMES, stream)
        assert not completion.done(), "the call waited for the device"
    assert completion.wait(60)
    assert all(bool((plane.host[torch.from_numpy(FRAMES)] == 7).all()) for plane in geometry.planes)


def test_kernels_after_a_store_wait_for_it(pair: tuple[Geometry, Any], stream: torch.cuda.Stream) -> None:
    geometry, engine = pair
    wanted = [plane.device.cpu() for plane in geometry.planes]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        engine.store(PAGES, FRAMES, stream)
        for plane in geometry.planes:
            plane.device.fill_(9)
    torch.cuda.synchronize()
    for plane, before in zip(geometry.planes, wanted, strict=True):
        assert torch.equal(plane.host[torch.from_numpy(FRAMES)], before[torch.from_numpy(PAGES)])


def test_a_load_waits_for_the_kernels_before_it(pair: tuple[Geometry, Any], stream: torch.cuda.Stream) -> None:
    geometry, engine = pair
    wanted = [plane.device.cpu() for plane in geometry.planes]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        read = [plane.device.clone() for plane in geometry.planes]
        completion = engine.load(PAGES, FRAMES, stream)
        assert not completion.done(), "the call waited for the device"
    torch.cuda.synchronize()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(read, wanted, strict=True))


@pytest.mark.parametrize("call", ["load", "load_with_events"])
def test_kernels_after_a_load_wait_for_it(pair: tuple[Geometry, Any], stream: torch.cuda.Stream, call: str) -> None:
    geometry, engine = pair
    pages, frames = torch.from_numpy(PAGES), torch.from_numpy(FRAMES)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        getattr(engine, call)(PAGES, FRAMES, stream)
        read = [plane.device.clone() for plane in geometry.planes]
    torch.cuda.synchronize()
    assert all(torch.equal(r.cpu()[pages], p.host[frames]) for r, p in zip(read, geometry.planes, strict=True))


def test_a_load_reads_what_the_store_before_it_wrote(pair: tuple[Geometry, Any], stream: torch.cuda.Stream) -> None:
    geometry, engine = pair
    wanted = [plane.device.cpu()[torch.from_numpy(PAGES)] for plane in geometry.planes]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        engine.store(PAGES, FRAMES, stream)
        for plane in geometry.planes:
            plane.device.zero_()
        engine.load(PAGES[::-1].copy(), FRAMES[::-1].copy(), stream)
    torch.cuda.synchronize()
    for plane, before in zip(geometry.planes, wanted, strict=True):
        assert torch.equal(plane.device.cpu()[torch.from_numpy(PAGES)], before)


def test_an_event_covers_its_plane_and_all_that_were_promised(route: str) -> None:
    geometry = build([65536] * 32, pages=64, frames=64)
    engine = engine_of(geometry)
    pages = np.arange(64, dtype=np.int64)
    events = engine.load_with_events(pages, pages[::-1].copy(), torch.cuda.Stream())
    seen = []
    for event, after in zip(events, geometry.event_after, strict=True):
        watcher = torch.cuda.Stream()
        event.wait(watcher)
        with torch.cuda.stream(watcher):
            seen.append([(plane, geometry.planes[plane].device.clone()) for plane in geometry.order[:after]])
    events[-1].synchronize()
    last = [plane.device.clone() for plane in geometry.planes]
    torch.cuda.synchronize()
    assert len(events) == len(geometry.planes)
    for plane, held in (each for planes in seen for each in planes):
        assert torch.equal(held.cpu(), geometry.planes[plane].host.flip(0)), f"plane {plane} came after its event"
    assert all(torch.equal(a.cpu(), p.host.flip(0)) for a, p in zip(last, geometry.planes, strict=True))
    engine.close()


def test_two_streams_and_both_directions_at_once(route: str) -> None:
    geometry = build([32768] * 16, pages=64, frames=64)
    engine = engine_of(geometry, slot_bytes=1 << 20)
    device, host = everything(geometry)[1:], [plane.host.clone() for plane in geometry.planes]
    streams = [torch.cuda.Stream() for _ in range(4)]
    for step in range(8):
        out = np.arange(4 * step, 4 * step + 4, dtype=np.int64)
        back = out + 32
        engine.store(out, out[::-1].copy(), streams[step % 2])
        engine.load(back, back[::-1].copy(), streams[2 + step % 2])
    engine.drain()
    turned = torch.arange(64).view(16, 4).flip(1).reshape(-1)
    for number, plane in enumerate(geometry.planes):
        before = device[number][: plane.device.numel()].view(64, -1)
        assert torch.equal(plane.host[:32], before[turned[:32]])
        assert torch.equal(plane.device[32:].cpu(), host[number][turned[32:]])
    engine.close()


def test_two_engines_in_one_process_and_calls_from_new_threads(route: str) -> None:
    geometries = [build([8192] * 8, layout=layout, seed=seed) for seed, layout in enumerate(("page", "slab"))]
    engines = [engine_of(geometry, slot_bytes=128 << 10) for geometry in geometries]
    pages, problems = np.arange(8, dtype=np.int64), []

    def work(engine: Any) -> None:
        try:
            for _ in range(50):
                engine.store(pages, pages[::-1].copy(), None).wait(60)
                engine.load(pages, pages[::-1].copy(), None).wait(60)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for geometry, engine in zip(geometries, engines, strict=True):
        assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in geometry.planes)
        engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_pool_is_on_another_device_than_the_current_one(route: str) -> None:
    geometry = build([8192] * 8, device="cuda:1")
    pages = np.arange(8, dtype=np.int64)
    with torch.cuda.device(0):
        engine = engine_of(geometry, slot_bytes=128 << 10)
        engine.store(pages, pages[::-1].copy(), None).wait(60)
        assert torch.cuda.current_device() == 0
        assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in geometry.planes)
        with pytest.raises(UsageError, match="belongs to"):
            engine.store(pages, pages, torch.cuda.Stream(device=0))
        engine.close()


def test_close_waits_for_what_is_under_way(route: str) -> None:
    geometry = build([65536] * 16, pages=16, frames=16)
    wanted = [plane.device.cpu() for plane in geometry.planes]
    engine, pages = engine_of(geometry, slot_bytes=1 << 20), np.arange(16, dtype=np.int64)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        completion = engine.store(pages, pages, None)
        engine.close()
    assert completion.done()
    assert all(torch.equal(plane.host, before) for plane, before in zip(geometry.planes, wanted, strict=True))
    with pytest.raises(ClosedError):
        engine.store(pages, pages, None)
    engine.close()


def test_an_engine_that_is_dropped_finishes_its_copies(route: str) -> None:
    geometry = build([65536] * 16, pages=16, frames=16)
    wanted = [plane.device.cpu() for plane in geometry.planes]
    engine, pages = engine_of(geometry, slot_bytes=1 << 20), np.arange(16, dtype=np.int64)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        completion = engine.store(pages, pages, None)
    del engine
    junk = [torch.full((1 << 20,), 3, dtype=torch.uint8, device="cuda:0") for _ in range(16)]
    assert completion.wait(60)
    assert len(junk) == 16
    assert all(torch.equal(plane.host, before) for plane, before in zip(geometry.planes, wanted, strict=True))


def test_page_ids_of_a_call_under_way_are_not_overwritten(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "ID_ROOM", 64)
    geometry = build([16384] * 4, pages=32, frames=32)
    engine, pages = engine_of(geometry, slot_bytes=128 << 10), np.arange(32, dtype=np.int64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    for start in list(range(0, 32, 8)) * 3:
        engine.store(pages[start : start + 8], 31 - pages[start : start + 8], stream)
    engine.drain()
    assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in geometry.planes)
    engine.close()


def test_more_pages_than_the_id_room_are_cut_into_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharedmirror.copies import staged

    force("staged", monkeypatch)
    monkeypatch.setattr(staged, "MAX_PAGES", 5)
    geometry = build([16384] * 4, pages=32, frames=32)
    engine, pages = engine_of(geometry, slot_bytes=128 << 10), np.arange(32, dtype=np.int64)
    engine.store(pages, 31 - pages, None).wait(60)
    assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in geometry.planes)
    for plane in geometry.planes:
        plane.device.zero_()
    for event in engine.load_with_events(pages, pages, torch.cuda.Stream()):
        event.synchronize()
    assert all(torch.equal(plane.host, plane.device.cpu()) for plane in geometry.planes)
    engine.close()


def test_a_refused_launch_is_a_copy_error_and_nothing_stays_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharedmirror.copies.driver import Driver

    force("staged", monkeypatch)
    geometry = build([65536] * 16, pages=32, frames=32)
    engine, pages = engine_of(geometry, slot_bytes=1 << 20), np.arange(32, dtype=np.int64)
    launch, launches = Driver.launch, []

    def refuse(self: Driver, kernel: Any, shape: int, arguments: int) -> None:
        launches.append(shape)
        if len(launches) == 4:
            raise CopyError("refused")
        launch(self, kernel, shape, arguments)

    monkeypatch.setattr(Driver, "launch", refuse)
    with pytest.raises(CopyError):
        engine.store(pages, pages, None)
    before = everything(geometry)[0]
    torch.cuda.synchronize()
    assert torch.equal(everything(geometry)[0], before)
    monkeypatch.setattr(Driver, "launch", launch)
    engine.store(pages, 31 - pages, None).wait(60)
    assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in geometry.planes)
    engine.close()


def test_copies_keep_to_one_registration(route: str) -> None:
    size, frames = 1 << 20, 8
    memory = mmap.mmap(-1, size)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    edge = host.data_ptr() + 5 * 4096
    parts = ((host.data_ptr(), 5 * 4096), (edge, size - 5 * 4096))
    for part in parts:
        assert int(runtime.cudaHostRegister(*part, 3)) == 0
    host.fill_(1)
    planes = tuple(
        PlaneGeometry(
            f"plane{number}",
            torch.randint(0, 256, (frames, 6000), dtype=torch.uint8, device="cuda:0"),
            torch.as_strided(host, (frames, 6000), (4 * 6000, 1), number * 6000),
        )
        for number in range(4)
    )
    geometry = Geometry(planes, torch.device("cuda:0"), (0, 1, 2, 3), (1, 2, 3, 4), (edge,))
    engine, pages = engine_of(geometry, slot_bytes=128 << 10), np.arange(frames, dtype=np.int64)
    engine.store(pages, pages[::-1].copy(), None).wait(60)
    assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in planes)
    for plane in planes:
        plane.device.zero_()
    engine.load(pages, pages[::-1].copy(), None).wait(60)
    assert all(torch.equal(plane.host, plane.device.cpu().flip(0)) for plane in planes)
    engine.close()
    for start, _ in parts:
        assert int(runtime.cudaHostUnregister(start)) == 0


def test_offsets_beyond_32_bits(route: str) -> None:
    size, pages = 1 << 20, 4200
    device = torch.empty((pages, size), dtype=torch.uint8, device="cuda:0")
    host = torch.empty((pages, size), dtype=torch.uint8, pin_memory=True)
    geometry = Geometry((PlaneGeometry("k", device, host),), torch.device("cuda:0"), (0,), (1,))
    engine = engine_of(geometry)
    chosen = ids(1, 2047, 2049, 4098, 4199)
    for page in chosen.tolist():
        device[page].fill_(page % 251)
    engine.store(chosen, chosen[::-1].copy(), None).wait(60)
    turned = dict(zip(chosen[::-1].tolist(), chosen.tolist(), strict=True))
    assert all(bool((host[frame] == page % 251).all()) for frame, page in turned.items())
    engine.load(chosen, chosen, None).wait(60)
    assert all(bool((device[frame].cpu() == page % 251).all()) for frame, page in turned.items())
    engine.close()


def test_no_pairs_is_a_call_too() -> None:
    geometry = build([16] * 3)
    engine, none = engine_of(geometry), np.zeros(0, np.int64)
    assert engine.store(none, none, None).wait(60)
    assert len(engine.load_with_events(none, none, None)) == 3
    engine.close()


def test_copies_go_without_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the kernels are compiled, and where they cannot be."""
    monkeypatch.setitem(sys.modules, "sharedmirror.copies.move", None)
    geometry = build([4096, 48, 70001], gap=16, pages=64, frames=64)
    from sharedmirror.copies.staged import StagedEngine

    engine = StagedEngine(geometry)
    assert not engine.wait_for_kernels()
    pages, frames = (np.random.default_rng(seed).permutation(64)[:40].astype(np.int64) for seed in (1, 2))
    wanted = {plane.name: plane.device[pages].cpu() for plane in geometry.planes}
    engine.store(pages, frames, None).wait(None)
    for plane in geometry.planes:
        assert torch.equal(plane.host[frames], wanted[plane.name])
        plane.device.zero_()
    events = engine.load_with_events(pages, frames, None)
    events[-1].synchronize()
    assert all(event.query() for event in events)
    for plane in geometry.planes:
        assert torch.equal(plane.device[pages].cpu(), wanted[plane.name])
    engine.close()
