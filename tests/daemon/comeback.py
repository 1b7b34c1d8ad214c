"""A daemon that is killed and comes back on its socket, and a client of it whose coming back can be held up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sharedmirror.control import Client
from sharedmirrord.failpoints import VARIABLE

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter, Worker

POOL = "default"
KILLED = -9


class Comeback:
    """The daemons of one socket, one after another."""

    def __init__(self, start: Starter, memory: str = "32MiB", failpoints: str = "") -> None:
        self._start = start
        self._memory = memory
        self.daemon: Daemon = self.again(failpoints=failpoints)

    @property
    def socket(self) -> str:
        return self._start.path()

    def again(self, *arguments: str, failpoints: str = "", state: str | None = "ready") -> Daemon:
        self.daemon = self._start(
            *arguments, memory=self._memory, environment={VARIABLE: failpoints} if failpoints else {}, state=state
        )
        if failpoints:
            self.daemon.leaves_segments = True
        return self.daemon

    def wait_killed(self) -> None:
        """Wait until the daemon has died at a failpoint."""
        assert self.daemon.process.wait(20) == KILLED

    def restart(self, failpoints: str = "") -> Daemon:
        self.daemon.kill()
        return self.again(failpoints=failpoints)

    def sessions(self) -> dict[int, dict[str, Any]]:
        """Return the sessions by pid."""
        return {session["pid"]: session for session in self.daemon.status()["sessions"]}

    def wait_attached(self, count: int) -> None:
        """Wait until so many sessions, and no others, are there."""
        self.daemon.wait_status(lambda status: [s["state"] for s in status["sessions"]] == ["attached"] * count)


@contextlib.contextmanager
def held_back(client: Client) -> Iterator[None]:
    """Keep a client of this process from coming back to its daemon; use from the client's own thread."""
    with client._channel._lock:
        yield


def engine(processes: Processes, life: Comeback, world_size: int = 2, pages: int = 33, **attach: Any) -> list[Worker]:
    """Return the ranks of an engine; they drain at once what is revoked or released."""
    attach = {"answers": True, **attach}
    return processes.engine(life.socket, world_size, num_host_pages=pages, **attach)


def keys_of(*numbers: int) -> list[bytes]:
    return [b"key%d" % number for number in numbers]


def publish(client: Client, workers: list[Worker], keys: list[bytes]) -> tuple[int, ...]:
    """Make keys readable; returns their pages."""
    lease = client.lease(len(keys))
    sealed = client.seal(lease, keys)
    for worker in workers:
        answer = worker.commit(lease)
        sealed_now = answer["sealed"]
    assert sealed.pending == lease.pages and tuple(sealed_now) == lease.pages
    return lease.pages


def stop(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGSTOP)


def go_on(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGCONT)
