"""A daemon in miniature for tests of the worker's side: an arena, attach, and a log of what was said.

``FakeDaemon.open`` fits ``SharedHostMirror(_open=...)``. Regions get two extents in the wrong order, so
that a mirror which takes them for contiguous in the arena is found out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sharedmirror.errors import SharedMirrorError
from sharedmirror.protocol import Errand

MIB2 = 2 << 20
POISON = 0xA5


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class FakeDaemon:
    """One arena on a memfd; ``calls`` is what the mirrors said."""

    def __init__(self, arena_bytes: int = 16 * MIB2, *, num_host_pages: int = 8) -> None:
        self.fd = os.memfd_create("sharedmirror-test")
        os.ftruncate(self.fd, arena_bytes)
        self._map = mmap.mmap(self.fd, arena_bytes)
        self.arena: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.arena[:] = POISON
        self.default_pages = num_host_pages
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failures: dict[str, SharedMirrorError] = {}
        self.channels: list[FakeChannel] = []
        self.reply: dict[str, Any] = {}
        self.damage: Callable[[dict[str, Any]], None] = lambda reply: None
        self.answers: dict[str, dict[str, Any]] = {}

    def open(self, socket: str | None, on_push: Callable[[dict[str, Any]], None]) -> FakeChannel:
        channel = FakeChannel(self, on_push)
        self.channels.append(channel)
        return channel

    def said(self, op: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.calls if name == op]

    def attach(self, request: dict[str, Any]) -> dict[str, Any]:
        pages = request["num_host_pages"] or self.default_pages
        frames = pages * request["frames_per_page"]
        sizes = [plane[3] for plane in request["planes"]]
        planes, at = [], 0
        if request["layout"] == "slab":
            for size in sizes:
                planes.append([0, at, size])
                at = round_up(at + size * frames, 16)
        else:
            stride = sum(round_up(size, 16) for size in sizes)
            for size in sizes:
                planes.append([0, at, stride])
                at += round_up(size, 16)
            at = stride * frames
        total = max(round_up(at, MIB2), 2 * MIB2)
        extents = [[0, 2 * MIB2, total - MIB2], [0, 0, MIB2]]
        region = {"id": 1, "bytes": total, "extents": extents, "ranks": [0]}
        reply = {"session": 1, "pool": 1, "num_host_pages": pages, "regions": [region], "planes": planes}
        self.reply = reply
        self.damage(reply)
        return reply

    def region(self) -> npt.NDArray[np.uint8]:
        """A copy of the region's bytes in region order."""
        parts = [
            self.arena[offset : offset + length] for _, offset, length in self.reply["regions"][0]["extents"]
        ]  # fmt: skip
        return np.concatenate(parts)

    def close(self) -> None:
        self.arena = np.zeros(0, np.uint8)
        self._map.close()
        os.close(self.fd)


class FakeChannel:
    def __init__(self, daemon: FakeDaemon, on_push: Callable[[dict[str, Any]], None]) -> None:
        self.daemon = daemon
        self.arena_fds = [daemon.fd]
        self.on_push = on_push
        self.then: Callable[[], float | None] | None = None
        self.closed = False

    def call(
        self,
        op: str,
        *,
        timeout_s: float | None = None,
        come_back: bool = True,
        errand: Errand | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        if self.closed:
            raise RuntimeError(f"{op} on a closed channel")
        self.daemon.calls.append((op, arguments))
        if op in self.daemon.failures:
            raise self.daemon.failures[op]
        if op == "attach":
            return self.daemon.attach(arguments)
        if op == "commit":
            return {"sealed": arguments["pages"] or [], "pending": [], "duplicates": []}
        return self.daemon.answers.get(op, {})

    def check_usable(self) -> None:
        pass

    def listen(self, then: Callable[[], float | None] | None = None) -> None:
        self.then = then

    def push(self, **body: Any) -> float | None:
        """Deliver a push and run what the listener would run after it."""
        self.on_push(body)
        return self.then() if self.then is not None else None

    def close(self) -> None:
        self.closed = True
