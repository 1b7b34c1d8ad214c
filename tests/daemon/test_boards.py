"""The daemon hands the ranks of a launch one board; it cannot be resized, and goes when the launch does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sharedmirror.copies.together.board import map_board
from sharedmirror.types import BOARD_BLOCK_BYTES
from sharedmirrord.boards import Boards
from sharedmirrord.core.model import Incarnation, State


@pytest.fixture
def boards() -> Iterator[Boards]:
    state = State.__new__(State)
    state.incarnations = {1: Incarnation(1, "e", "p", None), 2: Incarnation(2, "f", "p", None)}
    made = Boards(state)
    yield made
    state.incarnations.clear()
    made.prune()


def test_one_board_a_launch(boards: Boards) -> None:
    one, again, other = boards.get(1, 4), boards.get(1, 4), boards.get(2, 4)
    assert one is not None and other is not None and one == again != other
    with map_board(one) as left, map_board(one) as right, map_board(other) as beside:
        assert len(left) == 4 * BOARD_BLOCK_BYTES
        left[17] = 5
        assert right[17] == 5 and beside[17] == 0


def test_a_board_keeps_its_size(boards: Boards) -> None:
    fd = boards.get(1, 2)
    assert fd is not None
    for size in (0, BOARD_BLOCK_BYTES, 3 * BOARD_BLOCK_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_the_board_of_a_launch_that_is_over_is_let_go_and_stays_with_its_holders(boards: Boards) -> None:
    fd = boards.get(1, 2)
    assert fd is not None
    with map_board(fd) as memory:
        del boards._state.incarnations[1]
        boards.prune()
        with pytest.raises(OSError):
            os.fstat(fd)
        memory[0] = 1
