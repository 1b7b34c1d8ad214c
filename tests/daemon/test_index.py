"""The key index: what a reader finds is what the page table knows, and nobody but the daemon can change it."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from collections.abc import Iterator

import pytest

from sharedmirror import index
from sharedmirror.errors import ProtocolError
from sharedmirror.index import BUCKET_WORD, IndexReader, IndexShape, bucket_of
from sharedmirrord.core.pages import PageTable
from sharedmirrord.index import IndexWriter, SharedIndex
from tests.daemon.table_problems import problems


@pytest.fixture(params=[1, 1 << 30], ids=["in step", "one by one"], autouse=True)
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one length are found in two ways; both are tried."""
    monkeypatch.setattr(index, "_MANY", request.param)


def written(table: PageTable) -> tuple[IndexWriter, IndexReader]:
    memory = bytearray(IndexShape(table.pages).size_bytes)
    writer = table.observer = IndexWriter(memory, table, 1)
    return writer, IndexReader(memory, table.pages)


def seal(table: PageTable, *keys: bytes, parent: bytes | None = None) -> list[int]:
    granted = table.grant(len(keys))
    assert granted is not None
    for page, key in zip(granted[0], keys, strict=True):
        table.seal([(page, key, parent)])
    return granted[0]


def same(table: PageTable, reader: IndexReader, keys: list[bytes]) -> None:
    found = reader.find(keys)
    assert found == [table.index.get(key, 0) for key in keys]
    for length in set(map(len, keys)):
        alike = [key for key in keys if len(key) == length]
        assert reader.find(alike) == [table.index.get(key, 0) for key in alike]
    pages = [page for page in found if page]
    assert reader.generations(pages) == [table.generations[page] for page in pages]


@pytest.mark.parametrize("seed", range(8))
def test_the_index_follows_the_table_through_anything(seed: int) -> None:
    rng = random.Random(seed)
    table = PageTable(rng.choice([2, 17, 64, 65]))
    # Of every length, some the beginning of another, some in one bucket.
    keys = [bytes([65 + i % 7]) * (i % 64 + 1) for i in range(200)]
    writer, reader = written(table)
    for step in range(400):
        roll = rng.random()
        if roll < 0.6:
            new = [key for key in rng.sample(keys, min(3, table.pages - 1)) if key not in table.index]
            if new:
                parent = rng.choice([None, *table.index])
                seal(table, *dict.fromkeys(new), parent=parent)
        elif roll < 0.9 and table.index:
            table.evict(rng.choice(list(table.index.values())))
        elif roll > 0.98:
            table.clear()
        elif table.sweeping:
            table.sweep(rng.randrange(1, 20))
        writer.flush()
        same(table, reader, keys)
        assert step < 0 or problems(table) == []


def test_keys_of_one_bucket_are_told_apart_and_unlinked_in_any_order() -> None:
    table = PageTable(9)
    writer, reader = written(table)
    mask = IndexShape(9).buckets - 1
    keys = [key for key in (b"%04d" % i for i in range(1000)) if bucket_of(key) & mask == 3][:8]
    strangers = [key for key in (b"%04d" % i for i in range(1000, 2000)) if bucket_of(key) & mask == 3][:8]
    for order in (keys, keys[::-1], keys[3:] + keys[:3]):
        seal(table, *keys)
        writer.flush()
        for key in order:
            same(table, reader, keys + strangers)
            table.evict(table.index[key])
        same(table, reader, keys)


def test_what_is_not_durable_yet_is_not_seen_and_what_is_let_go_is_gone_at_once() -> None:
    table = PageTable(5)
    writer, reader = written(table)
    (page,) = seal(table, b"a")
    assert reader.find([b"a"]) == [0], "a crash could still lose it"
    writer.flush()
    assert reader.find([b"a"]) == [page]
    table.evict(page)
    assert reader.find([b"a"]) == [0], "the next thing to be durable may be its end"
    # Sealed, and evicted before it was ever durable: it must not come up later.
    (page,) = seal(table, b"b")
    table.evict(page)
    writer.flush()
    assert reader.find([b"a", b"b"]) == [0, 0]
    seal(table, b"c")
    table.clear()
    writer.flush()
    assert reader.find([b"c"]) == [0]


@pytest.mark.parametrize("seed", range(4))
def test_an_index_built_in_slices_while_the_table_changes(seed: int) -> None:
    rng = random.Random(seed)
    table = PageTable(3000)
    keys = [b"key%04d" % i for i in range(4000)]
    seal(table, *keys[:2500])
    writer, reader = written(table)
    slices = 0
    for _ in writer.build():
        slices += 1
        for key in rng.sample(keys, 40):
            if key in table.index:
                table.evict(table.index[key])
            elif rng.random() < 0.8:
                seal(table, key)
        if seed == 3 and slices == 2:
            table.clear()
            seal(table, *keys[:100])
        if rng.random() < 0.5:
            writer.flush()
    writer.flush()
    assert slices >= 2
    same(table, reader, keys)


def test_torn_memory_gives_misses_and_stale_hits_but_no_error_and_no_hang() -> None:
    table = PageTable(64)
    writer, _ = written(table)
    memory = writer._memory
    keys = [b"k%02d" % i for i in range(63)]
    seal(table, *keys)
    writer.flush()
    clean = bytes(memory)
    shape = IndexShape(64)
    for seed in range(300):
        rng = random.Random(seed)
        memory[:] = clean
        for _ in range(rng.randrange(1, 40)):
            at = rng.randrange(4 * BUCKET_WORD, shape.size_bytes)
            memory[at] = rng.choice([0, 255, rng.randrange(256)])
        for key, page in zip(keys, IndexReader(memory, 64).find(keys), strict=True):
            assert page == 0 or bytes(memory).find(key) > 0 and page < 64
    # A circle of two records in every bucket.
    memory[:] = clean
    words = memoryview(memory).cast("I")
    for bucket in range(shape.buckets):
        words[BUCKET_WORD + bucket] = 2
    nexts = shape.records_at // 4 + 2
    words[nexts + 20], words[nexts + 40] = 3, 2
    assert IndexReader(memory, 64).find([b"nobody"]) == [0]


def test_memory_of_another_form_is_refused() -> None:
    table = PageTable(9)
    writer, _ = written(table)
    memory = writer._memory
    with pytest.raises(ProtocolError, match="the index of 10 pages has"):
        IndexReader(memory, 10)
    memory[8] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        IndexReader(memory, 9)
    with pytest.raises(ProtocolError):
        IndexReader(bytearray(IndexShape(9).size_bytes), 9)


# -- shared memory -------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[SharedIndex]:
    table = PageTable(9)
    index = SharedIndex(table, 1)
    seal(table, b"a")
    index.writer.flush()
    yield index
    index.close()


def test_a_reader_sees_but_can_neither_write_nor_resize(shared: SharedIndex) -> None:
    fd = shared.reader()
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            assert bytes(memory[:7]) == b"SMINDEX"
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0)
        with pytest.raises(OSError):
            os.write(fd, b"x")
        for size in (0, 1 << 20):
            with pytest.raises(OSError):
                os.ftruncate(fd, size)
        # Also for one that opens it again for writing, as its uid may.
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, 0)
            with pytest.raises(PermissionError):
                os.write(again, b"x")
            with pytest.raises(PermissionError):
                os.ftruncate(again, 0)
        finally:
            os.close(again)
    finally:
        os.close(fd)


def test_the_lock_says_whether_the_writer_lives(shared: SharedIndex) -> None:
    readers = [shared.reader(), shared.reader()]
    try:
        for fd in readers:
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        for fd in readers:
            os.close(fd)
