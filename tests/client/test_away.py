"""An engine whose daemon is dead: it finds and loads what was there, and the next daemon keeps it."""

from __future__ import annotations

import gc
import multiprocessing.resource_tracker
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror.control import Client, Hit, connect
from sharedmirror.errors import (
    CallTimeout,
    DaemonUnavailable,
    KeyInputError,
    NoPages,
    NotResumed,
    StaleLease,
    UsageError,
)
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import AWAY_HITS, KeyState
from tests.client.away_scheduler import SchedulerProcess
from tests.daemon.comeback import POOL, Comeback, held_back

if TYPE_CHECKING:
    from tests.conftest import Starter

Until = Callable[..., Any]
HIT, MISS = KeyState.HIT, KeyState.MISS
PAGE_SIZE, DEVICE_PAGES, PAGES = 4, 16, 17
KEYS = [b"key%d" % at for at in range(16)]
# Its descriptor stays open: before the tests that count descriptors, not in the first of them.
multiprocessing.resource_tracker.ensure_running()


def content(key: bytes, plane: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((key, plane)) % (1 << 62))
    return torch.randint(0, 256, like.shape, dtype=torch.uint8, generator=generator)


class HeldUp:
    """The completion of a load that is under way until a test says otherwise."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)


class Rank:
    """One worker: its tensors and its mirror."""

    def __init__(self, socket: str, **options: Any) -> None:
        planes = [torch.zeros(DEVICE_PAGES * PAGE_SIZE, 24, dtype=torch.uint8) for _ in range(4)]
        pool = SimpleNamespace(page_size=PAGE_SIZE, k_buffer=planes[:2], v_buffer=planes[2:])
        options = {"rank": 0, "world_size": 1, **options}
        self.mirror = SharedHostMirror(pool, PAGES, socket=socket, pages="leased", layout="page", **options)
        self.pages = [plane.view(DEVICE_PAGES, PAGE_SIZE, 24) for plane in planes]

    def store(self, lease: Any, keys: list[bytes]) -> None:
        for at, key in enumerate(keys):
            for plane, pages in enumerate(self.pages):
                pages[at] = content(key, plane, pages[at])
        self.mirror.store(lease, list(enumerate(lease.pages))).wait(20)
        self.mirror.commit(lease)

    def load(self, hit: Any, keys: list[bytes]) -> int:
        """Load a hit and compare every byte; returns the number of pages."""
        for pages in self.pages:
            pages.zero_()
        pairs = [(at, page) for at, page in enumerate(hit.pages) if page >= 0]
        self.mirror.load(hit, pairs).wait(20)
        for at, _ in pairs:
            for plane, pages in enumerate(self.pages):
                assert torch.equal(pages[at], content(keys[at], plane, pages[at])), (keys[at], plane)
        return len(pairs)

    def hold_up(self, hit: Hit) -> HeldUp:
        """Begin a load of a hit that does not end."""
        held, load = HeldUp(), self.mirror._engine.load
        self.mirror._engine.load = lambda device, frames, stream: held  # type: ignore[method-assign, assignment]
        try:
            self.mirror.load(hit, [(at, page) for at, page in enumerate(hit.pages) if page >= 0])
        finally:
            self.mirror._engine.load = load  # type: ignore[method-assign]
        return held


@pytest.fixture
def life(start: Starter) -> Comeback:
    return Comeback(start)


@pytest.fixture
def rank(life: Comeback) -> Iterator[Rank]:
    rank = Rank(life.socket)
    yield rank
    rank.mirror.close()
    del rank.pages
    gc.collect()


@pytest.fixture
def client(life: Comeback, rank: Rank) -> Iterator[Client]:
    """A scheduler that waits for its daemon much longer than a test may take, and 16 keys in the 16 pages."""
    with connect(life.socket, timeout_s=60) as client:
        fill(client, rank, KEYS)
        yield client


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fill(client: Client, rank: Rank, keys: list[bytes]) -> None:
    lease = client.reserve(keys).lease
    assert lease is not None
    rank.store(lease, keys)


def refuses(rank: Rank, hit: Hit) -> bool:
    try:
        rank.mirror.load(hit, [(0, hit.pages[0])]).wait(20)
    except StaleLease:
        return True
    return False


def taken(hit: Hit) -> bool:
    """Whether a hit was taken from the index."""
    return hit.id >= AWAY_HITS


def test_an_engine_finds_and_loads_for_rounds_without_a_daemon_and_the_next_one_keeps_what_it_holds(
    life: Comeback, rank: Rank, client: Client
) -> None:
    before = client.lookup(KEYS[:1])
    kept: dict[int, Hit] = {}
    for round_ in range(3):
        life.daemon.kill()
        for number in range(10):
            first = (5 * round_ + number) % 16
            with client.lookup(KEYS[first:], "prefix") as hit:
                assert taken(hit) and rank.load(hit, KEYS[first:]) == 16 - first
            keys = [KEYS[first], b"nobody", KEYS[(first + 3) % 16]]
            with client.lookup(keys, "each") as hit:
                assert hit.states == (HIT, MISS, HIT) and hit.pages[1] == -1
                assert rank.load(hit, keys) == 2
            with client.lookup([b"nobody", *KEYS], "prefix") as hit:
                assert (hit.id, hit.pages, len(hit)) == (0, (), 0)
        kept[round_] = client.lookup(KEYS[4 * round_ + 1 : 4 * round_ + 3])
        if round_ == 1:
            before.release()
        life.again()
        life.wait_attached(2)
        with client.lookup([b"nobody", KEYS[15]], "each") as hit:
            assert hit.id and not taken(hit)
        life.daemon.wait_pages(POOL, pinned=2 * len(kept) + (round_ < 1))
    with pytest.raises(NoPages):
        client.lease(11)
    for number, hit in kept.items():
        keys = KEYS[4 * number + 1 : 4 * number + 3]
        assert client.evict(keys).pinned == tuple(keys)
        assert rank.load(hit, keys) == 2
        hit.release()
        life.daemon.wait_pages(POOL, pinned=2 * (2 - number))  # then the rank has answered, so it knows
        with pytest.raises(StaleLease):
            rank.mirror.load(hit, [(0, hit.pages[0])])


def test_what_was_released_meanwhile_is_gone_and_refused(life: Comeback, rank: Rank, client: Client) -> None:
    life.daemon.kill()
    over, late, kept = (client.lookup(KEYS[at : at + 2]) for at in (2, 4, 0))
    assert rank.load(over, KEYS[2:4]) == 2
    over.release()
    client.release([late])
    life.again()
    life.wait_attached(2)
    life.daemon.wait_pages(POOL, pinned=2)
    assert client.evict([b"nobody"], wait_s=20).evicted == ()  # nothing is freed before the rank has answered
    # The pages may be granted again: not even a rank that never saw the hit may load now.
    for hit in (over, late):
        with pytest.raises(StaleLease, match="was released"):
            rank.mirror.load(hit, [(0, hit.pages[0])])
    assert rank.load(kept, KEYS[:2]) == 2
    assert len(client.lease(14, wait_s=20).pages) == 14
    assert client.contains(KEYS[:3]) == (HIT, HIT, MISS)
    # Neither may one that comes now.
    rank.mirror.close()
    again = Rank(life.socket)
    with again.mirror:
        for hit in (over, late):
            with pytest.raises(StaleLease):
                again.mirror.load(hit, [(0, hit.pages[0])])
        assert again.load(kept, KEYS[:2]) == 2
        del again.pages


def test_a_scheduler_that_waited_for_its_workers_is_known_to_them(life: Comeback, cleanup: ExitStack) -> None:
    """Its session is older than theirs."""
    found: list[Client] = []
    waiting = threading.Thread(target=lambda: found.append(connect(life.socket, timeout_s=60)))
    waiting.start()
    time.sleep(0.2)
    rank = Rank(life.socket)
    with rank.mirror:
        waiting.join()
        with found[0] as client:
            fill(client, rank, KEYS)
            life.daemon.kill()
            with client.lookup(KEYS) as hit:
                assert rank.load(hit, KEYS) == 16
            life.again()
            life.wait_attached(2)
        del rank.pages


def test_a_hit_from_before_is_released_without_a_daemon(life: Comeback, client: Client) -> None:
    hit, kept = client.lookup(KEYS[:3]), client.lookup(KEYS[3:5])
    life.daemon.kill()
    hit.release()
    hit.release()
    life.again()
    life.wait_attached(2)
    life.daemon.wait_pages(POOL, pinned=2)
    kept.release()
    life.daemon.wait_pages(POOL, pinned=0)


def test_a_stopped_daemon_is_not_a_dead_one(life: Comeback, rank: Rank) -> None:
    with connect(life.socket, timeout_s=0.3) as client:
        fill(client, rank, KEYS)
        for again in range(2):
            life.daemon.process.send_signal(signal.SIGSTOP)
            with pytest.raises(CallTimeout):
                client.lookup(KEYS)
            # Also when the connection is gone, so that nobody is there to be asked.
            client._channel._protocol.end()
            with pytest.raises((CallTimeout, DaemonUnavailable)):
                client.lookup(KEYS)
            assert client.peek(KEYS[:1]) == (HIT,) if client._away.index is not None else True
            life.daemon.process.send_signal(signal.SIGCONT)
            with client.lookup(KEYS) as hit:
                assert not taken(hit) and len(hit) == 16
            if not again:
                # The index of the daemon before says nothing of the one now.
                life.restart()
                life.wait_attached(2)
    life.daemon.wait_pages(POOL, pinned=0)


def test_while_the_next_daemon_reads_its_records_the_engine_goes_on(life: Comeback, rank: Rank, client: Client) -> None:
    life.daemon.kill()
    with client.lookup(KEYS[:1]) as hit:
        assert taken(hit)
    life.again(failpoints="adopt.recovered=sleep:3", state=None)
    done = 0
    while life.daemon.process.poll() is None and "event=adopted" not in life.daemon.log():
        keys = [KEYS[done % 16], b"nobody"]
        with client.lookup(keys, "each") as hit:
            assert hit.states == (HIT, MISS) and rank.load(hit, keys) == 1
        time.sleep(0.01)
        done += 1
    assert done > 10
    life.wait_attached(2)
    with client.lookup(KEYS) as hit:
        assert not taken(hit) and len(hit) == 16
    life.daemon.leaves_segments = False


def test_a_resume_that_the_next_daemon_does_not_survive_ends_the_time_without_one(
    life: Comeback, rank: Rank, client: Client
) -> None:
    """What the second daemon heard may have freed pages: only the third one's word counts."""
    life.daemon.kill()
    kept = client.lookup(KEYS[:2])
    life.again(failpoints="resume.sent=kill:2", state=None)
    life.wait_killed()
    life.again()
    life.wait_attached(2)
    assert client.evict(KEYS[:2], wait_s=20).pinned == tuple(KEYS[:2])
    assert rank.load(kept, KEYS[:2]) == 2
    kept.release()
    life.daemon.wait_pages(POOL, pinned=0)


