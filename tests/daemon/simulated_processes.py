"""Processes and sockets of the simulated world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


class Violation(AssertionError):
    """Raised when something happened that must never happen."""


@dataclass
class Process:
    """One process and its forks. Its copies go on as long as one of them lives."""

    pid: int
    name: str
    alive: bool = True
    stopped: bool = False
    ended: bool = False
    """Whether the pidfd says so: a moment after a kill."""
    forks: set[int] = field(default_factory=set)
    socket_forks: set[int] = field(default_factory=set)
    """Forks that kept the socket."""
    maps: dict[int, int] = field(default_factory=dict)
    """How many bytes of each region are mapped, from its beginning."""
    connections: list[Connection] = field(default_factory=list)
    inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    """What happens to it while it is stopped."""

    @property
    def mapped(self) -> bool:
        """Whether anything is left that could copy, and that holds the session file's lock."""
        return not self.ended or bool(self.forks)


@dataclass
class Connection:
    """A socket between a process and one life of the daemon; in order, with delays."""

    process: Process
    life: int
    on_frame: Callable[[Body], None]
    on_lost: Callable[[], None]
    open: bool = True
    session: int | None = None
    to_daemon: float = 0.0
    to_client: float = 0.0
