"""Sizes, limits and refusals; /proc and /sys are made by hand where a case needs them."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from sharedmirror.errors import MemoryFault, UsageError
from sharedmirrord import memory
from sharedmirrord.memory import Available, HugePolicy, Size

MIB, GIB = 1 << 20, 1 << 30


class Machine:
    """A made-up /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = str(root / "proc"), str(root / "sys")
        self._root = root

    def write(self, path: str, text: object) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, path: str, *, limit: object, used: int, cache: int = 0, high: object = "max") -> None:
        base = f"sys/fs/cgroup{path}"
        self.write(f"{base}/memory.max", limit)
        self.write(f"{base}/memory.high", high)
        self.write(f"{base}/memory.current", used)
        self.write(f"{base}/memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 7")

    def available(self) -> Available:
        return memory.available(proc=self.proc, sys=self.sys)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write("proc/meminfo", "MemTotal:  100 kB\nMemAvailable:   1048576 kB\nCached: 5 kB")
    return made


V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 * GIB),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1GB", 100_000_000),
        (" 2 TiB ", 2048 * GIB),
        ("3tb", 3 * 10**12),
        ("7kib", 7168),
        ("12345", 12345),
        ("8B", 8),
    ],
)
def test_absolute_sizes(text: str, size_bytes: int) -> None:
    assert memory.parse_size(text) == Size(text.strip(), size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("text", "share"), [("80%", Fraction(4, 5)), ("12.5 %", Fraction(1, 8)), ("100%", Fraction(1))]
)
def test_shares(text: str, share: Fraction) -> None:
    assert memory.parse_size(text).share == share
    assert memory.parse_size(text).size_bytes is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("64G", "ambiguous: write GiB or GB"),
        ("5m", "ambiguous: write MiB or MB"),
        ("", "is no size"),
        ("GiB", "is no size"),
        ("-1GiB", "is no size"),
        ("1e9", "is no size"),
        ("1,5GiB", "is no size"),
        ("64GiB extra", "is no size"),
        ("64 furlongs", "is no size"),
        ("9" * 5000, "is no size"),
        ("\N{ARABIC-INDIC DIGIT FIVE}GiB", "is no size"),
        ("0", "less than one byte"),
        ("0GiB", "less than one byte"),
        ("0%", "between 0% and 100%"),
        ("101%", "between 0% and 100%"),
    ],
)
def test_what_is_no_size(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        memory.parse_size(text)


def test_the_smallest_limit_binds() -> None:
    some = Available(cgroup_bytes=None, memory_bytes=5, shm_bytes=4)
    assert (some.smallest, some.smallest_name) == (4, "/dev/shm")
    assert Available(cgroup_bytes=3, memory_bytes=5, shm_bytes=4).smallest_name == "cgroup"
    assert Available(memory_bytes=5).smallest_name == "MemAvailable"
    assert some.limits == {"MemAvailable": 5, "/dev/shm": 4}


def test_without_any_limit_the_error_says_so() -> None:
    with pytest.raises(MemoryFault, match="no memory limit can be read"):
        memory.resolve(memory.parse_size("80%"), Available())


def test_resolve_rounds_down_to_2_mib() -> None:
    room = Available(memory_bytes=10 * MIB + 4096)
    assert memory.resolve(memory.parse_size("5MiB"), room) == 4 * MIB
    assert memory.resolve(memory.parse_size("100%"), room) == 10 * MIB
    assert memory.resolve(memory.parse_size("50%"), room) == 4 * MIB
    assert memory.resolve(memory.parse_size("10MiB"), room) == 10 * MIB


@pytest.mark.parametrize(
    ("room", "remedies"),
    [
        (
            Available(cgroup_bytes=GIB, memory_bytes=9 * GIB, cgroup_file="/sys/fs/cgroup/memory.max"),
            ["the limit is cgroup", "/sys/fs/cgroup/memory.max", "docker run --memory", "MemoryMax="],
        ),
        (Available(memory_bytes=GIB, shm_bytes=9 * GIB), ["the limit is MemAvailable", "ask for less"]),
        (
            Available(memory_bytes=9 * GIB, shm_bytes=GIB),
            ["the limit is /dev/shm", "mount -o remount,size=", "--shm-size="],
        ),
    ],
)
def test_too_much_is_refused_with_numbers_and_remedy(room: Available, remedies: list[str]) -> None:
    with pytest.raises(MemoryFault) as caught:
        memory.resolve(memory.parse_size("2GiB"), room)
    for text in ["2.00 GiB (2147483648 bytes) asked for", "1.00 GiB (1073741824 bytes) to be had", *remedies]:
        assert text in caught.value.message
    assert caught.value.ids["asked_bytes"] == 2 * GIB
    assert caught.value.ids["free_bytes"] == GIB


def test_the_remount_that_is_advised_is_large_enough() -> None:
    stats = os.statvfs("/dev/shm")
    total = stats.f_blocks * stats.f_frsize
    words = memory.shm_remedy(3 * MIB + 1)
    advised = int(words.split("size=")[1].split("M")[0]) * MIB
    assert total + 3 * MIB + 1 <= advised < total + 5 * MIB


def test_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match="less than the 2MiB"):
        memory.resolve(memory.parse_size("1MiB"), Available(memory_bytes=GIB))
    with pytest.raises(MemoryFault, match="1.00 MiB"):
        memory.resolve(memory.parse_size("100%"), Available(memory_bytes=MIB))


