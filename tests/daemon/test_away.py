"""What the next daemon makes of the time without one: hits that it is told of, fences, and what must wait."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import NoPages, NotResumed, ProtocolError, StaleLease
from sharedmirror.transfers import Ledger
from sharedmirror.types import AWAY_HITS, AWAY_NUMBERS, Role, away_hit, split_away_hit
from sharedmirrord.core import away, machine
from sharedmirrord.core.away import ALL, Claim, Claims
from sharedmirrord.core.model import Effects
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_driver import Engine
from tests.daemon.durable_driver import DurableDriver
from tests.daemon.durable_view import durable_view
from tests.daemon.simulated_clients import SeenHit

KEYS = [b"a", b"b", b"c", b"d"]


@pytest.fixture
def driver() -> DurableDriver:
    return DurableDriver()


@pytest.fixture
def engine(driver: DurableDriver) -> Engine:
    engine = driver.engine("e", num_host_pages=8)
    engine.cache(*KEYS)
    return engine


def restarted(engine: Engine) -> DurableDriver:
    assert isinstance(engine.driver, DurableDriver)
    engine.driver = after = engine.driver.restarted()
    return after


def claim(engine: Engine, number: int, *keys: bytes) -> Claim:
    """A hit that the engine's scheduler took from the index."""
    table = engine.driver.table()
    pages = [table.index[key] for key in keys]
    mark = engine.driver.state.sessions[engine.scheduler].mark
    return Claim(away_hit(mark, number), pages, [table.generations[page] for page in pages])


def resume(engine: Engine, below: int, *held: Claim, session: int | None = None) -> Effects:
    driver, number = engine.driver, session or engine.scheduler
    known = driver.state.sessions[number]
    return driver.apply(
        machine.Resume(number, sorted(known.leases), sorted(known.hits), None, Claims(below, tuple(held)))
    )


def back(engine: Engine) -> None:
    """All workers resume."""
    for worker in engine.workers:
        driver = engine.driver
        assert isinstance(driver, DurableDriver)
        driver.resume(worker)


def fence_of(engine: Engine, number: int) -> int:
    return away_hit(engine.driver.state.sessions[engine.scheduler].mark, number)


def drain(engine: Engine, *hits: int) -> None:
    for rank in range(len(engine.workers)):
        engine.drained(rank, hits=list(hits))


def test_ids_are_told_apart() -> None:
    assert split_away_hit(away_hit(7, 3)) == (7, 3)
    assert away_hit(0, 0) == AWAY_HITS and away_hit(1 << 36, AWAY_NUMBERS - 1) < 1 << 62


def test_what_a_scheduler_still_holds_becomes_hits_like_any_other(engine: Engine) -> None:
    after = restarted(engine)
    back(engine)
    first, second = claim(engine, 1, b"a", b"b"), claim(engine, 3, b"b")
    resume(engine, 4, first, second)
    table = after.table()
    assert table.pins == {table.index[b"a"]: 1, table.index[b"b"]: 2}
    assert after.state.sessions[engine.scheduler].hits == {first.hit, second.hit}
    drain(engine, fence_of(engine, 4))
    assert after.ask(engine.scheduler, "evict", keys=[b"a", b"c"])["pinned"] == [b"a"]
    # And they are as durable.
    view = durable_view(after.state)
    again = restarted(engine)
    assert durable_view(again.state) == view
    back(engine)
    resume(engine, 4, first, second)
    assert again.state.fences == set(), "the same word twice is one word"
    for hit in (first.hit, second.hit):
        again.ask(engine.scheduler, "release", hits=[hit])
        assert hit in again.state.hits, "its workers may still load"
        drain(engine, hit)
    assert again.table().pins == {}


def test_a_release_whose_answer_was_lost_is_no_reason_to_pin_again(engine: Engine) -> None:
    """Simulation seed 53: the release was done, the answer lost, and the next daemon was told of the hit again."""
    after = restarted(engine)
    back(engine)
    held = claim(engine, 1, b"a")
    resume(engine, 2, held)
    request = after.send(engine.scheduler, "release", hits=[held.hit])
    drain(engine, held.hit, fence_of(engine, 2))
    assert not after.state.hits
    again = restarted(engine)
    claims = Claims(2, (held,))
    assert away.lost(again.state, again.state.sessions[engine.scheduler], claims) == []
    again.apply(machine.Resume(engine.scheduler, [], [], request, claims))
    again.repeat(engine.scheduler, request, "release", hits=[held.hit])
    assert again.state.hits == {} and again.table().pins == {}


