"""The control side with real workers: lease, commit, seal, look up, evict, and every mistake a caller can make."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.control import connect
from sharedmirror.errors import (
    DaemonUnavailable,
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
    from tests.client.conftest import Engine
    from tests.conftest import Daemon, Processes

Until = Callable[..., Any]
HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS


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


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e9, True, None, "1"])
def test_a_time_for_calls_that_cannot_be_is_refused_before_anything_is_opened(timeout_s: Any) -> None:
    with pytest.raises(UsageError, match="timeout_s must be seconds above 0 and at most 86400"):
        connect("/nowhere/d.sock", timeout_s=timeout_s)


@pytest.mark.parametrize("max_held", [0, True, "1", 2**70])
def test_a_bound_that_cannot_be_is_refused_before_anything_is_opened(max_held: Any) -> None:
    with pytest.raises(UsageError, match=f"max_held must be .*{max_held}"):
        connect("/nowhere/d.sock", max_held=max_held)


@pytest.mark.parametrize("launch", [3, 0, False, b"x", "x" * 257, "a\nb"])
def test_a_launch_id_that_cannot_be_is_refused_before_anything_is_opened(launch: Any) -> None:
    with pytest.raises(UsageError, match=r"launch is .*; it must be a string of 1 to 256 printable bytes"):
        connect("/nowhere/d.sock", launch=launch)


def test_a_launch_id_of_the_environment_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAREDMIRROR_LAUNCH_ID", "x" * 257)
    with pytest.raises(UsageError, match=r"\$SHAREDMIRROR_LAUNCH_ID is 'xxx"):
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
    ("wanted", "words"),
    [
        (0, "at least one page, not 0"),
        (-1, "-1"),
        (True, "True"),
        (1.0, "1.0"),
        ("1", "'1'"),
        (1 << 70, str(1 << 70)),
        (9, "9 pages were asked for; pool 'control.*' leases 8 at most"),
    ],
)
def test_a_lease_of_nothing_or_of_too_much_is_refused(one: Engine, wanted: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        one.client.lease(wanted)
    assert caught.value.code == "usage"
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
    with pytest.raises(RanksMissing, match=r"ranks \[1\] are not attached; start") as caught:
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


@pytest.mark.parametrize(
    ("keys", "said"),
    [(None, "not None"), (7, "not 7"), ([b"a", 7], "position 1 .* not int 7"), ([None], "position 0 .* not NoneType")],
)
def test_keys_that_are_none_are_refused_by_call_and_value(one: Engine, keys: Any, said: str) -> None:
    lease = one.client.lease(1)
    for call in ("lookup", "contains", "peek", "touch", "evict", "reserve"):
        with pytest.raises(KeyInputError, match=f"{call}: .*{said}"):
            getattr(one.client, call)(keys)
    with pytest.raises(KeyInputError, match=f"seal: .*{said}"):
        one.client.seal(lease, keys)
    parent: Any = 7
    with pytest.raises(KeyInputError, match="reserve: the parent must be a key of 1 to 64 bytes, not int 7"):
        one.client.reserve([b"a"], parent)
    assert one.pages()["leased"] == 1


def test_pages_that_are_none_are_refused_by_call_and_value(one: Engine) -> None:
    lease = one.client.lease(1)
    wrong: Any = 5
    with pytest.raises(UsageError, match="seal: pages must be a sequence of host pages, not 5"):
        one.client.seal(lease, [b"a"], pages=wrong)
    with pytest.raises(UsageError, match="abort: pages must be a sequence of host pages, not 5"):
        one.client.abort(lease, wrong)
    wrong = [1.5]
    with pytest.raises(PageError, match="abort: a host page must be a whole number, not 1.5"):
        one.client.abort(lease, wrong)
    assert one.pages()["leased"] == 1


def test_release_takes_one_hit_or_several_and_nothing_else(one: Engine) -> None:
    one.write(b"a", b"b")
    hits = [one.client.lookup([key]) for key in (b"a", b"b", b"a")]
    lease = one.client.lease(1)
    wrong: Any
    for wrong in (None, lease, [hits[0], lease], [None]):
        with pytest.raises(UsageError, match="release takes a Hit or several, not (NoneType None|Lease)"):
            one.client.release(wrong)
    assert one.pages()["pinned"] == 2
    one.client.release(hits[0])
    one.client.release(hits[1:])
    one.daemon.wait_pages(one.name, pinned=0)


def test_what_is_no_lease_is_refused_by_name(one: Engine) -> None:
    lease = one.client.lease(1)
    wrong: Any
    for wrong in (None, lease.id, "lease", one.client.lookup([b"nothing"])):
        with pytest.raises(UsageError, match=f"seal takes a Lease, not {type(wrong).__name__}"):
            one.client.seal(wrong, [b"a"])
        with pytest.raises(UsageError, match=f"abort takes a Lease, not {type(wrong).__name__}"):
            one.client.abort(wrong)
    assert one.pages()["leased"] == 1


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
