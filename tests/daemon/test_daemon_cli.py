"""The command ``sharedmirrord``: sizes, signals, what it tells the service manager, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import __version__
from sharedmirror.channel import Channel
from sharedmirror.errors import DaemonUnavailable
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Processes, Starter
    from tests.daemon.conftest import Raw

Until = Callable[..., Any]
Open = Callable[[str], "Raw"]
NOBODY = 65534
# The capability lets another uid read an interpreter in root's home; it has no right to lock memory.
AS_NOBODY = [
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=+dac_read_search", "sh", "-c", 'ulimit -l 0; exec "$@"', "sh",
]  # fmt: skip
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another uid, with setpriv"
)


# --- arguments


def test_the_version_is_printed(start: Starter) -> None:
    result = start.run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"sharedmirrord {__version__}\n", "")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("12XB", "'12XB' is no size"),
        ("", "'' is no size"),
        ("-5GiB", "'-5GiB' is no size"),
        ("5G", "ambiguous"),
        ("0", "less than one byte"),
        ("0%", "not between 0% and 100%"),
        ("101%", "not between 0% and 100%"),
        ("1MiB", "less than the 2MiB"),
        ("64 GiB extra", "is no size"),
        ("1e3", "is no size"),
    ],
)
def test_a_bad_size_is_bad_usage_and_names_the_offender(start: Starter, size: str, words: str) -> None:
    result = start.run(f"--memory={size}", "--pin", "none", "--socket", start.path())
    assert result.returncode == 2
    assert words in re.sub(r"[\s│]+", " ", result.stderr)
    assert "--memory: " in result.stderr and "Traceback" not in result.stderr
    assert not os.path.exists(start.path())


@pytest.mark.parametrize(
    ("arguments", "offender"),
    [
        ((), "--memory"),
        (("--memory", "8MiB", "--pin", "glue"), "glue"),
        (("--memory", "8MiB", "--huge-pages", "maybe"), "maybe"),
        (("--memory", "8MiB", "--allow-uid", "root"), "--allow-uid"),
        (("--memory", "8MiB", "--allow-uid", "-1"), "--allow-uid"),
        (("--memory", "8MiB", "--allow-uid", "99999999999"), "--allow-uid"),
        (("--memory", "8MiB", "--fast"), "--fast"),
        (("--memory", "8MiB", "extra"), "extra"),
    ],
)
def test_bad_usage_names_the_offender(start: Starter, arguments: tuple[str, ...], offender: str) -> None:
    result = start.run("--socket", start.path(), *arguments)
    assert result.returncode == 2
    assert offender in result.stderr and "Traceback" not in result.stderr


def test_mistyped_failpoints_are_bad_usage(start: Starter) -> None:
    typed = {"SHAREDMIRROR_FAILPOINTS": "reply.before=explode"}
    result = start.run("--memory", "8MiB", "--pin", "none", "--socket", start.path(), **typed)
    assert result.returncode == 2
    assert "explode" in result.stderr and "Traceback" not in result.stderr


def test_a_socket_path_over_107_bytes_is_bad_usage(start: Starter) -> None:
    path = start.path("x" * 120)
    result = start.run("--memory", "8MiB", "--pin", "none", "--socket", path)
    assert result.returncode == 2
    assert f"{len(path)} bytes and the limit is 107" in re.sub(r"[\s│]+", " ", result.stderr)
    assert os.listdir(start.directory) == []


@as_root
def test_no_default_socket_says_what_to_set(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    result = start.run("--memory", "8MiB", before=AS_NOBODY)
    assert result.returncode == 1
    assert f"XDG_RUNTIME_DIR is unset for uid {NOBODY}" in result.stderr and result.stderr.count("\n") == 1


def test_the_socket_variable_is_the_default(start: Starter) -> None:
    path = start.path("named.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "sharedmirrord", "--memory", "8MiB", "--pin", "none"],
        env=start.environment(SHAREDMIRROR_SOCKET=path),
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(DaemonUnavailable), Channel.open(path, role=Role.OBSERVER) as channel:
                assert channel.call("status")["status"]["daemon"]["pid"] == process.pid
                break
            time.sleep(0.01)
        else:
            pytest.fail("no daemon on the named socket")
    finally:
        process.terminate()
        assert process.wait(20) == 0


# --- memory


def test_more_memory_than_may_be_had_is_refused_with_numbers(start: Starter) -> None:
    result = start.run("--memory", "4096TiB", "--pin", "none", "--socket", start.path())
    assert result.returncode == 1
    assert f"({1 << 52} bytes) asked for (4096TiB)" in result.stderr
    assert re.search(r"\(\d+ bytes\) to be had; the limit is ", result.stderr)
    assert result.stderr.count("\n") == 1
    assert not os.path.exists(start.path())


def test_a_share_of_what_may_be_had(start: Starter) -> None:
    daemon = start(memory="0.1%")
    size = daemon.status()["arena"]["bytes_total"]
    assert size > 0 and size % (2 << 20) == 0
    assert daemon.end() == 0


FULL = """
mount -t tmpfs -o size={size},huge=never tmpfs /dev/shm
{python} -m sharedmirrord --memory {memory} --pin none --socket {socket}
code=$?
ls /dev/shm
exit $code
"""


def in_own_mount(start: Starter, script: str) -> subprocess.CompletedProcess[str]:
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    try:
        probe = subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if probe.returncode:
        pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")
    return subprocess.run(
        [*unshare, "sh", "-c", script], capture_output=True, text=True, timeout=20, env=start.environment()
    )


def test_a_mount_too_small_is_refused_with_numbers_and_the_remedy(start: Starter) -> None:
    script = FULL.format(size="16m", memory="64MiB", python=sys.executable, socket=start.path())
    result = in_own_mount(start, script)
    assert result.returncode == 1
    assert "64.00 MiB (67108864 bytes) asked for" in result.stderr and "12582912 bytes" in result.stderr
    assert "/dev/shm" in result.stderr and "--shm-size" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_mount_that_is_full_at_the_start_is_refused_and_nothing_is_left(start: Starter) -> None:
    fill = "mount -t tmpfs -o size=40m,huge=never tmpfs /dev/shm; head -c 30m /dev/zero > /dev/shm/other"
    script = FULL.format(size="40m", memory="32MiB", python=sys.executable, socket=start.path())
    result = in_own_mount(start, script.replace("mount -t tmpfs -o size=40m,huge=never tmpfs /dev/shm", fill))
    assert result.returncode == 1
    assert "(33554432 bytes) asked for (32MiB), 6.00 MiB (6291456 bytes) to be had" in result.stderr
    assert "/dev/shm" in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == "other\n"
    assert not os.path.exists(start.path())


@pytest.fixture
def public(start: Starter) -> Iterator[str]:
    """A socket path in a directory of another uid's."""
    directory = tempfile.mkdtemp(prefix="smt-")
    os.chown(directory, NOBODY, NOBODY)
    yield f"{directory}/d.sock"
    shutil.rmtree(directory)


@as_root
def test_a_refused_mlock_is_a_warning_with_the_remedy(start: Starter, processes: Processes, public: str) -> None:
    daemon = start(socket=public, pin="mlock", before=AS_NOBODY)
    status = daemon.status()
    assert status["daemon"]["pinned_bytes"] == 0 and status["daemon"]["state"] == "ready"
    assert "level=WARNING event=mlock_refused" in daemon.log() and "LimitMEMLOCK=infinity" in daemon.log()
    worker = processes.worker(public, uid=NOBODY)
    worker.attach()
    assert worker.call("contains", keys=[b"k"])["states"] == "m"
    worker.call("detach", unmapped=True)
    # Root is always served.
    (other,) = processes.engine(public, engine="root")
    other.call("detach", unmapped=True)
    assert daemon.end() == 0


def test_mlock_pins_the_arena(start: Starter) -> None:
    daemon = start(pin="mlock", memory="8MiB")
    status = daemon.status()["daemon"]
    locked = int(re.findall(r"VmLck:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())[0]) * 1024
    assert status["pinned_bytes"] in (0, 8 << 20)
    assert locked >= status["pinned_bytes"]
    assert status["pinned_bytes"] or "event=mlock_refused" in daemon.log()