@pytest.mark.parametrize("how", ["generation", "free", "leased", "no such page", "null page"])
def test_a_page_that_is_not_what_it_was_is_a_lost_hit(engine: Engine, how: str) -> None:
    after = restarted(engine)
    good, held = claim(engine, 2, b"a"), claim(engine, 1, b"b")
    table = after.table()
    pages, generations = held.pages, list(held.generations)
    if how == "generation":
        generations[0] += 1
    elif how == "null page":
        pages, generations = [0], [0]
    else:
        other = {"free": table._free[-1], "leased": engine.lease(1)["pages"][0], "no such page": 99}[how]
        pages, generations = [other], [table.generations[other] if other < table.pages else 1]
    bad = Claim(held.hit, pages, generations)
    session = after.state.sessions[engine.scheduler]
    assert away.lost(after.state, session, Claims(3, (good, bad))) == [bad.hit]
    told = resume(engine, 3, good, bad)
    assert set(after.state.hits) == {good.hit, fence_of(engine, 3)}
    for ledger in ledgers(engine, told):
        loads(ledger, good, after.pool().id)
        with pytest.raises(StaleLease):
            loads(ledger, held, after.pool().id)


def test_who_has_a_daemon_to_ask_takes_nothing_from_the_index(engine: Engine) -> None:
    held = claim(engine, 1, b"a")
    resume(engine, 2, held)
    assert held.hit not in engine.driver.state.hits
    assert engine.driver.table().pins == {}


# -- fences --------------------------------------------------------------------------------------


def ledgers(engine: Engine, *effects: Effects) -> list[Ledger]:
    """The ledgers of the engine's ranks, after what they were told."""
    found = []
    for worker, reply in zip(engine.workers, engine.replies, strict=True):
        ledger = Ledger(reply["pool"], reply["num_host_pages"])
        ledger.forestall(reply)
        for effect in effects:
            for session, body in effect.pushes:
                if session == worker:
                    ledger.on_push(body)
        found.append(ledger)
    return found


def loads(ledger: Ledger, held: Claim, pool: int) -> Any:
    return ledger.begin_load(SeenHit(held.hit, pool, tuple(held.pages)), held.pages)


class Going:
    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over


def test_a_rank_says_that_a_fence_is_through_when_its_loads_are(engine: Engine) -> None:
    after = restarted(engine)
    back(engine)
    pool = after.pool().id
    over, kept = claim(engine, 1, b"a"), claim(engine, 2, b"b")
    fence = fence_of(engine, 3)
    (ledger, other) = ledgers(engine)
    going, also = Going(), Going()
    loads(ledger, over, pool).submitted(going)
    loads(ledger, kept, pool).submitted(also)
    effects = resume(engine, 3, kept)
    pushes = [body for session, body in effects.pushes if session == engine.workers[0]]
    assert pushes == [
        {"push": "released", "hits": [fence], "hit_floor": after.state.next_id,
         "fences": [[fence, after.state.sessions[engine.scheduler].mark, 3, [kept.hit]]]}
    ]  # fmt: skip
    for one in (ledger, other):
        assert one.on_push(pushes[0])
    # Refused from now on, though it is under way here, and though it was never seen there.
    for one in (ledger, other):
        with pytest.raises(StaleLease):
            loads(one, over, pool)
        loads(one, kept, pool).submitted(also)
    assert other.answer().hits == (fence,)
    assert ledger.answer().hits == () and ledger.answer().waiting
    going.over = True
    answer = ledger.answer()
    assert answer.hits == (fence,)
    ledger.answered(answer)
    assert not ledger.answer() and over.hit not in ledger._hits and over.hit not in ledger._released
    for _ in range(2):
        with pytest.raises(StaleLease):
            loads(ledger, over, pool)
    # The one that is held ends as any other.
    ledger.on_push({"push": "released", "hits": [kept.hit], "hit_floor": after.state.next_id})
    with pytest.raises(StaleLease):
        loads(ledger, kept, pool)
    assert not ledger.answer().hits
    also.over = True
    assert ledger.answer().hits == (kept.hit,)
    ledger.answered(ledger.answer())
    assert not ledger._hits and not ledger._released and not ledger._hits_before


