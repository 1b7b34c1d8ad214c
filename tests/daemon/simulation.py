"""A deterministic world for the daemon: fake clock, transport, process table and memory, driven by one seed.

The daemon is the real core over the real record store in plain bytes, with a rim that follows
``server``'s rules: writes first, then answers. It is killed at any point: between events, inside the
stores of a commit, between commit and answer, and while it recovers. Its clients are in
``simulated_clients``.

The memory remembers what was copied to each page under which generation. ``Violation`` names what
broke; the world that raised it is told by its seed alone.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from sharedmirror.errors import SharedMirrorError
from sharedmirror.types import Role
from sharedmirrord.core import machine, sessions
from sharedmirrord.core.durable import Put
from sharedmirrord.core.model import Effects, Peer, State
from sharedmirrord.core.recover import recover
from sharedmirrord.core.regions import ArenaSpace
from sharedmirrord.journal import Window
from sharedmirrord.records import RecordStore
from tests.daemon.durable_view import durable_view, plain, state_problems
from tests.daemon.store_memory import ARENA_BYTES, ByteStorage, every_store, new_store

DOUBT_AFTER_S = 0.25
CRASHES = ("idle", "inside", "before the answer", "inside")
Body = dict[str, Any]


class Violation(AssertionError):
    """Raised when something happened that must never happen."""


class _Killed(BaseException):
    """The daemon was killed; no ``except Exception`` may save it."""


@dataclass
class Process:
    """One process and its forks. Its copies go on as long as one of them lives."""

    pid: int
    name: str
    alive: bool = True
    stopped: bool = False
    ended: bool = False
    """Whether the pidfd says so: a moment after a kill."""
    forks: set[int] = field(default_factory=set)
    socket_forks: set[int] = field(default_factory=set)
    """Forks that kept the socket."""
    connections: list[Connection] = field(default_factory=list)
    inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    """What happens to it while it is stopped."""

    @property
    def mapped(self) -> bool:
        """Whether anything is left that could copy, and that holds the session file's lock."""
        return not self.ended or bool(self.forks)


@dataclass
class Connection:
    """A socket between a process and one life of the daemon; in order, with delays."""

    process: Process
    life: int
    on_frame: Callable[[Body], None]
    on_lost: Callable[[], None]
    open: bool = True
    session: int | None = None
    to_daemon: float = 0.0
    to_client: float = 0.0


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

    def land(self, process: Process, rank: int, page: int, generation: int, key: bytes, done: Callable[[], None]) -> None:
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


