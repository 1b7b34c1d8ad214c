from __future__ import annotations

import enum
import errno
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sharedmirror import mapping
from sharedmirror.errors import MemoryFault
from sharedmirror.mapping import HostRegistration, RegionMapping, refuse_mps

MIB2 = 2 << 20
GPU0 = torch.device("cuda", 0)
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


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_UNKNOWN = 999


class FakeDriver:
    """Counts what is registered; ``fail_at`` names calls, by name and number, that fail."""

    def __init__(self, **fail_at: int) -> None:
        self.fail_at = fail_at
        self.seen: dict[str, int] = {}
        self.registered: dict[int, int] = {}
        self.pushed = self.retained = 0

    def _code(self, name: str) -> Code:
        self.seen[name] = self.seen.get(name, 0) + 1
        return Code.CUDA_ERROR_OUT_OF_MEMORY if self.fail_at.get(name) == self.seen[name] else Code.CUDA_SUCCESS

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self._code("cuDeviceGet"), ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.retained += 1
        return self._code("cuDevicePrimaryCtxRetain"), "context"

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.retained -= 1
        return (self._code("cuDevicePrimaryCtxRelease"),)

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.pushed += 1
        return (self._code("cuCtxPushCurrent"),)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        self.pushed -= 1
        return self._code("cuCtxPopCurrent"), "context"

    def cuMemHostRegister(self, address: int, length: int, flags: int) -> tuple[Any, ...]:
        assert self.pushed == 1
        assert flags == 3
        code = self._code("cuMemHostRegister")
        if not code:
            self.registered[address] = length
        return (code,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        assert self.pushed == 1
        code = self._code("cuMemHostUnregister")
        if not code:
            del self.registered[address]
        return (code,)


def test_registration_in_chunks() -> None:
    driver = FakeDriver()
    registration = HostRegistration(1000, 250, GPU0, chunk_bytes=100, driver=driver)
    assert driver.registered == {1000: 100, 1100: 100, 1200: 50}
    assert registration.edges == (1100, 1200)
    registration.close()
    registration.close()
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_a_failed_chunk_is_rolled_back() -> None:
    driver = FakeDriver(cuMemHostRegister=3)
    with pytest.raises(MemoryFault, match="cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY; .*ulimit"):
        HostRegistration(1000, 250, GPU0, chunk_bytes=100, driver=driver)
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_memory_that_the_driver_keeps_stays_mapped(arena: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(cuMemHostUnregister=1)
    monkeypatch.setattr(mapping, "_load_driver", lambda: driver)
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


def test_without_cuda_bindings_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MemoryFault, match=r"pip install 'sharedmirror\[cuda\]'"):
        HostRegistration(0, 100, GPU0)


def test_mps_is_refused_only_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    refuse_mps()
    os.mkfifo(tmp_path / "control")
    refuse_mps()  # a pipe that a dead control daemon left behind
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(MemoryFault, match="MPS is active .*does not prove"):
            refuse_mps()
    finally:
        os.close(reader)
    refuse_mps()


@forks
def test_a_fork_never_unregisters() -> None:
    driver = FakeDriver()
    registration = HostRegistration(0, 100, GPU0, driver=driver)
    pid = os.fork()
    if pid == 0:
        registration.close()
        os._exit(0 if driver.registered else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    registration.close()
