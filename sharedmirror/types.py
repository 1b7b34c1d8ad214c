"""The words that client and daemon share: ids, enumerations and the values that travel.

Nothing here does I/O, and nothing here imports torch: the daemon and the CLI use this module too.
"""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NewType

from sharedmirror.errors import PageError, UsageError

PageId = NewType("PageId", int)
PoolId = NewType("PoolId", int)
SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)
HitId = NewType("HitId", int)
Generation = NewType("Generation", int)
Epoch = NewType("Epoch", int)

NULL_PAGE = PageId(0)
"""Host page 0: reserved, never leased, keyed or evicted."""

MAX_KEY_BYTES = 64
MAX_WAIT_S = 86400
SLICE_ALIGNMENT_BYTES = 16
BOARD_BLOCK_BYTES = 4096
"""A rank's room on the board where ranks meet to load together; see ``board``."""
REGION_ALIGNMENT_BYTES = 2 << 20
MAX_SHARDS = 65536


AWAY_HITS = 1 << 61
"""Hits that a scheduler takes while its daemon is gone have numbers from here on; the daemon's own stay below."""
AWAY_NUMBERS = 1 << 24
"""How many of them a scheduler may take; the last number means all of them."""


def away_hit(mark: int, number: int) -> HitId:
    """Return the id of the ``number``-th hit that a scheduler with this mark takes while the daemon is gone."""
    return HitId(AWAY_HITS + mark * AWAY_NUMBERS + number)


def split_away_hit(hit: int) -> tuple[int, int]:
    """Return mark and number of a hit of ``AWAY_HITS`` or above."""
    return divmod(hit - AWAY_HITS, AWAY_NUMBERS)


def check_text(what: str, value: object) -> str:
    """Return ``value`` if it may name something; raises UsageError that says what is wrong with ``what``."""
    if not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= 256 or not value.isprintable():
        raise UsageError(f"{what} is {value!r:.80}; it must be a string of 1 to 256 printable bytes")
    return value


def launch_id(given: object = None) -> str | None:
    """Return which start of its engine this is: ``given``, else ``$SHAREDMIRROR_LAUNCH_ID``, else None.

    Raises UsageError for what is no name; an empty one is none.
    """
    if given is not None and given != "":
        return check_text("launch", given)
    variable = "SHAREDMIRROR_LAUNCH_ID"
    found = os.environ.get(variable)
    return check_text(f"${variable}", found) if found else None


class Layout(str, enum.Enum):
    """How a pool's slices are laid out in a region; see ``PoolLayout``."""

    SLAB = "slab"
    PAGE = "page"


class PoolKind(str, enum.Enum):
    """Who hands out a pool's pages: the engine itself (static) or the daemon (leased)."""

    STATIC = "static"
    LEASED = "leased"


class Role(str, enum.Enum):
    """What a connected process does."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    OBSERVER = "observer"


class KeyState(str, enum.Enum):
    """What a lookup says of one key."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


@dataclass(frozen=True)
class Plane:
    """One mirrored plane as the daemon sees it.

    ``name`` and ``shard`` of ``shards`` say which ranks hold equal bytes; ``slice_bytes`` is what one
    page has in this plane, ``span`` the rows of that slice.
    """

    name: str
    shard: int
    shards: int
    slice_bytes: int
    span: int

    def to_wire(self) -> list[object]:
        """Return the plane as it travels in ``attach``."""
        return [self.name, self.shard, self.shards, self.slice_bytes, self.span]


@dataclass(frozen=True)
class Lease:
    """Pages owned for writing. Plain data: it may be pickled to the workers.

    ``pages[i]`` was granted under ``generations[i]``. ``keys`` is set when the lease came from
    ``reserve``: its pages then become readable with the last rank's commit. ``incarnation`` is the launch of
    the engine that holds it, 0 where it is not known.
    """

    id: LeaseId
    pool: PoolId
    pages: tuple[PageId, ...]
    generations: tuple[Generation, ...]
    keys: tuple[bytes, ...] | None = None
    incarnation: int = 0


def check_timeout(timeout_s: object) -> float:
    """Return the seconds that a call may take; raises UsageError for anything but a number above 0."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_WAIT_S:
        raise UsageError(f"timeout_s must be seconds above 0 and at most {MAX_WAIT_S}, not {timeout_s!r:.40}")
    return timeout_s


def check_lease(call: str, value: object) -> Lease:
    """Return a lease; raises UsageError, naming ``call``, for anything else."""
    if isinstance(value, Lease):
        return value
    remedy = "; a reservation has none when nothing was granted" if value is None else ""
    raise UsageError(f"{call} takes a Lease, not {type(value).__name__}{remedy}")


def check_pages(call: str, value: Any) -> list[int]:
    """Return host page ids as ints; raises UsageError or PageError, naming ``call``, for what is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"{call}: pages must be a sequence of host pages, not {value!r:.40}")
    pages = []
    for page in value:
        try:
            if isinstance(page, bool):
                raise TypeError
            pages.append(operator.index(page))
        except TypeError:
            raise PageError(f"{call}: a host page must be a whole number, not {page!r:.40}") from None
    return pages


@dataclass(frozen=True)
class Reservation:
    """The answer to ``reserve``: what became of each key."""

    lease: Lease | None
    granted: dict[bytes, PageId]
    present: tuple[bytes, ...]
    pending: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True)
class Sealed:
    """The answer to ``seal`` and ``commit``.

    ``sealed`` are the pages that became readable with this call. ``pending`` are pages that have a
    key but still miss a rank's commit. ``duplicates`` maps a page that was freed, because its key
    was already readable, to the page that holds the key.
    """

    sealed: tuple[PageId, ...]
    pending: tuple[PageId, ...]
    duplicates: dict[PageId, PageId]
