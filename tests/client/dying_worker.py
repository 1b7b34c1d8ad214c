"""A worker that stores one pattern into a lease without pause until it is killed; see ``test_crash_gpu.py``.

``dying_worker.py SOCKET DEVICE LAYOUT``: says "attached", reads a pickled lease in hex from stdin, says
"storing" when copies are complete and more are under way, and then forks as each line on stdin asks:
"keeps" leaves a child that keeps all, "maps" one that closes its descriptors.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch

from sharedmirror.mirror import SharedHostMirror

PAGE_SIZE, PAGES, ROW_BYTES, LAYERS = 16, 33, 4096, 2
OLD = 0xAA
IN_FLIGHT = 64
"""Stores under way at any time: seconds of copies that nobody waits for."""


def make_pool(device: str, fill: int) -> Any:
    rows = [
        torch.full((PAGES * PAGE_SIZE, ROW_BYTES), fill, dtype=torch.uint8, device=device) for _ in range(2 * LAYERS)
    ]
    return SimpleNamespace(page_size=PAGE_SIZE, k_buffer=rows[:LAYERS], v_buffer=rows[LAYERS:])


def attach(socket: str, device: str, layout: str, engine: str, fill: int) -> SharedHostMirror:
    pool = make_pool(device, fill)
    return SharedHostMirror(
        pool, PAGES, socket=socket, engine=engine, rank=0, world_size=1, pages="leased", layout=layout
    )


def store_for_ever(mirror: SharedHostMirror, lease: Any, storing: threading.Event) -> None:
    pairs = list(enumerate(lease.pages))
    transfers = [mirror.store(lease, pairs)]
    transfers[0].wait()
    while True:
        transfers.append(mirror.store(lease, pairs))
        if len(transfers) > IN_FLIGHT:
            storing.set()
            transfers.pop(0).wait()


def leave_child(kind: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    if kind == "maps":
        os.closerange(3, 1024)
    while True:
        signal.pause()


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    socket, device, layout = sys.argv[1:]
    mirror = attach(socket, device, layout, "old", OLD)
    say("attached")
    lease = pickle.loads(bytes.fromhex(sys.stdin.readline()))
    storing = threading.Event()
    threading.Thread(target=store_for_ever, args=(mirror, lease, storing), daemon=True).start()
    storing.wait()
    say("storing")
    for line in sys.stdin:
        say(str(leave_child(line.strip())))


if __name__ == "__main__":
    main()
