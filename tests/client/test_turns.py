"""Loads together on make-believe devices: ranks whose streams run in any legal order, or stop.

The driver here carries out copies, kernels, events and words on plain memory. Which stream goes on next is drawn; or
all streams of a rank are one queue, as on a device that has no other queue left.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirror.copies.driver import Kernel
from sharedmirror.copies.interface import Geometry, PlaneGeometry
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import sort_by_frame
from sharedmirror.copies.submission import Lines
from sharedmirror.copies.together.board import POSTS, Board
from sharedmirror.copies.together.peers import PeerDriver
from sharedmirror.copies.together.turns import Member, Streams, Turns, chunk_order, digest_of, stretches
from sharedmirror.copies.together.watchdog import Round, Watchdog
from sharedmirror.copies.view import TILE_FIELDS, Addresses, build_view
from sharedmirror.errors import CopyError, PartMissing, RanksDisagree
from sharedmirror.types import BOARD_BLOCK_BYTES

Bytes = npt.NDArray[np.uint8]
SLOT_BYTES = 128 << 10
PATIENCE_S = 10.0
OPERATION_BYTES = 112


def numbers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


class FakeDriver(PeerDriver):
    """Streams are queues of (may it run, run)."""

    def __init__(self, one_queue: bool) -> None:
        self.has_batches = True
        self.has_row_batches = one_queue
        self.one_queue = one_queue
        self.queues: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = {}
        self.recorded: list[int] = []
        self.reached: set[tuple[int, int]] = set()
        """Which recording of which event was reached: a wait is for the one that it saw, on whatever stream."""
        self.refuse_after: int | None = None

    def _put(self, stream: int, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        if self.refuse_after is not None:
            self.refuse_after -= 1
            if self.refuse_after < 0:
                raise CopyError("refused")
        self.queues.setdefault(0 if self.one_queue else stream, deque()).append((ready, run))

    def heads(self) -> list[deque[tuple[Callable[[], bool], Callable[[], None]]]]:
        return [queue for queue in self.queues.values() if queue and queue[0][0]()]

    @property
    def idle(self) -> bool:
        return not any(self.queues.values())

    def create_event(self) -> int:
        self.recorded.append(0)
        return len(self.recorded) - 1

    def record(self, event: int, stream: int) -> None:
        self.recorded[event] += 1
        number = self.recorded[event]
        self._put(stream, lambda: self.reached.add((event, number)))

    def wait(self, stream: int, event: int) -> None:
        number = self.recorded[event]
        self._put(stream, lambda: None, lambda: not number or (event, number) in self.reached)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._put(stream, lambda: move(target, source, size_bytes))

    def copy_batch(self, targets: int, sources: int, sizes_bytes: int, count: int, stream: int) -> None:
        for target, source, size in zip(*(numbers(at, count) for at in (targets, sources, sizes_bytes)), strict=True):
            self.copy(target, source, size, stream)

    def copy_rows(self, description: int, stream: int) -> None:
        row = numbers(description, 16)
        for at in range(row[15]):
            self.copy(row[11] + at * row[13], row[4] + at * row[6], row[14], stream)

    def copy_rows_batch(self, operations: int, count: int, stream: int) -> None:
        for at in range(count):
            row = numbers(operations + at * OPERATION_BYTES, 13)
            for line in range(row[11]):
                self.copy(row[6] + line * row[7], row[1] + line * row[2], row[10], stream)

    def launch(self, kernel: Kernel, shape: int, arguments: int) -> None:
        values = [numbers(at, 1)[0] for at in numbers(arguments, 9)]
        self._put(numbers(shape, 7)[4], lambda: scatter(*values))

    def wait_word(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        self._put(stream, lambda: None, lambda: (word.value - value) & 0xFFFFFFFF < 1 << 31)

    def write_word(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)

        def write() -> None:
            word.value = value

        self._put(stream, write)


def move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def scatter(
    table: int, pages: int, _: int, count: int, first: int, tiles: int, low: int, high: int, staging: int
) -> None:
    """What the kernel does, tile by tile."""
    for at, page in enumerate(numbers(pages, count)):
        for tile in range(first, first + tiles):
            device, stride, x, start, end, size, *_rest = numbers(table + 8 * TILE_FIELDS * tile, TILE_FIELDS)
            begin, stop = max(start, low), min(end, high)
            move(device + page * stride, staging + count * (begin - low) + at * (stop - begin) + x - begin, size)


class Rank:
    """One rank: device memory with planes, slots, and what its loads are made of."""

    def __init__(self, world: World, me: int, one_queue: bool) -> None:
        self.world, self.me = world, me
        self.driver = FakeDriver(one_queue)
        self.device = [torch.full((world.pages * size + 64,), 0xA5, dtype=torch.uint8) for size in world.sizes]
        planes = [
            PlaneGeometry(f"p{at}", torch.as_strided(device, (world.pages, size), (size, 1), 32), host)
            for at, (device, size, host) in enumerate(zip(self.device, world.sizes, world.planes, strict=True))
        ]
        order = tuple(range(len(planes)))
        addresses = Addresses.of(Geometry(tuple(planes), torch.device("cpu"), order, order))
        self.view = build_view(addresses, [order])
        self.board = Board(world.memory, range(world.size), me)
        self.watchdog = Watchdog(self.board, PATIENCE_S, lambda: world.now)
        self.ring = np.full(world.slots * SLOT_BYTES, me, np.uint8)
        self.landing = np.full((world.size, world.landing * SLOT_BYTES), 0xEE, np.uint8)
        self.kept: list[Ids] = []
        self.number = 0
        self.stopped = False

    def connect(self, ranks: list[Rank]) -> None:
        streams = Streams(1, 2, 3, 4, 5)
        members = []
        for other in ranks:
            mine = other is self
            here = places(self.ring) if mine else places(self.landing[other.me])
            free, compute = (
                [self.driver.create_event() for _ in here],
                (streams.own if mine else streams.others,) * len(here),
            )
            sources = [] if mine else places(other.ring)
            lines = Lines(self.view, torch.device("cpu"))
            members.append(Member(lines, tuple(here), sources, free, compute, streams.pull if mine else streams.fetch))
        kernels = [Kernel(0, 128, 0) for _ in self.view.tables]
        address = int(self.board.bytes.ctypes.data)
        edges = np.zeros(0, np.int64)
        self.turns = Turns(self.driver, self.board, address, kernels, members, streams, SLOT_BYTES, edges)

    def load(self, hit: int, device_pages: Ids, host_frames: Ids) -> Round:
        pages, frames = sort_by_frame(device_pages, host_frames)
        self.number += 1
        cuts = self.turns.cut(frames)
        begun = self.watchdog.begin(self.number, digest_of(hit, frames), self.turns.needs(cuts))
        ids = np.zeros(2 * len(pages), np.int64)
        ids[: len(pages)] = pages
        self.kept.append(ids)
        start = int(ids.ctypes.data)
        self.turns.submit(self.number, frames, cuts, start, start + 8 * len(pages), 0)
        return begun

    def page(self, plane: int, page: int) -> bytes:
        size = self.world.sizes[plane]
        return self.device[plane][32 + page * size : 32 + (page + 1) * size].numpy().tobytes()


def places(room: Bytes) -> list[int]:
    return [int(room.ctypes.data) + at for at in range(0, room.size, SLOT_BYTES)]


class World:
    """Host planes that all ranks share, a board, and a clock."""

    def __init__(
        self, size: int, sizes: list[int], *, layout: str = "page", pages: int = 24, slots: int = 3, landing: int = 2,
        one_queue: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.size, self.sizes, self.pages, self.slots, self.landing = size, sizes, pages, slots, landing
        self.random = random.Random(seed)
        self.now = 0.0
        padded = [-(-each // 16) * 16 for each in sizes]
        generator = torch.Generator().manual_seed(seed)
        self.host = torch.randint(0, 256, (pages * sum(padded) + 64,), dtype=torch.uint8, generator=generator)
        at, self.planes = -self.host.data_ptr() % 16, []
        for each, room in zip(sizes, padded, strict=True):
            stride = sum(padded) if layout == "page" else room
            self.planes.append(torch.as_strided(self.host, (pages, each), (stride, 1), at))
            at += room if layout == "page" else room * pages
        self.memory = bytearray(BOARD_BLOCK_BYTES * size)
        self.ranks = [Rank(self, me, one_queue) for me in range(size)]
        for rank in self.ranks:
            rank.connect(self.ranks)

    def step(self) -> bool:
        """Run one operation of a rank that has not stopped; False when none can go on."""
        able = [queue for rank in self.ranks if not rank.stopped for queue in rank.driver.heads()]
        if not able:
            return False
        self.random.choice(able).popleft()[1]()
        return True

    def run(self, most: int = 1 << 30) -> None:
        while most and self.step():
            most -= 1

    def draw(self, count: int) -> Ids:
        return np.array(self.random.sample(range(self.pages), count), np.int64)

    def check(self, rank: Rank, pages: Ids, frames: Ids) -> None:
        """Every byte is there once, and none beside it was touched."""
        for plane in range(len(self.sizes)):
            wanted = dict(zip(pages.tolist(), frames.tolist(), strict=True))
            for page in range(self.pages):
                found = rank.page(plane, page)
                if page in wanted:
                    assert found == self.planes[plane][wanted[page]].numpy().tobytes()
                else:
                    assert set(found) <= {0xA5}
            assert set(rank.device[plane][:32].tolist()) | set(rank.device[plane][-32:].tolist()) == {0xA5}

    def poison(self) -> None:
        for rank in self.ranks:
            for each in rank.device:
                each.fill_(0xA5)


worlds = st.builds(
    World,
    st.integers(2, 4),
    st.lists(st.sampled_from((16, 100, 4096, 20480, 70001)), min_size=1, max_size=4),
    layout=st.sampled_from(("page", "slab")),
    slots=st.integers(1, 3),
    landing=st.integers(1, 2),
    one_queue=st.booleans(),
    seed=st.integers(0, 1 << 20),
)


@settings(max_examples=150, deadline=None)
@given(worlds, st.data())
def test_every_byte_comes_once_in_any_legal_order(world: World, data: st.DataObject) -> None:
    """Several loads, some of them submitted before the last is over, at ranks of any speed."""
    rounds: list[Round] = []
    for load in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, world.pages))
        frames = world.draw(count)
        world.poison()
        wanted = []
        for rank in world.random.sample(world.ranks, world.size):
            pages, order = world.draw(count), world.random.sample(range(count), count)
            rounds.append(rank.load(load, pages, frames[order]))
            wanted.append((rank, pages, frames[order]))
            world.run(world.random.choice((0, 3, 50)))
        if data.draw(st.booleans()):
            continue  # the next load comes while this is under way; its bytes go to the same pages
        world.run()
        assert all(rank.driver.idle for rank in world.ranks)
        for rank, pages, expected in wanted:
            if len(rounds) == world.size:
                world.check(rank, pages, expected)
    world.run()
    assert all(rank.driver.idle for rank in world.ranks)
    for rank in world.ranks:
        assert not rank.watchdog.step()
        assert rank.turns.all_taken()
    assert all(each.over and each.abort is None for each in rounds)


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(0, 400), st.integers(0, 2))
def test_a_rank_that_stops_ends_in_an_error_everywhere(world: World, after: int, loads: int) -> None:
    """The last rank stops in the midst, or never calls; the others are through, and know that it failed."""
    late = world.ranks[-1]
    rounds: list[tuple[Rank, Round]] = []
    frames = np.arange(world.pages, dtype=np.int64)
    late.stopped = loads == 0
    for load in range(max(1, loads)):
        calling = world.ranks[:-1] if late.stopped else world.ranks
        rounds += [(rank, rank.load(load, world.draw(world.pages), frames)) for rank in calling]
    world.run(after)
    late.stopped = True
    world.run()
    world.now = PATIENCE_S + 1
    for _ in range(3):
        for rank in world.ranks[:-1]:
            rank.watchdog.step()
        world.run()
    for rank, each in rounds:
        if rank is not late:
            assert rank.driver.idle
            if rank.board.aborted is not None and not each.over:
                rank.watchdog.step()
            assert each.over
    # The late one wakes up: it does not hang, and it knows.
    late.stopped = False
    world.run()
    for _ in range(3):
        late.watchdog.step()
        world.run()
    assert late.driver.idle
    aborted = late.board.aborted
    for rank, each in rounds:
        if each.abort is not None:
            with pytest.raises(PartMissing) as caught:
                rank.watchdog.check(each)
            assert aborted is not None and caught.value.settled
            assert caught.value.ids["ranks"] == [aborted.rank]
    if loads == 0:
        assert all(each.abort is not None for _, each in rounds)
        assert aborted is not None and aborted.rank == late.me


@pytest.mark.parametrize("what", ["hit", "frames", "count"])
def test_ranks_that_load_other_things_are_told(what: str) -> None:
    world = World(2, [20480] * 3)
    a, b = world.ranks
    frames = np.arange(20, dtype=np.int64)
    others = {"hit": frames, "frames": frames + 1, "count": frames[:10]}[what]
    first = a.load(7, world.draw(20), frames)
    second = b.load(8 if what == "hit" else 7, world.draw(len(others)), others)
    for _ in range(3):
        world.run()
        for rank in world.ranks:
            rank.watchdog.step()
    assert all(rank.driver.idle for rank in world.ranks)
    for rank, each in ((a, first), (b, second)):
        with pytest.raises(RanksDisagree, match="same calls"):
            rank.watchdog.check(each)


def test_a_load_that_cannot_be_submitted_fails_at_the_others() -> None:
    world = World(2, [20480] * 3)
    a, b = world.ranks
    frames = np.arange(24, dtype=np.int64)
    begun = a.load(7, world.draw(24), frames)
    b.driver.refuse_after = 20
    with pytest.raises(CopyError, match="refused"):
        b.load(7, world.draw(24), frames)
    broken = b.watchdog._pending[0]
    b.watchdog.fail(broken)
    for _ in range(3):
        world.run()
        a.watchdog.step()
        b.watchdog.step()
    assert a.driver.idle and b.driver.idle
    b.watchdog.settle(broken)
    assert broken.over
    with pytest.raises(PartMissing, match="rank 1 could not submit"):
        a.watchdog.check(begun)


def test_many_loads_reuse_posts_and_slots() -> None:
    world = World(2, [4096], pages=6)
    frames = np.arange(6, dtype=np.int64)
    for load in range(2 * POSTS + 3):
        for rank in world.ranks:
            assert rank.board.may_post(rank.number + 1)
            rank.load(load, world.draw(6), frames)
        world.run()
        for rank in world.ranks:
            assert not rank.watchdog.step()
    assert world.ranks[0].board.aborted is None


def test_a_rank_far_ahead_may_not_post() -> None:
    world = World(2, [4096], pages=6)
    frames = np.arange(6, dtype=np.int64)
    for load in range(POSTS):
        assert world.ranks[0].board.may_post(load + 1)
        world.ranks[0].load(load, world.draw(6), frames)
    assert not world.ranks[0].board.may_post(POSTS + 1)


@given(st.integers(0, 1000), st.integers(2, 16))
def test_stretches_are_equal_and_leave_nothing_out(count: int, members: int) -> None:
    bounds = stretches(count, members)
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])] and bounds[-1][1] == count
    sizes = {high - low for low, high in bounds}
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=5), st.data())
def test_a_chunk_of_ones_own_comes_before_the_others(numbers_of: list[int], data: st.DataObject) -> None:
    me = data.draw(st.integers(0, len(numbers_of) - 1))
    order = list(chunk_order(numbers_of, me))
    assert sorted(order) == sorted((chunk, at) for at, number in enumerate(numbers_of) for chunk in range(number))
    ranks = [(chunk, at != me) for chunk, at in order]
    assert ranks == sorted(ranks)
