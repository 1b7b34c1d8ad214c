"""The blocking channel against peers that speak otherwise: another release, garbage, silence, a lost connection."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sharedmirror import __version__, wire
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    CallTimeout,
    DaemonUnavailable,
    ProtocolError,
    SharedMirrorError,
    VersionMismatch,
)
from sharedmirror.types import Role

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


def test_a_push_that_comes_during_the_listeners_own_call_is_heard_too(peer: Peer) -> None:
    listening = threading.Event()
    heard: list[int] = []
    answered: list[int] = []
    done = threading.Event()

    def push(number: int) -> bytes:
        return wire.encode({"push": "revoked", "leases": [number]})

    def serve() -> None:
        sock, _ = peer.listener.accept()
        with sock, tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            sock.recv(1 << 16)
            rights = array.array("i", [file.fileno()] * 2)
            sock.sendmsg([wire.encode(HELLO)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            listening.wait(20)
            sock.sendall(push(1))
            sock.recv(1 << 16)
            # The second push comes ahead of the answer to what the first one led to.
            sock.sendall(push(2) + wire.encode({"id": 1}))
            if sock.recv(1 << 16):
                sock.sendall(wire.encode({"id": 2}))

    peer.threads.append(threading.Thread(target=serve))
    peer.threads[-1].start()
    with Channel.open(peer.path, role=Role.WORKER, on_push=lambda body: heard.append(body["leases"][0])) as channel:

        def answer() -> None:
            for number in heard[len(answered) :]:
                answered.append(number)
                channel.call("drained", leases=[number], hits=[])
            if answered == [1, 2]:
                done.set()

        channel.listen(answer)
        listening.set()
        all_answered = done.wait(3)
    assert all_answered, (heard, answered)
