"""Regions lie on the NUMA node of their rank's GPU, shared ones on all of them; growth and restarts keep to it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from sharedmirror.types import Plane, Role
from sharedmirrord import cli, memory, syscalls
from tests.daemon.core_driver import MIB
from tests.daemon.durable_driver import DurableDriver

KIB = 1 << 10
STEP = 32
"""Pages of 64 KiB in 2 MiB."""


def planes(rank: int) -> list[list[Any]]:
    """Return a plane of the rank's own and one that both ranks share."""
    return [Plane("k", rank, 2, 64 * KIB, 4).to_wire(), Plane("mla", 0, 1, 64 * KIB, 4).to_wire()]


def attach(
    driver: DurableDriver, *nodes: int | None, count: Any = 2 * STEP, **changes: Any
) -> list[tuple[int, dict[str, Any]]]:
    """Attach two ranks whose GPUs hang on ``nodes``; return session and answer of each."""
    workers = [driver.hello() for _ in nodes]
    asked = [
        driver.attach(worker, rank=rank, node=node, planes=planes(rank), num_host_pages=count, wait_s=5.0, **changes)
        for rank, (worker, node) in enumerate(zip(workers, nodes, strict=True))
    ]
    return [(worker, driver.result(worker, request)) for worker, request in zip(workers, asked, strict=True)]


