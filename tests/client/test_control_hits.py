"""The control side with real workers: hits, eviction, clear, engines that share a pool, and the end."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror import control
from sharedmirror.control import connect
from sharedmirror.errors import (
    Cleared,
    ClosedError,
    DaemonUnavailable,
    ForkedError,
    NoPages,
    StaleLease,
    UsageError,
)
from sharedmirror.types import KeyState

if TYPE_CHECKING:
    from tests.client.conftest import Engine
    from tests.conftest import Processes, Starter

Until = Callable[..., Any]
HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS


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
    with warnings.catch_warnings():
        # Newer interpreters warn of a fork beside threads; here the child only makes one call.
        warnings.simplefilter("ignore", DeprecationWarning)
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
