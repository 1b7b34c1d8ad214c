"""Which copies a rank may make, which are in flight, and what it owes the daemon for them.

The ledger is the rank's side of a lease's life. It does no I/O and knows no tensor:

- a store is refused outside the lease, after a commit of the page, and after the lease (or the page)
  was revoked; a load is refused outside the hit and after its release;
- a page is committed only when this rank has stored it, every such copy is complete and none failed;
- a revoked lease or released hit is answered ("drained") once, when no copy under it is in flight;
  one with a failed copy is never answered, because only the process's death proves that copy over;
- a (page, generation) that is over stays over: it is remembered per page, not per lease, so memory
  does not grow with the number of leases. Ids never seen are remembered until the floor passes them.

All methods may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sharedmirror.errors import CallTimeout, CopyError, PageError, StaleLease
from sharedmirror.types import AWAY_HITS, Lease, split_away_hit

if TYPE_CHECKING:  # the ledger knows no tensor
    from sharedmirror.copies.interface import Completion

__all__ = ["Answer", "Commit", "HitLike", "Ledger", "Transfer"]

_REPORTED_REVOCATIONS = 1 << 16
"""Revocations kept for ``poll``; an engine that never polls must not grow."""


class HitLike(Protocol):
    """The part of a ``Hit`` that a worker needs."""

    @property
    def id(self) -> int:
        """Number of the hit."""
        ...

    @property
    def pool(self) -> int:
        """The pool that was asked."""
        ...

    @property
    def pages(self) -> tuple[int, ...]:
        """Host pages, -1 for keys without one."""
        ...


class SampleLike(Protocol):
    """This rank's own bytes of a page, for comparison with the ranks that share them."""

    def to_wire(self) -> list[int]:
        """Return page, region and checksum."""
        ...


class Transfer:
    """The copies of one ``store`` or ``load`` call."""

    def __init__(self, pages: frozenset[int]) -> None:
        self.pages = pages
        self._submitted = threading.Event()
        self._completion: Completion | None = None
        self._error: CopyError | None = None
        self._over = False

    def done(self) -> bool:
        """Return whether every copy is complete; raises CopyError when the device reported an error."""
        if self._error is not None:
            raise self._error
        if not self._over and self._completion is not None:
            try:
                self._over = self._completion.done()
            except CopyError as error:
                self._error = error
                raise
        return self._over

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until done; raises CallTimeout after ``timeout_s`` seconds, and CopyError like ``done``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._submitted.wait(timeout_s):
            raise CallTimeout(f"the copies were not submitted within {timeout_s} s")
        if self._completion is not None and not self.done():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._over = self._completion.wait(left)
            except CopyError as error:
                self._error = error
                raise
        if not self.done():
            raise CallTimeout(f"the copies are not complete after {timeout_s} s; they go on")

    @property
    def in_flight(self) -> bool:
        """Whether a copy may still touch memory; a failed one counts as in flight for ever, unless it is settled."""
        try:
            return not self.done()
        except CopyError as error:
            return not error.settled

    def submitted(self, completion: Completion) -> None:
        """The engine took the copies."""
        self._completion = completion
        self._submitted.set()

    def withdrawn(self) -> None:
        """The engine refused the call before it began a copy."""
        self._over = True
        self._submitted.set()

    def failed(self, error: CopyError) -> None:
        """The engine could not take all of the copies."""
        self._error = error
        self._submitted.set()


@dataclass
class _Open:
    transfers: list[Transfer] = field(default_factory=list, kw_only=True)
    samples: dict[int, list[SampleLike]] = field(default_factory=dict, kw_only=True)

    def in_flight(self) -> list[Transfer]:
        self.transfers = [transfer for transfer in self.transfers if transfer.in_flight]
        return self.transfers


@dataclass
class _OpenLease(_Open):
    generation_of: dict[int, int]
    stored: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    revoked: bool = False


@dataclass
class _OpenHit(_Open):
    pages: frozenset[int]


