"""Words to a service manager: real sockets, no systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharedmirrord import notify


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return the socket that a service manager would listen on."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@sharedmirror-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(5)
        listener.bind(name.replace("@", "\0") if name.startswith("@") else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listener


def test_each_word_arrives_as_it_is(manager: socket.socket) -> None:
    assert notify.ready()
    assert manager.recv(200) == b"READY=1"
    assert notify.stopping()
    assert manager.recv(200) == b"STOPPING=1"
    assert notify.sd_notify("RELOADING=1\nMONOTONIC_USEC=5")
    assert manager.recv(200) == b"RELOADING=1\nMONOTONIC_USEC=5"


def test_a_status_stays_one_line(manager: socket.socket) -> None:
    assert notify.status("prefaulting 3 of 64 GiB\nREADY=1")
    assert manager.recv(200) == b"STATUS=prefaulting 3 of 64 GiB READY=1"


def test_a_manager_that_does_not_read_is_given_up(manager: socket.socket) -> None:
    taken = 0
    while notify.sd_notify("STATUS=x"):
        taken += 1
        assert taken < 100_000
    assert taken > 0


@pytest.mark.parametrize(
    "address", [None, "", "relative", "vsock:2:1234", "/nowhere/at/all", "@sharedmirror-test-nobody", "/" + "x" * 200]
)
def test_no_manager_is_no_error(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    before = len(os.listdir("/proc/self/fd"))
    assert notify.ready() is False
    assert len(os.listdir("/proc/self/fd")) == before


def test_text_that_cannot_be_sent_is_no_error(manager: socket.socket) -> None:
    assert notify.status("\udcff") is False
