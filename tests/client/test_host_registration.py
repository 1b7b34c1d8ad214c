"""Registration with a fake driver: chunks in the background, refusals, MPS."""

from __future__ import annotations

import enum
import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from sharedmirror.attachment import Attachment
from sharedmirror.errors import MemoryFault, UsageError
from sharedmirror.registration import HostRegistration, device_node, refuse_mps
from tests.client.fake_channel import FakeDaemon

GPU0 = torch.device("cuda", 0)
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


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

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return self._code("cuDeviceGetPCIBusId"), b"0000:1B:0%d.0" % device + bytes(length - 12)

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
    registration.begin()
    registration.require(1250)
    assert registration.complete
    assert driver.registered == {1000: 100, 1100: 100, 1200: 50}
    assert registration.edges == (1100, 1200)
    registration.close()
    registration.close()
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_a_refused_first_chunk_leaves_nothing() -> None:
    driver = FakeDriver(cuMemHostRegister=1)
    with pytest.raises(MemoryFault, match="cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY; .*ulimit"):
        HostRegistration(1000, 250, GPU0, chunk_bytes=100, driver=driver)
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_a_chunk_refused_later_is_raised_to_who_needs_it() -> None:
    driver = FakeDriver(cuMemHostRegister=3)
    registration = HostRegistration(1000, 250, GPU0, chunk_bytes=100, driver=driver)
    registration.begin()
    registration.require(1200)
    with pytest.raises(MemoryFault, match="cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY"):
        registration.require(1201)
    registration.close()
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_closing_ends_the_wait_of_others() -> None:
    driver = FakeDriver()
    gate = threading.Event()
    register = driver.cuMemHostRegister

    def slow(address: int, length: int, flags: int) -> tuple[Any, ...]:
        if address != 1000:
            assert gate.wait(30)
        return register(address, length, flags)

    driver.cuMemHostRegister = slow  # type: ignore[method-assign]
    registration = HostRegistration(1000, 300, GPU0, chunk_bytes=100, driver=driver)
    registration.begin()
    assert not registration.complete
    faults: list[MemoryFault] = []

    def wait() -> None:
        try:
            registration.require(1300)
        except MemoryFault as fault:
            faults.append(fault)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=registration.close)
    closer.start()
    waiter.join(30)
    gate.set()
    closer.join(30)
    assert "given back" in faults[0].message
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_who_waits_for_what_is_given_back_is_told() -> None:
    driver = FakeDriver()
    registration = HostRegistration(1000, 300, GPU0, edges=[1100, 1200, 1300, 1400], driver=driver)
    registration.begin()
    registration.require(1300)
    registration.cut(1200)
    with pytest.raises(MemoryFault, match="given back"):
        registration.require(1201)
    registration.extend(1400)
    registration.require(1400)
    assert driver.registered == {1000: 100, 1100: 100, 1200: 100, 1300: 100}
    registration.close()
    registration.cut(1000)
    registration.extend(1500)
    assert (driver.registered, driver.pushed, driver.retained) == ({}, 0, 0)


def test_without_cuda_bindings_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MemoryFault, match=r"pip install 'sharedmirror\[cuda\]'"):
        HostRegistration(0, 100, GPU0)


def sysfs(root: Path, **nodes: object) -> str:
    """Make a /sys whose PCI devices, by ordinal, are on ``nodes``."""
    for ordinal, node in nodes.items():
        device = root / f"bus/pci/devices/0000:1b:0{ordinal[-1]}.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return str(root)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    sys = sysfs(tmp_path, gpu0=1, gpu1=0, gpu2=-1, gpu3="")
    nodes = [device_node(torch.device("cuda", ordinal), driver=FakeDriver(), sys=sys) for ordinal in range(5)]
    assert nodes == [1, 0, None, None, None]  # -1: the machine has none; then nonsense, then no file


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuDeviceGetPCIBusId"])
def test_no_node_where_the_driver_refuses(tmp_path: Path, call: str) -> None:
    assert device_node(GPU0, driver=FakeDriver(**{call: 1}), sys=sysfs(tmp_path, gpu0=1)) is None


def test_no_node_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert device_node(GPU0) is None


@pytest.mark.parametrize(("device", "said"), [("cuda:1", {"node": 3}), ("cpu", {})])
def test_a_rank_says_where_its_gpu_hangs(monkeypatch: pytest.MonkeyPatch, device: str, said: dict[str, int]) -> None:
    monkeypatch.setattr("sharedmirror.attachment.device_node", lambda gpu: {1: 3}[gpu.index])
    with closing(FakeDaemon()) as daemon:
        daemon.failures["attach"] = UsageError("enough")
        with pytest.raises(UsageError, match="enough"):
            Attachment(daemon.open, None, lambda push: None, {"rank": 0}, [0], torch.device(device))
        assert daemon.said("attach") == [{"rank": 0} | said]


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
