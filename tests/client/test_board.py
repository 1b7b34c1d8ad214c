"""The board: what ranks say to each other on it, and that the daemon gives the ranks of a launch the same one."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror import SharedHostMirror
from sharedmirror.copies.together.board import MOST_RANKS, POSTS, Abort, Board, Card, Kind, State, wait_until
from sharedmirror.types import BOARD_BLOCK_BYTES

if TYPE_CHECKING:
    from tests.conftest import Daemon

CARD = Card(7, b"h" * 64, b"d" * 16, b"l" * 16)


def boards(ranks: tuple[int, ...] = (0, 1, 2)) -> list[Board]:
    memory = bytearray(BOARD_BLOCK_BYTES * (max(ranks) + 1))
    return [Board(memory, ranks, rank) for rank in ranks]


def test_ranks_meet() -> None:
    a, b, c = boards((1, 4, 5))
    assert a.behind(State.HERE) == [4, 5]
    assert b.enter(CARD) and c.enter(CARD)
    assert a.behind(State.HERE) == [] and b.behind(State.HERE) == [1]
    assert a.card(1) == CARD
    c.say(State.CANNOT)
    assert a.state(2) is State.CANNOT and a.behind(State.READY) == [4]


def test_who_comes_back_ends_it() -> None:
    a, b, _ = boards()
    assert a.enter(CARD) and not a.enter(CARD)
    assert b.aborted == Abort(Kind.CAME_BACK, 0)


def test_the_first_reason_stays() -> None:
    a, b, _ = boards((0, 300, 301))
    assert a.aborted is None
    a.abort(Kind.MISSING, 300)
    assert b.abort(Kind.DISAGREE, None) == Abort(Kind.MISSING, 300) == a.aborted
    lonely = boards()[0]
    assert lonely.abort(Kind.DISAGREE, None) == Abort(Kind.DISAGREE, None)


def test_words_are_compared_in_a_circle() -> None:
    a, b, _ = boards()
    word = a.produced(1)
    assert a.reached(word, 0) and not a.reached(word, 1)
    for value in (1 << 30, 1 << 31, 3 << 30, (1 << 32) - 2):
        a.release([(word, value)])
    assert b.reached(word, (1 << 32) - 2) and not b.reached(word, 1 << 32)
    a.release([(word, (1 << 32) + 3)])
    assert b.reached(word, (1 << 32) - 2) and b.reached(word, 3)
    a.release([(word, 1)])
    assert b.reached(word, 3)


def test_no_two_words_share_a_place() -> None:
    ranks = tuple(range(MOST_RANKS))
    (board,) = boards(ranks)[:1]
    words = [board.consumed(reader, producer) for reader in ranks for producer in ranks]
    words += [of(member) for member in ranks for of in (board.produced, board.finished)]
    assert len({word // 64 for word in words}) == len(words)
    before = bytes(board._memory)
    for number in range(POSTS):
        board.post(number + 1, (1 << 64) - 1)
    board.enter(CARD)
    board.judge(1)
    board.abort(Kind.MISSING, 0)
    assert all(board._memory[word : word + 4] == before[word : word + 4] for word in words)
    assert all(board.posted(0, number + 1) == (1 << 64) - 1 for number in range(POSTS))
    assert board.card(0) == CARD and board.state(0) is State.HERE


def test_posts_wait_for_those_who_need_the_old_ones() -> None:
    a, b = boards((0, 1))
    for number in range(1, POSTS + 1):
        assert a.may_post(number)
        a.post(number, number)
    assert not a.may_post(POSTS + 1)
    a.judge(1)
    assert not a.may_post(POSTS + 1)
    b.judge(1)
    assert a.may_post(POSTS + 1) and not a.may_post(POSTS + 2)
    assert b.posted(0, 3) == 3 and b.posted(0, POSTS + 1) is None


@pytest.mark.parametrize("ranks", [(0,), tuple(range(MOST_RANKS + 1)), (0, 9)])
def test_a_board_without_room_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no room"):
        Board(bytearray(BOARD_BLOCK_BYTES * 8), ranks, 0)


def test_a_wait_ends() -> None:
    assert not wait_until(lambda: False, 0.01)
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 20)


def test_the_ranks_of_a_launch_get_the_same_board(daemon: Daemon) -> None:
    def attach(engine: str, rank: int) -> SharedHostMirror:
        pool: Any = SimpleNamespace(page_size=4, k_buffer=[torch.zeros(16, 8)], v_buffer=[torch.zeros(16, 8)])
        return SharedHostMirror(
            pool, 8, socket=daemon.socket, engine=engine, rank=rank, world_size=2, pages="leased", shard=(0, 1)
        )

    with ThreadPoolExecutor(4) as threads:
        mirrors = list(threads.map(attach, "eeff", (0, 1, 0, 1)))
    memories = [mirror._attachment.board() for mirror in mirrors]
    for at, memory in enumerate(memories):
        assert memory is not None and len(memory) == 2 * BOARD_BLOCK_BYTES
        memory[at % 2] += 1 + 10 * (at // 2)
    assert [bytes(memory[:2]) for memory in memories if memory is not None] == [b"\1\1"] * 2 + [b"\13\13"] * 2
    for memory in memories:
        if memory is not None:
            memory.close()
    while mirrors:
        mirrors.pop().close()
    gc.collect()
