"""The rules for where the socket lies."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sharedmirror import paths
from sharedmirror.errors import EnvironmentFault, UsageError


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHAREDMIRROR_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.mark.parametrize("uid", [0, 1000])
def test_the_variable_wins(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("SHAREDMIRROR_SOCKET", "/somewhere/else.sock")
    assert paths.default_socket() == "/somewhere/else.sock"


def test_root_has_a_system_wide_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    assert paths.default_socket() == "/run/sharedmirror/daemon.sock"


def test_others_have_one_in_their_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert paths.default_socket() == "/run/user/1000/sharedmirror/daemon.sock"


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_runtime_directory_the_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if value is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    with pytest.raises(EnvironmentFault, match=r"XDG_RUNTIME_DIR is unset for uid 1000.*SHAREDMIRROR_SOCKET"):
        paths.default_socket()


def test_the_limit_is_the_kernels() -> None:
    longest = "/tmp/" + "s" * (paths.MAX_SOCKET_PATH_BYTES - 5)
    assert paths.check_socket_path(longest) == longest
    with socket.socket(socket.AF_UNIX) as channel, pytest.raises(FileNotFoundError):
        channel.connect(longest)
    with socket.socket(socket.AF_UNIX) as channel, pytest.raises(OSError, match="too long"):
        channel.connect(longest + "s")


@pytest.mark.parametrize("path", ["/tmp/" + "s" * 103, "/tmp/" + "\N{SNOWMAN}" * 35])
def test_a_long_path_is_refused_with_length_and_limit(path: str) -> None:
    with pytest.raises(UsageError, match=rf"{len(path.encode())} bytes and the limit is 107"):
        paths.check_socket_path(path)


@pytest.mark.parametrize(("path", "word"), [("", "empty"), ("/tmp/a\0b", "null byte")])
def test_paths_that_no_file_can_have_are_refused(path: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        paths.check_socket_path(path)


@pytest.mark.parametrize("path", [3, b"/run/a.sock", ["/run/a.sock"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UsageError, match="the socket must be a path, not"):
        paths.check_socket_path(path)


def test_a_path_object_is_a_path() -> None:
    assert paths.check_socket_path(Path("/run/a.sock")) == "/run/a.sock"


def test_files_beside_the_socket() -> None:
    assert paths.session_dir("/run/a.sock") == "/run/a.sock.sessions"
    assert paths.lock_path("/run/a.sock") == "/run/a.sock.lock"
