"""The daemon at its limits: other uids, descriptors that run out, memory that is not there yet."""

from __future__ import annotations

import itertools
import os
import shutil
import socket as sockets
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import wire
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    DaemonUnavailable,
    EnvironmentFault,
    SharedMirrorError,
)
from sharedmirror.types import Role
from tests.daemon.shared_memory import mount_namespace

if TYPE_CHECKING:
    from tests.conftest import Processes, Starter
    from tests.daemon.conftest import Raw

Until = Callable[..., Any]
Open = Callable[[str], "Raw"]
MIB = 1 << 20
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another uid")


# --- other uids


@pytest.fixture
def public() -> Iterator[str]:
    """A socket path in a directory that every uid may enter."""
    directory = tempfile.mkdtemp(prefix="smt-")
    os.chmod(directory, 0o755)
    yield f"{directory}/d.sock"
    shutil.rmtree(directory)


def connect_as(uid: int, path: str) -> tuple[int, int]:
    """Connect as another uid, send a hello and garbage; return an errno, or 0, and the bytes that came back."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        failure, received = 0, 0
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as sock:
                sock.settimeout(20)
                sock.connect(path)
                hello = {"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": "observer"}
                try:
                    sock.sendall(wire.encode(hello) + b"\xff" * 100)
                    received = len(sock.recv(1 << 16))
                except (BrokenPipeError, ConnectionResetError):
                    pass
        except OSError as error:
            failure = error.errno or -1
        os.write(write, f"{failure} {received}".encode())
        os._exit(0)
    os.close(write)
    with open(read, encoding="ascii") as pipe:
        answer = [int(word) for word in pipe.read().split()]
    os.waitpid(pid, 0)
    return answer[0], answer[1]


@as_root
def test_another_uid_cannot_even_connect(start: Starter, public: str) -> None:
    daemon = start(socket=public)
    assert stat.S_IMODE(os.stat(public).st_mode) == 0o600
    assert connect_as(NOBODY, public) == (13, 0)
    assert "refused" not in daemon.log()


@as_root
def test_another_uid_is_closed_before_anything_is_parsed(start: Starter, public: str, wait_until: Until) -> None:
    daemon = start(socket=public)
    os.chmod(public, 0o666)
    assert connect_as(NOBODY, public) == (0, 0)
    wait_until(lambda: f"event=refused uid={NOBODY}" in daemon.log())
    assert "msgpack" not in daemon.log()
    assert daemon.status()["daemon"]["state"] == "ready"


@as_root
def test_an_allowed_uid_is_served_and_no_other(start: Starter, processes: Processes, public: str) -> None:
    daemon = start("--allow-uid", "12345", "--allow-uid", str(NOBODY), socket=public)
    worker = processes.worker(public, uid=NOBODY)
    worker.attach()
    (session,) = daemon.status()["sessions"]
    assert (session["uid"], session["pid"]) == (NOBODY, worker.pid)
    assert connect_as(NOBODY - 1, public) == (0, 0)
    assert f"event=refused uid={NOBODY - 1}" in daemon.log()
    worker.kill()
    daemon.wait_status(lambda status: status["sessions"] == [])


# --- limits


def test_running_out_of_descriptors_raises_an_alarm_and_heals(start: Starter, raw: Open, wait_until: Until) -> None:
    daemon = start(before=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    watcher = raw(daemon.socket)
    watcher.hello("observer")
    numbers = itertools.count(1)

    def alarms() -> list[dict[str, str]]:
        found: list[dict[str, str]] = watcher.ask("status", next(numbers))["status"]["alarms"]
        return found

    assert alarms() == []
    crowd = [raw(daemon.socket) for _ in range(80)]
    (alarm,) = wait_until(alarms)
    assert alarm["code"] == "accept" and "LimitNOFILE" in alarm["message"]
    for connection in crowd:
        connection.sock.close()
    wait_until(lambda: daemon.status()["alarms"] == [])
    with Channel.open(daemon.socket, role=Role.WORKER) as channel:
        assert channel.greeting.arenas == [32 * MIB]


def test_a_session_that_has_no_descriptor_left_is_refused_with_the_remedy(start: Starter, raw: Open) -> None:
    daemon = start(before=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    channels: list[Channel] = []
    try:
        with pytest.raises((EnvironmentFault, SharedMirrorError)) as caught:
            while True:
                channels.append(Channel.open(daemon.socket, role=Role.WORKER, timeout_s=0.5))
        assert isinstance(caught.value, EnvironmentFault)
        assert 5 < len(channels) < 40
        assert channels[0].call("status")["status"]["daemon"]["pid"] == daemon.pid
    finally:
        for channel in channels:
            channel.close()
    daemon.wait_status(lambda status: status["alarms"] == [])


def test_a_prefaulting_daemon_answers_status_and_lets_attach_wait(start: Starter, processes: Processes) -> None:
    daemon = start(memory="1GiB", state=None)
    path = Path(daemon.socket)
    worker = None
    seen = set()
    while worker is None:
        if path.exists():
            try:
                seen.add(daemon.status()["daemon"]["state"])
                worker = processes.worker(daemon.socket)
            except DaemonUnavailable:
                pass
    worker.attach()
    status = daemon.status()
    assert status["daemon"]["state"] == "ready" and seen <= {"prefaulting", "ready"}
    assert status["arena"]["bytes_ready"] == 1 << 30


# --- a /dev/shm without room for a page table

NO_TABLE = """
    import json, os, signal, subprocess, sys, tempfile
    from sharedmirror import connect
    from sharedmirror.channel import Channel
    from sharedmirror.errors import MemoryFault
    from sharedmirror.types import Plane, Role
    from sharedmirrord import memory
    from tests.conftest import until
    from tests.daemon.core_driver import attach_arguments

    path = tempfile.mkdtemp() + "/d.sock"
    line = [sys.executable, "-m", "sharedmirrord", "--memory", "32MiB", "--pin", "none", "--socket", path]
    daemon = subprocess.Popen(line)

    def attach(channel, name, pages):
        planes = [Plane("k", 0, 1, 16, 16).to_wire()]
        asked = attach_arguments(pool=name, engine=name, world_size=1, num_host_pages=pages, planes=planes)
        return channel.call("attach", **asked)["num_host_pages"]

    try:
        until(lambda: os.path.exists(path), "the daemon listens")
        with Channel.open(path, role=Role.OBSERVER) as other:
            until(lambda: other.call("status")["status"]["daemon"]["state"] == "ready", "the daemon is ready")
        with Channel.open(path, role=Role.WORKER) as channel:
            free = [memory.shm_free()]
            try:
                attach(channel, "huge", 1_000_000)
            except MemoryFault as error:
                refused = error.message
            free.append(memory.shm_free())
            with Channel.open(path, role=Role.OBSERVER) as other:
                status = other.call("status")["status"]
            made = attach(channel, "small", 100)
            with connect(path, "small", "small", timeout_s=5) as client:
                leased = len(client.lease(7).pages)
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(20) == 0
    told = dict(alarms=status["alarms"], pools=status["pools"])
    print(json.dumps(dict(free=free, refused=refused, made=made, leased=leased, **told)))
"""


def test_a_pool_whose_page_table_has_no_room_is_refused_and_nobody_else_waits() -> None:
    result = mount_namespace()("size=40m,huge=never", NO_TABLE)
    assert "'huge' of 1000000 pages needs a page table of " in result["refused"]
    assert "remount,size=" in result["refused"]
    assert "records" not in [alarm["code"] for alarm in result["alarms"]] and "save_failed" not in result["stderr"]
    assert result["free"][0] == result["free"][1] > 4 * MIB
    assert (result["pools"], result["made"], result["leased"]) == ([], 100, 7)
