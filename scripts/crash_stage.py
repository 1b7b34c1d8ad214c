"""What ``crash-loop`` tells its workers and schedulers, and what the bytes of a page must be."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

POOL, ENGINES, RANKS = "crash", 2, 2
HOST_PAGES, DEVICE_PAGES, PAGE_ROWS = 65, 24, 16
GROUPS, GROUP_KEYS = 40, 8
"""Keys hang together in prefixes; there are five times as many as pages."""
PATIENCE_S = 40.0
"""Longer than any restart takes: who waits this long hangs."""
GHOST_BYTE = 0xEE
GENERATION_BYTES = 8


@dataclass(frozen=True)
class Stage:
    """What every process is told."""

    directory: str
    socket: str
    report_fd: int

    def worker_path(self, engine: int, rank: int) -> str:
        return os.path.join(self.directory, f"worker{engine}.{rank}")

    @property
    def calm_path(self) -> str:
        """A file that is there once nobody is to die any more."""
        return os.path.join(self.directory, "calm")

    def report(self, **what: Any) -> None:
        # One write of less than a pipe's atomic size, so that lines of different processes stay whole.
        os.write(self.report_fd, json.dumps(what).encode()[:4000] + b"\n")

    def count(self, **numbers: int) -> None:
        self.report(count=numbers)

    def violation(self, text: str) -> None:
        self.report(violation=text)


def content(key: bytes, generation: int, rank: int, plane: int, size_bytes: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a page; they begin with the generation, which a reader does not know otherwise."""
    mark = b"%b/%d/%d/%d" % (key, generation, rank, plane)
    rest = hashlib.shake_128(mark).digest(size_bytes - GENERATION_BYTES)
    return np.frombuffer(generation.to_bytes(GENERATION_BYTES, "little") + rest, np.uint8)


def generation_in(rows: np.ndarray[Any, Any]) -> int:
    """Return the generation that a page's bytes tell."""
    return int.from_bytes(rows.reshape(-1)[:GENERATION_BYTES].tobytes(), "little")
