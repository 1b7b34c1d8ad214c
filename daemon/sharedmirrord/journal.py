"""Mapped memory, the room in it, its header page and the journal: what the record store stands on.

The danger here is a kill between any two stores to memory, not the loss of power: nothing is synced,
and each store that was made is seen by whoever maps the memory next. So the order of stores is all
that counts, and it is fixed here:

- A journal entry is ``[length u32, crc u32, sequence u64, payload]`` on an 8-byte boundary. The word
  behind it is zeroed first, then sequence and payload are written, then length and CRC with one
  8-byte store: the entry is there from that store on, and the word behind the last entry is zero.
- A header copy is written where the older copy lay, its CRC last.

Every store goes through ``Window.put``, ``put_word`` or ``put_crc``; tests hook these three. Nothing
here knows what an entry or a header says, and nothing here may write to memory in any other way.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from zlib import crc32

from sharedmirror.errors import MemoryFault, ProtocolError, UsageError

ALIGNMENT_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
"""What room starts on and is a multiple of; a mapping can start nowhere else."""

HEADER_BYTES = 4096
ENTRY_LIMIT_BYTES = 1 << 31
SEQUENCE_LIMIT = 1 << 63

MAGIC = b"shmirror"
VERSION = 1
"""Version of everything in the store; magic, version, sequence and CRC of a header copy stay where they are."""

_COPY_BYTES = HEADER_BYTES // 2
_COPY_HEAD = struct.Struct("<8sIIQ")
_COPY_CRC_AT = _COPY_HEAD.size
_COPY_PAYLOAD_AT = 32
HEADER_PAYLOAD_BYTES = _COPY_BYTES - _COPY_PAYLOAD_AT
"""What the payload of a header may take."""

_CRC = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")
_WORD_BYTES = 8
_ENTRY_HEAD_BYTES = 16


class Storage(Protocol):
    """Memory that outlives the process: one shared memory object, or plain bytes in a test."""

    @property
    def size_bytes(self) -> int:
        """The length of all of it."""
        ...

    def grow(self, size_bytes: int) -> None:
        """Make the storage ``size_bytes`` long in all; raises MemoryFault when it cannot."""
        ...

    def shrink(self, size_bytes: int) -> None:
        """Make the storage ``size_bytes`` long in all; nothing behind that is mapped."""
        ...

    def map(self, offset: int, length: int) -> memoryview:
        """Return writable, populated bytes of a range; raises MemoryFault when there is no memory for it."""
        ...

    def unmap(self, view: memoryview) -> None:
        """Release a view that ``map`` returned, and its mapping; what was written stays."""
        ...


class Window:
    """One mapped range of the storage, and the only door through which it is written."""

    __slots__ = ("_crc_into", "_mapped", "_storage", "length", "offset", "view", "words")

    def __init__(self, storage: Storage, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self._storage = storage
        self._mapped = storage.map(offset, length)
        self.view = self._mapped.cast("B")
        if len(self.view) != length:
            mapped_bytes = len(self.view)
            self.view.release()
            storage.unmap(self._mapped)
            raise MemoryFault(f"only {mapped_bytes} of the record store's {length} bytes at {offset} could be mapped")
        self.words = self.view.cast("Q")
        self._crc_into = _CRC.pack_into

    def put(self, at: int, data: bytes) -> None:
        """Write bytes, in no particular order among themselves."""
        self.view[at : at + len(data)] = data

    def put_word(self, at: int, word: int) -> None:
        """Write 8 bytes with one store; ``at`` is a multiple of 8."""
        self.words[at >> 3] = word

    def put_crc(self, at: int, crc: int) -> None:
        """Write a CRC, which makes what it covers valid."""
        self._crc_into(self.view, at, crc)

    def clear(self) -> None:
        """Write zeros all over."""
        zeros = bytes(min(self.length, 1 << 20))
        for at in range(0, self.length, len(zeros)):
            self.put(at, zeros[: self.length - at])

    def close(self) -> None:
        """Let go of the mapping; what was written stays."""
        # The storage knows the view that it gave out, and its mapping goes only when no cast of it is left.
        self.words.release()
        self.view.release()
        self._storage.unmap(self._mapped)


class Heap:
    """Room behind the header page: first fit in what was given back, else at the end.

    What is used is told by the header and the table records, so the heap itself is never stored.
    """

    def __init__(self, storage: Storage, used: Iterable[tuple[int, int]] = (), end: int = ALIGNMENT_BYTES) -> None:
        """Take over ``storage`` of which the ranges ``used``, as (offset, length), are in use.

        Raises ProtocolError when ranges are not aligned, overlap, or reach beyond the storage.
        """
        self._storage = storage
        self._free: list[tuple[int, int]] = []
        self.end = ALIGNMENT_BYTES
        for offset, length in [*sorted(used), (max(end, ALIGNMENT_BYTES), 0)]:
            if offset % ALIGNMENT_BYTES or length % ALIGNMENT_BYTES or length < 0:
                raise ProtocolError(f"the record store names a range of {length} bytes at {offset}: not aligned")
            if length and offset < self.end:
                raise ProtocolError(f"the record store names a range at {offset} that overlaps another or the header")
            if offset > self.end:
                self._free.append((self.end, offset - self.end))
            self.end = max(self.end, offset + length)
        if self.end > storage.size_bytes:
            raise ProtocolError(f"the record store ends at {self.end}, but its memory has {storage.size_bytes} bytes")

    @property
    def used_bytes(self) -> int:
        """Bytes in use, the header page included."""
        return self.end - sum(length for _, length in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """The largest room that was given back."""
        return max((length for _, length in self._free), default=0)

    def allocate(self, size_bytes: int) -> tuple[Window, bool]:
        """Return room of at least ``size_bytes``, and whether it is known to hold zeros.

        Raises MemoryFault, and changes nothing, when the storage cannot grow.
        """
        length = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, (offset, room) in enumerate(self._free):
            if room >= length:
                window = Window(self._storage, offset, length)
                self._free[index : index + 1] = [(offset + length, room - length)] if room > length else []
                return window, False
        had = self._storage.size_bytes
        if had < self.end + length:
            self._storage.grow(self.end + length)
        try:
            window = Window(self._storage, self.end, length)
        except MemoryFault:
            # What was had by then is for others, while this has no use for it.
            self._storage.shrink(had)
            raise
        # Room that was there before may hold what a killed process wrote and never made valid.
        fresh = self.end >= had
        self.end += length
        return window, fresh

    def free(self, window: Window) -> None:
        """Take back room; the window is closed."""
        window.close()
        merged: list[tuple[int, int]] = []
        for offset, length in sorted([*self._free, (window.offset, window.length)]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self._free = merged


def entry_bytes(payload_bytes: int) -> int:
    """Return what an entry takes in an area."""
    return (_ENTRY_HEAD_BYTES + payload_bytes + _WORD_BYTES - 1) & -_WORD_BYTES


class Area:
    """One journal area: entries one after another, their sequence numbers without a gap."""

    __slots__ = ("tail", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.tail = 0

    def fits(self, payload_bytes: int) -> bool:
        """Whether an entry of that size and the zero word behind it have room."""
        return self.tail + entry_bytes(payload_bytes) + _WORD_BYTES <= self.window.length

    def append(self, sequence: int, payload: bytes) -> None:
        """Write an entry that fits; it is there, wholly, from the last store on."""
        window, start = self.window, self.tail
        end = start + entry_bytes(len(payload))
        body = _SEQUENCE.pack(sequence) + payload
        window.put_word(end, 0)
        window.put(start + _WORD_BYTES, body)
        window.put_word(start, len(payload) | crc32(body) << 32)
        self.tail = end

    def replay(self, sequence: int, apply: Callable[[bytes], None]) -> int:
        """Hand each payload from ``sequence`` on to ``apply`` and return the sequence number that comes next.

        Raises ProtocolError when the first entry is missing, or an entry is unreadable although
        later ones are there: a kill cannot do that.
        """
        first, self.tail = sequence, 0
        while (payload := self._read(self.tail, sequence)) is not None:
            apply(payload)
            self.tail += entry_bytes(len(payload))
            sequence += 1
        if sequence == first:
            raise ProtocolError("the record store's checkpoint is damaged; its memory cannot be taken over")
        if self.window.words[self.tail >> 3]:
            if self._holds(sequence + 1):
                raise ProtocolError(f"entry {sequence} of the record store is damaged; its memory cannot be taken over")
            self.window.put_word(self.tail, 0)
        return sequence

    def _read(self, at: int, sequence: int) -> bytes | None:
        word = self.window.words[at >> 3]
        size, crc = word & 0xFFFFFFFF, word >> 32
        if not size or at + entry_bytes(size) + _WORD_BYTES > self.window.length:
            return None
        body = bytes(self.window.view[at + _WORD_BYTES : at + _ENTRY_HEAD_BYTES + size])
        if crc32(body) != crc or _SEQUENCE.unpack_from(body)[0] != sequence:
            return None
        return body[_WORD_BYTES:]

    def _holds(self, sequence: int) -> bool:
        behind = bytes(self.window.view[self.tail :])
        wanted = _SEQUENCE.pack(sequence)
        found = behind.find(wanted, _WORD_BYTES)
        while found >= 0:
            if found % _WORD_BYTES == 0 and self._read(self.tail + found - _WORD_BYTES, sequence) is not None:
                return True
            found = behind.find(wanted, found + 1)
        return False


class _Copy(NamedTuple):
    sequence: int
    place: int
    version: int
    payload: bytes


class HeaderPage:
    """The first page of the storage: two copies of one payload, of which the newer valid one counts."""

    def __init__(self, storage: Storage) -> None:
        self.window = Window(storage, 0, HEADER_BYTES)
        self._sequence = 0
        self._place = 1

    def write(self, payload: bytes) -> None:
        """Write the payload over the older copy; raises UsageError when it is too long for its page."""
        if len(payload) > HEADER_PAYLOAD_BYTES:
            raise UsageError(f"a header of {len(payload)} bytes is over the limit of {HEADER_PAYLOAD_BYTES}")
        sequence, place = self._sequence + 1, 1 - self._place
        at = place * _COPY_BYTES
        head = _COPY_HEAD.pack(MAGIC, VERSION, len(payload), sequence)
        self.window.put(at, head)
        self.window.put(at + _COPY_PAYLOAD_AT, payload)
        self.window.put_crc(at + _COPY_CRC_AT, crc32(payload, crc32(head)))
        self._sequence, self._place = sequence, place

    def read(self) -> bytes:
        """Return the newest valid payload.

        Raises ProtocolError on memory that is no record store, is one of another version, or holds
        no valid copy.
        """
        if not any(self.window.view[at : at + len(MAGIC)] == MAGIC for at in (0, _COPY_BYTES)):
            raise ProtocolError("the memory holds no record store of sharedmirror")
        copies = [copy for place in (0, 1) if (copy := self._read_copy(place)) is not None]
        if not copies:
            raise ProtocolError("both copies of the record store's header are damaged; its memory cannot be taken over")
        newest = max(copies)
        if newest.version != VERSION:
            raise ProtocolError(
                f"the record store has version {newest.version}, this daemon writes version {VERSION}; "
                f"start the release that made it, or let it go and start afresh"
            )
        self._sequence, self._place = newest.sequence, newest.place
        return newest.payload

    def _read_copy(self, place: int) -> _Copy | None:
        raw = bytes(self.window.view[place * _COPY_BYTES : (place + 1) * _COPY_BYTES])
        magic, version, size, sequence = _COPY_HEAD.unpack_from(raw)
        payload = raw[_COPY_PAYLOAD_AT : _COPY_PAYLOAD_AT + size]
        (crc,) = _CRC.unpack_from(raw, _COPY_CRC_AT)
        if magic != MAGIC or len(payload) != size or not 0 < sequence < SEQUENCE_LIMIT:
            return None
        return _Copy(sequence, place, version, payload) if crc == crc32(payload, crc32(raw[:_COPY_CRC_AT])) else None
