"""The record store: what was committed is there after a kill at any store to memory, wholly or not at all.

All of it stands on one log of stores, one model and one script of commits, so it stays in one module.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirror.errors import (
    ClosedError,
    EnvironmentFault,
    KeyInputError,
    MemoryFault,
    PageError,
    ProtocolError,
    SharedMirrorError,
    UsageError,
)
from sharedmirrord import journal
from sharedmirrord.core.durable import NO_PAGE, CreateTable, Delete, DropTable, Put, SetSlots, Slot, Write
from sharedmirrord.core.model import TableRoom
from sharedmirrord.journal import ALIGNMENT_BYTES, Area, HeaderPage, Heap, Window
from sharedmirrord.records import JOURNAL_BYTES, RecordStore, StoreHeader
from sharedmirrord.tables import SLOT_BYTES

HEADER = StoreHeader(b"0123456789abcdef", "boot-1", 1000, "/run/daemon.sock", 3, (("/sharedmirror-a", 1 << 30),))
SMALL = ALIGNMENT_BYTES
_CAPACITY = 4 << 20

State = tuple[dict[tuple[str, int], Any], dict[int, list["Slot | None"]]]


class BytesStorage:
    """Storage in plain bytes; ``limit`` is where growing ends, ``map_fails`` makes the next maps fail."""

    def __init__(self, content: bytes = b"", capacity: int = _CAPACITY) -> None:
        self.memory = bytearray(max(capacity, len(content)))
        self.memory[: len(content)] = content
        self.size_bytes = len(content)
        self.limit = capacity
        self.map_fails = False
        self.mapped: list[memoryview] = []
        self.grown: Callable[[int], None] = lambda size_bytes: None

    def grow(self, size_bytes: int) -> None:
        if size_bytes > self.limit:
            raise MemoryFault(f"no room for {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.grown(size_bytes)

    def shrink(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.grown(size_bytes)

    def map(self, offset: int, length: int) -> memoryview:
        assert offset % ALIGNMENT_BYTES == 0 and 0 < length <= self.size_bytes - offset
        if self.map_fails:
            raise MemoryFault("no pages")
        view = memoryview(self.memory)[offset : offset + length]
        self.mapped.append(view)
        return view

    def unmap(self, view: memoryview) -> None:
        (index,) = [index for index, mapped in enumerate(self.mapped) if mapped is view]
        self.mapped.pop(index).release()

    def image(self) -> bytes:
        return bytes(self.memory[: self.size_bytes])


class Model:
    """The store as plain dicts; ``apply`` raises UsageError, changing nothing, where the store must."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], Any] = {}
        self.tables: dict[int, list[Slot]] = {}

    def apply(self, writes: Sequence[Write]) -> None:
        records, tables = self.copy()
        for write in writes:
            if isinstance(write, Put):
                records[write.kind, write.id] = write.value
            elif isinstance(write, Delete):
                records.pop((write.kind, write.id), None)
            elif isinstance(write, CreateTable):
                if write.pool in tables or write.pages < 1:
                    raise UsageError("table")
                tables[write.pool] = [free_slot(page) for page in range(write.pages)]
            elif write.pool not in tables:
                raise UsageError("no table")
            elif isinstance(write, DropTable):
                del tables[write.pool]
            else:
                for slot in write.slots:
                    if not 0 <= slot.page < len(tables[write.pool]):
                        raise UsageError("page")
                    tables[write.pool][slot.page] = slot
        self.records, self.tables = records, tables

    def copy(self) -> tuple[dict[tuple[str, int], Any], dict[int, list[Slot]]]:
        return dict(self.records), {pool: list(slots) for pool, slots in self.tables.items()}

    def state(self) -> State:
        return dict(self.records), {pool: list(slots) for pool, slots in self.tables.items()}


def free_slot(page: int) -> Slot:
    return Slot(page, 0, 0, 0, b"", NO_PAGE, 0)


def slot(page: int, generation: int, key: bytes = b"") -> Slot:
    return Slot(page, 2, generation, 1, key or b"key-%d" % generation, NO_PAGE if page == 0 else page - 1, generation)


def state_of(store: RecordStore) -> State:
    slots: dict[int, list[Slot | None]] = {pool: list(store.slots(pool)) for pool in store.tables()}
    assert {pool: len(some) for pool, some in slots.items()} == store.tables()
    return store.records(), slots


