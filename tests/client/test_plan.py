"""The plan of a transfer, carried out with plain memory moves: no GPU, every byte compared."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirror.copies import plan
from sharedmirror.copies.driver import BATCH_COPIES, FIRST_COPIES, batches
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import (
    MAX_PITCH,
    PLAIN_BYTES,
    ROW_BYTES,
    SMALL_BYTES,
    Chunks,
    Copies,
    Cuts,
    Ramp,
    Route,
    choose_route,
    head_pages,
    plan_plain,
    plan_staged,
    sort_by_frame,
    starts_by_kernel,
)
from sharedmirror.copies.view import Addresses, View, build_view, group_planes, layered_view

Bytes = npt.NDArray[np.uint8]

SLOT_BYTES = 128 << 10
SIZES = (1, 2, 3, 8, 12, 16, 48, 100, 256, 4096, 5000, 16384, 20480, 49152, 70001, 200000)


@dataclass
class World:
    """Device planes and host frames in two arrays of random bytes."""

    device: Bytes
    host: Bytes
    addresses: Addresses
    pages: Ids
    frames: Ids

    def copied(self, to_host: bool) -> Bytes:
        """Return what the target must hold: every slice moved, every other byte as it was."""
        source, target = (self.device, self.host) if to_host else (self.host, self.device)
        wanted: Bytes = target.copy()
        a = self.addresses
        for plane, size in enumerate(a.slice_bytes.tolist()):
            for page, frame in zip(self.pages.tolist(), self.frames.tolist(), strict=True):
                device = int(a.device_base[plane] + page * a.device_stride[plane]) - self.device.ctypes.data
                host = int(a.host_base[plane] + frame * a.host_stride[plane]) - self.host.ctypes.data
                low, out = (device, host) if to_host else (host, device)
                wanted[out : out + size] = source[low : low + size]
        return wanted


@st.composite
def worlds(draw: st.DrawFn) -> World:
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=6))
    if draw(st.booleans()):
        sizes = sizes[:1] * len(sizes)
    gap = draw(st.sampled_from((0, 16, 5)))
    layout = draw(st.sampled_from(("slab", "page")))
    device_pages, host_frames = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    pairs = min(device_pages, host_frames)
    pages, frames = (list(draw(st.permutations(range(count))))[:pairs] for count in (device_pages, host_frames))
    if draw(st.booleans()):
        pages, frames = list(range(pairs)), list(range(pairs))
    return build(sizes, gap, layout, device_pages, host_frames, pages, frames, draw(st.integers(0, 2**32 - 1)))


def build(
    sizes: list[int], gap: int, layout: str, device_pages: int, host_frames: int, pages: list[int], frames: list[int],
    seed: int = 0,
) -> World:  # fmt: skip
    random = np.random.default_rng(seed)
    spread = sum(device_pages * (size + gap) + 64 for size in sizes)
    device = random.integers(0, 256, spread + 64, np.uint8)
    padded = [-(-size // 16) * 16 for size in sizes]
    host = random.integers(0, 256, host_frames * sum(padded) + 16 * len(sizes) + 64, np.uint8)
    start, host_start = (-(-array.ctypes.data // 16) * 16 for array in (device, host))
    columns: list[tuple[int, int, int, int, int]] = []
    for size, room in zip(sizes, padded, strict=True):
        host_stride = size if layout == "slab" else sum(padded)
        columns.append((start, size + gap, size, host_start, host_stride))
        start += device_pages * (size + gap) + (0 if gap == 5 else -(device_pages * (size + gap)) % 16)
        host_start += room if layout == "page" else -(-host_frames * size // 16) * 16
    base, stride, slices, host_base, host_stride_of = np.array(columns, np.int64).T.copy()
    addresses = Addresses(base, stride, slices, host_base, host_stride_of, np.zeros(0, np.int64))
    return World(device, host, addresses, np.array(pages, np.int64), np.array(frames, np.int64))


def move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def run_copies(copies: Copies, chunk: int, to_host: bool) -> None:
    middles = copies.bounds[1:] if copies.middles is None else copies.middles
    first, middle, last = (int(a) for a in (copies.bounds[chunk], middles[chunk], copies.bounds[chunk + 1]))
    assert copies.table.flags.f_contiguous
    for at, copy in enumerate(copies.table[first:last].tolist(), first):
        host, device, width, rows, host_pitch, device_pitch = copy
        assert (rows == 1) == (at < middle)
        assert rows == 1 or (host_pitch >= width and device_pitch >= width)
        for row in range(rows):
            pair = (host + row * host_pitch, device + row * device_pitch)
            move(*(pair if to_host else pair[::-1]), width)


def run_kernel(view: View, chunks: Chunks, pages: Ids, chunk: int, slot: int, to_host: bool) -> None:
    """What the kernel does, tile by tile."""
    for table, row in zip(view.tables, chunks.launches[chunk].tolist(), strict=True):
        index, count, first, tiles, low, high = row
        for at, page in enumerate(pages[index : index + count].tolist()):
            for device, stride, x, start, end, size, _, _ in table.fields[first : first + tiles].tolist():
                begin, stop = max(start, low), min(end, high)
                dense = slot + count * (begin - low) + at * (stop - begin) + x - begin
                inner = device + page * stride
                assert inner % table.word == dense % table.word == size % table.word == 0
                assert slot <= dense and dense + size <= slot + SLOT_BYTES
                move(*((dense, inner) if to_host else (inner, dense)), size)


def plan_for(
    view: View, frames: Ids, slots: list[int], slot_bytes: int, edges: Ids, first_slot: int = 0, first_group: int = 0,
    ramp: Ramp = Ramp.NONE,
) -> tuple[Chunks, Copies]:  # fmt: skip
    chunks = Cuts(view).get(frames, slot_bytes, first_group, ramp)
    return chunks, plan_staged(chunks, frames, tuple(slots), first_slot, edges)


def run_staged(
    world: World, view: View, to_host: bool, slots: int = 2, first_slot: int = 1, ramp: Ramp = Ramp.NONE
) -> Copies:
    room = np.random.default_rng(1).integers(0, 256, slots * SLOT_BYTES + 16, np.uint8)
    base = -(-room.ctypes.data // 16) * 16
    places = [base + at * SLOT_BYTES for at in range(slots)]
    pages, frames = sort_by_frame(world.pages, world.frames)
    edges = world.addresses.edges
    chunks, copies = plan_for(view, frames, places, SLOT_BYTES, edges, first_slot, ramp=ramp)
    for chunk in range(len(chunks.launches)):
        slot = places[(first_slot + chunk) % slots]
        if to_host:
            run_kernel(view, chunks, pages, chunk, slot, to_host)
            run_copies(copies, chunk, to_host)
        else:
            run_copies(copies, chunk, to_host)
            run_kernel(view, chunks, pages, chunk, slot, to_host)
    return copies


def groups_of(world: World, number: int, layered: bool) -> list[list[int]]:
    planes = len(world.addresses.slice_bytes)
    order = [plane for half in range(2) for plane in range(half, planes, 2)] if layered else list(range(planes))
    return group_planes(world.addresses, order, range(1, planes + 1), [at / number for at in range(1, number + 1)])


@settings(max_examples=150, deadline=None)
@given(worlds(), st.booleans(), st.booleans(), st.integers(1, 4), st.sampled_from(Ramp), st.integers(1, 4))
def test_staged_moves_every_slice_and_nothing_else(
    world: World, to_host: bool, layered: bool, groups: int, ramp: Ramp, slots: int
) -> None:
    wanted = world.copied(to_host)
    view = build_view(world.addresses, groups_of(world, groups, layered))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "RAMP_BYTES", 1 << 10)
        run_staged(world, view, to_host, slots, ramp=ramp)
    assert np.array_equal(world.host if to_host else world.device, wanted)


@settings(max_examples=100, deadline=None)
@given(worlds(), st.booleans(), st.integers(1, 4))
def test_plain_moves_every_slice_and_nothing_else(world: World, to_host: bool, groups: int) -> None:
    wanted = world.copied(to_host)
    view = build_view(world.addresses, groups_of(world, groups, True))
    copies = plan_plain(view, world.pages, world.frames, world.addresses.edges)
    for chunk in range(len(view.groups) - 1):
        run_copies(copies, chunk, to_host)
    assert np.array_equal(world.host if to_host else world.device, wanted)


@settings(max_examples=100, deadline=None)
@given(worlds(), st.booleans(), st.booleans(), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_no_copy_crosses_an_edge(world: World, to_host: bool, plain: bool, at: list[float]) -> None:
    edges = np.unique((world.host.ctypes.data + np.array(at) * len(world.host)).astype(np.int64))
    world.addresses = replace(world.addresses, edges=edges)
    wanted = world.copied(to_host)
    view = build_view(world.addresses, groups_of(world, 2, True))
    if plain:
        copies = plan_plain(view, world.pages, world.frames, world.addresses.edges)
        for chunk in range(len(view.groups) - 1):
            run_copies(copies, chunk, to_host)
    else:
        copies = run_staged(world, view, to_host)
    assert np.array_equal(world.host if to_host else world.device, wanted)
    for host, _, width, rows, pitch, _ in copies.table.tolist():
        last = host + (rows - 1) * pitch + width
        assert not ((edges > host) & (edges < last)).any()


def test_a_group_is_complete_after_its_last_chunk() -> None:
    world = build([49152] * 6, 0, "page", 4, 4, [0, 1, 2, 3], [3, 1, 0, 2])
    view = build_view(world.addresses, [[0, 3], [1, 4], [2, 5]])
    chunks, copies = plan_for(view, np.sort(world.frames), [1 << 40], SLOT_BYTES, world.addresses.edges)
    bounds = [0, *chunks.group_ends]
    assert bounds[-1] == len(chunks.launches)
    for group, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        launches = chunks.launches[low:high, 0]
        assert launches[:, 4].min() == view.groups[group]
        assert launches[:, 5].max() == view.groups[group + 1]


def test_neighbouring_frames_become_one_copy() -> None:
    world = build([1024] * 8, 0, "page", 8, 8, [7, 0, 2, 5, 3], [2, 3, 6, 4, 0])
    view = build_view(world.addresses, [list(range(8))])
    chunks, copies = plan_for(view, np.sort(world.frames), [1 << 40], SLOT_BYTES, world.addresses.edges)
    assert copies.table[:, 2].tolist() == [8192, 3 * 8192, 8192]
    assert copies.table[:, 3].tolist() == [1, 1, 1]


def test_a_slab_page_is_one_copy_with_a_row_per_plane() -> None:
    world = build([1024] * 8, 0, "slab", 8, 8, [7, 0], [2, 5])
    view = build_view(world.addresses, [list(range(8))])
    chunks, copies = plan_for(view, np.sort(world.frames), [1 << 40], SLOT_BYTES, world.addresses.edges)
    assert copies.table[:, 2:5].tolist() == [[1024, 8, 8192]] * 2


def test_long_runs_make_wide_rows() -> None:
    size = np.full(64, 4096, np.int64)
    base = np.arange(64, dtype=np.int64) << 30
    view = build_view(addresses := Addresses(base, size, size, base, size, np.zeros(0, np.int64)), [list(range(64))])
    frames = np.arange(2048, dtype=np.int64)
    chunks, copies = plan_for(view, frames, [1 << 40], 8 << 20, addresses.edges)
    assert copies.table[:, 2].min() >= ROW_BYTES
    assert len(chunks.launches) == 64


def test_the_number_of_copies_is_bounded_by_pages_and_chunks() -> None:
    pages = list(np.random.default_rng(0).permutation(64))
    for layout in ("slab", "page"):
        world = build([4096] * 32, 0, layout, 64, 64, pages, pages[::-1])
        view = build_view(world.addresses, [list(range(32))])
        chunks, copies = plan_for(view, np.sort(world.frames), [1 << 40], 8 << 20, world.addresses.edges)
        assert len(copies.table) <= 64 + len(chunks.launches)


def test_rows_too_far_apart_for_the_driver_become_single_copies() -> None:
    far = MAX_PITCH + 1
    columns = [(1 << 40, 4096, 4096), (1 << 41, 4096, 4096)]
    base, stride, size = np.array([columns[plane % 2] for plane in range(8)], np.int64).T
    host = (1 << 42) + far * np.arange(8, dtype=np.int64)
    addresses = Addresses(base, stride, size, host, size, np.zeros(0, np.int64))
    view = build_view(addresses, [list(range(8))])
    frames = np.array([100_000_000, 5], np.int64)
    _, copies = plan_for(view, np.sort(frames), [1 << 40], SLOT_BYTES, addresses.edges)
    assert set(copies.table[:, 3].tolist()) == {1}
    wanted = {int(host[plane] + frame * 4096) for plane in range(8) for frame in frames}
    assert set(copies.table[:, 0].tolist()) == wanted


@pytest.mark.parametrize(
    ("sizes", "pages", "frames", "route"),
    [
        ([SMALL_BYTES // 4] * 2, [0, 1], [1, 0], Route.DIRECT),
        ([64 << 10] * 64, [3, 1, 7], [1, 0, 5], Route.STAGED),
        ([PLAIN_BYTES] * 16, [3, 1, 7], [1, 0, 5], Route.PLAIN),
        ([PLAIN_BYTES // 8] * 16, list(range(8)), list(range(8)), Route.PLAIN),
        ([PLAIN_BYTES // 8] * 16, list(range(8)), [0, 1, 2, 3, 5, 6, 7, 8], Route.STAGED),
    ],
)
def test_routes(sizes: list[int], pages: list[int], frames: list[int], route: Route) -> None:
    size = np.array(sizes, np.int64)
    base = np.cumsum(size) * 1000
    addresses = Addresses(base, size, size, base, size, np.zeros(0, np.int64))
    assert choose_route(addresses, np.array(pages, np.int64), np.array(frames, np.int64)) is route


@pytest.mark.parametrize("count", [1, FIRST_COPIES, FIRST_COPIES + 1, FIRST_COPIES + BATCH_COPIES + 1, 5000])
def test_batches_follow_one_another_and_are_bounded(count: int) -> None:
    made = list(batches(count))
    assert [first for first, _ in made] == list(np.cumsum([0, *(number for _, number in made)])[:-1])
    assert sum(number for _, number in made) == count
    assert made[0][1] <= FIRST_COPIES and max(number for _, number in made) <= BATCH_COPIES


def test_groups_end_where_an_event_may_be() -> None:
    world = build([100] * 12, 0, "slab", 1, 1, [0], [0])
    after = [2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12]
    grouped = group_planes(world.addresses, list(range(12)), after, [0.1, 0.5])
    assert grouped == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def layers(slice_bytes: int, layout: str) -> tuple[Addresses, list[int], list[int]]:
    """Return 64 layers of K and V: addresses, order and event_after."""
    size, plane = np.full(128, slice_bytes, np.int64), np.arange(128, dtype=np.int64)
    page = layout == "page"
    base, stride = plane * slice_bytes * (1 if page else 500), size * (128 if page else 1)
    addresses = Addresses((1 << 40) + (plane << 30), size, size, (1 << 50) + base, stride, np.zeros(0, np.int64))
    order = [half * 64 + layer for layer in range(64) for half in range(2)]
    after = [0] * 128
    for position, index in enumerate(order, start=1):
        after[index] = position
    return addresses, order, after


@pytest.mark.parametrize("layout", ["page", "slab"])
@pytest.mark.parametrize("slice_bytes", [1 << 10, 4 << 10, 16 << 10, 128 << 10])
def test_the_first_group_is_small_and_no_copy_is_short(layout: str, slice_bytes: int) -> None:
    view = layered_view(*layers(slice_bytes, layout))
    total = view.groups[-1]
    assert view.groups[1] <= 0.15 * total
    assert sorted(view.planes) == list(range(128))
    later = [view.copy_bytes(group) for group in range(1, len(view.groups) - 1)]
    assert len(later) == 1 or min(later) >= 512 << 10
    assert starts_by_kernel(view) == (view.copy_bytes(0) < 64 << 10)


def test_groups_before_the_first_are_left_out() -> None:
    addresses, order, after = layers(4096, "page")
    view = layered_view(addresses, order, after)
    ids = np.arange(64, dtype=np.int64)
    (whole, _), (rest, copies) = (
        plan_for(view, 3 * ids, [1 << 40], 1 << 20, addresses.edges, first_group=group) for group in (0, 1)
    )
    assert len(rest.group_ends) == len(whole.group_ends) - 1
    assert rest.launches[0, 0, 4] == view.groups[1]
    moved = (copies.table[:, 2] * copies.table[:, 3]).sum()
    assert moved == 64 * (view.groups[-1] - view.groups[1])


def test_stores_begin_with_a_small_chunk_and_loads_end_with_one() -> None:
    addresses, order, _ = layers(4 << 10, "page")
    view = build_view(addresses, [order])
    frames = 2 * np.arange(256, dtype=np.int64)
    counts = {ramp: Cuts(view).get(frames, 48 << 20, ramp=ramp).counts.tolist() for ramp in Ramp}
    assert counts[Ramp.UP] == [16, 96, 96, 48]
    assert counts[Ramp.DOWN] == counts[Ramp.UP][::-1]
    assert counts[Ramp.NONE] == [32] * 8


def test_only_short_calls_begin_with_a_kernel() -> None:
    for slice_bytes, pages, head in (
        (1 << 10, 256, 48),
        (4 << 10, 256, 12),
        (4 << 10, 16, 8),
        (16 << 10, 256, 0),
        (128 << 10, 2, 0),
    ):
        addresses, order, after = layers(slice_bytes, "page")
        assert head_pages(build_view(addresses, [order]), pages) == head
        assert head_pages(layered_view(addresses, order, after), pages) == 0
