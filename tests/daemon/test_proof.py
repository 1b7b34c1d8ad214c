"""Proof of death with real processes: what each kind of end leaves as evidence, and what the daemon makes of it."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.control import connect
from sharedmirror.errors import EngineBusy, NoPages, ProtocolError, RankAttached, RanksMissing, StaleLease
from sharedmirrord import proof

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter, Worker

Until = Callable[..., Any]
_numbers = itertools.count()

HOLDER = """
import mmap, os, sys, time
fd = int(sys.argv[1])
if "maps" in sys.argv:
    kept = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(fd)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    return f"proof{next(_numbers)}"


def session_of(status: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """Return a worker's session, an empty map once it is over."""
    found: list[dict[str, Any]] = [s for s in status["sessions"] if s["id"] == worker.hello["session"]]
    return found[0] if found else {}


def ended(status: dict[str, Any], worker: Worker) -> str:
    found: list[str] = [e["how"] for e in status["ended"] if e["id"] == worker.hello["session"]]
    return found[0] if found else ""


# --- the evidence itself


class Held:
    """A watch, and a process that holds the client's descriptor, or the mapping alone."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.watch, theirs = proof.LifeWatch.create(str(directory), 7, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(theirs), *words],
            pass_fds=[theirs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        os.close(theirs)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        self.watch.pidfd = os.pidfd_open(self.process.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.watch.close()


@pytest.fixture
def hold(tmp_path: Path, nothing_left: None) -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(*words: str) -> Held:
        made.append(Held(tmp_path / "sessions", *words))
        return made[-1]

    yield make
    for held in made:
        held.close()


@pytest.mark.parametrize("words", [(), ("maps",)])
def test_a_living_process_lacks_all_evidence_and_a_dead_one_none(
    hold: Callable[..., Held], wait_until: Until, words: tuple[str, ...]
) -> None:
    held = hold(*words)
    assert held.watch.missing() == ("process", "socket", "lock")
    held.watch.connected = False
    assert held.watch.missing() == ("process", "lock")
    held.process.send_signal(signal.SIGSTOP)
    assert held.watch.missing() == ("process", "lock")
    held.process.kill()
    wait_until(lambda: held.watch.missing() == ())
    held.process.wait()
    assert held.watch.missing() == ()


def test_a_mapping_alone_keeps_the_lock_and_is_found(hold: Callable[..., Held]) -> None:
    held = hold("maps")
    assert held.process.pid in held.watch.holders()
    assert "lock" in held.watch.missing()
    assert os.getpid() not in held.watch.holders()


def test_the_session_file_is_private_and_goes_with_the_watch(tmp_path: Path, nothing_left: None) -> None:
    directory = tmp_path / "sessions"
    watch, theirs = proof.LifeWatch.create(str(directory), 3, None)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert os.stat(watch.path).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(theirs) and not os.get_inheritable(watch.lock_fd)
    with pytest.raises(FileExistsError):
        proof.LifeWatch.create(str(directory), 3, None)
    os.close(theirs)
    watch.close()
    watch.close()
    assert os.listdir(directory) == []


def test_without_a_pidfd_the_end_is_never_proven(tmp_path: Path, nothing_left: None) -> None:
    watch, theirs = proof.LifeWatch.create(str(tmp_path), 3, None)
    os.close(theirs)
    watch.connected = False
    assert watch.missing() == ("process",)
    watch.close()


def test_pids_of_descriptors(nothing_left: None) -> None:
    pidfd = os.pidfd_open(os.getpid())
    assert proof.pid_of_pidfd(pidfd) == os.getpid()
    os.close(pidfd)
    with pytest.raises(ProtocolError, match="cannot be examined"):
        proof.pid_of_pidfd(pidfd)
    with open(os.devnull) as file, pytest.raises(ProtocolError, match="no pidfd"):
        proof.pid_of_pidfd(file.fileno())


def test_a_pidfd_of_a_reaped_process_has_no_pid(nothing_left: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    assert select.select([pidfd], [], [], 20)[0]
    assert proof.pid_of_pidfd(pidfd) == 0
    os.close(pidfd)


def test_start_times_tell_processes_apart(tmp_path: Path, nothing_left: None) -> None:
    odd = tmp_path / ") odd ("
    odd.symlink_to(sys.executable)
    process = subprocess.Popen([str(odd), "-c", "input()"], stdin=subprocess.PIPE)
    theirs = proof.start_time(process.pid)
    assert 0 < proof.start_time(os.getpid()) <= theirs == proof.start_time(process.pid)
    process.communicate(b"\n")
    assert proof.start_time(process.pid) == 0
    assert proof.start_time(1 << 30) == 0


# --- a worker's end, end to end


def test_a_killed_workers_pages_are_free_again(
    shared_daemon: Daemon, processes: Processes, name: str, wait_until: Until
) -> None:
    workers = processes.engine(shared_daemon.socket, 2, pool=name)
    with connect(shared_daemon.socket, name) as client:
        done, half, open_lease = client.lease(2), client.lease(2), client.lease(2)
        for worker in workers:
            worker.commit(done)
        client.seal(done, [b"a", b"b"])
        workers[1].commit(half)
        client.seal(half, [b"c", b"d"])
        for worker in workers:
            worker.kill()
        status = shared_daemon.wait_status(lambda s: all(ended(s, worker) for worker in workers))
        assert [ended(status, worker) for worker in workers] == ["died", "died"]
        pages = shared_daemon.pool(name)["pages"]
        assert pages == {"reserved": 1, "free": 6, "leased": 0, "sealed": 2, "pinned": 0, "quarantined": 0}
        for lease in (half, open_lease):
            with pytest.raises(StaleLease):
                client.seal(lease, [b"x", b"y"])
        with client.lookup([b"a", b"b"]) as hit:
            assert hit.pages == done.pages
        with pytest.raises(RanksMissing):
            client.lease(1)
    wait_until(lambda: shared_daemon.session_files() == [])


@pytest.mark.parametrize(("kind", "missing"), [("keeps", ["socket", "lock"]), ("maps", ["lock"])])
def test_a_live_fork_quarantines_and_is_named_until_it_exits(
    shared_daemon: Daemon, processes: Processes, name: str, kind: str, missing: list[str]
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    with connect(shared_daemon.socket, name) as client:
        committed, open_lease = client.lease(2), client.lease(3)
        worker.commit(committed)
        fork = worker.fork(kind)
        worker.kill()
        status = shared_daemon.wait_status(lambda s: session_of(s, worker).get("holders") == [fork], "it is named")
        session = session_of(status, worker)
        assert (session["state"], session["missing"]) == ("dead", missing)
        (entry,) = [entry for entry in status["quarantine"] if entry["pool"] == name]
        assert entry["pid"] == worker.pid and entry["session"] == session["id"]
        assert (entry["lease"], entry["pages"]) == (open_lease.id, 3)
        assert (entry["missing"], entry["holders"]) == (missing, [fork])
        pages = shared_daemon.pool(name)["pages"]
        assert pages | {"quarantined": 3, "leased": 2, "free": 3} == pages
        # What it had committed is whole; the rest cannot be sealed, whatever comes of the fork.
        assert client.seal(committed, [b"a", b"b"]).sealed == committed.pages
        with pytest.raises(StaleLease):
            client.seal(open_lease, [b"x", b"y", b"z"])
        assert os.path.exists(f"/proc/{fork}")
        worker.end_fork(fork)
        status = shared_daemon.wait_status(lambda s: ended(s, worker), "the fork has gone")
        assert ended(status, worker) == "died"
        pages = shared_daemon.pool(name)["pages"]
        assert pages | {"quarantined": 0, "leased": 0, "free": 6, "sealed": 2} == pages
        assert [entry for entry in status["quarantine"] if entry["pool"] == name] == []


def test_a_helper_that_was_execed_holds_nothing(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    with connect(shared_daemon.socket, name) as client:
        client.lease(3)
        helper = worker.fork("execs")
        worker.kill()
        shared_daemon.wait_status(lambda s: ended(s, worker) == "died")
        assert os.path.exists(f"/proc/{helper}")
        assert shared_daemon.pool(name)["pages"]["free"] == 8


def test_a_forks_end_alone_says_nothing(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    with connect(shared_daemon.socket, name) as client:
        lease = client.lease(1)
        worker.end_fork(worker.fork("keeps"))
        worker.commit(lease)
        assert client.seal(lease, [b"k"]).sealed == lease.pages


def test_a_worker_that_closes_its_channel_but_lives_keeps_its_pages(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    with connect(shared_daemon.socket, name) as client:
        client.lease(3)
        worker.ask("close")
        shared_daemon.wait_status(lambda s: session_of(s, worker).get("state") == "lost")
        assert shared_daemon.pool(name)["pages"]["leased"] == 3
        other = processes.worker(shared_daemon.socket)
        with pytest.raises(EngineBusy, match=f"process {worker.pid}"):
            other.attach(pool=name, wait_s=0.05)
        assert shared_daemon.pool(name)["pages"]["leased"] == 3
        other.send_attach(pool=name)
        worker.kill()
        other.result()
        shared_daemon.wait_pages(name, free=8)


def test_a_stopped_worker_loses_nothing(
    shared_daemon: Daemon, processes: Processes, name: str, wait_until: Until
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    with connect(shared_daemon.socket, name) as client:
        lease, dropped = client.lease(2), client.lease(6)
        worker.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        client.abort(dropped)
        with pytest.raises(NoPages):
            client.lease(1, wait_s=0.4)
        other = processes.worker(shared_daemon.socket)
        with pytest.raises(RankAttached, match=f"living process {worker.pid}"):
            other.attach(pool=name)
        assert session_of(client.status(), worker)["state"] == "attached"
        pages = shared_daemon.pool(name)["pages"]
        assert pages | {"leased": 8, "quarantined": 0} == pages
        worker.process.send_signal(signal.SIGCONT)
        worker.ask("answer_pushes")
        worker.commit(lease)
        assert client.seal(lease, [b"a", b"b"]).sealed == lease.pages
        shared_daemon.wait_pages(name, free=6)


def test_a_successor_attaches_after_a_kill_and_finds_the_keys(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    workers = processes.engine(shared_daemon.socket, 2, pool=name)
    with connect(shared_daemon.socket, name) as client:
        lease = client.lease(4)
        for worker in workers:
            worker.commit(lease)
        client.seal(lease, [b"a", b"b", b"c", b"d"])
    for worker in workers:
        worker.kill()
    after = processes.engine(shared_daemon.socket, 2, pool=name, answers=True)
    assert [w.reply["regions"] for w in after] == [w.reply["regions"] for w in workers]
    with connect(shared_daemon.socket, name) as client:
        with client.lookup([b"a", b"b", b"c", b"d"]) as hit:
            assert hit.pages == lease.pages
        assert len(client.lease(4).pages) == 4


def test_a_successor_of_a_worker_with_a_live_fork_is_admitted_and_cannot_have_its_pages(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    with connect(shared_daemon.socket, name) as client:
        doubtful = client.lease(5)
        fork = worker.fork("maps")
        worker.kill()
        (after,) = processes.engine(shared_daemon.socket, pool=name, answers=True)
        assert shared_daemon.pool(name)["ranks_attached"] == {"0": [0]}
        # Its fork still drives the dead worker's device: the pages wait for the fork's end.
        fresh = client.lease(3, wait_s=20)
        assert set(fresh.pages).isdisjoint(doubtful.pages)
        with pytest.raises(NoPages):
            client.lease(1, wait_s=0.4)
        worker.end_fork(fork)
        again = client.lease(5, wait_s=20)
        assert set(again.pages) == set(doubtful.pages)
        for page, generation in zip(doubtful.pages, doubtful.generations, strict=True):
            assert again.generations[again.pages.index(page)] > generation
        after.commit(again)


def test_a_static_pool_waits_for_the_fork_and_names_it(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name, kind="static")
    fork = worker.fork("maps")
    worker.kill()
    shared_daemon.wait_status(lambda s: session_of(s, worker).get("holders") == [fork])
    pages = shared_daemon.pool(name)["pages"]
    assert pages | {"quarantined": 8, "leased": 0} == pages
    other = processes.worker(shared_daemon.socket)
    with pytest.raises(EngineBusy, match=rf"process {worker.pid} \(lock, may be held by \[{fork}\]\)") as caught:
        other.attach(pool=name, kind="static", wait_s=0.05)
    assert caught.value.ids == {"pids": sorted([worker.pid, fork])}
    other.send_attach(pool=name, kind="static")
    worker.end_fork(fork)
    other.result()


def test_a_killed_schedulers_leases_and_hits_are_given_back(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name, answers=True)
    with connect(shared_daemon.socket, name) as client:
        lease = client.lease(2)
        worker.commit(lease)
        client.seal(lease, [b"a", b"b"])
    scheduler = processes.worker(shared_daemon.socket, role="scheduler")
    scheduler.call("attach", pool=name, engine="0", wait_s=5)
    scheduler.call("lease", n=3)
    assert scheduler.call("lookup", keys=[b"a", b"b"])["pages"] == list(lease.pages)
    pages = shared_daemon.pool(name)["pages"]
    assert pages | {"leased": 3, "pinned": 2} == pages
    scheduler.kill()
    shared_daemon.wait_pages(name, leased=0, pinned=0, sealed=2, free=6)
    assert ended(shared_daemon.status(), scheduler) == "died"


def test_pins_of_a_dead_holder_wait_for_its_workers_loads(
    shared_daemon: Daemon, processes: Processes, name: str, wait_until: Until
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    scheduler = processes.worker(shared_daemon.socket, role="scheduler")
    scheduler.call("attach", pool=name, engine="0", wait_s=5)
    lease = scheduler.call("lease", n=1)
    worker.call("commit", lease=lease["lease"], pages=None)
    scheduler.call("seal", lease=lease["lease"], keys=[b"a"], pages=None)
    hit = scheduler.call("lookup", keys=[b"a"])["hit"]
    scheduler.kill()
    (push,) = wait_until(worker.pushes)
    assert push["push"] == "released" and push["hits"] == [hit]
    assert ended(shared_daemon.status(), scheduler) == "died"
    assert shared_daemon.pool(name)["pages"]["pinned"] == 1
    worker.call("drained", leases=[], hits=[hit])
    assert shared_daemon.pool(name)["pages"]["pinned"] == 0


def test_many_deaths_leave_nothing(start: Starter, processes: Processes, wait_until: Until) -> None:
    daemon = start()
    for number in range(6):
        (worker,) = processes.engine(daemon.socket)
        with connect(daemon.socket) as client:
            client.lease(1 + number % 3)
            fork = worker.fork("maps") if number % 2 else 0
            worker.kill()
        if fork:
            worker.end_fork(fork)
    daemon.wait_pages("default", free=8, quarantined=0)
    wait_until(lambda: daemon.session_files() == [])
    listed = subprocess.run(["ls", "-l", f"/proc/{daemon.pid}/fd"], capture_output=True, text=True).stdout
    assert "records" in listed and "pidfd" not in listed and ".sessions" not in listed
