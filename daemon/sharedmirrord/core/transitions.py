"""The states of a page and every way from one to another.

This table is the only place that knows them. ``RESERVED`` has no way in or out: it is the null page.
"""

from __future__ import annotations

import enum


class PageState(enum.IntEnum):
    """State of one host page; the numbers are durable."""

    FREE = 0
    LEASED = 1
    SEALED = 2
    QUARANTINED = 3
    RESERVED = 4


class PageEvent(enum.Enum):
    """What can happen to a page."""

    GRANT = "granted to a lease"
    SEAL = "sealed with a key, every writer having committed"
    DISCARD = "aborted or superseded, with evidence for every writer"
    DOUBT = "a writer's fate is unknown"
    PROVE = "the last evidence arrived"
    EVICT = "evicted or cleared while nobody pinned it"

    # Members are single objects; Enum's own hash is a Python function, and this one is on the hot path.
    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[int, PageEvent], PageState] = {
    (PageState.FREE, PageEvent.GRANT): PageState.LEASED,
    (PageState.LEASED, PageEvent.SEAL): PageState.SEALED,
    (PageState.LEASED, PageEvent.DISCARD): PageState.FREE,
    (PageState.LEASED, PageEvent.DOUBT): PageState.QUARANTINED,
    (PageState.QUARANTINED, PageEvent.PROVE): PageState.FREE,
    (PageState.SEALED, PageEvent.EVICT): PageState.FREE,
}


class InvalidTransition(Exception):
    """Raised when a page is asked to go a way that the table does not have: a bug of the daemon."""

    def __init__(self, page: int, state: int, event: PageEvent) -> None:
        super().__init__(f"page {page} is {PageState(state).name} and cannot be {event.value}")
        self.page = page
