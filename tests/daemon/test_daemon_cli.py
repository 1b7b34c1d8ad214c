"""The command ``sharedmirrord``: sizes, signals, what it tells the service manager, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import __version__
from sharedmirror.channel import Channel
from sharedmirror.control import connect
from sharedmirror.errors import DaemonUnavailable, SharedMirrorError
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter
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
    assert "Traceback" not in result.stderr
    assert not os.path.exists(start.path())


@pytest.mark.parametrize(
    ("arguments", "offender"),
    [
        ((), "--memory"),
        (("--memory", "8MiB", "--pin", "glue"), "glue"),
        (("--memory", "8MiB", "--huge-pages", "maybe"), "maybe"),
        (("--memory", "8MiB", "--allow-uid", "root"), "--allow-uid"),
        (("--memory", "8MiB", "--fast"), "--fast"),
        (("--memory", "8MiB", "extra"), "extra"),
    ],
)
def test_bad_usage_names_the_offender(start: Starter, arguments: tuple[str, ...], offender: str) -> None:
    result = start.run("--socket", start.path(), *arguments)
    assert result.returncode == 2
    assert offender in result.stderr and "Traceback" not in result.stderr


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
    assert "64.00 MiB (67108864 bytes) asked for" in result.stderr and "16777216 bytes" in result.stderr
    assert "/dev/shm" in result.stderr and "--shm-size" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_mount_that_is_full_at_the_start_is_refused_and_nothing_is_left(start: Starter) -> None:
    fill = "mount -t tmpfs -o size=40m,huge=never tmpfs /dev/shm; head -c 30m /dev/zero > /dev/shm/other"
    script = FULL.format(size="40m", memory="32MiB", python=sys.executable, socket=start.path())
    result = in_own_mount(start, script.replace("mount -t tmpfs -o size=40m,huge=never tmpfs /dev/shm", fill))
    assert result.returncode == 1
    assert "(33554432 bytes) asked for (32MiB), 10.00 MiB (10485760 bytes) to be had" in result.stderr
    assert "/dev/shm" in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == "other\n"
    assert not os.path.exists(start.path())


def test_a_mount_that_fills_up_while_prefaulting_ends_the_daemon_with_numbers(start: Starter) -> None:
    """The records and what else lies there leave less than was free when it was asked."""
    script = FULL.format(size="33m", memory="32MiB", python=sys.executable, socket=start.path())
    result = in_own_mount(start, script)
    assert result.returncode == 1
    assert "/dev/shm is full" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""
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


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_daemon_cleanly(start: Starter, number: int) -> None:
    daemon = start()
    assert len(daemon.segments()) == 2
    assert daemon.end(number) == 0
    assert daemon.segments() == []
    assert not os.path.exists(daemon.socket)
    assert daemon.log().count("event=ready") == 1


def test_a_second_signal_changes_nothing(start: Starter) -> None:
    daemon = start()
    for _ in range(20):
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGINT)
    assert daemon.end() == 0


def test_idle_clients_do_not_hold_the_end_up(start: Starter, raw: Open) -> None:
    daemon = start()
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(Channel.open(daemon.socket, role=role, timeout_s=0.2)) for role in [*Role] * 3
        ]
        silent = [raw(daemon.socket) for _ in range(3)]
        began = time.monotonic()
        assert daemon.end() == 0
        # The one time that is asserted: the contract says 5 s.
        assert time.monotonic() - began < 5
        assert daemon.segments() == [] and daemon.session_files() == []
        for channel in channels:
            with pytest.raises(DaemonUnavailable):
                channel.call("status")
        assert [connection.receive() for connection in silent] == [None] * 3


def test_a_reader_that_takes_nothing_does_not_hold_the_end_up(start: Starter, raw: Open) -> None:
    daemon = start()
    slow = raw(daemon.socket)
    slow.hello("observer")
    # Far more than a socket's buffers hold, far less than what ends the connection.
    slow.send(*({"op": "status", "id": number} for number in range(3000)))
    assert daemon.end() == 0
    assert daemon.segments() == []


def test_waiting_requests_get_an_answer(start: Starter, processes: Processes) -> None:
    daemon = start()
    daemon.leaves_segments = True
    (worker,) = processes.engine(daemon.socket, pool="full")
    half = processes.worker(daemon.socket)
    half.send_attach(pool="half", world_size=2, planes=[["k", 0, 1, 4096, 16]])
    answers: list[SharedMirrorError] = []
    with connect(daemon.socket, "full", timeout_s=1.0) as client:
        client.lease(8)

        def wait() -> None:
            try:
                client.lease(1, wait_s=60)
            except SharedMirrorError as error:
                answers.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        worker.send("call", op="lease", arguments={"n": 5, "wait_s": 60})
        daemon.wait_status(lambda status: len(status["pools"]) == 2)
        time.sleep(0.1)
        assert daemon.end() == 0
        thread.join()
        with pytest.raises(SharedMirrorError) as caught:
            worker.result()
        # An answer, not the end of the connection.
        for error in (*answers, caught.value):
            assert error.code == "no_pages" or "is stopping" in error.message, error
        assert len(answers) == 1
        with pytest.raises(SharedMirrorError) as caught:
            half.result()
        assert caught.value.code == "ranks_missing"


def test_a_living_attached_session_keeps_the_segments(start: Starter, processes: Processes) -> None:
    daemon = start()
    daemon.leaves_segments = True
    (worker,) = processes.engine(daemon.socket)
    assert daemon.end() == 0
    assert len(daemon.segments()) == 2
    assert "event=kept reason='live sessions'" in daemon.log()
    assert daemon.session_files() == [str(worker.hello["session"])]


def test_a_dead_workers_live_fork_keeps_the_segments(start: Starter, processes: Processes) -> None:
    daemon = start()
    daemon.leaves_segments = True
    (worker,) = processes.engine(daemon.socket)
    worker.fork("maps")
    worker.kill()
    daemon.wait_status(lambda status: status["sessions"][0]["state"] == "dead")
    assert daemon.end() == 0
    assert len(daemon.segments()) == 2


def test_detached_and_dead_sessions_do_not_keep_the_segments(start: Starter, processes: Processes) -> None:
    daemon = start()
    detached, killed = processes.engine(daemon.socket, 2)
    detached.call("detach", unmapped=True)
    killed.kill()
    daemon.wait_status(lambda status: status["sessions"] == [])
    assert daemon.end() == 0
    assert daemon.segments() == []


def test_keep_keeps_the_segments(start: Starter) -> None:
    daemon = start("--keep")
    daemon.leaves_segments = True
    assert daemon.status()["daemon"]["keep"] is True
    names = sorted(daemon.segments())
    assert daemon.end() == 0
    assert sorted(daemon.segments()) == names and len(names) == 2
    assert "event=kept reason='--keep'" in daemon.log()
    assert not os.path.exists(daemon.socket)


def test_a_signal_while_prefaulting_ends_it_cleanly(start: Starter, wait_until: Until) -> None:
    daemon = start(memory="3GiB", state=None)

    def state() -> str:
        with contextlib.suppress(DaemonUnavailable):
            return str(daemon.status()["daemon"]["state"])
        return ""

    assert wait_until(state) in ("prefaulting", "ready")
    assert daemon.end() == 0
    assert daemon.segments() == []
    assert not os.path.exists(daemon.socket)


def test_no_lease_is_granted_and_nobody_attaches_before_the_memory_is_there(start: Starter, raw: Open) -> None:
    daemon = start(memory="1GiB", state=None)
    answer: dict[str, Any] = {}
    while not answer:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection = raw(daemon.socket)
            connection.hello("scheduler")
            answer = connection.ask("attach", 1, pool="p", engine="0", wait_s=0)
    assert answer["error"]["code"] in ("daemon_unavailable", "pool_not_found")
    assert answer["error"]["retryable"] is True
    daemon.wait_state("ready")


# --- the service manager


def test_the_service_manager_hears_ready_and_stopping(start: Starter) -> None:
    address = start.path("notify.sock")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(20)
        daemon = start(environment={"NOTIFY_SOCKET": address})
        said = [manager.recv(4096).decode()]
        while said[-1] != "READY=1":
            said.append(manager.recv(4096).decode())
        assert all(line.startswith("STATUS=prefaulting: ") for line in said[:-1])
        assert daemon.end() == 0
        said = [manager.recv(4096).decode()]
        while said[-1] != "STOPPING=1":
            said.append(manager.recv(4096).decode())
        assert "READY=1" not in said


def test_a_manager_that_is_gone_is_no_reason_to_fail(start: Starter) -> None:
    daemon = start(environment={"NOTIFY_SOCKET": start.path("gone.sock")})
    assert daemon.end() == 0


def test_ready_is_one_line_on_stderr(daemon: Daemon) -> None:
    (line,) = [line for line in daemon.log().splitlines() if "event=ready" in line]
    assert f"socket={daemon.socket} bytes={32 << 20} pin=none" in line
