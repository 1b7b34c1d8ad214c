"""``watch`` against real daemons: a router's set is what the pool holds, through gaps, restarts and drops."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import sharedmirror
from sharedmirror import Change, ChangeKind, Position, Watch, watch
from sharedmirror.channel import Channel
from sharedmirror.control import Client, connect
from sharedmirror.errors import (
    DaemonUnavailable,
    ForkedError,
    NoPages,
    PoolMismatch,
    PoolNotFound,
    SharedMirrorError,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.types import KeyState, Role
from tests.client.conftest import Engine
from tests.daemon.conftest import Raw

if TYPE_CHECKING:
    from tests.conftest import Processes, Starter, Worker

Until = Callable[..., Any]
Open = Callable[[str], Raw]
QUICK_S = 0.002
"""How often these tests' routers ask."""
WATCHERS = 50
LOG_EVENTS = 1 << 16


class Router:
    """Keeps the set of readable keys by what it is told."""

    def __init__(self, changes: Watch) -> None:
        self.changes = changes
        self.keys: set[bytes] = set()
        self.kinds: list[ChangeKind] = []

    def take(self) -> Change:
        change = next(self.changes)
        change.apply_to(self.keys)
        self.kinds.append(change.kind)
        return change

    def take_until(self, kind: ChangeKind) -> Change:
        change = self.take()
        while change.kind is not kind:
            change = self.take()
        return change

    def catch_up(self, socket: str, pool: str = "default") -> None:
        """Take what there is until now, in a pool that rests."""
        now = position(socket, pool)
        while self.changes.position != now:
            self.take()


def position(socket: str, pool: str = "default") -> Position:
    """Return where the pool's log ends."""
    with Channel.open(socket, role=Role.OBSERVER) as channel:
        return Position(*channel.call("watch", pool=pool, limit=1)["position"])


def readable(client: Client, keys: list[bytes]) -> set[bytes]:
    return {key for key, state in zip(keys, client.contains(keys), strict=True) if state is KeyState.HIT}


def follow(engine: Engine, **arguments: Any) -> Watch:
    return watch(engine.daemon.socket, engine.name, poll_s=QUICK_S, **arguments)


@pytest.fixture
def busy(start: Starter, processes: Processes) -> Iterator[Engine]:
    """A daemon of its own, a pool of 256 pages to lease, one worker and a scheduler."""
    daemon = start()
    workers = processes.engine(daemon.socket, answers=True, num_host_pages=257)
    with connect(daemon.socket) as client:
        yield Engine(daemon, workers, client, "default")


@pytest.fixture
def raw(nothing_left: None) -> Iterator[Open]:
    """Open bare connections."""
    with contextlib.ExitStack() as stack:

        def connect_raw(path: str) -> Raw:
            connection = Raw(path)
            stack.callback(connection.sock.close)
            return connection

        yield connect_raw


# -- what is told --------------------------------------------------------------------------------


def test_a_snapshot_then_what_happens(one: Engine) -> None:
    one.write(b"a", b"b", b"c")
    with follow(one, batch=2) as changes:
        first = next(changes)
        assert first == Change(ChangeKind.SNAPSHOT, (b"a", b"b"), None)
        assert changes.position is None
        assert next(changes) == Change(ChangeKind.SNAPSHOT, (b"c",), None)
        synced = next(changes)
        assert (synced.kind, synced.keys, synced.position) == (ChangeKind.SYNCED, (), changes.position)
        assert synced.position is not None
        assert synced.position == position(one.daemon.socket, one.name)
        one.write(b"d")
        one.client.evict([b"a"])
        one.client.clear()
        told = [next(changes) for _ in range(3)]
        after = [synced.position._replace(sequence=synced.position.sequence + step) for step in (1, 2, 3)]
        assert told == [
            Change(ChangeKind.SEALED, (b"d",), after[0]),
            Change(ChangeKind.EVICTED, (b"a",), after[1]),
            Change(ChangeKind.CLEARED, (), after[2]),
        ]
        assert pickle.loads(pickle.dumps(told)) == told


