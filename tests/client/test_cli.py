"""The command line against a real daemon: status in its forms, no daemon, and the demo to its end or interrupted."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sharedmirror import __version__
from sharedmirror.channel import Channel
from sharedmirror.errors import DaemonUnavailable
from sharedmirror.types import Role

COMMAND = [sys.executable, "-m", "sharedmirror"]
READY_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 20.0
DEMO_TIMEOUT_S = 90.0
LEAVE_SCREEN = "\x1b[?1049l"


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("SHAREDMIRROR_SOCKET", "COLUMNS")}
    return kept | changes


def sharedmirror(*arguments: str, timeout_s: float = 30.0, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment(**changes)
    )


def status_of(socket: str) -> dict[str, Any]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with Channel.open(socket, role=Role.OBSERVER) as channel:
                status: dict[str, Any] = channel.call("status")["status"]
        except DaemonUnavailable:
            if time.monotonic() > deadline:
                raise
        else:
            if status["daemon"]["state"] == "ready" or time.monotonic() > deadline:
                return status
        time.sleep(0.02)


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """The socket of a running daemon."""
    path = str(tmp_path / "daemon.sock")
    arguments = ["--memory", "8MiB", "--socket", path, "--pin", "none"]
    daemon = subprocess.Popen([sys.executable, "-m", "sharedmirrord", *arguments], stderr=subprocess.PIPE)
    try:
        instance = status_of(path)["daemon"]["instance"]
        yield path
    finally:
        daemon.terminate()
        _, log = daemon.communicate(timeout=EXIT_TIMEOUT_S)
    assert daemon.returncode == 0, log.decode()
    assert not [name for name in os.listdir("/dev/shm") if instance[:12] in name]


def test_status_draws_tables(socket: str) -> None:
    result = sharedmirror("status", "--socket", socket)
    assert (result.returncode, result.stderr) == (0, "")
    assert "8 MiB ready of 8 MiB" in result.stdout
    assert __version__ in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_status_json_is_one_map_of_the_documented_schema(socket: str) -> None:
    result = sharedmirror("status", "--json", "--socket", socket)
    assert (result.returncode, result.stderr) == (0, "")
    status = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert status["schema"] == 1
    assert {"daemon", "arena", "pools", "sessions", "ended", "quarantine", "alarms"} <= status.keys()
    assert {
        "version", "pid", "instance", "epoch", "uptime_s", "socket", "state", "pin", "pinned_bytes",
        "huge_page_share", "keep", "rss_bytes",
    } <= status["daemon"].keys()  # fmt: skip
    assert status["daemon"]["socket"] == socket
    assert status["arena"] == {
        "bytes_total": 8 << 20,
        "bytes_ready": 8 << 20,
        "bytes_allocated": 0,
        "bytes_free": 8 << 20,
    }


def test_the_socket_may_come_from_the_environment(socket: str) -> None:
    result = sharedmirror("status", "--json", SHAREDMIRROR_SOCKET=socket)
    assert json.loads(result.stdout)["daemon"]["socket"] == socket


@pytest.mark.parametrize("form", [[], ["--json"], ["--watch"]])
def test_no_daemon_is_one_line_and_exit_code_3(tmp_path: Path, form: list[str]) -> None:
    result = sharedmirror("status", *form, "--socket", str(tmp_path / "none.sock"))
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "none.sock" in result.stderr


def test_a_socket_path_that_cannot_be_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = sharedmirror("status", "--socket", str(tmp_path / ("x" * 120)))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "107" in result.stderr


def test_watch_prints_one_map_a_line_until_interrupted(socket: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "status", "--watch", "--json", "--socket", socket],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=restore_interrupt,
    ) as watcher:
        assert watcher.stdout is not None
        shown = [json.loads(watcher.stdout.readline())["daemon"]["uptime_s"] for _ in range(2)]
        assert shown[1] > shown[0]
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=EXIT_TIMEOUT_S)
    assert (watcher.returncode, errors) == (0, b"")


@contextmanager
def status_watcher(socket: str, *form: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sharedmirror status --watch` into a pipe; ended at the latest with the block."""
    with subprocess.Popen(
        [*COMMAND, "status", "--watch", *form, "--socket", socket],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=restore_interrupt,
    ) as watcher:
        try:
            yield watcher
        finally:
            watcher.kill()


