"""The daemon as its clients meet it: every call's arguments, pools and what must agree, other uids, limits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from sharedmirror import __version__
from sharedmirror.channel import Channel
from sharedmirror.errors import (
    ArenaFull,
    ProtocolError,
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
_numbers = itertools.count()


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
    for role, word in (("observer", "may only ask for status, watch or drop"), ("worker", ""), ("scheduler", "")):
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


def test_only_the_last_hundred_ends_are_told(start: Starter, wait_until: Until) -> None:
    daemon = start()
    attach = {**ATTACH, "pool": "p"}
    for _ in range(103):
        with Channel.open(daemon.socket, role=Role.WORKER) as channel:
            channel.call("attach", **attach)
            channel.call("detach", unmapped=True)
    ended = daemon.status()["ended"]
    assert len(ended) == 100
    assert [entry["id"] for entry in ended] == sorted((entry["id"] for entry in ended), reverse=True)
    wait_until(lambda: daemon.session_files() == [])
