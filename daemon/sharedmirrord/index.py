"""The daemon's side of the key indexes: one a leased pool, which clients map read-only.

What the core binds is written only when it is durable, what it unbinds is taken out before that is
durable. So at any moment of the daemon's death each entry names a page that the next daemon finds
sealed, with the same key and generation: clients load by the index until then.

An index lies in a memfd that nobody can find by name, resize, or, but for this mapping, write. The
daemon holds a lock on its own description of it for its life; a client that can take the lock on its
own knows that the daemon is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator

from sharedmirror.index import (
    BUCKET_WORD,
    CLEARS,
    CLEARS_AT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    NEXT_AT,
    RECORD,
    RECORD_BYTES,
    VERSION,
    IndexShape,
    Memory,
    bucket_of,
    words_of,
)
from sharedmirrord.core.model import State
from sharedmirrord.core.pages import PageTable

log = logging.getLogger("sharedmirrord")

_SLICE_PAGES, _PAUSE_S = 256, 0.001
"""What is written at a time while an index is built, and how long the event loop is left to others after it."""
_F_SEAL_FUTURE_WRITE = 0x10
_WORD = RECORD_BYTES // 4


class IndexWriter:
    """Keeps an index like its page table, of which it is the observer."""

    def __init__(self, memory: Memory, table: PageTable, epoch: int) -> None:
        self._table = table
        self._shape = shape = IndexShape(table.pages)
        self._memory = memory
        self._words = words_of(memory)
        self._mask = shape.buckets - 1
        self._nexts = (shape.records_at + NEXT_AT) // 4
        self._linked = bytearray(table.pages)
        self._waiting: dict[int, tuple[bytes, int]] = {}
        """Bound, but perhaps not durable yet: key and generation by page."""
        self._clears = 0
        HEADER.pack_into(memory, 0, MAGIC, VERSION, table.pages, shape.buckets, 0, 0, epoch)

    # -- what the page table tells ---------------------------------------------------------------

    def bound(self, page: int, key: bytes, generation: int) -> None:
        """A page was sealed; ``flush`` writes it."""
        self._waiting[page] = key, generation

    def unbound(self, page: int, key: bytes) -> None:
        """A page is about to lose its key."""
        self._waiting.pop(page, None)
        if not self._linked[page]:
            return
        self._linked[page] = 0
        words, nexts, entry = self._words, self._nexts, page + 1
        at = BUCKET_WORD + (bucket_of(key) & self._mask)
        while (found := words[at]) != entry:
            if not found:
                raise RuntimeError(f"page {page} is not in its chain of the index")
            at = nexts + _WORD * (found - 1)
        words[at] = words[nexts + _WORD * page]

    def cleared(self) -> None:
        """All pages have lost their keys."""
        self._waiting.clear()
        self._linked = bytearray(len(self._linked))
        first = (ctypes.c_char * (4 * self._shape.buckets)).from_buffer(self._memory, HEADER_BYTES)
        ctypes.memset(first, 0, 4 * self._shape.buckets)
        self._clears += 1
        CLEARS.pack_into(self._memory, CLEARS_AT, self._clears)

    # -- what the rim does -----------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was bound: all of it is durable now."""
        for page, (key, generation) in self._waiting.items():
            self._link(page, key, generation)
        self._waiting.clear()

    def _link(self, page: int, key: bytes, generation: int) -> None:
        bucket = BUCKET_WORD + (bucket_of(key) & self._mask)
        at = self._shape.records_at + RECORD_BYTES * page
        RECORD.pack_into(self._memory, at, generation, self._words[bucket], len(key), key)
        self._words[bucket] = page + 1
        self._linked[page] = 1

    def build(self) -> Iterator[None]:
        """Write what was sealed before this writer observed the table, a slice at each step."""
        table, waiting = self._table, self._waiting
        written = 0
        for page in range(table.pages if table.index else 0):
            key = table.keys[page]
            if key and not self._linked[page] and page not in waiting and table.index.get(key) == page:
                self._link(page, key, table.generations[page])
                written += 1
                if written % _SLICE_PAGES == 0:
                    yield


class SharedIndex:
    """One pool's index in shared memory. ``ready`` once it is like the table."""

    def __init__(self, table: PageTable, epoch: int) -> None:
        """Make it and begin to observe ``table``. Raises OSError or AttributeError where the kernel cannot."""
        size_bytes = IndexShape(table.pages).size_bytes
        self.ready = False
        self._fd = os.memfd_create("sharedmirror-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size_bytes)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            memory = mmap.mmap(self._fd, size_bytes)
            _seal(self._fd)
            os.close(self.reader())
        except BaseException:
            os.close(self._fd)
            raise
        self._table = table
        self.writer = table.observer = IndexWriter(memory, table, epoch)

    def reader(self) -> int:
        """Return a descriptor that can only be read, a description of its own; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go; the memory goes with its last reader."""
        self._table.observer = None  # a circle otherwise, and memory that stays
        os.close(self._fd)


def _seal(fd: int) -> None:
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        # Before Linux 5.1 a reader that means harm could open it again for writing.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fixed | _F_SEAL_FUTURE_WRITE)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fixed)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


class Indexes:
    """The indexes of all leased pools. ``later`` is the event loop's ``call_later``."""

    def __init__(self, state: State, epoch: int, later: Callable[[float, Callable[[], None]], object]) -> None:
        self._state = state
        self._epoch = epoch
        self._later = later
        self._of: dict[int, SharedIndex | None] = {}
        self.followed = False
        """Whether ``follow`` was called."""

    def follow(self) -> None:
        """Make indexes for new pools, and let go of those of pools that are gone."""
        pools, self.followed = self._state.pools, True
        for number in [number for number in self._of if number not in pools]:
            index = self._of.pop(number)
            if index is not None:
                index.close()
        for number, pool in pools.items():
            if pool.table is not None and number not in self._of:
                self._of[number] = self._make(number, pool.table)

    def _make(self, number: int, table: PageTable) -> SharedIndex | None:
        try:
            index = SharedIndex(table, self._epoch)
        except (OSError, AttributeError) as error:
            log.warning("event=no_index pool=%d reason=%r: clients ask by calls", number, str(error))
            return None
        self._build(number, index, index.writer.build(), time.monotonic())
        return index

    def _build(self, number: int, index: SharedIndex, slices: Iterator[None], began: float) -> None:
        for _ in slices:
            # In turns with the clients' requests: a million pages take some seconds.
            self._later(_PAUSE_S, lambda: self._build(number, index, slices, began))
            return
        index.ready = True
        log.info("event=index_ready pool=%d seconds=%.2f", number, time.monotonic() - began)

    def flush(self) -> None:
        """All that the core did is durable: let readers see it."""
        for index in self._of.values():
            if index is not None:
                index.writer.flush()

    def get(self, pool: int) -> SharedIndex | None:
        """Return a pool's index, None where it has none."""
        return self._of.get(pool)
