"""What a scheduler does while its daemon is gone: it finds pages by the index, and remembers what it took.

The index of a daemon that is gone stands still, and the next daemon frees nothing sealed before this
session has said what it holds. So a hit taken from the index pins as well as one taken by a call. It
has a number of its own, which the next daemon is told with its pages and generations.

What it keeps:

- a hit is taken only while the daemon is proven gone: its lock on the index is free. A daemon that is
  stopped, or slow, still holds it;
- once this session's word to the next daemon is composed, nothing is taken from the old index any more:
  that word ends the next daemon's patience.

All methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from sharedmirror.errors import DaemonUnavailable, KeyInputError, UsageError
from sharedmirror.index import IndexReader
from sharedmirror.types import AWAY_NUMBERS, HitId, PageId, away_hit

__all__ = ["Away", "Found"]

log = logging.getLogger("sharedmirror")

_MOST_PAGES = 1 << 18
"""Held at once: more would not fit into the message in which the next daemon is told of them."""


class Found(NamedTuple):
    """A hit taken from the index: as the daemon answers ``lookup``, with one letter a key in ``states``."""

    hit: HitId
    pages: tuple[PageId, ...]
    states: str


class Away:
    """One session's index, and the hits that it took from it; ``index`` is None where there is none."""

    def __init__(self, mark: int) -> None:
        """``mark`` names this scheduler's hits; the daemon gave it with the answer to ``attach``."""
        self.index: IndexReader | None = None
        self._mark = mark
        self._lock = threading.Lock()
        self._fd = -1
        self._hits: dict[int, tuple[list[int], list[int]]] = {}
        """Pages and generations of the hits that were not released yet."""
        self._pages = 0
        self._next, self._told = 1, 0

    def take(self, fd: int, pages: int) -> None:
        """Use the index behind ``fd``, which is this object's from now on. Raises OSError or ProtocolError."""
        try:
            reader = IndexReader(mmap.mmap(fd, 0, prot=mmap.PROT_READ), pages)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._drop()
            self.index, self._fd = reader, fd

    def gone(self) -> bool:
        """Whether the daemon whose index this is has ended: what is sealed now stays sealed."""
        with self._lock:
            return self._gone()

    def _gone(self) -> bool:
        if self.index is None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def lookup(self, keys: list[bytes], mode: str, *, whole: bool) -> Found | None:
        """Find keys and hold what is found; None while the daemon may live.

        With ``whole``, None too unless every key is there: a daemon that is back may know more.
        """
        if mode not in ("prefix", "each"):
            raise UsageError(f"mode must be 'prefix' or 'each', not {mode!r:.80}")
        if len(set(keys)) != len(keys):
            raise KeyInputError("a key comes twice in one call")
        with self._lock:
            if not self._gone() or self.index is None or self._next >= AWAY_NUMBERS - 2:
                return None
            found = self.index.find(keys)
            if whole and 0 in found:
                return None
            if mode == "prefix":
                hits = found.index(0) if 0 in found else len(found)
                pages, states = found[:hits], "h" * hits + "m" * (len(keys) - hits)
            else:
                pages, states = [page or -1 for page in found], "".join("h" if page else "m" for page in found)
            held = [page for page in found if page] if mode == "each" else pages
            hit = self._hold(held, self.index) if held else HitId(0)
            return Found(hit, tuple(map(PageId, pages)), states)

    def _hold(self, pages: list[int], index: IndexReader) -> HitId:
        if self._pages + len(pages) > _MOST_PAGES:
            raise DaemonUnavailable(f"the daemon is away, and {self._pages} pages are held meanwhile; release some")
        hit = away_hit(self._mark, self._next)
        self._next += 1
        self._hits[hit] = pages, index.generations(pages)
        self._pages += len(pages)
        return hit

    def release(self, hits: Iterable[int], others: set[int]) -> bool:
        """Let hits go, those of ``others`` too, if that needs no daemon: the next one is told what is left."""
        with self._lock:
            if not self._gone():
                return False
            self._forget(hits)
            others.difference_update(hits)
            return True

    def forget(self, hits: Iterable[int]) -> None:
        """These hits are over: the daemon knows."""
        with self._lock:
            self._forget(hits)

    def _forget(self, hits: Iterable[int]) -> None:
        for hit in hits:
            pages, _ = self._hits.pop(hit, ((), ()))
            self._pages -= len(pages)

    # -- coming back -----------------------------------------------------------------------------

    def claims(self) -> dict[str, Any]:
        """Return what the next daemon is to know, and take nothing from this index any more.

        ``hits`` are those still held; all others with numbers below ``below`` are over.
        """
        with self._lock:
            self._drop()
            if self._next > self._told + 1:
                self._told = self._next
                self._next += 1
            return {"below": self._told, "hits": [[hit, *held] for hit, held in self._hits.items()]}

    def resumed(self, lost: Iterable[int]) -> None:
        """The next daemon holds what ``claims`` named, except for hits that it could not keep."""
        for hit in lost:
            log.error("event=hit_lost hit=%d: loads under it are refused", hit)
        self.forget(lost)

    def close(self) -> None:
        """Let go of the index; may be called again."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self.index, self._fd = None, -1
