"""Loads together on two GPUs: two real ranks over a real daemon, every byte compared, and ranks that do not come.

Run by ``scripts/test-gpu`` on a machine with two GPUs. With SHAREDMIRROR_TEST_ONE_DEVICE=1 both ranks use one GPU.
"""

from __future__ import annotations

import multiprocessing.resource_tracker
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror import connect
from sharedmirror.control import Client, Hit
from sharedmirror.errors import PartMissing
from tests.client.exchange_process import ONE_DEVICE, RankProcess, Shape

if TYPE_CHECKING:
    from tests.conftest import Starter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < (1 if ONE_DEVICE else 2), reason="needs two CUDA devices, or one that is told to do"
    ),
    pytest.mark.timeout(300),
]
multiprocessing.resource_tracker.ensure_running()

MIB = 1 << 20
ODD = [1 << 10, 100, 16, 1 << 12, 7, 48]
LARGE = [1 << 12] * 16
SMALL_SLOTS = {"SLOT_BYTES": 1 * MIB, "LEAST_SLOT_BYTES": 1 * MIB, "TOGETHER_BYTES": 1, "PATIENCE_S": 3.0}


class Pair:
    """Two ranks with stored pages, and their scheduler."""

    def __init__(self, socket: str, shape: Shape, settings: dict[str, Any]) -> None:
        self.shape = shape
        self.ranks = [RankProcess(rank, socket, shape, settings) for rank in (0, 1)]
        assert [rank.answer() for rank in self.ranks] == ["attached"] * 2
        self.client: Client = connect(socket, "default", "0", max_held=shape.host_pages)
        self.count = shape.host_pages - 1
        lease = self.client.reserve([b"%d" % number for number in range(self.count)]).lease
        self.both("store", lease)
        self.hit: Hit = self.client.lookup([b"%d" % number for number in range(self.count)])
        assert len(self.hit) == self.count

    def both(self, what: str, *arguments: Any) -> list[Any]:
        for rank in self.ranks:
            rank.tell(what, *arguments)
        return [rank.answer() for rank in self.ranks]

    def draw(self, count: int, seed: int) -> tuple[list[list[tuple[int, int]]], list[dict[int, int]]]:
        """Return each rank's pairs, the same host pages in orders of their own, and what is to be where."""
        draw = random.Random(seed)
        stored: list[int] = draw.sample(range(self.count), count)
        pairs: list[list[tuple[int, int]]] = []
        origins: list[dict[int, int]] = []
        for _ in self.ranks:
            order = draw.sample(stored, count)
            pages = draw.sample(range(self.shape.device_pages), count)
            pairs.append([(page, self.hit.pages[at]) for page, at in zip(pages, order, strict=True)])
            origins.append(dict(zip(pages, order, strict=True)))
        return pairs, origins

    def load(self, pairs: list[list[tuple[int, int]]], **options: Any) -> None:
        for rank, mine in zip(self.ranks, pairs, strict=True):
            rank.tell("load", self.hit, mine, *options.values())
        for rank in self.ranks:
            rank.answer()

    def check(self, origins: list[dict[int, int]]) -> None:
        assert [rank.ask("wrong", origin) for rank, origin in zip(self.ranks, origins, strict=True)] == [[], []]

    def end(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.tell("close")  # both at once: each waits a moment for the other
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.answer()
        self.client.close()
        for rank in self.ranks:
            rank.end()


Make = Callable[..., Pair]


@pytest.fixture
def make(start: Starter) -> Iterator[Make]:
    made: list[Pair] = []

    def build(shape: Shape, memory: str = "256MiB", **settings: Any) -> Pair:
        made.append(Pair(start(memory=memory).socket, shape, {**SMALL_SLOTS, **settings}))
        return made[-1]

    yield build
    for each in made:
        each.end()


@pytest.mark.parametrize("layout", ["page", "slab"])
@pytest.mark.parametrize("rows", [ODD, LARGE], ids=["odd", "even"])
def test_every_byte_at_every_size(make: Make, layout: str, rows: list[int]) -> None:
    pair = make(Shape(rows, 150, 120, layout))
    for seed, count in enumerate([1, 2, 3, 17, 64, 119]):
        pairs, origins = pair.draw(count, seed)
        pair.both("poison")
        pair.load(pairs)
        pair.check(origins)
    assert pair.both("active") == [True, True]


def test_a_gibibyte(make: Make) -> None:
    rows = [1 << 12] * 64  # pages of 4 MiB
    settings = {"SLOT_BYTES": 16 * MIB, "LEAST_SLOT_BYTES": 2 * MIB, "TOGETHER_BYTES": 32 * MIB, "PATIENCE_S": 10.0}
    pair = make(Shape(rows, 280, 257, "page"), memory="1536MiB", **settings)
    for seed in range(3):
        pairs, origins = pair.draw(256, seed)
        pair.both("poison")
        pair.load(pairs)
        pair.check(origins)
    assert pair.both("active") == [True, True]


def test_many_loads_under_way_at_once(make: Make) -> None:
    """More than the posts that fit on the board, and none waited for."""
    pair = make(Shape(LARGE, 150, 120, "page"))
    for seed in range(100):
        pairs, origins = pair.draw(40, seed)
        if seed == 99:
            pair.both("wait")
            pair.both("poison")
        pair.load(pairs, wait=False)
    assert pair.both("wait") == [["done"], ["done"]]
    pair.check(origins)


def test_the_order_of_the_callers_stream(make: Make) -> None:
    pair = make(Shape(LARGE, 150, 120, "page"))
    pairs, origins = pair.draw(100, 1)
    for rank, mine in zip(pair.ranks, pairs, strict=True):
        rank.tell("busy_load", pair.hit, mine)
    assert [rank.answer() for rank in pair.ranks] == [True, True]
    pair.check(origins)


def test_a_rank_that_never_calls(make: Make) -> None:
    """First at the meeting, then in the midst of loads; afterwards each loads by itself."""
    pair = make(Shape(LARGE, 150, 120, "page"))
    pairs, origins = pair.draw(50, 1)
    pair.load(pairs)
    pair.ranks[0].ask("wait")
    pair.ranks[0].ask("load", pair.hit, pairs[0], False)
    assert pair.ranks[0].ask("wait") == ["PartMissing"]
    pair.both("poison")
    pair.load(pairs)
    pair.check(origins)
    assert pair.both("active") == [False, False]


def test_a_rank_that_never_meets(make: Make) -> None:
    pair = make(Shape(LARGE, 150, 120, "page"))
    pairs, origins = pair.draw(50, 1)
    with pytest.raises(PartMissing) as caught:
        pair.ranks[1].ask("load", pair.hit, pairs[1])
    assert caught.value.ids["ranks"] == [0]
    pair.both("poison")
    pair.load(pairs)
    pair.check(origins)


def test_ranks_that_load_other_pages(make: Make) -> None:
    pair = make(Shape(LARGE, 150, 120, "page"))
    first, _ = pair.draw(50, 1)
    second, origins = pair.draw(40, 2)
    pair.load([first[0], second[1]], wait=False)
    assert pair.both("wait") == [["RanksDisagree"], ["RanksDisagree"]]
    pair.both("poison")
    pair.load(second)
    pair.check(origins)


def test_a_rank_that_is_killed(make: Make) -> None:
    pair = make(Shape(LARGE, 150, 120, "page"))
    pairs, origins = pair.draw(50, 1)
    pair.load(pairs)
    pair.ranks[1].process.kill()
    pair.ranks[1].process.join()
    pair.ranks[0].ask("wait")
    pair.ranks[0].ask("load", pair.hit, pairs[0], False)
    assert pair.ranks[0].ask("wait") == ["PartMissing"]
    pair.ranks[0].ask("poison")
    pair.ranks[0].ask("load", pair.hit, pairs[0])
    assert pair.ranks[0].ask("wrong", origins[0]) == []


def test_closing_while_the_other_does_not_come(make: Make) -> None:
    pair = make(Shape(LARGE, 150, 120, "page"))
    pairs, origins = pair.draw(50, 1)
    pair.load(pairs)
    pair.ranks[0].ask("load", pair.hit, pairs[0], False)
    pair.ranks[0].ask("close")
    pair.ranks[1].ask("poison")
    pair.ranks[1].ask("load", pair.hit, pairs[1])
    assert pair.ranks[1].ask("wrong", origins[1]) == []
    assert pair.ranks[1].ask("active") is False