def test_watch_into_a_pipe_shows_frame_after_frame(socket: str) -> None:
    with status_watcher(socket) as watcher:
        assert watcher.stdout is not None
        shown = read_until(watcher.stdout.fileno(), "8 MiB ready of 8 MiB", times=2)
        assert "\x1b" not in shown
        watcher.send_signal(signal.SIGINT)
        _, errors = watcher.communicate(timeout=EXIT_TIMEOUT_S)
    assert (watcher.returncode, errors) == (0, b"")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_watch_whose_reader_has_enough_ends_in_silence(socket: str, form: list[str]) -> None:
    with status_watcher(socket, *form) as watcher:
        assert watcher.stdout is not None and watcher.stderr is not None
        read_until(watcher.stdout.fileno(), "instance")
        watcher.stdout.close()
        assert watcher.wait(EXIT_TIMEOUT_S) == 0
        assert watcher.stderr.read() == b""


@pytest.mark.parametrize("form", [[], ["--json"], ["--watch"], ["--watch", "--json"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(socket: str, form: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "status", "--socket", socket, *form],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=30, env=environment(), check=False,
        )  # fmt: skip
    said = "sharedmirror: the output cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, said)


def test_watch_redraws_a_terminal_until_interrupted(socket: str) -> None:
    ours, theirs = os.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "status", "--watch", "--socket", socket],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=environment(TERM="xterm"),
            preexec_fn=restore_interrupt,
        ) as watcher:
            os.close(theirs)
            read_until(ours, "8 MiB ready of 8 MiB")
            read_until(ours, "8 MiB ready of 8 MiB")
            watcher.send_signal(signal.SIGINT)
            read_until(ours, LEAVE_SCREEN)
            assert watcher.wait(EXIT_TIMEOUT_S) == 0
    finally:
        os.close(ours)


def test_watch_ends_with_the_daemon(tmp_path: Path) -> None:
    path = str(tmp_path / "daemon.sock")
    arguments = ["--memory", "8MiB", "--socket", path, "--pin", "none"]
    with subprocess.Popen([sys.executable, "-m", "sharedmirrord", *arguments], stderr=subprocess.DEVNULL) as daemon:
        status_of(path)
        with subprocess.Popen(
            [*COMMAND, "status", "--watch", "--json", "--socket", path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        ) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline()
            daemon.terminate()
            assert daemon.wait(EXIT_TIMEOUT_S) == 0
            _, errors = watcher.communicate(timeout=EXIT_TIMEOUT_S)
    assert watcher.returncode == 3
    assert errors.count(b"\n") == 1


@pytest.mark.parametrize(("form", "absent"), [([], "torch numpy"), (["--json"], "torch numpy rich.table rich.console")])
def test_status_imports_nothing_slow(socket: str, form: list[str], absent: str) -> None:
    script = (
        "import sys; from sharedmirror.cli import app\n"
        f"app({['status', *form, '--socket', socket]!r}, standalone_mode=False)\n"
        f"sys.stderr.write(repr([name for name in {absent.split()!r} if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0
    assert result.stderr == "[]"


def test_the_story_of_the_demo_is_told_without_torch() -> None:
    script = "import sys, sharedmirror.demo.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == 0


def test_the_version() -> None:
    result = sharedmirror("--version")
    assert (result.returncode, result.stdout.strip()) == (0, __version__)


def test_an_unknown_device_is_bad_usage() -> None:
    result = sharedmirror("demo", "--device", "abacus")
    assert result.returncode == 2
    assert "abacus" in result.stderr


def test_the_demo_holds_and_leaves_nothing(tmp_path: Path) -> None:
    result = sharedmirror("demo", "--device", "cpu", timeout_s=DEMO_TIMEOUT_S, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout
    for held in (
        "the lookup finds all 93 pages of the prefix",
        "no token of the prefix was computed again",
        "their logits equal the reference's bit for bit",
        "with the load left out the answer differs",
        "with one host byte flipped the answer differs",
        "no process is left",
    ):
        assert re.search(rf"ok +{re.escape(held)}", result.stdout), result.stdout
    assert result.stdout.index("all 13 checks held") < result.stdout.index("Pools")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["daemon", "first engine", "SIGKILL"])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(TMPDIR=str(tmp_path)),
        preexec_fn=restore_interrupt,
    ) as demo:
        assert demo.stdout is not None
        output = read_until(demo.stdout.fileno(), moment)
        started = descendants(demo.pid)
        demo.send_signal(number)
        output += demo.communicate(timeout=EXIT_TIMEOUT_S)[0].decode()
    assert demo.returncode == 130, output
    assert len(started) >= 1
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not any(tmp_path.iterdir())


def restore_interrupt() -> None:
    """Undo the ignored SIGINT that a background job of a shell inherits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def read_until(descriptor: int, text: str, times: int = 1) -> str:
    output = ""
    deadline = time.monotonic() + DEMO_TIMEOUT_S
    while output.count(text) < times:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        read = os.read(descriptor, 4096) if ready else b""
        assert read, f"{text!r} never came:\n{output}"
        output += read.decode(errors="replace")
    return output


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]
