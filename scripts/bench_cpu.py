"""Benchmarks without a GPU: copies against memcpy, control calls, attach, status, the daemon's own cost.

Every figure stands beside a limit measured in the same run: memcpy of equal bytes for copies, an empty
round trip over a bare Unix socket for calls. Figures are medians.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.synchronize
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sharedmirror import PlaneSpec, PoolLayout, SharedHostMirror, connect
from sharedmirror.adapter import DevicePool
from sharedmirror.channel import Channel
from sharedmirror.control import Client
from sharedmirror.types import KeyState, Role

MIB, GIB = 1 << 20, 1 << 30
PLANES = 16
PAGE_SIZE = 16


def median(work: Callable[[], object], runs: int = 9, warmup: int = 2) -> float:
    for _ in range(warmup):
        work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass
class Daemon:
    process: subprocess.Popen[bytes]
    socket: str
    ready_s: float


@contextmanager
def daemon(size: str, *options: str) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="sharedmirror-bench-") as directory:
        path = str(Path(directory) / "daemon.sock")
        command = [sys.executable, "-m", "sharedmirrord", "--memory", size, "--socket", path, *options]
        start = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not _ready(path):
                time.sleep(0.005)
            yield Daemon(process, path, time.perf_counter() - start)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def _ready(path: str) -> bool:
    try:
        with Channel.open(path, role=Role.OBSERVER, timeout_s=1) as channel:
            return bool(channel.call("status")["status"]["daemon"]["state"] == "ready")
    except Exception:
        return False


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


# -- copies --------------------------------------------------------------------------------------


def device_pool(slice_bytes: int, pages: int, shard: int | None = None, shards: int | None = None) -> DevicePool:
    row = slice_bytes // PAGE_SIZE
    specs = tuple(PlaneSpec(f"p{i}", row, PAGE_SIZE, shard=shard, shards=shards) for i in range(PLANES))
    layout = PoolLayout(specs, PAGE_SIZE)
    tensors = [torch.randint(0, 255, (pages * PAGE_SIZE, row), dtype=torch.uint8) for _ in range(PLANES)]
    return DevicePool(layout, tensors)


def copies() -> None:
    with daemon("1GiB", "--pin", "none") as served:
        sizes = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
        rows = [_copies_of(served.socket, layout, size) for layout in ("page", "slab") for size in sizes]
    table(
        f"Copies on the CPU ({PLANES} planes, scattered pages), as a share of memcpy of equal bytes",
        ["layout", "page", "store", "load", "loop of copy_, store", "memcpy"],
        rows,
    )


def _copies_of(path: str, layout: str, page_bytes: int) -> list[str]:
    moved = 128 * MIB
    count = moved // page_bytes
    slice_bytes = page_bytes // PLANES
    pool = device_pool(slice_bytes, count)
    name = f"{layout}-{page_bytes}"
    with SharedHostMirror(pool, count, socket=path, name=name, layout=layout) as mirror:
        order = torch.randperm(count).tolist()
        pairs = list(zip(torch.randperm(count).tolist(), order, strict=True))
        source, target = torch.zeros(moved, dtype=torch.uint8), torch.zeros(moved, dtype=torch.uint8)

        def memcpy() -> None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), moved)

        def loop() -> None:
            for device, host in mirror.tensor_pairs:
                rows = device.view(count, -1)
                mirrored = host.view(count, -1) if layout == "slab" else host.flatten(1)
                for page, frame in pairs:
                    mirrored[frame].copy_(rows[page])

        store = median(lambda: mirror.store_pages(pairs, None))
        limit = median(memcpy)
        load = median(lambda: mirror.load_pages(pairs, None))
        seed = median(loop, runs=3, warmup=1)
    return [
        layout,
        f"{page_bytes >> 10} KiB",
        f"{limit / store:.2f}",
        f"{limit / load:.2f}",
        f"{limit / seed:.2f}",
        f"{moved / limit / 1e9:.1f} GB/s",
    ]


# -- control -------------------------------------------------------------------------------------


def _echo(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


def bare_round_trip() -> float:
    """Seconds of one round trip between two processes over a bare socket pair."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        _echo(theirs)
        os._exit(0)
    theirs.close()

    def once() -> None:
        ours.sendall(b"x" * 32)
        ours.recv(64)

    found = median(once, runs=2000, warmup=200)
    ours.close()
    os.waitpid(child, 0)
    return found


