"""The daemon as its clients meet it: every call's arguments, pools and what must agree, other uids, limits."""

from __future__ import annotations

import itertools
import os
import shutil
import socket as sockets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from sharedmirror import __version__, wire
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    ArenaFull,
    DaemonUnavailable,
    EngineBusy,
    EnvironmentFault,
    PoolMismatch,
    ProtocolError,
    RankAttached,
    RankError,
    RanksMissing,
    SharedMirrorError,
    UsageError,
    from_wire,
)
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Starter
    from tests.daemon.conftest import Raw

Until = Callable[..., Any]
Open = Callable[[str], "Raw"]
MIB = 1 << 20
NOBODY = 65534
_numbers = itertools.count()
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another uid")


@pytest.fixture
def name() -> str:
    return f"server{next(_numbers)}"


# --- arguments

NUMBERS: list[Any] = ["x", b"x", 1.5, [], [1], {}, True, -1, 1 << 63, float("nan"), msgpack.ExtType(5, b"x"), None]
TEXTS: list[Any] = [5, b"x", ["x"], True, {"a": 1}, "x" * 300]
KEYS: list[Any] = [None, 5, "x", b"x", {}, ["x"], [None], [5], [b""], [b"k" * 65], [[b"k"]]]
LISTS: list[Any] = [5, "x", b"x", {"a": 1}, [-1], ["x"], [None], [[1]], [True], [1.5], [b"x"]]
SECONDS: list[Any] = ["x", b"x", -1, 1e9, [1], {"a": 1}, True, float("nan"), float("inf")]
FLAGS: list[Any] = [5, "x", b"x", [1], None]
PLANES: list[Any] = [
    None, 5, "x", [], [[]], ["x"], [["k"]], [["k", 0, 1, 4096]], [[5, 0, 1, 4096, 16]], [[b"k", 0, 1, 4096, 16]],
    [["k", "0", 1, 4096, 16]], [["k", True, 1, 4096, 16]], [["k", 1, 1, 4096, 16]], [["k", -1, 1, 4096, 16]],
    [["k", 0, 0, 4096, 16]], [["k", 0, 1, 0, 16]], [["k", 0, 1, 1 << 50, 16]], [["k", 0, 1, 4096, 0]],
    [["k", 0, 1, 4096, 16]] * 2,
]  # fmt: skip
ATTACH: dict[str, Any] = {
    "tag": "", "engine": "0", "launch": None, "rank": 0, "world_size": 1, "page_size": 16, "frames_per_page": 1,
    "kind": "leased", "layout": "page", "num_host_pages": 9, "planes": [["k", 0, 1, 4096, 16]], "wait_s": 0,
}  # fmt: skip

WRONG: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "lease": ({"n": 1}, {"n": [*NUMBERS, 0], "wait_s": SECONDS}),
    "reserve": ({"keys": [b"k"]}, {"keys": KEYS, "parent": [5, "x", [b"x"], b"", b"k" * 65], "wait_s": SECONDS}),
    "commit": ({"lease": 1}, {"lease": NUMBERS, "pages": LISTS}),
    "seal": ({"keys": [b"k"]}, {"lease": NUMBERS, "keys": KEYS, "pages": LISTS, "parent": [5, "x", [b"x"], b""]}),
    "abort": ({"lease": 1}, {"lease": NUMBERS, "pages": LISTS}),
    "lookup": ({"keys": [b"k"], "mode": "each"}, {"keys": KEYS, "mode": [*TEXTS, "", "all", None]}),
    "contains": ({"keys": [b"k"]}, {"keys": KEYS}),
    "touch": ({"keys": [b"k"]}, {"keys": KEYS}),
    "release": ({}, {"hits": LISTS}),
    "evict": ({"keys": [b"k"]}, {"keys": KEYS}),
    "drained": ({}, {"leases": LISTS, "hits": LISTS, "pages": [5, "x", [1], [[1]], [[1, [1], 1]], [[[1], [1]]]]}),
    "detach": ({}, {"unmapped": FLAGS}),
    "unmapped": ({}, {"anything": [1]}),
    "attach": (
        ATTACH,
        {
            "pool": [*TEXTS, None],
            "tag": TEXTS,
            "engine": TEXTS,
            "launch": TEXTS,
            "kind": [*TEXTS, "", "static ", None],
            "layout": [*TEXTS, "", "slabs", None],
            "rank": NUMBERS,
            "world_size": [*NUMBERS, 0, 65536],
            "page_size": [*NUMBERS, 0],
            "frames_per_page": [*NUMBERS, 0],
            "num_host_pages": [number for number in NUMBERS if number is not None] + [0, 1 << 40],
            "planes": PLANES,
            "wait_s": SECONDS,
        },
    ),
    "no_such_call": ({}, {"anything": [1]}),
    "": ({}, {"anything": [1]}),
    "x" * 100_000: ({}, {"anything": [1]}),
}


