from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sharedmirror import mapping
from sharedmirror import registration as registration_module
from sharedmirror.errors import MemoryFault
from sharedmirror.mapping import RegionMapping
from tests.client.test_host_registration import GPU0, FakeDriver

MIB2 = 2 << 20
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.fixture
def arena() -> Iterator[int]:
    fd = os.memfd_create("sharedmirror-test")
    os.ftruncate(fd, 4 * MIB2)
    yield fd
    os.close(fd)


def mapped_ranges() -> set[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if "memfd:sharedmirror-test" in line]
    return {(int(low, 16), int(high, 16)) for low, high in found}


def test_extents_are_contiguous_and_aligned(arena: int) -> None:
    region = RegionMapping([arena], [(0, 3 * MIB2, MIB2), (0, 0, 2 * MIB2)])
    assert region.address % MIB2 == 0
    assert region.bytes.shape == (3 * MIB2,)
    region.bytes[0], region.bytes[MIB2], region.bytes[-1] = 1, 2, 3
    assert os.pread(arena, 1, 3 * MIB2) == b"\x01"
    assert os.pread(arena, 1, 0) == b"\x02"
    assert os.pread(arena, 1, 2 * MIB2 - 1) == b"\x03"
    os.pwrite(arena, b"\x07", 5)
    assert region.bytes[MIB2 + 5] == 7
    assert region.release()
    assert mapped_ranges() == set()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex128, torch.bool])
def test_views_keep_the_mapping_alive(arena: int, dtype: torch.dtype) -> None:
    gone: list[int] = []
    region = RegionMapping([arena], [(0, 0, MIB2)], lambda: gone.append(os.getpid()))
    view = region.bytes.view(dtype)[3:5]
    array = region.bytes[7:9].numpy()
    assert not region.release()
    with pytest.raises(MemoryFault, match="released"):
        _ = region.bytes
    os.pwrite(arena, b"\x09", 7)
    assert array[0] == 9
    del view
    gc.collect()
    assert gone == []
    assert len(mapped_ranges()) == 1
    del array
    assert gone == [os.getpid()]
    assert mapped_ranges() == set()
    assert region.release()


def test_a_region_grows_and_shrinks_in_place(arena: int) -> None:
    gone: list[int] = []
    region = RegionMapping([arena], [(0, 3 * MIB2, MIB2)], lambda: gone.append(1), size_bytes=3 * MIB2)
    address, view = region.address, region.bytes
    assert (region.backed_bytes, view.numel()) == (MIB2, 3 * MIB2)
    view[0] = 1
    assert not view[MIB2:].any(), "where there is no memory there are zeros"
    # The first part as two, and the rest in the midst of one: only what is new is mapped.
    region.extend([arena], [(0, 3 * MIB2, MIB2), (0, 0, 2 * MIB2)])
    view[MIB2], view[-1] = 2, 3
    assert (os.pread(arena, 1, 0), os.pread(arena, 1, 2 * MIB2 - 1)) == (b"\x02", b"\x03")
    region.cut(2 * MIB2)
    assert [int(view[at]) for at in (0, MIB2, -1)] == [1, 2, 0]
    region.cut(MIB2)
    region.cut(2 * MIB2)
    assert region.backed_bytes == MIB2 and len(mapped_ranges()) == 1
    region.extend([arena], [(0, 3 * MIB2, MIB2), (0, 2 * MIB2, MIB2)])
    view[MIB2] = 4
    assert os.pread(arena, 1, 2 * MIB2) == b"\x04"
    assert (region.address, region.bytes.data_ptr()) == (address, address)
    del view
    assert region.release() and gone == [1] and mapped_ranges() == set()


def test_the_end_of_a_region_that_nobody_maps_any_more_is_let_alone(arena: int) -> None:
    region = RegionMapping([arena], [(0, 0, 2 * MIB2)], size_bytes=3 * MIB2)
    assert region.release()
    # Something else may lie there by now.
    region.cut(MIB2)
    region.extend([arena], [(0, 0, 3 * MIB2)])
    assert mapped_ranges() == set()


def test_a_view_keeps_a_region_that_was_released_and_its_end_still_goes(arena: int) -> None:
    region = RegionMapping([arena], [(0, 0, 2 * MIB2)], size_bytes=2 * MIB2)
    view = region.bytes[MIB2 - 1 : MIB2 + 1]
    view[:] = 5
    assert not region.release()
    region.cut(MIB2)
    assert view.tolist() == [5, 0]
    del view
    assert mapped_ranges() == set()


