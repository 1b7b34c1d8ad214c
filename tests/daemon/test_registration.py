"""Registration with the driver for pin=cuda: a stand-in for its refusals, the real one where there is a device."""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections.abc import Iterator

import pytest

from sharedmirror.errors import MemoryFault
from sharedmirrord import registration
from sharedmirrord.arena import Arena
from sharedmirrord.segment import Segment
from tests.daemon.shared_memory import MIB, PAGE, child, left_behind, own_name


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this test's own; at the end no segment, mapping or descriptor may be left."""
    with own_name() as own:
        yield own


def test_without_cuda_bindings_the_remedy_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MemoryFault, match=r"pip install 'sharedmirror\[cuda\]'"):
        Arena.create(name, 2 * MIB, pin="cuda")


class FakeDriver(types.ModuleType):
    """The driver's calls with a refusal at the n-th registration; it records what is registered."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self, refuse_at: int) -> None:
        super().__init__("driver")
        self.refuse_at, self.calls, self.contexts, self.pushed = refuse_at, 0, 0, 0
        self.registered: dict[int, tuple[int, int]] = {}

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return (0, ordinal)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:
        self.contexts += 1
        return (0, "context")

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
        self.contexts -= 1
        return (0,)

    def cuCtxPushCurrent(self, context: str) -> tuple[int]:
        self.pushed += 1
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, str]:
        self.pushed -= 1
        return (0, "context")

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[int]:
        assert self.pushed == 1
        self.calls += 1
        if self.calls == self.refuse_at:
            return (2,)
        self.registered[address] = (size_bytes, flags)
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        assert self.pushed == 1
        del self.registered[address]
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Stand in for the driver; a registration is refused when ``refuse_at`` is set."""
    fake = FakeDriver(refuse_at=0)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(registration, "CHUNK_BYTES", 4 * MIB)
    return fake


def test_cuda_registers_in_chunks_and_takes_it_back(name: str, driver: FakeDriver) -> None:
    with Arena.create(name, 10 * MIB, pin="cuda") as arena:
        assert arena.prefault() is True
        assert [size for size, flags in driver.registered.values()] == [4 * MIB, 4 * MIB, 2 * MIB]
        assert {flags for size, flags in driver.registered.values()} == {3}
        assert (arena.pin, arena.pinned_bytes, driver.contexts) == ("cuda", 10 * MIB, 1)
    assert (driver.registered, driver.contexts, driver.pushed) == ({}, 0, 0)


def test_a_refused_registration_is_rolled_back(name: str, driver: FakeDriver) -> None:
    driver.refuse_at = 3
    with Arena.create(name, 10 * MIB, pin="cuda") as arena:
        with pytest.raises(MemoryFault, match="cuMemHostRegister failed with 2"):
            arena.prefault()
        assert (driver.registered, arena.pinned_bytes) == ({}, 0)
        assert arena.prefault() is True
        assert arena.pinned_bytes == 10 * MIB
    assert (driver.registered, driver.contexts, driver.pushed) == ({}, 0, 0)


def test_a_failed_creation_lets_go_of_cuda(name: str, driver: FakeDriver) -> None:
    with Segment.create(name, PAGE), pytest.raises(MemoryFault, match="exists already"):
        Arena.create(name, 2 * MIB, pin="cuda")
    assert driver.contexts == 0


def _gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return os.path.exists("/dev/nvidiactl")


@pytest.mark.gpu
@pytest.mark.skipif(not _gpu(), reason="no CUDA device")
def test_the_real_driver_registers(name: str) -> None:
    result = child(
        f"""
        import json
        from cuda.bindings import driver
        from sharedmirrord import registration
        from sharedmirrord.arena import Arena
        registration.CHUNK_BYTES = 64 << 20
        with Arena.create({name!r}, 192 << 20, pin="cuda") as arena:
            done = arena.prefault()
            driver.cuCtxPushCurrent(arena._cuda._context)
            codes = [int(driver.cuMemHostGetDevicePointer(arena._address + at, 0)[0]) for at in (0, 191 << 20)]
            driver.cuCtxPopCurrent()
            print(json.dumps(dict(done=done, pin=arena.pin, pinned=arena.pinned_bytes, codes=codes)))
        """
    )
    assert (result["done"], result["pin"], result["pinned"]) == (True, "cuda", 192 * MIB)
    assert result["codes"] == [0, 0]


@pytest.mark.skipif(_gpu(), reason="there is a CUDA device")
def test_without_a_driver_the_remedy_is_named(name: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(MemoryFault, match="pin=mlock"):
        Arena.create(name, 2 * MIB, pin="cuda")
    assert left_behind() == []
