"""A record store over plain bytes for tests of recovery, and the log of every store to its memory.

The log is what a killed daemon may leave: any prefix of it, the last store torn in any way.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from sharedmirror.errors import MemoryFault
from sharedmirrord.journal import ALIGNMENT_BYTES, Window
from sharedmirrord.records import RecordStore, StoreHeader

ARENA_BYTES = 64 << 20
HEADER = StoreHeader(b"0123456789abcdef", "boot-1", 1000, "/run/daemon.sock", 1, (("/sharedmirror-a", ARENA_BYTES),))

Store = tuple[int, bytes] | int
"""One store to memory: (offset, bytes), or the storage's new size."""


class ByteStorage:
    """Storage in plain bytes of fixed capacity."""

    def __init__(self, content: bytes = b"", capacity: int = 1 << 20) -> None:
        self.memory = bytearray(max(capacity, len(content)))
        self.memory[: len(content)] = content
        self.size_bytes = len(content)
        self.grown: Callable[[int], None] = lambda size_bytes: None

    def grow(self, size_bytes: int) -> None:
        if size_bytes > len(self.memory):
            raise MemoryFault(f"no room for {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.grown(size_bytes)

    def shrink(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.grown(size_bytes)

    def map(self, offset: int, length: int) -> memoryview:
        assert offset % ALIGNMENT_BYTES == 0 and 0 < length <= self.size_bytes - offset
        return memoryview(self.memory)[offset : offset + length]

    def unmap(self, view: memoryview) -> None:
        view.release()

    def image(self) -> bytes:
        return bytes(self.memory[: self.size_bytes])


def new_store(storage: ByteStorage | None = None) -> tuple[ByteStorage, RecordStore]:
    """Return a store whose journal areas are as small as can be, so that checkpoints are frequent."""
    storage = storage or ByteStorage()
    return storage, RecordStore.create(storage, HEADER, area_bytes=ALIGNMENT_BYTES)


@contextlib.contextmanager
def every_store(before: Callable[[Window, int, bytes], None]) -> Iterator[None]:
    """Call ``before`` with window, place in it and bytes, before each store of any record store to memory."""
    put, put_word, put_crc = Window.put, Window.put_word, Window.put_crc

    def hooked_put(self: Window, at: int, data: bytes) -> None:
        before(self, at, data)
        put(self, at, data)

    def hooked_word(self: Window, at: int, word: int) -> None:
        before(self, at, word.to_bytes(8, sys.byteorder))
        put_word(self, at, word)

    def hooked_crc(self: Window, at: int, crc: int) -> None:
        before(self, at, crc.to_bytes(4, "little"))
        put_crc(self, at, crc)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "put", hooked_put)
        patch.setattr(Window, "put_word", hooked_word)
        patch.setattr(Window, "put_crc", hooked_crc)
        yield


@contextlib.contextmanager
def recording(storage: ByteStorage) -> Iterator[list[Store]]:
    """Log the stores to ``storage``, the only one that is written meanwhile."""
    log: list[Store] = []
    storage.grown = log.append
    with every_store(lambda window, at, data: log.append((window.offset + at, bytes(data)))):
        yield log
    storage.grown = lambda size_bytes: None


def kills(log: Sequence[Store], tears: int, rng: random.Random, start: bytes = b"") -> Iterator[tuple[int, bytes]]:
    """Yield (stores made, image) for a kill after each store, and ``tears`` times in the midst of each longer one.

    A torn store leaves some of its words new and the rest old; a store of one word is never torn.
    """
    memory, size = bytearray(start), len(start)
    for made, event in enumerate(log):
        if isinstance(event, int):
            memory += bytes(event - size)
            size = event
        else:
            offset, data = event
            for _ in range(tears if len(data) > 8 else 0):
                yield made, bytes(_torn(memory, offset, data, rng))
            memory[offset : offset + len(data)] = data
        yield made + 1, bytes(memory)


def _torn(memory: bytearray, offset: int, data: bytes, rng: random.Random) -> bytearray:
    """Return the memory in the midst of a copy: bytes arrive from the front, from the end, or word by word."""
    image = bytearray(memory)
    cut = rng.randrange(1, len(data))
    how = rng.randrange(3)
    if how == 0:
        image[offset : offset + cut] = data[:cut]
    elif how == 1:
        image[offset + cut : offset + len(data)] = data[cut:]
    else:
        for at in range(0, len(data), 8):
            if rng.random() < 0.5:
                image[offset + at : offset + min(at + 8, len(data))] = data[at : at + 8]
    return image