def reopened(image: bytes) -> State:
    with RecordStore.open(BytesStorage(image, len(image))) as store:
        return state_of(store)


def new_store(storage: BytesStorage | None = None) -> tuple[BytesStorage, RecordStore]:
    storage = storage or BytesStorage()
    return storage, RecordStore.create(storage, HEADER, area_bytes=SMALL)


# The log of stores to memory: (offset, bytes), or the new size, or None when a commit has returned.
Event = tuple[int, bytes] | int | None


@contextlib.contextmanager
def recording(storage: BytesStorage) -> Iterator[list[Event]]:
    log: list[Event] = []
    put, put_word, put_crc = Window.put, Window.put_word, Window.put_crc

    def logged_put(self: Window, at: int, data: bytes) -> None:
        log.append((self.offset + at, bytes(data)))
        put(self, at, data)

    def logged_word(self: Window, at: int, word: int) -> None:
        log.append((self.offset + at, word.to_bytes(8, sys.byteorder)))
        put_word(self, at, word)

    def logged_crc(self: Window, at: int, crc: int) -> None:
        log.append((self.offset + at, crc.to_bytes(4, "little")))
        put_crc(self, at, crc)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "put", logged_put)
        patch.setattr(Window, "put_word", logged_word)
        patch.setattr(Window, "put_crc", logged_crc)
        storage.grown = log.append
        yield log


def crashes(log: Sequence[Event], start: bytes = b"") -> Iterator[tuple[int, bytes]]:
    """Yield (commits acknowledged, image) for a kill after each store and in the midst of each."""
    memory, size, acknowledged = bytearray(start), len(start), 0
    for event in log:
        if event is None:
            acknowledged += 1
        elif isinstance(event, int):
            memory += bytes(event - size)
            size = event
            yield acknowledged, bytes(memory)
        else:
            offset, data = event
            before = bytes(memory[offset : offset + len(data)])
            size_of, middle = len(data), len(data) // 2
            cuts = {1, 3, 4, 8, middle, middle & -8, (size_of - 1) & -8, size_of - 1}
            for cut in sorted(cuts & set(range(1, size_of))):
                for torn in (data[:cut] + before[cut:], before[:cut] + data[cut:]):
                    memory[offset : offset + len(data)] = torn
                    yield acknowledged, bytes(memory)
            memory[offset : offset + len(data)] = data
            yield acknowledged, bytes(memory)


def rewrites(id: int, size: int, pages: Sequence[int], generation: int) -> list[Write]:
    return [lease(id, size), SetSlots(8, tuple(slot(page, generation) for page in pages))]


