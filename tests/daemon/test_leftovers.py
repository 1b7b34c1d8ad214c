"""What a killed daemon leaves: adopted, refused with a reason, given up with --reset or removed by gc; never lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.control import connect
from sharedmirrord import adoption, alarms, memory
from sharedmirrord.entries import table_bytes
from sharedmirrord.records import RecordStore
from sharedmirrord.segment import Segment
from tests.conftest import until
from tests.daemon.comeback import Comeback, engine, keys_of, publish

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter

Until = Callable[..., Any]
SHM = Path("/dev/shm")
CREATION = ["create.segment", "create.records", "create.arena"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def shm(start: Starter) -> Iterator[Callable[[], set[str]]]:
    """Tell which segments this test's daemons made; at the end they are removed."""
    before = set(os.listdir(SHM))

    def new() -> set[str]:
        # Tests that run beside this one have segments too: the records name the socket.
        mine = [left for left in adoption.leftovers() if _is_of(left, str(start.directory))]
        names = {name[1:] for left in mine for name in left.names} - before
        return {name for name in names if (SHM / name).exists()}

    yield new
    for daemon in start.daemons:
        daemon.end()
    for name in new():
        (SHM / name).unlink()


def _is_of(left: adoption.Leftover, directory: str) -> bool:
    return left.header is None or left.header.socket.startswith(directory)


@contextlib.contextmanager
def opened(name: str) -> Iterator[RecordStore]:
    """Open the records of a dead daemon, to damage them."""
    with Segment.open(f"/{name}") as segment, RecordStore.open(segment) as store:
        yield store


def records_of(daemon: Daemon) -> str:
    (name,) = [name for name in daemon.segments() if name.endswith("-records")]
    return name


def leave_keys(life: Comeback, processes: Processes, count: int = 3, pages: int = 9) -> str:
    """Seal some keys, end all clients, kill the daemon; returns the name of its records."""
    workers = engine(processes, life, world_size=1, pages=pages)
    with connect(life.socket) as client:
        publish(client, workers, keys_of(*range(count)))
    workers[0].call("detach", unmapped=True)
    workers[0].kill()
    life.daemon.wait_status(lambda status: status["sessions"] == [])
    name = records_of(life.daemon)
    life.daemon.kill()
    return name


def refused(start: Starter, life: Comeback, *arguments: str) -> str:
    """Start a daemon that refuses with exit code 1; returns what it says on stderr."""
    result = start.run("--memory", "32MiB", "--pin", "none", "--socket", life.socket, *arguments)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def found_keys(life: Comeback, processes: Processes, pages: int = 9) -> int:
    engine(processes, life, world_size=1, pages=pages)
    with connect(life.socket) as client, client.lookup(keys_of(0, 1, 2)) as hit:
        return len(hit)


# --- another boot, damage, --reset


def test_memory_of_another_boot_is_discarded(start: Starter, processes: Processes, shm: Callable[[], set[str]]) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    with opened(name) as store:
        store._state.header = replace(store.header, boot_id="another")
        store._page.write(store._state.header_payload())
    life.again()
    assert "event=discarded" in life.daemon.log() and "it is of another boot" in life.daemon.log()
    assert life.daemon.status()["daemon"]["epoch"] == 1
    assert name not in shm() and len(shm()) == 2
    assert found_keys(life, processes) == 0


def test_a_vanished_arena_is_discarded_with_the_reason(
    start: Starter, processes: Processes, shm: Callable[[], set[str]]
) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    (SHM / name.replace("-records", "-arena0")).unlink()
    life.again()
    assert "event=discarded" in life.daemon.log() and "its arena is gone" in life.daemon.log()
    assert name not in shm() and len(shm()) == 2


def damage_checkpoint(store: RecordStore) -> int:
    return store._state.active.window.offset + 24


def damage_slots(store: RecordStore) -> int:
    (table,) = store._state.tables.values()
    return table.window.offset


@pytest.mark.parametrize("damage", [damage_checkpoint, damage_slots])
def test_damaged_records_are_refused_and_say_what_to_do(
    start: Starter, processes: Processes, shm: Callable[[], set[str]], damage: Callable[[RecordStore], int]
) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    with opened(name) as store:
        at = damage(store)
        size_bytes = table_bytes(9) if damage is damage_slots else 8
        if damage is damage_slots:
            # Home is all that is left of a slot once the journal has turned.
            store._turn(0)
    with open(SHM / name, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * size_bytes)
    before = (SHM / name).read_bytes()
    said = refused(start, life)
    assert "--reset" in said and "cannot be adopted" in said
    assert (SHM / name).read_bytes() == before and len(shm()) == 2, "a refusal changes nothing"
    assert refused(start, life) == said
    life.again("--reset")
    assert life.daemon.status()["daemon"]["epoch"] == 1
    assert name not in shm() and len(shm()) == 2
    assert found_keys(life, processes) == 0


