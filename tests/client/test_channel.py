"""The blocking channel: against a real daemon, and against peers that speak otherwise."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import __version__, wire
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    CallTimeout,
    ClosedError,
    DaemonUnavailable,
    ProtocolError,
    UsageError,
)
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter

Until = Callable[..., Any]


# --- no daemon, or another one


def test_no_daemon_says_what_to_start(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "none.sock")
    with pytest.raises(DaemonUnavailable, match=f"no daemon answers on {path}.*sharedmirrord --memory") as caught:
        Channel.open(path, role=Role.SCHEDULER)
    assert caught.value.retryable and caught.value.ids == {"socket": path}


def test_a_socket_that_nobody_serves_is_no_daemon(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "dead.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with pytest.raises(DaemonUnavailable, match="Connection refused"):
        Channel.open(path, role=Role.WORKER)


def test_a_file_that_is_no_socket_is_named_as_such(tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaemonUnavailable, match="the file is no socket"):
        Channel.open(str(tmp_path / "file"), role=Role.OBSERVER)


def test_a_socket_path_over_107_bytes_is_refused_before_anything_is_opened(nothing_left: None) -> None:
    path = "/tmp/" + "x" * 103
    with pytest.raises(UsageError, match=f"108 bytes and the limit is 107.*{path}"):
        Channel.open(path, role=Role.WORKER)


@pytest.mark.parametrize("words", [None, "this uid is not served"])
def test_a_daemon_that_closes_before_the_hello_is_heard_out(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch, words: str | None
) -> None:
    path = str(tmp_path / "d.sock")
    connect = Channel._connect

    def connect_and_be_refused(channel: Channel, deadline: float) -> None:
        connect(channel, deadline)
        with listener.accept()[0] as accepted:
            if words is not None:
                accepted.sendall(wire.encode({"id": 0, "error": UsageError(words).to_wire()}))

    monkeypatch.setattr(Channel, "_connect", connect_and_be_refused)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        for role in Role:
            with pytest.raises((UsageError, DaemonUnavailable), match=words or f"--allow-uid {os.getuid()}") as caught:
                Channel.open(path, role=role)
            assert type(caught.value) is (UsageError if words else DaemonUnavailable)


def test_a_connection_that_is_lost_is_a_public_error(start: Starter) -> None:
    daemon = start()
    for role in (Role.OBSERVER, Role.WORKER):
        with Channel.open(daemon.socket, role=role, timeout_s=0.2) as channel:
            if role is Role.WORKER:
                daemon.kill()
            else:
                channel.interrupt()
            with pytest.raises(DaemonUnavailable) as caught:
                channel.call("status")
            assert type(caught.value) is DaemonUnavailable


def test_a_killed_daemon_is_unavailable_and_the_memory_stays(start: Starter) -> None:
    daemon = start()
    with Channel.open(daemon.socket, role=Role.WORKER, timeout_s=0.2) as channel:
        with mmap.mmap(channel.arena_fds[0], 4096) as memory:
            daemon.kill()
            with pytest.raises(DaemonUnavailable):
                channel.call("status")
            memory[:5] = b"still"
            assert memory[:5] == b"still"


def test_a_stopped_daemon_times_the_call_out_and_goes_on(start: Starter) -> None:
    daemon = start()
    with Channel.open(daemon.socket, role=Role.WORKER) as channel:
        daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(CallTimeout):
            channel.call("status", timeout_s=0.05)
        daemon.process.send_signal(signal.SIGCONT)
        assert channel.call("status")["status"]["daemon"]["pid"] == daemon.pid


# --- a real daemon


def test_a_worker_gets_the_arena_and_who_answers(shared_daemon: Daemon, nothing_left: None) -> None:
    with Channel.open(shared_daemon.socket, role=Role.WORKER) as channel:
        daemon = channel.call("status")["status"]["daemon"]
        assert (channel.instance, channel.epoch, channel.greeting.version) == (daemon["instance"], 1, __version__)
        assert channel.session > 0
        assert channel.greeting.arenas == [256 << 20]
        (fd,) = channel.arena_fds
        assert os.fstat(fd).st_size == 256 << 20
        assert os.get_inheritable(fd) is False
        with Channel.open(shared_daemon.socket, role=Role.WORKER) as other:
            assert other.session != channel.session
            with mmap.mmap(fd, 4096) as mine, mmap.mmap(other.arena_fds[0], 4096) as theirs:
                mine[:4] = b"same"
                assert theirs[:4] == b"same"


def test_the_session_file_is_locked_shared_and_mapped_and_not_inherited(
    shared_daemon: Daemon, nothing_left: None
) -> None:
    with Channel.open(shared_daemon.socket, role=Role.WORKER) as channel:
        (found,) = Path(f"{shared_daemon.socket}.sessions").rglob(str(channel.session))
        path = str(found)
        with open(path) as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert path in Path("/proc/self/maps").read_text()
        assert os.get_inheritable(channel._session_fd) is False
    assert path not in Path("/proc/self/maps").read_text()


def test_an_observer_asks_for_status_and_nothing_else(shared_daemon: Daemon, nothing_left: None) -> None:
    with Channel.open(shared_daemon.socket, role=Role.OBSERVER) as channel:
        assert channel.arena_fds == []
        with pytest.raises(UsageError, match="only ask for status"):
            channel.call("lease", n=1)
        assert channel.call("status")["status"]["schema"] == 1


def test_the_default_socket_is_the_daemons(
    shared_daemon: Daemon, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHAREDMIRROR_SOCKET", shared_daemon.socket)
    with Channel.open(role=Role.OBSERVER) as channel:
        assert channel.path == shared_daemon.socket


@pytest.mark.parametrize("listening", [False, True])
def test_use_after_close_is_refused_and_closing_again_is_not(
    shared_daemon: Daemon, nothing_left: None, listening: bool
) -> None:
    channel = Channel.open(shared_daemon.socket, role=Role.WORKER)
    if listening:
        channel.listen()
        channel.listen()
    channel.close()
    channel.close()
    for call in (lambda: channel.call("contains", keys=[]), channel.listen, channel.check_usable):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_typed_error_leaves_the_connection_usable(shared_daemon: Daemon, nothing_left: None) -> None:
    with Channel.open(shared_daemon.socket, role=Role.WORKER) as channel:
        for _ in range(3):
            with pytest.raises(UsageError, match="attach to a pool first"):
                channel.call("contains", keys=[])
            with pytest.raises(ProtocolError, match="over the limit"):
                channel.call("contains", keys=[bytes(wire.MAX_FRAME_BYTES)])
        assert channel.call("status")["status"]["schema"] == 1


def test_threads_share_a_channel_with_and_without_a_listener(shared_daemon: Daemon, nothing_left: None) -> None:
    with Channel.open(shared_daemon.socket, role=Role.WORKER) as channel:
        wrong: list[object] = []

        def ask() -> None:
            for number in range(25):
                try:
                    channel.call(f"no-such-{threading.get_ident()}-{number}")
                except ProtocolError as error:
                    if f"no-such-{threading.get_ident()}-{number}" not in error.message:
                        wrong.append(error.message)
                except BaseException as error:
                    wrong.append(error)

        for _ in range(2):
            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            channel.listen()
        assert wrong == []


def test_the_listener_hears_a_push_while_no_call_is_under_way(
    shared_daemon: Daemon, processes: Processes, wait_until: Until
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool="listener")
    with Channel.open(shared_daemon.socket, role=Role.SCHEDULER) as channel:
        channel.call("attach", pool="listener", engine="0", launch=None, wait_s=5)
        lease = channel.call("lease", n=2)
        channel.call("abort", lease=lease["lease"], pages=None)
        (push,) = wait_until(worker.pushes)
        assert push == {"push": "revoked", "leases": [lease["lease"]], "lease_floor": lease["lease"]}
        worker.call("drained", leases=[lease["lease"]], hits=[])
        shared_daemon.wait_pages("listener", free=8, leased=0)
        channel.call("detach", unmapped=True)


def test_what_follows_a_push_runs_in_the_listener_and_may_call(
    shared_daemon: Daemon, processes: Processes, nothing_left: None
) -> None:
    heard: list[dict[str, Any]] = []
    done = threading.Event()
    threads: set[str] = set()
    attach: dict[str, Any] = {
        "pool": "then", "tag": "", "engine": "0", "launch": None, "rank": 0, "world_size": 1, "page_size": 16,
        "frames_per_page": 1, "kind": "leased", "layout": "page", "num_host_pages": 9, "wait_s": 5,
        "planes": [["k", 0, 1, 4096, 16]],
    }  # fmt: skip

    with Channel.open(shared_daemon.socket, role=Role.WORKER, on_push=heard.append) as channel:

        def answer() -> None:
            threads.add(threading.current_thread().name)
            channel.call("drained", leases=[lease for push in heard for lease in push["leases"]], hits=[])
            done.set()

        channel.call("attach", **attach)
        channel.listen(answer)
        # The same session leases and aborts, so the push comes while its call is under way.
        lease = channel.call("lease", n=8)["lease"]
        channel.call("abort", lease=lease, pages=None)
        assert done.wait(20)
        assert threads == {"sharedmirror-listener"}
        shared_daemon.wait_pages("then", free=8, leased=0)
        channel.call("detach", unmapped=True)


def test_a_push_from_before_the_listener_is_heard_too(
    shared_daemon: Daemon, processes: Processes, nothing_left: None
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool="before")
    heard: list[dict[str, Any]] = []
    done = threading.Event()
    with Channel.open(shared_daemon.socket, role=Role.WORKER, on_push=heard.append) as channel:
        attach: dict[str, Any] = {
            "pool": "before", "tag": "", "engine": "1", "rank": 0, "world_size": 1, "page_size": 16, "wait_s": 5,
            "frames_per_page": 1, "kind": "leased", "layout": "page", "planes": [["k0", 0, 1, 4096, 16]],
        }  # fmt: skip
        channel.call("attach", **attach)
        channel.call("abort", lease=channel.call("lease", n=1)["lease"])
        assert len(heard) == 1
        channel.listen(done.set)
        heard_all = done.wait(3)
        channel.call("detach", unmapped=True)
    assert heard_all


def test_an_idle_listener_comes_back_to_a_restarted_daemon(
    start: Starter, processes: Processes, wait_until: Until
) -> None:
    first = start()
    (worker,) = processes.engine(first.socket)
    first.kill()
    second = start()
    assert second.status()["daemon"]["epoch"] == 2
    resumed = f"event=resumed session={worker.hello['session']} pid={worker.pid}"
    wait_until(lambda: resumed in second.log())
    second.wait_status(lambda status: [s["state"] for s in status["sessions"]] == ["attached"])
    assert worker.call("contains", keys=[b"k"])["states"] == "m"
    # It came back once, and stayed.
    assert second.log().count(resumed) == 1


def test_a_call_comes_back_to_a_restarted_daemon(start: Starter, processes: Processes) -> None:
    first = start()
    (worker,) = processes.engine(first.socket)
    with Channel.open(first.socket, role=Role.SCHEDULER) as channel:
        channel.call("attach", pool="default", engine="0", wait_s=5)
        lease = channel.call("lease", n=2)
        channel.held = lambda: ([lease["lease"]], [])
        first.kill()
        second = start()
        worker.call("commit", lease=lease["lease"], pages=None)
        sealed = channel.call("seal", lease=lease["lease"], keys=[b"a", b"b"], pages=None)
        assert sealed["sealed"] == lease["pages"]
        assert channel.epoch == 2
        assert second.pool("default")["pages"]["sealed"] == 2
        channel.call("detach", unmapped=True)


def test_a_forked_childs_channel_refuses_calls_and_its_close_harms_nobody(
    shared_daemon: Daemon, processes: Processes
) -> None:
    worker = processes.worker(shared_daemon.socket)
    worker.attach(pool="forked")
    assert worker.ask("call_in_fork") == {"code": "forked"}
    assert worker.call("contains", keys=[b"k"]) == {"states": "m", "id": 2}
