"""Loads of shared planes by two GPUs: each alone, both at once, and together, in one run.

    PYTHONPATH=.:daemon python3 scripts/bench_exchange_gpu.py [--mib 1024 64 256] [--slots 3x16 2x32 ...]

Two processes, one a GPU, over a real daemon. Times are from a common start to the moment when the slower rank has all
bytes; every number is a median of 15, after 20 loads that are not counted. Progress goes to stderr, one markdown table
to stdout.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sharedmirror.channel import Channel
from sharedmirror.transfers import Transfer
from sharedmirror.types import Role

MIB, GIB = 1 << 20, 1 << 30
PLANES, ROWS, ROW_BYTES = 64, 16, 4096
PAGE_BYTES = PLANES * ROWS * ROW_BYTES
PAGES, DEVICE_PAGES = 256, 320
REPEATS, WARM_UP = 15, 20
START_S = 0.02
PATIENCE_S = 120


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Rank:
    """What runs in a rank's process."""

    def __init__(self, rank: int, socket: str, barrier: Any) -> None:
        self.rank, self.socket, self.barrier = rank, socket, barrier
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        made, shape = torch.Generator(device=self.device).manual_seed(7), (DEVICE_PAGES * ROWS, ROW_BYTES)
        self.planes = [
            torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=made) for _ in range(PLANES)
        ]
        self.first = [plane[: PAGES * ROWS].clone() for plane in self.planes]
        half = PLANES // 2
        self.pool = SimpleNamespace(page_size=ROWS, k_buffer=self.planes[:half], v_buffer=self.planes[half:])
        self.mirror: Any = None

    def attach(self, engine: str, slots: int, slot_mib: int) -> None:
        from sharedmirror import SharedHostMirror
        from sharedmirror.copies.together import exchange

        exchange.SLOT_BYTES, exchange.LEAST_SLOT_BYTES, exchange.SLOTS = slot_mib * MIB, MIB, slots
        exchange.TOGETHER_BYTES = 1
        exchange.SAME_DEVICE = torch.cuda.device_count() < 2
        self.mirror = SharedHostMirror(
            self.pool, PAGES + 4, socket=self.socket, engine=engine, rank=self.rank, world_size=2, pages="leased",
            layout="page", shard=(0, 1),
        )  # fmt: skip

        for part in self.mirror._parts:
            part.engine.wait_for_kernels()

    def store(self, lease: Any) -> None:
        self.mirror.store(lease, list(enumerate(lease.pages))).wait(PATIENCE_S)
        self.mirror.commit(lease)

    def close(self) -> None:
        self.mirror.close()

    def pinned(self, mib: int) -> list[float]:
        """Plain copies of pinned memory."""
        host = torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(mib * MIB, dtype=torch.uint8, device=self.device)
        return self.times(lambda: device.copy_(host, non_blocking=True))

    def load(self, hit: Any, mib: int, together: bool) -> list[float]:
        count = mib * MIB // PAGE_BYTES
        order = torch.randperm(DEVICE_PAGES, generator=torch.Generator().manual_seed(self.rank)).tolist()
        pairs = np.array([order[:count], hit.pages[:count]]).T.copy()
        for plane in self.planes:
            plane.fill_(0)
        calls: list[float] = []

        def once() -> Any:
            begin = time.perf_counter()
            transfer = self.mirror.load(hit, pairs, together=together)
            calls.append(time.perf_counter() - begin)
            return transfer

        times = self.times(once)
        if together:
            active = self.mirror._engine._together[1].active
            if not active:
                note(f"rank {self.rank}: NOT together")
        for plane, first in zip(self.planes, self.first, strict=True):
            found = plane.view(DEVICE_PAGES, -1)[order[:count]]
            if not torch.equal(found, first.view(PAGES, -1)[:count]):
                raise AssertionError(f"rank {self.rank}: wrong bytes")
        return [*times, statistics.median(calls)]

    def times(self, work: Any) -> list[float]:
        found = []
        for _ in range(WARM_UP + REPEATS):
            torch.cuda.synchronize()
            self.barrier.wait(PATIENCE_S)
            # Processes leave a barrier one after the other: both start at the next full 20 ms of the common clock.
            begin = (int(time.perf_counter() / START_S) + 2) * START_S
            while time.perf_counter() < begin:
                pass
            transfer = work()
            torch.cuda.current_stream().synchronize()
            found.append(time.perf_counter() - begin)
            if isinstance(transfer, Transfer):
                transfer.wait(PATIENCE_S)
        return found[WARM_UP:]


