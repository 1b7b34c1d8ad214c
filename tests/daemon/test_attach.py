"""Who may come, what they must bring: forming pools, ranks that come back, launches, the arena's room."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror.errors import (
    ArenaFull,
    DaemonUnavailable,
    EngineBusy,
    MemoryFault,
    PoolMismatch,
    PoolNotFound,
    RanksMissing,
    SharedMirrorError,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.types import Plane, Role
from sharedmirrord.core import machine
from sharedmirrord.core.model import SessionState, TableRoom
from tests.daemon.core_driver import MIB, Driver, attach_arguments


@pytest.fixture
def driver() -> Driver:
    return Driver()


def join(driver: Driver, **changes: Any) -> dict[str, Any]:
    """Attach one more worker, which must be answered at once."""
    return driver.ask(driver.hello(), "attach", **attach_arguments(**changes))


def empty(driver: Driver) -> bool:
    """Whether nothing is left of an attach that failed."""
    return not (driver.state.pools or driver.state.incarnations or driver.state.current)


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
    with pytest.raises(RanksMissing, match=r"waits for ranks \[0, 2\] of 3 to attach; start") as caught:
        join(driver, rank=1, world_size=3)
    assert caught.value.ids["ranks"] == [0, 2]
    assert empty(driver)
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


def test_a_page_table_without_room_is_refused_to_all_ranks_and_fewer_pages_are_fine(driver: Driver) -> None:
    driver.state.table_room = TableRoom(free_bytes=999, slot_bytes=100)
    first = driver.hello()
    waiting = driver.attach(first, rank=0, num_host_pages=10, wait_s=5.0)
    with pytest.raises(PoolMismatch, match="num_host_pages"):
        join(driver, rank=1, num_host_pages=12)
    with pytest.raises(
        MemoryFault, match="'p' of 10 pages needs a page table of 1000 bytes .* 999 are to be had"
    ) as caught:
        join(driver, rank=1, num_host_pages=10)
    assert caught.value.ids == {"asked_bytes": 1000, "free_bytes": 999}
    with pytest.raises(MemoryFault, match="needs a page table of 1000 bytes"):
        driver.result(first, waiting)
    driver.engine(num_host_pages=9, engine="f")
    driver.state.table_room = TableRoom(free_bytes=0, slot_bytes=100)
    join(driver, pool="q", engine="g", kind="static", world_size=1)


def test_a_page_table_of_a_pool_whose_size_is_left_open(driver: Driver) -> None:
    driver.state.table_room = TableRoom(free_bytes=999, slot_bytes=100)
    with pytest.raises(MemoryFault, match=r"num_host_pages is left open.* half of the arena's rest"):
        join(driver, world_size=1, num_host_pages=None)
    with pytest.raises(ArenaFull):
        join(driver, world_size=1, num_host_pages=1 << 30)


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
    with pytest.raises(UsageError, match="a leased pool has at least 2"):
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
        {"pool": 3}, {"tag": b"x"}, {"engine": "x" * 300}, {"launch": 7}, {"rank": "0"}, {"rank": None},
        {"page_size": 0}, {"frames_per_page": 0}, {"num_host_pages": 0}, {"num_host_pages": 1 << 33},
        {"layout": "x"}, {"kind": "x"},
        {"planes": []}, {"wait_s": -1}, {"world_size": True}, {"layout": None},
        {"node": -1}, {"node": "0"}, {"node": True}, {"node": 65536},
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_leaves_nothing(driver: Driver, changes: dict[str, Any]) -> None:
    session = driver.hello()
    with pytest.raises(SharedMirrorError):
        driver.ask(session, "attach", **attach_arguments(**changes))
    assert empty(driver)
    assert driver.state.sessions[session].state is SessionState.NEW
    driver.disconnect(session)
    assert driver.state.sessions == {}


# -- the end -------------------------------------------------------------------------------------


def test_a_pool_outlives_its_engines(driver: Driver) -> None:
    engine = driver.engine()
    pages = engine.cache(b"a", b"b")
    for session in [*engine.workers, engine.scheduler]:
        driver.kill(session)
    assert not driver.state.sessions and not driver.state.incarnations
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
    assert not driver.state.leases and not driver.state.hits


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