def test_more_than_there_are_addresses_for_is_refused(arena: int) -> None:
    region = RegionMapping([arena], [(0, 0, MIB2)], size_bytes=2 * MIB2)
    with pytest.raises(MemoryFault, match=f"extents of {3 * MIB2} bytes and addresses for {2 * MIB2}"):
        region.extend([arena], [(0, 0, 3 * MIB2)])
    with pytest.raises(MemoryFault, match="arena 1; there are 1"):
        region.extend([arena], [(0, 0, MIB2), (1, 0, MIB2)])
    assert region.backed_bytes == MIB2
    region.release()


def test_what_grows_is_registered_and_what_goes_is_unregistered_first(
    arena: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(registration_module, "_load_driver", lambda: driver)
    region = RegionMapping([arena], [(0, 0, MIB2)], size_bytes=4 * MIB2)
    registration = region.register(GPU0, [MIB2, 2 * MIB2, 4 * MIB2])
    at = region.address
    assert registration.edges == (at + MIB2, at + 2 * MIB2)
    region.extend([arena], [(0, 0, 4 * MIB2)])
    assert driver.registered == {at: MIB2, at + MIB2: MIB2, at + 2 * MIB2: 2 * MIB2}
    region.cut(2 * MIB2)
    assert driver.registered == {at: MIB2, at + MIB2: MIB2}
    driver.fail_at["cuMemHostUnregister"] = 2
    with pytest.raises(MemoryFault, match="cuMemHostUnregister"):
        region.cut(MIB2)
    assert region.backed_bytes == 2 * MIB2 and mapped_ranges() == {(at, at + 2 * MIB2)}
    region.cut(MIB2)
    driver.fail_at["cuMemHostRegister"] = 5
    with pytest.raises(MemoryFault, match="cuMemHostRegister"):
        region.extend([arena], [(0, 0, 4 * MIB2)])
    assert region.backed_bytes == MIB2 and driver.registered == {at: MIB2}
    region.extend([arena], [(0, 0, 4 * MIB2)])
    assert registration.complete and len(driver.registered) == 3
    registration.close()
    assert driver.registered == {}
    region.release()


@pytest.mark.parametrize(
    ("extents", "named"),
    [
        ([], "no extents"),
        ([(1, 0, MIB2)], "arena 1; there are 1"),
        ([(0, 0, MIB2 + 4096)], "whole 2 MiB"),
        ([(0, 4096, MIB2)], "whole 2 MiB"),
        ([(0, -MIB2, MIB2)], "whole 2 MiB"),
        ([(0, 0, 0)], "whole 2 MiB"),
        ([(0, 0, MIB2), (0, 3 * MIB2, 2 * MIB2)], f"ends at {5 * MIB2}; arena 0 has {4 * MIB2}"),
    ],
)
def test_bad_extents(arena: int, extents: list[tuple[int, int, int]], named: str) -> None:
    with pytest.raises(MemoryFault, match=named):
        RegionMapping([arena], extents)
    assert mapped_ranges() == set()


def test_a_failed_mmap_leaves_nothing(arena: int, tmp_path: Path) -> None:
    other = tmp_path / "read-only"
    with open(other, "wb") as file:
        file.truncate(MIB2)
    fd = os.open(other, os.O_RDONLY)
    try:
        # The second extent fails after the first was mapped: a shared writable mapping needs a writable file.
        with pytest.raises(MemoryFault, match=r"mmap of 2097152 bytes failed: EACCES \(Permission denied\)") as caught:
            RegionMapping([arena, fd], [(0, 0, MIB2), (1, 0, MIB2)])
        assert caught.value.ids["errno"] == errno.EACCES
    finally:
        os.close(fd)
    assert mapped_ranges() == set()
    with pytest.raises(MemoryFault, match="Bad file descriptor"):
        RegionMapping([fd], [(0, 0, MIB2)])


@forks
def test_a_forked_child_inherits_and_reports_nothing(arena: int) -> None:
    gone: list[int] = []
    region = RegionMapping([arena], [(0, 0, MIB2)], lambda: gone.append(1))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            region.bytes[3] = 8
            region.release()
            code = 0 if gone == [] and mapped_ranges() == set() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert region.bytes[3] == 8
    region.release()
    assert gone == [1]


def test_memory_that_the_driver_keeps_stays_mapped(arena: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(cuMemHostUnregister=1)
    monkeypatch.setattr(registration_module, "_load_driver", lambda: driver)
    gone: list[int] = []
    region = RegionMapping([arena], [(0, 0, MIB2)], lambda: gone.append(1))
    registration = region.register(GPU0)
    region.release()
    assert gone == []
    assert len(mapped_ranges()) == 1
    registration.close()
    assert driver.registered == {}
    ((low, high),) = mapped_ranges()
    mapping._munmap(low, high - low)
