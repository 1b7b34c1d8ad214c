"""Bytes on a real daemon's socket: bad frames, bad order, descriptors nobody asked for, readers that do not read."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import wire
from sharedmirror.channel import Channel
from sharedmirror.errors import from_wire
from sharedmirror.types import Role
from sharedmirrord.connection import MAX_UNSENT_BYTES

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter
    from tests.daemon.conftest import Raw

Until = Callable[..., Any]
Open = Callable[[str], "Raw"]


def descriptors(daemon: Daemon) -> int:
    """Count what the daemon has open, the segments' mappings (which grow) not counted."""
    directory = f"/proc/{daemon.pid}/fd"
    found = []
    for fd in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"{directory}/{fd}"))
    return len([path for path in found if not path.startswith("/dev/shm/")])


def settled(daemon: Daemon) -> int:
    """Count once the daemon has dealt with what went before."""
    seen = [descriptors(daemon)]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        time.sleep(0.01)
        seen.append(descriptors(daemon))
    return seen[-1]


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def still_served(daemon: Daemon) -> None:
    assert daemon.status()["daemon"]["state"] == "ready"


# --- bad frames


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", wire.MAX_FRAME_BYTES + 1), "announces 16777217 bytes; the limit is 16777216"),
        (b"\xff\xff\xff\xff", "announces 4294967295 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "announces"),
        (framed(b""), "is not msgpack"),
        (framed(b"\xc1"), "is not msgpack"),
        (framed(b"\x91" * 100_000), "is not msgpack"),
        (framed(b"\x93\x01\x02\x03"), "something else than a map"),
        (framed(b"\x81\xc4\x02op\x01"), "something else than a map"),
        (framed(b"\x81\x01\x02"), "is not msgpack"),
    ],
)
def test_a_bad_frame_is_answered_and_ends_the_connection(
    shared_daemon: Daemon, raw: Open, greeted: bool, data: bytes, words: str
) -> None:
    connection = raw(shared_daemon.socket)
    if greeted:
        assert "error" not in connection.hello()
    connection.sock.sendall(data)
    answer = connection.receive()
    assert answer is not None and answer["id"] == 0
    assert (answer["error"]["code"], answer["error"]["retryable"]) == ("protocol", False)
    assert words in answer["error"]["message"]
    assert connection.receive() is None
    still_served(shared_daemon)


@pytest.mark.parametrize("size", [1, 3, 4, 10, 40])
def test_a_truncated_frame_is_let_go_with_its_connection(
    shared_daemon: Daemon, raw: Open, wait_until: Until, size: int
) -> None:
    before = settled(shared_daemon)
    connection = raw(shared_daemon.socket)
    connection.sock.sendall(wire.encode({"op": "hello", "id": 0, "protocol": [1, 1], "version": "0" * 99})[:size])
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.receive() is None
    wait_until(lambda: descriptors(shared_daemon) <= before)
    still_served(shared_daemon)


def test_a_frame_may_come_byte_by_byte(shared_daemon: Daemon, raw: Open) -> None:
    connection = raw(shared_daemon.socket)
    for byte in wire.encode({"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": "observer"}):
        connection.sock.sendall(bytes([byte]))
    answer = connection.receive()
    assert answer is not None and answer["protocol"] == 1


def test_a_frame_of_the_limit_is_read(shared_daemon: Daemon, raw: Open) -> None:
    connection = raw(shared_daemon.socket)
    connection.hello()
    empty = len(wire.encode({"op": "x", "id": 1, "fill": bytes(1 << 20)})) - 4 - (1 << 20)
    answer = connection.ask("x", 1, fill=bytes(wire.MAX_FRAME_BYTES - empty))
    assert (answer["id"], answer["error"]["message"]) == (1, "there is no call 'x'")


# --- order


def test_what_comes_before_hello_is_refused_and_ends_the_connection(shared_daemon: Daemon, raw: Open) -> None:
    connection = raw(shared_daemon.socket)
    answer = connection.ask("status", 3)
    assert (answer["id"], answer["error"]["code"]) == (3, "protocol")
    assert "begins with hello" in answer["error"]["message"]
    assert connection.receive() is None


