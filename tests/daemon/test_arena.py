"""The arena, on real shared memory: prefault, pins, huge pages and adoption."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharedmirror.errors import ClosedError, MemoryFault, UsageError
from sharedmirrord import arena as arena_module
from sharedmirrord import memory, syscalls
from sharedmirrord.arena import Arena
from sharedmirrord.core.regions import divide
from tests.daemon.shared_memory import (
    MIB,
    OLD_KERNEL,
    Namespace,
    allocated,
    child,
    left_behind,
    mappings,
    mount_namespace,
    own_name,
    run_and_kill,
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


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("size_mib", [2, 8, 22])
def test_prefault_gives_every_page(
    name: str, monkeypatch: pytest.MonkeyPatch, threads: int | None, size_mib: int
) -> None:
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 4 * MIB)
    seen: list[int] = []
    with Arena.create(name, size_mib * MIB, pin="none", threads=threads) as arena:
        assert (arena.bytes_ready, arena.pinned_bytes, allocated(arena.fd)) == (0, 0, 0)
        assert arena.prefault(seen.append) is True
        assert arena.bytes_ready == arena.size_bytes == allocated(arena.fd) == size_mib * MIB
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
        assert arena.bytes_ready == allocated(arena.fd) == 2 * MIB
        assert arena.prefault() is False
        assert arena.bytes_ready == 2 * MIB
        arena.stop.clear()
        assert arena.prefault() is True
        assert arena.bytes_ready == allocated(arena.fd) == 64 * MIB


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
    assert mappings() == 1  # the prefault still works on it
    go_on.set()
    worker.join(30)
    closer.join(30)
    assert results == [False]
    assert mappings() == 0
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
        assert mappings() == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(arena_module, "_bind", broken)
    with pytest.raises(KeyboardInterrupt):
        Arena.create(name, 2 * MIB)
    assert mappings() == 0 and left_behind() == []


def test_more_than_is_free_is_refused_before_anything_is_made(name: str) -> None:
    free = memory.shm_free()
    if free is None:
        pytest.skip("/dev/shm has no limit here")
    size_bytes = (free // (2 * MIB) + 512) * 2 * MIB
    with pytest.raises(MemoryFault, match=rf"/dev/shm is full: .*{size_bytes} bytes.*remount,size="):
        Arena.create(name, size_bytes)
    assert left_behind() == []


def test_an_old_kernel_allocates_and_touches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = syscalls.madvise
    monkeypatch.setattr(
        syscalls,
        "madvise",
        lambda address, length, advice: errno.EINVAL if advice == 23 else real(address, length, advice),
    )
    with Arena.create(name, 4 * MIB, pin="none") as arena:
        os.pwrite(arena.fd, b"kept", 3 * MIB)
        assert arena.prefault() is True
        assert allocated(arena.fd) == 4 * MIB
        assert os.pread(arena.fd, 4, 3 * MIB) == b"kept"
        with open("/proc/self/smaps") as file:
            text = file.read()
        resident = next(line for line in text[text.index(name) :].splitlines() if line.startswith("Rss:"))
        assert int(resident.split()[1]) == 4 * 1024


def test_pages_can_be_bound_to_a_node(name: str) -> None:
    nodes = memory.memory_nodes()
    if not nodes or not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("this kernel has no NUMA")
    with Arena.create(name, 2 * MIB, pin="none") as arena:
        error = syscalls.prefer(arena._address, arena.size_bytes, nodes[-1])
        if error == errno.EPERM:
            pytest.skip("mbind is not permitted here")
        assert error == 0
        arena.prefault()
        with open("/proc/self/numa_maps") as file:
            assert f"prefer:{nodes[-1]}" in next(line for line in file if name in line)


def test_pages_lie_on_the_node_of_their_part(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if len(memory.memory_nodes()) < 2 or not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("needs a machine with two NUMA nodes")
    with Arena.create(name, 64 * MIB, pin="none") as arena:
        if "mbind_refused" in caplog.text:
            pytest.skip("mbind is not permitted here")
        arena.prefault()
        with open("/proc/self/numa_maps") as file:
            lines = [line.split() for line in file if name in line]
        for node, start, _ in divide(arena.size_bytes, memory.memory_nodes()):
            (line,) = [line for line in lines if int(line[0], 16) == arena._address + start]
            pages = {word.partition("=")[0]: int(word.partition("=")[2]) for word in line if re.match(r"N\d+=", word)}
            # A full node gives what it has; the rest may come from others.
            assert line[1] == f"prefer:{node}" and max(pages, key=lambda at: pages[at]) == f"N{node}"


Binding = tuple[int, int, int]
"""Node, offset in the arena, bytes."""


def fake_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: str, refused: tuple[int, ...] = ()
) -> list[Binding]:
    """Have the machine's NUMA nodes be ``has_memory``, and return where calls to bind memory are noted.

    The first call is for the arena's begin.
    """
    listed = tmp_path / "devices/system/node/has_memory"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"{has_memory}\n")
    calls: list[Binding] = []
    begin: list[int] = []

    def prefer(address: int, size_bytes: int, node: int) -> int:
        begin.append(address)
        calls.append((node, address - begin[0], size_bytes))
        return errno.EPERM if node in refused else 0

    real = memory.memory_nodes
    monkeypatch.setattr(memory, "memory_nodes", lambda: real(sys=str(tmp_path)))
    monkeypatch.setattr(syscalls, "prefer", prefer)
    return calls


@pytest.mark.parametrize("refused", [(), (1,), (0, 1)])
def test_each_node_has_its_part_and_a_refusal_is_a_warning(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: tuple[int, ...],
) -> None:
    calls = fake_nodes(tmp_path, monkeypatch, "0-1", refused)
    with Arena.create(name, 10 * MIB, pin="none") as arena:
        assert allocated(arena.fd) == 0  # before any page is there
        assert calls == [(0, 0, 4 * MIB), (1, 4 * MIB, 6 * MIB)]
        assert [(node, end - start) for node, start, end in divide(10 * MIB, [0, 1])] == [(0, 4 * MIB), (1, 6 * MIB)]
        assert arena.prefault() is True
    if refused:
        assert f"mbind_refused nodes={list(refused)} errno=EPERM" in caplog.text
    else:
        assert "mbind_refused" not in caplog.text


def test_the_parts_of_all_nodes_are_filled_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nodes(tmp_path, monkeypatch, "0-1")
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 2 * MIB)
    order: list[int] = []
    populate = syscalls.populate

    def note(fd: int, address: int, offset: int, size_bytes: int) -> None:
        order.append(offset // MIB)
        populate(fd, address, offset, size_bytes)

    monkeypatch.setattr(syscalls, "populate", note)
    with Arena.create(name, 12 * MIB, pin="none", threads=1) as arena:
        assert arena.prefault() is True
        assert arena.bytes_ready == arena.size_bytes
    assert order == [0, 6, 2, 8, 4, 10]


@pytest.mark.parametrize(("has_memory", "size_mib"), [("0", 8), ("", 8), ("0-1", 2)])
def test_one_node_or_one_piece_is_not_divided(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: str, size_mib: int
) -> None:
    calls = fake_nodes(tmp_path, monkeypatch, has_memory)
    with Arena.create(name, size_mib * MIB, pin="none"):
        assert calls == []


def test_who_adopts_an_arena_binds_the_same_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_nodes(tmp_path, monkeypatch, "0,2-3")
    with Arena.create(name, 14 * MIB, pin="none"):
        first = list(calls)
        calls.clear()
        with Arena.adopt(name, 14 * MIB, pin="none"):
            pass
    assert [node for node, _, _ in first] == [0, 2, 3]
    assert [(node, size) for node, _, size in calls] == [(node, size) for node, _, size in first]


def test_cleaning_up_never_hides_the_blocks_exception(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise OSError("unlink broke")

    arena = Arena.create(name, 2 * MIB)
    remove = arena.unlink
    monkeypatch.setattr(arena, "unlink", broken)
    with pytest.raises(KeyError, match="mine"), arena:
        raise KeyError("mine")
    assert arena.fd == -1
    assert "unlink broke" in caplog.text
    remove()
    arena = Arena.create(name, 2 * MIB)
    remove = arena.unlink
    monkeypatch.setattr(arena, "unlink", broken)
    with pytest.raises(OSError, match="unlink broke"), arena:
        pass
    assert arena.fd == -1
    remove()


# --- an arena that another process left

LEAVE = """
    import os
    from sharedmirrord.arena import Arena
    arena = Arena.create({name!r}, 4 << 20, pin="none")
    arena.prefault()
    os.pwrite(arena.fd, b"left", 3 << 20)