def lease(id: int, size: int = 4) -> Put:
    return Put("lease", id, {"pages": list(range(size)), "keys": [b"k" * 8] * (size // 4), "engine": "e"})


SCRIPT: list[list[Write]] = [
    [lease(1)],
    [CreateTable(7, 20)],
    [SetSlots(7, (slot(3, 1), slot(0, 1), slot(19, 1))), lease(2), Delete("lease", 1)],
    [SetSlots(7, (slot(3, 2), slot(3, 3)))],
    [Put("pool", 7, {"number": 1, "tag": "é"}), SetSlots(7, (slot(3, 4, b"\xff" * 64),))],
    [DropTable(7), CreateTable(7, 20), SetSlots(7, (slot(6, 5), slot(7, 5)))],
    [lease(3, 300)],
    [CreateTable(8, 40), SetSlots(8, (slot(39, 1), slot(1, 1))), lease(4, 250)],
    *(rewrites(10 + n, 90, (n, 39), n + 2) for n in range(9)),
    [DropTable(7), Delete("pool", 7)],
    [CreateTable(9, 15), SetSlots(9, (slot(14, 5),))],
    [lease(5, 900), lease(6, 900)],
    [SetSlots(9, (slot(14, 6),)), DropTable(8), CreateTable(8, 30), SetSlots(8, (slot(2, 9),))],
    [CreateTable(11, 3), DropTable(11), Delete("nothing", 1)],
    [Delete("lease", n) for n in range(3, 19)],
    *(rewrites(2, 700, (2, n), 20 + n) for n in range(12)),
    [Put("big", 1, b"x" * 3 * SMALL)],
    [*(Put("hit", n, [n, None, True, 1.5, "s"]) for n in range(30))],
    [Delete("big", 1), DropTable(9), lease(1)],
]


def run_script() -> tuple[BytesStorage, list[Event], list[State]]:
    storage, model = BytesStorage(), Model()
    with recording(storage) as log:
        store = RecordStore.create(storage, HEADER, area_bytes=SMALL)
        log.append(None)
        states = [model.state()]
        for writes in SCRIPT:
            store.commit(writes)
            model.apply(writes)
            states.append(model.state())
            log.append(None)
        assert state_of(store) == states[-1]
    assert store.bytes_used == RecordStore.open(BytesStorage(storage.image())).bytes_used
    return storage, log, states


def test_log_holds_every_store() -> None:
    storage, log, _ = run_script()
    *_, (_, image) = crashes(log)
    assert image == storage.image()


def test_script_forces_checkpoints_growth_and_reuse_of_room() -> None:
    storage, log, _ = run_script()
    flips = sum(isinstance(event, tuple) and event[0] in (24, 2048 + 24) for event in log)
    assert flips > 5
    assert sum(isinstance(event, int) for event in log) > 5
    with RecordStore.open(BytesStorage(storage.image())) as store:
        assert store.bytes_used < storage.size_bytes


def test_order_of_stores() -> None:
    storage, store = new_store()
    store.commit([CreateTable(1, 4)])
    tail = store._state.active.window.offset + store._state.active.tail
    with recording(storage) as log:
        store.commit([SetSlots(1, (slot(3, 1), slot(2, 1)))])
        store.set_epoch(4)
    stores = [event for event in log if isinstance(event, tuple)]
    (behind, zero), (body, _), (head, word), *slots = [*stores[:3], *stores[3:7]]
    assert (head, len(word), body, zero) == (tail, 8, tail + 8, bytes(8))
    assert behind == store._state.active.window.offset + store._state.active.tail
    home = store._state.tables[1].window.offset
    assert [offset - home for offset, _ in slots] == [3 * 224, 3 * 224 + 108, 2 * 224, 2 * 224 + 108]
    assert [offset for offset, _ in stores[7:]] == [2048, 2048 + 32, 2048 + 24]


def test_kill_at_any_store_leaves_whole_commits() -> None:
    _, log, states = run_script()
    seen: set[tuple[int, bool]] = set()
    for acknowledged, image in crashes(log):
        if not acknowledged:
            try:
                found = reopened(image)
            except ProtocolError:
                continue
            assert found == states[0]
        else:
            found = reopened(image)
            assert found in states[acknowledged - 1 : acknowledged + 1], acknowledged
            seen.add((acknowledged, found == states[acknowledged - 1]))
    # Each commit was seen in the making both before and after its commit point.
    assert all({(n, True), (n, False)} <= seen for n in range(1, len(states)) if states[n] != states[n - 1])


def test_kill_at_any_store_of_the_recovery_loses_nothing() -> None:
    _, log, states = run_script()
    mended = 0
    for acknowledged, image in itertools.islice(crashes(log), 0, None, 7):
        if not acknowledged:
            continue
        storage = BytesStorage(image, len(image))
        with recording(storage) as second:
            expected = state_of(RecordStore.open(storage))
        assert expected in states[acknowledged - 1 : acknowledged + 1]
        for _, later in crashes(second, image):
            mended += 1
            assert reopened(later) == expected
    assert mended > 100


def test_store_goes_on_after_a_kill_at_any_store() -> None:
    _, log, _ = run_script()
    more: list[Write] = [lease(77, 200), CreateTable(77, 25), SetSlots(77, (slot(24, 7),))]
    for acknowledged, image in itertools.islice(crashes(log), 0, None, 5):
        if acknowledged:
            storage, model = BytesStorage(image), Model()
            with RecordStore.open(storage) as store:
                model.records, tables = state_of(store)
                model.tables = {pool: [one for one in slots if one is not None] for pool, slots in tables.items()}
                for n in range(3):
                    writes: list[Write] = [lease(78, 30 * n), SetSlots(77, (slot(24, 7 + n),))]
                    writes = more if n == 0 else writes
                    store.commit(writes)
                    model.apply(writes)
            assert reopened(storage.image()) == model.state()


def test_kill_during_set_epoch_leaves_the_old_or_the_new() -> None:
    storage, store = new_store()
    store.commit([lease(1)])
    store.set_epoch(4)
    start = storage.image()
    with recording(storage) as log:
        store.set_epoch(5)
    epochs = set()
    for _, image in crashes(log, start):
        with RecordStore.open(BytesStorage(image)) as other:
            epochs.add(other.header.epoch)
            assert other.records() == {("lease", 1): lease(1).value}
    assert epochs == {4, 5}


def test_open_gives_back_header_records_and_slots() -> None:
    storage, store = new_store()
    store.commit([Put("pool", 1, {"a": (1, 2), "b": [b"x", None]}), CreateTable(1, 3), SetSlots(1, (slot(2, 8),))])
    store.set_epoch(9)
    store.close()
    with RecordStore.open(storage) as other:
        assert other.header == replace(HEADER, epoch=9)
        assert other.records() == {("pool", 1): {"a": [1, 2], "b": [b"x", None]}}
        assert list(other.slots(1)) == [free_slot(0), free_slot(1), slot(2, 8)]
        assert other.tables() == {1: 3}


def test_create_forgets_what_was_there() -> None:
    storage, store = new_store()
    store.commit([lease(1), CreateTable(1, 30), SetSlots(1, tuple(slot(page, 5) for page in range(30)))])
    store.set_epoch(4)
    store.close()
    _, store = new_store(storage)
    store.commit([CreateTable(2, 30)])
    assert reopened(storage.image()) == ({}, {2: [free_slot(page) for page in range(30)]})


def test_dropped_rooms_are_used_again() -> None:
    storage, store = new_store()
    for pool in range(20):
        store.commit([CreateTable(pool, 100 + pool), SetSlots(pool, (slot(99, 1),))])
        store.commit([DropTable(pool)])
    assert storage.size_bytes < 12 * ALIGNMENT_BYTES + 3 * 120 * SLOT_BYTES
    assert store.bytes_used < 8 * ALIGNMENT_BYTES
    store.close()
    assert storage.mapped == []


def test_a_mapping_that_came_short_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = BytesStorage()
    storage.grow(2 * SMALL)
    whole = storage.map
    monkeypatch.setattr(storage, "map", lambda offset, length: whole(offset, length - 1))
    with pytest.raises(MemoryFault, match=f"only {SMALL - 1} of the record store's {SMALL} bytes at {SMALL}"):
        Window(storage, SMALL, SMALL)
    assert storage.mapped == []


BAD: list[tuple[list[Write], type[UsageError], str]] = [
    ([SetSlots(5, ())], UsageError, "pool 5 has no page table"),
    ([DropTable(5)], UsageError, "pool 5 has no page table"),
    ([CreateTable(1, 5)], UsageError, "has a page table already"),
    ([CreateTable(5, 0)], UsageError, "page table of 0 pages"),
    ([SetSlots(1, (slot(10, 1),))], PageError, "page 10 is not in the table of 10 pages"),
    ([SetSlots(1, (slot(-1, 1),))], PageError, "page -1 is not"),
    ([SetSlots(1, (slot(1, 1, b"k" * 65),))], KeyInputError, "has 65 bytes; the limit is 64"),
    ([SetSlots(1, (slot(1, 1 << 64),))], UsageError, "slot of page 1 holds a value out of range"),
    ([SetSlots(1, (slot(2, 1)._replace(state=256),))], UsageError, "slot of page 2 holds a value out of range"),
    ([Put("lease", 1, object())], UsageError, "lease 1 cannot be stored"),
    ([Put("lease", 1, 1 << 64)], UsageError, "lease 1 cannot be stored"),
    ([Put("lease", 1 << 64, 1)], UsageError, "cannot be stored"),
    ([Put("lease", 1, "\ud800")], UsageError, "lease 1 cannot be stored"),
    ([Put("table", 1, [0, 1])], UsageError, "the store's own"),
    ([Delete("table", 1)], UsageError, "the store's own"),
]


@pytest.mark.parametrize(("writes", "kind", "message"), BAD)
def test_bad_write_is_refused_and_nothing_of_its_commit_happens(
    writes: list[Write], kind: type[UsageError], message: str
) -> None:
    storage, store = new_store()
    store.commit([CreateTable(1, 10), SetSlots(1, (slot(4, 4),)), lease(1)])
    store.commit([CreateTable(2, 9), SetSlots(2, (slot(8, 1),))])
    before, used, mapped = state_of(store), store.bytes_used, list(map(id, storage.mapped))
    good: list[Write] = [lease(9), DropTable(2), CreateTable(4, 4), SetSlots(1, (slot(5, 5),)), Delete("lease", 1)]
    with pytest.raises(kind, match=message):
        store.commit([*good, *writes])
    assert state_of(store) == before == reopened(storage.image())
    assert (store.bytes_used, list(map(id, storage.mapped))) == (used, mapped)
    store.commit([lease(9)])
    assert reopened(storage.image())[0] == {("lease", 1): lease(1).value, ("lease", 9): lease(9).value}


@pytest.mark.parametrize("how", ["grow", "map"])
@pytest.mark.parametrize("writes", [[lease(9), CreateTable(2, 1000)], [lease(9), Put("big", 1, b"x" * 9000)]])
def test_failed_growth_leaves_the_store_as_it_was(how: str, writes: list[Write]) -> None:
    storage, store = new_store()
    store.commit([CreateTable(1, 10), SetSlots(1, (slot(4, 4),)), lease(1)])
    before, used = state_of(store), store.bytes_used
    storage.limit, storage.map_fails = (storage.size_bytes, False) if how == "grow" else (_CAPACITY, True)
    for _ in range(2):
        with pytest.raises(MemoryFault):
            store.commit(writes)
        assert (state_of(store), store.bytes_used) == (before, used)
    store.commit([lease(2)])
    assert reopened(storage.image())[0] == {("lease", n): lease(n).value for n in (1, 2)}
    storage.limit, storage.map_fails = _CAPACITY, False
    store.commit(writes)
    assert reopened(storage.image()) == state_of(store)
    assert ("lease", 9) in store.records()


def test_a_table_that_could_not_be_mapped_leaves_the_storage_as_long_as_it_was() -> None:
    storage, store = new_store()
    size, storage.map_fails = storage.size_bytes, True
    with pytest.raises(MemoryFault):
        store.commit([CreateTable(2, 1000)])
    assert storage.size_bytes == size


def test_what_a_page_table_may_take() -> None:
    storage, store = new_store()
    assert store.table_room(0).free_bytes <= 0
    assert store.table_room(JOURNAL_BYTES + 5000) == TableRoom(5000, SLOT_BYTES)
    store.commit([CreateTable(2, 1000), CreateTable(3, 10)])
    store.commit([DropTable(2)])
    there = store.table_room(0)
    assert there.free_bytes >= 1000 * SLOT_BYTES
    storage.limit = storage.size_bytes
    store.commit([CreateTable(4, there.free_bytes // SLOT_BYTES)])


def test_full_store_still_takes_deletes() -> None:
    storage, store = new_store()
    storage.limit = storage.size_bytes
    with pytest.raises(MemoryFault):
        for id in range(1000):
            store.commit([lease(id, 40)])
    full = len(store.records())
    assert full > 10
    for n in range(2 * full):
        store.commit([Delete("lease", n)])
    store.commit([lease(1, 40)])
    assert reopened(storage.image())[0] == {("lease", 1): lease(1, 40).value}


def test_interrupted_commit_refuses_all_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, store = new_store()
    store.commit([CreateTable(1, 10)])

    def interrupt(self: Window, at: int, crc: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Window, "put_crc", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.commit([SetSlots(1, (slot(4, 4),))])
    with pytest.raises(EnvironmentFault, match="interrupted"):
        store.commit([lease(1)])
    with pytest.raises(EnvironmentFault, match="interrupted"):
        store.set_epoch(8)
    assert reopened(storage.image())[1][1][4] == slot(4, 4)


def test_closed_store_refuses() -> None:
    _, store = new_store()
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.commit([lease(1)])
    with pytest.raises(ClosedError):
        store.set_epoch(8)


def test_epoch_does_not_go_back() -> None:
    _, store = new_store()
    with pytest.raises(UsageError, match="epoch 2 cannot follow epoch 3"):
        store.set_epoch(2)
    store.commit([lease(1)])
    assert store.header.epoch == 3


def test_header_that_does_not_fit_is_refused() -> None:
    for header in (replace(HEADER, socket="s" * 3000), replace(HEADER, instance=b"short")):
        with pytest.raises(UsageError):
            RecordStore.create(BytesStorage(), header)


def damaged(image: bytes, at: int, data: bytes) -> bytes:
    return image[:at] + data + image[at + len(data) :]


def test_foreign_or_damaged_memory_is_refused() -> None:
    storage, store = new_store()
    store.set_epoch(4)
    image = storage.image()
    both = damaged(damaged(image, 32, b"???"), 2048 + 32, b"???")
    for bad, message in (
        (b"", "holds no record store: it has 0 bytes"),
        (bytes(3 * ALIGNMENT_BYTES), "holds no record store"),
        (both, "both copies of the record store's header are damaged"),
        (image[:ALIGNMENT_BYTES], "its memory has 4096 bytes"),
        (damaged(image, ALIGNMENT_BYTES + 16, b"?"), "checkpoint is damaged"),
    ):
        with pytest.raises(ProtocolError, match=message):
            reopened(bad)


def test_one_damaged_header_copy_is_survived() -> None:
    storage, store = new_store()
    store.set_epoch(4)
    with RecordStore.open(BytesStorage(damaged(storage.image(), 2048 + 40, b"?"))) as older:
        assert older.header.epoch == 3
        older.set_epoch(5)
        assert older.header.epoch == 5


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, store = new_store()
    with monkeypatch.context() as patch:
        patch.setattr(journal, "VERSION", 2)
        store.set_epoch(4)
    with pytest.raises(ProtocolError, match="has version 2, this daemon writes version 1"):
        RecordStore.open(storage)


def test_damage_before_later_entries_is_not_taken_for_a_torn_tail() -> None:
    storage, store = new_store()
    for n in range(4):
        store.commit([Put("lease", n, f"value-{n}")])
    image = storage.image()
    with pytest.raises(ProtocolError, match="is damaged"):
        reopened(damaged(image, image.index(b"value-1"), b"VALUE"))
    with pytest.raises(ProtocolError, match="is damaged"):
        reopened(damaged(image, (image.index(b"value-1") & -8) - 24, b"\x07\x07"))
    assert reopened(damaged(image, image.index(b"value-3"), b"VALUE"))[0].keys() == {("lease", n) for n in range(3)}


def test_slot_falls_back_to_its_older_copy_or_to_none() -> None:
    storage, store = new_store()
    store.commit([CreateTable(1, 3)])
    for generation in (1, 2):
        store.commit([SetSlots(1, (slot(1, generation),))])
    while b"key-2" in storage.image()[: 3 * ALIGNMENT_BYTES]:
        store.commit([lease(1, 300)])
    image = storage.image()
    newer = damaged(image, image.index(b"key-2"), b"KEY")
    assert reopened(newer)[1][1] == [free_slot(0), slot(1, 1), free_slot(2)]
    assert reopened(damaged(newer, image.index(b"key-1"), b"KEY"))[1][1] == [free_slot(0), None, free_slot(2)]
    # Copies whose sequence is beyond reason do not get in the way of the next write.
    home = image.index(b"key-1") - 36
    for at in (home, home + SLOT_BYTES // 2):
        with RecordStore.open(BytesStorage(damaged(image, at, b"\xff" * 8))) as other:
            other.commit([SetSlots(1, (slot(1, 3),))])
            assert list(other.slots(1))[1] == slot(1, 3)


keys = st.binary(min_size=0, max_size=64)
numbers = st.integers(0, 1000)
slots_of = st.builds(Slot, st.integers(0, 24), st.integers(0, 4), numbers, numbers, keys, numbers, numbers)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=20) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5) | numbers, inner, max_size=4),
    max_leaves=12,
)
kinds, pools = st.sampled_from(["lease", "hit", "pool"]), st.integers(0, 2)
writes_of = (
    st.builds(Put, kinds, st.integers(0, 6), values)
    | st.builds(Put, kinds, st.integers(0, 6), st.binary(min_size=500, max_size=6000))
    | st.builds(Delete, kinds, st.integers(0, 6))
    | st.builds(SetSlots, pools, st.lists(slots_of, max_size=8).map(tuple))
    | st.builds(CreateTable, pools, st.integers(1, 60))
    | st.builds(DropTable, pools)
)
steps = st.lists(st.lists(writes_of, max_size=4) | st.sampled_from(["reopen", "full", "room"]), max_size=30)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_store_equals_a_dict(steps: list[list[Write] | str]) -> None:
    storage, store = new_store()
    model = Model()
    for step in steps:
        if step == "reopen":
            store.close()
            store = RecordStore.open(storage)
        elif isinstance(step, str):
            storage.limit = storage.size_bytes if step == "full" else _CAPACITY
        else:
            before = model.copy()
            try:
                model.apply(step)
            except UsageError:
                with pytest.raises((UsageError, MemoryFault)):
                    store.commit(step)
            else:
                try:
                    store.commit(step)
                except MemoryFault:
                    assert storage.limit < _CAPACITY
                    model.records, model.tables = before
        assert state_of(store) == model.state()
    with RecordStore.open(BytesStorage(storage.image())) as other:
        assert state_of(other) == model.state()
        assert other.bytes_used == store.bytes_used


@functools.cache
def images() -> list[bytes]:
    return [image for _, image in itertools.islice(crashes(run_script()[1]), 400, None, 211)]


def survives(image: bytes) -> None:
    """Check that ``image`` is refused with our own error or gives well-formed words that can be written on."""
    storage = BytesStorage(image, len(image) + (1 << 16))
    with contextlib.suppress(SharedMirrorError), RecordStore.open(storage) as store:
        records, tables = state_of(store)
        assert all(isinstance(kind, str) and isinstance(id, int) for kind, id in records)
        for pool, slots in tables.items():
            assert all(one is None or (one.page == page and len(one.key) <= 64) for page, one in enumerate(slots))
            store.commit([SetSlots(pool, (slot(0, 1),))])
        store.commit([lease(1), lease(2, 500)])
        store.set_epoch(store.header.epoch + 1)
        assert state_of(RecordStore.open(storage)) == state_of(store)


@settings(max_examples=400, deadline=None)
@given(
    st.deferred(lambda: st.sampled_from(images())),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=12),
    st.sampled_from([100, 2300, 12000, _CAPACITY]),
)
def test_flipped_bytes_do_no_harm(image: bytes, flips: list[tuple[float, int]], spread: int) -> None:
    broken = bytearray(image)
    for where, change in flips:
        broken[int(where * min(spread, len(image)))] ^= change
    survives(bytes(broken))


def with_entry(payload: bytes) -> bytes:
    """Return an image whose journal ends in an entry that is valid but for what it says."""
    storage, store = new_store()
    store.commit([CreateTable(1, 4), lease(1)])
    area = Area(Window(storage, ALIGNMENT_BYTES, SMALL))
    sequence = area.replay(1, lambda payload: None)
    assert area.fits(len(payload))
    area.append(sequence, payload)
    return storage.image()


def with_header(payload: bytes) -> bytes:
    storage, store = new_store()
    store.commit([CreateTable(1, 4), lease(1)])
    page = HeaderPage(storage)
    page.read()
    page.write(payload)
    return storage.image()


operations = st.one_of(
    st.tuples(st.integers(0, 4), st.just("table"), pools, st.tuples(st.integers(), st.integers())),
    st.tuples(st.just(1), st.just("table"), pools, st.tuples(st.sampled_from([4096, 12288, 16384]), numbers)),
    st.tuples(st.just(3), pools, st.lists(slots_of.map(list) | values, max_size=3)),
    st.tuples(st.integers(1, 3), values, values),
    values,
)


def packable(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except (ValueError, OverflowError):
        packed = b""
    return packed


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.lists(operations, max_size=4).map(packable) | values.map(packable))
def test_nonsense_with_a_valid_checksum_does_no_harm(payload: bytes) -> None:
    survives(with_entry(payload or b"\x00"))


GOOD = {**HEADER.__dict__, "active": (4096, 4096), "spare": (8192, 4096), "first": 1, "heap_end": 16384}
places = st.tuples(st.sampled_from([0, 4096, 8192, 12288]), st.sampled_from([0, 4096, 8192, 1 << 40]))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD]), values | places | places.map(sum), max_size=3))
def test_nonsense_header_with_a_valid_checksum_does_no_harm(changes: dict[str, Any]) -> None:
    payload = packable({**GOOD, **changes})
    if len(payload) <= 1900:
        survives(with_header(payload or b"\x00"))


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 600 + b"\xc0",
        b"\x91" + b"\xdd\x00\x00\x03\xff" * 500,
        msgpack.packb([[1, "table", 5, [16384, 1 << 60]]]),
        msgpack.packb([[1, "table", 5, [-4096, 5]]]),
        msgpack.packb([[1, "table", 5, [12288, 5]]]),
        msgpack.packb([[1, "table", 5, [4096, 5]]]),
        msgpack.packb([[1, "table", 5, [1 << 40, 5]]]),
        msgpack.packb([[3, 4, [[0, 0, 0, 0, b"", 0, 0]]]]),
        msgpack.packb([[3, 1, [[4, 0, 0, 0, b"", 0, 0]]]]),
        msgpack.packb([[3, 1, [[-1, 0, 0, 0, b"", 0, 0]]]]),
        msgpack.packb([[3, 1, [[0, 0, 0, 0, "text", 0, 0]]]]),
        msgpack.packb([[3, 1, [[0, 0, 1.5, 0, b"", 0, 0]]]]),
        msgpack.packb([[3, 1, [[0, 0, 0, 0, b"k" * 65, 0, 0]]]]),
        msgpack.packb([[9, "lease", 1, 1]]),
        msgpack.packb([[1, "lease", 1, 1]]) + b"\xc0",
    ],
)
def test_entry_that_no_store_wrote_is_refused(payload: bytes) -> None:
    with pytest.raises(SharedMirrorError):
        reopened(with_entry(payload))


