"""The daemon dies between any two steps of its work, also of its recovery; a story goes on as if nothing happened."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.channel import Channel
from sharedmirror.control import Client, connect
from sharedmirror.errors import DaemonUnavailable, InstanceChanged, SharedMirrorError
from sharedmirror.types import KeyState, Role
from tests.conftest import until
from tests.daemon.comeback import POOL, Comeback, engine, keys_of, publish

if TYPE_CHECKING:
    from tests.conftest import Processes, Starter, Worker

Until = Callable[..., Any]

PLACES = ["records.commit", "records.appended", "records.committed", "reply.before", "reply.after"]
TIMES = 6
"""How often a place is passed before the daemon dies there: each call of the story is hit in turn."""
PAGE_BYTES = 1 << 16
STEP = (2 << 20) // PAGE_BYTES
RECOVERY = ["adopt.recovered", "adopt.arena", "adopt.epoch", "hello.before", "hello.after"]


class Keeper:
    """Starts the daemon again whenever it dies, each time with the next failpoint."""

    def __init__(self, life: Comeback, failpoints: list[str]) -> None:
        self.left = list(failpoints)
        self._life = life
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def _keep(self) -> None:
        while not self._stop.is_set():
            if self._life.daemon.process.poll() is not None:
                self._life.again(failpoints=self.left.pop(0) if self.left else "", state=None)
            self._stop.wait(0.01)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def wait_settled(life: Comeback) -> None:
    def settled() -> bool:
        with contextlib.suppress(DaemonUnavailable):
            pages = life.daemon.pool(POOL)["pages"]
            return bool(pages["leased"] == pages["quarantined"] == pages["pinned"] == 0)
        return False

    until(settled, "all is drained")


def tell_a_story(life: Comeback, client: Client, workers: list[Worker], number: int) -> None:
    """Publish, read, abort and evict; fails when a step happened half, twice or not at all."""
    first, second = workers
    keys = keys_of(*range(10 * number, 10 * number + 6))
    reservation = client.reserve(keys[:3])
    lease = reservation.lease
    assert lease is not None and reservation.present == reservation.pending == ()
    first.commit(lease)
    assert tuple(second.commit(lease)["sealed"]) == lease.pages
    plain = client.lease(3)
    assert not set(plain.pages) & set(lease.pages)
    second.commit(plain, list(plain.pages[:1]))
    assert client.seal(plain, keys[3:], parent=keys[2]).pending == plain.pages
    assert first.commit(plain)["sealed"] == [plain.pages[0]]
    assert second.commit(plain, list(plain.pages[1:]))["sealed"] == list(plain.pages[1:])
    with client.lookup(keys) as hit:
        assert hit.pages == lease.pages + plain.pages
        assert client.evict(keys[:1], wait_s=20).pinned == (keys[0],)
    dropped = client.lease(2)
    client.abort(dropped, [dropped.pages[0]])
    client.abort(dropped)
    wait_settled(life)
    assert client.evict(keys, wait_s=20).evicted == tuple(keys)
    assert client.contains(keys) == (KeyState.MISS,) * 6


def test_a_story_goes_on_through_a_death_at_every_step(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=17)
    failpoints = [f"{place}=kill:{times}" for times in range(1, TIMES + 1) for place in PLACES]
    with connect(life.socket, timeout_s=20) as client, Keeper(life, failpoints) as keeper:
        life.daemon.kill()
        stories = 0
        while keeper.left:
            tell_a_story(life, client, workers, stories)
            stories += 1
        tell_a_story(life, client, workers, stories)
        assert life.daemon.status()["daemon"]["epoch"] > len(failpoints)
    life.daemon.wait_pages(POOL, free=16, sealed=0)


def come(life: Comeback, processes: Processes) -> Worker:
    """Return a process that found a daemon to greet."""

    def greeted() -> Worker | None:
        worker = processes.worker(life.socket)
        return worker if "session" in worker.hello else None

    found: Worker = until(greeted)
    return found


def tell_of_room(life: Comeback, client: Client, workers: list[Worker], visitor: Worker, number: int) -> None:
    """A pool grows to its most, and gives back for one that comes, stays a moment and goes."""
    keys = keys_of(*range(1000 * number, 1000 * number + 5 * STEP - 1))
    lease = client.reserve(keys, wait_s=20).lease
    assert lease is not None
    for worker in workers:
        worker.commit(lease)
    visitor.attach(pool="v", engine="v", num_host_pages=10 * STEP, planes=[["k", 0, 1, PAGE_BYTES, 16]])
    taken = [extent for region in visitor.reply["regions"] for extent in region["extents"]]
    for worker in workers:
        taken += [extent for region in worker.call("extents")["regions"] for extent in region["extents"]]
    taken.sort()
    assert all(a + n <= b for (_, a, n), (_, b, _) in zip(taken, taken[1:], strict=False)), "invariant 2"
    with client.lookup(keys, "each") as hit:
        assert 0 < len(hit) <= 3 * STEP - 1 and max(hit.pages) < 3 * STEP
    with contextlib.suppress(InstanceChanged):  # it was done, and the answer was lost
        visitor.call("detach", unmapped=True)


def test_room_goes_from_pool_to_pool_through_a_death_at_every_step(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = [processes.worker(life.socket) for _ in range(2)]
    for rank, worker in enumerate(workers):
        planes = [["k", rank, 2, PAGE_BYTES, 16]]
        worker.send_attach(rank=rank, world_size=2, num_host_pages=[2, 6 * STEP], planes=planes)
    for worker in workers:
        worker.result()
        worker.ask("answer_pushes")
    failpoints = [f"{place}=kill:{times}" for times in (2, 4, 6, 8, 10) for place in PLACES]
    with connect(life.socket, timeout_s=20) as client, Keeper(life, failpoints) as keeper:
        life.daemon.kill()
        stories = 0
        while keeper.left:
            tell_of_room(life, client, workers, come(life, processes), stories)
            stories += 1
        tell_of_room(life, client, workers, come(life, processes), stories)
        assert life.daemon.status()["daemon"]["epoch"] > len(failpoints)
    assert life.daemon.pool(POOL)["backed_pages"] == 3 * STEP


def knock(life: Comeback) -> None:
    """Say hello until the daemon has died of it."""

    def died() -> bool:
        with contextlib.suppress(SharedMirrorError):
            Channel.open(life.socket, role=Role.WORKER, timeout_s=5).close()
        return life.daemon.process.poll() is not None

    until(died, "the daemon dies")


@pytest.mark.parametrize("place", RECOVERY)
def test_a_second_death_while_coming_back(start: Starter, processes: Processes, place: str) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=17)
    with connect(life.socket, timeout_s=20) as client:
        pages = publish(client, workers, keys_of(1, 2, 3))
        lease = client.lease(5)
        workers[0].commit(lease)
        life.daemon.kill()
        life.again(failpoints=f"{place}=kill", state=None)
        if place.startswith("hello"):
            knock(life)
        life.wait_killed()
        life.again()
        with client.lookup(keys_of(1, 2, 3)) as hit:
            assert hit.pages == pages
        client.seal(lease, keys_of(4, 5, 6, 7, 8))
        assert tuple(workers[1].commit(lease)["sealed"]) == lease.pages


@pytest.mark.parametrize("place", ["resume.before", "resume.sent"])
def test_deaths_between_a_session_and_its_resume(start: Starter, processes: Processes, place: str) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=17)
    with connect(life.socket, timeout_s=20) as client:
        lease = client.lease(5)
        hit_pages = publish(client, workers, keys_of(1))
        hit = client.lookup(keys_of(1))
        life.daemon.kill()
        for times in (1, 2, 3):
            life.again(failpoints=f"{place}=kill:{times}", state=None)
            life.wait_killed()
        life.again()
        life.wait_attached(3)
        for worker in workers:
            worker.commit(lease)
        assert client.seal(lease, keys_of(4, 5, 6, 7, 8)).sealed == lease.pages
        assert client.evict(keys_of(1), wait_s=20).pinned == (b"key1",) and hit.pages == hit_pages
        hit.release()


@pytest.mark.parametrize("place", ["forget.before", "forget.after", "reply.before", "records.committed"])
def test_a_death_while_a_session_is_forgotten(start: Starter, processes: Processes, place: str) -> None:
    life = Comeback(start, failpoints=f"{place}=kill:{1000 if place[0] == 'r' else 1}")
    workers = engine(processes, life, pages=17)
    with connect(life.socket, timeout_s=20) as client:
        client.lease(5)
        if place.startswith("forget"):
            workers[0].kill()
            life.wait_killed()
        else:
            life.daemon.kill()
            life.again(failpoints=f"{place}=kill:2", state=None)
            workers[0].kill()
            life.wait_killed()
        life.again()
        life.daemon.wait_pages(POOL, leased=0, quarantined=0, free=16)
        life.wait_attached(2)
        # Nothing of the dead session is left, its file included.
        (successor,) = [processes.worker(life.socket)]
        successor.attach(rank=0, world_size=2, num_host_pages=17)
        assert len(client.lease(16).pages) == 16
        assert str(workers[0].hello["session"]) not in life.daemon.session_files()


# --- the records' own room


@pytest.mark.parametrize("place", ["records.checkpoint", "records.turned", "records.grow", "records.grown"])
def test_a_death_while_the_journal_turns_or_grows(start: Starter, processes: Processes, place: str) -> None:
    """Leases of thousands of pages with keys fill the journal soon, and their checkpoint outgrows its room."""
    life = Comeback(start)
    workers = engine(processes, life, world_size=1, pages=60_000, planes=[["k", 0, 1, 16, 16]])
    with connect(life.socket, timeout_s=20) as client:
        keys = [b"%032d" % number for number in range(400)]
        sealed = publish(client, workers, keys)
        life.restart(f"{place}=kill")
        with Keeper(life, []):
            held = [client.lease(4000) for _ in range(8)]
            for number, lease in enumerate(held):
                client.seal(lease, [b"%032d" % (4000 * (number + 1) + at) for at in range(4000)])
        pages = [page for lease in held for page in lease.pages]
        assert len(set(pages)) == 32_000 and not set(pages) & set(sealed)
        assert life.daemon.status()["daemon"]["epoch"] == 3, "the place was not reached"
        life.restart()
        life.wait_attached(2)
        life.daemon.wait_pages(POOL, leased=32_000, sealed=400)
        with client.lookup(keys) as hit:
            assert hit.pages == sealed
        assert workers[0].commit(held[7])["sealed"] == list(held[7].pages)


def test_records_that_cannot_be_saved_hold_answers_back_and_are_an_alarm(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=17)
    with connect(life.socket, timeout_s=20) as client:
        life.restart("records.commit=error:2")
        answered = threading.Event()

        def lease() -> None:
            client.lease(3)
            answered.set()

        thread = threading.Thread(target=lease)
        thread.start()
        status = life.daemon.wait_status(lambda status: status["alarms"])
        assert status["alarms"][0]["code"] == "records"
        assert "records cannot be saved, calls wait: the failpoint" in status["alarms"][0]["message"]
        assert not answered.is_set()
        thread.join(20)
        assert answered.is_set()
        assert life.daemon.status()["alarms"] == []
        # What was answered is durable.
        life.restart()
        life.wait_attached(3)
        life.daemon.wait_pages(POOL, leased=3)
        assert len(workers) == 2
