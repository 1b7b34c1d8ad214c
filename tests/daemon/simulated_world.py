"""The simulated world: a fake clock, a transport that delays, drops and repeats, processes and the memory.

The memory remembers what was copied to each page under which generation: a copy that lands in a page
which was granted again, or a load that sees other bytes than its key's, is a ``Violation``.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import msgpack

from sharedmirrord.core import machine
from tests.daemon.simulated_daemon import Daemon
from tests.daemon.simulated_processes import Body, Connection, Process, Violation


class World:
    """Clock, memory, processes and the daemon. ``at`` plans what happens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 100.0
        self.calm = False
        """No more faults, and nothing new is begun."""
        self.memory: dict[tuple[int, int], tuple[bytes, int]] = {}
        """(rank, page) to (key whose bytes are there, generation)."""
        self.granted: dict[int, int] = {}
        """The generation of each page's last durable grant."""
        self.processes: dict[int, Process] = {}
        self.daemon = Daemon(self)
        self.counts: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(1000)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def at(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), do, arguments))

    def run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, do, arguments = heapq.heappop(heap)
            do(*arguments)
        self.now = until

    def must(self, condition: object, what: str) -> None:
        if not condition:
            raise self.violation(what)

    def violation(self, what: str) -> Violation:
        return Violation(f"seed {self.seed} at {self.now:.3f} s: {what}")

    # -- memory ----------------------------------------------------------------------------------

    def land(
        self, process: Process, rank: int, page: int, generation: int, key: bytes, done: Callable[[], None]
    ) -> None:
        """A copy into a page arrives, unless nothing of its process is left."""
        if not process.mapped:
            return
        latest = self.granted.get(page, 0)
        self.must(latest == generation, f"4: a copy of generation {generation} landed in page {page} of {latest}")
        self.memory[rank, page] = key, generation
        self.count("copies")
        self.tell(process, done)

    def check_bytes(self, rank: int, page: int, key: bytes) -> None:
        found = self.memory.get((rank, page))
        self.must(found and found[0] == key, f"5: page {page} of rank {rank} should hold {key!r}, not {found}")
        self.count("loads")

    # -- processes -------------------------------------------------------------------------------

    def spawn(self, name: str) -> Process:
        process = Process(next(self._pids), name)
        self.processes[process.pid] = process
        return process

    def tell(self, process: Process, do: Callable[..., None], *arguments: Any) -> None:
        """Something happens to a process: now, when it goes on, or never because it is dead."""
        if process.stopped:
            process.inbox.append((do, arguments))
        elif process.alive:
            do(*arguments)

    def wake(self, process: Process) -> None:
        """SIGCONT."""
        process.stopped = False
        while process.inbox and not process.stopped:
            do, arguments = process.inbox.pop(0)
            self.tell(process, do, *arguments)

    def kill(self, process: Process) -> None:
        """SIGKILL. The pidfd speaks a moment later; until then copies may still land."""
        if process.alive:
            self.count("kills")
            process.alive = process.stopped = False
            process.inbox.clear()
            if not process.socket_forks:
                self._close(process)
            self.at(self.rng.uniform(0.01, 0.3), self._end, process)

    def _close(self, process: Process) -> None:
        for connection in process.connections:
            # What it has sent may still be read, or not.
            unread_s = max(0.0, connection.to_daemon - self.now) if self.rng.random() < 0.5 else 0.0
            self.at(unread_s, self.cut, connection)

    def _end(self, process: Process) -> None:
        process.ended = True
        self.daemon.process_ended(process)

    def fork(self, process: Process) -> None:
        """A child that shares the mapping, with or without the socket, lives on for a while."""
        child = next(self._pids)
        process.forks.add(child)
        if self.rng.random() < 0.5:
            process.socket_forks.add(child)
        self.at(self.rng.uniform(0.2, 6.0), self._end_fork, process, child)

    def _end_fork(self, process: Process, child: int) -> None:
        process.forks.discard(child)
        process.socket_forks.discard(child)
        if not process.alive and not process.socket_forks:
            self._close(process)

    # -- transport -------------------------------------------------------------------------------

    def connect(
        self, process: Process, on_frame: Callable[[Body], None], on_lost: Callable[[], None]
    ) -> Connection | None:
        """Return a connection, or None when no daemon answers."""
        if not self.daemon.up:
            return None
        connection = Connection(process, self.daemon.life, on_frame, on_lost)
        process.connections = [connection]
        self.daemon.sockets.append(connection)
        return connection

    def send(self, connection: Connection, body: Body) -> None:
        """From client to daemon."""
        data = msgpack.packb(body, use_bin_type=True)
        connection.to_daemon = max(connection.to_daemon, self.now + self._delay())
        self.at(connection.to_daemon - self.now, self._arrive, connection, data)

    def _delay(self) -> float:
        return self.rng.random() * (0.3 if self.rng.random() < 0.05 else 0.004)

    def _arrive(self, connection: Connection, data: bytes) -> None:
        daemon = self.daemon
        if daemon.up and connection.life == daemon.life and connection.open:
            daemon.frame(connection, msgpack.unpackb(data, raw=False, strict_map_key=False))

    def reply(self, connection: Connection, body: Body) -> None:
        """From daemon to client."""
        if connection.open:
            data = msgpack.packb(body, use_bin_type=True)
            connection.to_client = max(connection.to_client, self.now + self._delay())
            self.at(connection.to_client - self.now, self._answer, connection, data)

    def _answer(self, connection: Connection, data: bytes) -> None:
        if connection.open:
            body = msgpack.unpackb(data, raw=False, strict_map_key=False)
            self.tell(connection.process, self._take, connection, body)

    def _take(self, connection: Connection, body: Body) -> None:
        if connection is connection.process.connections[-1]:
            connection.on_frame(body)

    def duplicate(self, connection: Connection, body: Body) -> None:
        """A request arrives a second time, once it is answered."""
        delay_s = connection.to_daemon - self.now + self.rng.uniform(0.01, 0.4)
        self.at(delay_s, self._arrive_again, connection, body)

    def _arrive_again(self, connection: Connection, body: Body) -> None:
        daemon = self.daemon
        session = daemon.state.sessions.get(connection.session or 0)
        if not (daemon.up and connection.life == daemon.life and connection.open and session is not None):
            return
        waits = any(waiter.session == session.id for waiter in daemon.state.waiters)
        if not waits and (body["op"] not in machine.MUTATING or session.last_request >= body["id"]):
            self.count("duplicates")
            daemon.frame(connection, body)

    def impostor(self, session: int, process: Process) -> None:
        """Somebody with the pid of a session's process, but without its token, wants to be that session."""
        if self.daemon.up:
            self.count("impostors")
            connection = Connection(process, self.daemon.life, lambda body: None, lambda: None)
            hello = {"op": "hello", "session": session, "token": b"?" * 16, "honest": False}
            self.send(connection, hello | {"leases": [], "hits": [], "retry": None})
            self.at(1.0, self.hang_up, connection)

    def hang_up(self, connection: Connection) -> None:
        """The client closes its end."""
        if connection.open:
            connection.open = False
            self.at(self._delay(), self.daemon.lost, connection)

    def cut(self, connection: Connection) -> None:
        """The connection ends, and with it what is under way on it; both sides learn of it in their own time."""
        if connection.open:
            connection.open = False
            self.at(self._delay(), self.daemon.lost, connection)
            self.at(self._delay(), self.tell, connection.process, self._tell_client, connection)

    def _tell_client(self, connection: Connection) -> None:
        if connection is connection.process.connections[-1]:
            connection.on_lost()