"""


@pytest.fixture
def left(name: str) -> Iterator[str]:
    """The name of an arena of 4 MiB whose process was killed."""
    run_and_kill(LEAVE.format(name=name))
    yield name
    os.unlink(f"/dev/shm{name}")


def test_adopting_takes_over_what_a_killed_process_left(left: str) -> None:
    for _ in range(2):  # adopting keeps the name, so it can be adopted again
        with Arena.adopt(left, 4 * MIB, pin="none") as arena:
            assert (arena.name, arena.size_bytes, arena.bytes_ready, arena.keep) == (left, 4 * MIB, 0, True)
            assert allocated(arena.fd) == 4 * MIB
            assert arena.prefault() is True
            assert arena.bytes_ready == allocated(arena.fd) == 4 * MIB
            assert os.pread(arena.fd, 4, 3 * MIB) == ctypes.string_at(arena._address + 3 * MIB, 4) == b"left"
        assert arena.fd == -1
        assert mappings() == 0
        assert os.stat(f"/dev/shm{left}").st_size == 4 * MIB


def test_an_adopted_arena_goes_when_it_is_not_to_be_kept(name: str) -> None:
    run_and_kill(LEAVE.format(name=name))
    with Arena.adopt(name, 4 * MIB, pin="none") as arena:
        arena.keep = False
    assert left_behind() == []


@pytest.mark.parametrize("size_mib", [2, 6])
def test_an_arena_of_another_size_is_not_adopted(left: str, size_mib: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryFault, match=f"{left} has {4 * MIB} bytes, its records say {size_mib * MIB}"):
        Arena.adopt(left, size_mib * MIB)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() == 0
    with open(f"/dev/shm{left}", "rb") as file:
        assert os.pread(file.fileno(), 4, 3 * MIB) == b"left"


def test_an_arena_that_is_gone_is_not_adopted(name: str) -> None:
    with pytest.raises(MemoryFault, match=f"{name} cannot be opened"):
        Arena.adopt(name, 4 * MIB)
    assert left_behind() == []


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


@pytest.mark.parametrize("limit_mib", [0, 5])
def test_a_refused_mlock_is_a_warning_with_the_remedy(name: str, limit_mib: int) -> None:
    result = child(
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
    assert result["pinned"] == 0
    assert result["stderr"].count("mlock_refused") == 1
    assert "LimitMEMLOCK=infinity" in result["stderr"] and "ulimit -l unlimited" in result["stderr"]


# --- huge pages and a full mount, in a mount namespace


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


@pytest.mark.parametrize("old_kernel", ["", OLD_KERNEL])
def test_a_mount_that_fills_up_is_an_error_with_numbers(namespace: Namespace, old_kernel: str) -> None:
    result = namespace("size=20m,huge=never", FULL_ARENA.format(old_kernel=old_kernel))
    assert result["message"].startswith("/dev/shm is full: 16.00 MiB (16777216 bytes) asked for /sharedmirror-a, ")
    assert "free; run `mount -o remount,size=" in result["message"] and "--shm-size=" in result["message"]
    assert 8 * MIB <= result["got"] <= 12 * MIB
    assert result["ready"] >= result["got"]


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