def _worker(path: str, rank: int, ready: threading.Barrier, box: list[Channel | None]) -> None:
    channel = Channel.open(path, role=Role.WORKER)
    planes: list[list[object]] = [["k", rank, 2, 4096, 16]]
    channel.call("attach", **_attach("control", rank, 2, 10_000, planes))
    box[rank] = channel
    ready.wait()


def control() -> None:
    with daemon("256MiB", "--pin", "none") as served:
        box: list[Channel | None] = [None, None]
        ready = threading.Barrier(3)
        for rank in (0, 1):
            threading.Thread(target=_worker, args=(served.socket, rank, ready, box), daemon=True).start()
        ready.wait()
        workers = [channel for channel in box if channel is not None]
        bare = bare_round_trip()
        with connect(served.socket, name="control") as client:
            empty = median(lambda: client.contains([]), runs=2000, warmup=200)
            keys = [os.urandom(32) for _ in range(256)]
            fresh = _cycle_into_free_pages(client, workers, runs=60, warmup=10)
            cycle = median(lambda: _cycle(client, workers), runs=60, warmup=40)
            _fill(client, workers, keys)
            lookup = median(lambda: client.lookup(keys), runs=300, warmup=20)
            many = [os.urandom(32) for _ in range(1000)]
            for at in range(0, len(many), 250):
                _fill(client, workers, many[at : at + 250])
            peek = median(lambda: client.peek(many), runs=300, warmup=20)
        status = median(lambda: _status(served.socket), runs=9, warmup=2)
        resident = _resident_mib(served.process.pid)
        for channel in workers:
            channel.call("detach", unmapped=True)
            channel.close()
    rows = [
        ["empty round trip", f"{empty * 1e6:.0f} us", f"{empty / bare:.1f}", "100 us"],
        ["lookup, 256 hits", f"{lookup * 1e6:.0f} us", f"{lookup / bare:.1f}", "250 us"],
        ["`peek` at 1,000 keys that are there", f"{peek * 1e6:.0f} us", f"{peek / bare:.1f}", "1000 us"],
        ["lease + 2 ranks' commits + seal, 256 pages", f"{fresh * 1e3:.2f} ms", f"{fresh / bare:.0f}", "2 ms"],
        ["the same where 256 pages are evicted for it", f"{cycle * 1e3:.2f} ms", f"{cycle / bare:.0f}", ""],
        ["`sharedmirror status`, exec to exit", f"{status:.2f} s", f"{status / bare:.0f}", "0.3 s"],
        ["daemon, resident besides the arena", f"{resident:.0f} MiB", "", "60 MiB"],
    ]
    table(
        f"Control (bare round trip in the same run: {bare * 1e6:.0f} us)",
        ["what", "median", "bare round trips", "to reach"],
        rows,
    )


# -- control under load ---------------------------------------------------------------------------

SPAWN = multiprocessing.get_context("spawn")
Signal = multiprocessing.synchronize.Event
CHAIN = 256
MANY = CHAIN * 40 * 98


OTHERS = 12
"""Pools of 10,240 sealed pages."""


def _disturb(path: str, ready: Signal, stop: Signal) -> None:
    """Attach, ask for status and detach every 10 ms, and clear another pool every half second."""
    for number in range(OTHERS):
        with _other(path, number) as (worker, client):
            for _ in range(40):
                _fill(client, [worker], [os.urandom(32) for _ in range(CHAIN)])
    ready.set()
    number, due = 0, time.monotonic()
    while not stop.is_set():
        with _other(path, number % OTHERS) as (_worker, client):
            client.status()
            if time.monotonic() >= due:
                client.clear()
                number, due = number + 1, time.monotonic() + 0.5
        time.sleep(0.01)


def _write(path: str, ready: Signal, stop: Signal) -> None:
    """Lease, commit and seal without a pause in another pool."""
    with _other(path, OTHERS) as (worker, client):
        ready.set()
        while not stop.is_set():
            _cycle(client, [worker])


