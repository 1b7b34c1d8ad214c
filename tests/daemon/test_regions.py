"""Where planes lie, and that no two regions ever share a byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirror.types import REGION_ALIGNMENT_BYTES, SLICE_ALIGNMENT_BYTES, Layout, Plane
from sharedmirrord.core.regions import ArenaSpace, aligned, frame_bytes, place

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
