"""The board of an engine launch: shared memory in which ranks that load together meet and keep step.

Each rank has a block of one page. What the CPU writes there: its card (who it is, how to reach its slots), its
posts (which loads it has submitted), its state. What its GPU writes there, in stream order: how many chunks it
has put in its slots (``produced``), how many it has taken from each other rank (``consumed``), which load is
finished. The group's first block also holds the word ``aborted``.

What it keeps:

- a word has one writer, but for ``aborted``, and for what ``release`` does when that is set already;
- ``aborted`` is never cleared: after an abort the ranks of this launch load each by themselves;
- a word that was awaited by force is never mistaken for the truth: ``aborted`` is set before the force, and
  is read after the wait.

Numbers are 32 bits, compared in a circle. The order of stores is that of the program, as x86 keeps it. The daemon makes
the board and never reads it; it goes with its last holder. Must not import torch.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sharedmirror.types import BOARD_BLOCK_BYTES

__all__ = ["MOST_RANKS", "POSTS", "Abort", "Board", "Card", "Kind", "State", "map_board"]

MOST_RANKS = 16
"""Of one group: so many words of ``consumed`` fit in a block."""
POSTS = 64
"""How many loads a rank may be ahead of the one that another has judged."""
VERSION = 1

_LINE = 64
_STATE, _CARD = 0, _LINE
_JUDGED, _ABORTED = 6 * _LINE, 7 * _LINE
_PRODUCED, _FINISHED, _CONSUMED = 16 * _LINE, 17 * _LINE, 18 * _LINE
_POSTS = 40 * _LINE
_CARD_FORM = struct.Struct("=IIQ64s16s16s")
_POST = struct.Struct("=QQ")
_WORD = 0xFFFFFFFF
_PAUSE_S = 2e-4
_NOBODY = 0xFFFF


class State(enum.IntEnum):
    """How far a rank has come; it only rises."""

    ABSENT = 0
    HERE = 1
    """Its card can be read."""
    READY = 2
    """It reaches the slots of all others."""
    CANNOT = 3
    """It does not: nobody loads together."""
    LEFT = 4
    """It loads together no more, and has closed what it opened of the others' memory."""


class Kind(enum.IntEnum):
    """Why loading together has ended."""

    MISSING = 1
    DISAGREE = 2
    FAILED = 3
    CAME_BACK = 4


@dataclass(frozen=True)
class Abort:
    """The end of loading together: why, and by which rank (None: not known)."""

    kind: Kind
    rank: int | None


@dataclass(frozen=True)
class Card:
    """Who a rank is: process, handle of the memory with its slots, device, and a digest of what all must share."""

    pid: int
    handle: bytes
    device: bytes
    digest: bytes


