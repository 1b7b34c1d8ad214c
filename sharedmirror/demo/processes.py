"""Starts processes so that none can be left behind, and ends them.

Without help from the kernel's parent-death signal: every process is noted with an ExitStack before a signal
can interrupt, and the stack ends it. Only SIGKILL of this process itself leaves something.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import IO

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoFailure(Exception):
    """Raised when a process of the demo failed, so that the story cannot go on."""


def launched(
    stack: ExitStack,
    arguments: Sequence[str],
    *,
    patience_s: float = 0.0,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stderr: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ``stack`` ends: with SIGTERM if ``patience_s`` seconds are given, then with SIGKILL."""
    with _signals_held():
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **(environment or {})},
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for this process, which then ends its children itself
        )
        stack.callback(end, process, patience_s)
    return process


def end(process: subprocess.Popen[bytes], patience_s: float = 0.0) -> None:
    """Make sure ``process`` is gone."""
    if patience_s and process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
    if process.poll() is None:
        process.kill()
        process.wait()


def exists(pid: int) -> bool:
    """Whether a process of that id exists, as a zombie too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the first ending signal into KeyboardInterrupt.

    Later ones are ignored, so that clean-up is never cut short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {each: signal.signal(each, interrupt) for each in ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def _signals_held() -> Iterator[None]:
    # A blocked signal mask would be inherited by the child, so the signals are caught and raised again.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {each: signal.signal(each, lambda number, _: came.append(number)) for each in ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
        for number in came[:1]:
            signal.raise_signal(number)