@pytest.mark.parametrize("op", WRONG, ids=lambda op: op[:12] or "empty")
def test_each_wrong_argument_is_answered_and_changes_nothing(
    shared_daemon: Daemon, processes: Processes, raw: Open, name: str, op: str
) -> None:
    right, wrong = WRONG[op]
    connection = raw(shared_daemon.socket)
    assert "error" not in connection.hello()
    number = 0
    if op != "attach":
        assert "error" not in connection.ask("attach", number := 1, **ATTACH, pool=name)
        lease = connection.ask("lease", number := 2, n=3)["lease"]
        right = right | ({"lease": lease} if "lease" in wrong else {})
        before = shared_daemon.pool(name)["pages"]
    for argument, values in wrong.items():
        for value in values:
            number += 1
            answer = connection.ask(op, number, **{"pool": name, **right, argument: value})
            what = f"{op:.20}({argument}={value!r:.60})"
            assert answer["id"] == number, what
            assert "error" in answer, what
            error = from_wire(answer["error"])
            assert isinstance(error, (UsageError, ProtocolError, ArenaFull)), (what, error)
            assert not error.retryable and error.message, what
    if op == "attach":
        assert [pool for pool in shared_daemon.status()["pools"] if pool["name"] == name] == []
    else:
        assert shared_daemon.pool(name)["pages"] == before
        assert "error" not in connection.ask("detach", number + 1, unmapped=True)


@pytest.mark.parametrize("op", [*WRONG, "status"], ids=lambda op: op[:12] or "empty")
def test_who_has_not_attached_is_refused_everything_else(shared_daemon: Daemon, raw: Open, op: str) -> None:
    arguments = WRONG.get(op, ({}, {}))[0]
    for role, word in (("observer", "may only ask for status"), ("worker", ""), ("scheduler", "")):
        if role != "observer" and op in ("attach", "drained", "release"):
            continue
        connection = raw(shared_daemon.socket)
        connection.hello(role)
        answer = connection.ask(op, 1, **arguments)
        if op == "status":
            assert answer["status"]["schema"] == 1
        else:
            assert word in answer["error"]["message"]
            assert answer["error"]["code"] in ("usage", "protocol", "stale_lease")


@pytest.mark.parametrize(
    "resume",
    [5, "x", [], {}, {"instance": b"i" * 16}, {"instance": None}, {"instance": 5, "session": 1, "token": b""}],
    ids=repr,
)
def test_a_resume_that_makes_no_sense_is_refused(shared_daemon: Daemon, raw: Open, resume: object) -> None:
    error = from_wire(raw(shared_daemon.socket).hello(resume=resume)["error"])
    assert error.code in ("protocol", "instance_changed")


def test_a_session_cannot_be_taken_over_without_its_token(
    shared_daemon: Daemon, processes: Processes, raw: Open, name: str
) -> None:
    (worker,) = processes.engine(shared_daemon.socket, pool=name)
    instance = bytes.fromhex(shared_daemon.status()["daemon"]["instance"])
    session = worker.hello["session"]
    asked: dict[str, Any] = {"instance": instance, "session": session, "leases": [], "hits": [], "retry": None}
    another = {"session": session + 1000, "token": b"t" * 16}
    for change in ({}, {"token": b""}, {"token": b"t" * 16}, {"token": "t"}, another):
        connection = raw(shared_daemon.socket)
        error = from_wire(connection.hello(resume=asked | change)["error"])
        assert error.code in ("protocol", "instance_changed")
        assert connection.receive() is None
    assert worker.call("contains", keys=[b"k"])["states"] == "m"


# --- repeated and overlapping requests


