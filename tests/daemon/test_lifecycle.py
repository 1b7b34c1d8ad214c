"""One daemon a socket: who may start, what it replaces, what it leaves alone."""

from __future__ import annotations

import os
import signal
import socket as sockets
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import paths
from sharedmirror.channel import Channel
from sharedmirror.errors import EnvironmentFault
from sharedmirror.types import Role
from sharedmirrord import lifecycle

if TYPE_CHECKING:
    from tests.conftest import Processes, Starter

Until = Callable[..., Any]
LOCKER = """
import sys
from sharedmirrord import lifecycle
with lifecycle.instance_lock(sys.argv[1], "the socket"):
    print("locked", flush=True)
    sys.stdin.read()
"""


# --- the parts


def test_the_lock_names_its_holder_and_falls_with_it(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "new" / "directory" / "d.lock")
    holder = subprocess.Popen([sys.executable, "-c", LOCKER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    with pytest.raises(lifecycle.AlreadyRunning, match=f"pid {holder.pid} already serves the socket") as caught:
        with lifecycle.instance_lock(path, "the socket"):
            pytest.fail("two hold the lock")
    assert caught.value.ids == {"pid": str(holder.pid)} or caught.value.ids == {"pid": holder.pid}
    assert int(Path(path).read_text()) == holder.pid
    holder.kill()
    holder.communicate()
    with lifecycle.instance_lock(path, "the socket"):
        assert int(Path(path).read_text()) == os.getpid()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_lock_that_cannot_be_made_names_the_path(tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=f"cannot open {tmp_path}/file/d.lock.*--socket"):
        with lifecycle.instance_lock(str(tmp_path / "file" / "d.lock"), "the socket"):
            pytest.fail("this cannot be locked")


@pytest.mark.parametrize(("for_others", "mode"), [(False, 0o600), (True, 0o666)])
def test_the_socket_has_its_mode_and_goes_at_the_end(
    tmp_path: Path, nothing_left: None, for_others: bool, mode: int
) -> None:
    path = str(tmp_path / "d.sock")
    mask = os.umask(0o022)
    try:
        with lifecycle.listening_socket(path, for_others=for_others):
            found = os.lstat(path)
            assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == mode
        assert not os.path.exists(path)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(mask)


def test_a_socket_that_another_put_there_since_stays(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "d.sock")
    with lifecycle.listening_socket(path, for_others=False):
        os.rename(path, path + ".old")
        with sockets.socket(sockets.AF_UNIX) as other:
            other.bind(path)
    assert os.path.exists(path)


def test_a_dead_socket_is_replaced(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "d.sock")
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(path)
    with lifecycle.listening_socket(path, for_others=False), sockets.socket(sockets.AF_UNIX) as client:
        client.connect(path)


@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling link", "pipe"])
def test_what_is_no_socket_stays(tmp_path: Path, nothing_left: None, kind: str) -> None:
    path, target = tmp_path / "d.sock", tmp_path / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        if kind == "link":
            target.write_text("precious")
        path.symlink_to(target)
    with pytest.raises(EnvironmentFault, match=f"{path} exists and is no socket; remove it or choose another"):
        with lifecycle.listening_socket(str(path), for_others=False):
            pytest.fail("it was replaced")
    assert os.path.lexists(path)
    assert kind != "file" or path.read_text() == "precious"


def test_a_living_strangers_socket_stays(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "d.sock")
    with sockets.socket(sockets.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen()
        with pytest.raises(EnvironmentFault, match=f"another program answers on {path}"):
            with lifecycle.listening_socket(path, for_others=False):
                pytest.fail("it was replaced")
        with sockets.socket(sockets.AF_UNIX) as client:
            client.connect(path)


def test_a_strangers_socket_of_another_type_stays(tmp_path: Path, nothing_left: None) -> None:
    path = str(tmp_path / "d.sock")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as stranger:
        stranger.bind(path)
        with pytest.raises(EnvironmentFault, match=f"{path} cannot be examined"):
            with lifecycle.listening_socket(path, for_others=False):
                pytest.fail("it was replaced")
    assert os.path.exists(path)


def test_segment_names_tell_owner_and_instance() -> None:
    names = lifecycle.segment_names(bytes(range(16)))
    assert len(set(names)) == 2
    assert all(name.startswith(f"/sharedmirror-{os.getuid()}-000102030405-") for name in names)
    assert names != lifecycle.segment_names(bytes(range(1, 17)))


def test_the_boot_id_is_read() -> None:
    assert len(lifecycle.boot_id()) == 36 and lifecycle.boot_id() == lifecycle.boot_id()


# --- daemons


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(start: Starter) -> None:
    daemon = start()
    second = start.run("--memory", "8MiB", "--pin", "none", "--socket", daemon.socket)
    assert second.returncode == 1
    assert f"a daemon with pid {daemon.pid} already serves {daemon.socket}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert daemon.status()["daemon"]["pid"] == daemon.pid
    third = start(socket=start.path("other.sock"), memory="8MiB")
    assert third.status()["daemon"]["instance"] != daemon.status()["daemon"]["instance"]


def test_a_relative_path_to_the_same_socket_is_the_same(start: Starter) -> None:
    daemon = start()
    relative = os.path.relpath(daemon.socket)
    second = start.run("--memory", "8MiB", "--pin", "none", "--socket", relative)
    assert second.returncode == 1 and f"pid {daemon.pid} already serves" in second.stderr


def test_a_stopped_first_daemon_is_still_the_first(start: Starter) -> None:
    daemon = start()
    daemon.process.send_signal(signal.SIGSTOP)
    second = start.run("--memory", "8MiB", "--pin", "none", "--socket", daemon.socket)
    assert second.returncode == 1 and f"pid {daemon.pid} already serves" in second.stderr


def test_a_killed_daemons_socket_is_replaced(start: Starter) -> None:
    first = start()
    first.kill()
    assert os.path.exists(first.socket)
    second = start()
    daemon = second.status()["daemon"]
    assert daemon["pid"] == second.pid != first.pid
    with Channel.open(second.socket, role=Role.WORKER) as channel:
        assert channel.greeting.arenas == [32 << 20]
    assert second.end() == 0
    assert second.segments() == []


def test_session_files_of_a_daemon_before_are_no_obstacle(start: Starter) -> None:
    """After a reboot the socket's directory may still be there and the shared memory not."""
    first = start()
    first.kill()
    for name in first.segments():
        os.unlink(f"/dev/shm/{name}")
    directory = Path(paths.session_dir(first.socket))
    for where in (directory, directory / "0123456789ab"):
        where.mkdir(parents=True, exist_ok=True)
        for number in range(50):
            (where / str(number)).write_bytes(bytes(4096))
    second = start()
    with Channel.open(second.socket, role=Role.WORKER) as channel:
        assert channel.session > 0


@pytest.mark.parametrize("kind", ["file", "stranger"])
def test_a_foreign_file_at_the_socket_path_is_refused_and_stays(start: Starter, kind: str) -> None:
    path = start.path()
    with sockets.socket(sockets.AF_UNIX) as stranger:
        if kind == "file":
            Path(path).write_text("precious")
        else:
            stranger.bind(path)
            stranger.listen()
        result = start.run("--memory", "8MiB", "--pin", "none", "--socket", path)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and path in result.stderr and "Traceback" not in result.stderr
    words = "exists and is no socket" if kind == "file" else "another program answers"
    assert words in result.stderr
    assert kind != "file" or Path(path).read_text() == "precious"


def test_a_directory_that_may_not_be_written_is_named(start: Starter) -> None:
    Path(start.path("file")).write_text("")
    result = start.run("--memory", "8MiB", "--pin", "none", "--socket", start.path("file/d.sock"))
    assert result.returncode == 1
    assert start.path("file/d.sock.lock") in result.stderr and "--socket" in result.stderr


def test_an_ended_daemon_leaves_only_its_lock(start: Starter, processes: Processes) -> None:
    daemon = start()
    (worker,) = processes.engine(daemon.socket)
    worker.call("detach", unmapped=True)
    assert daemon.end() == 0
    left = {name for name in os.listdir(start.directory) if name.startswith("d.sock")}
    assert left == {"d.sock.lock"}
    assert daemon.session_files() == []
    assert daemon.segments() == []
    again = start()
    assert again.status()["daemon"]["instance"] != ""
