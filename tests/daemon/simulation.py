"""One seed's story: two engines over one pool, faults of every kind, then calm, in which nothing may be left.

Everything hangs on the seed: clock, transport and processes are simulated (``simulated_world``), the
daemon is the real core over the real record store (``simulated_daemon``).

``simulate`` raises ``Violation`` when something happened that must never happen.
"""

from __future__ import annotations

from sharedmirrord.core.transitions import PageState
from tests.daemon.durable_view import durable_view
from tests.daemon.simulated_clients import RANKS, Client, Visitor, Worker
from tests.daemon.simulated_daemon import CRASHES
from tests.daemon.simulated_processes import Violation
from tests.daemon.simulated_scheduler import Scheduler
from tests.daemon.simulated_world import World

ENGINES = ("e", "f")
STORM_S = 24.0
CALM_S = 20.0


class Story:
    """Starts the processes, starts dead ones again, and brings the faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.workers = {engine: [Worker(world, engine, rank) for rank in range(RANKS)] for engine in ENGINES}
        self.schedulers = {engine: Scheduler(world, engine, self.workers[engine]) for engine in ENGINES}
        world.daemon.start()
        world.at(0.5, self._keep)
        world.at(1.0, self._fault)
        self.visitor: Visitor | None = None
        world.at(1.0, self._visit)

    def _visit(self) -> None:
        """Somebody comes who needs room, stays a while and goes."""
        world, rng = self.world, self.world.rng
        if world.calm:
            return
        if self.visitor is None or not self.visitor.process.alive:
            self.visitor = Visitor(world, rng.randrange(48, 57, 2))
        elif rng.random() < 0.5:
            self.visitor.leave()
        elif rng.random() < 0.5:
            world.kill(self.visitor.process)
        world.at(rng.uniform(0.3, 2.0), self._visit)

    def clients(self) -> list[Client]:
        return [*(worker for some in self.workers.values() for worker in some), *self.schedulers.values()]

    def _keep(self) -> None:
        """Start dead processes again, after a while."""
        world = self.world
        for engine in ENGINES:
            for rank, worker in enumerate(self.workers[engine]):
                if not worker.process.alive and (world.calm or world.rng.random() < 0.5):
                    self.workers[engine][rank] = Worker(world, engine, rank)
            if not self.schedulers[engine].process.alive and (world.calm or world.rng.random() < 0.5):
                self.schedulers[engine] = Scheduler(world, engine, self.workers[engine])
        world.at(0.4, self._keep)

    def _fault(self) -> None:
        world, rng = self.world, self.world.rng
        if world.calm:
            return
        client = rng.choice(self.clients())
        process = client.process
        roll = rng.random()
        if not process.alive:
            pass
        elif roll < 0.2:
            world.daemon.armed = rng.choice(CRASHES) if world.daemon.up else None
        elif roll < 0.34:
            if client.connection is not None:
                world.count("drops")
                world.cut(client.connection)
        elif roll < 0.5:
            world.kill(process)
        elif roll < 0.64:
            world.fork(process)
            if rng.random() < 0.7:
                world.at(rng.random(), world.kill, process)
        elif roll < 0.74:
            world.count("stops")
            process.stopped = True
            world.at(rng.uniform(0.1, 5.0), world.wake, process)
        elif roll < 0.84 and client.session is not None:
            world.impostor(client.session, process)
        elif isinstance(client, Worker):
            client.leave()
        world.at(rng.expovariate(1 / 0.35), self._fault)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything goes on in peace: no request may hang, and no page may be lost."""
        world = self.world
        world.calm = True
        world.daemon.armed = None
        if self.visitor is not None:
            world.kill(self.visitor.process)
        for process in world.processes.values():
            world.wake(process)
        end = world.now + CALM_S
        while world.now < end:
            world.run(world.now + 2.0)
            for scheduler in self.schedulers.values():
                scheduler.wind_down()
        for client in self.clients():
            world.must(client.idle, f"{client.process.name} hangs: {client.under_way()}")
        self._check_nothing_is_left()
        world.daemon.armed = "idle"
        world.kill(self.schedulers["e"].process)
        world.run(world.now + 4.0)
        world.must(world.daemon.up and world.daemon.life > 1, "the daemon did not come back")
        self._check_nothing_is_left()
        durable_view(world.daemon.state)

    def _check_nothing_is_left(self) -> None:
        state, must = self.world.daemon.state, self.world.must
        must(not state.leases, f"4: leases are left: {state.leases}")
        must(not state.hits, f"6: hits are left: {state.hits}")
        must(not state.survivors, f"survivors are left: {state.survivors}")
        for pool in state.pools.values():
            must(pool.elastic is None or not pool.elastic.giving, f"2: {pool.name} never gives back: {pool.elastic}")
            if pool.table is not None:
                counts = pool.table.counts
                left = counts[PageState.LEASED] + counts[PageState.QUARANTINED] + len(pool.table.pins)
                must(not left, f"4: pages are lost: {counts}, pins {pool.table.pins}")
                for key, page in pool.table.index.items():
                    for rank in range(RANKS):
                        self.world.check_bytes(rank, page, key)


def simulate(seed: int) -> World:
    """Run the story of one seed to its end; raises Violation, also for whatever the core raises."""
    world = World(seed)
    story = Story(world)
    try:
        world.run(world.now + STORM_S)
        story.finish()
    except Violation:
        raise
    except Exception as error:
        raise world.violation(f"an exception: {error!r}") from error
    return world
