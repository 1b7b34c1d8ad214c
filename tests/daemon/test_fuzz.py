"""Bytes, requests and records that no honest side sends: typed errors, nothing else, and the state stays well.

Frames go into the decoder, requests that are well-formed msgpack into the core, and records with valid
checksums into recovery. None of them may raise another exception, loop, or take memory without bound.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sharedmirror import wire
from sharedmirror.errors import ProtocolError, SharedMirrorError
from sharedmirror.types import Role
from sharedmirrord.core import machine, report, watching
from sharedmirrord.core.durable import Slot
from sharedmirrord.core.model import State
from sharedmirrord.core.recover import DamagedRecords, recover
from tests.daemon.core_driver import attach_arguments, packed, snapshot, unpacked
from tests.daemon.durable_driver import DurableDriver
from tests.daemon.durable_view import durable_view, state_problems
from tests.daemon.store_memory import ARENA_BYTES

QUICK = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True)

SMALL = st.integers(-2, 12)
EDGES = st.sampled_from(
    [0, -1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
     -(1 << 63), 0.0, 1.5, float("nan"), float("inf"), None, True, False, b"", "", b"k" * 64, b"k" * 65, "x" * 300]
)  # fmt: skip
LEAVES = st.one_of(SMALL, EDGES, st.binary(max_size=4), st.text(max_size=4))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)

# -- frames --------------------------------------------------------------------------------------


def decode(chunks: list[bytes]) -> tuple[list[dict[str, Any]], bool]:
    """Return the frames, and whether the stream was refused."""
    decoder, frames = wire.FrameDecoder(), []
    for chunk in chunks:
        try:
            frames += decoder.feed(chunk)
        except ProtocolError:
            return frames, True
    return frames, False


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in zip(at, at[1:], strict=False)]


PLACES = st.lists(st.integers(0, 1 << 16), max_size=5)


@settings(QUICK, max_examples=500)
@given(st.binary(max_size=64), PLACES)
@example(b"\xff\xff\xff\xff", [])
@example(b"\x01\x00\x00\x00\xc1", [])
@example((1 << 20).to_bytes(4, "little") + b"\x91" * (1 << 20), [])
def test_any_bytes_give_maps_or_a_refusal(data: bytes, places: list[int]) -> None:
    whole, refused = decode([data])
    pieces, refused_again = decode(cut(data, places))
    assert refused == refused_again
    assert refused or repr(pieces) == repr(whole)  # through repr: a NaN is no NaN
    assert all(isinstance(key, str) for frame in [*whole, *pieces] for key in frame)


@settings(QUICK, max_examples=300)
@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=4), PLACES)
def test_frames_arrive_whole_however_they_are_cut(bodies: list[dict[str, Any]], places: list[int]) -> None:
    data = b"".join(wire.encode(body) for body in bodies)
    assert repr(decode(cut(data, places))) == repr(([unpacked(packed(body)) for body in bodies], False))


@settings(QUICK, max_examples=500)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_gives_maps(body: dict[str, Any], place: int, flip: int) -> None:
    data = bytearray(wire.encode(body))
    data[place % len(data)] ^= flip
    frames, _ = decode([bytes(data)])
    assert all(isinstance(frame, dict) for frame in frames)


@settings(QUICK, max_examples=100)
@given(st.integers(wire.MAX_FRAME_BYTES + 1, (1 << 32) - 1), st.binary(max_size=100))
def test_an_oversized_frame_is_refused_before_its_bytes_arrive(size: int, some: bytes) -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        wire.FrameDecoder().feed(size.to_bytes(4, "little") + some)


# -- requests ------------------------------------------------------------------------------------

GOOD: dict[str, list[dict[str, Any]]] = {
    "attach": [attach_arguments(), attach_arguments(rank=1, engine="f"), {"pool": "p", "engine": "e", "max_held": 3},
               attach_arguments(pool="s", kind="static", world_size=1), attach_arguments(pool="new", world_size=1)],
    "detach": [{"unmapped": True}, {"unmapped": False}],
    "lease": [{"n": 1}, {"n": 3, "wait_s": 1.0}],
    "reserve": [{"keys": [b"a", b"r"], "parent": b"b"}, {"keys": [b"s"], "parent": None, "wait_s": 1}],
    "commit": [{"lease": 0, "pages": None}, {"lease": 0, "pages": [1, 2]}],
    "seal": [{"lease": 0, "keys": [b"t"], "pages": [1], "parent": None}, {"lease": 0, "keys": [b"a", b"u"]}],
    "abort": [{"lease": 0, "pages": None}, {"lease": 0, "pages": [2]}],
    "lookup": [{"keys": [b"a", b"b"], "mode": "prefix"}, {"keys": [b"b", b"z"], "mode": "each"}],
    "release": [{"hits": [0]}],
    "evict": [{"keys": [b"a", b"b"]}],
    "clear": [{}],
    "contains": [{"keys": [b"a", b"a"]}],
    "touch": [{"keys": [b"b"]}],
    "drained": [{"leases": [0], "hits": [0]}, {"leases": [], "hits": [], "pages": [[0, [1, 2]]]}],
    "unmapped": [{}],
}  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, str, dict[str, Any]]:
    """Who asks, the call, and its arguments: as they should be but for one value, or anything at all."""
    op = draw(st.sampled_from([*GOOD, "lease", "commit", "lookup", "drained", "hello", ""]))
    arguments = copy.deepcopy(draw(st.sampled_from(GOOD.get(op, [{}]))))
    if draw(st.booleans()) and arguments:
        name = draw(st.sampled_from([*arguments, "wait_s"]))
        arguments[name] = mutate(draw, arguments.get(name))
    elif draw(st.integers(0, 9)) == 0:
        arguments = draw(st.dictionaries(st.sampled_from([name for some in GOOD.values() for name in some[0]]), VALUES))
    return draw(st.integers(0, 11)), op, arguments


def mutate(draw: st.DrawFn, value: Any) -> Any:
    """Return the value with some part of it replaced."""
    if isinstance(value, (list, tuple)) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], mutate(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {other: kept for other, kept in value.items() if other != name}
        return value | {name: mutate(draw, value[name])}
    return draw(VALUES)


def busy_driver() -> DurableDriver:
    """A daemon with sessions of every kind, leases, hits and keys."""
    driver = DurableDriver()
    engine = driver.engine("e", num_host_pages=6, max_held=5)
    other = driver.engine("f", num_host_pages=6)
    driver.engine("g", pool="s", world_size=1, kind="static", scheduler=False, num_host_pages=6)
    engine.cache(b"a", b"b")
    engine.lookup(b"a")
    lease = engine.lease(2)
    engine.commit(lease["lease"], lease["pages"][:1], ranks=[0])
    driver.ask(other.workers[1], "detach", unmapped=False)
    driver.hello()
    driver.hello(Role.SCHEDULER)
    return driver


def aim(driver: DurableDriver, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the 0 that stands for a lease or a hit by one that there is."""
    lease, hit = max(driver.state.leases, default=0), max(driver.state.hits, default=0)
    aimed = dict(arguments)
    if aimed.get("lease") == 0:
        aimed["lease"] = lease
    for name, number in (("leases", lease), ("hits", hit)):
        if aimed.get(name) == [0]:
            aimed[name] = [number]
    if aimed.get("pages") == [[0, [1, 2]]]:
        aimed["pages"] = [[lease, driver.state.leases[lease].pages[:1]]] if lease else []
    return aimed


