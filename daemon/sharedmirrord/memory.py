"""How much memory there is for the arena, and what the machine allows it to be.

Sizes are read from text, compared with every limit that holds here, and refused with numbers and a
remedy. Everything is read from /proc, /sys and statvfs, whose places are arguments; nothing here
takes memory or changes a setting.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from sharedmirror.errors import MemoryFault, UsageError
from sharedmirror.types import REGION_ALIGNMENT_BYTES

SHM_DIR = "/dev/shm"
HUGE_PAGE_GAIN = "measured for 32 GiB: prefault 7.9 s -> 1.0 s, registration by a worker 4.1 s -> 0.9 s"

_UNITS = {"": 1, "b": 1, "%": 0}
_UNITS.update({f"{letter}ib": 1 << 10 * (power + 1) for power, letter in enumerate("kmgt")})
_UNITS.update({f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgt")})
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z%]*)\s*")
_UNLIMITED_BYTES = 1 << 60
"""A cgroup v1 limit from here on means that there is none."""


@dataclass(frozen=True)
class Size:
    """A size as it was asked for: ``size_bytes``, or a ``share`` of what may be had (0 to 1)."""

    text: str
    size_bytes: int | None = None
    share: Fraction | None = None


@dataclass(frozen=True)
class Available:
    """What may be had, limit by limit, in bytes; None where there is no such limit."""

    cgroup_bytes: int | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    cgroup_file: str = ""
    shm_dir: str = SHM_DIR

    @property
    def limits(self) -> dict[str, int]:
        """The limits that hold, by name: ``cgroup``, ``MemAvailable`` and the shared memory mount's path."""
        limits = {"cgroup": self.cgroup_bytes, "MemAvailable": self.memory_bytes, self.shm_dir: self.shm_bytes}
        return {name: size for name, size in limits.items() if size is not None}

    @property
    def smallest_name(self) -> str:
        """The name of the limit that binds; raises MemoryFault when none could be read."""
        limits = self.limits
        if not limits:
            raise MemoryFault(f"no memory limit can be read: is /proc mounted, and {self.shm_dir}?")
        return min(limits, key=limits.__getitem__)

    @property
    def smallest(self) -> int:
        """The bytes that may be had; raises MemoryFault when no limit could be read."""
        return self.limits[self.smallest_name]


@dataclass(frozen=True)
class HugePolicy:
    """Whether shared memory may have huge pages: the mount's ``huge=`` and the kernel's word."""

    mount: str
    kernel: str
    shm_dir: str = SHM_DIR

    @property
    def allowed(self) -> bool:
        """Whether memory that asks for huge pages can get them."""
        if self.kernel in ("absent", "deny"):
            return False
        return self.kernel == "force" or self.mount in ("always", "within_size", "advise")

    @property
    def remedy(self) -> str:
        """The one command, to be run as root, that lets huge pages in."""
        if self.kernel == "absent":
            return "this kernel has no huge pages for shared memory; use one with CONFIG_TRANSPARENT_HUGEPAGE"
        if self.kernel == "deny":
            return "run `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` as root"
        return f"run `mount -o remount,huge=advise {self.shm_dir}` as root"


def parse_size(text: str) -> Size:
    """Return the size that ``text`` says: ``64GiB``, ``500MB``, ``1.5GiB``, ``80%`` or plain bytes.

    Raises UsageError on anything else.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match and unit in ("k", "m", "g", "t"):
        letter = unit.upper()
        raise UsageError(f"the unit of {text!r} is ambiguous: write {letter}iB or {letter}B")
    if not match or unit not in _UNITS:
        raise UsageError(f"{text!r} is no size: write a number and a unit, such as 64GiB, 500MB or 80%")
    number = Fraction(match.group(1))
    if unit == "%":
        if not 0 < number <= 100:
            raise UsageError(f"the size {text!r} is not between 0% and 100%")
        return Size(text.strip(), share=number / 100)
    size_bytes = int(number * _UNITS[unit])
    if size_bytes <= 0:
        raise UsageError(f"the size {text!r} is less than one byte")
    return Size(text.strip(), size_bytes=size_bytes)


def show_bytes(size_bytes: int) -> str:
    """Return bytes for people, with the exact number: ``1.50 GiB (1610612736 bytes)``."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.2f} {unit} ({size_bytes} bytes)"
    return f"{size_bytes} bytes"


