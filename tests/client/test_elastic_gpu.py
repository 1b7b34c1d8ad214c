"""A pool on a GPU grows and gives back: what is registered with the driver follows what is mapped."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from sharedmirror.control import Client, connect
from sharedmirror.mirror import SharedHostMirror
from tests.conftest import until

if TYPE_CHECKING:
    from tests.conftest import Starter

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
ROWS, ROW_BYTES, DEVICE_PAGES = 4, 8192, 512
STEP = 32
"""Pages of 64 KiB in a level of 2 MiB."""
MOST = 12 * STEP


def make_pool() -> SimpleNamespace:
    torch.zeros(1, device=DEVICE)
    tensors = [torch.randint(0, 256, (DEVICE_PAGES * ROWS, ROW_BYTES), dtype=torch.uint8) for _ in range(2)]
    return SimpleNamespace(page_size=ROWS, k_buffer=[tensors[0].to(DEVICE)], v_buffer=[tensors[1].to(DEVICE)])


def keys(first: int, end: int) -> list[bytes]:
    return [b"key%d" % number for number in range(first, end)]


def store(mirror: SharedHostMirror, client: Client, first: int, end: int) -> None:
    """Key n is device page n."""
    granted = client.reserve(keys(first, end), wait_s=20)
    if granted.lease is not None:
        pairs = [(int(key[3:]), page) for key, page in granted.granted.items()]
        mirror.store(granted.lease, pairs).wait(60)
        mirror.commit(granted.lease)


def check(mirror: SharedHostMirror, client: Client, pool: SimpleNamespace, first: int, end: int) -> int:
    """Load what is there of some keys over zeros; returns how many there are."""
    before = [tensor.clone() for tensor in (pool.k_buffer[0], pool.v_buffer[0])]
    with client.lookup(keys(first, end), "each") as hit:
        found = [(first + at, page) for at, page in enumerate(hit.pages) if page >= 0]
        for device, _ in found:
            for tensor in (pool.k_buffer[0], pool.v_buffer[0]):
                tensor[device * ROWS : (device + 1) * ROWS] = 0
        mirror.load(hit, found).wait(60)
    for tensor, expected in zip((pool.k_buffer[0], pool.v_buffer[0]), before, strict=True):
        assert torch.equal(tensor, expected)
    return len(found)


def test_memory_comes_and_goes(start: Starter) -> None:
    daemon = start(memory="32MiB")
    pool = make_pool()
    with (
        SharedHostMirror(
            pool, (2, MOST), socket=daemon.socket, name="a", engine="a", pages="leased", layout="page"
        ) as mirror,
        connect(daemon.socket, "a", "a") as client,
    ):
        assert mirror._attachment.backed == STEP
        for round_ in range(3):
            for begin in range(0, MOST - 1, STEP):
                store(mirror, client, begin, min(begin + STEP, MOST - 1))
            assert mirror._attachment.backed == MOST
            assert check(mirror, client, pool, 0, MOST - 1) == MOST - 1
            other = SharedHostMirror(
                make_pool(), 10 * STEP, socket=daemon.socket, name="b", engine="b", pages="leased", layout="page"
            )
            until(lambda: mirror._attachment.backed == 6 * STEP)
            left = check(mirror, client, pool, 0, MOST - 1)
            assert 0 < left < 6 * STEP, f"round {round_}"
            with connect(daemon.socket, "b", "b") as theirs:
                lease = theirs.lease(10 * STEP - 1)
                other.store(lease, [(page, page) for page in lease.pages]).wait(60)
                other.commit(lease)
            assert check(mirror, client, pool, 0, MOST - 1) == left
            other.close()
            del other
            gc.collect()
            daemon.wait_status(lambda status: len(status["sessions"]) == 2)
    gc.collect()