@settings(QUICK, max_examples=500)
@given(st.lists(requests(), min_size=5, max_size=25))
def test_any_requests_get_answers_and_leave_the_state_well(asked: list[tuple[int, str, dict[str, Any]]]) -> None:
    driver = busy_driver()
    for who, op, arguments in asked:
        sessions = sorted(driver.state.sessions)
        session = sessions[who % len(sessions)] if who else driver.hello(Role.WORKER if len(op) % 2 else Role.SCHEDULER)
        body = unpacked(packed(aim(driver, arguments)))
        driver.requests[session] += 1
        request = driver.requests[session]
        driver.apply(machine.Request(session, request, op, body))
        waits = any(waiter.session == session for waiter in driver.state.waiters)
        assert waits or (session, request) in driver.replies
        packed(list(driver.replies.values()))
    driver.tick(2 * 86400.0)
    assert driver.state.waiters == []
    packed(report.report(driver.state, driver.now))
    assert durable_view(driver.recovered()) == durable_view(driver.state)


WATCH: list[dict[str, Any]] = [
    {"pool": "p", "tag": None, "since": None, "cursor": None, "limit": None},
    {"pool": "p", "tag": "", "since": ["ab", 1, 0, 1], "cursor": 0, "limit": 1},
    {"pool": "s", "tag": None, "since": None, "cursor": 3, "limit": 8192},
]


@st.composite
def watches(draw: st.DrawFn) -> dict[str, Any]:
    arguments: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(WATCH)))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(arguments)))
        arguments[name] = mutate(draw, arguments[name])
    return arguments


@settings(QUICK, max_examples=500)
@given(st.lists(watches(), min_size=1, max_size=10))
def test_any_watch_gets_an_answer_or_a_refusal_and_changes_nothing(asked: list[dict[str, Any]]) -> None:
    driver = busy_driver()
    before, pool = snapshot(driver.state), driver.pool().id
    for arguments in asked:
        body = unpacked(packed(arguments))
        if isinstance(body.get("since"), list):
            body["since"] = [pool if number == 0 else number for number in body["since"]]
        try:
            answer = watching.watch(driver.state, body, "ab", 1)
        except SharedMirrorError:
            continue
        assert len(packed(answer)) < wire.MAX_FRAME_BYTES
        assert answer["gap"] or len(answer.get("keys", ())) <= (body["limit"] or watching.LIMIT)
    assert snapshot(driver.state) == before


# -- records and page tables with valid checksums ------------------------------------------------


