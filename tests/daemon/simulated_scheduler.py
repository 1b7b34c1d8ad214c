"""The schedulers of the simulated world: they lease, seal, look up and release, and tell the workers what to copy."""

from __future__ import annotations

from sharedmirror.away import Away
from sharedmirror.index import IndexReader
from sharedmirror.types import Generation, Lease, LeaseId, PageId, PoolId
from tests.daemon.simulated_clients import PAGES, Client, SeenHit, Worker
from tests.daemon.simulated_processes import Body
from tests.daemon.simulated_world import World

KEYS = [b"k%d" % number for number in range(9)]
"""In prefix order: each key hangs on the one before."""


class SimulatedAway(Away):
    """The real one, but for the lock by which a daemon is known to be gone."""

    def __init__(self, world: World, mark: int) -> None:
        super().__init__(mark)
        self._world = world
        self._life = 0

    def use(self, memory: bytearray, life: int) -> None:
        self.index, self._life = IndexReader(memory, PAGES), life

    def _gone(self) -> bool:
        daemon = self._world.daemon
        return self.index is not None and not (daemon.up and daemon.life == self._life)


class Scheduler(Client):
    """Leases, reserves, seals, looks up, releases; hands leases and hits to the workers of its engine."""

    def __init__(self, world: World, engine: str, workers: list[Worker]) -> None:
        self.workers = workers
        self.leases: dict[int, tuple[Lease, dict[int, bytes]]] = {}
        self.hits: set[int] = set()
        self.away: SimulatedAway | None = None
        self._ending: set[int] = set()
        """Hits whose release was asked for."""
        super().__init__(world, engine, "scheduler")

    def held(self) -> tuple[list[int], list[int]]:
        return sorted(self.leases), sorted(self.hits)

    def claims(self) -> Body | None:
        return None if self.away is None else self.away.claims()

    def joined(self, body: Body) -> None:
        self.away = SimulatedAway(self.world, body["mark"])
        self.step()

    def back(self) -> None:
        self.later(self.world.rng.random() * 0.1, self._fetch_index)

    def _fetch_index(self) -> None:
        daemon = self.world.daemon
        if self.talking and self.connection is not None and self.away is not None and daemon.index is not None:
            if daemon.up and self.connection.open and self.connection.life == daemon.life:
                self.away.use(daemon.index, daemon.life)

    def step(self) -> None:
        """Do one thing, then think of the next."""
        if self.world.calm:
            return
        if not self.talking:
            self._look_away()
        elif self.idle:
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

    def _look_away(self) -> None:
        """Without a connection: the index serves, if the daemon is dead."""
        rng = self.world.rng
        start = rng.randrange(len(KEYS))
        keys, mode = KEYS[start : start + rng.randrange(1, 4)], rng.choice(["prefix", "each"])
        found = self.away.lookup(keys, mode, whole=False) if self.away is not None else None
        if found is not None and found.hit:
            self.world.count("away")
            self._looked({"hit": found.hit, "pages": list(found.pages)}, keys)

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

        def held() -> bool:
            return self.process.alive and hit.id in self.hits and hit.id not in self._ending

        def loaded() -> None:
            left[0] -= 1
            if not left[0]:
                self.later(rng.random() * 0.1, self.release, hit.id)

        for worker in self.workers:
            worker.later(rng.random() * 0.02, worker.load, hit, wanted, held, loaded)
        # Loads may never come to an end: a rank may be dead.
        self.later(rng.uniform(0.02, 3.0), self.release, hit.id)

    def release(self, hit: int) -> None:
        if hit not in self.hits or (self.away is not None and self.away.release([hit], self.hits)):
            return

        self._ending.add(hit)

        def over(body: Body) -> None:
            self.hits.discard(hit)
            if self.away is not None:
                self.away.forget([hit])

        self.ask("release", over, hits=[hit])

    def wind_down(self) -> None:
        """Give up all that is held."""
        if self.process.alive:
            for lease in sorted(self.leases):
                self._give_up(lease)
            for hit in sorted(self.hits):
                self.release(hit)