@pytest.mark.parametrize("end", ["before", "after"])
def test_a_scheduler_dies_while_a_load_under_its_hit_is_under_way(
    life: Comeback, rank: Rank, client: Client, cleanup: ExitStack, end: str, wait_until: Until
) -> None:
    """Invariant 6: nobody can say which pages it gave to its workers; each says when its loads are over."""
    scheduler = SchedulerProcess(life.socket)
    cleanup.callback(scheduler.close)
    life.daemon.kill()
    hit = scheduler.ask("lookup", KEYS[:2])
    assert taken(hit)
    held = rank.hold_up(hit)
    if end == "before":
        scheduler.kill()
    life.again()
    if end == "after":
        life.wait_attached(3)
        scheduler.kill()
    life.wait_attached(2)
    with pytest.raises(NotResumed if end == "before" else NoPages) as caught:
        client.lease(16) if end == "after" else client.evict(KEYS[:2])
    if end == "before":
        assert caught.value.ids["pids"] == [life.sessions().popitem()[0]]
        with pytest.raises(NoPages, match="nothing is evicted until the processes"):
            client.lease(1)
        with pytest.raises(NotResumed):
            client.clear()
    else:
        assert client.evict(KEYS[:2]).pinned == tuple(KEYS[:2])
    wait_until(lambda: refuses(rank, hit), "the rank has heard that the hit is over")
    assert client.contains(KEYS) == (HIT,) * 16
    held.over.set()
    assert len(client.lease(16, wait_s=20).pages) == 16


