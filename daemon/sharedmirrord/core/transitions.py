"""The states of a page and every way from one to another.

This table is the only place that knows them. ``RESERVED`` is the null page, which never moves, and every
page of an elastic pool that has no memory now, or whose memory is being given back.
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
    PROVIDE = "backed with memory"
    WITHDRAW = "withdrawn, its memory being given back"

    # Members are single objects; Enum's own hash is a Python function, and this one is on the hot path.
    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[int, PageEvent], PageState] = {
    (PageState.FREE, PageEvent.GRANT): PageState.LEASED,
    (PageState.LEASED, PageEvent.SEAL): PageState.SEALED,
    (PageState.LEASED, PageEvent.DISCARD): PageState.FREE,
    (PageState.LEASED, PageEvent.DOUBT): PageState.QUARANTINED,
    (PageState.QUARANTINED, PageEvent.PROVE): PageState.FREE,
    (PageState.SEALED, PageEvent.EVICT): PageState.FREE,
    (PageState.RESERVED, PageEvent.PROVIDE): PageState.FREE,
    (PageState.FREE, PageEvent.WITHDRAW): PageState.RESERVED,
}


class InvalidTransition(Exception):
    """Raised when a page is asked to go a way that the table does not have: a bug of the daemon."""

    def __init__(self, page: int, state: int, event: PageEvent) -> None:
        super().__init__(f"page {page} is {PageState(state).name} and cannot be {event.value}")
        self.page = page
