"""The engine of the demo as its parent sees it: one process a rank, commanded over pipes.

No process outlives the ``with`` block, however it ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from sharedmirror.demo.commands import Failure, Start, Started, Stop
from sharedmirror.demo.processes import DemoFailure, launched

ANSWER_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 10.0

T = TypeVar("T")


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: Connection


class Engine:
    """Worker processes that act as one. A context manager; ``launch`` tells it from a dead forerunner.

    What the workers leave behind lies in ``folder``.
    """

    def __init__(self, starts: Sequence[Start], *, launch: str, folder: Path) -> None:
        self.started: list[Started] = []
        self._starts = starts
        # torch leaves files in its temporary folder.
        self._environment = {"SHAREDMIRROR_LAUNCH_ID": launch, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        self._ranks: list[_Rank] = []
        self._stack = ExitStack()

    def __enter__(self) -> Engine:
        with ExitStack() as stack:
            for _ in self._starts:
                self._ranks.append(_started(stack, self._environment))
            for rank, start in zip(self._ranks, self._starts, strict=True):
                rank.pipe.send(start)
            self.started = self._answers(Started)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [rank.process.pid for rank in self._ranks]

    def call(self, command: object, answer: type[T]) -> list[T]:
        """Have all ranks carry out ``command``; return their answers, each an ``answer``, in rank order."""
        self.begin(command)
        return self._answers(answer)

    def begin(self, command: object) -> None:
        """Send ``command`` to all ranks and wait for nothing."""
        for rank in self._ranks:
            rank.pipe.send(command)

    def kill(self) -> None:
        """SIGKILL every rank and wait until each is gone."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait(EXIT_TIMEOUT_S)

    def stop(self) -> list[int]:
        """Let the ranks end by themselves; return their exit codes."""
        self.call(Stop(), type(None))
        return [rank.process.wait(EXIT_TIMEOUT_S) for rank in self._ranks]

    def _answers(self, kind: type[T]) -> list[T]:
        return [_answer(number, rank, kind) for number, rank in enumerate(self._ranks)]


def _started(stack: ExitStack, environment: Mapping[str, str]) -> _Rank:
    ours, theirs = multiprocessing.Pipe()
    stack.enter_context(ours)
    with theirs:
        process = launched(
            stack,
            [sys.executable, "-m", "sharedmirror.demo.worker", str(theirs.fileno())],
            environment=environment,
            pass_fds=[theirs.fileno()],
        )
    return _Rank(process, ours)


def _answer(number: int, rank: _Rank, kind: type[T]) -> T:
    try:
        if not rank.pipe.poll(ANSWER_TIMEOUT_S):
            raise DemoFailure(f"rank {number} gave no {kind.__name__} within {ANSWER_TIMEOUT_S:.0f} s")
        answer = rank.pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise DemoFailure(f"rank {number} ended without an answer") from error
    if isinstance(answer, Failure):
        raise DemoFailure(f"rank {number} failed:\n{answer.text}")
    if not isinstance(answer, kind):
        raise DemoFailure(f"rank {number} answered {type(answer).__name__} instead of {kind.__name__}")
    return answer
