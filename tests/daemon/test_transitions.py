"""The table of page states is complete, and the page table goes no other way."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import TRANSITIONS, InvalidTransition, PageEvent, PageState
from tests.daemon.table_problems import problems

FREE, LEASED, SEALED, QUARANTINED, RESERVED = PageState


def test_the_ways_are_those_of_the_design() -> None:
    assert {(before, after) for (before, _), after in TRANSITIONS.items()} == {
        (FREE, LEASED),
        (LEASED, SEALED),
        (LEASED, FREE),
        (LEASED, QUARANTINED),
        (QUARANTINED, FREE),
        (SEALED, FREE),
        (RESERVED, FREE),
        (FREE, RESERVED),
    }


def test_the_null_page_stays_reserved() -> None:
    table = PageTable(6, 3)
    table.provide(0, 6)
    assert list(table.states) == [RESERVED, FREE, FREE, FREE, FREE, FREE]
    table.set_limit(0)
    table.withdraw()
    assert list(table.states) == [RESERVED] * 6
    assert problems(table) == []


def test_pages_that_are_to_be_withdrawn_are_not_granted() -> None:
    table = PageTable(6)
    held, _, _ = table.grant(2) or ([], [], [])
    assert held == [1, 2]
    table.seal([(1, b"a", None)])
    table.set_limit(1)
    assert table.grant(1) is None
    table.discard(2)
    assert (table.evict(1), table.free) == (b"a", 0)
    table.withdraw()
    assert list(table.states) == [RESERVED] * 6
    table.set_limit(6)
    table.provide(1, 4)
    assert list(table.states) == [RESERVED, FREE, FREE, FREE, RESERVED, RESERVED]
    assert problems(table) == []
    assert table.grant(3) == ([1, 2, 3], [2, 2, 1], [])


def test_a_grant_takes_the_pages_that_came_last_last() -> None:
    table = PageTable(6, 3)
    table.provide(3, 6)
    assert table.grant(5) == ([1, 2, 3, 4, 5], [1] * 5, [])


def test_numbers_are_durable() -> None:
    assert [state.value for state in (FREE, LEASED, SEALED, QUARANTINED, RESERVED)] == [0, 1, 2, 3, 4]


def in_state(state: PageState) -> PageTable:
    """Return a table of two pages whose page 1 is in ``state``."""
    table = PageTable(2)
    if state is not FREE:
        table.grant(1)
    if state is SEALED:
        table.seal([(1, b"k", None)])
    if state is QUARANTINED:
        table.doubt(1)
    assert table.states[1] == state
    return table


ACTS: dict[str, tuple[Callable[[PageTable], object], dict[PageState, PageState]]] = {
    "seal": (lambda table: table.seal([(1, b"x", None)]), {LEASED: SEALED}),
    "discard": (lambda table: table.discard(1), {LEASED: FREE, QUARANTINED: FREE}),
    "doubt": (lambda table: table.doubt(1), {LEASED: QUARANTINED, QUARANTINED: QUARANTINED}),
    "evict": (lambda table: table.evict(1), {SEALED: FREE}),
}


@pytest.mark.parametrize(("act", "state"), [*itertools.product(ACTS, (FREE, LEASED, SEALED, QUARANTINED))])
def test_acts_follow_the_table(act: str, state: PageState) -> None:
    do, leads = ACTS[act]
    table = in_state(state)
    if state in leads:
        do(table)
        assert table.states[1] == leads[state]
    else:
        with pytest.raises(InvalidTransition, match=f"page 1 is {state.name}") as caught:
            do(table)
        assert caught.value.page == 1
        assert table.states[1] == state
    assert problems(table) == []


def test_every_event_says_what_it_is() -> None:
    message = str(InvalidTransition(7, SEALED, PageEvent.GRANT))
    assert message == "page 7 is SEALED and cannot be granted to a lease"
