"""Memory at start, on a machine with a GPU: the daemon, a worker's attach, and what a neighbour feels.

``--gib`` sizes the arena. For each chunk size a worker attaches to a ready arena and registers it, while
another process on the same GPU launches a small kernel and asks for free memory, over and over. The
figures of registration stand beside a prefault of the same memory by the driver alone (one call).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GIB = 1 << 30
PLANES, SLICE = 128, 32 << 10


def start_daemon(path: str, gib: int, huge: str) -> tuple[subprocess.Popen[bytes], float, dict[str, Any]]:
    from sharedmirror.channel import Channel
    from sharedmirror.types import Role

    begin = time.perf_counter()
    command = [sys.executable, "-m", "sharedmirrord", "--memory", f"{gib}GiB", "--socket", path, "--huge-pages", huge]
    process = subprocess.Popen(command)
    while True:
        try:
            with Channel.open(path, role=Role.OBSERVER, timeout_s=2) as channel:
                status: dict[str, Any] = channel.call("status")["status"]
        except Exception:
            if process.poll() is not None:
                raise SystemExit(f"the daemon ended with {process.returncode}") from None
            time.sleep(0.005)
            continue
        if status["daemon"]["state"] == "ready":
            return process, time.perf_counter() - begin, status["daemon"]
        time.sleep(0.005)


def worker(path: str, chunk: int, gib: int, name: str, go: Connection) -> None:
    import torch

    from sharedmirror import PlaneSpec, PoolLayout, SharedHostMirror, registration
    from sharedmirror.adapter import DevicePool

    registration.CHUNK_BYTES = chunk
    torch.zeros(1, device="cuda")
    layout = PoolLayout([PlaneSpec(f"p{i}", SLICE // 16, 16) for i in range(PLANES)], 16)
    tensors = [torch.ones((64 * 16, SLICE // 16), dtype=torch.uint8, device="cuda") for _ in range(PLANES)]
    pool = DevicePool(layout, tensors)
    pages = (gib * GIB - (64 << 20)) // (PLANES * SLICE)
    go.send("ready")
    go.recv()
    begin = time.perf_counter()
    mirror = SharedHostMirror(pool, pages, socket=path, name=name, layout="page")
    attached = time.perf_counter() - begin
    mirror.store_pages([(i, i + 1) for i in range(16)])
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    for each in mirror._attachment.registrations:
        each.require(each._end)
    whole = time.perf_counter() - begin
    begin = time.perf_counter()
    mirror.close()
    go.send((attached, first, whole, time.perf_counter() - begin))


def neighbour(go: Connection) -> None:
    import torch

    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    go.send("ready")
    worst_kernel = worst_info = 0.0
    count = 0
    while not go.poll():
        begin = time.perf_counter()
        x.add_(1)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        torch.cuda.mem_get_info()
        end = time.perf_counter()
        worst_kernel, worst_info = max(worst_kernel, middle - begin), max(worst_info, end - middle)
        count += 1
    go.send((worst_kernel, worst_info, count))


def measure(path: str, chunk: int, gib: int, name: str) -> list[str]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    near, far = spawn.Pipe()
    first = spawn.Process(target=worker, args=(path, chunk, gib, name, theirs))
    second = spawn.Process(target=neighbour, args=(far,))
    first.start()
    second.start()
    ours.recv()
    near.recv()
    time.sleep(0.5)
    ours.send("go")
    attached, first_copy, whole, closed = ours.recv()
    near.send("stop")
    kernel, info, _count = near.recv()
    first.join()
    second.join()
    return [
        f"{chunk / GIB:g} GiB",
        f"{attached:.2f} s",
        f"{first_copy:.2f} s",
        f"{whole / gib:.4f} s",
        f"{closed / gib:.4f} s",
        f"{kernel * 1e3:.0f} ms",
        f"{info * 1e3:.0f} ms",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=32)
    parser.add_argument("--huge", default="auto", choices=("auto", "always", "never"))
    parser.add_argument("--chunks", type=float, nargs="*", default=[0.25, 0.5, 1, 4, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "daemon.sock")
        process, ready_s, told = start_daemon(path, options.gib, options.huge)
        rows = []
        try:
            for chunk in options.chunks:
                # A static pool keeps its room, so each chunk size registers the same pool again.
                rows += [measure(path, int(chunk * GIB), options.gib, "start")]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    print(
        f"\n{options.gib} GiB, {len(os.sched_getaffinity(0))} cores, huge pages {told['huge_page_share']:.0%}, "
        f"pin {told['pin']}: the daemon is ready after {ready_s:.2f} s"
    )
    head = ["chunk", "attach returns", "first copy done", "all registered, per GiB", "close, per GiB"]
    head += ["neighbour's worst kernel", "worst cudaMemGetInfo"]
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
