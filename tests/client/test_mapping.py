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
