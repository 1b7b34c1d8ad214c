"""Clients of the simulated world, and its workers: they follow the real client's rules.

A worker keeps the real ``Ledger``: it refuses stale leases, commits what is complete, and answers
``drained`` once nothing is in flight. A session has one request under way, repeats it under the same
id after a reconnect, and names what it holds when it resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharedmirror.errors import CopyError, PageError, StaleLease
from sharedmirror.transfers import Commit, Ledger, Transfer
from sharedmirror.types import Lease, Plane, Role
from tests.daemon.core_driver import attach_arguments
from tests.daemon.simulated_processes import Body, Connection
from tests.daemon.simulated_world import World

RANKS = 2
LEAST, PAGES = 3, 8
"""Of 1 MiB for each rank, so that two of them make a level."""
MIB = 1 << 20
Then = Callable[[Body], None]


class Landing:
    """How many copies of a transfer are still under way."""

    def __init__(self, left: int) -> None:
        self.left = left

    def done(self) -> bool:
        return self.left == 0

    def wait(self, timeout_s: float | None = None) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class SeenHit:
    """A hit as it travels to the workers."""

    id: int
    pool: int
    pages: tuple[int, ...]


class Client:
    """One process with one session. ``ask`` queues a request and gives its answer to ``then``."""

    role = Role.SCHEDULER
    refusals: tuple[str, ...] = ("engine_busy", "ranks_missing", "rank_attached", "pool_not_found", "arena_busy")
    """What an attach may be told, to try again."""

    def __init__(self, world: World, engine: str, name: str) -> None:
        self.world = world
        self.engine = engine
        self.process = world.spawn(f"{engine}/{name}")
        self.connection: Connection | None = None
        self.session: int | None = None
        self.attached = False
        self.talking = False
        """Whether the handshake is through."""
        self.leaving = False
        self._token = b""
        self._last = 0
        self._queue: deque[tuple[str, Body, Then]] = deque()
        self._current: tuple[int, str, Body, Then] | None = None
        self._connect()

    @property
    def idle(self) -> bool:
        return self.attached and self._current is None and not self._queue

    def under_way(self) -> str:
        """Say what the client is about, for a report."""
        return f"attached={self.attached} session={self.session} request={self._current} queue={list(self._queue)}"

    def later(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Do something in a while, if the process lives and runs then."""
        self.world.at(delay_s, self.world.tell, self.process, do, *arguments)

    def ask(self, op: str, then: Then = lambda body: None, **arguments: Any) -> None:
        self._queue.append((op, arguments, then))
        self._pump()

    def held(self) -> tuple[list[int], list[int]]:
        """The leases and hits that the session names when it resumes."""
        return [], []

    # -- the connection --------------------------------------------------------------------------

    def _connect(self) -> None:
        self.talking = False
        self.connection = self.world.connect(self.process, self._frame, self._lost)
        if self.connection is None:
            self.later(self.world.rng.uniform(0.01, 0.3), self._connect)
            return
        hello: Body = {"op": "hello", "role": self.role.value}
        if self.session is not None:
            leases, hits = self.held()
            retry = self._current[0] if self._current else None
            hello |= {"session": self.session, "token": self._token, "leases": leases, "hits": hits, "retry": retry}
        self.world.send(self.connection, hello)

    def _lost(self) -> None:
        self.world.count("reconnects")
        self.talking = False
        self.later(self.world.rng.uniform(0.001, 0.05), self._connect)

    def _frame(self, body: Body) -> None:
        if "push" in body:
            self.pushed(body)
        elif not self.talking:
            self._greeted(body)
        elif self._current is not None and body["id"] == self._current[0]:
            (_, op, _, then), self._current = self._current, None
            if "error" in body:
                # What an honest client is never told: it keeps the protocol, and asks for what can be.
                dishonest = body["error"]["code"] in ("protocol", "stale_request", "usage", "bad_page", "bad_key")
                self.world.must(not dishonest, f"{self.process.name} asked {op} and was told {body['error']}")
            then(body)
            self._pump()

    def _greeted(self, body: Body) -> None:
        if "error" in body:
            if self.leaving:
                self.world.kill(self.process)  # its last answer got lost
                return
            # Only a session that never attached may be unknown to the next daemon.
            self.world.must(not self.attached, f"{self.process.name} lives and lost its session: {body['error']}")
            self.world.must(body["error"]["code"] == "instance_changed", str(body))
            self.session, self._current, self._last = None, None, 0
            self._queue.clear()
            if self.connection is not None:
                self.world.hang_up(self.connection)
            self._connect()
            return
        self.talking = True
        fresh = self.session is None
        self.session, self._token = body["session"], body["token"]
        if fresh:
            self.attach()
        if self._current is not None and not fresh:
            self._say(self._current)
        self._pump()

    def _pump(self) -> None:
        if self.talking and self._current is None and self._queue:
            op, arguments, then = self._queue.popleft()
            self._last += 1
            self._current = self._last, op, arguments, then
            self._say(self._current)

    def _say(self, request: tuple[int, str, Body, Then]) -> None:
        number, op, arguments, _ = request
        if self.connection is not None:
            self.world.send(self.connection, {**arguments, "op": op, "id": number})
            if not self.world.calm and self.world.rng.random() < 0.03:
                self.world.duplicate(self.connection, {**arguments, "op": op, "id": number})

    # -- what the roles do -----------------------------------------------------------------------

    def attach_arguments(self) -> Body:
        return {"pool": "p", "engine": self.engine, "wait_s": 3.0}

    def attach(self) -> None:
        if not self.attached and self._current is None and not self._queue:
            self.ask("attach", self._joined, **self.attach_arguments())

    def _joined(self, body: Body) -> None:
        if "error" in body:
            self.world.must(
                body["error"]["code"] in self.refusals,
                f"{self.process.name} was refused: {body['error']}",
            )
            self.later(self.world.rng.uniform(0.05, 0.3), self.attach)
        else:
            self.attached = True
            self.joined(body)

    def joined(self, body: Body) -> None:
        raise NotImplementedError

    def pushed(self, body: Body) -> None:
        """A scheduler needs none of them."""