def test_the_daemons_own_hits_are_refused_by_their_floor_as_before(engine: Engine) -> None:
    after = restarted(engine)
    back(engine)
    held = claim(engine, 1, b"a")
    effects = resume(engine, 2, held)
    (ledger, _) = ledgers(engine, effects)
    number = engine.lookup(b"a")
    loads(ledger, Claim(number["hit"], number["pages"], []), after.pool().id)
    after.ask(engine.scheduler, "release", hits=[number["hit"]])
    assert after.pushes[engine.workers[0]][-1]["hit_floor"] == number["hit"]


@pytest.mark.parametrize("when", ["before its engine", "after its engine"])
def test_a_scheduler_is_known_to_ranks_whichever_came_first(driver: DurableDriver, when: str) -> None:
    """Its session may be older than theirs, because it waited for the pool."""
    head = driver.hello(Role.SCHEDULER)
    if when == "before its engine":
        waiting = driver.send(head, "attach", pool="p", engine="e", wait_s=5.0)
        engine = driver.engine("e", scheduler=False, num_host_pages=8)
        driver.result(head, waiting)
    else:
        engine = driver.engine("e", scheduler=False, num_host_pages=8)
        driver.ask(head, "attach", pool="p", engine="e")
    engine.scheduler = head
    engine.cache(*KEYS)
    after = restarted(engine)
    late = after.ask_attach(after.hello(), engine="late", num_host_pages=8, world_size=2, wait_s=0)
    assert late
    held = claim(engine, 1, b"a")
    for ledger in ledgers(engine):
        loads(ledger, held, after.pool().id)


def test_a_rank_that_comes_later_knows_what_is_over(engine: Engine) -> None:
    after = restarted(engine)
    back(engine)
    pool = after.pool().id
    over, kept, later = (claim(engine, number, b"a") for number in (1, 2, 4))
    resume(engine, 3, kept)
    drain(engine, fence_of(engine, 3))
    after.kill(engine.workers[0])
    reply = after.ask_attach(after.hello(), engine="e", rank=0, num_host_pages=8)
    ledger = Ledger(pool, 8)
    ledger.forestall(reply)
    with pytest.raises(StaleLease):
        loads(ledger, over, pool)
    loads(ledger, kept, pool)
    loads(ledger, later, pool)  # of the next time without a daemon
    # The scheduler ends, and with it all its hits.
    after.disconnect(engine.scheduler)
    after.gone(engine.scheduler)
    after.kill(engine.workers[1])
    reply = after.ask_attach(after.hello(), engine="e", rank=1, num_host_pages=8)
    ledger = Ledger(pool, 8)
    ledger.forestall(reply)
    for held in (over, kept, later):
        with pytest.raises(StaleLease):
            loads(ledger, held, pool)


def test_a_scheduler_that_never_comes_back_is_fenced(engine: Engine) -> None:
    """Invariant 6: nobody knows what it gave to its workers."""
    after = restarted(engine)
    back(engine)
    after.disconnect(engine.scheduler)
    after.gone(engine.scheduler)
    (fence,) = after.state.fences
    assert split_away_hit(fence)[1] == ALL and not after.state.survivors
    other = after.hello(Role.SCHEDULER)
    after.ask(other, "attach", pool="p", engine="e")
    engine.scheduler = other
    pids = [after.state.sessions[worker].peer.pid for worker in engine.workers]
    with pytest.raises(NoPages, match=rf"until the processes \[{pids[0]}, {pids[1]}\]"):
        engine.lease(4)
    with pytest.raises(NotResumed, match=rf"until the processes \[{pids[0]}, {pids[1]}\]"):
        evict(engine, b"a")
    engine.drained(0, hits=[fence])
    # A kill in between: the fence stands, and each worker is asked again.
    after = restarted(engine)
    assert after.state.fences == {fence}
    for worker in engine.workers:
        assert [body["hits"] for body in after.pushed(after.resume(worker), worker)] == [[fence]]
    after.resume(other)
    engine.drained(0, hits=[fence])
    with pytest.raises(NotResumed, match=rf"\[{pids[1]}\]"):
        after.ask(other, "clear")
    after.disconnect(engine.workers[1])
    after.died(engine.workers[1])
    with pytest.raises(NotResumed):
        evict(engine, b"a")
    after.gone(engine.workers[1])
    assert evict(engine, b"a")["evicted"] == [b"a"] and not after.state.hits


