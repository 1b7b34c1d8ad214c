"""The page table alone: grants, keys, chains, pins, and who is evicted first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirrord.core.durable import NO_PAGE
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import InvalidTransition, PageState
from tests.daemon.table_problems import problems


def sealed(table: PageTable, *keys: bytes, parent: bytes | None = None) -> list[int]:
    """Grant and seal a chain of keys, the first of which hangs on ``parent``."""
    granted = table.grant(len(keys))
    assert granted is not None
    for page, key in zip(granted[0], keys, strict=True):
        table.seal([(page, key, parent)])
        parent = key
    return granted[0]


def evicts(table: PageTable, wanted: int, protected: set[int] | None = None) -> list[bytes] | None:
    """Return the keys evicted by a grant of ``wanted`` pages."""
    granted = table.grant(wanted, protected or ())
    return None if granted is None else granted[2]


def shown(table: PageTable) -> tuple[object, ...]:
    return (
        bytes(table.states), list(table.generations), list(table.keys), dict(table.index), list(table._free),
        list(table._children), list(table.counts), table.evictions,
    )  # fmt: skip


def test_a_new_table_leases_all_but_the_null_page() -> None:
    table = PageTable(5)
    granted = table.grant(4)
    assert granted == ([1, 2, 3, 4], [1, 1, 1, 1], [])
    assert table.grant(1) is None
    assert table.states[0] == PageState.RESERVED
    assert problems(table) == []


def test_each_grant_raises_the_generation() -> None:
    table = PageTable(2)
    for generation in (1, 2, 3):
        granted = table.grant(1)
        assert granted is not None
        assert granted[1] == [generation]
        table.discard(1)
    assert table.generations[1] == 3


def test_free_pages_go_before_eviction() -> None:
    table = PageTable(4)
    sealed(table, b"a", b"b")
    assert evicts(table, 1) == []
    assert table.index.keys() == {b"a", b"b"}


def test_leaves_go_before_the_prefix_they_hang_on() -> None:
    table = PageTable(4)
    sealed(table, b"a", b"b", b"c")
    assert evicts(table, 1) == [b"c"]
    table = PageTable(4)
    sealed(table, b"a", b"b", b"c")
    assert evicts(table, 3) == [b"c", b"b", b"a"]


def test_least_recently_used_leaf_goes_first() -> None:
    table = PageTable(5)
    sealed(table, b"a", b"b")
    sealed(table, b"x", b"y")
    table.use([table.index[b"b"]])
    assert evicts(table, 2) == [b"y", b"x"]


def test_using_a_leaf_refreshes_its_whole_chain() -> None:
    table = PageTable(5)
    sealed(table, b"a", b"b")
    sealed(table, b"x")
    sealed(table, b"y")
    table.use([table.index[b"b"]])
    table.use([table.index[b"y"]])
    # Without the refresh a, the oldest, would be due as soon as b was gone.
    assert evicts(table, 1) == [b"x"]
    table.evict(table.index[b"b"])
    assert evicts(table, 2) == [b"a"]


def test_an_old_entry_of_the_order_is_put_right_when_it_surfaces() -> None:
    table = PageTable(4)
    sealed(table, b"a")
    sealed(table, b"b")
    sealed(table, b"c")
    table.use([table.index[b"a"]])
    table.use([table.index[b"b"]])
    assert evicts(table, 3) == [b"c", b"a", b"b"]


def test_a_parent_sealed_after_its_child_still_goes_last() -> None:
    table = PageTable(4)
    sealed(table, b"b", b"c", parent=b"a")
    sealed(table, b"a")
    assert evicts(table, 3) == [b"c", b"b", b"a"]


def test_a_child_whose_parent_never_comes_is_a_root() -> None:
    table = PageTable(3)
    sealed(table, b"b", parent=b"nobody")
    sealed(table, b"c")
    assert evicts(table, 1) == [b"b"]


def test_parents_that_never_come_are_forgotten() -> None:
    table = PageTable(3)
    for number in range(50):
        page = sealed(table, b"k%d" % number, parent=b"p%d" % number)[0]
        table.evict(page)
    assert len(table._awaited) <= table.pages


def test_a_page_granted_again_is_no_parent_of_old_children() -> None:
    table = PageTable(4)
    parent, child = sealed(table, b"a", b"b")
    table.evict(parent)
    again = table.grant(1)
    assert again is not None and again[0] == [parent]
    table.seal([(parent, b"z", None)])
    table.use([child])
    assert evicts(table, 2) == [b"z"]
    assert problems(table) == []


def test_eviction_by_name_takes_a_parent_and_leaves_its_children() -> None:
    table = PageTable(4)
    parent, child = sealed(table, b"a", b"b")
    assert table.evict(parent) == b"a"
    assert table.index == {b"b": child}
    assert table.evictions == 1
    assert evicts(table, 3) == [b"b"]


def test_pinned_and_protected_pages_stay() -> None:
    table = PageTable(4)
    pages = sealed(table, b"a"), sealed(table, b"b"), sealed(table, b"c")
    table.pin(pages[0])
    assert evicts(table, 1, set(pages[1])) == [b"c"]
    with pytest.raises(InvalidTransition):
        table.evict(pages[0][0])
    assert table.unpin(pages[0]) == []
    assert evicts(table, 1) == [b"a"]


def test_what_a_pinned_page_hangs_on_stays_too() -> None:
    table = PageTable(4)
    pages = sealed(table, b"a", b"b", b"c")
    table.pin([pages[1]])
    assert evicts(table, 2) is None
    assert evicts(table, 1) == [b"c"]


@pytest.mark.parametrize("stands_in_the_way", ["pin", "protection"])
def test_a_failed_search_for_victims_changes_nothing(stands_in_the_way: str) -> None:
    """Chains are loosened while the search goes on: all of that must be put back."""
    table = PageTable(7)
    pages = sealed(table, b"a", b"b", b"c") + sealed(table, b"x", b"y", b"z")
    protected = set()
    if stands_in_the_way == "pin":
        table.pin([pages[0]])
    else:
        protected = {pages[0]}
    before = shown(table)
    assert evicts(table, 6, protected) is None
    assert shown(table) == before
    assert problems(table) == []
    assert evicts(table, 5, protected) == [b"c", b"b", b"z", b"y", b"x"]


def test_pins_count() -> None:
    table = PageTable(2)
    pages = sealed(table, b"a")
    table.pin(pages)
    table.pin(pages)
    table.unpin(pages)
    assert evicts(table, 1) is None
    table.unpin(pages)
    assert evicts(table, 1) == [b"a"]


def test_clear_frees_what_nobody_pins() -> None:
    table = PageTable(4)
    pages = sealed(table, b"a", b"b", b"c")
    table.pin([pages[1]])
    assert table.clear() == 2
    assert table.index == {}
    assert sorted(table.sweep(10)) == [pages[0], pages[2]]
    assert not table.sweeping
    assert table.states[pages[1]] == PageState.SEALED
    assert table.unpin([pages[1]]) == [pages[1]]
    assert table.counts[PageState.FREE] == 3
    assert problems(table) == []


def test_a_sweep_goes_on_in_steps_and_spares_what_came_back_meanwhile() -> None:
    table = PageTable(8)
    pages = sealed(table, b"a", b"b", b"c", b"d", b"e")
    table.pin([pages[0]])
    assert table.clear() == 4
    assert table.unpin([pages[0]]) == [pages[0]]
    (again,) = sealed(table, b"a")
    steps = []
    while table.sweeping:
        steps.append(table.sweep(2))
        assert problems(table) == []
    assert max(map(len, steps)) == 2
    assert sorted(page for step in steps for page in step) == sorted(pages[1:])
    assert table.index == {b"a": again}


def test_a_grant_takes_cleared_pages_before_it_evicts() -> None:
    table = PageTable(5)
    sealed(table, b"a", b"b", b"c")
    table.clear()
    sealed(table, b"new")
    assert evicts(table, 3) == []
    assert b"new" in table.index


def test_a_cleared_key_can_be_bound_again_while_the_old_page_is_pinned() -> None:
    table = PageTable(4)
    parent, _ = sealed(table, b"a", b"b")
    table.pin([parent])
    table.clear()
    table.sweep(10)
    (again,) = sealed(table, b"a")
    assert again != parent
    assert problems(table) == []
    assert table.unpin([parent]) == [parent]
    assert table.index == {b"a": again}
    assert problems(table) == []


def test_a_slot_tells_key_and_parent() -> None:
    table = PageTable(3)
    first, second = sealed(table, b"a", b"b")
    assert table.slot(second, 4) == (second, PageState.SEALED, 1, 4, b"b", first, 1)
    assert table.slot(first, 4) == (first, PageState.SEALED, 1, 4, b"a", NO_PAGE, 0)
    table.evict(second)
    assert table.slot(second, 4)[:5] == (second, PageState.FREE, 1, 4, b"")


@pytest.mark.parametrize("keys", [[(b"a", b"a")], [(b"a", b"b"), (b"b", b"a")]], ids=["own parent", "circle"])
def test_a_circle_of_parents_can_still_be_evicted(keys: list[tuple[bytes, bytes]]) -> None:
    """Keys are the caller's: nonsense of one engine must not take pages from all others for good."""
    table = PageTable(3)
    for key, parent in keys:
        sealed(table, key, parent=parent)
    assert evicts(table, 2) is not None


