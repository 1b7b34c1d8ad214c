"""Where planes lie, and that no two regions ever share a byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirror.types import REGION_ALIGNMENT_BYTES, SLICE_ALIGNMENT_BYTES, Layout, Plane
from sharedmirrord.core.regions import ArenaSpace, Piece, Wish, aligned, divide, frame_bytes, place

MIB = 1 << 20
PLANES = [Plane("k", 0, 1, 100, 4), Plane("v", 0, 1, 32, 4)]


def test_slab_planes_follow_one_another() -> None:
    placement = place(PLANES, 3, Layout.SLAB)
    assert placement.bases == (0, 304)  # 3 * 100 up to the next multiple of 16
    assert placement.strides == (100, 32)
    assert placement.size_bytes == REGION_ALIGNMENT_BYTES


def test_a_page_is_one_run_of_bytes_in_the_page_layout() -> None:
    placement = place(PLANES, 3, Layout.PAGE)
    assert placement.bases == (0, 112)
    assert placement.strides == (144, 144)
    assert frame_bytes(PLANES) == 144


def test_no_frames_take_no_room() -> None:
    assert place(PLANES, 0, Layout.PAGE).size_bytes == 0


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from([Layout.SLAB, Layout.PAGE]),
)
def test_slices_are_aligned_apart_and_inside(sizes: list[int], frames: int, layout: Layout) -> None:
    planes = [Plane(f"p{i}", 0, 1, size, 1) for i, size in enumerate(sizes)]
    placement = place(planes, frames, layout)
    assert placement.size_bytes % REGION_ALIGNMENT_BYTES == 0
    assert all(base % SLICE_ALIGNMENT_BYTES == 0 for base in placement.bases)
    taken = sorted(
        (base + frame * stride, size)
        for base, stride, size in zip(placement.bases, placement.strides, sizes, strict=True)
        for frame in range(frames)
    )
    for (at, size), (after, _) in zip(taken, [*taken[1:], (placement.size_bytes, 0)], strict=True):
        assert at + size <= after


def test_aligned() -> None:
    assert [aligned(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_first_fit_takes_one_piece_where_it_can() -> None:
    space = ArenaSpace(10 * MIB)
    assert space.allocate(4 * MIB) == [(0, 4 * MIB)]
    assert space.allocate(6 * MIB) == [(4 * MIB, 6 * MIB)]
    assert space.free_bytes == 0
    assert space.allocate(MIB) is None


def test_pieces_are_put_together_when_no_single_one_is_enough() -> None:
    space = ArenaSpace(6 * MIB)
    for _ in range(3):
        space.allocate(2 * MIB)
    space.release(0, 2 * MIB)
    space.release(4 * MIB, 2 * MIB)
    assert space.allocate(3 * MIB) == [(0, 2 * MIB), (4 * MIB, MIB)]
    assert space.free_bytes == MIB


def test_a_refused_allocation_takes_nothing() -> None:
    space = ArenaSpace(4 * MIB)
    assert space.allocate(5 * MIB) is None
    assert space.allocate(4 * MIB) == [(0, 4 * MIB)]


def test_neighbours_merge_again() -> None:
    space = ArenaSpace(6 * MIB)
    for _ in range(3):
        space.allocate(2 * MIB)
    for offset in (0, 4, 2):
        space.release(offset * MIB, 2 * MIB)
    assert space.allocate(6 * MIB) == [(0, 6 * MIB)]


def test_a_piece_is_released_once() -> None:
    space = ArenaSpace(4 * MIB)
    space.allocate(4 * MIB)
    space.release(0, 2 * MIB)
    with pytest.raises(ValueError, match="released twice"):
        space.release(0, 2 * MIB)
    assert space.free_bytes == 2 * MIB


def test_an_empty_arena_has_no_room() -> None:
    assert ArenaSpace(0).allocate(1) is None


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=25))
def test_invariant_2_extents_never_overlap(steps: list[tuple[bool, int]]) -> None:
    space = ArenaSpace(16)
    held: list[list[tuple[int, int]]] = []
    for take, size in steps:
        if take:
            extents = space.allocate(size)
            assert (extents is None) == (size > 16 - sum(n for region in held for _, n in region))
            if extents is not None:
                assert sum(n for _, n in extents) == size
                held.append(extents)
        elif held:
            for extent in held.pop(size % len(held)):
                space.release(*extent)
        pieces = sorted(extent for region in held for extent in region)
        assert all(a + n <= b for (a, n), (b, _) in zip(pieces, pieces[1:], strict=False))
        assert space.free_bytes == 16 - sum(n for _, n in pieces)


# -- NUMA nodes ----------------------------------------------------------------------------------

STEP = REGION_ALIGNMENT_BYTES


def by_node(space: ArenaSpace, pieces: list[Piece]) -> dict[int, int]:
    """Return how many bytes lie in each node's part."""
    return {
        node: sum(max(0, min(end, at + size) - max(start, at)) for at, size in pieces)
        for node, start, end in space.parts
    }