def test_a_fence_holds_back_its_own_pool_only(driver: DurableDriver, engine: Engine) -> None:
    other = driver.engine("g", pool="q", num_host_pages=8)
    other.cache(*KEYS)
    after = restarted(engine)
    other.driver = after
    back(engine)
    back(other)
    after.resume(other.scheduler)
    with pytest.raises(NotResumed):
        evict(other, b"a")
    after.disconnect(engine.scheduler)
    after.gone(engine.scheduler)
    assert evict(other, b"a")["evicted"] == [b"a"]


def test_an_engine_without_workers_needs_no_fence(driver: DurableDriver) -> None:
    driver.engine("f", num_host_pages=8)
    head = driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="p", engine="lone")
    after = driver.restarted()
    after.disconnect(head)
    after.gone(head)
    assert not after.state.fences and not after.state.hits
    assert all(incarnation.engine != "lone" for incarnation in after.state.incarnations.values())


# -- what must wait ------------------------------------------------------------------------------


def evict(engine: Engine, *keys: bytes, **more: Any) -> dict[str, Any]:
    return engine.driver.ask(engine.scheduler, "evict", keys=list(keys), **more)


def test_what_frees_sealed_pages_waits_for_the_last_survivor_and_changes_nothing_before(engine: Engine) -> None:
    after = restarted(engine)
    after.resume(engine.scheduler)
    after.resume(engine.workers[0])
    pid = after.state.sessions[engine.workers[1]].peer.pid
    before = durable_view(after.state)
    for op, arguments in (("evict", {"keys": [b"nobody", b"a"]}), ("clear", {})):
        with pytest.raises(NotResumed, match=rf"until the processes \[{pid}\]") as caught:
            after.ask(engine.scheduler, op, **arguments)
        assert caught.value.retryable and caught.value.ids == {"pids": [pid]}
    assert evict(engine, b"nobody")["evicted"] == []
    assert durable_view(after.state)["pools"] == before["pools"]
    asked = after.send(engine.scheduler, "clear", wait_s=5.0)
    assert after.waits(engine.scheduler, asked)
    after.resume(engine.workers[1])
    assert after.result(engine.scheduler, asked)["freed"] == 4
    after.tick(0.1)
    assert after.table().counts[PageState.SEALED] == 0


def test_a_wait_for_the_survivors_ends_with_the_refusal(engine: Engine) -> None:
    after = restarted(engine)
    after.resume(engine.scheduler)
    asked = after.send(engine.scheduler, "evict", keys=[b"a"], wait_s=5.0)
    after.tick(6.0)
    with pytest.raises(NotResumed):
        after.result(engine.scheduler, asked)


@pytest.mark.parametrize(
    "word",
    [
        7, {}, {"below": 1}, {"below": -1, "hits": []}, {"below": ALL, "hits": []}, {"below": 9, "hits": 3},
        {"below": 9, "hits": [[1, 2]]}, {"below": 9, "hits": [["x", [1], [1]]]}, {"below": 9, "hits": [[77, [1], [1]]]},
        {"below": 9, "hits": [[("mark", 9), [1], [1]]]}, {"below": 9, "hits": [[("mark", 0), [1], [1]]]},
        {"below": 9, "hits": [[("mark", 1), [], []]]}, {"below": 9, "hits": [[("mark", 1), [1, 1], [1, 1]]]},
        {"below": 9, "hits": [[("mark", 1), [1, 2], [1]]]}, {"below": 9, "hits": [[("mark", 1), [1], [-1]]]},
        {"below": 9, "hits": [[("mark", 1), [1], [1]], [("mark", 1), [2], [1]]]},
    ],
)  # fmt: skip
def test_a_word_that_makes_no_sense_is_refused(engine: Engine, word: Any) -> None:
    session = engine.driver.state.sessions[engine.scheduler]

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return away_hit(session.mark, value[1])
        if isinstance(value, list):
            return [filled(item) for item in value]
        return {name: filled(item) for name, item in value.items()} if isinstance(value, dict) else value

    with pytest.raises(ProtocolError):
        away.read(filled(word), session)


def test_a_word_that_makes_sense_is_read(engine: Engine) -> None:
    session = engine.driver.state.sessions[engine.scheduler]
    held = claim(engine, 2, b"a")
    assert away.read(None, session) is None
    word = {"below": 3, "hits": [[held.hit, held.pages, held.generations]]}
    assert away.read(word, session) == Claims(3, (held,))
    with pytest.raises(ProtocolError, match="is none that session"):
        away.read(word, engine.driver.state.sessions[engine.workers[0]])