def where(driver: DurableDriver, name: str = "p") -> dict[tuple[int, ...], dict[int, int]]:
    """Return how many MiB the region of each group of ranks has on each node."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for region in driver.pool(name).regions:
        found[region.ranks] = on = {node: 0 for node, _, _ in driver.state.space.parts}
        for _, offset, size in region.extents:
            for node, start, end in driver.state.space.parts:
                on[node] += max(0, min(end, offset + size) - max(start, offset)) // MIB
    return found


def two_nodes(size_mib: int = 64) -> DurableDriver:
    return DurableDriver(size_mib * MIB, nodes=[0, 1])


def test_each_rank_has_its_own_node_and_what_they_share_lies_on_both() -> None:
    driver = two_nodes()
    (_, first), (_, second) = attach(driver, 1, 0)
    assert where(driver) == {(0,): {0: 0, 1: 4}, (1,): {0: 4, 1: 0}, (0, 1): {0: 2, 1: 2}}
    shared = [region for region in first["regions"] if region["ranks"] == [0, 1]]
    assert shared == [region for region in second["regions"] if region["ranks"] == [0, 1]]
    assert [size for _, _, size in shared[0]["extents"]] == [2 * MIB, 2 * MIB]


@pytest.mark.parametrize(
    ("nodes", "own", "shared"),
    [
        ((1, 1), {0: 0, 1: 4}, {0: 0, 1: 4}),
        ((None, None), {0: 4, 1: 0}, {0: 4, 1: 0}),
        ((7, 7), {0: 4, 1: 0}, {0: 4, 1: 0}),  # a GPU on a node that has no memory
        ((1, None), {0: 0, 1: 4}, {0: 2, 1: 2}),
    ],
)
def test_ranks_of_one_node_and_ranks_that_name_none(
    nodes: tuple[int | None, int | None], own: dict[int, int], shared: dict[int, int]
) -> None:
    driver = two_nodes()
    attach(driver, *nodes)
    assert (where(driver)[0,], where(driver)[0, 1]) == (own, shared)


def test_a_client_that_knows_of_no_nodes_is_served() -> None:
    driver = two_nodes()
    reply = driver.ask_attach(driver.hello(), world_size=1, num_host_pages=2 * STEP)
    assert reply["regions"][0]["extents"] == [[0, 0, 2 * MIB]]


def test_a_rank_that_comes_again_before_its_pool_is_made_may_have_moved() -> None:
    driver = two_nodes()
    workers = [driver.hello() for _ in range(2)]
    for rank, worker in enumerate(workers):
        driver.attach(worker, rank=rank, node=0, planes=planes(rank), num_host_pages=2 * STEP, wait_s=5.0)
        if rank == 0:
            assert driver.pool().nodes == {0: 0}
            driver.disconnect(worker)
            driver.gone(worker)
            assert driver.state.pools == {}
            driver.attach(driver.hello(), rank=0, node=1, planes=planes(0), num_host_pages=2 * STEP, wait_s=5.0)
    assert where(driver) == {(0,): {0: 0, 1: 4}, (1,): {0: 4, 1: 0}, (0, 1): {0: 2, 1: 2}}


def test_who_gives_up_while_others_wait_takes_its_node_along() -> None:
    driver = two_nodes()
    waiting = [driver.hello() for _ in range(2)]
    for rank, worker in enumerate(waiting):
        driver.attach(worker, rank=rank, node=rank, world_size=3, planes=planes(rank), wait_s=5.0)
    driver.kill(waiting[1])
    assert driver.pool().nodes == {0: 0}


def test_no_room_on_the_node_is_no_refusal() -> None:
    driver = two_nodes(16)
    attach(driver, 0, 0, pool="full", engine="f")
    assert where(driver, "full") == {(0,): {0: 4, 1: 0}, (1,): {0: 0, 1: 4}, (0, 1): {0: 4, 1: 0}}
    reply = driver.ask_attach(driver.hello(), world_size=1, node=0, num_host_pages=4 * STEP * 32, engine="g", pool="q")
    assert reply["regions"][0]["extents"] == [[0, 12 * MIB, 4 * MIB]]
    assert driver.state.space.free_bytes == 0


def test_an_elastic_pool_grows_where_it_lies_and_a_restart_keeps_it() -> None:
    driver = two_nodes()
    ranks = attach(driver, 1, 0, count=(2, 8 * STEP))
    assert where(driver) == {(0,): {0: 0, 1: 2}, (1,): {0: 2, 1: 0}, (0, 1): {0: 2, 1: 0}}  # one piece each
    head = driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="p", engine="e")
    driver.ask(head, "lease", n=2 * STEP - 1)
    assert where(driver) == {(0,): {0: 0, 1: 4}, (1,): {0: 4, 1: 0}, (0, 1): {0: 2, 1: 2}}
    before = driver.pool().regions, driver.state.space._free
    driver = driver.restarted()
    assert (driver.pool().regions, driver.state.space._free) == before
    for session in (head, *(worker for worker, _ in ranks)):
        driver.resume(session)
    driver.ask(head, "lease", n=2 * STEP)
    assert where(driver) == {(0,): {0: 0, 1: 8}, (1,): {0: 8, 1: 0}, (0, 1): {0: 4, 1: 4}}


def test_the_daemon_finds_the_same_parts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "devices/system/node/has_memory"
    listed.parent.mkdir(parents=True)
    listed.write_text("0-1\n")
    real = memory.memory_nodes
    monkeypatch.setattr(memory, "memory_nodes", lambda: real(sys=str(tmp_path)))
    bound: list[tuple[int, int]] = []

    def prefer(address: int, size_bytes: int, node: int) -> int:
        bound.append((node, size_bytes))
        return 0

    monkeypatch.setattr(syscalls, "prefer", prefer)
    path, options = str(tmp_path / "socket"), cli._ArenaOptions(huge_pages="never", pin="none")
    parts = ((0, 0, 4 * MIB), (1, 4 * MIB, 10 * MIB))
    with contextlib.ExitStack() as stack:
        made = cli._create(stack, path, 10 * MIB, options)
        again = stack.enter_context(contextlib.ExitStack())
        found = cli._adopt(again, made.segment.name, memory.parse_size("10MiB"), options)
        assert made.state.space.parts == found.state.space.parts == parts
    assert bound == [(0, 4 * MIB), (1, 6 * MIB)] * 2
    assert not [name for name in (made.arena.name, made.segment.name) if os.path.exists(memory.SHM_DIR + name)]