@contextmanager
def _other(path: str, number: int) -> Iterator[tuple[Channel, Client]]:
    with Channel.open(path, role=Role.WORKER) as worker:
        worker.call("attach", **_attach(f"other{number}", 0, 1, 10_241, [["k", 0, 1, 16, 16]]))
        with connect(path, name=f"other{number}") as client:
            yield worker, client
        worker.call("detach", unmapped=True)


@contextmanager
def _beside(work: Callable[[str, Signal, Signal], None], path: str) -> Iterator[None]:
    """Have ``work`` done in a process of its own, from when it is ready."""
    ready, stop = SPAWN.Event(), SPAWN.Event()
    process = SPAWN.Process(target=work, args=(path, ready, stop))
    process.start()
    ready.wait()
    try:
        yield
    finally:
        stop.set()
        process.join()


def _attach(name: str, rank: int, world: int, pages: int, planes: list[list[object]]) -> dict[str, object]:
    return {
        "pool": name, "tag": "", "engine": "0", "launch": None, "rank": rank, "world_size": world, "page_size": 16,
        "layout": "page", "kind": "leased", "num_host_pages": pages, "frames_per_page": 1, "planes": planes,
        "wait_s": 10,
    }  # fmt: skip


def load() -> None:
    with daemon("128MiB", "--pin", "none") as served, ExitStack() as stack:
        worker = stack.enter_context(Channel.open(served.socket, role=Role.WORKER))
        worker.call("attach", **_attach("many", 0, 1, MANY + 1, [["k", 0, 1, 16, 16]]))
        clients = [stack.enter_context(connect(served.socket, name="many")) for _ in range(31)]
        keys: list[bytes] = []
        while len(keys) < MANY:
            keys += (fresh := [os.urandom(32) for _ in range(40 * CHAIN)])
            lease = clients[0].lease(len(fresh))
            worker.call("commit", lease=lease.id)
            for at in range(0, len(fresh), CHAIN):
                clients[0].seal(lease, fresh[at : at + CHAIN], pages=lease.pages[at : at + CHAIN])
        resident = _resident_mib(served.process.pid) + _shared_mib(served.process.pid)
        idle = _lookups(clients, keys, worker)
        chain_s, scattered_s = _peeks(clients[0], keys, 1000), _peeks(clients[0], keys, 1)
        with _beside(_disturb, served.socket):
            loaded = _lookups(clients, keys, worker)
        with _beside(_write, served.socket):
            written = _lookups(clients, keys, worker)
        worker.call("detach", unmapped=True)
    rows = []
    for what, times in (
        ("idle", idle),
        ("with an attach and a status each 10 ms, a clear each 500 ms", loaded),
        ("with a writer of another pool that never pauses", written),
    ):
        times.sort()
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        rows.append([what, f"{p50 * 1e6:.0f} us", f"{p99 * 1e3:.2f} ms", f"{times[-1] * 1e3:.1f} ms"])
    rows.append(["to reach", "400 us", "2 ms", "10 ms"])
    table(f"Lookup of 256 keys, {MANY:,} sealed pages, 32 sessions", ["", "p50", "p99", "worst"], rows)
    print(
        f"\n`peek` at 1,000 of these keys, others each time: {chain_s * 1e3:.2f} ms for a prefix, "
        f"{scattered_s * 1e3:.2f} ms for keys here and there (to reach: 1 ms); {1000 / chain_s:,.0f} keys a second."
    )
    each = resident * MIB / MANY
    print(f"\nThe daemon then has {resident:.0f} MiB resident besides the arena: {each:.0f} bytes a page.")


