"""The control side with real workers: lease, commit, seal, look up, evict, and every mistake a caller can make."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import control
from sharedmirror.control import Client, connect
from sharedmirror.errors import (
    Cleared,
    ClosedError,
    DaemonUnavailable,
    ForkedError,
    KeyInputError,
    NoPages,
    PageError,
    PoolMismatch,
    PoolNotFound,
    RanksMissing,
    SharedMirrorError,
    StaleLease,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.types import KeyState, Lease

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter, Worker

Until = Callable[..., Any]
HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS
_numbers = itertools.count()


class Engine:
    """A pool of 8 pages to lease, its workers and its scheduler."""

    def __init__(self, daemon: Daemon, workers: list[Worker], client: Client, name: str) -> None:
        self.daemon, self.workers, self.client, self.name = daemon, workers, client, name

    def pages(self) -> dict[str, int]:
        return dict(self.daemon.pool(self.name)["pages"])

    def commit(self, lease: Lease | None, pages: list[int] | None = None) -> list[dict[str, Any]]:
        assert lease is not None
        return [worker.commit(lease, pages) for worker in self.workers]

    def write(self, *keys: bytes, parent: bytes | None = None) -> tuple[int, ...]:
        """Make keys readable and return their pages."""
        lease = self.client.lease(len(keys))
        self.commit(lease)
        assert self.client.seal(lease, keys, parent=parent).sealed == lease.pages
        return lease.pages


@pytest.fixture
def name() -> str:
    return f"control{next(_numbers)}"


@pytest.fixture
def two(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Engine]:
    """An engine of two ranks that drain at once."""
    workers = processes.engine(shared_daemon.socket, 2, answers=True, pool=name)
    with connect(shared_daemon.socket, name) as client:
        yield Engine(shared_daemon, workers, client, name)


@pytest.fixture
def one(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Engine]:
    """An engine of one rank that drains at once."""
    workers = processes.engine(shared_daemon.socket, 1, answers=True, pool=name)
    with connect(shared_daemon.socket, name) as client:
        yield Engine(shared_daemon, workers, client, name)


@pytest.fixture
def slow(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Engine]:
    """An engine of one rank that drains only when a test says so."""
    workers = processes.engine(shared_daemon.socket, 1, pool=name)
    with connect(shared_daemon.socket, name) as client:
        yield Engine(shared_daemon, workers, client, name)


# --- connecting


def test_connecting_without_a_pool_says_so_at_once_or_after_waiting(shared_daemon: Daemon, nothing_left: None) -> None:
    for wait_s in (0, 0.05):
        with pytest.raises(PoolNotFound, match="no pool 'nowhere' is ready") as caught:
            connect(shared_daemon.socket, "nowhere", wait_s=wait_s)
        assert caught.value.retryable


def test_connecting_waits_for_the_workers(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    worker = processes.worker(shared_daemon.socket)
    found: list[int] = []

    def schedule() -> None:
        with connect(shared_daemon.socket, name) as client:
            found.append(client.num_host_pages)

    thread = threading.Thread(target=schedule)
    thread.start()
    shared_daemon.wait_status(lambda status: status["daemon"]["state"] == "ready")
    worker.attach(pool=name)
    thread.join()
    assert found == [9]


def test_no_daemon(nothing_left: None) -> None:
    with pytest.raises(DaemonUnavailable, match="no daemon answers on /nowhere/d.sock"):
        connect("/nowhere/d.sock")


def test_a_static_pool_leases_nothing(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name, kind="static")
    with pytest.raises(WrongPoolKind, match="static"):
        connect(shared_daemon.socket, name)
    with pytest.raises(WrongPoolKind, match="static"):
        worker.call("lease", n=1)


def test_two_pools_of_one_name_need_an_engine(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    processes.engine(shared_daemon.socket, pool=name, tag="fp16", engine="a")
    processes.engine(shared_daemon.socket, pool=name, tag="fp8", engine="b")
    with pytest.raises(PoolMismatch, match=r"2 pools are named .*\['fp16', 'fp8'\]"):
        connect(shared_daemon.socket, name, "c")
    with connect(shared_daemon.socket, name, "a") as first, connect(shared_daemon.socket, name, "b") as second:
        assert first.pool != second.pool


# --- leases


def test_lease_commit_seal_lookup_over_two_ranks(two: Engine) -> None:
    client = two.client
    lease = client.lease(3)
    assert len(set(lease.pages)) == 3 and 0 not in lease.pages and lease.keys is None
    assert len(lease.generations) == 3 and lease.pool == client.pool
    keys = [b"a", b"b", b"c"]
    first, last = two.workers
    assert first.commit(lease) == {"sealed": [], "pending": [], "duplicates": [], "id": 2}
    sealed = client.seal(lease, keys)
    assert (sealed.sealed, sealed.pending, sealed.duplicates) == ((), lease.pages, {})
    assert client.contains(keys) == (PENDING,) * 3
    with client.lookup(keys) as hit:
        assert (len(hit), hit.pages, hit.states) == (0, (), (PENDING,) * 3)
    assert last.commit(lease, [lease.pages[1]])["sealed"] == [lease.pages[1]]
    assert client.contains(keys) == (PENDING, HIT, PENDING)
    assert last.commit(lease, [lease.pages[0], lease.pages[2]])["sealed"] == [lease.pages[0], lease.pages[2]]
    with client.lookup([*keys, b"d"]) as hit:
        assert (hit.pages, hit.states) == (lease.pages, (HIT, HIT, HIT, MISS))
        assert two.pages() == {"reserved": 1, "free": 5, "leased": 0, "sealed": 3, "pinned": 3, "quarantined": 0}
    two.daemon.wait_pages(two.name, pinned=0, sealed=3)


def test_a_lease_travels_pickled_with_all_it_says(one: Engine) -> None:
    lease = one.client.lease(2)
    copy = pickle.loads(pickle.dumps(lease))
    assert copy == lease and isinstance(copy, Lease)
    answer = one.workers[0].ask("commit", pickled=pickle.dumps(lease))
    assert (answer["pages"], answer["generations"]) == (list(lease.pages), list(lease.generations))


def test_generations_grow_with_each_grant_of_a_page(one: Engine, wait_until: Until) -> None:
    seen: dict[int, int] = {}
    for _ in range(3):
        lease = one.client.lease(8)
        for page, generation in zip(lease.pages, lease.generations, strict=True):
            assert generation > seen.get(page, 0)
            seen[page] = generation
        one.client.abort(lease)
        one.daemon.wait_pages(one.name, free=8)
    assert len(seen) == 8


def test_a_lease_is_all_or_nothing_and_names_the_numbers(one: Engine) -> None:
    one.client.lease(5)
    with pytest.raises(NoPages, match=r"4 pages were asked for; pool '\w+' has 3 free and 0 sealed") as caught:
        one.client.lease(4)
    assert caught.value.retryable
    assert one.pages()["free"] == 3
    assert len(one.client.lease(3).pages) == 3


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        (0, UsageError, "at least one"),
        (-1, PageError, "-1"),
        (True, PageError, "True"),
        (1.0, PageError, "1.0"),
        ("1", PageError, "'1'"),
        (1 << 70, PageError, str(1 << 70)),
        (9, UsageError, "9 pages were asked for; pool 'control.*' leases 8 at most"),
    ],
)
def test_a_lease_of_nothing_or_of_too_much_is_refused(
    one: Engine, wanted: Any, error: type[UsageError], words: str
) -> None:
    with pytest.raises(error, match=words):
        one.client.lease(wanted)
    assert one.pages()["free"] == 8


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), 1e9])
def test_a_wait_that_cannot_be_is_refused(one: Engine, wait_s: float) -> None:
    with pytest.raises(SharedMirrorError):
        one.client.lease(1, wait_s=wait_s)
    assert one.pages()["free"] == 8
    assert len(one.client.lease(1).pages) == 1


def test_a_lease_without_all_ranks_names_the_missing_ones(two: Engine) -> None:
    two.workers[1].kill()
    two.daemon.wait_status(lambda status: not [s for s in status["sessions"] if s["pid"] == two.workers[1].pid])
    with pytest.raises(RanksMissing, match=r"ranks \[1\] are not attached") as caught:
        two.client.lease(1)
    assert caught.value.ids == {"ranks": [1]} and caught.value.retryable


def test_waiting_for_pages_ends_when_another_frees_some(one: Engine) -> None:
    all_pages = one.client.lease(8)
    with connect(one.daemon.socket, one.name) as other:
        granted: list[Lease] = []
        thread = threading.Thread(target=lambda: granted.append(other.lease(8, wait_s=20)))
        thread.start()
        one.commit(all_pages, [all_pages.pages[0]])
        with pytest.raises(NoPages):
            one.client.lease(1, wait_s=0.05)
        assert granted == []
        one.client.abort(all_pages)
        thread.join()
        assert set(granted[0].pages) == set(all_pages.pages)


def test_an_aborted_lease_is_free_only_when_every_rank_has_drained(
    shared_daemon: Daemon, processes: Processes, name: str, wait_until: Until
) -> None:
    workers = processes.engine(shared_daemon.socket, 2, pool=name)
    with connect(shared_daemon.socket, name) as client:
        lease = client.lease(4)
        client.abort(lease, lease.pages[:1])
        push = {"push": "revoked_pages", "lease": lease.id, "pages": [lease.pages[0]]}
        assert [wait_until(worker.pushes) for worker in workers] == [[push], [push]]
        for worker in workers:
            assert shared_daemon.pool(name)["pages"]["leased"] == 4
            worker.call("drained", leases=[], hits=[], pages=[[lease.id, [lease.pages[0]]]])
        assert shared_daemon.pool(name)["pages"] | {"free": 5, "leased": 3} == shared_daemon.pool(name)["pages"]
        client.abort(lease)
        client.abort(lease)
        for worker in workers:
            assert shared_daemon.pool(name)["pages"]["leased"] == 3
            wait_until(lambda worker=worker: len(worker.pushes()) == 2)
            worker.call("drained", leases=[lease.id], hits=[])
        assert shared_daemon.pool(name)["pages"]["free"] == 8
        with pytest.raises(StaleLease, match=f"lease {lease.id} is over"):
            client.abort(lease)


# --- seal and commit


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([b"a"], "1 keys for 2 pages"),
        ([b"a", b"b", b"c"], "3 keys for 2 pages"),
        ([b"a", b"a"], "position 1 comes twice"),
        ([b"a", b"x" * 65], "position 1 must be 1 to 64 bytes, not 65 bytes"),
        ([b"", b"b"], "position 0 must be 1 to 64 bytes, not 0 bytes"),
        ([b"a", "b"], "position 1 .* not str"),
        ([b"a", None], "position 1 .* not NoneType"),
        (b"ab", "a sequence of bytes"),
        ("ab", "a sequence of bytes"),
    ],
)
def test_bad_keys_are_refused_and_change_nothing(one: Engine, keys: Any, words: str) -> None:
    lease = one.client.lease(2)
    one.commit(lease)
    with pytest.raises(KeyInputError, match=words):
        one.client.seal(lease, keys)
    assert one.pages()["leased"] == 2
    assert one.client.seal(lease, [b"a" * 64, b"b"]).sealed == lease.pages


def test_pages_of_a_seal_must_be_the_leases_own_and_distinct(one: Engine) -> None:
    client = one.client
    lease, other = client.lease(2), client.lease(1)
    one.commit(lease)
    with pytest.raises(PageError, match=f"page {other.pages[0]} is not in lease {lease.id}"):
        client.seal(lease, [b"a", b"b"], pages=[lease.pages[0], other.pages[0]])
    with pytest.raises(PageError, match="named twice"):
        client.seal(lease, [b"a", b"b"], pages=[lease.pages[0]] * 2)
    with pytest.raises(SharedMirrorError):
        client.seal(lease, [b"a"], pages=[-1])
    assert one.pages()["leased"] == 3
    assert client.seal(lease, [b"b"], pages=lease.pages[1:]).sealed == lease.pages[1:]
    with pytest.raises(StaleLease, match="over"):
        client.seal(lease, [b"a", b"b"])
    assert client.contains([b"a", b"b"]) == (MISS, HIT)


def test_a_key_is_given_once(one: Engine) -> None:
    lease = one.client.lease(2)
    one.client.seal(lease, [b"a"], pages=lease.pages[:1])
    with pytest.raises(StaleLease, match=f"page {lease.pages[0]} of lease {lease.id} has a key already"):
        one.client.seal(lease, [b"z"], pages=lease.pages[:1])
    assert one.client.contains([b"a", b"z"]) == (PENDING, MISS)


def test_the_later_page_of_a_key_is_freed_and_names_the_winner(one: Engine) -> None:
    (winner,) = one.write(b"a")
    lease = one.client.lease(2)
    one.commit(lease)
    sealed = one.client.seal(lease, [b"a", b"b"])
    assert (sealed.sealed, sealed.duplicates) == (lease.pages[1:], {lease.pages[0]: winner})
    assert one.pages() | {"free": 6, "sealed": 2} == one.pages()


def test_what_is_over_is_over_for_every_call(one: Engine) -> None:
    lease = one.client.lease(1)
    one.commit(lease)
    one.client.seal(lease, [b"a"])
    for call in (lambda: one.client.seal(lease, [b"b"]), lambda: one.client.abort(lease), lambda: one.commit(lease)):
        with pytest.raises(StaleLease, match=f"lease {lease.id} is over"):
            call()
    aborted = one.client.lease(1)
    one.client.abort(aborted)
    one.daemon.wait_pages(one.name, leased=0)
    with pytest.raises(StaleLease):
        one.commit(aborted)
    assert one.client.contains([b"a"]) == (HIT,)


def test_a_lease_of_another_engine_is_not_mine(one: Engine, processes: Processes) -> None:
    processes.engine(one.daemon.socket, pool=one.name, engine="other")
    lease = one.client.lease(1)
    with connect(one.daemon.socket, one.name, "other") as other:
        for call in (lambda: other.seal(lease, [b"a"]), lambda: other.abort(lease)):
            with pytest.raises(StaleLease, match="belongs to another engine"):
                call()
    assert one.pages()["leased"] == 1


# --- reserve


def test_reserve_tells_of_every_key_and_the_last_commit_seals(two: Engine) -> None:
    client = two.client
    readable = two.write(b"a")
    writing = client.reserve([b"b"])
    reservation = client.reserve([b"a", b"b", b"c", b"d"])
    assert (reservation.present, reservation.pending, reservation.evicted) == ((b"a",), (b"b",), ())
    assert reservation.lease is not None and reservation.lease.keys == (b"c", b"d")
    assert reservation.granted == dict(zip([b"c", b"d"], reservation.lease.pages, strict=True))
    assert two.workers[0].commit(reservation.lease)["pending"] == list(reservation.lease.pages)
    assert client.contains([b"c"]) == (PENDING,)
    assert two.workers[1].commit(reservation.lease)["sealed"] == list(reservation.lease.pages)
    two.commit(writing.lease)
    with client.lookup([b"a", b"b", b"c", b"d"]) as hit:
        assert hit.pages == (*readable, *writing.granted.values(), *reservation.granted.values())
    nothing = client.reserve([b"a", b"d"])
    assert (nothing.lease, nothing.granted, nothing.present) == (None, {}, (b"a", b"d"))


def test_a_reservation_that_is_aborted_leaves_its_keys_to_others(one: Engine) -> None:
    reservation = one.client.reserve([b"a"])
    assert reservation.lease is not None
    one.client.abort(reservation.lease)
    assert one.client.contains([b"a"]) == (MISS,)
    assert set(one.client.reserve([b"a"]).granted) == {b"a"}


# --- lookup and hits


def test_lookup_finds_the_prefix_or_each(one: Engine) -> None:
    pages = one.write(b"a", b"b", b"d")
    keys = [b"a", b"b", b"c", b"d"]
    with one.client.lookup(keys) as hit:
        assert (hit.pages, hit.states) == (pages[:2], (HIT, HIT, MISS, MISS))
    with one.client.lookup(keys, mode="each") as hit:
        assert (hit.pages, hit.states) == ((pages[0], pages[1], -1, pages[2]), (HIT, HIT, MISS, HIT))
        assert len(hit) == 3
    with one.client.lookup([b"x"]) as hit:
        assert (hit.id, len(hit), hit.pages) == (0, 0, ())
    with one.client.lookup([]) as hit:
        assert (len(hit), hit.states) == (0, ())
    pool = one.daemon.pool(one.name)
    assert (pool["hits"], pool["misses"]) == (5, 4)
    with pytest.raises(UsageError, match="mode must be 'prefix' or 'each', not 'all'"):
        one.client.lookup(keys, mode="all")  # type: ignore[arg-type]


def test_a_hit_pins_until_it_is_released_and_every_worker_has_drained(slow: Engine, wait_until: Until) -> None:
    slow.write(b"a", b"b")
    (worker,) = slow.workers
    with slow.client.lookup([b"a", b"b"]) as hit:
        assert slow.client.evict([b"a", b"b"]) == control.Evicted((), (b"a", b"b"))
    hit.release()
    (push,) = wait_until(worker.pushes)
    assert push == {"push": "released", "hits": [hit.id], "hit_floor": hit.id}
    assert slow.pages()["pinned"] == 2
    assert slow.client.evict([b"a"]) == control.Evicted((), (b"a",))
    worker.call("drained", leases=[], hits=[hit.id])
    assert slow.pages()["pinned"] == 0
    assert slow.client.evict([b"a", b"b", b"x"]) == control.Evicted((b"a", b"b"), ())


def test_several_hits_go_in_one_call_and_a_pickled_copy_cannot_release(one: Engine) -> None:
    one.write(b"a", b"b")
    hits = [one.client.lookup([b"a"]), one.client.lookup([b"b"]), one.client.lookup([b"x"])]
    copy = pickle.loads(pickle.dumps(hits[0]))
    assert copy == hits[0]
    copy.release()
    one.client.release([copy])
    assert one.pages()["pinned"] == 2
    one.client.release(hits)
    one.daemon.wait_pages(one.name, pinned=0)
    one.client.release(hits)


def test_a_hit_does_not_hide_the_exception_of_its_block(one: Engine) -> None:
    one.write(b"a")
    with pytest.raises(KeyError, match="mine"), one.client.lookup([b"a"]):
        raise KeyError("mine")
    one.daemon.wait_pages(one.name, pinned=0)
    with pytest.raises(KeyError, match="mine"), one.client.lookup([b"a"]):
        one.client.close()
        raise KeyError("mine")
    one.daemon.wait_pages(one.name, pinned=0)


# --- eviction, touch, evict, clear


def test_eviction_takes_leaves_first_and_the_least_recently_used(one: Engine) -> None:
    one.write(b"a", b"b", b"c")
    one.write(b"x", b"y", b"z")
    one.client.touch([b"c"])
    assert one.client.reserve([b"1", b"2", b"3"]).evicted == (b"z",)
    assert one.client.reserve([b"4"]).evicted == (b"y",)
    assert one.client.contains([b"a", b"b", b"c", b"x"]) == (HIT,) * 4
    assert one.daemon.pool(one.name)["evictions"] == 2


def test_touch_and_lookup_refresh_what_they_name(one: Engine) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        one.write(key)
    assert one.client.touch([b"a", b"nothing", b"a"]) == 2
    with one.client.lookup([b"b"]):
        pass
    one.daemon.wait_pages(one.name, pinned=0)
    assert one.client.reserve([bytes([n]) for n in range(6)]).evicted == (b"c", b"d")


def test_a_pinned_page_is_never_evicted(one: Engine) -> None:
    one.write(b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h")
    with one.client.lookup([b"a", b"b"]):
        assert len(one.client.lease(6).pages) == 6
        with pytest.raises(NoPages, match="has 0 free and 2 sealed pages, of which 2 are pinned"):
            one.client.lease(1)
    assert one.client.contains([b"a", b"b", b"c"]) == (HIT, HIT, MISS)


def test_clear_forgets_all_and_refuses_what_was_leased_before(one: Engine) -> None:
    client = one.client
    one.write(b"a", b"b")
    lease = client.lease(2)
    one.commit(lease)
    reservation = client.reserve([b"r"])
    with client.lookup([b"a"]):
        assert client.clear() == 1
        assert client.contains([b"a", b"b", b"r"]) == (MISS, MISS, MISS)
        assert one.pages()["pinned"] == 1
        with client.lookup([b"a"]) as again:
            assert len(again) == 0
        with pytest.raises(Cleared, match=f"cleared after lease {lease.id}"):
            client.seal(lease, [b"c", b"d"])
    with pytest.raises(StaleLease):
        one.commit(reservation.lease)
    client.abort(lease)
    one.daemon.wait_pages(one.name, free=8, pinned=0)
    assert one.daemon.pool(one.name)["number"] == 2
    one.write(b"a")
    assert client.contains([b"a"]) == (HIT,)


# --- pools and engines


def test_two_engines_share_a_pools_keys(one: Engine, processes: Processes) -> None:
    pages = one.write(b"a")
    processes.engine(one.daemon.socket, pool=one.name, engine="other", answers=True)
    with connect(one.daemon.socket, one.name, "other") as other:
        with other.lookup([b"a"]) as hit:
            assert hit.pages == pages
            # Ids are guessable; only the engine that holds a hit may release it.
            with pytest.raises(StaleLease, match=f"hit {hit.id} belongs to another engine"):
                one.client._call("release", hits=[hit.id])
            assert one.pages()["pinned"] == 1


def test_two_pools_have_nothing_in_common(one: Engine, processes: Processes) -> None:
    one.write(b"a")
    processes.engine(one.daemon.socket, pool=one.name + "b", num_host_pages=3)
    with connect(one.daemon.socket, one.name + "b") as other:
        assert (other.num_host_pages, other.contains([b"a"])) == (3, (MISS,))
        other.lease(2)
        assert other.clear() == 0
    assert one.client.contains([b"a"]) == (HIT,)
    assert one.pages()["free"] == 7


def test_status_shows_leases_and_pins(two: Engine) -> None:
    two.write(b"a")
    lease = two.client.lease(2)
    two.workers[0].commit(lease)
    with two.client.lookup([b"a"]):
        status = two.client.status()
    (session,) = [s for s in status["sessions"] if s["pool"] == two.name and s["role"] == "scheduler"]
    assert (session["pid"], session["rank"], session["state"], session["pins"]) == (os.getpid(), None, "attached", 1)
    (shown,) = session["leases"]
    assert (shown["id"], shown["pages"], shown["missing_ranks"], shown["revoked"]) == (lease.id, 2, [1], False)
    assert two.daemon.pool(two.name)["ranks_attached"] == {"0": [0, 1]}


# --- the end


def test_close_gives_leases_and_hits_back(one: Engine) -> None:
    one.write(b"a")
    with connect(one.daemon.socket, one.name) as other:
        other.lease(3)
        other.lookup([b"a"])
        assert one.pages() | {"leased": 3, "pinned": 1} == one.pages()
    other.close()
    one.daemon.wait_pages(one.name, leased=0, pinned=0, sealed=1, free=7)
    for call in (lambda: other.lease(1), lambda: other.contains([]), other.status, other.clear):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_forked_child_is_refused(one: Engine) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            one.client.lease(1)
            word = b"served"
        except ForkedError:
            word = b"forked"
        except BaseException:
            word = b"other"
        os.write(write, word)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"forked"
    os.waitpid(pid, 0)
    assert len(one.client.lease(1).pages) == 1


def test_a_daemon_that_is_gone_is_a_retryable_error_and_close_is_quiet(start: Starter, processes: Processes) -> None:
    daemon = start()
    processes.engine(daemon.socket)
    with connect(daemon.socket, timeout_s=0.3) as client:
        daemon.kill()
        with pytest.raises(DaemonUnavailable) as caught:
            client.lease(1)
        assert caught.value.retryable
