"""Recovery trusts nothing that is damaged: it quarantines little damage and refuses much, or contradictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sharedmirrord.core import machine
from sharedmirrord.core.durable import SetSlots, Slot
from sharedmirrord.core.model import State
from sharedmirrord.core.recover import DamagedRecords, recover
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_driver import Engine
from tests.daemon.durable_driver import DurableDriver
from tests.daemon.durable_view import state_problems
from tests.daemon.store_memory import ARENA_BYTES


@pytest.fixture
def driver() -> DurableDriver:
    return DurableDriver()


@pytest.fixture
def engine(driver: DurableDriver) -> Engine:
    return driver.engine("e", num_host_pages=8)


Damage = Callable[[list["Slot | None"]], Any]


def with_slots(driver: DurableDriver, damage: Damage) -> State:
    """Recover from a page table that was changed."""
    slots = list(driver.store.slots(driver.pool().id))
    damage(slots)
    return recover(driver.store.records(), lambda pool: iter(slots), ARENA_BYTES, 5.0)


def lose(*pages: int) -> Damage:
    def damage(slots: list[Slot | None]) -> None:
        for page in pages:
            slots[page] = None

    return damage


def test_a_damaged_slot_is_quarantined_above_all_generations(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=300)
    engine.cache(b"a", b"b", b"c")
    mark = driver.pool().generation_high
    state = with_slots(driver, lose(2, 250, 7))
    table = state.pools[driver.pool().id].table
    assert table is not None
    assert [PageState(table.states[page]) for page in (2, 250, 7)] == [PageState.QUARANTINED] * 3
    assert sorted(table.generations[page] for page in (2, 250, 7)) == [mark, mark + 1, mark + 2]
    assert table.index == {b"a": 1, b"c": 3}
    assert state_problems(state) == []
    assert table.grant(295) is not None
    assert table.grant(1) is not None  # the last two are sealed pages
    assert table.grant(2) is None


def test_the_null_page_needs_no_slot(driver: DurableDriver) -> None:
    driver.engine("e", num_host_pages=6)
    state = with_slots(driver, lose(0))
    table = state.pools[driver.pool().id].table
    assert table is not None and table.counts == [5, 0, 0, 0, 1]


@pytest.mark.parametrize(("lost", "refused"), [(2, False), (3, True)])
def test_more_than_one_in_a_hundred_damaged_slots_are_refused(driver: DurableDriver, lost: int, refused: bool) -> None:
    driver.engine("e", num_host_pages=200)
    pages = list(range(10, 10 + lost))
    if refused:
        with pytest.raises(DamagedRecords, match=f"{lost} of 200 page records of pool 'p' are damaged"):
            with_slots(driver, lose(*pages))
    else:
        assert state_problems(with_slots(driver, lose(*pages))) == []


def test_a_damaged_page_is_nobodys_again(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=150)
    first = engine.lease(2)
    page = first["pages"][0]
    driver.ask(engine.scheduler, "seal", lease=first["lease"], keys=[b"k"], pages=[page])
    engine.commit(first["lease"], [page])
    driver.ask(engine.scheduler, "evict", keys=[b"k"])
    second = engine.lease(148)
    assert page in second["pages"]
    assert {first["lease"], second["lease"]} == driver.state.leases.keys()
    state = with_slots(driver, lose(page))
    table = state.pools[driver.pool().id].table
    assert table is not None
    # The record of the first lease still names the page; only the slot could tell which lease it belongs to.
    assert table.states[page] == PageState.QUARANTINED
    held = [lease.pages[at] for lease in state.leases.values() for at in range(150) if lease.open >> at & 1]
    assert len(held) == 148 and page not in held
    assert state_problems(state) == []


def test_a_damaged_page_that_is_pinned_does_not_refuse_the_rest(driver: DurableDriver) -> None:
    engine = driver.engine("e", num_host_pages=150)
    pages = engine.cache(b"a", b"b", b"c")
    hit = engine.lookup(b"a", b"b", b"c")["hit"]
    state = with_slots(driver, lose(pages[1]))
    table = state.pools[driver.pool().id].table
    assert table is not None
    assert table.states[pages[1]] == PageState.QUARANTINED
    assert set(table.pins) == {pages[0], pages[2]}
    for worker in engine.workers:
        machine.apply(state, machine.Resume(worker, [], []), 6.0)
    machine.apply(state, machine.Resume(engine.scheduler, [], []), 6.0)
    for worker in engine.workers:
        machine.apply(state, machine.Request(worker, 50, "drained", {"leases": [], "hits": [hit]}), 6.0)
    assert table.pins == {} and state_problems(state) == []


Change = Callable[[dict[tuple[str, int], Any]], Any]


def drop(kind: str) -> Change:
    def change(records: dict[tuple[str, int], Any]) -> None:
        for key in [key for key in records if key[0] == kind]:
            del records[key]

    return change


def all_become(kind: str, value: Any) -> Change:
    def change(records: dict[tuple[str, int], Any]) -> None:
        records.update({key: value for key in records if key[0] == kind})

    return change


def edit(kind: str, /, **values: Any) -> Change:
    def change(records: dict[tuple[str, int], Any]) -> None:
        for key in records:
            if key[0] == kind:
                records[key] = records[key] | values

    return change


def twin_lease(records: dict[tuple[str, int], Any]) -> None:
    ((_, number), value) = next((key, value) for key, value in records.items() if key[0] == "lease")
    records["lease", number + 1] = value


def overlapping_pool(records: dict[tuple[str, int], Any]) -> None:
    ((_, number), value) = next((key, value) for key, value in records.items() if key[0] == "pool")
    records["pool", number + 1000] = value | {"name": "twin"}
    records["marks", number + 1000] = [1, 0]


CONTRADICTIONS: dict[str, Change] = {
    "no incarnations": drop("incarnation"),
    "no pools": drop("pool"),
    "no marks": drop("marks"),
    "no counter": drop("counter"),
    "counter below the ids": all_become("counter", 2),
    "counter of text": all_become("counter", "many"),
    "two leases of one page": twin_lease,
    "two pools in one place": overlapping_pool,
    "a pool of another size": edit("pool", num_host_pages=9),
    "a pool of unknown kind": edit("pool", kind="elastic"),
    "a pool that is static": edit("pool", kind="static"),
    "a pool of no size": edit("pool", num_host_pages=None),
    "a pool of monstrous size": edit("pool", num_host_pages=1 << 40),
    "a region beyond the arena": edit("pool", regions=[[99, [0], [[0, ARENA_BYTES, 4096]], 4096]]),
    "a region of negative size": edit("pool", regions=[[99, [0], [[0, 8192, -4096]], -4096]]),
    "a lease of no page list": edit("lease", pages=None),
    "a lease of a page beyond": edit("lease", pages=[99, 100]),
    "a lease of a negative page": edit("lease", pages=[-1, 3]),
    "a lease of the null page": edit("lease", pages=[0, 3]),
    "a lease of a page twice": edit("lease", pages=[3, 3]),
    "a lease with too few generations": edit("lease", generations=[9]),
    "a lease with odd generations": edit("lease", generations=["a", "b"]),
    "a lease with generations beyond the mark": edit("lease", generations=[1 << 40, 1 << 40]),
    "a lease with open pages that it has not": edit("lease", open=b"\xff"),
    "a lease of another pool": edit("lease", pool=77),
    "a lease of another engine": edit("lease", incarnation=77),
    "a lease with odd writers": edit("lease", writers=[["x", "y"]]),
    "a lease without writers": edit("lease", writers=[]),
    "commits that are no bytes": all_become("commit", 3),
    "a hit on no page": edit("hit", pages=[]),
    "a hit on a page beyond": edit("hit", pages=[99]),
    "a hit on the null page": edit("hit", pages=[0]),
    "a hit on a negative page": edit("hit", pages=[-1]),
    "a hit on a leased page": lambda records: edit("hit", pages=[_leased(records)])(records),
    "a hit of another pool": edit("hit", pool=77),
    "a hit of another engine": edit("hit", incarnation=77),
    "a session of no pool": edit("session", pool=77),
    "a session of no engine": edit("session", incarnation=None),
    "a session of odd rank": edit("session", rank=9),
    "a session of unknown role": edit("session", role="boss"),
    "a session without a token": edit("session", token_hash=None),
    "an answer that is none": all_become("result", []),
    "an answer without an id": all_become("result", {"id": "x"}),
}


def _leased(records: dict[tuple[str, int], Any]) -> int:
    page: int = next(value["pages"][0] for key, value in records.items() if key[0] == "lease")
    return page


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_records_that_contradict_each_other_are_refused(driver: DurableDriver, engine: Engine, name: str) -> None:
    engine.cache(b"a", b"b")
    engine.lookup(b"a")
    lease = engine.lease(2)
    engine.commit(lease["lease"], ranks=[0])
    records = driver.store.records()
    CONTRADICTIONS[name](records)
    with pytest.raises(DamagedRecords):
        recover(records, driver.store.slots, ARENA_BYTES, 5.0)


def test_a_table_of_another_length_is_refused(driver: DurableDriver, engine: Engine) -> None:
    with pytest.raises(DamagedRecords, match="has 8 pages and a table of 7"):
        with_slots(driver, lambda slots: slots.pop())
    with pytest.raises(DamagedRecords, match="has 8 pages and a table of 9"):
        with_slots(driver, lambda slots: slots.append(slots[-1]))


def test_two_pages_with_one_key_are_refused(driver: DurableDriver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    table = driver.table()
    driver.store.commit([SetSlots(driver.pool().id, (table.slot(1, 1)._replace(key=b"b"),))])
    with pytest.raises(DamagedRecords):
        driver.recovered()
