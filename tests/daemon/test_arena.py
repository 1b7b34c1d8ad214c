"""Segments and the arena, on real shared memory.

A full /dev/shm, huge pages and a refused mlock are had in child processes, which have a mount
namespace or a uid of their own.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import json
import logging
import os
import resource
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sharedmirror.errors import ClosedError, MemoryFault, UsageError
from sharedmirrord import arena as arena_module
from sharedmirrord import memory
from sharedmirrord.arena import Arena, Segment

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
_numbers = itertools.count()


def _left_behind() -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"sharedmirror-test-{os.getpid()}-"))


def _mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(f"sharedmirror-test-{os.getpid()}-" in line for line in file)


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this test's own; at the end no segment, mapping or descriptor may be left."""
    descriptors = len(os.listdir("/proc/self/fd"))
    yield f"/sharedmirror-test-{os.getpid()}-{next(_numbers)}"
    gc.collect()
    left = _left_behind()
    for file in left:
        os.unlink(f"/dev/shm/{file}")
    assert left == []
    assert _mappings() == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


# --- segments


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
        assert _allocated(segment.fd) == 0
    assert segment.fd == -1


def test_mapped_pages_exist_and_are_shared(name: str) -> None:
    with Segment.create(name, 4 * PAGE) as segment:
        view = segment.map(PAGE, 2 * PAGE)
        assert len(view) == 2 * PAGE and not view.readonly
        assert _allocated(segment.fd) == 2 * PAGE
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
    with pytest.raises(MemoryFault, match="cannot be made .* long"):
        Segment.create(name, 1 << 63)
    assert _left_behind() == []
    with pytest.raises(UsageError, match="cannot shrink to -1"):
        Segment.create(name, -1)
    assert _left_behind() == []


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


@pytest.mark.parametrize("make", [lambda name: Segment.create(name, PAGE), lambda name: Arena.create(name, 2 * MIB)])
def test_cleaning_up_never_hides_the_blocks_exception(
    name: str, make: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise OSError("unlink broke")

    owner = make(name)
    remove = owner.unlink
    monkeypatch.setattr(owner, "unlink", broken)
    with pytest.raises(KeyError, match="mine"), owner:
        raise KeyError("mine")
    assert owner.fd == -1
    assert "unlink broke" in caplog.text
    remove()
    owner = make(name)
    remove = owner.unlink
    monkeypatch.setattr(owner, "unlink", broken)
    with pytest.raises(OSError, match="unlink broke"), owner:
        pass
    assert owner.fd == -1
    remove()


# --- the arena


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("size_mib", [2, 8, 22])
def test_prefault_gives_every_page(
    name: str, monkeypatch: pytest.MonkeyPatch, threads: int | None, size_mib: int
) -> None:
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 4 * MIB)
    seen: list[int] = []
    with Arena.create(name, size_mib * MIB, pin="none", threads=threads) as arena:
        assert (arena.bytes_ready, arena.pinned_bytes, _allocated(arena.fd)) == (0, 0, 0)
        assert arena.prefault(seen.append) is True
        assert arena.bytes_ready == arena.size_bytes == _allocated(arena.fd) == size_mib * MIB
        assert seen == sorted(seen) and seen[-1] == arena.size_bytes
        assert len(seen) == -(-size_mib // 4)
        assert (arena.pin, arena.pinned_bytes) == ("none", 0)
        assert arena.prefault() is True
        assert arena.bytes_ready == arena.size_bytes
        assert arena.name == name
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefault")]


def test_prefault_keeps_what_is_there(name: str) -> None:
    with Arena.create(name, 4 * MIB, pin="none") as arena:
        os.pwrite(arena.fd, b"kept", 3 * MIB)
        arena.prefault()
        assert os.pread(arena.fd, 4, 3 * MIB) == b"kept"


def test_the_mapping_is_aligned_and_out_of_core_files(name: str) -> None:
    with Arena.create(name, 6 * MIB, pin="none") as arena:
        with open("/proc/self/smaps") as file:
            blocks = file.read().split("VmFlags:")
        block = next(number for number, text in enumerate(blocks) if name in text)
        low, _, high = next(line for line in blocks[block].splitlines() if name in line).split()[0].partition("-")
        assert int(low, 16) % (2 * MIB) == 0
        assert int(high, 16) - int(low, 16) == arena.size_bytes
        assert "dd" in blocks[block + 1].splitlines()[0].split()


def test_stop_ends_a_prefault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 2 * MIB)
    with Arena.create(name, 64 * MIB, pin="none") as arena:
        assert arena.prefault(lambda ready: arena.stop.set()) is False
        assert arena.bytes_ready == _allocated(arena.fd) == 2 * MIB
        assert arena.prefault() is False
        assert arena.bytes_ready == 2 * MIB
        arena.stop.clear()
        assert arena.prefault() is True
        assert arena.bytes_ready == _allocated(arena.fd) == 64 * MIB