def serve(pipe: Any, rank: int, socket: str, barrier: Any) -> None:
    logging.basicConfig(level=logging.INFO)
    side = Rank(rank, socket, barrier)
    pipe.send("up")
    while (command := pipe.recv()) != "end":
        try:
            pipe.send(getattr(side, command[0])(*command[1:]))
        except Exception as error:
            pipe.send(error)
    pipe.send("over")


def ask(pipes: list[Any], *command: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(command)
    answers = []
    for pipe in pipes:
        if not pipe.poll(PATIENCE_S):
            raise SystemExit(f"no answer to {command[0]}")
        answers.append(pipe.recv())
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def slower(answers: list[list[float]]) -> float:
    """Return the median, over the repeats, of the slower rank's time."""
    return statistics.median(max(pair) for pair in zip(*(answer[:REPEATS] for answer in answers), strict=True))


def measure(path: str, options: argparse.Namespace) -> list[str]:
    from sharedmirror import connect

    spawn = multiprocessing.get_context("spawn")
    barrier, alone = spawn.Barrier(2), spawn.Barrier(1)
    pipes, workers = [], []
    for rank, each in ((0, barrier), (1, barrier), (0, alone)):
        near, far = spawn.Pipe()
        worker = spawn.Process(target=serve, args=(far, rank, path, each))
        worker.start()
        pipes.append(near)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()
    ranks, single = pipes[:2], pipes[2:]
    rows = []

    def add(what: str, mib: int, seconds: float, limit_s: float, call_s: float | None = None) -> None:
        rate, share = mib * MIB / seconds / 1e9, limit_s / seconds
        call = "" if call_s is None else f"{call_s * 1e3:.2f} ms"
        rows.append(f"| {what} | {mib} MiB | {seconds * 1e3:.2f} ms | {rate:.1f} GB/s | {share:.2f} | {call} |")
        note(rows[-1])

    limits = {}
    for mib in options.mib:
        limits[mib] = slower(ask(single, "pinned", mib))
        add("one pinned copy, one GPU", mib, limits[mib], limits[mib])
        add("one pinned copy each, both GPUs", mib, slower(ask(ranks, "pinned", mib)), limits[mib])
    single[0].send("end")
    keys = [b"%d" % at for at in range(PAGES)]
    for number, shape in enumerate(options.slots):
        slots, slot_mib = map(int, shape.split("x"))
        ask(ranks, "attach", f"e{number}", slots, slot_mib)
        client = connect(path, "default", f"e{number}", max_held=PAGES + 3)
        if number == 0:
            ask(ranks, "store", client.reserve(keys).lease)
        hit = client.lookup(keys)
        if len(hit) != PAGES:
            raise SystemExit(f"{len(hit)} of {PAGES} pages found")
        for mib in options.mib:
            if number == 0:
                found = ask(ranks, "load", hit, mib, False)
                add("each loads all, at once", mib, slower(found), limits[mib], max(each[-1] for each in found))
            found = ask(ranks, "load", hit, mib, True)
            what = f"together, {slots} slots of {slot_mib} MiB"
            add(what, mib, slower(found), limits[mib], max(each[-1] for each in found))
        hit.release()
        ask(ranks, "close")
        client.close()
    for pipe in ranks:
        pipe.send("end")
    for worker in workers:
        worker.join(30)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="*", default=[1024, 256, 64, 32, 16])
    parser.add_argument("--slots", nargs="*", default=["3x16", "2x32", "3x8", "4x8", "3x4", "4x32"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "d.sock")
        line = [sys.executable, "-m", "sharedmirrord", "--memory", "2GiB", "--pin", "none", "--socket", path]
        with open(Path(directory) / "log", "wb") as log:
            daemon = subprocess.Popen(line, stderr=log, env=dict(os.environ))
        try:
            while not os.path.exists(path) and daemon.poll() is None:
                time.sleep(0.05)
            rows = measure(path, options)
            with Channel.open(path, role=Role.OBSERVER) as channel:
                huge = channel.call("status")["status"]["daemon"]["huge_page_share"]
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)
    print(
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"huge pages {huge:.0%}\n"
    )
    print("| what | bytes a rank | time | rate a rank | of one link's pinned copy | CPU of the call |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
