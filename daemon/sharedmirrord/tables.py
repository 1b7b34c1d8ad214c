"""Page tables: the home of the slots of each pool.

A slot has two copies of 112 bytes, little-endian: sequence u64, generation u64, parent generation
u64, parent u32, number u32, state u8, key length u8, 2 bytes of padding, key 64 bytes, 8 bytes of
padding, CRC u32. The valid copy with the higher sequence counts; the other one is overwritten, its
CRC last. A slot of zeros only is free with generation 0.

There is no Python object for a slot. A table is written through its window alone, and only with
what the journal holds already: a torn copy is mended by replaying the journal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias
from zlib import crc32

from sharedmirror.errors import KeyInputError, PageError, UsageError
from sharedmirror.types import MAX_KEY_BYTES
from sharedmirrord.core.durable import NO_PAGE, Slot
from sharedmirrord.journal import SEQUENCE_LIMIT, Window

SLOT_BYTES = 224
"""What a page takes in its pool's table: two copies."""

Prepared: TypeAlias = "list[tuple[int, bytes, int]]"
"""Checked and encoded slots: where each copy goes, its body and its CRC."""

_BODY = struct.Struct("<QQQIIBB2x64s8x")
_COPY = struct.Struct("<QQQIIBB2x64s8xI")
_SEQUENCE = struct.Struct("<Q")
_COPY_BYTES = _COPY.size
_CRC_AT = _BODY.size
_COPY_WORDS = _COPY_BYTES >> 3
_SLOT_WORDS = SLOT_BYTES >> 3
_NO_SLOT = bytes(SLOT_BYTES)
_READ_PAGES = 4096


def encode(slot: Iterable[Any], *, sequence: int = 0) -> bytes:
    """Return the body of a slot's copy, without its CRC.

    Raises UsageError on a value that does not fit its field, KeyInputError on a key over 64 bytes.
    """
    page, state, generation, number, key, parent, parent_generation = slot
    if len(key) > MAX_KEY_BYTES:
        raise KeyInputError(f"the key of page {page} has {len(key)} bytes; the limit is {MAX_KEY_BYTES}", page=page)
    try:
        return _BODY.pack(sequence, generation, parent_generation, parent, number, state, len(key), key)
    except struct.error as error:
        raise UsageError(f"the slot of page {page} holds a value out of range: {error}", page=page) from error


class Table:
    """The page table of one pool."""

    __slots__ = ("pages", "window")

    def __init__(self, window: Window, pages: int) -> None:
        self.window = window
        self.pages = pages

    def prepare(self, slots: Iterable[Slot]) -> Prepared:
        """Check and encode slots without writing any; of a page named twice the last one counts.

        Raises PageError on a page outside the table, else what ``encode`` raises.
        """
        prepared: Prepared = []
        add, pack, words, pages, limit = prepared.append, _BODY.pack, self.window.words, self.pages, SEQUENCE_LIMIT - 1
        for slot in slots:
            page, state, generation, number, key, parent, parent_generation = slot
            if not 0 <= page < pages:
                raise PageError(f"page {page} is not in the table of {pages} pages", page=page)
            word = page * _SLOT_WORDS
            first, second = words[word], words[word + _COPY_WORDS]
            at, sequence = page * SLOT_BYTES, second + 1
            if first > second:
                at, sequence = at + _COPY_BYTES, first + 1
            if sequence > limit:
                at, sequence = self._next(page)
            if len(key) > MAX_KEY_BYTES:
                encode(slot)
            try:
                body = pack(sequence, generation, parent_generation, parent, number, state, len(key), key)
            except struct.error:
                body = encode(slot, sequence=sequence)
            add((at, body, crc32(body)))
        return prepared

    def write(self, prepared: Prepared) -> None:
        """Write prepared slots; nothing may have been written to these pages since ``prepare``."""
        put, put_crc = self.window.put, self.window.put_crc
        for at, body, crc in prepared:
            put(at, body)
            put_crc(at + _CRC_AT, crc)

    def redo(self, page: int, body: bytes) -> None:
        """Write a slot, as ``encode`` gave it, unless the newest copy says the same already."""
        at = page * SLOT_BYTES
        raw = bytes(self.window.view[at : at + SLOT_BYTES])
        newest = _newest(raw)
        if newest is not None and raw[newest + _SEQUENCE.size : newest + _CRC_AT] == body[_SEQUENCE.size :]:
            return
        at, sequence = self._next(page)
        body = _SEQUENCE.pack(sequence) + body[_SEQUENCE.size :]
        self.write([(at, body, crc32(body))])

    def read(self) -> Iterator[Slot | None]:
        """Yield each page's slot in order, None where no copy is valid."""
        for start in range(0, self.pages, _READ_PAGES):
            count = min(_READ_PAGES, self.pages - start)
            chunk = bytes(self.window.view[start * SLOT_BYTES : (start + count) * SLOT_BYTES])
            words = memoryview(chunk).cast("Q")
            for index in range(count):
                at, word = index * SLOT_BYTES, index * _SLOT_WORDS
                first, second = words[word], words[word + _COPY_WORDS]
                newer, older = (at, at + _COPY_BYTES) if first >= second else (at + _COPY_BYTES, at)
                slot = _decode(chunk, newer, start + index) or _decode(chunk, older, start + index)
                if slot is None and chunk[at : at + SLOT_BYTES] == _NO_SLOT:
                    slot = Slot(start + index, 0, 0, 0, b"", NO_PAGE, 0)
                yield slot

    def _next(self, page: int) -> tuple[int, int]:
        at = page * SLOT_BYTES
        raw = bytes(self.window.view[at : at + SLOT_BYTES])
        newest = _newest(raw)
        if newest is None:
            return at, 1
        sequence: int = _SEQUENCE.unpack_from(raw, newest)[0]
        return at + _COPY_BYTES - newest, sequence + 1


def _newest(raw: bytes) -> int | None:
    valid = [at for at in (0, _COPY_BYTES) if _decode(raw, at, 0) is not None]
    return max(valid, key=lambda at: _SEQUENCE.unpack_from(raw, at), default=None)


def _decode(chunk: bytes, at: int, page: int) -> Slot | None:
    sequence, generation, parent_generation, parent, number, state, key_bytes, key, crc = _COPY.unpack_from(chunk, at)
    if not 0 < sequence < SEQUENCE_LIMIT or key_bytes > MAX_KEY_BYTES or crc != crc32(chunk[at : at + _CRC_AT]):
        return None
    return Slot(page, state, generation, number, key[:key_bytes], parent, parent_generation)
