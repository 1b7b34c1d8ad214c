"""What leased pools mean, said a second time with plain sets: the reference for the core's stateful test.

It sees what an observer of the channel sees: events, requests and answers. From the state it takes
only the incarnation that an attach joined. Failures begin with the number of the broken invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sharedmirror.types import Role

DEAD = ("dead", "gone", "detached")


@dataclass
class ModelPage:
    """``bound``: its key can be found. ``parent`` is (page, generation)."""

    state: str = "free"
    generation: int = 0
    lease: ModelLease | None = None
    key: bytes | None = None
    bound: bool = False
    parent_key: bytes | None = None
    parent: tuple[int, int] | None = None
    owner: str = ""
    """The engine that leased it."""
    used: int = 0


@dataclass
class ModelPool:
    id: int
    world_size: int
    pages: list[ModelPage]
    number: int = 1
    binding: dict[bytes, int] = field(default_factory=dict)
    tick: int = 0

    def use(self, pages: Iterable[int]) -> None:
        """Mark pages and all that they hang on as used now."""
        self.tick += 1
        for page in pages:
            at: int | None = page
            while at is not None and self.pages[at].used != self.tick:
                self.pages[at].used = self.tick
                parent, generation = self.pages[at].parent or (None, 0)
                there = parent is not None and self.pages[parent].state == "sealed"
                at = parent if there and self.pages[parent or 0].generation == generation else None


@dataclass
class ModelSession:
    id: int
    role: Role
    pool: int
    incarnation: int
    rank: int | None
    engine: str = ""
    life: str = "attached"
    connected: bool = True


@dataclass
class ModelLease:
    id: int
    pool: ModelPool
    incarnation: int
    owner: int
    number: int
    pages: list[int]
    writers: dict[int, int]
    open: set[int]
    keys: dict[int, bytes] = field(default_factory=dict)
    parents: dict[int, bytes | None] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    doubted: set[int] = field(default_factory=set)
    committed: dict[int, set[int]] = field(default_factory=dict)
    drained: dict[int, set[int]] = field(default_factory=dict)

    def may_write(self, page: int) -> list[int]:
        """Ranks of which there is no evidence that their copies into the page are over."""
        return [rank for rank in self.writers if page not in self.committed[rank] | self.drained[rank]]


@dataclass
class ModelHit:
    id: int
    pool: ModelPool
    incarnation: int
    session: int
    pages: dict[int, int]
    """Page to generation."""
    released: bool = False
    awaited: set[int] = field(default_factory=set)


class Model:
    """Mirrors one core. Call the methods in the order in which the core saw and answered things."""

    def __init__(self) -> None:
        self.pools: dict[int, ModelPool] = {}
        self.sessions: dict[int, ModelSession] = {}
        self.ranks: dict[tuple[int, int], int] = {}
        self.leases: dict[int, ModelLease] = {}
        self.hits: dict[int, ModelHit] = {}
        self.ended_leases: list[int] = []
        self.max_held: dict[int, int] = {}
        """What an incarnation's scheduler asked for."""

    # -- sessions --------------------------------------------------------------------------------

    def joined(self, session: ModelSession) -> None:
        if session.rank is not None:
            before = self.ranks.get((session.incarnation, session.rank))
            assert before is None or self.sessions[before].life in DEAD, "invariant 4: rank taken from a living process"
            self.ranks[session.incarnation, session.rank] = session.id
        self.sessions[session.id] = session

    def disconnected(self, number: int) -> None:
        session = self.sessions[number]
        session.connected = False
        if session.life == "attached":
            session.life = "lost"

    def ended(self, number: int, life: str) -> None:
        """``life``: "dead" (no proof), "gone" (proof) or "detached" (it drained before)."""
        session = self.sessions[number]
        if session.life in DEAD and not (life == "gone" and session.life == "dead"):
            return
        session.life = life
        for lease in list(self.leases.values()):
            self._writer_ended(lease, session, certain=life != "dead")
        for lease in [lease for lease in self.leases.values() if lease.owner == number]:
            self.revoke(lease, lease.open)
        for hit in [hit for hit in self.hits.values() if hit.session == number]:
            self.let_go(hit)
        if life != "dead":
            for hit in list(self.hits.values()):
                hit.awaited.discard(number)
                self._settle_hit(hit)
            if session.rank is not None and self.ranks.get((session.incarnation, session.rank)) == number:
                del self.ranks[session.incarnation, session.rank]

    def _writer_ended(self, lease: ModelLease, session: ModelSession, *, certain: bool) -> None:
        if session.rank is None or lease.writers.get(session.rank) != session.id:
            return
        missing = {page for page in lease.open if session.rank in lease.may_write(page)}
        if certain:
            lease.drained[session.rank] |= set(lease.pages)
        else:
            lease.doubted |= missing
        self.revoke(lease, missing)

    def writers(self, session: ModelSession, pool: ModelPool) -> dict[int, int] | None:
        found = {rank: self.ranks.get((session.incarnation, rank), 0) for rank in range(pool.world_size)}
        alive = all(number and self.sessions[number].life == "attached" for number in found.values())
        return found if alive else None

    # -- leases ----------------------------------------------------------------------------------

    def grant(
        self,
        session: ModelSession,
        body: dict[str, Any],
        keys: list[bytes],
        parents: list[bytes | None],
        protected: Iterable[bytes] = (),
    ) -> None:
        pool = self.pools[session.pool]
        writers = self.writers(session, pool)
        assert writers is not None, "a lease was granted although ranks are missing"
        number, pages = body["lease"], body["pages"]
        lease = ModelLease(
            number, pool, session.incarnation, session.id, pool.number, pages, writers, set(pages),
            dict(zip(pages, keys, strict=False)), dict(zip(pages, parents, strict=False)),
            committed={rank: set() for rank in writers}, drained={rank: set() for rank in writers},
        )  # fmt: skip
        expected = self.victims(pool, session.engine, len(pages), [pool.binding[k] for k in protected])
        evicted = set()
        for page, generation in zip(pages, body["generations"], strict=True):
            assert 0 < page < len(pool.pages), f"page {page} cannot be leased"
            before = pool.pages[page]
            assert before.lease is None, f"invariant 2: page {page} is in lease {before.lease} and was granted again"
            assert generation > before.generation, f"invariant 3: page {page} went back to generation {generation}"
            assert page not in self.pinned(pool), f"invariant 6: pinned page {page} was evicted"
            if before.bound and before.key is not None:
                evicted.add((page, before.generation))
                del pool.binding[before.key]
            pool.pages[page] = ModelPage("leased", generation, lease, owner=session.engine)
        assert len(body["evicted"]) == len(evicted), "the answer names other evictions than there were"
        assert {page for page, _ in evicted} == set(expected or ()), f"shares: {evicted} went, {expected} should"
        orphans = [p for p in pool.binding.values() if pool.pages[p].parent in evicted]
        assert orphans == [], f"evicted before their children {orphans}"
        self.leases[number] = lease

    # -- shares ----------------------------------------------------------------------------------

    def attached(self, pool: ModelPool) -> set[str]:
        return {s.engine for s in self.sessions.values() if s.pool == pool.id and s.life in ("attached", "lost")}

    def share(self, pool: ModelPool) -> int:
        return max(1, (len(pool.pages) - 1) // max(1, len(self.attached(pool))))

    def held(self, incarnation: int) -> int:
        """Pages in open leases and in hits; a page in two hits counts twice."""
        leased = sum(len(lease.open) for lease in self.leases.values() if lease.incarnation == incarnation)
        return leased + sum(len(hit.pages) for hit in self.hits.values() if hit.incarnation == incarnation)

    def room(self, session: ModelSession) -> int:
        """How many more pages the session's engine may hold."""
        pool = self.pools[session.pool]
        alone = len(self.attached(pool)) < 2
        limit = self.max_held.get(session.incarnation, 10**6 if alone else self.share(pool))
        return limit - self.held(session.incarnation)

    def victims(self, pool: ModelPool, engine: str, wanted: int, protected: Iterable[int] = ()) -> list[int] | None:
        """Which pages have to go for a grant, by a plain search for each; None if there are too few."""
        present, share, spared = self.attached(pool), self.share(pool), {*self.pinned(pool), *protected}
        owned = Counter(page.owner for page in pool.pages[1:] if page.state != "free")
        owned[engine] += wanted
        left, taken, all_give = set(pool.binding.values()), list[int](), False
        while len(taken) < wanted - sum(page.state == "free" for page in pool.pages[1:]):
            over = {name for name in present if owned[name] > share and not all_give}
            parents = {pool.pages[page].parent for page in left}
            found = [
                (pool.pages[page].used, page)
                for page in left - spared
                if (page, pool.pages[page].generation) not in parents
                and (not over or pool.pages[page].owner in over or pool.pages[page].owner not in present)
            ]
            if not found and (not over or engine in over):
                return None
            all_give |= not over or not found
            if found:
                taken.append(min(found)[1])
                left.remove(taken[-1])
                owned[pool.pages[taken[-1]].owner] -= 1
        return taken

    # -- pages -----------------------------------------------------------------------------------

    def usable(self, lease: ModelLease, pages: list[int] | None) -> set[int]:
        return {p for p in (lease.open if pages is None else pages) if p in lease.open and p not in lease.revoked}

    def pending(self, pool: ModelPool) -> set[bytes]:
        return {
            key
            for lease in self.leases.values()
            if lease.pool is pool
            for page, key in lease.keys.items()
            if page in lease.open and page not in lease.revoked
        }

    def revoke(self, lease: ModelLease, pages: Iterable[int]) -> None:
        lease.revoked |= set(pages) & lease.open
        self.settle(lease)

    def settle(self, lease: ModelLease) -> tuple[list[int], list[list[int]]]:
        sealed: list[int] = []
        duplicates: list[list[int]] = []
        pool = lease.pool
        for page in [page for page in lease.pages if page in lease.open]:
            if page in lease.revoked:
                if not lease.may_write(page):
                    self._free(pool, page)
                    lease.open.discard(page)
            elif page in lease.keys and all(page in done for done in lease.committed.values()):
                winner = pool.binding.get(lease.keys[page])
                if winner is None:
                    self._bind(pool, page, lease)
                    sealed.append(page)
                else:
                    self._free(pool, page)
                    duplicates.append([page, winner])
                lease.open.discard(page)
        if not lease.open and lease.id in self.leases:
            del self.leases[lease.id]
            self.ended_leases.append(lease.id)
        return sealed, duplicates

    def _bind(self, pool: ModelPool, page: int, lease: ModelLease) -> None:
        key, parent_key = lease.keys[page], lease.parents[page]
        parent = pool.binding.get(parent_key) if parent_key is not None else None
        generation = pool.pages[page].generation
        where = None if parent is None else (parent, pool.pages[parent].generation)
        pool.tick += 1
        owner = pool.pages[page].owner
        pool.pages[page] = ModelPage("sealed", generation, None, key, True, parent_key, where, owner, pool.tick)
        pool.binding[key] = page
        for child in pool.binding.values():
            if pool.pages[child].parent_key == key and pool.pages[child].parent is None:
                pool.pages[child].parent = (page, generation)

    def _free(self, pool: ModelPool, page: int) -> None:
        pool.pages[page] = ModelPage("free", pool.pages[page].generation)

    # -- hits ------------------------------------------------------------------------------------

    def pinned(self, pool: ModelPool) -> dict[int, int]:
        """How often each page is pinned."""
        counts: dict[int, int] = {}
        for hit in self.hits.values():
            if hit.pool is pool:
                for page in hit.pages:
                    counts[page] = counts.get(page, 0) + 1
        return counts

    def let_go(self, hit: ModelHit) -> None:
        if not hit.released:
            hit.released = True
            hit.awaited = {
                s.id
                for s in self.sessions.values()
                if s.incarnation == hit.incarnation and s.rank is not None and s.life not in ("gone", "detached")
            }
            self._settle_hit(hit)

    def _settle_hit(self, hit: ModelHit) -> None:
        if hit.released and not hit.awaited and hit.id in self.hits:
            del self.hits[hit.id]
            pinned = self.pinned(hit.pool)
            for page in hit.pages:
                if not hit.pool.pages[page].bound and page not in pinned:
                    self._free(hit.pool, page)

    def drained(
        self, number: int, leases: Iterable[int], hits: Iterable[int], pages: Iterable[tuple[int, list[int]]]
    ) -> None:
        rank = self.sessions[number].rank
        for lease_id, some in [*((lease, None) for lease in leases), *pages]:
            lease = self.leases.get(lease_id)
            if lease is not None and rank is not None and lease.writers.get(rank) == number:
                lease.drained[rank] |= lease.revoked if some is None else lease.revoked & set(some)
                self.settle(lease)
        for hit_id in hits:
            hit = self.hits.get(hit_id)
            if hit is not None and hit.released:
                hit.awaited.discard(number)
                self._settle_hit(hit)

    # -- keys ------------------------------------------------------------------------------------

    def evict(self, pool: ModelPool, keys: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        evicted: list[bytes] = []
        pinned: list[bytes] = []
        for key in keys:
            page = pool.binding.get(key)
            if page is None:
                continue
            if page in self.pinned(pool):
                pinned.append(key)
                continue
            del pool.binding[key]
            self._free(pool, page)
            evicted.append(key)
        return evicted, pinned

    def clear(self, pool: ModelPool) -> int:
        pinned = self.pinned(pool)
        freed = [page for page in pool.binding.values() if page not in pinned]
        for page in pool.binding.values():
            pool.pages[page].bound = False
        for page in freed:
            self._free(pool, page)
        pool.binding.clear()
        pool.number += 1
        for lease in [lease for lease in self.leases.values() if lease.pool is pool]:
            self.revoke(lease, lease.keys.keys())
        return len(freed)
