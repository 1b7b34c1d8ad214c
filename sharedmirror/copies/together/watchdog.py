"""No load together hangs: what is to be over by when, and what happens if it is not.

A *round* is one load together of one rank. Its streams wait for words on the board that other ranks' GPUs write.
When a rank does not write them in time, or loads something else, the watchdog sets ``aborted`` on the board and
then writes the awaited words itself, again and again until the streams are through: a word may still be
overwritten by a rank that is merely slow. It makes no driver call, so that nothing that is stuck in one can stop it.

A round is good when its streams are through, all ranks posted the same for it, and nobody had aborted by then: so no
wait in it was ended by force.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sharedmirror.copies.together.board import Abort, Board, Kind
from sharedmirror.errors import CopyError, PartMissing, RanksDisagree

__all__ = ["Round", "Watchdog", "failure"]

_PAUSE_S = 2e-3


@dataclass(eq=False)
class Round:
    """One load of this rank: its number, what it loads, when it is to be over, and the (offset, value) it waits for."""

    number: int
    digest: int
    deadline: float
    needs: dict[int, int] = field(default_factory=dict)
    over: bool = False
    abort: Abort | None = None


class Watchdog:
    """Judges the rounds of one rank. ``clock`` gives seconds."""

    def __init__(self, board: Board, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience_s = patience_s
        self._board = board
        self._clock = clock
        self._changed = threading.Condition()
        self._pending: deque[Round] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, number: int, digest: int, needs: dict[int, int]) -> Round:
        """Watch over a load from now on, and post it; before any of it is submitted."""
        begun = Round(number, digest, self._clock() + self.patience_s, needs)
        with self._changed:
            self._pending.append(begun)
            self._board.post(number, digest)
            self._changed.notify_all()
        return begun

    def check(self, asked: Round) -> None:
        """Judge a round whose streams are known to be through; raises PartMissing or RanksDisagree if it failed."""
        if not asked.over:
            self.step()
        if asked.abort is not None:
            raise failure(asked.abort, self.patience_s)

    def fail(self, begun: Round) -> None:
        """End loading together: some of a round's work could not be submitted. ``settle`` follows."""
        with self._changed:
            self._board.abort(Kind.FAILED, self._board.ranks[self._board.me])
            begun.abort = self._board.aborted

    def settle(self, begun: Round) -> None:
        """Take a failed round for over: the caller has seen its streams come to their end."""
        board = self._board
        board.release([(board.finished(board.me), begun.number)])
        self.step()

    def step(self) -> bool:
        """Judge what is over and end what is late; return whether anything is pending."""
        with self._changed:
            self._judge()
            if self._pending:
                self._look_after(self._clock())
            return bool(self._pending)

    def _judge(self) -> None:
        board = self._board
        while self._pending and board.reached(board.finished(board.me), self._pending[0].number):
            first = self._pending[0]
            differs = self._other(first)
            if differs is not None:
                board.abort(Kind.DISAGREE, differs)
            first.abort = board.aborted
            first.over = True
            board.judge(first.number)
            self._pending.popleft()

    def _look_after(self, now: float) -> None:
        board = self._board
        if board.aborted is None:
            for each in self._pending:
                differs = self._other(each)
                if differs is not None:
                    board.abort(Kind.DISAGREE, differs)
            if self._pending[0].deadline < now:
                board.abort(Kind.MISSING, self._missing(self._pending[0]))
        if board.aborted is not None:
            for each in self._pending:
                board.release(each.needs.items())

    def _other(self, judged: Round) -> int | None:
        """Return a rank that posted something else for this load."""
        board = self._board
        for each in board.others:
            if board.posted(each, judged.number) not in (None, judged.digest):
                return board.ranks[each]
        return None

    def _missing(self, late: Round) -> int | None:
        """Return the rank that the load waits for: one that never called it, or else one whose chunks lack."""
        board = self._board
        for each in board.others:
            if board.posted(each, late.number) is None:
                return board.ranks[each]
        for each in board.others:
            words = (board.produced(each), board.consumed(each, board.me))
            if not all(board.reached(word, late.needs[word]) for word in words if word in late.needs):
                return board.ranks[each]
        return board.ranks[board.me]

    # -- the thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch in a thread of its own, which sleeps while nothing is pending."""
        self._thread = threading.Thread(target=self._run, name="sharedmirror-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; nothing may be pending."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._closed)
                if self._closed and not self._pending:
                    return
            # First of all whoever began a load submits it: this thread would only hold it up.
            time.sleep(_PAUSE_S)
            while self.step():
                time.sleep(_PAUSE_S)


def failure(abort: Abort, patience_s: float) -> CopyError:
    """Return the error of a load that an abort ended."""
    rest = "what it loaded is undefined; from now on each rank loads by itself"
    who = "a rank" if abort.rank is None else f"rank {abort.rank}"
    ranks = [] if abort.rank is None else [abort.rank]
    if abort.kind is Kind.DISAGREE:
        return RanksDisagree(
            f"{who} loads something else: ranks that load together must make the same calls in the same order; {rest}",
            ranks=ranks,
        )
    why = {
        Kind.MISSING: f"did not bring its part of a load together within {patience_s:g} s",
        Kind.FAILED: "could not submit its part of a load together",
    }.get(abort.kind, "came back into an engine whose other ranks load together")
    return PartMissing(f"{who} {why}; {rest}", ranks=ranks)