def test_a_damaged_header_is_no_reason_to_begin_anew_in_silence(
    start: Starter, processes: Processes, shm: Callable[[], set[str]]
) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    with open(SHM / name, "r+b") as file:
        file.write(b"\xa5" * 4096)
    said = refused(start, life)
    assert name in said and "--reset" in said
    assert len(shm()) == 2
    life.again("--reset")
    # What it cannot read it does not unlink, but it says so; and that once.
    assert name in shm() and name in life.daemon.log()
    life.restart()
    assert life.daemon.status()["daemon"]["epoch"] == 2


def test_records_that_vanished_are_no_reason_to_begin_anew_in_silence(
    start: Starter, processes: Processes, shm: Callable[[], set[str]]
) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    arena = name.replace("-records", "-arena0")
    (SHM / name).unlink()
    said = refused(start, life)
    assert f"/{name}: it is gone" in said and f"/dev/shm/{arena}" in said and "--reset" in said
    for arguments in ((), ("--remove",)):
        code, told = gc(start, *arguments)
        assert code == len(arguments) and "kept: it is gone" in line_of(told, name) and arena in line_of(told, name)
        assert re.search(r": 32\.00 MiB \(", line_of(told, name))
    life.again("--reset")
    assert (SHM / arena).exists() and name in life.daemon.log()
    life.restart()
    assert life.daemon.status()["daemon"]["epoch"] == 2
    (SHM / arena).unlink()
    assert gc(start)[0] == 0 and len(shm()) == 2


def test_reset_begins_anew(start: Starter, processes: Processes, shm: Callable[[], set[str]]) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    life.again("--reset")
    assert life.daemon.status()["daemon"]["epoch"] == 1 and name not in shm() and len(shm()) == 2
    assert found_keys(life, processes) == 0


@pytest.mark.parametrize("fork", ["", "maps"])
def test_reset_is_refused_while_a_process_can_still_map_the_arena(
    start: Starter, processes: Processes, shm: Callable[[], set[str]], fork: str
) -> None:
    life = Comeback(start)
    (worker,) = engine(processes, life, world_size=1, pages=9)
    life.daemon.status()
    life.daemon.kill()
    if fork:
        worker.fork(fork)
        worker.kill()
    said = refused(start, life, "--reset")
    assert re.search(rf"sessions \[{worker.hello['session']}\] of {life.socket} live on; end their processes", said)
    assert len(shm()) == 2
    for pid in worker.forks:
        worker.end_fork(pid)
    worker.kill()
    life.again("--reset")
    assert life.daemon.status()["daemon"]["epoch"] == 1


@pytest.mark.parametrize("place", CREATION)
def test_a_death_while_the_memory_is_made(
    start: Starter, processes: Processes, shm: Callable[[], set[str]], place: str
) -> None:
    life = Comeback(start)
    assert life.daemon.end() == 0 and shm() == set()
    life.again(failpoints=f"{place}=kill", state=None)
    life.wait_killed()
    left = shm()
    assert left
    life.again()
    life.daemon.status()
    # What was half made is gone or adopted: there is one arena, one set of records, and no more.
    assert len(shm()) == 2
    assert found_keys(life, processes) == 0


@pytest.mark.parametrize("place", ["remove.segment=kill", "remove.segment=kill:2", "remove.sessions=kill"])
def test_a_death_while_old_memory_is_removed(
    start: Starter, processes: Processes, shm: Callable[[], set[str]], place: str
) -> None:
    life = Comeback(start)
    name = leave_keys(life, processes)
    life.again("--reset", failpoints=place, state=None)
    life.wait_killed()
    life.again("--reset")
    assert name not in shm() and len(shm()) == 2
    life.daemon.status()
    assert life.daemon.end() == 0
    assert shm() == set() and life.daemon.session_files() == []


@pytest.mark.parametrize("place", ["exit.sessions", "exit.arena"])
def test_a_death_while_the_daemon_ends(
    start: Starter, processes: Processes, shm: Callable[[], set[str]], place: str
) -> None:
    life = Comeback(start, failpoints=f"{place}=kill")
    name = records_after_status(life)
    life.daemon.end()
    assert name in shm()
    life.again()
    life.daemon.status()
    assert len(shm()) == 2
    assert life.daemon.end() == 0 and shm() == set()


def records_after_status(life: Comeback) -> str:
    life.daemon.status()
    return records_of(life.daemon)


# --- two daemons


def test_of_two_daemons_that_race_one_wins_and_the_other_says_so(
    start: Starter, processes: Processes, shm: Callable[[], set[str]]
) -> None:
    life = Comeback(start)
    leave_keys(life, processes)
    racers = [
        start(socket=life.socket, state=None, environment={"SHAREDMIRROR_FAILPOINTS": "adopt.arena=sleep:0.3"})
        for _ in range(4)
    ]
    until(lambda: sum(racer.process.poll() is not None for racer in racers) >= 3, "three give up")
    losers = [racer for racer in racers if racer.process.poll() is not None]
    (winner,) = [racer for racer in racers if racer not in losers]
    for loser in losers:
        assert loser.process.returncode == 1
        # The very moment of the lock is not the moment at which its file tells the pid.
        assert re.search(rf"a daemon with pid (\d+|unknown) already serves {life.socket}; stop it", loser.log())
    life.daemon = winner
    winner.wait_state("ready")
    assert winner.status()["daemon"]["epoch"] == 2
    assert found_keys(life, processes) == 3
    assert len(shm()) == 2