def test_the_same_request_again_gets_the_same_answer_and_an_older_one_is_stale(
    shared_daemon: Daemon, raw: Open, name: str
) -> None:
    connection = raw(shared_daemon.socket)
    connection.hello()
    connection.ask("attach", 1, **ATTACH, pool=name)
    first = connection.ask("lease", 5, n=2)
    assert connection.ask("lease", 5, n=2) == first
    assert shared_daemon.pool(name)["pages"]["leased"] == 2
    stale = connection.ask("lease", 4, n=2)["error"]
    assert (stale["code"], stale["ids"]) == ("stale_request", {"request": 4})
    connection.ask("detach", 6, unmapped=True)


def test_a_second_request_while_one_waits_is_refused_and_the_first_is_answered(
    shared_daemon: Daemon, processes: Processes, raw: Open, name: str
) -> None:
    connection = raw(shared_daemon.socket)
    connection.hello()
    connection.send({"op": "attach", "id": 1, **ATTACH, "pool": name, "world_size": 2, "wait_s": 20})
    refused = connection.ask("contains", 2, keys=[])
    assert refused["id"] == 2 and "still waiting" in refused["error"]["message"]
    worker = processes.worker(shared_daemon.socket)
    worker.attach(pool=name, world_size=2, rank=1)
    answer = connection.receive()
    assert answer is not None and answer["id"] == 1 and "error" not in answer
    connection.ask("detach", 3, unmapped=True)


# --- status


def test_status_has_its_schema(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    processes.engine(shared_daemon.socket, 2, pool=name, tag="t", engine="e")
    status = shared_daemon.status()
    assert set(status) == {"schema", "daemon", "arena", "pools", "sessions", "ended", "quarantine", "alarms"}
    daemon = status["daemon"]
    assert (daemon["version"], daemon["pid"], daemon["epoch"]) == (__version__, shared_daemon.pid, 1)
    assert (daemon["socket"], daemon["state"], daemon["pin"]) == (shared_daemon.socket, "ready", "none")
    assert (daemon["pinned_bytes"], daemon["keep"]) == (0, False)
    assert len(daemon["instance"]) == 32 and daemon["uptime_s"] > 0 and 0 <= daemon["huge_page_share"] <= 1
    assert MIB < daemon["rss_bytes"] < 100 * MIB
    arena = status["arena"]
    assert arena["bytes_total"] == arena["bytes_ready"] == 256 * MIB
    assert arena["bytes_allocated"] + arena["bytes_free"] == 256 * MIB and arena["bytes_allocated"] >= 4 * MIB
    pool = shared_daemon.pool(name)
    assert pool | {"tag": "t", "kind": "leased", "layout": "page", "page_size": 16, "frames_per_page": 1} == pool
    assert pool | {"world_size": 2, "num_host_pages": 9, "bytes_per_host_page": 8192, "state": "ready"} == pool
    assert pool["ranks_attached"] == {"e": [0, 1]}
    assert pool["pages"] == {"reserved": 1, "free": 8, "leased": 0, "sealed": 0, "pinned": 0, "quarantined": 0}
    for rank, worker in enumerate(processes.workers):
        (session,) = [session for session in status["sessions"] if session["pid"] == worker.pid]
        assert session | {"engine": "e", "role": "worker", "rank": rank, "pool": name, "state": "attached"} == session
        assert (session["id"], session["uid"]) == (worker.hello["session"], os.getuid())
        assert (session["missing"], session["holders"], session["leases"], session["pins"]) == ([], [], [], 0)


def test_detached_and_ended_sessions_are_told_apart(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    first, second = processes.engine(shared_daemon.socket, 2, pool=name)
    first.call("detach", unmapped=True)
    second.kill()
    status = shared_daemon.wait_status(lambda status: len([e for e in status["ended"] if e["pool"] == name]) == 2)
    ended = {entry["rank"]: (entry["pid"], entry["how"]) for entry in status["ended"] if entry["pool"] == name}
    assert ended == {0: (first.pid, "detached"), 1: (second.pid, "died")}
    assert shared_daemon.pool(name)["ranks_attached"] == {}
    with pytest.raises(UsageError):
        first.call("contains", keys=[])


def test_only_the_last_hundred_ends_are_told(start: Starter) -> None:
    daemon = start()
    attach = {**ATTACH, "pool": "p"}
    for _ in range(103):
        with Channel.open(daemon.socket, role=Role.WORKER) as channel:
            channel.call("attach", **attach)
            channel.call("detach", unmapped=True)
    ended = daemon.status()["ended"]
    assert len(ended) == 100
    assert [entry["id"] for entry in ended] == sorted((entry["id"] for entry in ended), reverse=True)
    assert daemon.session_files() == []


# --- pools


def test_two_ranks_write_one_arena_without_overlap(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    workers = processes.engine(shared_daemon.socket, 3, pool=name, num_host_pages=1000)
    taken: list[tuple[int, int]] = []
    for worker in workers:
        (region,) = worker.reply["regions"]
        assert worker.reply["num_host_pages"] == 1000 and worker.reply["planes"] == [[0, 0, 4096]]
        assert region["bytes"] >= 1000 * 4096
        taken += [(offset, length) for _, offset, length in region["extents"]]
    taken.sort()
    assert all(offset % (2 * MIB) == 0 and length % (2 * MIB) == 0 for offset, length in taken)
    assert all(a + n <= b for (a, n), (b, _) in zip(taken, taken[1:], strict=False))


def test_ranks_with_the_same_shard_share_a_region(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    planes = [["latent", 0, 1, 512, 16]]
    first, second = processes.engine(shared_daemon.socket, 2, pool=name, planes=planes)
    assert first.reply["regions"] == second.reply["regions"]
    assert shared_daemon.pool(name)["bytes_per_host_page"] == 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 32}, "page size 16, rank 0 asks for 32"),
        ({"world_size": 3}, "world size 1, rank 0 asks for 3"),
        ({"layout": "slab"}, "layout page, rank 0 asks for slab"),
        ({"kind": "static"}, "kind leased, rank 0 asks for static"),
        ({"frames_per_page": 2}, "frames_per_page 1, rank 0 asks for 2"),
        ({"num_host_pages": 10}, "num_host_pages 9, rank 0 asks for 10"),
        ({"planes": [["k0", 0, 1, 8192, 16]]}, "slice_bytes=4096.*slice_bytes=8192"),
        ({"planes": [["k1", 0, 1, 4096, 16]]}, "'k0'.*'k1'"),
        ({"planes": [["k0", 0, 1, 4096, 16], ["v0", 0, 1, 4096, 16]]}, "had 1, now 2"),
    ],
    ids=repr,
)
def test_a_rank_that_differs_from_its_pool_is_told_both_values(
    shared_daemon: Daemon, processes: Processes, name: str, change: dict[str, Any], words: str
) -> None:
    processes.engine(shared_daemon.socket, pool=name)
    other = processes.worker(shared_daemon.socket)
    with pytest.raises(PoolMismatch, match=words) as caught:
        other.attach(pool=name, engine="other", **change)
    assert name in caught.value.message or "planes" in change
    other.attach(pool=name, engine="other", num_host_pages=None)
    assert other.reply["num_host_pages"] == 9