def available(*, proc: str = "/proc", sys: str = "/sys", shm_dir: str = SHM_DIR) -> Available:
    """Return what may be had now under each limit that holds for this process."""
    cgroup_bytes, cgroup_file = _cgroup_free(proc, sys)
    return Available(
        cgroup_bytes=cgroup_bytes,
        memory_bytes=_mem_available(proc),
        shm_bytes=shm_free(shm_dir),
        cgroup_file=cgroup_file,
        shm_dir=shm_dir,
    )


def resolve(size: Size, available: Available) -> int:
    """Return the bytes of an arena of ``size``, a multiple of 2 MiB.

    Raises MemoryFault when that is more than may be had, UsageError when it is less than 2 MiB.
    """
    if size.share is not None:
        asked = int(available.smallest * size.share)
    else:
        asked = size.size_bytes or 0
    granted = asked // REGION_ALIGNMENT_BYTES * REGION_ALIGNMENT_BYTES
    if size.share is None and not granted:
        raise UsageError(f"the size {size.text} is less than the 2MiB that an arena has at least")
    if not granted or granted > available.smallest:
        name, free = available.smallest_name, available.smallest
        raise MemoryFault(
            f"{show_bytes(asked)} asked for ({size.text}), {show_bytes(free)} to be had; "
            f"the limit is {name}: {remedy(name, max(granted, REGION_ALIGNMENT_BYTES) - free, available)}",
            asked_bytes=asked,
            free_bytes=free,
            limit=name,
        )
    return granted


def remedy(limit: str, lacking_bytes: int, available: Available) -> str:
    """Return what to do about a limit (a name from ``Available.limits``) that is ``lacking_bytes`` too low."""
    if limit == "cgroup":
        return (
            f"raise {available.cgroup_file or 'the cgroup memory limit'} (docker run --memory, "
            f"resources.limits.memory in Kubernetes, MemoryMax= in systemd), or ask for less"
        )
    if limit == "MemAvailable":
        return "end what else uses this machine's memory, or ask for less"
    return shm_remedy(lacking_bytes, available.shm_dir)