# --- gc


def gc(start: Starter, *arguments: str) -> tuple[int, str]:
    line = [sys.executable, "-c", "from sharedmirror.cli import main; main()", "gc", *arguments]
    result = subprocess.run(line, capture_output=True, text=True, timeout=20, env=start.environment())
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout


def line_of(output: str, name: str) -> str:
    (line,) = [line for line in output.splitlines() if f"/{name}:" in line]
    return line


def test_gc_lists_and_removes_only_what_is_dead(
    start: Starter, processes: Processes, shm: Callable[[], set[str]]
) -> None:
    life = Comeback(start)
    dead = leave_keys(life, processes)
    living = start(socket=start.path("living.sock"))
    living.status()
    alive = records_of(living)
    orphaned = start(socket=start.path("orphaned.sock"))
    orphaned.status()
    (worker,) = processes.engine(orphaned.socket)
    kept = records_of(orphaned)
    orphaned.kill()
    before = shm()
    code, said = gc(start)
    assert code == 0 and shm() == before and len(before) == 6
    assert f"dead; a daemon started on {life.socket} would adopt it" in line_of(said, dead)
    assert f"in use by the daemon with pid {living.pid}" in line_of(said, alive)
    assert f"in use: sessions [{worker.hello['session']}]" in line_of(said, kept)
    assert "nothing was removed" in said and re.search(r": [0-9.]+ MiB \([0-9]+ bytes\): dead", said)
    code, said = gc(start, "--remove")
    assert code == 0
    assert line_of(said, dead).endswith("removed")
    assert shm() == {name for name in before if dead.removesuffix("-records") not in name}
    assert living.status()["daemon"]["instance"][:12] in alive
    with contextlib.suppress(FileNotFoundError):
        assert not any((Path(f"{life.socket}.sessions")).iterdir())


def test_gc_keeps_what_it_cannot_read_and_says_so(start: Starter, shm: Callable[[], set[str]]) -> None:
    name = f"sharedmirror-{os.getuid()}-0123456789ab-records"
    (SHM / name).write_bytes(b"\xa5" * 8192)
    code, said = gc(start, "--remove")
    assert code == 1 and "kept:" in line_of(said, name) and name in shm()


def test_gc_removes_what_was_never_finished(start: Starter, shm: Callable[[], set[str]]) -> None:
    life = Comeback(start)
    assert life.daemon.end() == 0
    life.again(failpoints="create.segment=kill", state=None)
    life.wait_killed()
    (name,) = shm()
    code, said = gc(start)
    assert code == 0 and "never finished" in line_of(said, name) and shm() == {name}
    code, said = gc(start, "--remove")
    assert code == 0 and line_of(said, name).endswith("removed") and shm() == set()


@as_root
def test_gc_does_not_look_at_another_users_segments(start: Starter) -> None:
    theirs, disguised = (SHM / f"sharedmirror-{uid}-0123456789ab-records" for uid in (65534, 0))
    try:
        for path in (theirs, disguised):
            path.write_bytes(b"\0" * 8192)
            os.chown(path, 65534, 65534)
        code, said = gc(start, "--remove")
        assert theirs.name not in said
        assert code == 1 and "belongs to uid 65534" in line_of(said, disguised.name)
        assert theirs.exists() and disguised.exists()
    finally:
        theirs.unlink()
        disguised.unlink()


# --- alarms


def alarms_of(daemon: Daemon) -> dict[str, str]:
    return {alarm["code"]: alarm["message"] for alarm in daemon.status()["alarms"]}


@pytest.mark.parametrize("part", ["-arena0", "-records"])
def test_a_name_that_vanished_is_an_alarm(start: Starter, shm: Callable[[], set[str]], part: str) -> None:
    daemon = start()
    daemon.leaves_segments = True
    assert alarms_of(daemon) == {}
    (name,) = [name for name in shm() if name.endswith(part)]
    (SHM / name).unlink()
    said = alarms_of(daemon)["unlinked"]
    assert f"/{name} vanished" in said and "RemoveIPC=no" in said
    # Another object under the name is not ours.
    (SHM / name).write_bytes(b"")
    assert ("unlinked" in alarms_of(daemon)) == (part == "-arena0")


def test_a_mount_that_others_filled_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        free = shutil.disk_usage("/dev/shm").free
        found = alarms.of_memory("", fd, "")
        assert ("shm_full" in found) == (free < alarms.SHM_LOW_BYTES)
        monkeypatch.setattr(memory, "shm_free", lambda: alarms.SHM_LOW_BYTES - 1)
        found = alarms.of_memory("", fd, "")
        assert list(found) == ["shm_full"] and "/dev/shm has only" in found["shm_full"]
        monkeypatch.setattr(memory, "shm_free", lambda: None)
        assert alarms.of_memory("", fd, "") == {}
    finally:
        os.close(fd)
