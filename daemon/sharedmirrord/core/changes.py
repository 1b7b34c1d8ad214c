"""What became of a pool's keys, newest last: the log that ``watch`` reads.

It is in memory only and begins anew with each start of the daemon. It is bounded: a reader that is
more than ``CAPACITY`` events behind has lost some, is told so, and reads the keys themselves again.
``add`` is on the way of every sealed and every evicted page, so it makes no objects.
"""

from __future__ import annotations

from itertools import groupby

CAPACITY = 1 << 16
"""Events kept; a power of two."""
_MASK = CAPACITY - 1

SEALED, EVICTED, CLEARED = b"sec"
"""Kinds of events: a key became readable, is readable no more, or all keys are gone at once."""

Run = tuple[str, list[bytes], int]
"""Events of one kind that follow one another: its letter, the keys (none if cleared), the sequence after them."""


class ChangeLog:
    """The last events of one pool, numbered from 1."""

    def __init__(self) -> None:
        self.sequence = 0
        """The number of the newest event."""
        self._kinds = bytearray()
        self._keys: list[bytes] = []

    def add(self, kind: int, key: bytes) -> None:
        """Note one event; ``key`` is empty for CLEARED."""
        at = self.sequence & _MASK
        if at == len(self._keys):
            self._kinds.append(kind)
            self._keys.append(key)
        else:
            self._kinds[at] = kind
            self._keys[at] = key
        self.sequence += 1

    def since(self, sequence: int, limit: int) -> list[Run] | None:
        """Return up to ``limit`` events after ``sequence``, oldest first; None where some are lost or never were."""
        if not max(0, self.sequence - CAPACITY) <= sequence <= self.sequence:
            return None
        start = sequence & _MASK
        end = start + min(limit, self.sequence - sequence)
        kinds, keys = self._kinds[start:end], self._keys[start:end]
        if end > CAPACITY:
            kinds += self._kinds[: end - CAPACITY]
            keys += self._keys[: end - CAPACITY]
        runs: list[Run] = []
        done = 0
        for kind, same in groupby(kinds):
            begun, done = done, done + len(list(same))
            runs.append((chr(kind), [] if kind == CLEARED else keys[begun:done], sequence + done))
        return runs