def steps(space: ArenaSpace, pieces: list[Piece] | None) -> dict[int, int]:
    assert pieces is not None
    return {node: size // STEP for node, size in by_node(space, pieces).items()}


def test_the_last_nodes_part_has_the_rest() -> None:
    assert divide(7 * STEP, [0, 1, 4]) == ((0, 0, 2 * STEP), (1, 2 * STEP, 4 * STEP), (4, 4 * STEP, 7 * STEP))


@pytest.mark.parametrize(("size_bytes", "nodes"), [(8 * STEP, []), (8 * STEP, [1]), (STEP, [0, 1]), (0, [0, 1])])
def test_there_may_be_nothing_to_divide(size_bytes: int, nodes: list[int]) -> None:
    assert divide(size_bytes, nodes) == ()


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(1, 200), st.lists(st.integers(0, 63), unique=True, min_size=2, max_size=5))
def test_parts_cover_the_arena_in_whole_steps(count: int, nodes: list[int]) -> None:
    parts = divide(count * STEP, nodes)
    if count < len(nodes):
        assert parts == ()
        return
    assert [node for node, _, _ in parts] == nodes
    assert [start for _, start, _ in parts] == [0, *(end for _, _, end in parts[:-1])]
    assert parts[-1][2] == count * STEP
    sizes = [(end - start) // STEP for _, start, end in parts]
    assert all((end - start) % STEP == 0 for _, start, end in parts)
    assert len(set(sizes[:-1])) <= 1 and 0 <= sizes[-1] - sizes[0] < len(nodes)


def test_a_wish_for_a_node_is_one_piece_of_its_part() -> None:
    space = ArenaSpace(8 * STEP, [0, 1])
    assert space.allocate(STEP, 1) == [(4 * STEP, STEP)]
    assert space.allocate(2 * STEP, 0) == [(0, 2 * STEP)]
    assert space.allocate(STEP) == [(2 * STEP, STEP)]  # anywhere: the first that fits
    space.release(0, STEP)
    assert space.allocate(STEP, 7) == [(0, STEP)]  # a node without memory: anywhere


def test_a_wish_that_cannot_be_had_whole_takes_what_there_is() -> None:
    space = ArenaSpace(8 * STEP, [0, 1])
    space.allocate(3 * STEP, 0)
    assert space.allocate(3 * STEP, 0) == [(3 * STEP, 3 * STEP)]  # over the bound, without a gap
    assert space.allocate(2 * STEP, 0) == [(6 * STEP, 2 * STEP)]
    assert space.allocate(STEP, 0) is None


def test_a_piece_over_the_bound_counts_only_up_to_it() -> None:
    space = ArenaSpace(8 * STEP, [0, 1])
    assert space.allocate(STEP, 0) == [(0, STEP)]
    assert steps(space, space.allocate(3 * STEP, 0)) == {0: 3, 1: 0}
    assert steps(space, space.allocate(4 * STEP, 1)) == {0: 0, 1: 4}


@pytest.mark.parametrize(
    ("nodes", "size", "have", "expected"),
    [
        ([0, 1], 4, [], {0: 2, 1: 2}),
        ([0, 1], 3, [], {0: 2, 1: 1}),
        ([0, 1], 1, [(0, STEP)], {0: 0, 1: 1}),
        ([0, 1], 4, [(0, 3 * STEP), (6 * STEP, STEP)], {0: 1, 1: 3}),
        ([0, 1, 2], 4, [], {0: 2, 1: 1, 2: 1}),
        ([0, 1, 2], 2, [(0, 3 * STEP)], {0: 0, 1: 1, 2: 1}),
        ([], 4, [], {}),
        ([0, 1], 11, [], {0: 5, 1: 6}),
    ],
)
def test_what_is_shared_lies_on_all_nodes(
    nodes: list[int], size: int, have: list[Piece], expected: dict[int, int]
) -> None:
    space = ArenaSpace((12 if size < 11 else 11) * STEP, nodes)
    for piece in have:
        space.take(*piece)
    pieces = space.allocate(size * STEP, "shared", have)
    assert steps(space, pieces) == expected
    assert pieces is not None and sum(n for _, n in pieces) == size * STEP


@pytest.mark.parametrize(
    ("pieces", "shared", "wish"),
    [
        ([(0, STEP)], False, 0),
        ([(5 * STEP, STEP)], False, 1),
        ([(5 * STEP, STEP), (0, 2 * STEP)], False, 1),  # the rest found no room where the first lies
        ([(0, STEP)], True, "shared"),  # too small to show
        ([(0, STEP), (5 * STEP, STEP)], True, "shared"),
        ([(3 * STEP, 2 * STEP)], True, "shared"),
        ([(4 * STEP, 2 * STEP)], True, 1),  # the ranks' GPUs hang on one node
        ([], False, None),
    ],
)
def test_a_region_grows_where_it_lies(pieces: list[Piece], shared: bool, wish: Wish) -> None:
    assert ArenaSpace(8 * STEP, [0, 1]).wish_of(pieces, shared=shared) == wish
    assert ArenaSpace(8 * STEP).wish_of(pieces, shared=shared) is None


WISHES = st.sampled_from([None, 0, 1, 2, 9, "shared"])
COUNT = 17


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8), WISHES), max_size=30), st.integers(0, 3))
def test_wishes_are_kept_when_there_is_room_and_never_cost_any(moves: list[tuple[bool, int, Wish]], nodes: int) -> None:
    space = ArenaSpace(COUNT * STEP, list(range(nodes)))
    held: list[list[Piece]] = []
    for take, count, wish in moves:
        pieces = sorted(piece for region in held for piece in region)
        free = {node: end - start - by_node(space, pieces)[node] for node, start, end in space.parts}
        if take:
            left = space.free_bytes
            extents = space.allocate(count * STEP, wish)
            assert (extents is None) == (left < count * STEP)
            if extents is None:
                assert space.free_bytes == left
                continue
            assert sum(n for _, n in extents) == count * STEP
            assert all(at % STEP == n % STEP == 0 and n > 0 for at, n in extents)
            got = by_node(space, extents)
            if wish in free:
                assert got[int(wish)] == min(count * STEP, free[int(wish)])
            if wish == "shared" and all(room >= count * STEP for room in free.values()):
                assert max(got.values(), default=0) - min(got.values(), default=0) <= STEP
            held.append(extents)
        elif held:
            for extent in held.pop(count % len(held)):
                space.release(*extent)
        pieces = sorted(piece for region in held for piece in region)
        assert all(a + n <= b for (a, n), (b, _) in zip(pieces, pieces[1:], strict=False))
        assert space.free_bytes == COUNT * STEP - sum(n for _, n in pieces)
        # Who starts over these records finds the same room.
        again = ArenaSpace(COUNT * STEP, list(range(nodes)))
        for piece in pieces:
            again.take(*piece)
        assert (again.parts, again._free) == (space.parts, space._free)
    for region in held:
        for extent in region:
            space.release(*extent)
    assert space.allocate(COUNT * STEP) == [(0, COUNT * STEP)]  # merged again, over the bounds too
