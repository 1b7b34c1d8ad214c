"""Workers and schedulers of the simulated world: they follow the real client's rules.

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
from sharedmirror.types import Generation, Lease, LeaseId, PageId, PoolId, Role
from tests.daemon.core_driver import attach_arguments
from tests.daemon.simulation import Body, Connection, World

PAGES = 8
KEYS = [b"k%d" % number for number in range(9)]
"""In prefix order: each key hangs on the one before."""

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
                body["error"]["code"] in ("engine_busy", "ranks_missing", "rank_attached", "pool_not_found"),
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
        super().__init__(world, engine, f"rank{rank}")

    def attach_arguments(self) -> Body:
        return attach_arguments(engine=self.engine, rank=self.rank, num_host_pages=PAGES, wait_s=3.0)

    def joined(self, body: Body) -> None:
        self.ledger = Ledger(body["pool"], PAGES)
        self.ledger.forestall(body)
        early, self._early = self._early, []
        for push in early:
            self.pushed(push)

    def pushed(self, body: Body) -> None:
        if self.ledger is None:
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
        generations = dict(zip(lease.pages, lease.generations, strict=True))
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
        self.world.land(self.process, self.rank, page, generation, key, landed)

    def commit(self, commit: Commit) -> None:
        def answered(body: Body) -> None:
            if self.ledger is not None and "error" not in body:
                self.ledger.committed(commit)
                self.world.count("commits")

        self.ask("commit", answered, lease=commit.lease, pages=commit.wire_pages)

    def load(self, hit: SeenHit, keys: dict[int, bytes], then: Callable[[], None]) -> None:
        """Copy from the pages of a hit; each must hold its key's bytes from the first byte to the last."""
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
        self.ask("detach", lambda body: self._left(body, unmapped), unmapped=unmapped)

    def _left(self, body: Body, unmapped: bool) -> None:
        self.world.must("error" not in body, f"{body}")
        if unmapped:
            self.world.kill(self.process)
        else:
            self.later(0.3, self.ask, "unmapped", lambda body: self._left(body, True))


class Scheduler(Client):
    """Leases, reserves, seals, looks up, releases; hands leases and hits to the workers of its engine."""

    def __init__(self, world: World, engine: str, workers: list[Worker]) -> None:
        self.workers = workers
        self.leases: dict[int, tuple[Lease, dict[int, bytes]]] = {}
        self.hits: set[int] = set()
        super().__init__(world, engine, "scheduler")

    def held(self) -> tuple[list[int], list[int]]:
        return sorted(self.leases), sorted(self.hits)

    def joined(self, body: Body) -> None:
        self.step()

    def step(self) -> None:
        """Do one thing, then think of the next."""
        if self.world.calm:
            return
        if self.idle:
            rng = self.world.rng
            start = rng.randrange(len(KEYS))
            keys = KEYS[start : start + rng.randrange(1, 4)]
            parent = KEYS[start - 1] if start else None
            roll = rng.random()
            if roll < 0.35:
                self.ask("reserve", self._reserved, keys=keys, parent=parent, wait_s=rng.choice([0, 0, 0.5]))
            elif roll < 0.5:
                self.ask("lease", lambda body: self._leased(body, keys, parent), n=len(keys))
            elif roll < 0.85:
                mode = rng.choice(["prefix", "each"])
                wait_s = rng.choice([0, 0, 0.3])
                self.ask("lookup", lambda body: self._looked(body, keys), keys=keys, mode=mode, wait_s=wait_s)
            elif roll < 0.9 and self.leases:
                lease, planned = self.leases[rng.choice(sorted(self.leases))]
                some = [page for page in planned if rng.random() < 0.6]
                self.ask("abort", lambda body: self._aborted(lease.id, body), lease=lease.id, pages=some or None)
            elif roll < 0.94:
                self.ask("evict", keys=keys)
            elif roll < 0.96:
                self.ask("clear")
            else:
                self.ask("touch", keys=keys)
        self.later(self.world.rng.uniform(0.02, 0.25), self.step)

    def _lease(self, body: Body, keys: list[bytes]) -> tuple[Lease, dict[int, bytes]] | None:
        if not body.get("lease"):
            return None
        lease = Lease(
            LeaseId(body["lease"]), PoolId(self.workers[0].ledger._pool if self.workers[0].ledger else 0),
            tuple(map(PageId, body["pages"])), tuple(map(Generation, body["generations"])),
        )  # fmt: skip
        planned = dict(zip(body["pages"], keys, strict=True))
        self.leases = {number: held for number, held in self.leases.items() if number >= body["lease_floor"]}
        self.leases[lease.id] = lease, planned
        return lease, planned

    def _reserved(self, body: Body) -> None:
        found = self._lease(body, body.get("keys", []))
        if found is not None:
            self._hand_out(*found)

    def _leased(self, body: Body, keys: list[bytes], parent: bytes | None) -> None:
        found = self._lease(body, keys)
        if found is not None:
            self._hand_out(*found)
            lease = found[0].id
            delay_s = self.world.rng.random()
            self.later(delay_s, lambda: self.ask("seal", lease=lease, keys=keys, pages=None, parent=parent))

    def _hand_out(self, lease: Lease, planned: dict[int, bytes]) -> None:
        """Tell each rank what to store, all at once or in two parts; sometimes a rank is never told."""
        rng = self.world.rng
        for worker in self.workers:
            pages = list(planned)
            cut = rng.randrange(len(pages) + 1)
            for part in (pages[:cut], pages[cut:]):
                if part and rng.random() > 0.03:
                    worker.later(rng.random() * 0.02, worker.store, lease, planned, part)
        if rng.random() < 0.9:
            self.later(rng.uniform(2.0, 5.0), self._give_up, lease.id)

    def _give_up(self, lease: int) -> None:
        """What is not sealed by now is not needed any more."""
        if lease in self.leases:
            self.ask("abort", lambda body: self._aborted(lease, body), lease=lease, pages=None)

    def _aborted(self, lease: int, body: Body) -> None:
        if "error" in body and body["error"]["code"] == "stale_lease":
            self.leases.pop(lease, None)

    def _looked(self, body: Body, keys: list[bytes]) -> None:
        if not body.get("hit"):
            return
        rng = self.world.rng
        self.hits.add(body["hit"])
        wanted = {page: key for page, key in zip(body["pages"], keys, strict=False) if page >= 0}
        for rank in range(len(self.workers)):
            for page, key in wanted.items():
                self.world.check_bytes(rank, page, key)
        hit = SeenHit(body["hit"], self.workers[0].ledger._pool if self.workers[0].ledger else 0, tuple(body["pages"]))
        left = [len(self.workers)]

        def loaded() -> None:
            left[0] -= 1
            if not left[0]:
                self.later(rng.random() * 0.1, self.release, hit.id)

        for worker in self.workers:
            worker.later(rng.random() * 0.02, worker.load, hit, wanted, loaded)
        # Loads may never come to an end: a rank may be dead.
        self.later(rng.uniform(0.02, 3.0), self.release, hit.id)

    def release(self, hit: int) -> None:
        if hit in self.hits:
            self.ask("release", lambda body: self.hits.discard(hit), hits=[hit])

    def wind_down(self) -> None:
        """Give up all that is held."""
        if self.process.alive:
            for lease in sorted(self.leases):
                self._give_up(lease)
            for hit in sorted(self.hits):
                self.release(hit)
