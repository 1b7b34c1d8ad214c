"""What the tests of shared memory have in common: names, what is left of them, and child processes.

A full /dev/shm, huge pages and a refused mlock are had in child processes, which have a mount
namespace or a uid of their own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")

OLD_KERNEL = (
    "from sharedmirrord import syscalls; real = syscalls.madvise; "
    "syscalls.madvise = lambda a, n, what: 22 if what == 23 else real(a, n, what)"
)
"""A line for a script: a kernel before Linux 5.14, which cannot populate."""

Namespace = Callable[[str, str], dict[str, Any]]
"""Runs a script where /dev/shm is a mount of its own with the given options."""

_numbers = itertools.count()


def left_behind() -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"sharedmirror-test-{os.getpid()}-"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(f"sharedmirror-test-{os.getpid()}-" in line for line in file)


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@contextlib.contextmanager
def own_name() -> Iterator[str]:
    """Give a name of the test's own; at the end no segment, mapping or descriptor may be left."""
    descriptors = len(os.listdir("/proc/self/fd"))
    yield f"/sharedmirror-test-{os.getpid()}-{next(_numbers)}"
    gc.collect()
    left = left_behind()
    for file in left:
        os.unlink(f"/dev/shm/{file}")
    assert left == []
    assert mappings() == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def child(script: str, *prefix: str) -> dict[str, Any]:
    """Run a script in a process of its own; what it prints last is its JSON result."""
    run = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    result["stderr"] = run.stderr
    return result


def run_and_kill(script: str) -> None:
    """Run a script until it prints a line, and kill it with SIGKILL."""
    command = [sys.executable, "-c", textwrap.dedent(script) + "\nprint('ready', flush=True)\ninput()\n"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=_environment(), stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def mount_namespace() -> Namespace:
    """Return what runs a script in a mount namespace; skips the test where there is none."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    probe = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" -c pass'
    try:
        refused = subprocess.run([*unshare, "sh", "-c", probe, sys.executable], capture_output=True, text=True).stderr
    except FileNotFoundError:
        refused = "there is no unshare"
    if refused:
        pytest.skip(f"no mount namespace here: {refused.strip()}")

    def run(options: str, script: str) -> dict[str, Any]:
        return child(script, *unshare, "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh")

    return run