@dataclass(frozen=True)
class Commit:
    """A commit that was asked for: its pages are frozen, its transfers may still be in flight."""

    lease: int
    pages: tuple[int, ...]
    whole: bool
    transfers: tuple[Transfer, ...]
    newly_frozen: frozenset[int]
    samples: tuple[SampleLike, ...] = ()

    @property
    def wire_pages(self) -> list[int] | None:
        """The pages as the request names them."""
        return None if self.whole else list(self.pages)


@dataclass(frozen=True)
class Answer:
    """What may be reported as drained now; ``waiting`` says that more will follow."""

    leases: tuple[int, ...]
    hits: tuple[int, ...]
    pages: tuple[tuple[int, tuple[int, ...]], ...]
    waiting: bool

    def __bool__(self) -> bool:
        return bool(self.leases or self.hits or self.pages)

    def to_wire(self) -> dict[str, Any]:
        """Return the arguments of ``drained``."""
        body: dict[str, Any] = {"leases": list(self.leases), "hits": list(self.hits)}
        if self.pages:
            body["pages"] = [[lease, list(pages)] for lease, pages in self.pages]
        return body


class _AwayHits:
    """Which hits that a scheduler took without a daemon are over, by their numbers.

    The daemon says so with a fence: all hits of a scheduler below a number, but for those that it names.
    """

    def __init__(self) -> None:
        self.below: dict[int, int] = {}
        """For the mark of each scheduler, the number below which its hits are over or known to be open."""
        self.since = 0
        """Schedulers with marks below came before this rank: those not in ``below`` have ended."""

    def past(self, hit: int) -> bool:
        """Whether a hit that is not known to be open is over."""
        mark, number = split_away_hit(hit)
        below = self.below.get(mark)
        return mark < self.since if below is None else number < below


