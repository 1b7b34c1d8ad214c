"""The key index of a pool: a hash table in shared memory that the daemon writes and clients only read.

It tells, without a call, which keys are readable, in which page and under which generation. While the
daemon lives, what a reader sees may be a moment old, or half written: then a key is missed, or found
in a page that it has just left, and nothing worse. When the daemon is gone the index stands still, and
every entry is true: it was durable before it was written, and was taken out before its page was let go.

The layout, in native byte order, all words aligned::

    header    magic, version, pages, buckets (a power of two), clear number, epoch
    buckets   one u32 each: page + 1 of the first record of a chain, 0 for none
    records   one a page: generation u64, next u32 (as a bucket), key length u8, key of up to 64 bytes

A record is linked by the store of one aligned word, after all of it is written. Must not import
torch at all, and numpy only to find many keys: the daemon uses this module, which has neither.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterable, Sequence

from sharedmirror.errors import ProtocolError
from sharedmirror.types import MAX_KEY_BYTES

__all__ = ["IndexReader", "IndexShape", "Memory", "bucket_of", "words_of"]

MAGIC, VERSION = b"SMINDEX\0", 1
HEADER = struct.Struct("=8sIIIIQQ")
HEADER_BYTES = 64
CLEARS = struct.Struct("=Q")
CLEARS_AT = 24
RECORD = struct.Struct(f"=QIB{MAX_KEY_BYTES}s")
RECORD_BYTES = 80
NEXT_AT, KEY_AT = 8, 13
BUCKET_WORD = HEADER_BYTES // 4
"""The first bucket, counted in words of 4 bytes."""

_BACK = RECORD_BYTES - KEY_AT
_LONGEST_CHAIN = 256
"""A torn read can lead in a circle; no honest chain is nearly as long."""
_MANY = 256
"""From so many keys on, numpy pays."""
_TOUCH_BYTES = 1 << 16
"""The kernel maps so much around a page that is read, as far as it is there."""

Memory = mmap.mmap | bytearray
bucket_of = zlib.crc32
"""The hash of a key, the same in every process; its low bits choose the bucket."""


class IndexShape:
    """Where things are in the index of a pool of ``pages`` host pages."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.buckets = 1 << max(0, pages - 1).bit_length()
        self.records_at = -(-(HEADER_BYTES + 4 * self.buckets) // 8) * 8
        self.size_bytes = self.records_at + RECORD_BYTES * pages


def words_of(memory: Memory) -> memoryview:
    """Return the memory as words of 4 bytes: one is read and written as a whole."""
    view = memoryview(memory).cast("B")
    return view[: len(view) & ~3].cast("I")


class IndexReader:
    """Finds keys in an index; from any thread, and while the daemon writes."""

    def __init__(self, memory: Memory, pages: int) -> None:
        """Read ``memory``; raises ProtocolError when it is no index of a pool of ``pages`` host pages."""
        shape = IndexShape(pages)
        if len(memory) != shape.size_bytes:
            raise ProtocolError(f"the index of {pages} pages has {shape.size_bytes} bytes, not {len(memory)}")
        magic, version, found, buckets, *_ = HEADER.unpack_from(memory)
        if (magic, version, found, buckets) != (MAGIC, VERSION, pages, shape.buckets):
            raise ProtocolError(f"the index has version {version} and {found} pages, not {VERSION} and {pages}")
        self._memory = memory
        self._words = words_of(memory)
        self._records_at, self._mask, self._pages = shape.records_at, shape.buckets - 1, pages

    def warm(self) -> None:
        """Have the kernel map what there is, so that the first look-ups need not."""
        memory = self._memory
        for at in range(0, len(memory), _TOUCH_BYTES):
            memory[at]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the page of each key, 0 for one that is not there. Keys have 1 to 64 bytes."""
        listed = list(keys)
        if len(listed) >= _MANY and len(set(map(len, listed))) == 1:
            return self._find_many(listed)
        words, memory, mask, pages = self._words, self._memory, self._mask, self._pages
        keys_at = self._records_at - _BACK
        found = []
        for key in listed:
            entry = words[BUCKET_WORD + (bucket_of(key) & mask)]
            if 0 < entry <= pages:
                at = keys_at + RECORD_BYTES * entry
                if memory[at : at + len(key)] == key and memory[at - 1] == len(key):
                    found.append(entry - 1)
                else:
                    found.append(self._follow(key, at))
            else:
                found.append(0)
        return found

    def _find_many(self, keys: list[bytes]) -> list[int]:
        """Find keys of one length, all in step: in a large index each is a cache miss or two, and so they overlap."""
        import numpy as np

        length, many = len(keys[0]), len(keys)
        words, octets = (np.frombuffer(self._memory, kind) for kind in (np.uint32, np.uint8))
        buckets = np.fromiter(map(bucket_of, keys), np.int64, many) & self._mask
        entries = words[BUCKET_WORD + buckets].astype(np.int64)
        entries[entries > self._pages] = 0
        at = self._records_at - _BACK + RECORD_BYTES * np.maximum(entries, 1)
        places = np.ndarray(len(octets) - length + 1, f"V{length}", self._memory, strides=(1,))
        there, wanted = (np.frombuffer(raw, np.uint8).reshape(many, length) for raw in (places[at], b"".join(keys)))
        equal = (there == wanted).all(axis=1) & (octets[at - 1] == length)
        found: list[int] = np.where(equal & (entries > 0), entries - 1, 0).tolist()
        for other in np.flatnonzero(~equal & (entries > 0)).tolist():
            found[other] = self._follow(keys[other], int(at[other]))
        return found

    def _follow(self, key: bytes, at: int) -> int:
        """Search the chain behind the record whose key is at ``at``."""
        for _ in range(_LONGEST_CHAIN):
            entry = self._words[(at - KEY_AT + NEXT_AT) >> 2]
            if not 0 < entry <= self._pages:
                return 0
            at = self._records_at - _BACK + RECORD_BYTES * entry
            if self._memory[at : at + len(key)] == key and self._memory[at - 1] == len(key):
                return entry - 1
        return 0

    def generations(self, pages: Sequence[int]) -> list[int]:
        """Return the generations under which pages were sealed: true only when the daemon is gone."""
        return [CLEARS.unpack_from(self._memory, self._records_at + RECORD_BYTES * page)[0] for page in pages]