def shm_remedy(lacking_bytes: int, shm_dir: str = SHM_DIR) -> str:
    """Return what to do about a shared memory mount with ``lacking_bytes`` too few."""
    try:
        stats = os.statvfs(shm_dir)
    except OSError:
        return f"run `mount -t tmpfs tmpfs {shm_dir}` as root"
    needed_mib = -(-(stats.f_blocks * stats.f_frsize + max(lacking_bytes, 0)) // (1 << 20))
    return (
        f"run `mount -o remount,size={needed_mib}M {shm_dir}` as root (in Docker start the container with "
        f"--shm-size={needed_mib}m), remove what else lies there, or ask for less"
    )


def shm_free(shm_dir: str = SHM_DIR) -> int | None:
    """Return the free bytes of the shared memory mount, None where it has no limit.

    Raises MemoryFault when there is no such mount.
    """
    try:
        stats = os.statvfs(shm_dir)
    except OSError as error:
        raise MemoryFault(f"{shm_dir} cannot be used ({error.strerror}); {shm_remedy(0, shm_dir)}") from error
    # A tmpfs without a limit (size=0) reports no blocks at all.
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else None


def shortage(name: str, asked_bytes: int, got_bytes: int, error: OSError, shm_dir: str = SHM_DIR) -> MemoryFault:
    """Return the error for pages of the object ``name`` that could not be had: asked, got, free and the remedy."""
    try:
        free = shm_free(shm_dir)
    except MemoryFault:
        free = 0
    numbers = f"{show_bytes(asked_bytes)} asked for {name}, {show_bytes(got_bytes)} got"
    ids = {"asked_bytes": asked_bytes, "got_bytes": got_bytes, "free_bytes": free}
    if error.errno not in (errno.EFAULT, errno.ENOMEM, errno.ENOSPC):
        return MemoryFault(f"{numbers}: {error.strerror}", **ids)
    lacking = asked_bytes - got_bytes - (free or 0)
    if free is None or lacking <= 0:
        return MemoryFault(
            f"no memory: {numbers}; {shm_dir} has room, so the limit is the cgroup's or the machine's memory; "
            f"raise it, or ask for less",
            **ids,
        )
    return MemoryFault(f"{shm_dir} is full: {numbers}, {show_bytes(free)} free; {shm_remedy(lacking, shm_dir)}", **ids)


def huge_policy(*, proc: str = "/proc", sys: str = "/sys", shm_dir: str = SHM_DIR) -> HugePolicy:
    """Return what mount and kernel say of huge pages in shared memory."""
    mount = "never"
    for line in _lines(f"{proc}/mounts"):
        fields = line.split()
        if len(fields) > 3 and fields[1] == shm_dir:
            # Mounts may lie over each other; the last one is the one that is seen.
            options = dict(option.partition("=")[::2] for option in fields[3].split(","))
            mount = options.get("huge", "never")
    words = re.findall(r"\[(\w+)\]", "".join(_lines(f"{sys}/kernel/mm/transparent_hugepage/shmem_enabled")))
    return HugePolicy(mount=mount, kernel=words[0] if words else "absent", shm_dir=shm_dir)


def huge_bytes(address: int, size_bytes: int, *, proc: str = "/proc") -> int:
    """Return how many bytes of this process's shared mapping at ``address`` are in huge pages.

    The kernel walks the mapping for it: cheap with huge pages, slow with many small ones.
    """
    total = 0
    inside = False
    for line in _lines(f"{proc}/self/smaps"):
        field, _, value = line.partition(" ")
        low, dash, high = field.partition("-")
        if dash and not field.endswith(":"):
            inside = address <= int(low, 16) and int(high, 16) <= address + size_bytes
        elif inside and field == "ShmemPmdMapped:":
            total += int(value.split()[0]) * 1024
    return total


def memory_nodes(*, sys: str = "/sys") -> list[int]:
    """Return the NUMA nodes that have memory; empty where the kernel knows none."""
    nodes: list[int] = []
    for part in "".join(_lines(f"{sys}/devices/system/node/has_memory")).strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            nodes.extend(range(int(low), int(high or low) + 1))
    return nodes


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # mount points are any bytes
            return file.readlines()
    except OSError:
        return []


def _mem_available(proc: str) -> int | None:
    for line in _lines(f"{proc}/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _cgroup_free(proc: str, sys: str) -> tuple[int | None, str]:
    """Return the least that any cgroup above this process has left, and the file of that limit."""
    least: int | None = None
    where = ""
    for directory, limits, usage, cache in _cgroup_directories(proc, sys):
        used = _number(f"{directory}/{usage}")
        if used is None:
            continue
        stats = dict(line.split()[:2] for line in _lines(f"{directory}/memory.stat") if len(line.split()) >= 2)
        # File cache that nobody uses goes as soon as memory is wanted, so it does not count as used.
        used = max(0, used - int(stats.get(cache, 0)))
        for limit_file in limits:
            limit = _number(f"{directory}/{limit_file}")
            if limit is None or limit >= _UNLIMITED_BYTES:
                continue
            free = max(0, limit - used)
            if least is None or free < least:
                least, where = free, f"{directory}/{limit_file}"
    return least, where


def _cgroup_directories(proc: str, sys: str) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Yield each cgroup from this process's own to the root: directory, limit files, usage file, cache field."""
    paths: dict[str, str] = {}
    for line in _lines(f"{proc}/self/cgroup"):
        number, controllers, path = line.rstrip("\n").split(":", 2)
        if number == "0" and not controllers:
            paths["v2"] = path
        elif "memory" in controllers.split(","):
            paths["v1"] = path
    for version, root, mount_point in _cgroup_mounts(proc):
        if version not in paths:
            continue
        path = paths[version]
        # A container may see its own cgroup as the mount's root while its path is still the host's; then the
        # path leads nowhere below the mount and the walk ends at the mount itself, which is the right one.
        if root != "/" and (path + "/").startswith(root + "/"):
            path = path[len(root) :]
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        top = sys + mount_point[len("/sys") :] if mount_point.startswith("/sys/") else mount_point
        for depth in range(len(parts), -1, -1):
            directory = "/".join([top, *parts[:depth]])
            if version == "v2":
                yield directory, ("memory.max", "memory.high"), "memory.current", "inactive_file"
            else:
                yield directory, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def _cgroup_mounts(proc: str) -> Iterator[tuple[str, str, str]]:
    """Yield version, root and mount point of each cgroup mount that can limit memory."""
    for line in _lines(f"{proc}/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, mount_point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text) for text in fields[3:5])
        if kind[0] == "cgroup2":
            yield "v2", root, mount_point
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield "v1", root, mount_point