class Ledger:
    """The leases and hits of one pool that this rank has open."""

    def __init__(self, pool: int, num_host_pages: int, incarnation: int = 0) -> None:
        """``incarnation`` is this rank's launch of its engine, 0 where the daemon does not say."""
        self._pool = pool
        self._incarnation = incarnation
        self._pages = num_host_pages
        self._lock = threading.Lock()
        self._leases: dict[int, _OpenLease] = {}
        self._hits: dict[int, _OpenHit] = {}
        self._over = np.zeros(num_host_pages, dtype=np.int64)
        self._over_by_commit = np.zeros(num_host_pages, dtype=np.bool_)
        self._revoked: set[int] = set()
        self._revoked_pages: dict[int, set[int]] = {}
        self._released: set[int] = set()
        self._hits_before: set[int] = set()
        """Hits from before this rank came that were open then; the floor told at attach is above them."""
        self._lease_floor = self._hit_floor = 0
        self._away = _AwayHits()
        self._fences: dict[int, list[int]] = {}
        """The hits with loads that each fence waits for; see ``_AwayHits``."""
        self._owed_leases: set[int] = set()
        self._owed_hits: set[int] = set()
        self._owed_pages: dict[int, set[int]] = {}
        self._reported: deque[int] = deque(maxlen=_REPORTED_REVOCATIONS)

    def forestall(self, reply: Mapping[str, Any]) -> None:
        """Refuse, at the time of attach, leases granted without this rank and hits that are being released."""
        with self._lock:
            self._revoked.update(reply.get("revoked", ()))
            self._released.update(reply.get("released", ()))
            self._hits_before.update(reply.get("hits", ()))
            self._lease_floor = int(reply.get("lease_floor", 0))
            self._hit_floor = int(reply.get("hit_floor", 0))
            self._away.since = self._hit_floor
            self._away.below = {int(mark): int(number) for mark, number in reply.get("away", ())}

    def begin_store(self, lease: Lease, pages: Iterable[int]) -> Transfer:
        """Enter a store into ``pages``; raises StaleLease or PageError, and enters nothing then."""
        wanted = frozenset(pages)
        with self._lock:
            record = self._may_store(lease, wanted)
            transfer = Transfer(wanted)
            record.in_flight().append(transfer)
            record.stored |= wanted
            return transfer

    def check_store(self, lease: Lease, pages: Iterable[int]) -> None:
        """Raise what ``begin_store`` would raise."""
        with self._lock:
            self._may_store(lease, frozenset(pages))

    def _may_store(self, lease: Lease, wanted: frozenset[int]) -> _OpenLease:
        record = self._lease(lease)
        self._refuse_dead(lease.id, record, wanted)
        for page in sorted(wanted & (record.frozen | record.committed)):
            raise PageError(
                f"host page {page} of lease {lease.id} was committed by this rank; it takes no more stores",
                page=page, lease=lease.id,
            )  # fmt: skip
        return record

    def keep_samples(self, lease: Lease, samples: Mapping[int, list[SampleLike]]) -> None:
        """Keep a store's samples, by page, for the commit; those of an earlier store of a page go."""
        with self._lock:
            record = self._leases.get(lease.id)
            if record is not None:
                record.samples.update(samples)

    def begin_load(self, hit: HitLike, pages: Iterable[int]) -> Transfer:
        """Enter a load from ``pages``; raises StaleLease or PageError, and enters nothing then."""
        wanted = frozenset(pages)
        with self._lock:
            known = self._may_load(hit, wanted)
            transfer = Transfer(wanted)
            if not hit.id:
                return transfer
            record = self._hits.setdefault(hit.id, _OpenHit(known))
            record.in_flight().append(transfer)
            return transfer

    def check_load(self, hit: HitLike, pages: Iterable[int]) -> None:
        """Raise what ``begin_load`` would raise."""
        with self._lock:
            self._may_load(hit, frozenset(pages))

    def _may_load(self, hit: HitLike, wanted: frozenset[int]) -> frozenset[int]:
        self._same_owner("hit", hit)
        if not hit.id:
            # A lookup that found nothing; to load nothing of it is fine.
            if wanted:
                raise PageError(f"host page {min(wanted)} is not in the hit, which found nothing", page=min(wanted))
            return wanted
        known_open = hit.id in self._hits or hit.id in self._hits_before
        past = self._away.past(hit.id) if hit.id >= AWAY_HITS else hit.id < self._hit_floor
        if hit.id in self._released or (past and not known_open):
            raise StaleLease(f"hit {hit.id} was released; look the keys up again", hit=hit.id)
        record = self._hits.get(hit.id)
        known = frozenset(page for page in hit.pages if page >= 0) if record is None else record.pages
        for page in sorted(wanted - known):
            raise PageError(f"host page {page} is not in hit {hit.id}", page=page, hit=hit.id)
        return known

    def copies_from(self, page: int) -> bool:
        """Whether a copy to or from ``page``, or a page above it, may be under way."""
        with self._lock:
            records: list[_Open] = [*self._leases.values(), *self._hits.values()]
            return any(max(transfer.pages, default=-1) >= page for each in records for transfer in each.in_flight())

    def freeze(self, lease: Lease, pages: Iterable[int] | None) -> Commit:
        """Refuse further stores into ``pages`` (None: all that are left) and say what must complete first.

        Raises StaleLease, PageError, or CopyError when a copy into one of the pages failed.
        """
        with self._lock:
            record = self._lease(lease)
            left = set(record.generation_of) - record.committed - record.dead
            wanted = frozenset(left if pages is None else pages)
            self._refuse_dead(lease.id, record, wanted)
            for page in sorted(wanted & record.committed):
                raise PageError(
                    f"host page {page} of lease {lease.id} was already committed", page=page, lease=lease.id
                )
            if not wanted:
                if record.dead:
                    raise StaleLease(
                        f"lease {lease.id} has no page left to commit: the rest was revoked", lease=lease.id
                    )
                raise PageError(f"lease {lease.id} has no page left to commit", lease=lease.id)
            for page in sorted(wanted - record.stored):
                raise PageError(
                    f"host page {page} of lease {lease.id} was never stored by this rank: "
                    f"committing it would publish whatever it holds",
                    page=page, lease=lease.id,
                )  # fmt: skip
            transfers = tuple(transfer for transfer in record.in_flight() if transfer.pages & wanted)
            for transfer in transfers:
                transfer.done()
            commit = Commit(
                lease=lease.id,
                pages=tuple(sorted(wanted)),
                whole=len(wanted) == len(record.generation_of),
                transfers=transfers,
                newly_frozen=wanted - record.frozen,
                samples=tuple(sample for page in sorted(wanted) for sample in record.samples.get(page, ())),
            )
            record.frozen |= wanted
            return commit

    def thaw(self, commit: Commit) -> None:
        """Take a freeze back: the commit was not sent."""
        with self._lock:
            record = self._leases.get(commit.lease)
            if record is not None:
                record.frozen -= commit.newly_frozen

    def committed(self, commit: Commit) -> None:
        """The daemon took the commit: these pages are over for this rank."""
        with self._lock:
            record = self._leases.get(commit.lease)
            if record is not None:
                record.committed.update(commit.pages)
                self._end(record, commit.pages, by_commit=True)
                self._forget(commit.lease, record)

    def on_push(self, body: Mapping[str, Any]) -> bool:
        """Take the daemon's word; return whether an answer is owed."""
        with self._lock:
            if body["push"] == "revoked":
                self._on_revoked(body.get("leases", ()), int(body.get("lease_floor", 0)))
            elif body["push"] == "revoked_pages":
                self._on_revoked_pages(int(body["lease"]), {int(page) for page in body["pages"]})
            elif body["push"] == "released":
                self._on_fences(body.get("fences", ()))
                self._on_released(body.get("hits", ()), int(body.get("hit_floor", 0)))
            return bool(self._owed_leases or self._owed_hits or self._owed_pages)

    def answer(self) -> Answer:
        """Return what is owed to the daemon and may be said now."""
        with self._lock:
            leases = tuple(sorted(i for i in self._owed_leases if self._quiet(self._leases.get(i))))
            hits = tuple(sorted(i for i in self._owed_hits if self._quiet_hit(i)))
            pages = tuple(
                (i, tuple(sorted(owed))) for i, owed in self._owed_pages.items() if self._quiet(self._leases.get(i))
            )
            waiting = len(leases) + len(hits) + len(pages) < (
                len(self._owed_leases) + len(self._owed_hits) + len(self._owed_pages)
            )
            return Answer(leases, hits, pages, waiting)

    def answered(self, answer: Answer) -> None:
        """The daemon has the answer."""
        with self._lock:
            self._owed_leases.difference_update(answer.leases)
            self._owed_hits.difference_update(answer.hits)
            for lease in answer.leases:
                self._leases.pop(lease, None)
            for answered in answer.hits:
                for hit in self._fences.pop(answered, [answered]):
                    self._hits.pop(hit, None)
                    if hit >= AWAY_HITS and self._away.past(hit):
                        self._released.discard(hit)  # its number is enough to refuse it from now on
            for lease, pages in answer.pages:
                owed = self._owed_pages.get(lease, set())
                owed.difference_update(pages)
                if not owed:
                    self._owed_pages.pop(lease, None)

    def take_revoked(self) -> tuple[int, ...]:
        """Return the leases revoked since the last call."""
        with self._lock:
            taken = tuple(self._reported)
            self._reported.clear()
            return taken

    def _lease(self, lease: Lease) -> _OpenLease:
        self._same_owner("lease", lease)
        record = self._leases.get(lease.id)
        if record is None:
            if lease.id in self._revoked or lease.id < self._lease_floor:
                raise StaleLease(f"lease {lease.id} is over: it was revoked or aborted", lease=lease.id)
            record = self._open(lease)
            if len(record.committed | record.dead) < len(record.generation_of):
                self._leases[lease.id] = record
        if record.revoked:
            raise StaleLease(f"lease {lease.id} is over: it was revoked or aborted", lease=lease.id)
        return record

    def _open(self, lease: Lease) -> _OpenLease:
        if len(lease.pages) != len(lease.generations) or not all(0 < page < self._pages for page in lease.pages):
            raise PageError(f"lease {lease.id} is damaged: its pages do not fit this pool", lease=lease.id)
        record = _OpenLease(dict(zip(lease.pages, lease.generations, strict=True)))
        for page, generation in record.generation_of.items():
            if generation <= self._over[page]:
                by_commit = self._over_by_commit[page] and generation == self._over[page]
                (record.committed if by_commit else record.dead).add(page)
        record.dead |= self._revoked_pages.get(lease.id, set()) & record.generation_of.keys()
        return record

    def _same_owner(self, what: str, held: Lease | HitLike) -> None:
        if held.pool != self._pool:
            raise PageError(
                f"{what} {held.id} belongs to pool {held.pool}; this mirror is attached to pool {self._pool}"
            )
        holder = getattr(held, "incarnation", 0)
        if holder and self._incarnation and holder != self._incarnation:
            raise StaleLease(f"{what} {held.id} belongs to another engine or to an earlier launch of this one")

    def _refuse_dead(self, lease: int, record: _OpenLease, pages: frozenset[int]) -> None:
        for page in sorted(pages - record.generation_of.keys()):
            raise PageError(f"host page {page} is not in lease {lease}", page=page, lease=lease)
        for page in sorted(pages & record.dead):
            raise StaleLease(f"host page {page} of lease {lease} was revoked", page=page, lease=lease)

    def _end(self, record: _OpenLease, pages: Iterable[int], *, by_commit: bool) -> None:
        for page in pages:
            if record.generation_of[page] > self._over[page]:
                self._over[page] = record.generation_of[page]
                self._over_by_commit[page] = by_commit

    def _forget(self, lease: int, record: _OpenLease) -> None:
        over = record.committed | record.dead
        if len(over) == len(record.generation_of) and not record.in_flight():
            self._leases.pop(lease, None)

    def _on_revoked(self, leases: Iterable[int], floor: int) -> None:
        for lease in leases:
            self._revoked.add(lease)
            self._revoked_pages.pop(lease, None)
            self._owed_leases.add(lease)
            self._reported.append(lease)
            record = self._leases.get(lease)
            if record is not None:
                record.revoked = True
                self._end(record, record.generation_of.keys() - record.committed, by_commit=False)
        if floor > self._lease_floor:
            self._lease_floor = floor
            self._revoked = {lease for lease in self._revoked if lease >= floor}
            self._revoked_pages = {lease: pages for lease, pages in self._revoked_pages.items() if lease >= floor}

    def _on_revoked_pages(self, lease: int, pages: set[int]) -> None:
        self._owed_pages.setdefault(lease, set()).update(pages)
        record = self._leases.get(lease)
        if record is None:
            self._revoked_pages.setdefault(lease, set()).update(pages)
            return
        dead = (pages & record.generation_of.keys()) - record.committed
        record.dead |= dead
        self._end(record, dead, by_commit=False)

    def _on_fences(self, fences: Iterable[list[Any]]) -> None:
        for fence, mark, below, still_open in fences:
            self._away.below[mark] = max(below, self._away.below.get(mark, 0))
            self._hits_before.update(still_open)
            loading = [hit for hit in self._hits if hit >= AWAY_HITS and split_away_hit(hit)[0] == mark]
            over = [hit for hit in loading if self._away.past(hit) and hit not in still_open]
            self._hits_before.difference_update(over)
            self._released.update(over)
            self._fences[fence] = over

    def _quiet_hit(self, hit: int) -> bool:
        return all(self._quiet(self._hits.get(number)) for number in self._fences.get(hit, (hit,)))

    def _on_released(self, hits: Iterable[int], floor: int) -> None:
        for hit in hits:
            self._owed_hits.add(hit)
            if hit not in self._fences:
                self._released.add(hit)
                self._hits_before.discard(hit)
        if floor > self._hit_floor:
            self._hit_floor = floor
            self._released = {hit for hit in self._released if hit >= floor or hit in self._hits}

    @staticmethod
    def _quiet(record: _Open | None) -> bool:
        return record is None or not record.in_flight()