def test_a_watcher_is_no_engine(one: Engine) -> None:
    before = one.daemon.status()
    with follow(one) as changes:
        next(changes)
        now = one.daemon.status()
    assert (now["sessions"], now["pools"]) == (
        [session | {"age_s": now["sessions"][at]["age_s"]} for at, session in enumerate(before["sessions"])],
        before["pools"],
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_routers_set_is_what_the_pool_holds(one: Engine, seed: int) -> None:
    """Seals, evictions and clears at random, a router that follows from the start and one that comes late."""
    rng = random.Random(seed)
    keys = [b"key%d" % number for number in range(20)]
    with follow(one, batch=rng.randrange(1, 6)) as early:
        routers = [Router(early)]
        routers[0].take()
        for step in range(60):
            some = rng.sample(keys, rng.randrange(1, 7))
            what = rng.randrange(12)
            if what == 0:
                one.client.clear()
            elif what < 4:
                one.client.evict(some)
            elif what < 6:
                one.client.lookup(some, "each").release()
            elif what == 6:
                one.client.abort(one.client.lease(rng.randrange(1, 4)))
            else:
                with contextlib.suppress(NoPages):  # all that could go is asked for itself
                    lease = one.client.reserve(some).lease
                    if lease is not None:
                        one.commit(lease)
            if step == 30:
                with follow(one, batch=2) as late:
                    router = Router(late)
                    router.catch_up(one.daemon.socket, one.name)
                    assert router.keys == readable(one.client, keys)
            if rng.randrange(3) == 0:
                routers[0].catch_up(one.daemon.socket, one.name)
                assert routers[0].keys == readable(one.client, keys), f"seed {seed}, step {step}"
    assert set(routers[0].kinds) == {*ChangeKind} - {ChangeKind.GAP, ChangeKind.SNAPSHOT}


def test_going_on_after_a_position(one: Engine) -> None:
    one.write(b"a")
    with follow(one) as changes:
        router = Router(changes)
        place = router.take_until(ChangeKind.SYNCED).position
    one.write(b"b")
    with follow(one, since=place) as changes:
        assert [next(changes).kind for _ in range(2)] == [ChangeKind.SEALED, ChangeKind.SYNCED]
        place = changes.position
    assert place is not None
    with follow(one, since=Position(*place)) as changes:
        assert next(changes) == Change(ChangeKind.SYNCED, (), place)
    with follow(one, since=place._replace(sequence=place.sequence + 1)) as changes:
        assert [next(changes).kind for _ in range(3)] == [ChangeKind.GAP, ChangeKind.SNAPSHOT, ChangeKind.SYNCED]


def test_a_slow_reader_gets_a_gap_and_recovers(busy: Engine) -> None:
    busy.write(b"first")
    socket = busy.daemon.socket
    with follow(busy) as changes, follow(busy) as prompt:
        slow, quick = Router(changes), Router(prompt)
        slow.take_until(ChangeKind.SYNCED)
        number = 0
        while position(socket).sequence <= LOG_EVENTS:
            busy.write(*(b"%d" % each for each in range(number, number + 256)))
            number += 256
            quick.catch_up(socket)
        assert slow.take().kind is ChangeKind.GAP
        assert slow.keys == set()
        slow.catch_up(socket)
        last = {b"%d" % each for each in range(number - 256, number)}
        assert slow.keys == quick.keys == last == readable(busy.client, sorted(last))
        assert ChangeKind.GAP not in quick.kinds


# -- what dies and comes back --------------------------------------------------------------------


def test_a_restart_of_the_daemon_is_a_gap_and_a_snapshot(start: Starter, processes: Processes) -> None:
    daemon = start()
    workers = processes.engine(daemon.socket, answers=True)
    with connect(daemon.socket) as client, watch(daemon.socket, poll_s=QUICK_S) as changes:
        router = Router(changes)
        engine = Engine(daemon, workers, client, "default")
        engine.write(b"a", b"b")
        router.catch_up(daemon.socket)
        daemon.kill()
        back = threading.Thread(target=lambda: start(state=None))
        back.start()
        router.take_until(ChangeKind.GAP)
        assert router.keys == set()
        back.join()
        assert router.take_until(ChangeKind.SYNCED).position == position(daemon.socket)
        assert router.keys == {b"a", b"b"}
        start.daemons[-1].wait_status(lambda status: {s["state"] for s in status["sessions"]} == {"attached"})
        client.evict([b"a"])
        engine.write(b"c")
        router.catch_up(daemon.socket)
        assert router.keys == readable(client, [b"a", b"b", b"c"]) == {b"b", b"c"}


def test_another_instance_is_a_gap(start: Starter, processes: Processes) -> None:
    daemon = start()
    with watch(daemon.socket, poll_s=QUICK_S) as changes:
        router = Router(changes)
        processes.engine(daemon.socket, answers=True)
        with connect(daemon.socket) as client:
            Engine(daemon, processes.workers, client, "default").write(b"a")
        router.catch_up(daemon.socket)
        assert router.keys == {b"a"}
        processes.workers[0].kill()
        daemon.kill()
        second = start("--reset")
        processes.engine(second.socket, answers=True, engine="next")
        with connect(second.socket, engine="next") as client:
            Engine(second, processes.workers[1:], client, "default").write(b"b")
            # Epoch, ids and sequence begin anew: only the instance surely tells the two apart.
            router.catch_up(second.socket)
            assert router.keys == {b"b"}
            assert ChangeKind.GAP in router.kinds


def test_a_daemon_that_stays_away_is_an_error(start: Starter) -> None:
    daemon = start()
    with pytest.raises(DaemonUnavailable, match="no daemon answers on .*none"):
        watch(daemon.socket + ".none")
    with watch(daemon.socket, wait_s=0.2, poll_s=QUICK_S) as changes:
        daemon.end()
        with pytest.raises(DaemonUnavailable):
            next(changes)
        assert list(changes) == []


def test_a_pool_that_is_not_there_is_waited_for_or_an_error(start: Starter, processes: Processes) -> None:
    daemon = start()
    with watch(daemon.socket, wait_s=0) as changes, pytest.raises(PoolNotFound, match="there is no pool 'default'"):
        next(changes)
    with watch(daemon.socket, poll_s=QUICK_S) as changes:
        told: list[Change] = []
        reader = threading.Thread(target=lambda: told.append(next(changes)))
        reader.start()
        processes.engine(daemon.socket)
        reader.join()
    assert [change.kind for change in told] == [ChangeKind.SYNCED]


def test_a_pool_that_is_dropped_is_a_gap_at_once(start: Starter, processes: Processes, wait_until: Until) -> None:
    daemon = start()

    def life(key: bytes, tag: str) -> Worker:
        (worker,) = processes.engine(daemon.socket, answers=True, tag=tag)
        with connect(daemon.socket) as client:
            Engine(daemon, [worker], client, "default").write(key)
        return worker

    def drop(worker: Worker) -> None:
        worker.kill()
        daemon.wait_status(lambda status: status["sessions"] == [])
        with Channel.open(daemon.socket, role=Role.OBSERVER) as channel:
            channel.call("drop", pool="default")

    with watch(daemon.socket, poll_s=QUICK_S) as changes:
        router = Router(changes)
        first = life(b"a", "old weights")
        router.catch_up(daemon.socket)
        assert router.keys == {b"a"}
        drop(first)
        assert router.take().kind is ChangeKind.GAP
        assert (router.keys, changes.position) == (set(), None)
        second = life(b"b", "new weights")
        router.catch_up(daemon.socket)
        assert router.keys == {b"b"}
        with watch(daemon.socket, tag="new weights", since=changes.position, wait_s=0, poll_s=QUICK_S) as named:
            assert next(named).kind is ChangeKind.SYNCED
            drop(second)
            assert next(named).kind is ChangeKind.GAP
            with pytest.raises(PoolNotFound, match="with tag 'new weights'"):
                next(named)


def test_which_pool(start: Starter, processes: Processes) -> None:
    daemon = start()
    processes.engine(daemon.socket, tag="one", engine="one")
    with watch(daemon.socket, poll_s=QUICK_S) as begun:
        assert next(begun).kind is ChangeKind.SYNCED
        processes.engine(daemon.socket, tag="two", engine="two")
        with watch(daemon.socket) as changes, pytest.raises(PoolMismatch, match="say which tag"):
            next(changes)
        with watch(daemon.socket, tag="two") as changes:
            assert next(changes).position != begun.position
        with connect(daemon.socket, engine="one") as client:
            # Another pool of the name has come since: the one that was begun with goes on.
            Engine(daemon, processes.workers[:1], client, "default").write(b"a")
        assert next(begun).keys == (b"a",)
    processes.engine(daemon.socket, pool="fixed", kind="static")
    with watch(daemon.socket, "fixed") as changes, pytest.raises(WrongPoolKind, match="'fixed' is static"):
        next(changes)


# -- the call itself -----------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name is ''"),
    ({"tag": "\n"}, "tag is"),
    ({"poll_s": 0}, "poll_s must be seconds from 0.001"),
    ({"poll_s": True}, "poll_s must be"),
    ({"wait_s": -1}, "wait_s must be seconds from 0"),
    ({"wait_s": float("nan")}, "wait_s must be"),
    ({"timeout_s": "1"}, "timeout_s must be"),
    ({"batch": 0}, "batch must be a number of keys from 1 to 8192"),
    ({"batch": 8193}, "batch must be"),
    ({"batch": 1.0}, "batch must be"),
    ({"since": 7}, "since must be the position of an earlier batch"),
    ({"since": ("ab", 1, 1)}, "since must be"),
    ({"since": ("ab", 1, 1, -1)}, "since must be"),
    ({"since": (b"ab", 1, 1, 1)}, "since must be"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=str)
def test_bad_arguments_are_refused_before_anything_is_opened(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        watch("/no/such/socket", **arguments)


def test_the_clients_bounds_are_the_daemons(one: Engine) -> None:
    with Channel.open(one.daemon.socket, role=Role.OBSERVER) as channel:
        assert "keys" in channel.call("watch", pool=one.name, limit=sharedmirror.watching.MAX_BATCH)
        with pytest.raises(SharedMirrorError, match="limit must be"):
            channel.call("watch", pool=one.name, limit=sharedmirror.watching.MAX_BATCH + 1)


@pytest.mark.parametrize("moment", ["between polls", "in a call"])
def test_close_from_another_thread_ends_the_iteration(start: Starter, processes: Processes, moment: str) -> None:
    daemon = start()
    processes.engine(daemon.socket)
    poll_s = 600.0 if moment == "between polls" else QUICK_S
    changes = watch(daemon.socket, poll_s=poll_s, timeout_s=600.0)
    assert next(changes).kind is ChangeKind.SYNCED
    if moment == "in a call":
        daemon.process.send_signal(signal.SIGSTOP)
    ended = threading.Event()

    def read() -> None:
        assert list(changes) == []
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert not ended.wait(0.1)
    changes.close()
    reader.join(20)
    assert ended.is_set()
    changes.close()
    assert list(changes) == []
    daemon.process.send_signal(signal.SIGCONT)


def test_a_forked_child_is_refused_and_its_close_harms_nobody(one: Engine) -> None:
    changes = follow(one)
    next(changes)
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Newer interpreters warn of a fork beside threads; here the child only makes one call.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            next(changes)
            word = b"served"
        except ForkedError:
            changes.close()
            word = b"forked"
        except BaseException:
            word = b"other"
        os.write(write, word)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"forked"
    os.waitpid(pid, 0)
    one.write(b"a")
    assert next(changes).keys == (b"a",)
    changes.close()


def test_the_callers_exception_is_not_hidden(one: Engine) -> None:
    with pytest.raises(KeyError, match="mine"), follow(one) as changes:
        raise KeyError("mine")
    assert list(changes) == []


# -- the command ---------------------------------------------------------------------------------

COMMAND = [sys.executable, "-c", "from sharedmirror.cli import main; main()", "watch"]


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``sharedmirror watch``."""
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell inherits an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_command_prints_a_line_a_batch_until_interrupted(one: Engine) -> None:
    one.write(b"secret")
    with command("--socket", one.daemon.socket, "--pool", one.name) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["snapshot 1 keys\n", "synced 0 keys\n"]
        one.write(b"hidden", b"other")
        assert process.stdout.readline() == "sealed 2 keys\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 0


def test_the_command_prints_json_for_programs(one: Engine) -> None:
    one.write(b"\x00\xff")
    with command("--socket", one.daemon.socket, "--pool", one.name, "--json") as process:
        assert process.stdout is not None
        snapshot, synced = (json.loads(process.stdout.readline()) for _ in range(2))
        assert snapshot == {"kind": "snapshot", "keys": ["00ff"], "position": None}
        assert Position(*synced["position"]) == position(one.daemon.socket, one.name)
        one.client.clear()
        assert json.loads(process.stdout.readline())["kind"] == "cleared"
        process.stdout.close()
        one.write(b"a")
        assert process.wait(20) == 0, "nobody reads any more"
        assert process.stderr is not None and process.stderr.read() == ""


def test_the_commands_errors_are_one_line(one: Engine) -> None:
    for arguments, code, says in (
        (["--socket", one.daemon.socket + ".none"], 3, "no daemon answers"),
        (["--socket", one.daemon.socket, "--pool", "nowhere", "--wait", "0"], 1, "there is no pool 'nowhere'"),
        (["--socket", one.daemon.socket, "--pool", "\n"], 1, "printable"),
    ):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
        assert says in done.stderr


# -- many ----------------------------------------------------------------------------------------


def test_many_watchers_all_see_the_same_and_stall_nobody(busy: Engine, raw: Open) -> None:
    """Fifty that follow, and one that asks and never reads its answers."""
    last = b"last"
    sets: list[set[bytes]] = [set() for _ in range(WATCHERS)]

    def run(keys: set[bytes]) -> None:
        with watch(busy.daemon.socket, poll_s=0.02) as changes:
            for change in changes:
                change.apply_to(keys)
                if last in keys:
                    return

    threads = [threading.Thread(target=run, args=(keys,)) for keys in sets]
    for thread in threads:
        thread.start()
    deaf = raw(busy.daemon.socket)
    deaf.hello("observer")
    for number in range(30):
        busy.write(*(b"%d-%d" % (number, each) for each in range(64)))
        deaf.send(*({"op": "watch", "id": 100 * number + each + 1, "pool": "default"} for each in range(20)))
    busy.write(last)
    for thread in threads:
        thread.join(60)
    assert [thread.is_alive() for thread in threads] == [False] * WATCHERS
    with watch(busy.daemon.socket) as changes:
        router = Router(changes)
        router.take_until(ChangeKind.SYNCED)
    assert len(router.keys) == 256
    assert all(keys == router.keys for keys in sets)


def test_a_session_may_watch_while_its_request_waits(one: Engine, raw: Open) -> None:
    connection = raw(one.daemon.socket)
    connection.hello("scheduler")
    connection.send({"op": "attach", "id": 1, "pool": "nowhere", "engine": "0", "wait_s": 60})
    answer = connection.ask("watch", 2, pool=one.name)
    assert (answer["id"], answer["keys"], answer["gap"]) == (2, [], False)