def test_close_waits_for_a_prefault_in_a_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 2 * MIB)
    arena = Arena.create(name, 64 * MIB, pin="none")
    started, go_on = threading.Event(), threading.Event()
    results: list[bool] = []

    def progress(ready: int) -> None:
        started.set()
        assert go_on.wait(30)

    worker = threading.Thread(target=lambda: results.append(arena.prefault(progress)))
    worker.start()
    assert started.wait(30)
    closer = threading.Thread(target=arena.close)
    closer.start()
    assert arena.stop.wait(30)
    assert _mappings() == 1  # the prefault still works on it
    go_on.set()
    worker.join(30)
    closer.join(30)
    assert results == [False]
    assert _mappings() == 0
    arena.unlink()
    arena.close()
    with pytest.raises(ClosedError, match="is closed"):
        arena.prefault()


def test_an_exception_of_progress_comes_out_and_ends_the_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 2 * MIB)

    def progress(ready: int) -> None:
        raise KeyError("mine")

    with Arena.create(name, 64 * MIB, pin="none") as arena:
        with pytest.raises(KeyError, match="mine"):
            arena.prefault(progress)
        assert arena.bytes_ready < arena.size_bytes
        assert arena.prefault() is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size_bytes": 0}, "positive multiple of 2097152"),
        ({"size_bytes": 3 * MIB}, "positive multiple of 2097152"),
        ({"huge_pages": "maybe"}, "huge_pages='maybe'"),
        ({"pin": "glue"}, "pin='glue'"),
        ({"threads": 0}, "threads=0"),
        ({"name": "/wrong"}, "must begin with"),
    ],
)
def test_bad_arguments(name: str, changes: dict[str, Any], why: str) -> None:
    arguments: dict[str, Any] = {"name": name, "size_bytes": 2 * MIB, **changes}
    with pytest.raises(UsageError, match=why):
        Arena.create(**arguments)


def test_a_creation_that_fails_after_the_mapping_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(address: int, size_bytes: int) -> None:
        assert _mappings() == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(arena_module, "_spread", broken)
    with pytest.raises(KeyboardInterrupt):
        Arena.create(name, 2 * MIB)
    assert _mappings() == 0 and _left_behind() == []


def test_more_than_is_free_is_refused_before_anything_is_made(name: str) -> None:
    free = memory.shm_free()
    if free is None:
        pytest.skip("/dev/shm has no limit here")
    size_bytes = (free // (2 * MIB) + 512) * 2 * MIB
    with pytest.raises(MemoryFault, match=rf"/dev/shm is full: .*{size_bytes} bytes.*remount,size="):
        Arena.create(name, size_bytes)
    assert _left_behind() == []


def test_an_old_kernel_allocates_and_touches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = arena_module._madvise
    monkeypatch.setattr(
        arena_module,
        "_madvise",
        lambda address, length, advice: errno.EINVAL if advice == 23 else real(address, length, advice),
    )
    with Arena.create(name, 4 * MIB, pin="none") as arena:
        os.pwrite(arena.fd, b"kept", 3 * MIB)
        assert arena.prefault() is True
        assert _allocated(arena.fd) == 4 * MIB
        assert os.pread(arena.fd, 4, 3 * MIB) == b"kept"
        with open("/proc/self/smaps") as file:
            text = file.read()
        resident = next(line for line in text[text.index(name) :].splitlines() if line.startswith("Rss:"))
        assert int(resident.split()[1]) == 4 * 1024


def test_pages_can_be_interleaved(name: str) -> None:
    nodes = memory.memory_nodes()
    if not nodes or not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("this kernel has no NUMA")
    with Arena.create(name, 2 * MIB, pin="none") as arena:
        error = arena_module._interleave(arena._address, arena.size_bytes, nodes)
        if error == errno.EPERM:
            pytest.skip("mbind is not permitted here")
        assert error == 0
        arena.prefault()
        with open("/proc/self/numa_maps") as file:
            assert "interleave" in next(line for line in file if name in line)


@pytest.mark.parametrize("error", [0, errno.EPERM])
def test_several_nodes_are_interleaved_and_a_refusal_is_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    asked: list[list[int]] = []

    def interleave(address: int, size_bytes: int, nodes: list[int]) -> int:
        asked.append(nodes)
        return error

    monkeypatch.setattr(memory, "memory_nodes", lambda: [0, 1])
    monkeypatch.setattr(arena_module, "_interleave", interleave)
    with Arena.create(name, 2 * MIB, pin="none") as arena:
        assert arena.prefault() is True
    assert asked == [[0, 1]]
    assert ("mbind_refused" in caplog.text and "EPERM" in caplog.text) is bool(error)


# --- pins


def test_mlock_pins_every_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and 0 <= limit < 6 * MIB:
        pytest.skip("RLIMIT_MEMLOCK is too small here")
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 2 * MIB)
    with Arena.create(name, 6 * MIB) as arena:
        arena.prefault()
        assert (arena.pin, arena.pinned_bytes) == ("mlock", 6 * MIB)
        with open("/proc/self/smaps") as file:
            text = file.read()
        mine = [line for part in text.split("VmFlags") if name in part for line in part.splitlines()]
        locked = sum(int(line.split()[1]) for line in mine if line.startswith("Locked:"))
        assert locked == 6 * 1024
    assert arena.pinned_bytes == 0


