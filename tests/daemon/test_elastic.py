"""The levels of an elastic pool: whole pieces of memory, never more than the most, never less than the least."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirror.types import REGION_ALIGNMENT_BYTES
from sharedmirrord.core.elastic import Elastic, step_pages

MIB, GIB = 1 << 20, 1 << 30


def elastic(least: int, most: int, *page_bytes: int) -> Elastic:
    return Elastic(least, most, step_pages(page_bytes, most), page_bytes)


def test_a_small_pool_grows_by_the_smallest_piece() -> None:
    pool = elastic(2, 2048, 4096)
    assert pool.levels == [512, 1024, 1536, 2048]
    assert (pool.backed, pool.giving, pool.visible) == (512, False, 512)
    assert [pool.size_bytes(level) for level in pool.levels] == [2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB]


def test_a_large_pool_grows_by_a_64th_and_at_most_by_1_gib() -> None:
    assert step_pages([1 * MIB], 32 * 1024) == 512
    assert step_pages([1 * MIB], 1 << 20) == 1024
    assert step_pages([3 * GIB], 10) == 1


def test_levels_up_and_down() -> None:
    pool = elastic(600, 2000, 4096)
    assert pool.levels == [512, 1024, 1536, 2000]
    assert [pool.level(n) for n in (1, 512, 513, 1999, 5000)] == [512, 512, 1024, 2000, 2000]
    assert [pool.below(n) for n in (2000, 1537, 1536, 1025, 1024)] == [1536, 1536, 1024, 1024, 1024]
    assert [pool.within(n * MIB) for n in (100, 8, 7, 4, 2)] == [2000, 2000, 1536, 1024, 1024]


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 1 << 18).map(lambda n: 16 * n), min_size=1, max_size=3),
    st.integers(2, 1 << 16),
    st.integers(2, 1 << 16),
)
def test_each_level_fills_its_memory(page_bytes: list[int], one: int, other: int) -> None:
    least, most = sorted((one, other))
    pool = elastic(least, most, *page_bytes)
    assert pool.levels == sorted(set(pool.levels)) and pool.levels[-1] == most
    assert least <= pool.backed <= most
    for level in pool.levels:
        sizes = [pool.region_bytes(region, level) for region in range(len(page_bytes))]
        assert all(size % REGION_ALIGNMENT_BYTES == 0 for size in sizes)
        assert all(size >= level * each for size, each in zip(sizes, page_bytes, strict=True))
        more = level + 1
        assert level == most or any(size < more * each for size, each in zip(sizes, page_bytes, strict=True))
        assert pool.level(level) == level and pool.within(pool.size_bytes(level)) == max(level, pool.backed)
