"""Readers that know a pool's keys from its log alone: after every event they must know what the table knows."""

from __future__ import annotations

from sharedmirrord.core.changes import CAPACITY, ChangeLog
from sharedmirrord.core.model import State


class Followers:
    """One reader a pool; each begins with the keys that it finds, and anew with each start of the daemon."""

    def __init__(self) -> None:
        self.skip = False
        """Set by tests whose logs are too small for all that one event does."""
        self._known: dict[int, tuple[ChangeLog, int, set[bytes]]] = {}

    def problems(self, state: State) -> list[str]:
        """Read on, and return where what was told is not what is so."""
        found = []
        for pool in state.pools.values():
            if pool.table is None or self.skip:
                continue
            log, sequence, keys = self._known.get(pool.id, (None, 0, set[bytes]()))
            if log is not pool.table.changes:
                log, sequence, keys = pool.table.changes, pool.table.changes.sequence, set(pool.table.index)
            runs = log.since(sequence, CAPACITY)
            if runs is None:
                found.append(f"watch: pool {pool.id} lost events after {sequence}")
                continue
            for letter, some, after in runs:
                sequence = after
                if letter == "s":
                    keys.update(some)
                elif letter == "e":
                    keys.difference_update(some)
                else:
                    keys.clear()
            self._known[pool.id] = log, sequence, keys
            if keys != pool.table.index.keys():
                found.append(f"watch: pool {pool.id} has other keys than were told: {keys ^ pool.table.index.keys()}")
        return found