def test_others_free_nothing_before_a_scheduler_has_said_what_it_holds(
    life: Comeback, rank: Rank, client: Client
) -> None:
    life.daemon.kill()
    kept = client.lookup(KEYS[:2])
    with ExitStack() as stack:
        stack.enter_context(held_back(client))
        life.again()
        life.daemon.wait_status(lambda status: sorted(s["state"] for s in status["sessions"]) == ["attached", "lost"])
        other = stack.enter_context(connect(life.socket, timeout_s=60))
        (me,) = [s["pid"] for s in life.daemon.status()["sessions"] if s["state"] == "lost"]
        for refused in (lambda: other.evict(KEYS[:1]), other.clear):
            with pytest.raises(NotResumed, match=rf"until the processes \[{me}\]") as caught:
                refused()
            assert caught.value.retryable and caught.value.ids["pids"] == [me]
        assert other.evict([b"nobody"]).evicted == ()
        with pytest.raises(NoPages):
            other.lease(1)
        with other.lookup(KEYS) as hit:
            assert len(hit) == 16, "reading goes on"
        life.daemon.wait_pages(POOL, pinned=0)
        # Still without its daemon: nothing that is found is overwritten.
        assert rank.load(kept, KEYS[:2]) == 2
        done: list[Any] = []
        waiting = threading.Thread(target=lambda: done.append(other.evict(KEYS[:4], wait_s=20)))
        waiting.start()
        life.daemon.status()
        assert not done
        client._channel._lock.release()  # what holds it back goes on
        try:
            waiting.join()
        finally:
            client._channel._lock.acquire()
        assert (done[0].evicted, done[0].pinned) == (tuple(KEYS[2:4]), tuple(KEYS[:2]))
    kept.release()


