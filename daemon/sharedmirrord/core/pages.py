"""The page table of one leased pool: states, generations, keys, chains, pins and eviction order.

Keeps invariants 1 (one state a page, counts that sum), 3 (generations only grow), 5 (a key names one
sealed page) and 6 (a pinned page is never evicted). Who may write or read a page is the business of
leases and hits; this table takes their word.

A million pages live here, so a page costs array cells and no objects of its own, except its key. The
eviction order is a heap with at most one entry a page: an entry is put right when it surfaces, so
that using a page costs one store.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from sharedmirrord.core.durable import NO_PAGE, Slot
from sharedmirrord.core.transitions import TRANSITIONS, InvalidTransition, PageEvent, PageState

_FREE, _LEASED, _SEALED = PageState.FREE, PageState.LEASED, PageState.SEALED
_PAGE_BITS = 32
_PAGE_MASK = (1 << _PAGE_BITS) - 1


class Observer(Protocol):
    """Is told which keys lead to pages; it must change nothing here."""

    def bound(self, page: int, key: bytes, generation: int) -> None:
        """A key leads to a page from now on."""
        ...

    def unbound(self, page: int, key: bytes) -> None:
        """A key leads to its page no more; nothing else of the page has changed yet."""
        ...

    def cleared(self) -> None:
        """No key leads anywhere any more."""
        ...


class PageTable:
    """States of ``pages`` host pages; page 0 is the null page and stays reserved."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.states = bytearray(pages)
        self.states[0] = PageState.RESERVED
        self.generations = array("Q", bytes(8 * pages))
        self.keys: list[bytes | None] = [None] * pages
        self.index: dict[bytes, int] = {}
        self.pins: dict[int, int] = {}
        self.counts = [0] * len(PageState)
        self.counts[PageState.RESERVED] = 1
        self.counts[_FREE] = pages - 1
        self.evictions = 0
        self.observer: Observer | None = None
        self._free = array("I", range(pages - 1, 0, -1))
        self._parents = array("I", [NO_PAGE]) * pages
        self._parent_generations = array("Q", bytes(8 * pages))
        self._children = array("I", bytes(4 * pages))
        self._used = array("Q", bytes(8 * pages))
        self._queued = bytearray(pages)
        self._heap: list[int] = []
        self._tick = 0
        self._stale: list[tuple[dict[bytes, int], list[int]]] = []
        """What ``clear`` put aside: indexes, and the eviction orders that went with them."""
        self._awaited: dict[bytes, list[tuple[int, int]]] = {}
        """Sealed pages, with generation, by the key of a parent that is not readable yet."""

    # -- transitions -----------------------------------------------------------------------------

    def _move(self, page: int, event: PageEvent) -> None:
        state = self.states[page]
        try:
            new = TRANSITIONS[state, event]
        except KeyError:
            raise InvalidTransition(page, state, event) from None
        self.states[page] = new
        self.counts[state] -= 1
        self.counts[new] += 1

    def _move_all(self, pages: Sequence[int], before: PageState, event: PageEvent) -> None:
        """Apply one event to many pages, all of which must be in the state ``before``."""
        new = TRANSITIONS[before, event]
        states = self.states
        for page in pages:
            if states[page] != before:
                raise InvalidTransition(page, states[page], event)
        for page in pages:
            states[page] = new
        self.counts[before] -= len(pages)
        self.counts[new] += len(pages)

    # -- leasing ---------------------------------------------------------------------------------

    def grant(
        self, wanted: int, protected: Collection[int] = (), *, may_evict: bool = True
    ) -> tuple[list[int], list[int], list[bytes]] | None:
        """Grant ``wanted`` pages, evicting where the free ones do not suffice and it may.

        Returns the pages, their new generations and the keys that were evicted, or None (and changes
        nothing) when there are not enough. ``protected`` pages are not evicted.
        """
        free = self._free
        evicted: list[bytes] = []
        if wanted > len(free) and self._stale:
            self.sweep(wanted - len(free))
        if wanted > len(free):
            victims = self._victims(wanted - len(free), protected) if may_evict else None
            if victims is None:
                return None
            evicted = [self._forget_key(page) for page in victims]
            self._move_all(victims, _SEALED, PageEvent.EVICT)
            self.evictions += len(victims)
            # Oldest ids last: the free list gives out from its end, so ids of one grant stay close.
            free.extend(sorted(victims, reverse=True))
        pages = free[: -wanted - 1 : -1].tolist()
        del free[-wanted:]
        generations = self.generations
        granted = []
        for page in pages:
            generation = generations[page] + 1
            generations[page] = generation
            granted.append(generation)
        self._move_all(pages, _FREE, PageEvent.GRANT)
        return pages, granted, evicted

    def discard(self, page: int) -> None:
        """Free a leased or quarantined page for whose every writer there is evidence."""
        self._move(page, PageEvent.PROVE if self.states[page] == PageState.QUARANTINED else PageEvent.DISCARD)
        self._free.append(page)

    def doubt(self, page: int) -> None:
        """Quarantine a leased page: a writer's fate is unknown."""
        if self.states[page] != PageState.QUARANTINED:
            self._move(page, PageEvent.DOUBT)

    # -- keys ------------------------------------------------------------------------------------

    def seal(self, page: int, key: bytes, parent_key: bytes | None) -> list[int]:
        """Bind ``key``, which must be unbound, to a leased page and make it readable.

        Returns the pages sealed before that hang on this one from now on.
        """
        self._move(page, PageEvent.SEAL)
        self.keys[page] = key
        self.index[key] = page
        if self.observer is not None:
            self.observer.bound(page, key, self.generations[page])
        self._tick += 1
        self._used[page] = self._tick
        parent = self.index.get(parent_key) if parent_key is not None else None
        if parent is not None and parent != page:
            self._link(page, parent)
        elif parent is None and parent_key is not None:
            self._await_parent(page, parent_key)
        linked = []
        for child, generation in self._awaited.pop(key, ()) if self._awaited else ():
            if self._orphan(child, generation) and child not in self._chain(page):
                self._link(child, page)
                linked.append(child)
        self._queue(page)
        return linked

    def _chain(self, page: int) -> set[int]:
        """Return a page and all that it hangs on: a link to one of these would close a circle."""
        found = set()
        at: int | None = page
        while at is not None and at not in found:
            found.add(at)
            at = self._parent(at)
        return found

    def _orphan(self, page: int, generation: int) -> bool:
        return self.states[page] == _SEALED and self.generations[page] == generation and self._parents[page] == NO_PAGE

    def _await_parent(self, page: int, parent_key: bytes) -> None:
        if len(self._awaited) >= self.pages:  # parents that never came; their children may be long gone
            living = {
                key: [entry for entry in entries if self._orphan(*entry)] for key, entries in self._awaited.items()
            }
            self._awaited = {key: entries for key, entries in living.items() if entries}
        self._awaited.setdefault(parent_key, []).append((page, self.generations[page]))

    def _link(self, child: int, parent: int) -> None:
        self._parents[child] = parent
        self._parent_generations[child] = self.generations[parent]
        self._children[parent] += 1

    def _parent(self, page: int) -> int | None:
        parent = self._parents[page]
        if parent == NO_PAGE or self.states[parent] != _SEALED:
            return None
        return parent if self.generations[parent] == self._parent_generations[page] else None

    def _forget_key(self, page: int) -> bytes:
        """Undo ``seal`` for a page about to leave the sealed state; returns its key."""
        key = self.keys[page]
        if key is None:
            raise InvalidTransition(page, self.states[page], PageEvent.EVICT)
        self.keys[page] = None
        if self.index.get(key) == page:
            del self.index[key]
            if self.observer is not None:
                self.observer.unbound(page, key)
        self._parents[page] = NO_PAGE
        self._children[page] = 0
        return key

    def evict(self, page: int) -> bytes:
        """Free one sealed, unpinned page by name, whatever hangs on it; returns its key."""
        if page in self.pins:
            raise InvalidTransition(page, self.states[page], PageEvent.EVICT)
        self._release_parent(page)
        key = self._forget_key(page)
        self._move(page, PageEvent.EVICT)
        self._free.append(page)
        self.evictions += 1
        return key

    def clear(self) -> int:
        """Unbind all keys at once; returns how many pages ``sweep`` will free.

        Pinned pages stay sealed and readable for their holders, and are freed with their last pin.
        """
        freed = len(self.index) - sum(self.index.get(self.keys[page] or b"") == page for page in self.pins)
        if self.observer is not None:
            self.observer.cleared()
        self._stale.append((self.index, self._heap))
        self.index, self._heap = {}, []
        self._awaited.clear()
        self._queued = bytearray(self.pages)
        return freed

    @property
    def sweeping(self) -> bool:
        """Whether cleared pages are left to be freed."""
        return bool(self._stale)

    def sweep(self, limit: int) -> list[int]:
        """Free up to ``limit`` pages that ``clear`` unbound; returns them. A million at once would take too long."""
        freed: list[int] = []
        while self._stale and len(freed) < limit:
            index, heap = self._stale[-1]
            del heap[-limit:]
            for _ in range(min(limit - len(freed), len(index))):
                key, page = index.popitem()
                # A pinned page goes with its last pin; one that went so, and was granted again, is no longer ours.
                if page not in self.pins and self.keys[page] is key and self.index.get(key) != page:
                    self._forget_key(page)
                    freed.append(page)
            if not index and not heap:
                self._stale.pop()
        self._move_all(freed, _SEALED, PageEvent.EVICT)
        self._free.extend(freed)
        return freed

    # -- use and eviction order ------------------------------------------------------------------

    def pin(self, pages: Iterable[int]) -> None:
        """Protect sealed pages against eviction; each call counts."""
        pins = self.pins
        for page in pages:
            pins[page] = pins.get(page, 0) + 1

    def unpin(self, pages: Iterable[int]) -> list[int]:
        """Take back one ``pin`` of each page; returns pages freed because ``clear`` unbound them."""
        pins, freed = self.pins, []
        for page in pages:
            count = pins[page] - 1
            if count:
                pins[page] = count
                continue
            del pins[page]
            key = self.keys[page]
            if key is not None and self.index.get(key) == page:
                self._queue(page)
            else:
                self._release_parent(page)
                self._forget_key(page)
                self._move(page, PageEvent.EVICT)
                self._free.append(page)
                freed.append(page)
        return freed

    def use(self, pages: Iterable[int]) -> None:
        """Mark sealed pages, and the chains they hang on, as used now."""
        self._tick += 1
        tick, used, parents = self._tick, self._used, self._parents
        for page in pages:
            at: int | None = page
            while at is not None and used[at] != tick:
                used[at] = tick
                above = parents[at]
                # A prefix comes in order, so the page above is nearly always marked already.
                at = None if above == NO_PAGE or used[above] == tick else self._parent(at)

    def _evictable(self, page: int) -> bool:
        return self.states[page] == _SEALED and not self._children[page] and page not in self.pins

    def _queue(self, page: int) -> None:
        if not self._queued[page] and self._evictable(page):
            self._queued[page] = 1
            heapq.heappush(self._heap, self._used[page] << _PAGE_BITS | page)

    def _next_victim(self) -> int | None:
        heap, queued = self._heap, self._queued
        while heap:
            entry = heapq.heappop(heap)
            page = entry & _PAGE_MASK
            queued[page] = 0
            if not self._evictable(page) or self.index.get(self.keys[page] or b"") != page:
                continue  # in use again, or cleared
            if entry >> _PAGE_BITS == self._used[page]:
                return page
            self._queue(page)
        return None

    def _release_parent(self, page: int) -> int | None:
        parent = self._parent(page)
        if parent is not None:
            self._children[parent] -= 1
            self._queue(parent)
        return parent

    def _victims(self, wanted: int, protected: Collection[int]) -> list[int] | None:
        """Choose leaves first, least recently used first; None, and no change, if there are too few."""
        if self.counts[_SEALED] - len(self.pins) < wanted:
            return None
        victims: list[int] = []
        parents: list[int | None] = []
        spared: list[int] = []
        while len(victims) < wanted:
            page = self._next_victim()
            if page is None:
                break
            if page in protected:
                spared.append(page)
                continue
            victims.append(page)
            parents.append(self._release_parent(page))
        complete = len(victims) == wanted
        if not complete:
            for parent in parents:
                if parent is not None:
                    self._children[parent] += 1
            spared += victims
        for page in spared:
            self._queue(page)
        return victims if complete else None

    # -- after a restart -------------------------------------------------------------------------

    def restore(
        self,
        page: int,
        state: PageState,
        generation: int,
        key: bytes | None = None,
        parent: int = NO_PAGE,
        parent_generation: int = 0,
    ) -> None:
        """Set one page as the records have it. Call ``rebuild`` when all are set."""
        self.states[page] = state
        self.generations[page] = generation
        self.keys[page] = key
        if key is not None:
            if not key or key in self.index:
                raise ValueError(f"page {page} has no key or the key of another page")
            self.index[key] = page
        self._parents[page] = parent
        self._parent_generations[page] = parent_generation

    def pin_again(self, pages: Sequence[int]) -> None:
        """Pin pages for a hit from before; one that was cleared meanwhile is sealed again, without a key to find it."""
        for page in pages:
            if self.states[page] == PageState.FREE:
                self.states[page] = _SEALED
                self.keys[page] = b""
            if self.states[page] != _SEALED:
                raise ValueError(f"pinned page {page} is {PageState(self.states[page]).name}")
        self.pin(pages)

    def rebuild(self) -> None:
        """Derive counts, free list, children and eviction order from what was restored."""
        self.counts = [self.states.count(state) for state in PageState]
        self._free = array("I", [page for page in range(self.pages - 1, 0, -1) if self.states[page] == _FREE])
        for page in self.index.values():
            parent = self._parent(page) if self._parents[page] < self.pages else None
            if parent is None:
                self._parents[page] = NO_PAGE
            else:
                self._children[parent] += 1
        self._heap = [page for page in self.index.values() if self._evictable(page)]
        heapq.heapify(self._heap)
        for page in self._heap:
            self._queued[page] = 1

    # -- what is durable, and what must hold -----------------------------------------------------

    def slot(self, page: int, number: int) -> Slot:
        """Return the durable words of a page that just was sealed or freed."""
        return Slot(
            page,
            self.states[page],
            self.generations[page],
            number,
            self.keys[page] or b"",
            self._parents[page],
            self._parent_generations[page],
        )

    def problems(self) -> list[str]:
        """Return what breaks the table's invariants; empty when all is well. Slow: for tests."""
        found = [
            f"1: count of {state.name} is {self.counts[state]}, table has {self.states.count(state)}"
            for state in PageState
            if self.counts[state] != self.states.count(state)
        ]
        if sum(self.counts) != self.pages:
            found.append("1: counts do not sum to the page count")
        if sorted(self._free) != [page for page in range(self.pages) if self.states[page] == _FREE]:
            found.append("2: the free list is not the free pages")
        found += [
            f"5: key of page {page} leads to a page that is {PageState(self.states[page]).name}"
            for key, page in self.index.items()
            if self.states[page] != _SEALED or self.keys[page] != key
        ]
        found += [f"6: pinned page {page} is not sealed" for page in self.pins if self.states[page] != _SEALED]
        children = [0] * self.pages
        for page in range(self.pages):
            parent = self._parent(page) if self.states[page] == _SEALED else None
            if parent is not None:
                children[parent] += 1
        found += [
            f"page {page} counts {self._children[page]} children and has {children[page]}"
            for page in range(self.pages)
            if self.index.get(self.keys[page] or b"") == page and self._children[page] != children[page]
        ]
        found += [
            f"evictable page {page} is not queued"
            for page in range(self.pages)
            if self._evictable(page) and self.index.get(self.keys[page] or b"") == page and not self._queued[page]
        ]
        return found
