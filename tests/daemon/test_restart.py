"""A daemon that is killed and started again: what it answered stays true, and nobody who lives loses anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.channel import Channel
from sharedmirror.control import Client, connect
from sharedmirror.errors import NoPages, StaleLease
from sharedmirror.types import KeyState, Role
from tests.daemon.comeback import POOL, Comeback, engine, go_on, held_back, keys_of, publish, stop

if TYPE_CHECKING:
    from tests.conftest import Processes, Starter

Until = Callable[..., Any]


def counts(life: Comeback) -> dict[str, int]:
    pages: dict[str, int] = life.daemon.pool(POOL)["pages"]
    return pages


# --- what was answered stays true


def test_sealed_pages_keep_their_keys_and_generations_go_on(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=17)
    with connect(life.socket) as client:
        keys = keys_of(*range(16))
        pages = publish(client, workers, keys)
        before = client.lookup(keys)
        before.release()
        life.restart()
        with client.lookup(keys) as hit:
            assert hit.pages == before.pages == pages
        assert life.daemon.status()["daemon"]["epoch"] == 2
        life.restart()
        life.wait_attached(3)
        # Every page is granted again, each under its second generation.
        lease = client.lease(16)
        assert sorted(lease.pages) == sorted(pages) and set(lease.generations) == {2}
        assert client.contains(keys) == (KeyState.MISS,) * 16


def test_a_page_evicted_for_an_open_lease_is_not_found_after_a_restart(start: Starter, processes: Processes) -> None:
    """Invariant 5: the grant wrote no slot, so the slot still told of the old key."""
    life = Comeback(start)
    workers = engine(processes, life, pages=5)
    with connect(life.socket) as client:
        publish(client, workers, keys_of(1, 2, 3, 4))
        lease = client.lease(4)  # evicts all
        life.restart()
        life.wait_attached(3)
        assert client.contains(keys_of(1, 2, 3, 4)) == (KeyState.MISS,) * 4
        with client.lookup(keys_of(1, 2, 3, 4), "each") as hit:
            assert len(hit) == 0
        assert client.evict(keys_of(1, 2)).evicted == ()
        # The same keys again: a third start must not find them twice.
        client.seal(lease, keys_of(4, 3, 2, 1))
        for worker in workers:
            worker.commit(lease)
        again = client.lease(2)
        life.restart()
        life.wait_attached(3)
        with client.lookup(keys_of(1, 2, 3, 4), "each") as hit:
            assert len(hit) == 2 and not set(hit.pages) & set(again.pages)


def test_a_key_sealed_elsewhere_while_its_evicted_page_is_leased_is_no_contradiction(
    start: Starter, processes: Processes
) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=5)
    with connect(life.socket) as client:
        publish(client, workers, keys_of(1, 2, 3, 4))
        still_open = client.lease(2)  # evicts 1 and 2
        publish(client, workers, keys_of(1, 2))
        life.restart()
        with client.lookup(keys_of(1, 2), "each") as hit:
            assert len(hit) == 2 and not set(hit.pages) & set(still_open.pages)


def test_a_worker_may_commit_before_its_scheduler_is_back(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life)
    with connect(life.socket) as client:
        reserved = client.reserve(keys_of(1, 2))
        plain = client.lease(2)
        assert reserved.lease is not None
        with held_back(client):
            life.restart()
            for worker in workers:
                answer = worker.commit(reserved.lease)
                worker.commit(plain)
            assert tuple(answer["sealed"]) == reserved.lease.pages
            states = {s["role"]: s["state"] for s in life.daemon.status()["sessions"]}
            assert states == {"worker": "attached", "scheduler": "lost"}
        assert client.seal(plain, keys_of(3, 4)).sealed == plain.pages
        with client.lookup(keys_of(1, 2, 3, 4)) as hit:
            assert hit.pages == reserved.lease.pages + plain.pages


def test_a_half_committed_lease_needs_only_the_other_half(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    first, second = engine(processes, life)
    with connect(life.socket) as client:
        lease = client.lease(4)
        first.commit(lease)
        second.commit(lease, list(lease.pages[:2]))
        life.restart()
        assert client.seal(lease, keys_of(1, 2, 3, 4)).sealed == lease.pages[:2]
        assert tuple(second.commit(lease, list(lease.pages[2:]))["sealed"]) == lease.pages[2:]


def test_a_hit_stays_pinned_until_it_is_released(start: Starter, processes: Processes, wait_until: Until) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=9)
    with connect(life.socket) as client:
        publish(client, workers, keys_of(*range(8)))
        hit = client.lookup(keys_of(0, 1, 2))
        life.restart()
        life.wait_attached(3)
        assert counts(life)["pinned"] == 3
        assert client.evict(keys_of(0, 1, 2)).pinned == tuple(keys_of(0, 1, 2))
        with pytest.raises(NoPages):
            client.lease(6)
        assert len(client.lease(5).pages) == 5
        hit.release()
        wait_until(lambda: counts(life)["pinned"] == 0)
        assert len(client.lease(3).pages) == 3


def test_a_release_that_workers_have_not_answered_is_asked_for_again(
    start: Starter, processes: Processes, wait_until: Until
) -> None:
    life = Comeback(start)
    (worker,) = processes.engine(life.socket, num_host_pages=9)
    with connect(life.socket) as client:
        publish(client, [worker], keys_of(1, 2))
        client.lookup(keys_of(1, 2)).release()
        life.restart()
        life.wait_attached(2)
        assert counts(life)["pinned"] == 2
        # Told once before the daemon died and once after.
        wait_until(lambda: len([p for p in worker.pushes() if p["push"] == "released"]) == 2)
        worker.ask("answer_pushes")
        wait_until(lambda: counts(life)["pinned"] == 0)


# --- leases and evidence


def test_what_a_resuming_scheduler_does_not_name_is_revoked(
    start: Starter, processes: Processes, wait_until: Until
) -> None:
    life = Comeback(start)
    (worker,) = processes.engine(life.socket, num_host_pages=9)
    with connect(life.socket) as client:
        forgotten, kept = client.lease(2), client.lease(3)
        client._leases.discard(forgotten.id)
        life.restart()
        life.wait_attached(2)
        wait_until(lambda: [p["leases"] for p in worker.pushes()] == [[forgotten.id]])
        assert counts(life)["leased"] == 5
        with pytest.raises(StaleLease):
            worker.commit(forgotten)
        worker.ask("answer_pushes")
        wait_until(lambda: counts(life)["leased"] == 3)
        worker.commit(kept)
        assert client.seal(kept, keys_of(1, 2, 3)).sealed == kept.pages


def test_evidence_of_a_rank_that_was_gone_before_the_restart_still_counts(start: Starter, processes: Processes) -> None:
    """One rank died and is forgotten, the other has not drained: it alone is waited for, also after a restart."""
    life = Comeback(start)
    dead, slow = processes.engine(life.socket, 2, num_host_pages=9)
    with connect(life.socket) as client:
        client.lease(4)
        dead.kill()
        life.daemon.wait_status(lambda status: len(status["sessions"]) == 2)
        assert counts(life)["leased"] == 4
        life.restart()
        life.wait_attached(2)
        assert counts(life)["leased"] == 4
        slow.ask("answer_pushes")
        life.daemon.wait_pages(POOL, leased=0, quarantined=0, free=8)


def test_evidence_of_a_rank_that_detached_before_the_restart_still_counts(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    left, slow = processes.engine(life.socket, 2, num_host_pages=9)
    with connect(life.socket) as client:
        client.lease(4)
        left.call("detach", unmapped=False)  # a view of its memory lives on
        life.restart()
        life.daemon.wait_status(lambda status: [s["state"] for s in status["sessions"]].count("attached") == 2)
        slow.ask("answer_pushes")
        life.daemon.wait_pages(POOL, leased=0, quarantined=0, free=8)


@pytest.mark.parametrize("fork", ["", "execs", "keeps", "maps"])
def test_a_rank_that_dies_while_the_daemon_is_away(start: Starter, processes: Processes, fork: str) -> None:
    life = Comeback(start)
    dying, living = engine(processes, life, pages=9)
    with connect(life.socket) as client:
        lease = client.lease(4)
        living.commit(lease)
        life.daemon.kill()
        holder = dying.fork(fork) if fork else 0
        dying.kill()
        life.again()
        if fork in ("keeps", "maps"):
            status = life.daemon.wait_status(lambda status: status["quarantine"])
            (entry,) = status["quarantine"]
            assert entry["pages"] == 4 and entry["pid"] == dying.pid
            assert "lock" in entry["missing"] and entry["holders"] == [holder]
            assert counts(life)["quarantined"] == 4
            with pytest.raises(NoPages):
                processes.worker(life.socket).attach(rank=0, world_size=2, num_host_pages=9)
                client.lease(5)
            dying.end_fork(holder)
        life.daemon.wait_pages(POOL, quarantined=0, leased=0, free=8)
        assert life.daemon.status()["quarantine"] == []


def test_all_die_while_the_daemon_is_away(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life)
    scheduler = processes.worker(life.socket, role="scheduler")
    scheduler.call("attach", pool=POOL, engine="0", launch=None, wait_s=5)
    with connect(life.socket) as client:
        publish(client, workers, keys_of(1, 2))
        client.lookup(keys_of(1))
        scheduler.call("lease", n=5)
        life.daemon.kill()
        for worker in [*workers, scheduler]:
            worker.kill()
        with held_back(client):
            life.again()
            # This client is the one that lives: it is waited for, and its hit stays.
            life.daemon.wait_status(lambda status: [s["state"] for s in status["sessions"]] == ["lost"])
            assert counts(life) | {"sealed": 2, "pinned": 1, "leased": 0, "quarantined": 0} == counts(life)
    life.daemon.wait_status(lambda status: status["sessions"] == [])
    life.daemon.wait_pages(POOL, pinned=0, sealed=2, leased=0)
    # The name is free at once, and the keys are there.
    engine(processes, life)
    with connect(life.socket) as client, client.lookup(keys_of(1, 2)) as hit:
        assert len(hit) == 2


def test_a_scheduler_that_dies_while_the_daemon_is_away_leaves_its_pins_to_the_loads(
    start: Starter, processes: Processes, wait_until: Until
) -> None:
    life = Comeback(start)
    (worker,) = processes.engine(life.socket, num_host_pages=9)
    scheduler = processes.worker(life.socket, role="scheduler")
    scheduler.call("attach", pool=POOL, engine="0", launch=None, wait_s=5)
    with connect(life.socket) as client:
        publish(client, [worker], keys_of(1, 2))
    hit = scheduler.call("lookup", keys=keys_of(1, 2), mode="prefix")
    assert hit["hit"]
    life.daemon.kill()
    scheduler.kill()
    life.again()
    wait_until(lambda: {"push": "released", "hits": [hit["hit"]], "hit_floor": hit["hit"]} in worker.pushes())
    assert counts(life)["pinned"] == 2
    worker.ask("answer_pushes")
    life.daemon.wait_pages(POOL, pinned=0, sealed=2)


# --- survivors


@pytest.mark.parametrize("end", ["resumes", "dies"])
def test_nothing_is_evicted_until_every_survivor_is_back_or_gone(
    start: Starter, processes: Processes, end: str
) -> None:
    life = Comeback(start)
    workers = engine(processes, life, world_size=1, pages=9)
    (survivor,) = engine(processes, life, world_size=1, pages=9, engine="other")
    with connect(life.socket, max_held=8) as client:
        keys = keys_of(*range(8))
        publish(client, workers, keys)
        stop(survivor)
        life.restart()
        life.daemon.wait_status(lambda status: [s["state"] for s in status["sessions"]].count("attached") == 2)
        with pytest.raises(NoPages, match=rf"nothing is evicted until the processes \[{survivor.pid}\]"):
            client.lease(1)
        assert client.contains(keys) == (KeyState.HIT,) * 8
        timer = threading.Timer(0.2, lambda: go_on(survivor) if end == "resumes" else survivor.kill())
        timer.start()
        # The wait ends with the survivor's word, or with the proof of its end.
        assert len(client.lease(1, wait_s=20).pages) == 1
        timer.join()


def test_a_stopped_worker_loses_nothing_over_a_restart(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    stopped, other = engine(processes, life, pages=9)
    with connect(life.socket) as client:
        lease = client.lease(4)
        other.commit(lease)
        client.seal(lease, keys_of(1, 2, 3, 4))
        stop(stopped)
        for _ in range(2):
            life.restart()
        session = life.sessions()[stopped.pid]
        assert (session["state"], session["leases"], session["holders"]) == ("lost", [], [])
        assert counts(life) | {"leased": 4, "quarantined": 0} == counts(life)
        go_on(stopped)
        assert tuple(stopped.commit(lease)["sealed"]) == lease.pages


# --- before and after: who comes at the wrong moment


def test_who_had_not_attached_yet_begins_anew(start: Starter) -> None:
    life = Comeback(start)
    with Channel.open(life.socket, role=Role.WORKER, timeout_s=20) as channel:
        first = channel.session
        life.restart()
        reply = channel.call(
            "attach", pool=POOL, tag="", engine="0", rank=0, world_size=1, page_size=16, frames_per_page=1,
            kind="leased", layout="page", num_host_pages=9, wait_s=0, planes=[["k", 0, 1, 4096, 16]],
        )  # fmt: skip
        assert reply["session"] == channel.session != first
        # The memory is the new session's: its file is locked for this process.
        (session,) = life.daemon.status()["sessions"]
        assert (session["id"], session["state"]) == (channel.session, "attached")
        assert len(channel.arena_fds) == 1
        channel.call("detach", unmapped=True)


def test_ranks_that_wait_for_each_other_while_the_daemon_dies_find_each_other_after(
    start: Starter, processes: Processes
) -> None:
    life = Comeback(start)
    first, second = processes.worker(life.socket), processes.worker(life.socket)
    first.send_attach(rank=0, world_size=2)
    life.daemon.wait_status(lambda status: [p["state"] for p in status["pools"]] == ["forming"])
    life.restart()
    second.attach(rank=1, world_size=2)
    assert first.result()["body"]["num_host_pages"] == 9
    life.wait_attached(2)


def test_a_call_that_waits_while_the_daemon_dies_is_answered_after(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    engine(processes, life, world_size=1, pages=9)
    with connect(life.socket, timeout_s=20) as client:
        full = client.lease(8)
        answers: list[Any] = []
        with connect(life.socket, timeout_s=20) as other:
            thread = threading.Thread(target=lambda: answers.append(other.lease(2, wait_s=20)))
            thread.start()
            time.sleep(0.2)
            life.restart()
            client.abort(full)
            thread.join()
        (lease,) = answers
        assert len(lease.pages) == 2 and set(lease.generations) == {2}


def test_sessions_have_numbers_of_their_own_over_restarts(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    seen: set[int] = set()
    for number in range(3):
        (worker,) = engine(processes, life, world_size=1, engine=str(number), pages=9)
        assert worker.hello["session"] not in seen
        seen.add(worker.hello["session"])
        life.restart()
    life.wait_attached(3)
    leases = set()
    for number in range(3):
        with connect(life.socket, engine=str(number)) as client:
            leases.add(client.lease(1).id)
    assert len(leases) == 3 and min(leases) > max(seen)


def test_a_client_that_closes_while_the_daemon_is_away_holds_nothing_up(start: Starter, processes: Processes) -> None:
    """A scheduler has no copies: its process lives on, and yet its session is over when it let go of its file."""
    life = Comeback(start)
    workers = engine(processes, life, world_size=1, pages=9)
    client: Client = connect(life.socket)
    publish(client, workers, keys_of(1, 2, 3, 4, 5))
    client.lease(3)
    life.daemon.kill()
    client.close()
    life.again()
    life.wait_attached(1)
    life.daemon.wait_pages(POOL, leased=0, free=3, sealed=5)
    with connect(life.socket) as successor:
        assert len(successor.lease(8).pages) == 8


def test_a_stop_that_drops_the_cache_says_how_much_and_how_to_keep_it(start: Starter, processes: Processes) -> None:
    life = Comeback(start)
    workers = engine(processes, life, pages=17)
    with connect(life.socket) as client:
        publish(client, workers, keys_of(*range(9)))
    for worker in workers:
        worker.finish()
    life.daemon.wait_status(lambda status: not status["sessions"])
    assert life.daemon.end() == 0
    assert "event=cache_dropped sealed_pages=9 remedy='--keep keeps it over a stop'" in life.daemon.log()