def test_bad_calls_are_refused_without_a_daemon_too(life: Comeback, client: Client) -> None:
    life.daemon.kill()
    for _ in range(2):
        with pytest.raises(KeyInputError, match="twice"):
            client.lookup([KEYS[0], KEYS[0]])
        with pytest.raises(UsageError, match="mode must be"):
            client.lookup(KEYS, "any")  # type: ignore[arg-type]
        with client.lookup([]) as hit:
            assert (hit.id, hit.pages) == (0, ())
    life.again()


def test_without_an_index_a_lookup_waits_as_before(life: Comeback, rank: Rank) -> None:
    with connect(life.socket, timeout_s=0.2) as client:
        fill(client, rank, KEYS)
        client._away.close()
        life.daemon.kill()
        with pytest.raises(DaemonUnavailable):
            client.lookup(KEYS)
        life.again()


def test_who_is_calling_when_the_daemon_dies_goes_on_at_once(
    life: Comeback, rank: Rank, client: Client, wait_until: Until
) -> None:
    """A dying daemon still listens for a moment: who comes back to it must not take it for the next one."""
    over = threading.Event()
    failed: list[Exception] = []

    def call() -> None:
        while not over.is_set() and not failed:
            try:
                client.lookup(KEYS[:2]).release()
            except Exception as error:
                failed.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        for _ in range(4):
            wait_until(lambda: client._away.index is not None, "the client has the index of this daemon")
            life.daemon.kill()
            held = client.lookup(KEYS[:2])
            assert taken(held)
            held.release()
            life.again()
            life.wait_attached(2)
            assert client.contains(KEYS[:1]) == (HIT,)
    finally:
        over.set()
        caller.join()
    assert failed == []
