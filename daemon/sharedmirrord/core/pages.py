"""The page table of one leased pool: states, generations, keys, chains, pins and eviction order.

Keeps invariants 1 (one state a page, counts that sum), 3 (generations only grow), 5 (a key names one
sealed page) and 6 (a pinned page is never evicted). Who may write or read a page is the business of
leases and hits; this table takes their word.

All of it is one class of over 600 lines, because each of its events touches most of the arrays. A million
pages live here, so a page costs array cells and no objects of its own, except its key. The
eviction order is a heap for each owner, with at most one living entry a page: an entry is put right
when it surfaces, so that using a page costs one store.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from sharedmirrord.core.changes import CLEARED, EVICTED, SEALED, ChangeLog
from sharedmirrord.core.claims import NOBODY, Claim, Givers
from sharedmirrord.core.durable import NO_PAGE, Slot
from sharedmirrord.core.transitions import TRANSITIONS, InvalidTransition, PageEvent, PageState

_FREE, _LEASED, _SEALED, _RESERVED = PageState.FREE, PageState.LEASED, PageState.SEALED, PageState.RESERVED
PAGE_BITS = 32
PAGE_MASK = (1 << PAGE_BITS) - 1
_SCAN_PAGES = 16384
"""Looked at in one call of ``readable``: about a millisecond of work."""
_TIDY_AT = 64
_NO_CLAIM = Claim()

_Heads = list[tuple[int, int]]
"""The first entry of each owner's order, with the owner: a heap."""


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
    """States of ``pages`` host pages; page 0 is the null page and stays reserved.

    Only the first ``backed`` pages (None: all) have memory; ``provide`` and ``withdraw`` change that.
    """

    def __init__(self, pages: int, backed: int | None = None) -> None:
        backed = pages if backed is None else backed
        self.pages = pages
        self.limit = pages
        """Pages from here on are not granted, because they are to be withdrawn."""
        self.states = bytearray(backed) + bytes([_RESERVED]) * (pages - backed)
        self.states[0] = _RESERVED
        self.generations = array("Q", bytes(8 * pages))
        self.keys: list[bytes | None] = [None] * pages
        self.index: dict[bytes, int] = {}
        self._keyed = 0
        """Pages with a key in ``keys``; more than in ``index`` while cleared ones are left."""
        self.pins: dict[int, int] = {}
        self.counts = [0] * len(PageState)
        self.counts[_RESERVED] = 1 + pages - backed
        self.counts[_FREE] = backed - 1
        self.evictions = 0
        self.changes = ChangeLog()
        self.observer: Observer | None = None
        self._free = array("I", range(backed - 1, 0, -1))
        self._beyond: list[int] = []
        """Free pages from ``limit`` on."""
        self._parents = array("I", [NO_PAGE]) * pages
        self._parent_generations = array("Q", bytes(8 * pages))
        self._children = array("I", bytes(4 * pages))
        self._used = array("Q", bytes(8 * pages))
        self.owned: dict[int, int] = {}
        """How many pages are charged to each owner: those it leased that are not free again."""
        self._owners = array("I", bytes(4 * pages))
        self._queued = array("Q", bytes(8 * pages))
        """The use that a page's entry in the eviction order was made with; 0: it has none."""
        self._heaps: dict[int, list[int]] = {}
        self._tick = 0
        self._stale: list[tuple[dict[bytes, int], list[list[int]]]] = []
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

    # -- memory that comes and goes --------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many pages can be granted without an eviction."""
        return len(self._free)

    def provide(self, first: int, end: int) -> None:
        """Pages from ``first`` up to ``end`` have memory: the reserved ones among them become free."""
        pages = [page for page in range(max(first, 1), end) if self.states[page] == _RESERVED]
        self._move_all(pages, _RESERVED, PageEvent.PROVIDE)
        # Granted last: so a pool's end stays free for as long as can be.
        self._free = array("I", reversed(pages)) + self._free

    def set_limit(self, limit: int) -> None:
        """Grant no page from ``limit`` on; ``withdraw`` takes those that are free."""
        free = [*self._beyond, *self._free]
        self.limit = limit
        self._free = array("I", [page for page in free if page < limit])
        self._beyond = [page for page in free if page >= limit]

    def withdraw(self) -> None:
        """Reserve the pages from ``limit`` on that are free by now."""
        pages, self._beyond = self._beyond, []
        self._move_all(pages, _FREE, PageEvent.WITHDRAW)

    def _freed(self, page: int) -> None:
        (self._free if page < self.limit else self._beyond).append(page)

    # -- leasing ---------------------------------------------------------------------------------

    def grant(
        self, wanted: int, protected: Collection[int] = (), *, may_evict: bool = True, claim: Claim = _NO_CLAIM
    ) -> tuple[list[int], list[int], list[bytes]] | None:
        """Grant ``wanted`` pages, evicting where the free ones do not suffice and it may.

        Returns the pages, their new generations and the keys that were evicted, or None (and changes
        nothing) when there are not enough. ``protected`` pages are not evicted. ``claim`` says whose the
        pages will be, and who else has a share to defend.
        """
        free = self._free
        evicted: list[bytes] = []
        if wanted > len(free) and self._stale:
            self.sweep(wanted - len(free))
        if wanted > len(free):
            victims = self._victims(wanted - len(free), protected, wanted, claim) if may_evict else None
            if victims is None:
                return None
            evicted = [self._forget_key(page) for page in victims]
            self._discharge(victims)
            self._move_all(victims, _SEALED, PageEvent.EVICT)
            self.evictions += len(victims)
            # Oldest ids last: the free list gives out from its end, so ids of one grant stay close.
            free.extend(sorted(victims, reverse=True))
        pages = free[: -wanted - 1 : -1].tolist()
        del free[-wanted:]
        generations, owners, owner = self.generations, self._owners, claim.owner
        granted = []
        for page in pages:
            generation = generations[page] + 1
            generations[page] = generation
            owners[page] = owner
            granted.append(generation)
        self._charge(owner, wanted)
        self._move_all(pages, _FREE, PageEvent.GRANT)
        return pages, granted, evicted

    def discard(self, page: int) -> None:
        """Free a leased or quarantined page for whose every writer there is evidence."""
        self._move(page, PageEvent.PROVE if self.states[page] == PageState.QUARANTINED else PageEvent.DISCARD)
        self._charge(self._owners[page], -1)
        self._freed(page)

    def doubt(self, page: int) -> None:
        """Quarantine a leased page: a writer's fate is unknown."""
        if self.states[page] != PageState.QUARANTINED:
            self._move(page, PageEvent.DOUBT)

    def _charge(self, owner: int, pages: int) -> None:
        count = self.owned.get(owner, 0) + pages
        if count:
            self.owned[owner] = count
        else:
            del self.owned[owner]

    def _discharge(self, pages: Iterable[int]) -> None:
        for owner, count in Counter(map(self._owners.__getitem__, pages)).items():
            self._charge(owner, -count)

    def forget_owner(self, owner: int) -> None:
        """Let an owner's number be used for another; no page may be charged to it."""
        if owner in self.owned:
            raise ValueError(f"owner {owner} still has {self.owned[owner]} pages")
        self._heaps.pop(owner, None)

    # -- keys ------------------------------------------------------------------------------------

    def seal(self, entries: Iterable[tuple[int, bytes, bytes | None]]) -> tuple[list[int], list[int], list[list[int]]]:
        """Bind keys to leased pages and make them readable; an entry is page, key and the key it hangs on.

        A page whose key another page has already is freed. Returns the pages sealed, the pages sealed
        before that hang on these from now on, and the pairs of freed page and winner.
        """
        self._tick += 1
        index, keys, used, tick = self.index, self.keys, self._used, self._tick
        note, observer = self.changes.add, self.observer
        sealed: list[int] = []
        linked: list[int] = []
        duplicates: list[list[int]] = []
        for page, key, parent_key in entries:
            winner = index.get(key)
            if winner is not None:
                self.discard(page)
                duplicates.append([page, winner])
                continue
            self._move(page, PageEvent.SEAL)
            keys[page] = key
            self._keyed += 1
            index[key] = page
            note(SEALED, key)
            if observer is not None:
                observer.bound(page, key, self.generations[page])
            used[page] = tick
            sealed.append(page)
            if parent_key is not None:
                parent = index.get(parent_key)
                if parent is None:
                    self._await_parent(page, parent_key)
                elif parent != page:
                    self._link(page, parent)
            if self._awaited:
                linked += self._link_awaited(page, key)
        # Only now: what got a child in this call is no leaf.
        for page in sealed:
            if not self._children[page]:
                self._queue(page)
        return sealed, linked, duplicates

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the page that each key leads to, -1 where there is none."""
        index, bound = self.index, self.keys
        if self._keyed != len(index):  # a page may have a key that leads nowhere
            return [index.get(key, -1) for key in keys]
        found = []
        page, last = -1, self.pages - 1
        for key in keys:
            # A chain mostly lies in one page after the other: looking there first spares a walk through memory.
            page += 1
            if page > last or bound[page] != key:
                page = index.get(key, -1)
            found.append(page)
        return found

    def _link_awaited(self, page: int, key: bytes) -> list[int]:
        linked = []
        for child, generation in self._awaited.pop(key, ()):
            if self._orphan(child, generation) and child not in self._chain(page):
                self._link(child, page)
                linked.append(child)
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
        self._keyed -= 1
        if self.index.get(key) == page:
            del self.index[key]
            self.changes.add(EVICTED, key)
            if self.observer is not None:
                self.observer.unbound(page, key)
        self._parents[page] = NO_PAGE
        self._children[page] = 0
        self._queued[page] = 0  # should an entry be left, it is known to be dead by its use
        return key

    def evict(self, page: int) -> bytes:
        """Free one sealed, unpinned page by name, whatever hangs on it; returns its key."""
        if page in self.pins:
            raise InvalidTransition(page, self.states[page], PageEvent.EVICT)
        self._release_parent(page)
        key = self._forget_key(page)
        self._charge(self._owners[page], -1)
        self._tidy(self._owners[page])
        self._move(page, PageEvent.EVICT)
        self._freed(page)
        self.evictions += 1
        return key

    def clear(self) -> int:
        """Unbind all keys at once; returns how many pages ``sweep`` will free.

        Pinned pages stay sealed and readable for their holders, and are freed with their last pin.
        """
        freed = len(self.index) - sum(self.index.get(self.keys[page] or b"") == page for page in self.pins)
        self._stale.append((self.index, list(self._heaps.values())))
        self.index, self._heaps = {}, {}
        self.changes.add(CLEARED, b"")
        if self.observer is not None:
            self.observer.cleared()
        self._awaited.clear()
        return freed

    @property
    def sweeping(self) -> bool:
        """Whether cleared pages are left to be freed."""
        return bool(self._stale)

    def sweep(self, limit: int) -> list[int]:
        """Free up to ``limit`` pages that ``clear`` unbound; returns them. A million at once would take too long."""
        freed: list[int] = []
        while self._stale and len(freed) < limit:
            index, heaps = self._stale[-1]
            if heaps:
                del heaps[-1][-limit:]
                if not heaps[-1]:
                    heaps.pop()
            for _ in range(min(limit - len(freed), len(index))):
                key, page = index.popitem()
                # A pinned page goes with its last pin; one that went so, and was granted again, is no longer ours.
                if page not in self.pins and self.keys[page] is key and self.index.get(key) != page:
                    self._forget_key(page)
                    freed.append(page)
            if not index and not heaps:
                self._stale.pop()
        self._discharge(freed)
        self._move_all(freed, _SEALED, PageEvent.EVICT)
        for page in freed:
            self._freed(page)
        return freed

    def readable(self, start: int, limit: int) -> tuple[list[bytes], int | None]:
        """Return up to ``limit`` readable keys in page order from page ``start`` on, and where to go on.

        Looks at a bounded number of pages, so there may be more although few or none were found; None
        says that the table is at its end.
        """
        keys, index = self.keys, self.index
        end = min(start + _SCAN_PAGES, self.pages)
        found: list[bytes] = []
        for page in range(start, end):
            key = keys[page]
            if key is not None and index.get(key) == page:
                if len(found) == limit:
                    return found, page
                found.append(key)
        return found, end if end < self.pages else None

    # -- use and eviction order ------------------------------------------------------------------

    def pin(self, pages: Collection[int]) -> None:
        """Protect sealed pages, each named once, against eviction; each call counts."""
        pins = self.pins
        if pins.keys().isdisjoint(pages):
            pins.update(dict.fromkeys(pages, 1))
        else:
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
                self._charge(self._owners[page], -1)
                self._move(page, PageEvent.EVICT)
                self._freed(page)
                freed.append(page)
        return freed

    def use(self, pages: Iterable[int]) -> None:
        """Mark sealed pages, and the chains they hang on, as used now."""
        self._tick += 1
        tick, used, parents = self._tick, self._used, self._parents
        before = NO_PAGE
        for page in pages:
            used[page] = tick
            above = parents[page]
            # A prefix comes in order: the page above is nearly always the one before.
            if above != before and above != NO_PAGE and used[above] != tick:
                self._use_chain(page)
            before = page

    def _use_chain(self, page: int) -> None:
        at = self._parent(page)
        while at is not None and self._used[at] != self._tick:
            self._used[at] = self._tick
            at = self._parent(at)

    def _evictable(self, page: int) -> bool:
        return self.states[page] == _SEALED and not self._children[page] and page not in self.pins

    def _queue(self, page: int) -> None:
        if not self._queued[page] and self._evictable(page):
            used, heap = self._used[page], self._heaps.get(self._owners[page])
            if heap is None:
                heap = self._heaps[self._owners[page]] = []
            self._queued[page] = used
            heapq.heappush(heap, used << PAGE_BITS | page)

    def _tidy(self, owner: int) -> None:
        """Take dead entries out of an order, once they are the most of it: evictions by name leave them."""
        heap = self._heaps.get(owner, [])
        if len(heap) > _TIDY_AT + 2 * self.owned.get(owner, 0):
            heap[:] = [entry for entry in heap if self._queued[entry & PAGE_MASK] == entry >> PAGE_BITS]
            heapq.heapify(heap)

    def _heads(self, givers: Givers) -> _Heads:
        heads = [(heap[0], owner) for owner, heap in self._heaps.items() if heap and givers.may_give(owner)]
        heapq.heapify(heads)
        return heads

    def _due(self, heads: _Heads, givers: Givers) -> Iterator[int]:
        """Yield the evictable pages of those who may give, least recently used first, and take them out of the order.

        ``heads`` is the caller's: it adds an owner when a page comes to the front of another order.
        """
        queued, used = self._queued, self._used
        while heads:
            entry, owner = heapq.heappop(heads)
            heap = self._heaps[owner]
            if not heap or heap[0] != entry:
                continue  # another entry came to the front since, and has a head of its own
            while heap and (not givers.over or givers.may_give(owner)):
                if heads and heads[0][0] < heap[0]:
                    heapq.heappush(heads, (heap[0], owner))
                    break
                entry = heapq.heappop(heap)
                page = entry & PAGE_MASK
                if queued[page] != entry >> PAGE_BITS:
                    continue  # the page was evicted by name
                queued[page] = 0
                if not self._evictable(page) or self.index.get(self.keys[page] or b"") != page:
                    continue  # in use again, or cleared
                if entry >> PAGE_BITS == used[page]:
                    yield page
                else:
                    self._queue(page)

    def _release_parent(self, page: int) -> int | None:
        parent = self._parent(page)
        if parent is not None:
            self._children[parent] -= 1
            self._queue(parent)
        return parent

    def _victims(self, needed: int, protected: Collection[int], wanted: int, claim: Claim) -> list[int] | None:
        """Choose leaves first, least recently used first; None, and no change, if there are too few."""
        if self.counts[_SEALED] - len(self.pins) < needed:
            return None
        givers = Givers(claim, self.owned, wanted)
        heads = self._heads(givers)
        due = self._due(heads, givers)
        victims: list[int] = []
        parents: list[int | None] = []
        spared: list[int] = []
        while len(victims) < needed:
            page = next(due, None)
            if page is None:
                if not givers.widen():
                    break
                heads = self._heads(givers)
                due = self._due(heads, givers)
            elif page in protected or page >= self.limit:
                spared.append(page)
            else:
                victims.append(page)
                parents.append(self._release_parent(page))
                if givers.over or len(self._heaps) > 1:
                    self._follow(heads, givers, page, parents[-1])
        complete = len(victims) == needed
        if not complete:
            for parent in parents:
                if parent is not None:
                    self._children[parent] += 1
            spared += victims
        for page in spared:
            self._queue(page)
        return victims if complete else None

    def _follow(self, heads: _Heads, givers: Givers, victim: int, parent: int | None) -> None:
        """Put ``heads`` right after a victim was taken: other owners may be due, or that of its parent."""
        owner = self._owners[victim]
        if givers.over and givers.took(owner):
            heads[:] = self._heads(givers)
        elif parent is not None and (above := self._owners[parent]) != owner and (heap := self._heaps.get(above)):
            heapq.heappush(heads, (heap[0], above))

    # -- after a restart -------------------------------------------------------------------------

    def restore(
        self,
        page: int,
        state: PageState,
        generation: int,
        key: bytes | None = None,
        parent: int = NO_PAGE,
        parent_generation: int = 0,
        owner: int = NOBODY,
    ) -> None:
        """Set one page as the records have it. Call ``rebuild`` when all are set."""
        if owner:
            self._owners[page] = owner
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
                self._keyed += 1
            if self.states[page] != _SEALED:
                raise ValueError(f"pinned page {page} is {PageState(self.states[page]).name}")
        self.pin(pages)

    def rebuild(self) -> None:
        """Derive counts, free list, children and eviction order from what was restored."""
        self.counts = [self.states.count(state) for state in PageState]
        self._keyed = self.pages - self.keys.count(None)
        self._free = array("I", [page for page in range(self.pages - 1, 0, -1) if self.states[page] == _FREE])
        for page in self.index.values():
            parent = self._parent(page) if self._parents[page] < self.pages else None
            if parent is None:
                self._parents[page] = NO_PAGE
            else:
                self._children[parent] += 1
        self._tick = 1
        for page, state in enumerate(self.states):
            if state not in (_FREE, PageState.RESERVED):
                self._charge(self._owners[page], 1)
        for page in self.index.values():
            self._used[page] = 1
            self._queue(page)

    # -- what is durable ---------------------------------------------------------------------------

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