def map_board(fd: int) -> mmap.mmap:
    """Map a board; the descriptor may be closed then. Raises OSError."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


class Board:
    """A rank's view of the blocks of its group: ``ranks`` in ascending order, ``me`` an index into it.

    Offsets are bytes from the start of the memory. Members are named by their index in the group.
    """

    def __init__(self, memory: mmap.mmap | bytearray, ranks: Sequence[int], rank: int) -> None:
        if not 2 <= len(ranks) <= MOST_RANKS or len(memory) < BOARD_BLOCK_BYTES * (max(ranks) + 1):
            raise ValueError(f"a board of {len(memory)} bytes has no room for the ranks {list(ranks)}")
        self.ranks = tuple(ranks)
        self.me = self.ranks.index(rank)
        self.others = tuple(member for member in range(len(ranks)) if member != self.me)
        self._memory = memory
        self.bytes = np.frombuffer(memory, np.uint8)
        self._words = self.bytes[: len(memory) & ~3].view(np.uint32)
        self._at = [BOARD_BLOCK_BYTES * each for each in self.ranks]
        self._aborted = (self._at[0] + _ABORTED) // 4

    # -- words that GPUs write ----------------------------------------------------------------------

    def produced(self, member: int) -> int:
        """Return the offset of the number of chunks that a member has put in its slots."""
        return self._at[member] + _PRODUCED

    def consumed(self, reader: int, producer: int) -> int:
        """Return the offset of the number of chunks that one member has taken from another."""
        return self._at[reader] + _CONSUMED + _LINE * producer

    def finished(self, member: int) -> int:
        """Return the offset of the number of the last load that a member has all bytes of."""
        return self._at[member] + _FINISHED

    def reached(self, offset: int, value: int) -> bool:
        """Return whether a word is at ``value`` or past it."""
        return (int(self._words[offset // 4]) - value) & _WORD < 1 << 31

    def release(self, needs: Iterable[tuple[int, int]]) -> None:
        """Let streams go on that wait for words: (offset, value). Only after an abort."""
        for offset, value in needs:
            if not self.reached(offset, value):
                self._words[offset // 4] = value & _WORD

    # -- the end --------------------------------------------------------------------------------------

    def abort(self, kind: Kind, rank: int | None) -> Abort:
        """End loading together for good; the first reason stays."""
        if not self._words[self._aborted]:
            self._words[self._aborted] = kind | (_NOBODY if rank is None else rank) << 8
        return self.aborted or Abort(kind, rank)

    @property
    def aborted(self) -> Abort | None:
        """Why loading together has ended, if it has."""
        word = int(self._words[self._aborted])
        return Abort(Kind(word & 0xFF), None if word >> 8 == _NOBODY else word >> 8) if word else None

    # -- meeting --------------------------------------------------------------------------------------

    def enter(self, card: Card) -> bool:
        """Take this rank's block; False, and the end of loading together, when a forerunner has used it."""
        if self.state(self.me) is not State.ABSENT:
            self.abort(Kind.CAME_BACK, self.ranks[self.me])
            return False
        _CARD_FORM.pack_into(
            self._memory, self._at[self.me] + _CARD, VERSION, len(self.ranks), card.pid, card.handle, card.device,
            card.digest,
        )  # fmt: skip
        self.say(State.HERE)
        return True

    def card(self, member: int) -> Card | None:
        """Return a member's card; None if it is of another version. Its state must be HERE or more."""
        version, number, pid, handle, device, digest = _CARD_FORM.unpack_from(self._memory, self._at[member] + _CARD)
        return Card(pid, handle, device, digest) if (version, number) == (VERSION, len(self.ranks)) else None

    def say(self, state: State) -> None:
        """Tell the others how far this rank has come."""
        self._words[(self._at[self.me] + _STATE) // 4] = state

    def state(self, member: int) -> State:
        """Return how far a member has come."""
        return State(int(self._words[(self._at[member] + _STATE) // 4]))

    def behind(self, state: State) -> list[int]:
        """Return the ranks that have not come so far."""
        return [self.ranks[each] for each in self.others if self.state(each) < state]

    # -- posts ----------------------------------------------------------------------------------------

    def post(self, number: int, digest: int) -> None:
        """Say that load ``number`` (from 1) is being submitted; ``digest`` (64 bits) says what it loads."""
        at = self._at[self.me] + _POSTS + _POST.size * (number % POSTS)
        struct.pack_into("=Q", self._memory, at + 8, digest)
        struct.pack_into("=Q", self._memory, at, number)

    def posted(self, member: int, number: int) -> int | None:
        """Return a member's digest for a load, None if it has not posted it."""
        found, digest = _POST.unpack_from(
            self._memory, self._at[member] + _POSTS + _POST.size * (number % POSTS)
        )  # fmt: skip
        return int(digest) if found == number else None

    def judge(self, number: int) -> None:
        """Say that this rank needs no post up to this load any more."""
        self._words[(self._at[self.me] + _JUDGED) // 4] = number & _WORD

    def may_post(self, number: int) -> bool:
        """Return whether every member has judged the load whose post this one would overwrite."""
        return all(self.reached(at + _JUDGED, number - POSTS) for at in self._at) or number <= POSTS


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again; return what the condition said last."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return condition()
        time.sleep(_PAUSE_S)
    return True
