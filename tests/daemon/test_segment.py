"""Segments, on real shared memory: creating, mapping, unmapping, closing and unlinking."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sharedmirror.errors import ClosedError, MemoryFault, UsageError
from sharedmirrord.core.durable import CreateTable, DropTable, Put
from sharedmirrord.records import RecordStore, StoreHeader
from sharedmirrord.segment import Segment
from tests.daemon.shared_memory import (
    OLD_KERNEL,
    PAGE,
    Namespace,
    allocated,
    left_behind,
    mappings,
    mount_namespace,
    own_name,
)


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this test's own; at the end no segment, mapping or descriptor may be left."""
    with own_name() as own:
        yield own


@pytest.fixture(scope="module")
def namespace() -> Namespace:
    """Run a script where /dev/shm is a mount of its own with the given options."""
    return mount_namespace()


def test_a_segment_is_private_and_does_not_survive_exec(name: str) -> None:
    previous = os.umask(0o777)
    try:
        segment = Segment.create(name, 3 * PAGE)
    finally:
        os.umask(previous)
    with segment:
        assert os.stat(f"/dev/shm{name}").st_mode & 0o777 == 0o600
        assert not os.get_inheritable(segment.fd)
        assert segment.size_bytes == os.fstat(segment.fd).st_size == 3 * PAGE
        assert allocated(segment.fd) == 0
    assert segment.fd == -1


def test_mapped_pages_exist_and_are_shared(name: str) -> None:
    with Segment.create(name, 4 * PAGE) as segment:
        view = segment.map(PAGE, 2 * PAGE)
        assert len(view) == 2 * PAGE and not view.readonly
        assert allocated(segment.fd) == 2 * PAGE
        view[5:8] = b"abc"
        with Segment.open(name) as other:
            assert bytes(other.map(0, 4 * PAGE)[PAGE + 5 : PAGE + 8]) == b"abc"
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_mapping_again_keeps_what_was_written(name: str) -> None:
    with Segment.create(name, 2 * PAGE) as segment:
        segment.map(0, PAGE)[:3] = b"abc"
        assert bytes(segment.map(0, 2 * PAGE)[:3]) == b"abc"


def test_growing_keeps_old_views_and_never_shrinks(name: str) -> None:
    with Segment.create(name, PAGE) as segment:
        old = segment.map(0, PAGE)
        old[0] = 7
        segment.grow(8 * PAGE)
        segment.map(PAGE, 7 * PAGE)[-1] = 9
        assert old[0] == 7 and segment.size_bytes == os.fstat(segment.fd).st_size == 8 * PAGE
        with pytest.raises(UsageError, match="cannot shrink"):
            segment.grow(PAGE)
        assert segment.size_bytes == 8 * PAGE


def test_an_end_that_nobody_maps_is_given_back(name: str) -> None:
    with Segment.create(name, PAGE) as segment:
        first = segment.map(0, PAGE)
        segment.grow(8 * PAGE)
        segment.unmap(segment.map(PAGE, 7 * PAGE))
        assert allocated(segment.fd) == 8 * PAGE
        segment.shrink(PAGE)
        first[-1] = 7
        assert allocated(segment.fd) == segment.size_bytes == os.fstat(segment.fd).st_size == PAGE
        with pytest.raises(UsageError, match="cannot grow"):
            segment.shrink(2 * PAGE)


@pytest.mark.parametrize(("offset", "length"), [(1, PAGE), (-PAGE, PAGE), (0, 0), (0, 3 * PAGE), (2 * PAGE, PAGE)])
def test_a_range_outside_is_refused(name: str, offset: int, length: int) -> None:
    with Segment.create(name, 2 * PAGE) as segment, pytest.raises(UsageError, match="cannot be mapped"):
        segment.map(offset, length)


def test_a_taken_name_is_refused_and_left_alone(name: str) -> None:
    with Segment.create(name, PAGE):
        with pytest.raises(MemoryFault, match=f"{name} exists already.*remove /dev/shm{name}"):
            Segment.create(name, PAGE)
        assert os.stat(f"/dev/shm{name}").st_size == PAGE


@pytest.mark.parametrize(
    "bad", ["sharedmirror-x", "/other", "/sharedmirror-a/b", "/sharedmirror-" + "x" * 250, "/sharedmirror-\0"]
)
def test_a_bad_name_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="must begin with /sharedmirror-"):
        Segment.create(bad, PAGE)
    with pytest.raises(UsageError, match="must begin with /sharedmirror-"):
        Segment.open(bad)


def test_a_creation_that_fails_half_way_leaves_nothing(name: str) -> None:
    with pytest.raises(MemoryFault, match="cannot be made .* long|is full: .* asked for"):
        Segment.create(name, 1 << 63)
    assert left_behind() == []
    with pytest.raises(UsageError, match="cannot shrink to -1"):
        Segment.create(name, -1)
    assert left_behind() == []


def test_opening_what_is_not_there(name: str) -> None:
    with pytest.raises(MemoryFault, match="cannot be opened"):
        Segment.open(name)


def test_a_strangers_segment_is_not_opened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create(name, PAGE):
        uid = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: uid + 1)
            with pytest.raises(MemoryFault, match=f"belongs to uid {uid}, this is uid {uid + 1}"):
                Segment.open(name)


def test_unlink_spares_a_successor_of_the_same_name(name: str) -> None:
    with Segment.create(name, PAGE) as old:
        os.unlink(f"/dev/shm{name}")
        with Segment.create(name, 2 * PAGE):
            old.unlink()
            assert os.stat(f"/dev/shm{name}").st_size == 2 * PAGE


