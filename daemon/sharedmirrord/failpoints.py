"""Failpoints: places where a test makes the daemon die, wait or fail.

``SHAREDMIRROR_FAILPOINTS`` arms them, ``name=action`` with commas between, read once at start:

- ``kill[:n]``: the process gets SIGKILL when the place is reached for the n-th time (1 by default),
- ``sleep:seconds``: the process sleeps there each time, its event loop with it,
- ``error[:n]``: MemoryFault, the first n times or each time.

The places are named where they are: ``grep -rn 'failpoints.reach'``. Without the variable a place
costs one look at an empty map. Never set the variable outside tests.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from sharedmirror.errors import MemoryFault, UsageError

VARIABLE = "SHAREDMIRROR_FAILPOINTS"


@dataclass
class _Failpoint:
    action: str
    number: float
    reached: int = 0


def reach(name: str) -> None:
    """The process is at the place ``name``: do what the variable asks for there."""
    if _armed and name in _armed:
        _act(name, _armed[name])


def _act(name: str, point: _Failpoint) -> None:
    point.reached += 1
    if point.action == "sleep":
        time.sleep(point.number)
    elif point.action == "kill" and point.reached == point.number:
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "error" and point.reached <= point.number:
        raise MemoryFault(f"the failpoint {name} was reached")


def parse(text: str) -> dict[str, _Failpoint]:
    """Return the failpoints that ``text`` arms; raises UsageError when it cannot be read."""
    default = {"kill": 1.0, "error": float("inf")}
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, what = item.partition("=")
        action, _, number = what.partition(":")
        try:
            value = float(number) if number else default[action]
        except (KeyError, ValueError):
            raise UsageError(f"{VARIABLE} holds {item!r}; name=kill[:n], sleep:seconds or error[:n] is meant") from None
        if action not in ("kill", "sleep", "error"):
            raise UsageError(f"{VARIABLE} holds {item!r}; its action must be kill, sleep or error")
        armed[name] = _Failpoint(action, value)
    return armed


def arm() -> None:
    """Read the variable, once, at start; raises UsageError when it cannot be read."""
    _armed.update(parse(os.environ.get(VARIABLE, "")))


_armed: dict[str, _Failpoint] = {}
