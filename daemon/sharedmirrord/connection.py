"""One client's socket: frames in, frames out, descriptors beside them.

asyncio's transports cannot pass descriptors, so this uses the event loop's readiness callbacks on a
raw socket. Nothing here blocks: what a slow reader does not take is kept up to a bound, beyond which
the connection ends.

Keeps invariant 11: the peer's uid is checked by the server before this class reads a byte.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from sharedmirror import wire
from sharedmirror.errors import SharedMirrorError

MAX_UNSENT_BYTES = 64 << 20
_READ_BYTES = 1 << 16
"""A larger buffer is mapped afresh by each read: 38 us instead of 3."""
_CREDENTIALS = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return pid (0 from another pid namespace) and uid of the process that connected."""
    pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class Connection:
    """A framed stream over one accepted socket.

    ``on_frames(connection, frames, fds)`` owns the descriptors it is given. ``on_end(connection,
    reason)`` is called once, when the socket is at its end or was given up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frames: Callable[[Connection, list[dict[str, Any]], list[int]], None],
        on_end: Callable[[Connection, str], None],
    ) -> None:
        self.pid, self.uid = peer_of(sock)
        self.session: int | None = None
        self.closed = False
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._on_frames = on_frames
        self._on_end = on_end
        self._decoder = wire.FrameDecoder()
        self._unsent = bytearray()
        self._closing = False
        sock.setblocking(False)
        loop.add_reader(self._fd, self.read)

    def read(self) -> None:
        """Take what has arrived; ends the connection at the end of the stream or on bad bytes."""
        if self.closed:
            return
        fds: list[int] = []
        try:
            data, ancillary, _flags, _address = self._sock.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(4 * wire.MAX_FDS), socket.MSG_CMSG_CLOEXEC
            )
            fds = _descriptors(ancillary)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(f"the socket failed: {error.strerror}")
            return
        if not data:
            _close_all(fds)
            self.end("the client closed the connection")
            return
        try:
            frames = self._decoder.feed(data)
        except SharedMirrorError as error:
            _close_all(fds)
            self.send({"id": 0, "error": error.to_wire()})
            self.end_after_sending(error.message)
            return
        if frames or fds:
            self._on_frames(self, frames, fds)

    def drain_input(self) -> None:
        """Read until the socket has nothing more or is at its end."""
        while not self.closed:
            try:
                if self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    self.end("the client's process has ended")
                    return
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.end("the socket failed")
                return
            self.read()

    def send(self, body: dict[str, Any], fds: list[int] | None = None) -> None:
        """Send one frame, now or as the peer takes it; ``fds`` go with its first byte."""
        if self.closed or self._closing:
            return
        data = wire.encode(body)
        if self._unsent:
            self._keep(data)
            return
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sent = (
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                if rights
                else self._sock.send(data, socket.MSG_NOSIGNAL)
            )
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self.end(f"the socket failed: {error.strerror}")
            return
        if sent < len(data):
            self._loop.add_writer(self._fd, self._write)
            self._keep(data[sent:])

    def _keep(self, data: bytes) -> None:
        if len(self._unsent) + len(data) > MAX_UNSENT_BYTES:
            self.end(f"the client leaves over {MAX_UNSENT_BYTES} bytes unread")
            return
        self._unsent += data

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(f"the socket failed: {error.strerror}")
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._fd)
            if self._closing:
                self.end("closed after the last answer")

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._unsent)

    def end_after_sending(self, reason: str) -> None:
        """End the connection once the answers kept so far are taken; read no more."""
        self._closing = True
        if self.closed or not self._unsent:
            self.end(reason)
        else:
            self._loop.remove_reader(self._fd)

    def end(self, reason: str) -> None:
        """End the connection at once; may be called again."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._on_end(self, reason)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