def test_keep_decides_what_the_end_of_with_leaves(name: str) -> None:
    with Segment.create(name, PAGE) as segment:
        segment.keep = True
    with Segment.open(name) as found:
        assert found.size_bytes == PAGE
    assert os.path.exists(f"/dev/shm{name}")
    found = Segment.open(name)
    found.unlink()
    found.unlink()
    found.close()
    found.close()


def test_a_slice_that_is_still_held_stays_valid_memory(name: str) -> None:
    segment = Segment.create(name, PAGE)
    part = segment.map(0, PAGE)[:10]
    part[0] = 5
    segment.unlink()
    segment.close()
    assert part[0] == 5
    del part


def test_a_closed_segment_refuses(name: str) -> None:
    with Segment.create(name, PAGE) as segment:
        segment.close()
        with pytest.raises(ClosedError, match="is closed"):
            segment.map(0, PAGE)
        with pytest.raises(ClosedError, match="is closed"):
            segment.grow(2 * PAGE)


def test_unmap_gives_back_the_mapping_and_keeps_the_pages(name: str) -> None:
    with Segment.create(name, 4 * PAGE) as segment:
        first, second, again = segment.map(0, PAGE), segment.map(2 * PAGE, PAGE), segment.map(0, PAGE)
        first[:3] = second[:3] = b"abc"
        descriptors = len(os.listdir("/proc/self/fd"))
        assert mappings() == 3
        segment.unmap(first)
        assert mappings() == 2
        assert len(os.listdir("/proc/self/fd")) == descriptors - 1
        with pytest.raises(ValueError, match="released"):
            first[0]
        assert bytes(second[:3]) == bytes(again[:3]) == b"abc"
        assert allocated(segment.fd) == 2 * PAGE
        assert bytes(segment.map(0, PAGE)[:3]) == b"abc"


def test_only_a_view_that_is_mapped_can_be_unmapped(name: str) -> None:
    with Segment.create(name, 2 * PAGE) as segment, Segment.open(name) as other:
        view, others = segment.map(0, PAGE), other.map(0, PAGE)
        for foreign in (others, view[:], view.cast("Q"), memoryview(b"abc")):
            with pytest.raises(UsageError, match=f"cannot be unmapped.*{name}"):
                segment.unmap(foreign)
        assert mappings() == 2
        segment.unmap(view)
        with pytest.raises(UsageError, match="cannot be unmapped"):
            segment.unmap(view)
        others[0] = 1


def test_unmap_spares_a_slice_that_is_still_held(name: str) -> None:
    with Segment.create(name, PAGE) as segment:
        view = segment.map(0, PAGE)
        part = view[:10]
        segment.unmap(view)
        part[0] = 5
        assert mappings() == 1 and os.pread(segment.fd, 1, 0) == b"\x05"
        del part
        assert mappings() == 0


def test_unmap_after_close_has_nothing_to_do(name: str) -> None:
    with Segment.create(name, PAGE) as segment:
        view = segment.map(0, PAGE)
        segment.close()
        segment.unmap(view)
        assert mappings() == 0


def test_a_record_store_gives_back_the_mappings_of_what_it_drops(name: str) -> None:
    header = StoreHeader(bytes(16), "boot", 0, "/socket", 1, ())
    with Segment.create(name, PAGE) as segment:
        with RecordStore.create(segment, header) as store:
            had = mappings()
            for pool in range(5):
                store.commit([CreateTable(pool, 1000)])
                assert mappings() == had + 1
                store.commit([DropTable(pool)])
                assert mappings() == had
            # Outgrown journal areas go too: there are always two.
            size_bytes = segment.size_bytes
            for length in (2 << 20, 3 << 20, 5 << 20):
                store.commit([Put("big", 1, bytes(length))])
            assert segment.size_bytes > size_bytes
            assert mappings() == had
        assert mappings() == 0


def test_cleaning_up_never_hides_the_blocks_exception(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise OSError("unlink broke")

    segment = Segment.create(name, PAGE)
    remove = segment.unlink
    monkeypatch.setattr(segment, "unlink", broken)
    with pytest.raises(KeyError, match="mine"), segment:
        raise KeyError("mine")
    assert segment.fd == -1
    assert "unlink broke" in caplog.text
    remove()
    segment = Segment.create(name, PAGE)
    remove = segment.unlink
    monkeypatch.setattr(segment, "unlink", broken)
    with pytest.raises(OSError, match="unlink broke"), segment:
        pass
    assert segment.fd == -1
    remove()


@pytest.mark.parametrize("old_kernel", ["", OLD_KERNEL])
def test_a_segment_on_a_full_mount_is_an_error(namespace: Namespace, old_kernel: str) -> None:
    result = namespace(
        "size=4m",
        f"""
        import json, os
        from sharedmirror.errors import MemoryFault
        from sharedmirrord.segment import Segment
        {old_kernel}
        with Segment.create("/sharedmirror-s", 2 << 20) as segment:
            first = segment.map(0, 2 << 20)
            told = []
            for work in (lambda: segment.grow(8 << 20), lambda: segment.map(2 << 20, 2 << 20)):
                try:
                    work()
                except MemoryFault as error:
                    first[-1] = 1
                    told.append(error.message)
                if segment.size_bytes == 2 << 20:
                    segment.grow(4 << 20)
                    with open("/dev/shm/other", "wb") as other:
                        other.write(bytes(1 << 20))
            print(json.dumps(dict(told=told)))
            os.unlink("/dev/shm/other")
        assert os.listdir("/dev/shm") == []
        """,
    )
    grown, mapped = result["told"]
    assert grown.startswith(
        "/dev/shm is full: 6.00 MiB (6291456 bytes) asked for /sharedmirror-s, 0 bytes got, 2.00 MiB"
    )
    assert mapped.startswith("/dev/shm is full: 2.00 MiB (2097152 bytes) asked for /sharedmirror-s")
