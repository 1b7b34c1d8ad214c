"""The blocking channel: against a real daemon, and against peers that speak otherwise."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
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
    SharedMirrorError,
    UsageError,
    VersionMismatch,
)
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter

Until = Callable[..., Any]
HELLO: dict[str, Any] = {
    "id": 0, "protocol": 1, "version": "0.0.1", "instance": b"i" * 16, "epoch": 3, "session": 7, "token": b"t" * 16,
    "arenas": [4096],
}  # fmt: skip


class Peer:
    """A stand-in for a daemon of another release: it says what a test tells it to, over a real socket."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "peer.sock")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.threads: list[threading.Thread] = []
        self.heard: list[dict[str, Any]] = []

    def then(self, *answers: bytes | dict[str, Any] | None, fds: int = 2, stay: threading.Event | None = None) -> None:
        """Take one connection; give one answer a request (None: silence), descriptors with the first; then close."""
        thread = threading.Thread(target=self._serve, args=(answers, fds, stay))
        self.threads.append(thread)
        thread.start()

    def _serve(self, answers: tuple[Any, ...], fds: int, stay: threading.Event | None) -> None:
        sock, _ = self.listener.accept()
        decoder = wire.FrameDecoder()
        with sock, tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            for number, answer in enumerate(answers):
                frames: list[dict[str, Any]] = []
                while not frames:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    frames = decoder.feed(data)
                self.heard += frames
                if answer is None:
                    continue
                payload = answer if isinstance(answer, bytes) else wire.encode(answer)
                passed = array.array("i", [file.fileno()] * (0 if number else fds))
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if passed else []
                sock.sendmsg([payload], rights)
            if stay is not None:
                stay.wait(20)

    def close(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        self.listener.close()


@pytest.fixture
def peer(nothing_left: None) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory() as directory, contextlib.closing(Peer(directory)) as peer:
        yield peer


@pytest.fixture
def stay() -> Iterator[threading.Event]:
    """Set when the test is over: a peer that keeps its connection waits for it."""
    event = threading.Event()
    yield event
    event.set()


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


def test_a_socket_path_over_107_bytes_is_refused_before_anything_is_opened(nothing_left: None) -> None:
    path = "/tmp/" + "x" * 103
    with pytest.raises(UsageError, match=f"108 bytes and the limit is 107.*{path}"):
        Channel.open(path, role=Role.WORKER)


@pytest.mark.parametrize("role", list(Role))
def test_a_newer_daemon_that_refuses_names_both_releases(peer: Peer, role: Role) -> None:
    message = f"the client {__version__} speaks protocol 1 to 1, this side 7 to 9"
    peer.then({"id": 0, "error": VersionMismatch(message).to_wire()}, fds=0)
    with pytest.raises(VersionMismatch, match=message):
        Channel.open(peer.path, role=role)
    assert peer.heard[0]["protocol"] == [wire.PROTOCOL_MIN, wire.PROTOCOL_MAX]
    assert peer.heard[0]["version"] == __version__


@pytest.mark.parametrize("theirs", [0, 7])
def test_a_daemon_that_answers_in_another_protocol_is_refused(peer: Peer, theirs: int) -> None:
    peer.then(HELLO | {"protocol": theirs, "version": "9.8.7"})
    with pytest.raises(VersionMismatch, match=f"daemon 9.8.7 speaks protocol {theirs} to {theirs}") as caught:
        Channel.open(peer.path, role=Role.WORKER)
    assert __version__ in caught.value.message


@pytest.mark.parametrize(
    "hello", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", {"id": 0}, {"id": 5}, HELLO | {"session": "x"}], ids=repr
)
def test_a_peer_that_is_no_daemon_is_a_protocol_error_and_leaves_no_descriptor(peer: Peer, hello: Any) -> None:
    peer.then(hello)
    with pytest.raises(ProtocolError):
        Channel.open(peer.path, role=Role.WORKER)


@pytest.mark.parametrize("fds", [0, 1, 3, 16])
def test_too_few_or_too_many_descriptors_are_refused_and_closed(peer: Peer, fds: int) -> None:
    peer.then(HELLO, fds=fds)
    with pytest.raises(ProtocolError, match=f"passed {fds} descriptors for 1 arenas"):
        Channel.open(peer.path, role=Role.WORKER)


def test_descriptors_for_an_observer_are_not_kept(peer: Peer) -> None:
    peer.then(HELLO)
    with Channel.open(peer.path, role=Role.OBSERVER) as channel:
        assert channel.arena_fds == []


def test_a_session_file_that_cannot_be_mapped_leaves_no_descriptor(peer: Peer, stay: threading.Event) -> None:
    read, write = os.pipe()

    def serve() -> None:
        sock, _ = peer.listener.accept()
        with sock:
            sock.recv(1 << 16)
            rights = array.array("i", [read, write])
            sock.sendmsg([wire.encode(HELLO)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    peer.threads.append(threading.Thread(target=serve))
    peer.threads[-1].start()
    with pytest.raises((SharedMirrorError, OSError)):
        Channel.open(peer.path, role=Role.WORKER)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("answers", [(), (b"",), (wire.encode(HELLO)[:-1],)], ids=["unheard", "unanswered", "cut"])
def test_a_daemon_that_goes_in_the_handshake_is_unavailable(peer: Peer, answers: tuple[bytes, ...]) -> None:
    peer.then(*answers)
    with pytest.raises(DaemonUnavailable, match="lost|closed the connection"):
        Channel.open(peer.path, role=Role.WORKER)


def test_a_daemon_that_never_answers_hello_times_out(peer: Peer, stay: threading.Event) -> None:
    peer.then(None, stay=stay)
    with pytest.raises(CallTimeout, match="not answered in time") as caught:
        Channel.open(peer.path, role=Role.WORKER, timeout_s=0.05)
    assert caught.value.retryable
    stay.set()


# --- calls over a connection that fails


def test_a_call_after_a_timeout_waits_for_the_answer_before(peer: Peer, stay: threading.Event) -> None:
    answered = threading.Event()

    def serve() -> None:
        sock, _ = peer.listener.accept()
        with sock, tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            sock.recv(1 << 16)
            rights = array.array("i", [file.fileno()] * 2)
            sock.sendmsg([wire.encode(HELLO)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            sock.recv(1 << 16)
            answered.wait(20)
            sock.sendall(wire.encode({"id": 1, "which": "first"}))
            sock.recv(1 << 16)
            sock.sendall(wire.encode({"id": 2, "which": "second"}))

    peer.threads.append(threading.Thread(target=serve))
    peer.threads[-1].start()
    with Channel.open(peer.path, role=Role.WORKER) as channel:
        with pytest.raises(CallTimeout):
            channel.call("lease", timeout_s=0.05, n=1)
        with pytest.raises(CallTimeout):
            channel.call("lease", timeout_s=0.05, n=1)
        answered.set()
        assert channel.call("lease", n=1)["which"] == "second"


def test_garbage_instead_of_an_answer_ends_the_connection(peer: Peer, stay: threading.Event) -> None:
    peer.then(HELLO, b"\x01\0\0\0\xc1", stay=stay)
    with Channel.open(peer.path, role=Role.WORKER, timeout_s=0.2) as channel:
        with pytest.raises(ProtocolError, match="not msgpack"):
            channel.call("lease", n=1)
        with pytest.raises(DaemonUnavailable):
            channel.call("lease", n=1)
        assert [frame["op"] for frame in peer.heard] == ["hello", "lease"]
        stay.set()


def test_a_daemon_that_goes_instead_of_answering_is_unavailable(peer: Peer) -> None:
    peer.then(HELLO, b"")
    with Channel.open(peer.path, role=Role.WORKER, timeout_s=0.2) as channel:
        for _ in range(2):
            with pytest.raises(DaemonUnavailable) as caught:
                channel.call("lease", n=1)
            assert caught.value.retryable


def test_an_observer_does_not_come_back(peer: Peer) -> None:
    peer.then(HELLO, b"")
    with Channel.open(peer.path, role=Role.OBSERVER) as channel:
        with pytest.raises(DaemonUnavailable, match="closed the connection|lost"):
            channel.call("status")
        with pytest.raises(DaemonUnavailable, match="lost; connect again"):
            channel.call("status")


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
        assert (channel.instance, channel.epoch, channel.version) == (daemon["instance"], 1, __version__)
        assert channel.session > 0
        assert channel.arena_bytes == [256 << 20]
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
        assert shared_daemon.session_files() == [str(channel.session)]
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
    attach = {
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


def test_a_forked_childs_channel_refuses_calls_and_its_close_harms_nobody(
    shared_daemon: Daemon, processes: Processes
) -> None:
    worker = processes.worker(shared_daemon.socket)
    worker.attach(pool="forked")
    assert worker.ask("call_in_fork") == {"code": "forked"}
    assert worker.call("contains", keys=[b"k"]) == {"states": "m", "id": 2}
