"""The daemon's end and what it tells the service manager: signals, waiting calls, segments kept and unlinked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket as sockets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.channel import Channel
from sharedmirror.control import connect
from sharedmirror.errors import DaemonUnavailable, SharedMirrorError
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter
    from tests.daemon.conftest import Raw

Until = Callable[..., Any]
Open = Callable[[str], "Raw"]


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
        channels = [stack.enter_context(Channel.open(daemon.socket, role=role, timeout_s=0.2)) for role in [*Role] * 3]
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
