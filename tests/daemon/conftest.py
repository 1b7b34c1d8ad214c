"""Bare connections for the daemon's tests: bytes as no client of ours would send them."""

from __future__ import annotations

import contextlib
import socket as sockets
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sharedmirror import wire

PATIENCE_S = 20.0


class Raw:
    """A bare connection: bytes and frames as a test wants them."""

    def __init__(self, path: str) -> None:
        self.sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        try:
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise
        self._decoder = wire.FrameDecoder()
        self._frames: list[dict[str, Any]] = []

    def send(self, *frames: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data = b"".join(map(wire.encode, frames))
        rights = [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array("i", fds))] if fds else []
        sent = self.sock.sendmsg([data], rights)
        if sent < len(data):
            self.sock.sendall(data[sent:])

    def receive(self) -> dict[str, Any] | None:
        """Return the next frame, None at the end of the stream."""
        while not self._frames:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def hello(self, role: str = "worker", **changes: Any) -> dict[str, Any]:
        """Shake hands without a pidfd; descriptors that come back are dropped by the kernel."""
        self.send({"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": role} | changes)
        answer = self.receive()
        assert answer is not None
        return answer

    def ask(self, op: str, number: int, **arguments: Any) -> dict[str, Any]:
        self.send({**arguments, "op": op, "id": number})
        answer = self.receive()
        assert answer is not None
        return answer


@pytest.fixture
def raw(nothing_left: None) -> Iterator[Callable[[str], Raw]]:
    """Open bare connections."""
    with contextlib.ExitStack() as stack:

        def connect(path: str) -> Raw:
            connection = Raw(path)
            stack.callback(connection.sock.close)
            return connection

        yield connect
