"""The copy engine's table for BENCHMARKS.md: limits, baselines and the engine, measured in one run.

    PYTHONPATH=.:daemon python3 scripts/bench_gpu.py [--layouts page:16 slab:32 ...] [--beside engine ...]

Rates are payload bytes over the time from the call to its completion, as a share of what one pinned copy of
1 GiB reaches in the same run. Every number is a median. Progress goes to stderr, one markdown table to stdout.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sharedmirror.copies import plan
from sharedmirror.copies.driver import Driver, row_copies
from sharedmirror.copies.interface import Geometry, PlaneGeometry
from sharedmirror.copies.staged import StagedEngine

GIB = 1 << 30
PLANES, PAGES, POOL_PAGES = 128, 256, 512
REPEATS, BESIDE_REPEATS = 15, 7
REGISTRATION_BYTES = 4 * GIB
POPULATE_WRITE = 23
LATENCY_REPEATS = 101
PAUSE_S = 0.03
BESIDE_PAGES, BESIDE_KIB = 1024, 16
"""A transfer beside a chain: one call of 2 GiB, so that how it begins hardly counts."""

TARGETS = {
    "page:1": "0.80", "page:4": "0.92, 0.5 ms", "page:16": "0.95, 0.5 ms", "page:32": "0.95, 0.5 ms",
    "page:128": "0.95, 0.5 ms", "slab:4": "", "slab:32": "0.85", "slab:128": "0.85",
}  # fmt: skip
"""Layouts and slices in KiB, with what scattered pages are to reach."""
MOVERS = ("engine", "one pinned copy", "kernel on mapped host memory")


class HostMemory:
    """Shared memory of this process, prefaulted and registered in chunks, as a worker's regions are."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        start = self.bytes.data_ptr()
        libc = ctypes.CDLL(None)
        with ThreadPoolExecutor(16) as threads:
            list(
                threads.map(
                    lambda at: libc.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(size // 16), POPULATE_WRITE),
                    range(0, size, size // 16),
                )
            )
        for at in range(0, size, REGISTRATION_BYTES):
            code = int(torch.cuda.cudart().cudaHostRegister(start + at, min(REGISTRATION_BYTES, size - at), 3))
            if code:
                raise SystemExit(f"cudaHostRegister failed with {code}")
        self.edges = tuple(range(start + REGISTRATION_BYTES, start + size, REGISTRATION_BYTES))


def pool(host: HostMemory, slice_bytes: int, layout: str, pages: int = POOL_PAGES) -> Geometry:
    """Return 64 layers of K and V with every plane a tensor of its own, on the host in layer order."""
    planes = []
    order = tuple(half * PLANES // 2 + layer for layer in range(PLANES // 2) for half in (0, 1))
    for number in range(PLANES):
        device = torch.randint(0, 256, (pages, slice_bytes), dtype=torch.uint8, device="cuda")
        stride = slice_bytes * (PLANES if layout == "page" else 1)
        base = order.index(number) * slice_bytes * (1 if layout == "page" else pages)
        on_host = torch.as_strided(host.bytes, (pages, slice_bytes), (stride, 1), base)
        planes.append(PlaneGeometry(f"plane{number}", device, on_host))
    after = [0] * PLANES
    for position, plane in enumerate(order, start=1):
        after[plane] = position
    after[-1] = PLANES
    return Geometry(tuple(planes), torch.device("cuda", torch.cuda.current_device()), order, tuple(after), host.edges)


@contextmanager
def settings(**values: int) -> Iterator[None]:
    """Set the plan's thresholds, to force a route."""
    before = {name: getattr(plan, name) for name in values}
    for name, value in values.items():
        setattr(plan, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(plan, name, value)


def scattered(pages: int = PAGES, seed: int = 0, of: int = POOL_PAGES) -> tuple[Any, Any]:
    """Return device pages and host frames, both in random order."""
    random = np.random.default_rng(seed)
    return tuple(random.permutation(of)[:pages].astype(np.int64) for _ in range(2))  # type: ignore[return-value]


def in_a_row(pages: int = PAGES) -> tuple[Any, Any]:
    """Return pages and frames that rise by one."""
    return np.arange(pages, dtype=np.int64), np.arange(7, 7 + pages, dtype=np.int64)


def median(measure: Callable[[], float], repeats: int = REPEATS, warm_up: int = 5) -> float:
    for _ in range(warm_up):
        measure()
    return statistics.median(measure() for _ in range(repeats))


def elapsed_s(work: Callable[[], object]) -> float:
    """Return the seconds from the call until the device is idle."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def submitted_s(work: Callable[[], object]) -> float:
    """Return the seconds in the call alone."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def completed_s(engine: Any, call: str, pairs: tuple[Any, Any], stream: torch.cuda.Stream) -> float:
    """Return the seconds from the call until its completion says that it is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    getattr(engine, call)(*pairs, stream).wait(None)
    return time.perf_counter() - start


@dataclass
class Limits:
    """GB/s of pinned copies."""

    store: float
    load: float
    both: float


def measure_limits() -> Limits:
    device = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(to_host: bool) -> None:
        with torch.cuda.stream(streams[to_host]):
            if to_host:
                host[0].copy_(device[0], non_blocking=True)
            else:
                device[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        for direction in (True, False):
            copy(direction)

    seconds = [median(partial(elapsed_s, work)) for work in (partial(copy, True), partial(copy, False), both)]
    return Limits(*(size / each / 1e9 for size, each in zip((GIB, GIB, 2 * GIB), seconds, strict=True)))


def measure_rows_limit(host: HostMemory) -> list[float]:
    """Return GB/s of 2D copies of 128 rows of 32 KiB, out and in: what a page of a slab is, without staging."""
    width, frames = 32 << 10, scattered()[1]
    driver = Driver(torch.cuda.current_device())
    device = torch.empty(PAGES * PLANES * width, dtype=torch.uint8, device="cuda")
    pitch = min(POOL_PAGES * width, REGISTRATION_BYTES // PLANES)
    ours = host.bytes.data_ptr() + frames % (pitch // width) * width
    theirs = device.data_ptr() + np.arange(PAGES, dtype=np.int64) * PLANES * width
    same = np.full(PAGES, width, np.int64)
    results = []
    with driver:
        stream = driver.create_stream()
    for target, source, pitches in ((ours, theirs, (same * 0 + pitch, same)), (theirs, ours, (same, same * 0 + pitch))):
        rows = row_copies(target, source, *pitches, same, same * 0 + PLANES)

        def work(first_row: int = int(rows.ctypes.data)) -> None:
            for row in range(PAGES):
                driver.copy_rows(first_row + 128 * row, stream)

        with driver:
            results.append(PAGES * PLANES * width / median(partial(elapsed_s, work)) / 1e9)
    return results


class Report:
    """Rows of the table; each also goes to stderr at once."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, measured: str, target: str = "") -> None:
        self.rows.append((what, measured, target))
        print(f"{what}: {measured} {f'(to reach: {target})' if target else ''}", file=sys.stderr, flush=True)

    def markdown(self) -> str:
        lines = ["| | measured | to reach |", "| --- | --- | --- |"]
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in self.rows])


def rates(report: Report, limits: Limits, engine: Any, label: str, total: int, pairs: Any, target: str) -> None:
    """Add a row with both directions and the CPU time of the calls."""
    stream, parts = torch.cuda.Stream(), []
    for call, limit in (("store", limits.store), ("load", limits.load)):
        rate = total / median(partial(completed_s, engine, call, pairs, stream)) / 1e9
        cpu = median(partial(submitted_s, partial(getattr(engine, call), *pairs, stream))) * 1e3
        parts.append(f"{call} {rate:.1f} GB/s = {rate / limit:.2f}, {cpu:.2f} ms in the call")
    report.add(label, "; ".join(parts), target)


def measure_layouts(report: Report, limits: Limits, host: HostMemory, wanted: list[str]) -> None:
    for label in wanted:
        target, (layout, kib) = TARGETS[label], label.split(":")
        slice_bytes = int(kib) << 10
        geometry = pool(host, slice_bytes, layout)
        engine = StagedEngine(geometry)
        engine.wait_for_kernels()
        total, name = PAGES * PLANES * slice_bytes, f"`{layout}`, slices of {slice_bytes >> 10} KiB"
        rates(report, limits, engine, f"{name}, scattered", total, scattered(), target)
        if layout == "slab":
            rates(report, limits, engine, f"{name}, one run of pages", total, in_a_row(), "0.97")
            random = np.random.default_rng(1).permutation(POOL_PAGES)[:PAGES].astype(np.int64)
            pairs = (random, np.arange(PAGES, dtype=np.int64))
            if slice_bytes < 128 << 10:
                rates(report, limits, engine, f"{name}, one run on the host", total, pairs, "0.97")
        if label in ("page:16", "slab:32"):
            both_ways(report, limits, engine, name, total)
        if slice_bytes >= 4 << 10:
            fences(report, engine, geometry, name, total)
        if label == "page:32":
            latency(report, engine)
            baselines(report, limits, engine, geometry, name, total)
        engine.close()


def both_ways(report: Report, limits: Limits, engine: Any, name: str, total: int) -> None:
    streams, (out, back) = [torch.cuda.Stream() for _ in range(2)], (scattered(seed=1), scattered(seed=2))
    times = 4

    def work() -> None:
        for _ in range(times):
            engine.store(*out, streams[0])
            engine.load(*back, streams[1])

    rate = 2 * times * total / median(lambda: elapsed_s(work)) / 1e9
    report.add(f"{name}, both directions at once", f"{rate:.1f} GB/s = {rate / limits.both:.2f}", "0.90")


def fences(report: Report, engine: Any, geometry: Geometry, name: str, total: int) -> None:
    """The time of layer 0's V event over that of the last event, both from the call on."""
    stream, pairs, ratios, last_s = torch.cuda.Stream(), scattered(), [], []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        events = engine.load_with_events(*pairs, stream)
        events[PLANES // 2].synchronize()
        first = time.perf_counter() - start
        events[-1].synchronize()
        last_s.append(time.perf_counter() - start)
        ratios.append(first / last_s[-1])
    rate = total / statistics.median(last_s[2:]) / 1e9
    ratio = statistics.median(ratios[2:])
    report.add(f"{name}, layer 0's fence over the last", f"{ratio:.2f} at {rate:.1f} GB/s", "0.15")


def latency(report: Report, engine: Any) -> None:
    stream, pairs, parts = torch.cuda.Stream(), scattered(1), []
    for call in ("store", "load"):
        seconds = median(partial(completed_s, engine, call, pairs, stream), LATENCY_REPEATS, 10)
        parts.append(f"{call} {seconds * 1e3:.3f} ms")
    report.add("one page of 4 MiB, call to completion", ", ".join(parts), "0.13 ms")


def baselines(report: Report, limits: Limits, engine: Any, geometry: Geometry, name: str, total: int) -> None:
    pages, frames = scattered()

    def seed(to_host: bool) -> None:
        for plane in geometry.planes:
            for page, frame in zip(pages.tolist(), frames.tolist(), strict=True):
                if to_host:
                    plane.host[frame].copy_(plane.device[page], non_blocking=True)
                else:
                    plane.device[page].copy_(plane.host[frame], non_blocking=True)

    parts = [f"{total / elapsed_s(partial(seed, to_host)) / 1e9:.1f}" for to_host in (True, False)]
    report.add(f"baseline: one `copy_` per slice, {name}", f"store {parts[0]}, load {parts[1]} GB/s")
    with settings(PLAIN_BYTES=0, SMALL_BYTES=-1):
        rates(report, limits, engine, f"baseline: one batch descriptor per slice, {name}", total, (pages, frames), "")
    with settings(SMALL_BYTES=1 << 62):
        rates(report, limits, engine, f"baseline: kernel on mapped host memory, {name}", total, (pages, frames), "")


class Chain:
    """A bf16 matmul chain as a CUDA graph."""

    def __init__(self, batch: int, target_ms: float) -> None:
        self._weights = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90 for _ in range(16)]
        self._x = torch.randn(batch, 8192, device="cuda", dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._run()
        self.times = 1
        self.times = max(1, round(target_ms / self.ms(self.start())))

    def _run(self) -> None:
        y = self._x
        for weight in self._weights:
            y = y @ weight

    def start(self, factor: int = 1) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(self.times * factor):
                self._graph.replay()
            last.record()
        return first, last

    @staticmethod
    def ms(events: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1]))


class NotMeasured(Exception):
    """Raised when one of two pieces of work did not outlast the other, as the figure needs it."""


def interference(report: Report, limits: Limits, host: HostMemory, wanted: list[str]) -> None:
    engine = StagedEngine(pool(host, BESIDE_KIB << 10, "page", 2 * BESIDE_PAGES))
    engine.wait_for_kernels()
    total, stream = BESIDE_PAGES * PLANES * (BESIDE_KIB << 10), torch.cuda.Stream()
    pairs = scattered(BESIDE_PAGES, of=2 * BESIDE_PAGES)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)

    def pinned_copy(to_host: bool, *_: object) -> None:
        with torch.cuda.stream(stream):
            (pinned if to_host else device).copy_(device if to_host else pinned, non_blocking=True)

    movers: dict[str, tuple[tuple[Callable[..., object], Callable[..., object]], int, int, str]] = {
        "engine": ((engine.store, engine.load), total, -1, "x1.03, 0.90"),
        "one pinned copy": ((partial(pinned_copy, True), partial(pinned_copy, False)), GIB, -1, "limit"),
        "kernel on mapped host memory": ((engine.store, engine.load), total, 1 << 62, ""),
    }
    for batch in (32, 4096):
        chain = Chain(batch, 30.0)
        for label in wanted:
            calls, size, small, target = movers[label]
            with settings(SMALL_BYTES=small):
                parts = []
                for name, call, limit in zip(("store", "load"), calls, (limits.store, limits.load), strict=True):
                    try:
                        slower, rate = beside(chain, call, pairs, stream, size, limit)
                    except NotMeasured as reason:
                        parts.append(f"{name} not measured: {reason}")
                    else:
                        parts.append(f"{name} x{slower:.3f} at {rate / limit:.2f} of the limit")
            report.add(f"bf16 matmul chain of batch {batch} beside a transfer: {label}", "; ".join(parts), target)
        del chain
    engine.close()