class Worker(Client):
    """One rank: copies, commits, answers."""

    role = Role.WORKER

    def __init__(self, world: World, engine: str, rank: int) -> None:
        self.rank = rank
        self.ledger: Ledger | None = None
        self._early: list[Body] = []
        self._answering = False
        self.flying = 0
        """Transfers that are not complete."""
        self.backed = 0
        """Pages that are mapped."""
        self._owed: dict[int, Body] = {}
        self._unmapped_for = 0
        super().__init__(world, engine, f"rank{rank}")

    def attach_arguments(self) -> Body:
        planes = [Plane("k", self.rank, RANKS, MIB, 4).to_wire()]
        count = [LEAST, PAGES]
        return attach_arguments(engine=self.engine, rank=self.rank, num_host_pages=count, planes=planes, wait_s=3.0)

    def joined(self, body: Body) -> None:
        self._mapped(body)
        self.ledger = Ledger(body["pool"], PAGES)
        self.ledger.forestall(body)
        early, self._early = self._early, []
        for push in early:
            self.pushed(push)

    # -- memory that comes and goes --------------------------------------------------------------

    def _mapped(self, body: Body) -> None:
        if "error" not in body and not self.leaving:
            self.backed = max(self.backed, body["backed"])
            for region in body["regions"]:
                self.process.maps[region["id"]] = max(region["bytes"], self.process.maps.get(region["id"], 0))

    def _back(self, pages: list[int], then: Callable[[], None]) -> None:
        """Do something with pages, once there is memory under them; the daemon is asked once."""
        if self.ledger is None:
            return
        if max(pages) < self.backed:
            then()
            return

        def told(body: Body) -> None:
            self._mapped(body)
            if max(pages) < self.backed:
                self.world.count("extensions")
                then()

        self.ask("extents", told)

    def _shrink(self, number: int) -> None:
        """Unmap what is wanted back, once no copy is under way there; never twice for one word of the daemon."""
        pages = self._owed[number]["pages"]
        if self.ledger.copies_from(pages) if self.ledger is not None else self.flying:
            self.later(0.02, self._shrink, number)
            return
        if number > self._unmapped_for:
            self.world.count("shrinks")
            self._unmapped_for = number
            self.backed = min(self.backed, pages)
            for region, size_bytes in self._owed[number]["regions"]:
                if region in self.process.maps:
                    self.process.maps[region] = min(self.process.maps[region], size_bytes)
        self.later(self.world.rng.random() * 0.1, lambda: self.ask("shrunk", number=number))

    # -- the daemon's word, and copies -----------------------------------------------------------

    def pushed(self, body: Body) -> None:
        if body["push"] == "shrink" and (self.ledger is not None or self.leaving):
            self._owed[body["number"]] = body
            self._shrink(body["number"])
        elif self.ledger is None:
            self._early.append(body)
        elif self.ledger.on_push(body):
            self.answer()

    def answer(self) -> None:
        """Say what is drained, as far as nothing is in flight."""
        if self.ledger is None or self._answering:
            return
        owed = self.ledger.answer()
        if owed:
            self._answering = True

            def told(body: Body) -> None:
                self._answering = False
                if self.ledger is not None and "error" not in body:
                    self.ledger.answered(owed)
                    self.answer()

            self.ask("drained", told, **owed.to_wire())

    def store(self, lease: Lease, keys: dict[int, bytes], pages: list[int]) -> None:
        """Copy into some pages of a lease, and commit them when all has arrived."""
        self._back(pages, lambda: self._store(lease, keys, pages))

    def _store(self, lease: Lease, keys: dict[int, bytes], pages: list[int]) -> None:
        if self.ledger is None:
            return
        world, rng = self.world, self.world.rng
        try:
            transfer = self.ledger.begin_store(lease, pages)
        except (StaleLease, PageError):
            return
        landing = Landing(len(pages))
        transfer.submitted(landing)
        slow = rng.random() < 0.1
        generations: dict[int, int] = dict(zip(lease.pages, lease.generations, strict=True))
        try:
            commit = self.ledger.freeze(lease, pages)
        except (StaleLease, PageError, CopyError):
            commit = None

        over = False

        def landed() -> None:
            nonlocal over
            if transfer.done() and not over:
                over = True
                self.flying -= 1
                self.answer()
                if commit is not None:
                    self.commit(commit)

        for page in pages:
            delay_s = rng.random() * (3.0 if slow else 0.1)
            self.world.at(delay_s, self._land, transfer, landing, page, generations[page], keys[page], landed)
        self.flying += 1
        world.count("stores")

    def _land(
        self, transfer: Transfer, landing: Landing, page: int, generation: int, key: bytes, landed: Callable[[], None]
    ) -> None:
        landing.left -= 1
        unmapped = self.process.mapped and page >= self.backed
        self.world.must(not unmapped, f"2: {self.process.name} copies to page {page}, where it has no memory")
        self.world.land(self.process, self.rank, page, generation, key, landed)

    def commit(self, commit: Commit) -> None:
        def answered(body: Body) -> None:
            if self.ledger is not None and "error" not in body:
                self.ledger.committed(commit)
                self.world.count("commits")

        self.ask("commit", answered, lease=commit.lease, pages=commit.wire_pages)

    def load(self, hit: SeenHit, keys: dict[int, bytes], then: Callable[[], None]) -> None:
        """Copy from the pages of a hit; each must hold its key's bytes from the first byte to the last."""
        self._back(list(keys), lambda: self._load(hit, keys, then))

    def _load(self, hit: SeenHit, keys: dict[int, bytes], then: Callable[[], None]) -> None:
        if self.ledger is None:
            return
        try:
            transfer = self.ledger.begin_load(hit, keys)
        except (StaleLease, PageError):
            return
        landing = Landing(len(keys))
        transfer.submitted(landing)
        self.flying += 1
        slow = self.world.rng.random() < 0.1
        for page, key in keys.items():
            self.world.check_bytes(self.rank, page, key)
            delay_s = self.world.rng.random() * (2.0 if slow else 0.1)
            self.world.at(delay_s, self._loaded, landing, page, key, then)

    def _loaded(self, landing: Landing, page: int, key: bytes, then: Callable[[], None]) -> None:
        if self.process.mapped:
            self.world.must(page < self.backed, f"2: {self.process.name} loads page {page}, where it has no memory")
            self.world.check_bytes(self.rank, page, key)
            landing.left -= 1
            if landing.done():
                self.world.tell(self.process, self._complete, then)

    def _complete(self, then: Callable[[], None]) -> None:
        self.flying -= 1
        then()
        self.answer()

    def leave(self) -> None:
        """Close the mirror: no more copies, detach when those under way are complete, then exit."""
        if self.ledger is not None and self.attached and not self.leaving:
            self.leaving = True
            self.ledger = None
            self._leave()

    def _leave(self) -> None:
        if self.flying:
            self.later(0.1, self._leave)
            return
        self.world.count("detached")
        unmapped = self.world.rng.random() < 0.5
        if unmapped:
            self.process.maps.clear()
        self.ask("detach", lambda body: self._left(body, unmapped), unmapped=unmapped)

    def _left(self, body: Body, unmapped: bool) -> None:
        self.world.must("error" not in body, f"{body}")
        if unmapped:
            self.world.kill(self.process)
        else:
            self.later(0.3, self._unmap)

    def _unmap(self) -> None:
        self.process.maps.clear()
        self.ask("unmapped", lambda body: self._left(body, True))


class Visitor(Worker):
    """A pool that takes nearly all of the arena, so that others have to give back; it copies nothing."""

    refusals = (*Worker.refusals, "arena_full")

    def __init__(self, world: World, size_mib: int) -> None:
        self.size_mib = size_mib
        super().__init__(world, f"v{size_mib}", 0)

    def attach_arguments(self) -> Body:
        planes = [Plane("k", 0, 1, MIB, 4).to_wire()]
        return attach_arguments(
            pool=self.engine, engine=self.engine, world_size=1, num_host_pages=self.size_mib, planes=planes, wait_s=3.0
        )