def test_nothing_behind_a_refused_frame_is_looked_at(shared_daemon: Daemon, raw: Open) -> None:
    connection = raw(shared_daemon.socket)
    hello = {"op": "hello", "id": 1, "protocol": [1, 1], "version": "0", "role": "observer"}
    connection.send({"op": "status", "id": 0}, hello)
    answer = connection.receive()
    assert answer is not None and "error" in answer
    assert connection.receive() is None


@pytest.mark.parametrize("role", ["worker", "observer"])
def test_a_second_hello_is_refused_and_the_first_stands(shared_daemon: Daemon, raw: Open, role: str) -> None:
    connection = raw(shared_daemon.socket)
    connection.hello(role)
    answer = connection.ask("hello", 1, protocol=[1, 1], version="0", role="observer")
    assert answer["error"]["message"] == "hello was said already"
    assert connection.ask("status", 2)["status"]["schema"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": [7, 9], "version": "9.8.7"}, "client 9.8.7 speaks protocol 7 to 9"),
        ({"protocol": [0, 0], "version": "0.0.0"}, "client 0.0.0 speaks protocol 0 to 0"),
        ({"protocol": None}, "no protocol range"),
        ({"protocol": ["1", "1"]}, "no protocol range"),
        ({"role": "king"}, "unknown role 'king'"),
        ({"role": None}, "unknown role None"),
        ({"role": ["worker"]}, "unknown role"),
        ({"role": {}}, "unknown role"),
        ({"id": -1}, "an id from 0"),
        ({"id": 1 << 62}, "an id from 0"),
        ({"id": True}, "an id from 0"),
        ({"id": "0"}, "an id from 0"),
        ({"id": None}, "an id from 0"),
        ({"op": 5}, "has an op"),
    ],
    ids=repr,
)
def test_a_bad_hello_says_why_and_ends_the_connection(
    shared_daemon: Daemon, raw: Open, changes: dict[str, Any], words: str
) -> None:
    connection = raw(shared_daemon.socket)
    answer = connection.hello(**changes)
    assert words in answer["error"]["message"]
    assert answer["error"]["code"] == ("version" if "speaks" in words else "protocol")
    assert connection.receive() is None


def test_a_client_too_new_or_too_old_is_told_both_releases(shared_daemon: Daemon, raw: Open) -> None:
    release = shared_daemon.status()["daemon"]["version"]
    for protocol in ([0, 0], [2, 5]):
        error = from_wire(raw(shared_daemon.socket).hello(protocol=protocol, version="77.8")["error"])
        assert f"77.8 speaks protocol {protocol[0]} to {protocol[1]}" in error.message
        assert release in error.message


@pytest.mark.parametrize("version", [None, 5, "x" * 100_000, {"a": 1}, b"\xff"])
def test_a_strange_release_is_no_reason_to_refuse(shared_daemon: Daemon, raw: Open, version: object) -> None:
    assert raw(shared_daemon.socket).hello("observer", version=version)["protocol"] == 1


def test_requests_sent_together_are_answered_in_order(shared_daemon: Daemon, raw: Open) -> None:
    connection = raw(shared_daemon.socket)
    hello = {"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": "worker"}
    connection.send(hello, *({"op": f"x{number}", "id": number} for number in range(1, 50)))
    assert (connection.receive() or {}).get("session")
    for number in range(1, 50):
        answer = connection.receive()
        assert answer is not None
        assert (answer["id"], answer["error"]["message"]) == (number, f"there is no call 'x{number}'")


# --- descriptors


