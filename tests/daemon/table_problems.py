"""What must hold in a page table after every event, looked up the slow way."""

from __future__ import annotations

from collections import Counter

from sharedmirrord.core.pages import PAGE_BITS, PAGE_MASK, PageTable
from sharedmirrord.core.transitions import PageState


def problems(table: PageTable) -> list[str]:
    """Return what breaks the table's invariants; empty when all is well."""
    found = [
        f"1: count of {state.name} is {table.counts[state]}, table has {table.states.count(state)}"
        for state in PageState
        if table.counts[state] != table.states.count(state)
    ]
    if sum(table.counts) != table.pages:
        found.append("1: counts do not sum to the page count")
    if sorted([*table._free, *table._beyond]) != [p for p in range(table.pages) if table.states[p] == PageState.FREE]:
        found.append("2: the free list is not the free pages")
    if max(table._free, default=-1) >= table.limit or min(table._beyond, default=table.limit) < table.limit:
        found.append(f"2: a page from {table.limit} on can be granted, or one before it cannot")
    found += [
        f"5: key of page {page} leads to a page that is {PageState(table.states[page]).name}"
        for key, page in table.index.items()
        if table.states[page] != PageState.SEALED or table.keys[page] != key
    ]
    if table._keyed != table.pages - table.keys.count(None):
        found.append(f"5: {table._keyed} pages count as having a key, and it is not so")
    found += [f"6: pinned page {page} is not sealed" for page in table.pins if table.states[page] != PageState.SEALED]
    children = [0] * table.pages
    for page in range(table.pages):
        parent = table._parent(page) if table.states[page] == PageState.SEALED else None
        if parent is not None:
            children[parent] += 1
    found += [
        f"page {page} counts {table._children[page]} children and has {children[page]}"
        for page in range(table.pages)
        if table.index.get(table.keys[page] or b"") == page and table._children[page] != children[page]
    ]
    return found + _order_problems(table)


def _order_problems(table: PageTable) -> list[str]:
    charged = Counter(
        table._owners[page]
        for page in range(table.pages)
        if table.states[page] not in (PageState.FREE, PageState.RESERVED)
    )
    found = [] if charged == table.owned else [f"owners have {dict(charged)} pages, counted are {table.owned}"]
    living = Counter(
        (owner, entry & PAGE_MASK)
        for owner, heap in table._heaps.items()
        for entry in heap
        if table._queued[entry & PAGE_MASK] == entry >> PAGE_BITS
    )
    found += [f"page {page} is queued {count} times" for (_, page), count in living.items() if count > 1]
    found += [
        f"evictable page {page} is not queued"
        for page in range(table.pages)
        if table._evictable(page)
        and table.index.get(table.keys[page] or b"") == page
        and (table._owners[page], page) not in living
    ]
    return found