def beside(
    chain: Chain, call: Callable[..., object], pairs: Any, stream: torch.cuda.Stream, total: int, limit: float
) -> tuple[float, float]:
    """Return how much longer the chain takes beside a transfer, and the rate of a transfer beside the chain.

    The chain is measured alone and beside in turn, with equal pauses, and the transfer outlasts it. For the
    rate the chain outlasts the transfer.
    """

    def transfer(times: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(times):
                call(*pairs, stream)
            last.record()
        return first, last

    alone, together, rates_ = [], [], []
    longer = 2 + int(1.6 * 30e-3 * limit * 1e9 / total)
    transfer(1)
    while True:
        moved = transfer(longer)
        Chain.ms(computed := chain.start())
        if moved[1].elapsed_time(computed[1]) < -20:
            break
        longer *= 2
    for _ in range(BESIDE_REPEATS):
        time.sleep(PAUSE_S)
        alone.append(Chain.ms(chain.start()))
        time.sleep(PAUSE_S)
        moved = transfer(longer)
        computed = chain.start()
        together.append(Chain.ms(computed))
        if moved[1].elapsed_time(computed[1]) > 0:
            raise NotMeasured("the transfer was over before the chain")
        time.sleep(PAUSE_S)
        computed = chain.start(4)
        moved = transfer(2)
        if Chain.ms(moved) <= 0 or moved[1].elapsed_time(computed[1]) < 0:
            raise NotMeasured("the chain was over before the transfer")
        rates_.append(2 * total / Chain.ms(moved) / 1e6)
    ratio = statistics.median(b / a for a, b in zip(alone, together, strict=True))
    return ratio, statistics.median(rates_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=[*TARGETS], default=[*TARGETS])
    parser.add_argument("--beside", nargs="*", choices=MOVERS, default=[*MOVERS])
    options = parser.parse_args()
    started = time.perf_counter()
    report = Report()
    limits = measure_limits()
    report.add(
        "limit: pinned copy of 1 GiB",
        f"store {limits.store:.1f}, load {limits.load:.1f}, both at once {limits.both:.1f} GB/s",
    )
    largest = max((POOL_PAGES * int(label.split(":")[1]) for label in options.layouts), default=0)
    host = HostMemory(PLANES * max(largest, 2 * BESIDE_PAGES * BESIDE_KIB) << 10)
    if "slab:32" in options.layouts:
        out, back = measure_rows_limit(host)
        report.add(
            "limit: 2D copies of 128 rows of 32 KiB (a scattered page of a slab)",
            f"store {out:.1f} GB/s = {out / limits.store:.2f}, load {back:.1f} GB/s = {back / limits.load:.2f}",
        )
    measure_layouts(report, limits, host, options.layouts)
    interference(report, limits, host, options.beside)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
        f"{platform.python_version()}, Linux {platform.release()}; {PLANES} planes, {PAGES} pages, medians of "
        f"{BESIDE_REPEATS} and more; rates are shares of the limit in the same direction. "
        f"The run took {time.perf_counter() - started:.0f} s.\n"
    )
    print(report.markdown())


if __name__ == "__main__":
    main()
