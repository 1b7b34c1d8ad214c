from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sharedmirror.copies import cpu
from sharedmirror.copies.cpu import CpuEngine
from sharedmirror.copies.interface import CopyEngine, Geometry, PlaneGeometry
from sharedmirror.copies.reference import ReferenceEngine

PAGES, FRAMES = 40, 48


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def planes(layout: str, sizes: list[int], device_pad: int) -> tuple[Geometry, list[torch.Tensor]]:
    """Build random memory on both sides, with bytes between and around the slices."""
    device_memory = [random_bytes(i, PAGES * (size + device_pad) + 3) for i, size in enumerate(sizes)]
    page_bytes = sum(-(-size // 16) * 16 for size in sizes)
    host_memory = random_bytes(99, FRAMES * page_bytes + 64)
    built, at = [], 16
    for size, memory in zip(sizes, device_memory, strict=True):
        device = torch.as_strided(memory, (PAGES, size), (size + device_pad, 1), 1 if device_pad else 0)
        room = -(-size // 16) * 16
        stride = size if layout == "slab" else page_bytes
        host = torch.as_strided(host_memory, (FRAMES, size), (stride, 1), at)
        at += room * FRAMES if layout == "slab" else room
        built.append(PlaneGeometry(str(size), device, host))
    order = tuple(range(len(sizes)))
    geometry = Geometry(tuple(built), torch.device("cpu"), order, tuple(range(1, len(sizes) + 1)))
    return geometry, [*device_memory, host_memory]


def ids(pattern: str) -> tuple[Any, Any]:
    random = np.random.default_rng(5)
    n = 24
    if pattern == "one":
        return np.array([3]), np.array([47])
    if pattern == "none":
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    device, host = random.permutation(PAGES)[:n], random.permutation(FRAMES)[:n]
    if pattern in ("device run", "both run"):
        device = np.arange(7, 7 + n)
    if pattern in ("host run", "both run"):
        host = np.arange(11, 11 + n)
    if pattern == "short runs":
        device = (np.arange(n) // 3 * 4 + np.arange(n) % 3)[::-1].copy()
        host = (np.arange(n) // 3 * 5 + np.arange(n) % 3)[::-1].copy()
    return device, host


Make = Callable[[Geometry], CopyEngine]
ENGINES: list[Make] = [CpuEngine, lambda geometry: CpuEngine(geometry, threads=1), lambda g: CpuEngine(g, threads=3)]


@pytest.mark.parametrize("make", ENGINES, ids=["cpu", "cpu-1", "cpu-3"])
@pytest.mark.parametrize("pattern", ["scattered", "device run", "host run", "both run", "short runs", "one", "none"])
@pytest.mark.parametrize("layout", ["slab", "page"])
@pytest.mark.parametrize(
    ("sizes", "device_pad"), [([1, 7, 24, 4098, 4096], 0), ([8, 6], 10), ([8, 13], 3), ([70000, 32, 33333], 0)]
)
def test_engines_agree_with_the_reference(
    make: Make, pattern: str, layout: str, sizes: list[int], device_pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "PIECE_BYTES", 50000)
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(cpu, "BATCH_BYTES", 100000)
    monkeypatch.setattr(cpu, "BUFFER_BYTES", 20000)
    geometry, memory = planes(layout, sizes, device_pad)
    model_geometry, model = planes(layout, sizes, device_pad)
    engine, oracle = make(geometry), ReferenceEngine(model_geometry)
    device, host = ids(pattern)
    for step in ("store", "load"):
        assert getattr(engine, step)(device, host, None).done()
        getattr(oracle, step)(device, host, None)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(memory, model, strict=True))
        # The load brings other pages than the store took away.
        device, host = np.roll(device, 1), host
    events = engine.load_with_events(device, host, None)
    oracle.load(device, host, None)
    assert len(events) == len(sizes)
    assert all(event.query() for event in events)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(memory, model, strict=True))
    engine.close()
    engine.close()


@pytest.mark.parametrize(("word", "size", "offset"), [(16, 64, 0), (8, 24, 0), (4, 4, 0), (2, 6, 0), (1, 8, 3)])
def test_words_fit_the_addresses(word: int, size: int, offset: int) -> None:
    device, host = torch.zeros(PAGES * size + 8, dtype=torch.uint8), torch.zeros(FRAMES * size, dtype=torch.uint8)
    plane = PlaneGeometry(
        "a", torch.as_strided(device, (PAGES, size), (size, 1), offset), host.view(FRAMES, size)
    )  # fmt: skip
    assert cpu._dress(plane).device_words.element_size() == word


def test_a_large_store_is_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 1)
    geometry, _ = planes("slab", [70000], 0)
    engine = CpuEngine(geometry, threads=2)
    engine.store(*ids("scattered"), None)
    assert engine._pool is not None
    engine.close()
    assert engine._pool is None
