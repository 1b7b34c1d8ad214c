"""A client process for the tests: opens a real channel and does what the lines on its stdin say.

``worker_process.py SOCKET ROLE [UID]``. Each line is a JSON map with ``do``; each is answered by one JSON
line. Bytes travel as ``{"hex": ...}``. Everything is imported before the uid changes, because another
uid may not be able to read the interpreter's files.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from typing import Any

from sharedmirror.channel import Channel
from sharedmirror.errors import SharedMirrorError
from sharedmirror.types import Lease, Role

SLEEP = "/bin/sleep"


def to_json(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"{value!r} cannot be sent")


def from_json(body: dict[str, Any]) -> Any:
    return bytes.fromhex(body["hex"]) if "hex" in body else body


class Process:
    """The channel of this process and the commands over it."""

    def __init__(self, socket: str, role: str) -> None:
        self.pushes: list[dict[str, Any]] = []
        self.channel = Channel.open(socket, role=Role(role), on_push=self.pushes.append)
        self.answers = False
        if role != Role.OBSERVER.value:
            self.channel.listen(self.drain)

    def drain(self) -> None:
        """Answer what was pushed, as a worker without copies under way does."""
        while self.answers and self.pushes:
            push = self.pushes.pop(0)
            if push["push"] == "shrink":
                self.channel.call("shrunk", number=push["number"])
                continue
            pages = [[push["lease"], push["pages"]]] if push["push"] == "revoked_pages" else []
            self.channel.call("drained", leases=push.get("leases", []), hits=push.get("hits", []), pages=pages)

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self, "do_" + command.pop("do"))(**command)
        return answer

    def do_call(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"body": self.channel.call(op, **arguments)}

    def do_commit(self, pickled: bytes, pages: list[int] | None = None) -> dict[str, Any]:
        lease = pickle.loads(pickled)
        assert isinstance(lease, Lease)
        body = self.channel.call("commit", lease=lease.id, pages=pages)
        return {"body": body, "pages": list(lease.pages), "generations": list(lease.generations)}

    def do_answer_pushes(self) -> dict[str, Any]:
        self.answers = True
        self.drain()
        return {}

    def do_pushes(self) -> dict[str, Any]:
        return {"pushes": self.pushes}

    def do_close(self) -> dict[str, Any]:
        self.channel.close()
        return {}

    def do_fork(self, kind: str) -> dict[str, Any]:
        """Leave a child behind: it ``keeps`` all, only ``maps`` (descriptors closed), or ``execs`` a helper."""
        pid = os.fork()
        if pid:
            return {"pid": pid}
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        if kind == "maps":
            os.closerange(3, 1024)
        elif kind == "execs":
            os.execv(SLEEP, [SLEEP, "600"])
        while True:
            signal.pause()

    def do_call_in_fork(self) -> dict[str, Any]:
        """Return what a forked child gets from a call, and whether the parent's channel survives the child's close."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.channel.call("contains", keys=[])
                word = "served"
            except SharedMirrorError as error:
                word = error.code
            self.channel.close()
            os.write(write, word.encode())
            os._exit(0)
        os.close(write)
        with open(read, encoding="ascii") as pipe:
            word = pipe.read()
        os.waitpid(pid, 0)
        return {"code": word}


def main() -> None:
    socket, role = sys.argv[1:3]
    if len(sys.argv) > 3:
        os.setgroups([])
        os.setgid(int(sys.argv[3]))
        os.setuid(int(sys.argv[3]))

    def answer(body: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(body, default=to_json) + "\n")
        sys.stdout.flush()

    try:
        process = Process(socket, role)
    except SharedMirrorError as error:
        answer({"error": error.to_wire()})
        return
    answer({"session": process.channel.session})
    for line in sys.stdin:
        try:
            body = process.do(json.loads(line, object_hook=from_json))
        except SharedMirrorError as error:
            body = {"error": error.to_wire()}
        answer(body)
    process.channel.close()


if __name__ == "__main__":
    main()