def _oracle(pages: dict[int, tuple[int, int | None]], pinned: set[int], wanted: int) -> list[int] | None:
    """``pages``: sealed page to (used, parent). Take the least recently used leaf, again and again."""
    left, victims = dict(pages), []
    for _ in range(wanted):
        parents = {parent for _, parent in left.values()}
        leaves = [(used, page) for page, (used, _) in left.items() if page not in parents and page not in pinned]
        if not leaves:
            return None
        victims.append(min(leaves)[1])
        del left[victims[-1]]
    return victims


@settings(max_examples=150, deadline=None, database=None)
@given(st.data())
def test_eviction_order_is_that_of_a_plain_search(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    table = PageTable(count + 1)
    used: dict[int, int] = {}
    parents: dict[int, int | None] = {}
    for number in range(count):
        parent = data.draw(st.none() | st.integers(0, number - 1)) if number else None
        (page,) = sealed(table, b"%d" % number, parent=None if parent is None else b"%d" % parent)
        used[page], parents[page] = number, None if parent is None else table.index[b"%d" % parent]
    for now, page in enumerate(data.draw(st.lists(st.sampled_from(sorted(used)), max_size=8)), count):
        table.use([page])
        at: int | None = page
        while at is not None:
            used[at], at = now, parents[at]
    pinned = data.draw(st.sets(st.sampled_from(sorted(used)), max_size=2))
    table.pin(pinned)
    wanted = data.draw(st.integers(1, count))
    keys = {page: table.keys[page] for page in used}
    victims = _oracle({page: (used[page], parents[page]) for page in used}, pinned, wanted)
    assert evicts(table, wanted) == (None if victims is None else [keys[page] for page in victims])
    assert problems(table) == []