def rich_records() -> tuple[dict[tuple[str, int], Any], dict[int, list[Slot | None]]]:
    driver = busy_driver()
    engine = driver.engine("h", world_size=1, pool="q", num_host_pages=7, layout="slab")
    driver.ask(engine.scheduler, "reserve", keys=[b"r1", b"r2"], parent=None)
    engine.cache(b"x", b"y", b"z")
    engine.release(engine.lookup(b"x")["hit"])
    hit = engine.lookup(b"y", mode="each")["hit"]
    driver.ask(engine.scheduler, "release", hits=[hit])
    tables = {pool: list(driver.store.slots(pool)) for pool in driver.store.tables()}
    return driver.store.records(), tables


RECORDS, TABLES = rich_records()
WORDS = st.sampled_from([0, 1, 2, 3, 4, 5, 255, 1 << 31, (1 << 32) - 1])
SLOTS = st.builds(
    Slot, st.just(0), st.integers(0, 255) | st.integers(0, 4), WORDS | st.just((1 << 64) - 1), WORDS,
    st.sampled_from([b"", b"a", b"b", b"x", b"k" * 64]), WORDS, WORDS,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> tuple[dict[tuple[str, int], Any], dict[int, list[Slot | None]]]:
    records, tables = copy.deepcopy(RECORDS), copy.deepcopy(TABLES)
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from(sorted(records)))
        match draw(st.integers(0, 9)):
            case 0:
                del records[key]
            case 1:
                records[key[0], draw(SMALL | st.sampled_from([1 << 31, 1 << 62]))] = records[key]
            case _:
                records[key] = unpacked(packed(mutate(draw, records[key])))
    for _ in range(draw(st.integers(0, 2)) if len(records) == len(RECORDS) else 0):
        table = tables[draw(st.sampled_from(sorted(tables)))]
        page = draw(st.integers(0, len(table) - 1))
        table[page] = draw(SLOTS)._replace(page=page)
    return records, tables


@settings(QUICK, max_examples=2500)
@given(damaged())
def test_damaged_records_are_refused_or_give_a_state_that_works(
    found: tuple[dict[tuple[str, int], Any], dict[int, list[Slot | None]]],
) -> None:
    records, tables = found
    try:
        state = recover(records, lambda pool: iter(tables[pool]), ARENA_BYTES, 5.0)
    except DamagedRecords:
        return
    assert state_problems(state) == []
    live_on(state, random.Random(len(records)))
    assert state_problems(state) == []


def live_on(state: State, rng: random.Random) -> None:
    """Do with a recovered state what a daemon does: every session resumes, asks, answers and ends."""

    def apply(event: machine.Event) -> None:
        effects = machine.apply(state, event, 9.0)
        packed([list(write) if isinstance(write, tuple) else repr(write) for write in effects.writes])
        for number, body in [*effects.replies, *effects.pushes]:
            packed([number, body])

    apply(machine.Ready())
    packed(report.report(state, 6.0))
    sessions = list(state.sessions)
    rng.shuffle(sessions)
    for number in sessions:
        session = state.sessions[number]
        apply(machine.Resume(number, sorted(session.leases), sorted(session.hits), session.last_request))
    calls: list[tuple[str, dict[str, Any]]]
    for number in sessions:
        calls = [("lookup", {"keys": [b"a", b"x"], "mode": "each"}), ("lease", {"n": 2}), ("clear", {}),
                 ("commit", {"lease": max(state.leases, default=1)}), ("release", {"hits": [*state.hits]}),
                 ("drained", {"leases": [*state.leases], "hits": [*state.hits]}),
                 ("reserve", {"keys": [b"a", b"n"], "parent": b"x"})]  # fmt: skip
        for op, arguments in calls:
            if number in state.sessions:
                apply(machine.Request(number, state.sessions[number].last_request + 1, op, arguments))
    fresh = state.new_id()
    assert fresh not in state.sessions
    for number in sessions:
        apply(machine.Disconnected(number))
        apply(machine.Died(number, ("lock",)))
        apply(machine.Gone(number))
    assert state.sessions == {} and state.leases == {} and state.hits == {}


def test_the_damage_is_neither_always_nor_never_refused() -> None:
    """The test above says something only if both ends are reached."""
    assert state_problems(recover(RECORDS, lambda pool: iter(TABLES[pool]), ARENA_BYTES, 5.0)) == []
    kinds = {kind for kind, _ in RECORDS}
    assert kinds == {"counter", "incarnation", "pool", "marks", "session", "result", "lease", "commit", "hit"}
    refused = 0
    for key in sorted(RECORDS):
        try:
            recover(RECORDS | {key: "nonsense"}, lambda pool: iter(TABLES[pool]), ARENA_BYTES, 5.0)
        except DamagedRecords:
            refused += 1
    assert refused == len(RECORDS)


def test_msgpack_that_is_nested_without_end_is_refused() -> None:
    deep = b"\x81\xa1k" + b"\x91" * 100_000
    with pytest.raises(ProtocolError, match="is not msgpack"):
        wire.FrameDecoder().feed(len(deep).to_bytes(4, "little") + deep)
    assert msgpack.packb({"k": 1})
