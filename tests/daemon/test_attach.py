"""Who may come, what they must bring: forming pools, ranks that come back, launches, the arena's room."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import (
    ArenaFull,
    DaemonUnavailable,
    EngineBusy,
    PoolMismatch,
    PoolNotFound,
    ProtocolError,
    RankAttached,
    RankError,
    RanksMissing,
    SharedMirrorError,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.types import Plane, Role
from sharedmirrord.core import machine
from sharedmirrord.core.model import SessionState
from tests.daemon.core_driver import MIB, Driver, attach_arguments


@pytest.fixture
def driver() -> Driver:
    return Driver()


def join(driver: Driver, **changes: Any) -> dict[str, Any]:
    """Attach one more worker, which must be answered at once."""
    return driver.ask(driver.hello(), "attach", **attach_arguments(**changes))


# -- forming a pool ------------------------------------------------------------------------------


def test_a_pool_is_ready_when_every_rank_has_come(driver: Driver) -> None:
    first, second = driver.hello(), driver.hello()
    asked = driver.attach(first, rank=0, wait_s=5.0)
    assert driver.waits(first, asked)
    assert driver.records.values["pool"] == {}
    answer = driver.ask(second, "attach", **attach_arguments(rank=1, wait_s=5.0))
    assert answer["pool"] == driver.result(first, asked)["pool"]
    assert answer["num_host_pages"] == 6
    assert answer["session"] == second
    assert driver.pool().ready


def test_the_error_names_the_missing_ranks(driver: Driver) -> None:
    with pytest.raises(RanksMissing, match=r"waits for ranks \[0, 2\] of 3") as caught:
        join(driver, rank=1, world_size=3)
    assert caught.value.ids["ranks"] == [0, 2]
    assert driver.state.pools == driver.state.incarnations == {}
    assert driver.state.space.free_bytes == 64 * MIB


def test_waiting_for_ranks_ends_with_its_time(driver: Driver) -> None:
    first = driver.hello()
    asked = driver.attach(first, wait_s=5.0)
    driver.tick(4.9)
    assert driver.waits(first, asked)
    driver.tick(0.1)
    with pytest.raises(RanksMissing):
        driver.result(first, asked)
    assert driver.state.pools == {}
    assert len(driver.engine().replies) == 2, "the name can be used afterwards"


def test_a_rank_that_leaves_while_waiting_takes_its_word_back(driver: Driver) -> None:
    first, second = driver.hello(), driver.hello()
    driver.attach(first, rank=0, wait_s=5.0)
    driver.disconnect(first)
    assert driver.forgotten == [first]
    assert driver.state.pools == {}
    asked = driver.attach(second, rank=1, wait_s=5.0)
    assert driver.waits(second, asked)


def test_a_waiting_engine_does_not_keep_another_waiting_after_its_time(driver: Driver) -> None:
    """The forming pool is given up by a timeout: whoever waited for that must be tried again."""
    driver.attach(driver.hello(), engine="slow", rank=0, wait_s=5.0)
    ranks = [driver.hello(), driver.hello()]
    asked = [driver.attach(session, engine="f", rank=rank, wait_s=60.0) for rank, session in enumerate(ranks)]
    driver.tick(5.0)
    assert [driver.result(*pair)["num_host_pages"] for pair in zip(ranks, asked, strict=True)] == [6, 6]


@pytest.mark.parametrize(
    ("changes", "mine", "theirs"),
    [
        ({"page_size": 8}, "page size 4", "asks for 8"),
        ({"world_size": 3}, "world size 2", "asks for 3"),
        ({"layout": "slab"}, "layout page", "asks for slab"),
        ({"kind": "static"}, "kind leased", "asks for static"),
        ({"frames_per_page": 2}, "frames_per_page 1", "asks for 2"),
        ({"num_host_pages": 7}, "num_host_pages 6", "asks for 7"),
    ],
)
@pytest.mark.parametrize("ready", [True, False])
def test_what_differs_is_named_with_both_values(
    driver: Driver, ready: bool, changes: dict[str, Any], mine: str, theirs: str
) -> None:
    if ready:
        driver.engine("e")
    else:
        driver.attach(driver.hello(), rank=0, wait_s=5.0)
    with pytest.raises(PoolMismatch) as caught:
        join(driver, engine="f" if ready else "e", rank=1, **changes)
    assert mine in caught.value.message
    assert theirs in caught.value.message


def test_another_tag_is_refused_with_both(driver: Driver) -> None:
    driver.attach(driver.hello(), rank=0, tag="old", wait_s=5.0)
    with pytest.raises(PoolMismatch, match="tag 'old', this rank says 'new'"):
        join(driver, rank=1, tag="new")


def test_a_tag_makes_another_pool_for_another_engine(driver: Driver) -> None:
    driver.engine("e", tag="1", scheduler=False)
    driver.engine("f", tag="2", scheduler=False)
    assert sorted(pool.tag for pool in driver.state.pools.values()) == ["1", "2"]
    with pytest.raises(PoolMismatch, match=r"2 pools are named 'p', with tags \['1', '2'\]"):
        driver.ask(driver.hello(Role.SCHEDULER), "attach", pool="p", engine="g")


def test_a_rank_must_bring_the_planes_it_had(driver: Driver) -> None:
    engine = driver.engine()
    driver.kill(engine.workers[1])
    other = [Plane("k", 1, 2, 2048, 4).to_wire()]
    with pytest.raises(PoolMismatch, match=r"came back with other planes.*slice_bytes=1024.*slice_bytes=2048"):
        join(driver, rank=1, planes=other)
    with pytest.raises(PoolMismatch, match="it had 1, now 2"):
        join(driver, rank=1, planes=[*other, Plane("v", 1, 2, 1024, 4).to_wire()])
    assert join(driver, rank=1)["planes"] == engine.replies[1]["planes"]


def test_equal_shards_must_have_equal_bytes(driver: Driver) -> None:
    first = driver.hello()
    asked = driver.attach(first, rank=0, planes=[["mla", 0, 1, 1024, 4]], wait_s=5.0)
    with pytest.raises(PoolMismatch, match="equal shards hold equal bytes"):
        join(driver, rank=1, planes=[["mla", 0, 1, 512, 4]])
    with pytest.raises(PoolMismatch):
        driver.result(first, asked)
    assert driver.state.pools == {}


def test_ranks_that_bring_the_same_shard_share_a_region(driver: Driver) -> None:
    planes = [[["mla", 0, 1, 1024, 4], ["k", rank, 2, 64, 4]] for rank in range(2)]
    first, second = driver.hello(), driver.hello()
    asked = driver.attach(first, rank=0, planes=planes[0], wait_s=5.0)
    two = driver.ask(second, "attach", **attach_arguments(rank=1, planes=planes[1]))
    one = driver.result(first, asked)
    shared = {tuple(map(tuple, r["extents"])) for r in one["regions"]} & {
        tuple(map(tuple, r["extents"])) for r in two["regions"]
    }
    assert len(shared) == 1
    assert len(one["regions"]) == len(two["regions"]) == 2
    assert driver.pool().bytes_per_page == 1024 + 2 * 64


def test_the_answer_says_where_each_plane_lies(driver: Driver) -> None:
    planes = [["k", 0, 1, 100, 4], ["v", 0, 1, 32, 4]]
    answer = join(driver, world_size=1, planes=planes, layout="slab")
    (region,) = answer["regions"]
    assert region["bytes"] == 2 * MIB
    assert region["extents"] == [[0, 0, 2 * MIB]]
    assert answer["planes"] == [[0, 0, 100], [0, 608, 32]]


# -- room ----------------------------------------------------------------------------------------


def test_too_small_an_arena_says_bytes_asked_and_free() -> None:
    driver = Driver(8 * MIB)
    first = driver.hello()
    asked = driver.attach(first, rank=0, num_host_pages=10_000, wait_s=5.0)
    second = driver.hello()
    with pytest.raises(ArenaFull, match=rf"10000 pages of 2048 bytes \(\d+ bytes\).*{8 * MIB} of {8 * MIB}") as caught:
        driver.ask(second, "attach", **attach_arguments(rank=1, num_host_pages=10_000))
    assert caught.value.ids["free"] == 8 * MIB
    assert caught.value.ids["asked"] > 8 * MIB
    with pytest.raises(ArenaFull):
        driver.result(first, asked)
    assert driver.state.space.free_bytes == 8 * MIB
    assert driver.state.pools == {}
    assert len(driver.engine(num_host_pages=10).replies) == 2


def test_an_open_page_count_takes_half_of_what_is_left(driver: Driver) -> None:
    answer = join(driver, world_size=1, num_host_pages=None)
    assert answer["num_host_pages"] == (32 * MIB - 2 * MIB) // 1024
    assert driver.state.space.free_bytes >= 32 * MIB
    assert join(driver, engine="f", world_size=1, num_host_pages=None)["num_host_pages"] == answer["num_host_pages"]


def test_an_arena_without_room_for_one_page_is_full() -> None:
    with pytest.raises(ArenaFull, match="2 pages"):
        join(Driver(2 * MIB), world_size=1, num_host_pages=None)


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, 65536)])
def test_a_rank_must_fit_its_world(driver: Driver, rank: int, world_size: int) -> None:
    with pytest.raises(RankError):
        join(driver, rank=rank, world_size=world_size, planes=[["k", 0, 1, 64, 4]])


@pytest.mark.parametrize("kind", ["leased", "static"])
def test_a_living_rank_is_not_replaced(driver: Driver, kind: str) -> None:
    engine = driver.engine(kind=kind, scheduler=False)
    pid = driver.state.sessions[engine.workers[1]].peer.pid
    with pytest.raises(RankAttached, match=f"rank 1 .* attached by the living process {pid}") as caught:
        join(driver, rank=1, kind=kind)
    assert caught.value.ids == {"rank": 1, "pid": pid}


def test_a_rank_that_waits_is_attached_twice_as_well(driver: Driver) -> None:
    driver.attach(driver.hello(), rank=0, wait_s=5.0)
    with pytest.raises(RankAttached):
        join(driver, rank=0)


@pytest.mark.parametrize("kind", ["leased", "static"])
def test_a_lost_rank_is_waited_for(driver: Driver, kind: str) -> None:
    engine = driver.engine(kind=kind, scheduler=False)
    old, new = engine.workers[1], driver.hello()
    driver.disconnect(old)
    with pytest.raises(EngineBusy, match="still held by process") as caught:
        join(driver, rank=1, kind=kind)
    assert caught.value.ids["pids"] == [driver.state.sessions[old].peer.pid]
    asked = driver.attach(new, rank=1, kind=kind, wait_s=5.0)
    assert driver.waits(new, asked)
    driver.gone(old)
    assert driver.result(new, asked)["session"] == new


def test_a_leased_pool_admits_the_successor_of_an_ended_process(driver: Driver) -> None:
    engine = driver.engine()
    driver.disconnect(engine.workers[1])
    driver.died(engine.workers[1])
    assert join(driver, rank=1)["session"] != engine.workers[1]
    assert driver.state.sessions[engine.workers[1]].state is SessionState.DEAD


def test_a_static_pool_waits_for_the_proof(driver: Driver) -> None:
    engine = driver.engine(kind="static", scheduler=False)
    old, new = engine.workers[1], driver.hello()
    driver.disconnect(old)
    driver.died(old, missing=("lock",), holders=(4242,))
    with pytest.raises(EngineBusy, match=r"lock; may be held by \[4242\]") as caught:
        join(driver, rank=1, kind="static")
    assert 4242 in caught.value.ids["pids"]
    asked = driver.attach(new, rank=1, kind="static", wait_s=5.0)
    driver.gone(old)
    assert driver.result(new, asked)["session"] == new


def test_a_forerunner_that_was_killed_a_moment_ago_may_still_look_alive(driver: Driver) -> None:
    engine = driver.engine()
    old, new = engine.workers[1], driver.hello()
    asked = driver.attach(new, rank=1, wait_s=30.0)
    assert driver.waits(new, asked)
    driver.kill(old)
    assert driver.result(new, asked)["session"] == new


def test_the_grace_for_a_living_forerunner_is_short(driver: Driver) -> None:
    driver.engine()
    new = driver.hello()
    asked = driver.attach(new, rank=1, wait_s=30.0)
    driver.tick(1.0)
    with pytest.raises(RankAttached):
        driver.result(new, asked)


def test_the_wait_for_a_proof_is_as_long_as_was_asked(driver: Driver) -> None:
    """Its forerunner looks alive at first, then its socket closes: from then on its proof is waited for."""
    engine = driver.engine()
    old, new = engine.workers[1], driver.hello()
    asked = driver.attach(new, rank=1, wait_s=30.0)
    driver.now += 0.2
    driver.disconnect(old)
    driver.tick(5.0)
    assert driver.waits(new, asked), driver.replies.get((new, asked))
    driver.gone(old)
    assert driver.result(new, asked)["session"] == new


def test_a_detached_rank_can_be_taken_at_once(driver: Driver) -> None:
    engine = driver.engine()
    driver.ask(engine.workers[1], "detach", unmapped=False)
    assert join(driver, rank=1)["session"] != engine.workers[1]


def test_the_same_connection_does_not_attach_twice(driver: Driver) -> None:
    engine = driver.engine()
    with pytest.raises(UsageError, match="attached already"):
        driver.ask(engine.workers[0], "attach", **attach_arguments(rank=0))


def test_after_a_refusal_the_connection_may_try_again(driver: Driver) -> None:
    session = driver.hello()
    with pytest.raises(RanksMissing):
        driver.ask(session, "attach", **attach_arguments(rank=0))
    assert driver.ask(session, "attach", **attach_arguments(rank=0, world_size=1))["session"] == session


# -- launches ------------------------------------------------------------------------------------


def test_a_new_launch_waits_for_all_of_the_old_one(driver: Driver) -> None:
    old = driver.engine(launch="1")
    ranks = [driver.hello(), driver.hello()]
    with pytest.raises(EngineBusy, match="alive"):
        join(driver, rank=0, launch="2")
    asked = [driver.attach(session, rank=rank, launch="2", wait_s=9.0) for rank, session in enumerate(ranks)]
    for session in [*old.workers, old.scheduler]:
        assert driver.waits(ranks[0], asked[0])
        driver.disconnect(session)
        driver.died(session)
    assert [driver.result(*pair)["session"] for pair in zip(ranks, asked, strict=True)] == ranks
    assert len({driver.state.sessions[s].incarnation for s in [*ranks, *old.workers]}) == 2


def test_a_static_launch_waits_for_the_proof_of_all(driver: Driver) -> None:
    old = driver.engine(kind="static", launch="1", scheduler=False)
    new = driver.hello()
    asked = driver.attach(new, rank=0, kind="static", launch="2", wait_s=9.0)
    for session in old.workers:
        driver.disconnect(session)
        driver.died(session)
    assert driver.waits(new, asked)
    for session in old.workers:
        assert driver.waits(new, asked)
        driver.gone(session)
    assert driver.result(new, asked)["session"] == new


def test_the_scheduler_of_a_new_launch_waits_too(driver: Driver) -> None:
    old = driver.engine(launch="1")
    head = driver.hello(Role.SCHEDULER)
    asked = driver.send(head, "attach", pool="p", engine="e", launch="2", wait_s=9.0)
    assert driver.waits(head, asked)
    for session in [*old.workers, old.scheduler]:
        driver.kill(session)
    assert driver.result(head, asked)["session"] == head


def test_workers_follow_a_scheduler_that_named_no_launch(driver: Driver) -> None:
    old = driver.engine(launch="1")
    for session in [*old.workers, old.scheduler]:
        driver.kill(session)
    head = driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="p", engine="e")
    new = driver.engine(launch="2", scheduler=False)
    assert driver.state.sessions[new.workers[0]].incarnation == driver.state.sessions[head].incarnation


def test_without_launch_ids_the_living_engine_is_joined(driver: Driver) -> None:
    engine = driver.engine()
    driver.kill(engine.workers[0])
    new = join(driver, rank=0)["session"]
    assert driver.state.sessions[new].incarnation == driver.state.sessions[engine.workers[1]].incarnation


@pytest.mark.parametrize("launch", [0, False, [], b""])
def test_a_launch_id_is_text(driver: Driver, launch: Any) -> None:
    with pytest.raises(ProtocolError, match="launch"):
        join(driver, world_size=1, launch=launch)


# -- static pools and schedulers -----------------------------------------------------------------


def test_a_static_pool_names_its_holder(driver: Driver) -> None:
    engine = driver.engine(kind="static", scheduler=False)
    pids = sorted(driver.state.sessions[session].peer.pid for session in engine.workers)
    with pytest.raises(EngineBusy, match="engine 'e' of pool 'p' is still held") as caught:
        join(driver, engine="f", rank=0, kind="static")
    assert caught.value.ids["pids"] == pids
    for session in engine.workers:
        driver.kill(session)
    assert driver.pool().holder is None
    assert join(driver, engine="f", rank=0, kind="static")["num_host_pages"] == 6


def test_a_static_pool_may_have_one_page(driver: Driver) -> None:
    assert join(driver, world_size=1, kind="static", num_host_pages=1)["num_host_pages"] == 1
    with pytest.raises(ArenaFull):
        join(driver, pool="q", world_size=1, kind="leased", num_host_pages=1)


def test_a_static_pool_has_no_scheduler(driver: Driver) -> None:
    engine = driver.engine(kind="static", scheduler=False)
    with pytest.raises(WrongPoolKind):
        driver.ask(driver.hello(Role.SCHEDULER), "attach", pool="p", engine="e")
    with pytest.raises(WrongPoolKind):
        driver.ask(engine.workers[0], "lease", n=1)
    with pytest.raises(WrongPoolKind):
        driver.ask(engine.workers[0], "lookup", keys=[b"a"])


def test_a_scheduler_waits_for_the_pool(driver: Driver) -> None:
    head = driver.hello(Role.SCHEDULER)
    with pytest.raises(PoolNotFound, match="no pool 'p' is ready"):
        driver.ask(head, "attach", pool="p", engine="e")
    asked = driver.send(head, "attach", pool="p", engine="e", wait_s=5.0)
    driver.engine(scheduler=False)
    assert driver.result(head, asked)["page_size"] == 4


def test_a_scheduler_goes_to_the_pool_of_its_own_engine(driver: Driver) -> None:
    driver.engine("e", tag="1", scheduler=False)
    driver.engine("f", tag="2")
    assert {pool.tag: len([s for s in driver.state.sessions.values() if s.pool == pool.id]) for pool in
            driver.state.pools.values()} == {"1": 2, "2": 3}  # fmt: skip


def test_an_observer_cannot_attach(driver: Driver) -> None:
    with pytest.raises(UsageError, match="observer"):
        driver.ask(driver.hello(Role.OBSERVER), "attach", **attach_arguments())


def test_nobody_attaches_before_the_memory_is_there() -> None:
    driver = Driver(ready=False)
    with pytest.raises(DaemonUnavailable, match="prefaulting"):
        join(driver, world_size=1)
    session = driver.hello()
    asked = driver.attach(session, world_size=1, wait_s=5.0)
    assert driver.waits(session, asked)
    driver.apply(machine.Ready())
    assert driver.result(session, asked)["session"] == session


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": 3}, {"tag": b"x"}, {"engine": "x" * 300}, {"launch": 7}, {"rank": "0"}, {"rank": None}, {"page_size": 0},
        {"frames_per_page": 0}, {"num_host_pages": 0}, {"num_host_pages": 1 << 33}, {"layout": "x"}, {"kind": "x"},
        {"planes": []}, {"wait_s": -1}, {"world_size": True}, {"layout": None},
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_leaves_nothing(driver: Driver, changes: dict[str, Any]) -> None:
    session = driver.hello()
    with pytest.raises(SharedMirrorError):
        driver.ask(session, "attach", **attach_arguments(**changes))
    assert driver.state.pools == driver.state.incarnations == driver.state.current == {}
    assert driver.state.sessions[session].state is SessionState.NEW
    driver.disconnect(session)
    assert driver.state.sessions == {}


# -- the end -------------------------------------------------------------------------------------


def test_a_pool_outlives_its_engines(driver: Driver) -> None:
    engine = driver.engine()
    pages = engine.cache(b"a", b"b")
    for session in [*engine.workers, engine.scheduler]:
        driver.kill(session)
    assert driver.state.sessions == driver.state.incarnations == {}
    assert driver.engine("f").lookup(b"a", b"b")["pages"] == pages


def test_detach_in_two_steps(driver: Driver) -> None:
    engine = driver.engine()
    worker = engine.workers[0]
    with pytest.raises(UsageError, match="after detach"):
        driver.ask(worker, "unmapped")
    driver.ask(worker, "detach", unmapped=False)
    assert driver.state.sessions[worker].state is SessionState.DETACHED
    driver.ask(worker, "unmapped")
    assert worker in driver.forgotten
    assert [entry.how for entry in driver.state.ended] == ["detached"]


@pytest.mark.parametrize("op", ["lease", "reserve", "lookup"])
def test_nothing_new_is_taken_after_detach(driver: Driver, op: str) -> None:
    """What a detached session took would never be given back: nothing ends it any more."""
    engine = driver.engine()
    engine.cache(b"a")
    driver.ask(engine.scheduler, "detach", unmapped=False)
    arguments: dict[str, Any] = {"n": 1} if op == "lease" else {"keys": [b"a"] if op == "lookup" else [b"b"]}
    with pytest.raises(UsageError):
        driver.ask(engine.scheduler, op, **arguments)
    driver.ask(engine.scheduler, "unmapped")
    assert driver.state.leases == driver.state.hits == {}


def test_detach_before_attach_is_refused(driver: Driver) -> None:
    with pytest.raises(UsageError, match="not attached"):
        driver.ask(driver.hello(), "detach")


def test_the_history_says_how_sessions_ended(driver: Driver) -> None:
    engine = driver.engine()
    driver.ask(engine.workers[0], "detach")
    driver.kill(engine.workers[1])
    driver.disconnect(driver.hello())
    assert [(entry.id, entry.how, entry.rank) for entry in driver.state.ended] == [
        (engine.workers[0], "detached", 0),
        (engine.workers[1], "died", 1),
    ]