def test_ranks_of_one_engine_must_agree_while_the_pool_forms(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    first, second = processes.worker(shared_daemon.socket), processes.worker(shared_daemon.socket)
    first.send_attach(pool=name, world_size=2, rank=0, tag="fp16")
    shared_daemon.wait_status(lambda status: [pool for pool in status["pools"] if pool["name"] == name])
    for change, words in (({"page_size": 4}, "page size 16, rank 1 asks for 4"), ({"tag": "fp8"}, "'fp16'.*'fp8'")):
        with pytest.raises(PoolMismatch, match=words):
            second.attach(**{"pool": name, "world_size": 2, "rank": 1, "tag": "fp16", **change})
    assert shared_daemon.pool(name)["state"] == "forming"
    second.attach(pool=name, world_size=2, rank=1, tag="fp16")
    first.result()
    assert shared_daemon.pool(name)["state"] == "ready"


@pytest.mark.parametrize(("rank", "world"), [(1, 1), (-1, 1), (7, 2), (0, 0), (0, -1)])
def test_a_rank_outside_its_world_is_refused(
    shared_daemon: Daemon, processes: Processes, name: str, rank: int, world: int
) -> None:
    worker = processes.worker(shared_daemon.socket)
    with pytest.raises(RankError, match=f"rank {rank} is outside a world of {world}|not {world}"):
        worker.attach(pool=name, rank=rank, world_size=world, planes=[["k", 0, 1, 4096, 16]])


def test_a_pool_that_waits_in_vain_names_the_missing_ranks_and_leaves_nothing(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    worker = processes.worker(shared_daemon.socket)
    with pytest.raises(RanksMissing, match=rf"pool '{name}' waits for ranks \[0, 2\] of 3") as caught:
        worker.attach(pool=name, rank=1, world_size=3, wait_s=0.05)
    assert caught.value.ids == {"ranks": [0, 2]}
    assert [pool for pool in shared_daemon.status()["pools"] if pool["name"] == name] == []
    worker.attach(pool=name)


def test_a_rank_attached_twice_is_refused_with_the_living_pid(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name)
    second = processes.worker(shared_daemon.socket)
    with pytest.raises(RankAttached, match=f"rank 0 of engine '0' is attached by the living process {first.pid}"):
        second.attach(pool=name)
    with pytest.raises(UsageError, match="attached already"):
        first.attach(pool=name)
    second.attach(pool=name, engine="1")


def test_another_launch_waits_for_the_living_one_and_names_it(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name, launch="monday")
    second = processes.worker(shared_daemon.socket)
    with pytest.raises(EngineBusy, match=f"process {first.pid}") as caught:
        second.attach(pool=name, launch="tuesday", wait_s=0.05)
    assert caught.value.ids == {"pids": [first.pid]} and caught.value.retryable
    second.send_attach(pool=name, launch="tuesday")
    first.kill()
    second.result()


def test_a_static_pool_has_one_holder(shared_daemon: Daemon, processes: Processes, name: str) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name, kind="static")
    assert shared_daemon.pool(name)["pages"] | {"leased": 8, "free": 0} == shared_daemon.pool(name)["pages"]
    second = processes.worker(shared_daemon.socket)
    with pytest.raises(EngineBusy, match=f"process {first.pid}"):
        second.attach(pool=name, kind="static", engine="other", wait_s=0.05)
    second.send_attach(pool=name, kind="static", engine="other")
    first.call("detach", unmapped=True)
    second.result()
    assert shared_daemon.pool(name)["ranks_attached"] == {"other": [0]}


def test_a_mapping_that_outlives_its_detach_still_counts(
    shared_daemon: Daemon, processes: Processes, name: str
) -> None:
    (first,) = processes.engine(shared_daemon.socket, pool=name, kind="static")
    first.call("detach", unmapped=False)
    states = [s["state"] for s in shared_daemon.status()["sessions"] if s["pool"] == name]
    assert states == ["detached"]
    first.call("unmapped")
    assert [s for s in shared_daemon.status()["sessions"] if s["pool"] == name] == []


def test_an_arena_too_small_tells_bytes_asked_and_free(start: Starter, processes: Processes) -> None:
    daemon = start(memory="8MiB")
    worker = processes.worker(daemon.socket)
    with pytest.raises(ArenaFull) as caught:
        worker.attach(num_host_pages=4096)
    assert f"{4096 * 4096} bytes" in caught.value.message and f"{8 * MIB} " in caught.value.message
    assert not caught.value.retryable
    assert daemon.status()["pools"] == []
    worker.attach(num_host_pages=None)
    assert 1 < worker.reply["num_host_pages"] <= 4 * MIB // 4096
    free = daemon.status()["arena"]["bytes_free"]
    assert 4 * MIB <= free < 8 * MIB
    other = processes.worker(daemon.socket)
    other.attach(pool="rest", num_host_pages=free // 4096)
    third = processes.worker(daemon.socket)
    with pytest.raises(ArenaFull, match=f"the arena has 0 of {8 * MIB} bytes free"):
        third.attach(pool="more")


def test_every_rank_hears_that_the_arena_is_too_small(start: Starter, processes: Processes) -> None:
    daemon = start(memory="4MiB")
    workers = [processes.worker(daemon.socket) for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.send_attach(rank=rank, world_size=2, num_host_pages=4096)
    for worker in workers:
        with pytest.raises(ArenaFull):
            worker.result()
    assert daemon.status()["pools"] == []


# --- other uids


@pytest.fixture
def public() -> Iterator[str]:
    """A socket path in a directory that every uid may enter."""
    directory = tempfile.mkdtemp(prefix="smt-")
    os.chmod(directory, 0o755)
    yield f"{directory}/d.sock"
    shutil.rmtree(directory)


def connect_as(uid: int, path: str) -> tuple[int, int]:
    """Connect as another uid, send a hello and garbage; return an errno, or 0, and the bytes that came back."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        failure, received = 0, 0
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as sock:
                sock.settimeout(20)
                sock.connect(path)
                hello = {"op": "hello", "id": 0, "protocol": [1, 1], "version": "0", "role": "observer"}
                try:
                    sock.sendall(wire.encode(hello) + b"\xff" * 100)
                    received = len(sock.recv(1 << 16))
                except (BrokenPipeError, ConnectionResetError):
                    pass
        except OSError as error:
            failure = error.errno or -1
        os.write(write, f"{failure} {received}".encode())
        os._exit(0)
    os.close(write)
    with open(read, encoding="ascii") as pipe:
        failure, received = pipe.read().split()
    os.waitpid(pid, 0)
    return int(failure), int(received)


@as_root
def test_another_uid_cannot_even_connect(start: Starter, public: str) -> None:
    daemon = start(socket=public)
    assert stat.S_IMODE(os.stat(public).st_mode) == 0o600
    assert connect_as(NOBODY, public) == (13, 0)
    assert "refused" not in daemon.log()


@as_root
def test_another_uid_is_closed_before_anything_is_parsed(start: Starter, public: str, wait_until: Until) -> None:
    daemon = start(socket=public)
    os.chmod(public, 0o666)
    assert connect_as(NOBODY, public) == (0, 0)
    wait_until(lambda: f"event=refused uid={NOBODY}" in daemon.log())
    assert "msgpack" not in daemon.log()
    assert daemon.status()["daemon"]["state"] == "ready"


@as_root
def test_an_allowed_uid_is_served_and_no_other(start: Starter, processes: Processes, public: str) -> None:
    daemon = start("--allow-uid", "12345", "--allow-uid", str(NOBODY), socket=public)
    worker = processes.worker(public, uid=NOBODY)
    worker.attach()
    (session,) = daemon.status()["sessions"]
    assert (session["uid"], session["pid"]) == (NOBODY, worker.pid)
    assert connect_as(NOBODY - 1, public) == (0, 0)
    assert f"event=refused uid={NOBODY - 1}" in daemon.log()
    worker.kill()
    daemon.wait_status(lambda status: status["sessions"] == [])


# --- limits


def test_running_out_of_descriptors_raises_an_alarm_and_heals(start: Starter, raw: Open, wait_until: Until) -> None:
    daemon = start(before=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    watcher = raw(daemon.socket)
    watcher.hello("observer")
    numbers = itertools.count(1)

    def alarms() -> list[dict[str, str]]:
        found: list[dict[str, str]] = watcher.ask("status", next(numbers))["status"]["alarms"]
        return found

    assert alarms() == []
    crowd = [raw(daemon.socket) for _ in range(80)]
    (alarm,) = wait_until(alarms)
    assert alarm["code"] == "accept" and "LimitNOFILE" in alarm["message"]
    for connection in crowd:
        connection.sock.close()
    wait_until(lambda: daemon.status()["alarms"] == [])
    with Channel.open(daemon.socket, role=Role.WORKER) as channel:
        assert channel.arena_bytes == [32 * MIB]


def test_a_session_that_has_no_descriptor_left_is_refused_with_the_remedy(start: Starter, raw: Open) -> None:
    daemon = start(before=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    channels: list[Channel] = []
    try:
        with pytest.raises((EnvironmentFault, SharedMirrorError)) as caught:
            while True:
                channels.append(Channel.open(daemon.socket, role=Role.WORKER, timeout_s=0.5))
        assert isinstance(caught.value, EnvironmentFault)
        assert 5 < len(channels) < 40
        assert channels[0].call("status")["status"]["daemon"]["pid"] == daemon.pid
    finally:
        for channel in channels:
            channel.close()
    daemon.wait_status(lambda status: status["alarms"] == [])


def test_a_prefaulting_daemon_answers_status_and_lets_attach_wait(start: Starter, processes: Processes) -> None:
    daemon = start(memory="1GiB", state=None)
    path = Path(daemon.socket)
    worker = None
    seen = set()
    while worker is None:
        if path.exists():
            try:
                seen.add(daemon.status()["daemon"]["state"])
                worker = processes.worker(daemon.socket)
            except DaemonUnavailable:
                pass
    worker.attach()
    status = daemon.status()
    assert status["daemon"]["state"] == "ready" and seen <= {"prefaulting", "ready"}
    assert status["arena"]["bytes_ready"] == 1 << 30
