"""Pools as their ranks meet them: what must agree, who may attach, what the arena has room for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.errors import (
    ArenaFull,
    EngineBusy,
    PoolMismatch,
    RankAttached,
    RankError,
    RanksMissing,
    UsageError,
)

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter
MIB = 1 << 20
_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"server{next(_numbers)}"


# --- pools


def test_two_ranks_write_one_arena_without_overlap(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    workers = processes.engine(shared_daemon.socket, 3, pool=name, num_host_pages=1000)
    taken: list[tuple[int, int]] = []
    for worker in workers:
        (region,) = worker.reply["regions"]
        assert worker.reply["num_host_pages"] == 1000 and worker.reply["planes"] == [[0, 0, 4096]]
        assert region["bytes"] >= 1000 * 4096
        taken += [(offset, length) for _, offset, length in region["extents"]]
    taken.sort()
    assert all(offset % (2 * MIB) == 0 and length % (2 * MIB) == 0 for offset, length in taken)
    assert all(a + n <= b for (a, n), (b, _) in zip(taken, taken[1:], strict=False))


def test_ranks_with_the_same_shard_share_a_region(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    planes = [["latent", 0, 1, 512, 16]]
    first, second = processes.engine(shared_daemon.socket, 2, pool=name, planes=planes)
    assert first.reply["regions"] == second.reply["regions"]
    assert shared_daemon.pool(name)["bytes_per_host_page"] == 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 32}, "page size 16, rank 0 asks for 32"),
        ({"world_size": 3}, "world size 1, rank 0 asks for 3"),
        ({"layout": "slab"}, "layout page, rank 0 asks for slab"),
        ({"kind": "static"}, "kind leased, rank 0 asks for static"),
        ({"frames_per_page": 2}, "frames_per_page 1, rank 0 asks for 2"),
        ({"num_host_pages": 10}, "num_host_pages 9, rank 0 asks for 10"),
        ({"planes": [["k0", 0, 1, 8192, 16]]}, "slice_bytes=4096.*slice_bytes=8192"),
        ({"planes": [["k1", 0, 1, 4096, 16]]}, "'k0'.*'k1'"),
        ({"planes": [["k0", 0, 1, 4096, 16], ["v0", 0, 1, 4096, 16]]}, "had 1, now 2"),
    ],
    ids=repr,
)
def test_a_rank_that_differs_from_its_pool_is_told_both_values(
    shared_daemon: Daemon, processes: Processes, name: str, change: dict[str, Any], words: str
) -> None:
    processes.engine(shared_daemon.socket, pool=name)
    other = processes.worker(shared_daemon.socket)
    with pytest.raises(PoolMismatch, match=words) as caught:
        other.attach(pool=name, engine="other", **change)
    assert name in caught.value.message or "planes" in change
    other.attach(pool=name, engine="other", num_host_pages=None)
    assert other.reply["num_host_pages"] == 9


def test_ranks_of_one_engine_must_agree_while_the_pool_forms(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    first, second = processes.worker(shared_daemon.socket), processes.worker(shared_daemon.socket)
    first.send_attach(pool=name, world_size=2, rank=0, tag="fp16")
    shared_daemon.wait_status(lambda status: [pool for pool in status["pools"] if pool["name"] == name])
    for change, words in (({"page_size": 4}, "page size 16, rank 1 asks for 4"), ({"tag": "fp8"}, "'fp16'.*'fp8'")):
        with pytest.raises(PoolMismatch, match=words):
            second.attach(**{"pool": name, "world_size": 2, "rank": 1, "tag": "fp16", **change})
    assert shared_daemon.pool(name)["state"] == "forming"
    second.attach(pool=name, world_size=2, rank=1, tag="fp16")
    first.result()
    assert shared_daemon.pool(name)["state"] == "ready"


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (-1, 1), (7, 2), (0, 0), (0, -1)])
def test_a_rank_outside_its_world_is_refused(
    shared_daemon: Daemon, processes: Processes, name: str, rank: int, world: int
) -> None:
    worker = processes.worker(shared_daemon.socket)
    with pytest.raises(RankError, match=f"rank {rank} is outside a world of {world}|not {world}"):
        worker.attach(pool=name, rank=rank, world_size=world, planes=[["k", 0, 1, 4096, 16]])


def test_a_pool_that_waits_in_vain_names_the_missing_ranks_and_leaves_nothing(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    worker = processes.worker(shared_daemon.socket)
    with pytest.raises(RanksMissing, match=rf"pool '{name}' waits for ranks \[0, 2\] of 3") as caught:
        worker.attach(pool=name, rank=1, world_size=3, wait_s=0.05)
    assert caught.value.ids == {"ranks": [0, 2]}
    assert [pool for pool in shared_daemon.status()["pools"] if pool["name"] == name] == []
    worker.attach(pool=name)


def test_a_rank_attached_twice_is_refused_with_the_living_pid(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name)
    second = processes.worker(shared_daemon.socket)
    with pytest.raises(RankAttached, match=f"rank 0 of engine '0' is attached by the living process {first.pid}"):
        second.attach(pool=name)
    with pytest.raises(UsageError, match="attached already"):
        first.attach(pool=name)
    second.attach(pool=name, engine="1")


def test_another_launch_waits_for_the_living_one_and_names_it(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name, launch="monday")
    second = processes.worker(shared_daemon.socket)
    with pytest.raises(EngineBusy, match=f"process {first.pid}") as caught:
        second.attach(pool=name, launch="tuesday", wait_s=0.05)
    assert caught.value.ids == {"pids": [first.pid]} and caught.value.retryable
    second.send_attach(pool=name, launch="tuesday")
    first.kill()
    second.result()


def test_a_static_pool_has_one_holder(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name, kind="static")
    assert shared_daemon.pool(name)["pages"] | {"leased": 8, "free": 0} == shared_daemon.pool(name)["pages"]
    second = processes.worker(shared_daemon.socket)
    with pytest.raises(EngineBusy, match=f"process {first.pid}"):
        second.attach(pool=name, kind="static", engine="other", wait_s=0.05)
    second.send_attach(pool=name, kind="static", engine="other")
    first.call("detach", unmapped=True)
    second.result()
    assert shared_daemon.pool(name)["ranks_attached"] == {"other": [0]}


def test_a_mapping_that_outlives_its_detach_still_counts(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name, kind="static")
    first.call("detach", unmapped=False)
    states = [s["state"] for s in shared_daemon.status()["sessions"] if s["pool"] == name]
    assert states == ["detached"]
    first.call("unmapped")
    assert [s for s in shared_daemon.status()["sessions"] if s["pool"] == name] == []


def test_an_arena_too_small_tells_bytes_asked_and_free(start: Starter, processes: Processes) -> None:
    daemon = start(memory="8MiB")
    worker = processes.worker(daemon.socket)
    with pytest.raises(ArenaFull) as caught:
        worker.attach(num_host_pages=4096)
    assert f"{4096 * 4096} bytes" in caught.value.message and f"{8 * MIB} " in caught.value.message
    assert not caught.value.retryable
    assert daemon.status()["pools"] == []
    worker.attach(num_host_pages=None)
    assert 1 < worker.reply["num_host_pages"] <= 4 * MIB // 4096
    free = daemon.status()["arena"]["bytes_free"]
    assert 4 * MIB <= free < 8 * MIB
    other = processes.worker(daemon.socket)
    other.attach(pool="rest", num_host_pages=free // 4096)
    third = processes.worker(daemon.socket)
    with pytest.raises(ArenaFull, match=f"the arena has 0 of {8 * MIB} bytes free"):
        third.attach(pool="more")


def test_every_rank_hears_that_the_arena_is_too_small(start: Starter, processes: Processes) -> None:
    daemon = start(memory="4MiB")
    workers = [processes.worker(daemon.socket) for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.send_attach(rank=rank, world_size=2, num_host_pages=4096)
    for worker in workers:
        with pytest.raises(ArenaFull):
            worker.result()
    assert daemon.status()["pools"] == []
