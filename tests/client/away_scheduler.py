"""A scheduler in a process of its own, for tests that kill it: does what comes through a pipe."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from sharedmirror.control import Hit, connect

PATIENCE_S = 20.0


def main(pipe: Connection, socket: str, name: str, engine: str) -> None:
    with connect(socket, name, engine, timeout_s=PATIENCE_S) as client:
        pipe.send("connected")
        hits: dict[int, Hit] = {}
        while (command := pipe.recv()) != "close":
            what, *arguments = command
            try:
                if what == "lookup":
                    hit = client.lookup(*arguments)
                    hits[hit.id] = hit
                    pipe.send(hit)
                elif what == "release":
                    hits.pop(arguments[0]).release()
                    pipe.send(None)
                else:
                    pipe.send(getattr(client, what)(*arguments))
            except Exception as error:
                pipe.send(error)
    pipe.send("closed")


class SchedulerProcess:
    """Asks the client of another process."""

    def __init__(self, socket: str, name: str = "default", engine: str = "0") -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=main, args=(theirs, socket, name, engine))
        self.process.start()
        theirs.close()
        assert self._answer() == "connected"

    def ask(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, *arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the scheduler does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)

    def close(self) -> None:
        if self.process.is_alive():
            self._pipe.send("close")
            assert self._answer() == "closed"
        self.process.join(PATIENCE_S)
        self.process.close()
        self._pipe.close()