@given(st.lists(st.integers(1, 5), max_size=25), st.randoms(use_true_random=False))
def test_heap_ranges_never_overlap(sizes: list[int], chance: random.Random) -> None:
    storage = BytesStorage()
    storage.grow(ALIGNMENT_BYTES)
    heap = Heap(storage)
    held: list[Window] = []
    for size in sizes:
        held.append(heap.allocate(size * ALIGNMENT_BYTES - chance.randrange(ALIGNMENT_BYTES))[0])
        if chance.random() < 0.5:
            heap.free(held.pop(chance.randrange(len(held))))
        used = [(window.offset, window.length) for window in held]
        again = Heap(storage, used, heap.end)
        assert again.used_bytes == heap.used_bytes == ALIGNMENT_BYTES + sum(length for _, length in used)


class FileStorage:
    """Storage over a file descriptor, as a process that gets killed has it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def grow(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)

    shrink = grow

    def map(self, offset: int, length: int) -> memoryview:
        return memoryview(mmap.mmap(self._fd, length, offset=offset))

    def unmap(self, view: memoryview) -> None:
        mapping = view.obj
        view.release()
        assert isinstance(mapping, mmap.mmap)
        mapping.close()


def endless(number: int) -> list[Write]:
    """Return the writes of commit ``number`` of the process that gets killed."""
    if number == 0:
        return [CreateTable(1, 64)]
    slots = tuple(slot((number * 7 + n) % 64, number) for n in range(40))
    return [Put("count", 0, number), SetSlots(1, slots), lease(number % 20, number % 90)]


def commit_until_killed(fd: int, start: int) -> None:
    store = RecordStore.open(FileStorage(fd))
    for number in itertools.count(start):
        store.commit(endless(number))
        os.write(1, number.to_bytes(8, "little"))


def test_sigkill_of_a_real_process() -> None:
    fd = os.memfd_create("records")
    try:
        RecordStore.create(FileStorage(fd), HEADER, area_bytes=1 << 14).close()
        model, done, chance = Model(), 0, random.Random(5)
        for _ in range(6):
            command = [sys.executable, __file__, str(fd), str(done)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[fd]) as child:
                assert child.stdout is not None
                child.stdout.read(8)
                time.sleep(chance.uniform(0, 0.05))
                child.kill()
                said = child.stdout.read()
            acknowledged = done + 1 + len(said) // 8
            with RecordStore.open(FileStorage(fd)) as store:
                count = store.records().get(("count", 0), 0) + 1
                assert count in (acknowledged, acknowledged + 1)
                for number in range(done, count):
                    model.apply(endless(number))
                assert state_of(store) == model.state()
            done = count
    finally:
        os.close(fd)


if __name__ == "__main__":
    commit_until_killed(int(sys.argv[1]), int(sys.argv[2]))