def test_this_machine_can_be_read() -> None:
    here = memory.available()
    assert {"MemAvailable", "/dev/shm"} <= set(here.limits)
    assert here.smallest == min(here.limits.values()) > 0


def test_no_cgroup_leaves_the_other_limits(machine: Machine) -> None:
    room = machine.available()
    assert room.cgroup_bytes is None
    assert room.memory_bytes == GIB


def test_a_missing_mount_names_the_remedy() -> None:
    with pytest.raises(MemoryFault, match=r"/nowhere cannot be used.*mount -t tmpfs tmpfs /nowhere"):
        memory.available(shm_dir="/nowhere")


def test_a_mount_without_a_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: unlimited)
    assert memory.shm_free() is None


def test_v2_takes_the_tightest_cgroup_on_the_way_up(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/system.slice/daemon.service")
    machine.write("proc/self/mountinfo", V2_MOUNT)
    machine.v2("/system.slice/daemon.service", limit=900 * MIB, used=100 * MIB)
    machine.v2("/system.slice", limit=1000 * MIB, used=500 * MIB, cache=200 * MIB)
    room = machine.available()
    assert room.cgroup_bytes == 700 * MIB  # 1000 - (500 - 200): cache that nobody uses is free
    assert room.cgroup_file.endswith("/sys/fs/cgroup/system.slice/memory.max")


def test_v2_high_is_a_limit_too_and_max_is_none(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a")
    machine.write("proc/self/mountinfo", V2_MOUNT)
    machine.v2("/a", limit="max", used=100 * MIB)
    assert machine.available().cgroup_bytes is None
    machine.v2("/a", limit="max", used=100 * MIB, high=300 * MIB)
    assert machine.available().cgroup_bytes == 200 * MIB
    assert machine.available().cgroup_file.endswith("memory.high")


def test_v2_in_a_container_the_root_has_the_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("proc/self/mountinfo", V2_MOUNT)
    machine.v2("", limit=512 * MIB, used=12 * MIB)
    assert machine.available().cgroup_bytes == 500 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../outside"])
def test_a_host_path_in_a_container_leads_to_its_own_root(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"0::{path}")
    machine.write("proc/self/mountinfo", V2_MOUNT.replace(" / ", " /docker/abc "))
    machine.v2("", limit=512 * MIB, used=12 * MIB)
    assert machine.available().cgroup_bytes == 500 * MIB


def test_mount_points_that_are_no_text_do_no_harm(machine: Machine, tmp_path: Path) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.v2("", limit=512 * MIB, used=12 * MIB)
    mounts = b"29 24 0:25 / /mnt/\xff\xfe rw - ext4 /dev/sda rw\n" + V2_MOUNT.encode()
    (tmp_path / "proc/self/mountinfo").write_bytes(mounts)
    assert machine.available().cgroup_bytes == 500 * MIB


def test_a_cgroup_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("proc/self/mountinfo", V2_MOUNT)
    machine.v2("", limit=5 * MIB, used=12 * MIB)
    assert machine.available().cgroup_bytes == 0


def test_v1_and_escaped_names(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu:/elsewhere\n4:hugetlb,memory:/pod\\x2d1/inner\n0::/")
    machine.write(
        "proc/self/mountinfo",
        "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "32 24 0:28 /pod\\134x2d1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,hugetlb,memory",
    )
    for directory, limit in (("inner", 300 * MIB), (".", 9223372036854771712)):
        machine.write(f"sys/fs/cgroup/memory/{directory}/memory.limit_in_bytes", limit)
        machine.write(f"sys/fs/cgroup/memory/{directory}/memory.usage_in_bytes", 60 * MIB)
        machine.write(f"sys/fs/cgroup/memory/{directory}/memory.stat", f"total_inactive_file {10 * MIB}")
    room = machine.available()
    assert room.cgroup_bytes == 250 * MIB
    assert room.cgroup_file.endswith("memory/inner/memory.limit_in_bytes")


@pytest.mark.parametrize(
    ("mount", "kernel", "allowed"),
    [
        ("never", "never", False),
        ("advise", "never", True),
        ("always", "advise", True),
        ("within_size", "never", True),
        ("never", "force", True),
        ("advise", "deny", False),
        ("advise", "absent", False),
    ],
)
def test_who_decides_about_huge_pages(mount: str, kernel: str, allowed: bool) -> None:
    assert HugePolicy(mount, kernel).allowed is allowed


def test_the_huge_page_remedy_fits_the_refusal() -> None:
    assert "`mount -o remount,huge=advise /dev/shm`" in HugePolicy("never", "never").remedy
    assert "shmem_enabled" in HugePolicy("never", "deny").remedy
    assert "CONFIG_TRANSPARENT_HUGEPAGE" in HugePolicy("never", "absent").remedy


def test_the_last_mount_over_the_directory_counts(machine: Machine) -> None:
    assert memory.huge_policy(proc=machine.proc, sys=machine.sys) == HugePolicy("never", "absent")
    machine.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force")
    machine.write(
        "proc/mounts",
        "tmpfs /dev/shm tmpfs rw,huge=always 0 0\ntmpfs /dev/shm tmpfs rw,size=5k,huge=advise 0 0\n"
        "tmpfs /dev/shm/other tmpfs rw,huge=always 0 0",
    )
    assert memory.huge_policy(proc=machine.proc, sys=machine.sys) == HugePolicy("advise", "advise")


@pytest.mark.parametrize(("text", "nodes"), [("0", [0]), ("0-1", [0, 1]), ("0,2-4", [0, 2, 3, 4]), ("", [])])
def test_nodes_with_memory(machine: Machine, text: str, nodes: list[int]) -> None:
    machine.write("sys/devices/system/node/has_memory", text)
    assert memory.memory_nodes(sys=machine.sys) == nodes


def test_no_numa_is_no_node(machine: Machine) -> None:
    assert memory.memory_nodes(sys=machine.sys) == []


def test_huge_bytes_counts_the_mapping_alone(machine: Machine) -> None:
    machine.write(
        "proc/self/smaps",
        "7f0000000000-7f0000400000 rw-s 0 00:1 5 /dev/shm/sharedmirror-a b\nRss: 4096 kB\nShmemPmdMapped: 2048 kB\n"
        "VmFlags: rd wr\n7f0000400000-7f0000800000 rw-s 0 00:1 5 /dev/shm/sharedmirror-a b\nShmemPmdMapped: 4096 kB\n"
        "7f0000800000-7f0000a00000 rw-s 0 00:1 6 /dev/shm/stranger\nShmemPmdMapped: 2048 kB",
    )
    assert memory.huge_bytes(0x7F0000000000, 8 * MIB, proc=machine.proc) == 6 * MIB


def test_a_shortage_tells_a_full_mount_from_missing_memory() -> None:
    full = OSError(14, "Bad address")
    free = memory.shm_free() or 0
    lacking = memory.shortage("/sharedmirror-x", free + 5 * GIB, GIB, full)
    assert lacking.message.startswith("/dev/shm is full: ")
    assert "1.00 GiB (1073741824 bytes) got" in lacking.message and "--shm-size=" in lacking.message
    assert lacking.ids["got_bytes"] == GIB
    assert "the cgroup's or the machine's memory" in memory.shortage("/sharedmirror-x", 4096, 0, full).message
    assert memory.shortage("/sharedmirror-x", 4096, 0, OSError(133, "broken page")).message.endswith("broken page")