def _lookups(clients: list[Client], keys: list[bytes], worker: Channel) -> list[float]:
    times = []
    for count in range(3000):
        start = count * 277 % (len(keys) // CHAIN) * CHAIN
        wanted = keys[start : start + CHAIN]
        begin = time.perf_counter()
        hit = clients[count % len(clients)].lookup(wanted)
        times.append(time.perf_counter() - begin)
        hit.release()
        worker.call("drained", leases=[], hits=[hit.id])
        time.sleep(0.001)
    return times


def _peeks(client: Client, keys: list[bytes], run: int) -> float:
    """Seconds of one look at 1,000 keys of a million, all of them there, ``run`` of them in the order of a prefix."""
    times = []
    for _ in range(300):
        starts = random.sample(range(len(keys) - run), 1000 // run)
        # Copies: an engine's keys are fresh from its hash, not cold in its memory.
        wanted = [bytes(bytearray(key)) for start in starts for key in keys[start : start + run]]
        begin = time.perf_counter()
        states = client.peek(wanted)
        times.append(time.perf_counter() - begin)
        if any(state is not KeyState.HIT for state in states):
            raise RuntimeError("a key is not in the index")
    return statistics.median(times)


def _shared_mib(pid: int) -> float:
    """The record segment: shared memory that is not the arena."""
    fields = Path(f"/proc/{pid}/smaps").read_text().split("-records")
    return sum(int(part.split("Rss:")[1].split()[0]) for part in fields[1:]) / 1024


def _cycle(client: Client, workers: list[Channel]) -> None:
    _fill(client, workers, [os.urandom(32) for _ in range(256)])


def _cycle_into_free_pages(client: Client, workers: list[Channel], *, runs: int, warmup: int) -> float:
    """Return the median time of a cycle whose pages are evicted before the next one."""
    taken = []
    for _ in range(warmup + runs):
        keys = [os.urandom(32) for _ in range(256)]
        begin = time.perf_counter()
        _fill(client, workers, keys)
        taken.append(time.perf_counter() - begin)
        client.evict(keys)
    return statistics.median(taken[warmup:])


def _fill(client: Client, workers: list[Channel], keys: list[bytes]) -> None:
    lease = client.lease(len(keys))
    for channel in workers:
        channel.call("commit", lease=lease.id)
    client.seal(lease, keys)


def _status(path: str) -> None:
    command = [str(Path(sys.executable).with_name("sharedmirror")), "status", "--socket", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _resident_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


# -- one pool for many ---------------------------------------------------------------------------

Pipe = multiprocessing.connection.Connection
STORED_PAGES = 128
LOOKED_S = 2.0


@contextmanager
def children(work: Callable[..., None], arguments: list[tuple[object, ...]]) -> Iterator[list[Pipe]]:
    """Run ``work`` in a process for each of ``arguments``; its last argument is the pipe to it."""
    pipes, processes = [], []
    for some in arguments:
        ours, theirs = SPAWN.Pipe()
        processes.append(SPAWN.Process(target=work, args=(*some, theirs)))
        pipes.append(ours)
        processes[-1].start()
    yield pipes
    for process in processes:
        process.join()


def _mla_bytes(path: str, world: int) -> int:
    """Return the bytes of the arena that an MLA pool takes whose latents all ranks hold alike."""
    with ExitStack() as stack, ThreadPoolExecutor(world) as pool:
        channels = [stack.enter_context(Channel.open(path, role=Role.WORKER)) for _ in range(world)]
        planes: list[list[object]] = [[f"latent{layer}", 0, 1, 1152 * PAGE_SIZE, PAGE_SIZE] for layer in range(61)]
        asked = [_attach(f"mla{world}", rank, world, 33, planes) for rank in range(world)]
        regions = list(
            pool.map(lambda pair: pair[0].call("attach", **pair[1])["regions"], zip(channels, asked, strict=True))
        )
        found = {region["id"]: region["bytes"] for some in regions for region in some}
        for channel in channels:
            channel.call("detach", unmapped=True)
    return sum(found.values())


def _sharer(path: str, rank: int, world: int, together: object, pipe: Pipe) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))  # alone too: ranks do not share cores
    pool = device_pool(64 << 10, STORED_PAGES, 0, 1)
    options = {"socket": path, "name": f"store{world}", "pages": "leased", "layout": "page"}
    with SharedHostMirror(pool, STORED_PAGES + 1, rank=rank, world_size=world, **options) as mirror:
        pipe.send(None)
        lease = pipe.recv()
        pairs = list(zip(torch.randperm(STORED_PAGES).tolist(), lease.pages, strict=True))
        times = []
        for _ in range(25):
            together.wait()
            begin = time.perf_counter()
            mirror.store(lease, pairs).wait()
            times.append(time.perf_counter() - begin)
        pipe.send(times)


def _store_rate(path: str, world: int) -> float:
    """Return the bytes a second that ranks store together, each its part of the pages."""
    together = SPAWN.Barrier(world)
    with children(_sharer, [(path, rank, world, together) for rank in range(world)]) as pipes:
        for pipe in pipes:
            pipe.recv()
        with connect(path, name=f"store{world}") as client:
            lease = client.lease(STORED_PAGES)
            for pipe in pipes:
                pipe.send(lease)
            slowest = [max(times) for times in zip(*(pipe.recv() for pipe in pipes), strict=True)]
    return STORED_PAGES * MIB / statistics.median(slowest)


def _looker(path: str, engine: str, keys: list[bytes], together: object, pipe: Pipe) -> None:
    with connect(path, name="looked", engine=engine) as client:
        together.wait()
        count, end = 0, time.monotonic() + LOOKED_S
        while time.monotonic() < end:
            client.lookup(keys).release()
            count += 1
        pipe.send(count)


def _lookup_counts(path: str, keys: list[bytes], clients: int) -> list[int]:
    together = SPAWN.Barrier(clients)
    work: list[tuple[object, ...]] = [(path, f"client{number}", keys, together) for number in range(clients)]
    with children(_looker, work) as pipes:
        return [int(pipe.recv()) for pipe in pipes]


def shared() -> None:
    with daemon("1GiB", "--pin", "none") as served:
        sizes = {world: _mla_bytes(served.socket, world) for world in (1, 2, 4, 8)}
        alone, both = _store_rate(served.socket, 1), _store_rate(served.socket, 2)
        with Channel.open(served.socket, role=Role.WORKER) as worker:
            worker.call("attach", **_attach("looked", 0, 1, 10_000, [["k", 0, 1, 4096, 16]]))
            keys = [os.urandom(32) for _ in range(CHAIN)]
            with connect(served.socket, name="looked") as client:
                _fill(client, [worker], keys)
            counts = {clients: _lookup_counts(served.socket, keys, clients) for clients in (1, 2, 4)}
            worker.call("detach", unmapped=True)
    rows = [
        [f"host bytes, MLA, {world} ranks", f"{size / sizes[1]:.2f} of one copy", "1.00"]
        for world, size in sizes.items()
    ]
    rows.append(
        [
            "store rate of 2 ranks that share planes",
            f"{both / alone:.2f} of one rank alone ({alone / 1e9:.1f} GB/s)",
            "",
        ]
    )
    for clients, found in counts.items():
        fair = f"the slowest has {min(found) / max(found):.2f} of the fastest"
        rows.append(
            [f"lookups of {CHAIN} keys, {clients} clients", f"{sum(found) / LOOKED_S:.0f} a second, {fair}", ""]
        )
    table("One pool for many", ["what", "measured", "to reach"], rows)


# -- start ---------------------------------------------------------------------------------------


def start() -> None:
    with daemon("1GiB", "--pin", "none") as served:
        ready_s = served.ready_s
        pool = device_pool(64 << 10, 64)
        pages = 700 * MIB // (64 << 10) // PLANES
        begin = time.perf_counter()
        mirror = SharedHostMirror(pool, pages, socket=served.socket, name="attach", layout="page")
        attach_s = time.perf_counter() - begin
        attached_bytes = mirror.bytes_per_host_page() * pages
        mirror.close()
    with daemon("2MiB", "--pin", "none") as served:
        least_s = served.ready_s
    fill_s = median(lambda: torch.empty(GIB, dtype=torch.uint8).fill_(1), runs=3, warmup=0)
    rows = [
        ["daemon ready, 2 MiB", f"{least_s:.2f} s", "", "1 s besides prefaulting"],
        ["daemon ready, 1 GiB", f"{ready_s:.2f} s", f"{(ready_s - least_s) / fill_s:.2f}", ""],
        [
            "attach, per GiB",
            f"{attach_s * GIB / attached_bytes:.4f} s",
            f"{attach_s * GIB / attached_bytes / fill_s:.4f}",
            "",
        ],
    ]
    table("Start", ["what", "time", "of filling 1 GiB of fresh memory", "to reach"], rows)


def main() -> None:
    torch.manual_seed(0)
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Linux {platform.release()}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    copies()
    control()
    load()
    shared()
    start()


if __name__ == "__main__":
    main()
