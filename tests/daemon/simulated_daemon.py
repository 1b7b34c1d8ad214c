"""The daemon of the simulated world: the real core over the real record store, and a rim after ``server``'s rules.

It is killed at any point: between events, inside the stores of a commit, between commit and answer,
and while it recovers. The next life must find the state from before the operation or from after it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sharedmirror.errors import SharedMirrorError
from sharedmirror.types import Role
from sharedmirrord.core import machine, sessions
from sharedmirrord.core.durable import Delete, Put
from sharedmirrord.core.model import Effects, Peer, State
from sharedmirrord.core.recover import recover
from sharedmirrord.core.regions import ArenaSpace
from sharedmirrord.journal import Window
from sharedmirrord.records import RecordStore
from tests.daemon.durable_view import durable_view, plain, state_problems
from tests.daemon.followers import Followers
from tests.daemon.simulated_processes import Body, Connection, Process
from tests.daemon.store_memory import ARENA_BYTES, ByteStorage, every_store, new_store

if TYPE_CHECKING:
    from tests.daemon.simulated_world import World

DOUBT_AFTER_S = 0.25
CRASHES = ("idle", "inside", "before the answer", "inside")


class _Killed(BaseException):
    """The daemon was killed; no ``except Exception`` may save it."""


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
        self.followers = Followers()
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
            if any(isinstance(write, (Put, Delete)) and write.kind == "pool" for write in effects.writes):
                self._check_maps()
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
        problems = state_problems(self.state) + self.followers.problems(self.state)
        self.world.must(not problems, f"{problems}")
        self._check_maps()

    def _check_maps(self) -> None:
        """Invariant 2: nobody maps memory that is free, or another pool's."""
        sizes = {region.id: region.size_bytes for pool in self.state.pools.values() for region in pool.regions}
        for process in self.world.processes.values():
            for region, size_bytes in process.maps.items() if process.mapped else ():
                left = sizes.get(region, 0)
                self.world.must(
                    size_bytes <= left, f"2: {process.name} maps {size_bytes} of region {region}, which has {left}"
                )

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
        if not self.up or number is None or self.connections.get(number) is not connection:
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