class Daemon:
    """The rim, as ``server`` has it: one life after another over the same memory."""

    replies_first = False
    """A planted bug: answers go out before the writes are durable."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.life = 0
        self.up = False
        self.storage = ByteStorage(capacity=1 << 19)
        self.store = new_store(self.storage)[1]
        self.state = State(ArenaSpace(ARENA_BYTES))
        self.connections: dict[int, Connection] = {}
        self.sockets: list[Connection] = []
        """All connections of this life, greeted or not."""
        self.watched: dict[int, Process | None] = {}
        self.armed: str | None = None
        self.answered: dict[int, int] = {}
        """The last mutating request of each session that was answered."""
        self.answers: dict[tuple[int, int], Body] = {}
        self._timer = 0
        self._steps = 0

    # -- lives -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        self.up = True
        self._apply(machine.Ready())

    def crash(self, views: list[Body]) -> None:
        """Die; the next life must find one of the states of ``views``."""
        world = self.world
        world.count("crashes")
        self.up, self.armed = False, None
        for connection in self.sockets:
            if world.rng.random() < 0.5:
                world.cut(connection)  # what was sent is lost
            else:
                world.at(0.3, world.cut, connection)  # what was sent still arrives
        self.sockets.clear()
        self.connections.clear()
        world.at(world.rng.uniform(0.02, 1.5), self._recover, views)

    def _recover(self, views: list[Body]) -> None:
        world = self.world
        if world.rng.random() < 0.3:
            self._killed_store(world.rng.randrange(8), lambda: RecordStore.open(self.storage))
        self.store = RecordStore.open(self.storage)
        try:
            self.state = recover(self.store.records(), self.store.slots, ARENA_BYTES, world.now)
        except SharedMirrorError as error:
            raise world.violation(f"10: {error.message}") from error
        found = durable_view(self.state)
        world.must(found in views, f"10: an operation happened in part: {_difference(found, views[-1])}")
        for number, session in self.state.sessions.items():
            known = self.answered.get(number, 0)
            world.must(session.last_request >= known, f"7: answer {known} of session {number} is lost")
        for lease in self.state.leases.values():
            world.granted |= dict(zip(lease.pages, lease.generations, strict=True))
        self._check()
        survivors = {n: self._process_of(session.peer) for n, session in self.state.sessions.items()}
        self.watched = survivors
        self.start()
        for number, process in survivors.items():
            if process is None or process.ended:
                world.at(0.0, self._check_end, number, world.now, 0.02)

    def _process_of(self, peer: Peer) -> Process | None:
        return self.world.processes.get(peer.pid)

    def _killed_store(self, after: int, work: Callable[[], Any]) -> bool:
        """Do ``work`` and die within it after so many stores to memory; returns whether it came to that."""
        left = itertools.count(after, -1)

        def fuse(window: Window, at: int, data: bytes) -> None:
            if next(left) <= 0:
                cut = self.world.rng.randrange(len(data)) & -8 if len(data) > 8 else 0
                window.view[at : at + cut] = data[:cut]
                raise _Killed

        try:
            with every_store(fuse):
                work()
        except _Killed:
            return True
        return False

    # -- events ----------------------------------------------------------------------------------

    def _apply(self, event: machine.Event) -> None:
        world, state = self.world, self.state
        armed = self.armed
        before = durable_view(state) if armed else {}
        effects = machine.apply(state, event, world.now)
        if self.replies_first:
            self._send(effects)
        if effects.writes:
            if armed == "inside":
                if self._killed_store(world.rng.randrange(12), lambda: self.store.commit(effects.writes)):
                    self.crash([before, durable_view(state)])
                    return
            else:
                self.store.commit(effects.writes)
            if armed in ("before the answer", "inside"):
                self.crash([durable_view(state)])
                return
            for write in effects.writes:
                if isinstance(write, Put) and write.kind == "lease":
                    self._granted(write.value)
        if not self.replies_first:
            self._send(effects)
        for number in effects.forgotten:
            self.watched.pop(number, None)
            self.connections.pop(number, None)
        self._set_timer()
        self._steps += 1
        if self._steps % 32 == 0:
            self._check()
        if armed == "idle":
            self.crash([durable_view(self.state)])

    def _granted(self, lease: Body) -> None:
        granted, world = self.world.granted, self.world
        for page, generation in zip(lease["pages"], lease["generations"], strict=True):
            if generation > granted.get(page, 0):
                granted[page] = generation
        world.must(all(type(page) is int for page in lease["pages"]), "a page is no number")

    def _send(self, effects: Effects) -> None:
        for number, body in [*effects.pushes, *effects.replies]:
            if "id" in body:
                self._note(number, body)
            connection = self.connections.get(number)
            if connection is not None:
                self.world.reply(connection, body)

    def _note(self, number: int, body: Body) -> None:
        """Invariant 8: one request has one answer."""
        request = body["id"]
        code = body["error"]["code"] if "error" in body else ""
        session = self.state.sessions.get(number)
        if code == "stale_request" or session is None or session.last_request != request:
            return
        known = self.answers.setdefault((number, request), plain(body))
        same = known == plain(body)
        self.world.must(same, f"8: request {request} of session {number} got {known}, then {body}")
        self.answered[number] = request

    def _check(self) -> None:
        problems = state_problems(self.state)
        self.world.must(not problems, f"{problems}")

    def _set_timer(self) -> None:
        deadline = machine.next_deadline(self.state)
        self._timer += 1
        if deadline is not None:
            self.world.at(max(0.0, deadline - self.world.now), self._tick, self._timer, self.life)

    def _tick(self, timer: int, life: int) -> None:
        if self.up and (timer, life) == (self._timer, self.life):
            self._apply(machine.Tick())

    # -- connections -----------------------------------------------------------------------------

    def frame(self, connection: Connection, body: Body) -> None:
        number = connection.session
        if body["op"] == "hello":
            self._hello(connection, body)
        elif number is not None and number in self.watched:
            arguments = {name: value for name, value in body.items() if name not in ("op", "id")}
            self._apply(machine.Request(number, body["id"], body["op"], arguments))

    def _hello(self, connection: Connection, body: Body) -> None:
        world, process = self.world, connection.process
        number = self.state.new_id()
        token = body.get("token") or world.rng.randbytes(16)
        peer = Peer(process.pid, 1000, process.pid * 7, hashlib.sha256(token).digest())
        if "session" in body:
            number = body["session"]
            try:
                sessions.check_resume(self.state, number, peer)
            except SharedMirrorError as error:
                world.reply(connection, {"id": 0, "error": error.to_wire()})
                return
            world.must(body.get("honest", True), f"a stranger may resume session {number}")
            world.reply(connection, {"id": 0, "session": number, "token": token})
        else:
            self.watched[number] = process
        connection.session = number
        older = self.connections.get(number)
        self.connections[number] = connection
        if older is not None and older.open:
            world.cut(older)
        if "session" in body:
            self._apply(machine.Resume(number, body["leases"], body["hits"], body["retry"]))
        else:
            self._apply(machine.Hello(number, peer, Role(body["role"])))
            if self.up:
                world.reply(connection, {"id": 0, "session": number, "token": token})

    def lost(self, connection: Connection) -> None:
        number = connection.session
        if not self.up or connection.life != self.life or number is None or self.connections.get(number) is not connection:
            return
        del self.connections[number]
        self._apply(machine.Disconnected(number))
        process = self.watched.get(number)
        if self.up and process is not None and process.ended:
            self._check_end(number, self.world.now, 0.02)

    # -- the end of processes --------------------------------------------------------------------

    def process_ended(self, process: Process) -> None:
        if self.up:
            for number, watched in list(self.watched.items()):
                if watched is process:
                    self._check_end(number, self.world.now, 0.02)

    def _check_end(self, number: int, since: float, delay_s: float, life: int | None = None) -> None:
        """Ask for the proof; while it is missing, say so and ask again."""
        world = self.world
        if not self.up or number not in self.watched or (life is not None and life != self.life):
            return
        process = self.watched[number]
        missing = [
            *(["socket"] if number in self.connections else []),
            *(["lock"] if process is not None and process.forks else []),
        ]
        if not missing:
            self._apply(machine.Gone(number))
            return
        if world.now - since >= DOUBT_AFTER_S:
            world.count("doubts")
            self._apply(machine.Died(number, tuple(missing), (1,)))
        world.at(delay_s, self._check_end, number, since, min(2 * delay_s, 1.0), self.life)


def _difference(found: Body, wanted: Body) -> str:
    for name in wanted:
        if found[name] != wanted[name]:
            return f"{name}: found {found[name]}, was {wanted[name]}"
    return "nothing"