def test_descriptors_that_nobody_asked_for_are_closed(shared_daemon: Daemon, raw: Open, wait_until: Until) -> None:
    with open(os.devnull) as file:
        before = settled(shared_daemon)
        connection = raw(shared_daemon.socket)
        for number in range(4):
            fds = [file.fileno()] * (16 if number else 0)
            hello = {"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": "observer"}
            connection.send({"op": "status", "id": number} if number else hello, fds=fds)
            assert "error" not in (connection.receive() or {})
        wait_until(lambda: descriptors(shared_daemon) == before + 1)
        # More than a message may carry, and some with half a frame.
        connection.send({"op": "status", "id": 9}, fds=[file.fileno()] * 100)
        connection.receive()
        connection.sock.sendmsg(
            [b"\x05"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", *[file.fileno()] * 3))]
        )
        wait_until(lambda: descriptors(shared_daemon) == before + 1)
    connection.sock.close()
    wait_until(lambda: descriptors(shared_daemon) == before)


@pytest.mark.parametrize("what", ["no pidfd", "another process"])
def test_a_pidfd_that_is_none_or_anothers_is_refused(
    shared_daemon: Daemon, raw: Open, wait_until: Until, what: str
) -> None:
    before = settled(shared_daemon)
    fd = os.open(os.devnull, os.O_RDONLY) if what == "no pidfd" else os.pidfd_open(shared_daemon.pid)
    connection = raw(shared_daemon.socket)
    hello = {"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": "worker"}
    connection.send(hello, fds=[fd])
    os.close(fd)
    answer = connection.receive()
    assert answer is not None and answer["error"]["code"] == "protocol"
    assert ("no pidfd" if what == "no pidfd" else f"is of process {shared_daemon.pid}") in answer["error"]["message"]
    assert connection.receive() is None
    wait_until(lambda: descriptors(shared_daemon) == before)


def test_sessions_that_never_attached_leave_nothing(shared_daemon: Daemon, wait_until: Until) -> None:
    before = settled(shared_daemon)
    channels = [Channel.open(shared_daemon.socket, role=role) for role in Role for _ in range(5)]
    wait_until(lambda: len(shared_daemon.session_files()) == 10)
    for channel in channels:
        channel.close()
    wait_until(lambda: descriptors(shared_daemon) == before)
    wait_until(lambda: shared_daemon.session_files() == [])


# --- readers and talkers


def test_half_open_sockets_harm_nobody(start: Starter, raw: Open) -> None:
    daemon = start()
    silent = [raw(daemon.socket) for _ in range(20)]
    for number, connection in enumerate(silent):
        connection.sock.sendall(wire.encode({"op": "hello", "id": 0})[: number % 5])
    for connection in silent[:5]:
        connection.sock.shutdown(socket.SHUT_WR)
    for connection in silent[5:10]:
        connection.sock.shutdown(socket.SHUT_RD)
    still_served(daemon)
    assert daemon.end() == 0


def test_a_slow_reader_stalls_nobody_and_gets_every_answer(
    shared_daemon: Daemon, raw: Open, processes: Processes
) -> None:
    slow = raw(shared_daemon.socket)
    slow.hello("observer")
    count = 2000
    sender = threading.Thread(target=lambda: slow.send(*({"op": "status", "id": n} for n in range(1, count + 1))))
    sender.start()
    sender.join()
    (worker,) = processes.engine(shared_daemon.socket, pool="beside-slow")
    for _ in range(20):
        assert worker.call("contains", keys=[b"k"])["states"] == "m"
    for number in range(1, count + 1):
        answer = slow.receive()
        assert answer is not None and answer["id"] == number


def test_a_reader_that_never_reads_is_let_go_at_the_bound(start: Starter, raw: Open, wait_until: Until) -> None:
    daemon = start()
    # This process stays alive behind a lost session, so the daemon keeps its memory.
    daemon.leaves_segments = True
    greedy = raw(daemon.socket)
    greedy.hello("worker")
    answer = greedy.ask(
        "attach", 1, pool="p", tag="", engine="0", rank=0, world_size=1, page_size=1, frames_per_page=1, kind="leased",
        layout="page", num_host_pages=9, planes=[["k", 0, 1, 4096, 1]],
    )  # fmt: skip
    assert "error" not in answer
    keys = [number.to_bytes(3, "little") for number in range(200_000)]
    answer_bytes = len(wire.encode(greedy.ask("lookup", 2, keys=keys, mode="each")))
    assert answer_bytes > 2 * len(keys)
    # The answer to a repeated request is kept, and sent again.
    again = wire.encode({"op": "lookup", "id": 2}) * (2 * MAX_UNSENT_BYTES // answer_bytes)
    attached = settled(daemon)
    greedy.sock.sendall(again)
    wait_until(lambda: "lost" in [session["state"] for session in daemon.status()["sessions"]])
    # Its pidfd and its session's file stay: nothing is proven.
    wait_until(lambda: descriptors(daemon) == attached - 1)