def _child(script: str, *prefix: str) -> dict[str, Any]:
    """Run a script in a process of its own; what it prints last is its JSON result."""
    run = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    result["stderr"] = run.stderr
    return result


@pytest.mark.parametrize("limit_mib", [0, 5])
def test_a_refused_mlock_is_a_warning_with_the_remedy(name: str, limit_mib: int) -> None:
    result = _child(
        f"""
        import json, logging, os, resource
        from sharedmirrord import arena as module
        logging.basicConfig(format="%(message)s")
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit_mib} << 20, {limit_mib} << 20))
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        module.PIECE_BYTES = 2 << 20
        with module.Arena.create({name!r}, 16 << 20, threads=2) as arena:
            done = arena.prefault()
            print(json.dumps(dict(done=done, pin=arena.pin, pinned=arena.pinned_bytes, ready=arena.bytes_ready)))
        """
    )
    assert (result["done"], result["pin"], result["ready"]) == (True, "none", 16 * MIB)
    assert result["pinned"] == limit_mib // 2 * 2 * MIB
    assert result["stderr"].count("mlock_refused") == 1
    assert "LimitMEMLOCK=infinity" in result["stderr"] and "ulimit -l unlimited" in result["stderr"]


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
    monkeypatch.setattr(arena_module, "CUDA_CHUNK_BYTES", 4 * MIB)
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
    result = _child(
        f"""
        import json
        from cuda.bindings import driver
        from sharedmirrord import arena as module
        module.CUDA_CHUNK_BYTES = 64 << 20
        with module.Arena.create({name!r}, 192 << 20, pin="cuda") as arena:
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
    assert _left_behind() == []


# --- huge pages and a full mount, in a mount namespace


@pytest.fixture(scope="module")
def namespace() -> Callable[[str, str], dict[str, Any]]:
    """Return a function that runs a script where /dev/shm is a mount of its own with the given options."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    probe = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" -c pass'
    try:
        refused = subprocess.run([*unshare, "sh", "-c", probe, sys.executable], capture_output=True, text=True).stderr
    except FileNotFoundError:
        refused = "there is no unshare"
    if refused:
        pytest.skip(f"no mount namespace here: {refused.strip()}")

    def run(options: str, script: str) -> dict[str, Any]:
        return _child(script, *unshare, "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh")

    return run


Namespace = Callable[[str, str], dict[str, Any]]

FULL_ARENA = """
    import json, os
    from sharedmirror.errors import MemoryFault
    from sharedmirrord import arena as module
    module.PIECE_BYTES = 2 << 20
    {old_kernel}
    with module.Arena.create("/sharedmirror-a", 16 << 20, pin="none", threads=2) as arena:
        with open("/dev/shm/other", "wb") as other:
            other.write(bytes(8 << 20))
        try:
            arena.prefault()
        except MemoryFault as error:
            print(json.dumps(dict(message=error.message, got=error.ids["got_bytes"], ready=arena.bytes_ready)))
    os.unlink("/dev/shm/other")
    assert os.listdir("/dev/shm") == []
"""
OLD_KERNEL = "real = module._madvise; module._madvise = lambda a, n, what: 22 if what == 23 else real(a, n, what)"


@pytest.mark.parametrize("old_kernel", ["", OLD_KERNEL])
def test_a_mount_that_fills_up_is_an_error_with_numbers(namespace: Namespace, old_kernel: str) -> None:
    result = namespace("size=20m,huge=never", FULL_ARENA.format(old_kernel=old_kernel))
    assert result["message"].startswith("/dev/shm is full: 16.00 MiB (16777216 bytes) asked for /sharedmirror-a, ")
    assert "free; run `mount -o remount,size=" in result["message"] and "--shm-size=" in result["message"]
    assert 8 * MIB <= result["got"] <= 12 * MIB
    assert result["ready"] >= result["got"]


@pytest.mark.parametrize("old_kernel", ["", OLD_KERNEL])
def test_a_segment_on_a_full_mount_is_an_error(namespace: Namespace, old_kernel: str) -> None:
    result = namespace(
        "size=4m",
        f"""
        import json, os
        from sharedmirror.errors import MemoryFault
        from sharedmirrord import arena as module
        {old_kernel}
        with module.Segment.create("/sharedmirror-s", 2 << 20) as segment:
            first = segment.map(0, 2 << 20)
            segment.grow(8 << 20)
            try:
                segment.map(2 << 20, 6 << 20)
            except MemoryFault as error:
                first[-1] = 1
                print(json.dumps(dict(message=error.message)))
        assert os.listdir("/dev/shm") == []
        """,
    )
    assert result["message"].startswith("/dev/shm is full: 6.00 MiB (6291456 bytes) asked for /sharedmirror-s")


HUGE = """
    import json, logging, os
    from sharedmirrord import arena as module, memory
    logging.basicConfig(format="%(message)s", level="INFO")
    module.PIECE_BYTES = 4 << 20
    assert memory.huge_policy().mount == {mount!r}
    with module.Arena.create("/sharedmirror-h", 16 << 20, pin="none", huge_pages={asked!r}) as arena:
        arena.prefault()
        here = memory.huge_bytes(arena._address, arena.size_bytes)
        print(json.dumps(dict(share=arena.huge_page_share(), huge=here)))
"""


@pytest.mark.parametrize(
    ("mount", "asked", "huge_mib"),
    [
        ("advise", "auto", 16),
        ("advise", "always", 16),
        ("always", "auto", 16),
        ("always", "never", 0),
        ("never", "auto", 0),
    ],
)
def test_huge_pages_as_asked(namespace: Namespace, mount: str, asked: str, huge_mib: int) -> None:
    kernel = memory.huge_policy().kernel
    if kernel in ("absent", "deny", "force"):
        pytest.skip(f"the kernel's word on huge pages is {kernel}")
    result = namespace(f"size=64m,huge={mount}", HUGE.format(mount=mount, asked=asked))
    if huge_mib and not result["huge"]:
        pytest.skip("this machine's free memory has no huge page")
    assert result["share"] == pytest.approx(result["huge"] / (16 * MIB))
    assert result["huge"] <= huge_mib * MIB
    hint = "mount -o remount,huge=advise /dev/shm" in result["stderr"] and "7.9 s -> 1.0 s" in result["stderr"]
    assert hint is (mount == "never")


def test_huge_pages_always_is_an_error_where_the_mount_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "huge_policy", lambda: memory.HugePolicy("never", "never"))
    with pytest.raises(MemoryFault, match=r"mount -o remount,huge=advise /dev/shm.*7\.9 s -> 1\.0 s"):
        Arena.create(name, 2 * MIB, huge_pages="always")


@pytest.mark.parametrize(("measured", "outcome"), [(0, "error"), (2 * MIB, "warning"), (4 * MIB, "quiet")])
def test_huge_pages_are_verified(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measured: int, outcome: str
) -> None:
    monkeypatch.setattr(memory, "huge_policy", lambda: memory.HugePolicy("advise", "never"))
    monkeypatch.setattr(memory, "huge_bytes", lambda address, size_bytes: measured)
    with Arena.create(name, 4 * MIB, huge_pages="always", pin="none") as arena:
        if outcome == "error":
            with pytest.raises(MemoryFault, match="got none.*compact_memory"):
                arena.prefault()
        else:
            assert arena.prefault() is True
            assert arena.huge_page_share() == measured / (4 * MIB)
    assert ("few_huge_pages" in caplog.text) is (outcome == "warning")


def test_auto_hints_in_the_log(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory, "huge_policy", lambda: memory.HugePolicy("never", "never"))
    with caplog.at_level(logging.INFO), Arena.create(name, 2 * MIB, pin="none") as arena:
        arena.prefault()
        assert arena.huge_page_share() == 0.0
    assert "remount,huge=advise /dev/shm" in caplog.text
