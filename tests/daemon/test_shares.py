"""Fair shares: whose pages an eviction takes, what an engine may hold, and what is counted of both."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sharedmirror.errors import NoPages, ProtocolError
from sharedmirror.types import Role
from sharedmirrord.core.claims import Claim
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.report import report
from tests.daemon.core_driver import Driver, Engine
from tests.daemon.durable_driver import DurableDriver
from tests.daemon.table_problems import problems

A, B, C = 1, 2, 3


def claim(table: PageTable, owner: int, *attached: int) -> Claim:
    return Claim(owner, frozenset(attached), (table.pages - 1) // len(attached))


def fill(table: PageTable, who: Claim, *keys: bytes, parent: bytes | None = None) -> list[bytes]:
    """Grant and seal a chain of keys for an owner; returns the keys evicted for it."""
    granted = table.grant(len(keys), claim=who)
    assert granted is not None
    for page, key in zip(granted[0], keys, strict=True):
        table.seal([(page, key, parent)])
        parent = key
    assert problems(table) == []
    return granted[2]


def singles(table: PageTable, who: Claim, *keys: bytes) -> list[bytes]:
    """As ``fill``, with keys that do not hang together."""
    return [gone for key in keys for gone in fill(table, who, key)]


def evicted(table: PageTable, wanted: int, who: Claim) -> list[bytes] | None:
    granted = table.grant(wanted, claim=who)
    assert problems(table) == []
    return None if granted is None else granted[2]


# -- whose pages go ------------------------------------------------------------------------------


def test_an_engine_over_its_share_loses_its_own_least_recent_leaves() -> None:
    table = PageTable(9)
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    singles(table, b, b"b1", b"b2", b"b3", b"b4")
    assert singles(table, a, *(b"a%d" % n for n in range(10))) == [b"a%d" % n for n in range(6)]
    assert table.owned == {A: 4, B: 4}


def test_an_engine_within_its_share_takes_from_the_one_that_is_over() -> None:
    table = PageTable(9)
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    singles(table, b, b"b1", b"b2")
    singles(table, a, *(b"a%d" % n for n in range(6)))
    assert evicted(table, 2, b) == [b"a0", b"a1"]
    assert table.owned == {A: 4, B: 4}


def test_giving_ends_at_the_share() -> None:
    """An engine that came down to its share loses no more while another one is over."""
    table = PageTable(10)
    a, b, c = (claim(table, owner, A, B, C) for owner in (A, B, C))
    singles(table, a, *(b"a%d" % n for n in range(4)))
    singles(table, b, *(b"b%d" % n for n in range(5)))
    assert evicted(table, 3, c) == [b"a0", b"b0", b"b1"]
    assert table.owned == {A: 3, B: 3, C: 3}


def test_pages_of_engines_that_left_go_with_those_of_the_one_that_is_over() -> None:
    table = PageTable(9)
    singles(table, claim(table, C, C), b"gone1")
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    singles(table, b, b"b1", b"b2")
    singles(table, a, b"a1", b"a2", b"a3", b"a4")
    singles(table, claim(table, C, C), b"gone2")
    assert evicted(table, 3, a) == [b"gone1", b"a1", b"a2"]


def test_without_an_engine_over_its_share_the_least_recent_goes() -> None:
    table = PageTable(9)
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    singles(table, b, b"b1")
    singles(table, Claim(), *(b"old%d" % n for n in range(6)))
    singles(table, a, b"a1")
    assert evicted(table, 2, a) == [b"b1", b"old0"]


def test_an_engine_over_its_share_gets_nothing_of_the_others() -> None:
    table = PageTable(9)
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    singles(table, b, b"b1", b"b2", b"b3")
    fill(table, a, b"a1", b"a2", b"a3", b"a4", b"a5")
    table.pin([table.index[b"a5"]])  # holds the whole chain
    before = [bytes(table.states), dict(table.index), dict(table.owned), list(table._children)]
    assert evicted(table, 1, a) is None
    assert [bytes(table.states), dict(table.index), dict(table.owned), list(table._children)] == before


def test_an_engine_within_its_share_gets_the_rest_from_all() -> None:
    table = PageTable(9)
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    singles(table, b, b"b1", b"b2", b"b3")
    fill(table, a, b"a1", b"a2", b"a3", b"a4", b"a5")
    table.pin([table.index[b"a5"]])
    assert evicted(table, 1, b) == [b"b1"]


def test_an_engine_alone_is_served_as_if_there_were_no_shares() -> None:
    with_claim, without = PageTable(9), PageTable(9)
    singles(without, Claim(), *(b"%d" % n for n in range(8)))
    singles(with_claim, claim(with_claim, B, B), *(b"%d" % n for n in range(4)))
    singles(with_claim, claim(with_claim, A, A), *(b"%d" % n for n in range(4, 8)))
    assert evicted(with_claim, 6, claim(with_claim, A, A)) == evicted(without, 6, Claim())


def test_a_parent_of_another_owner_is_due_when_its_last_child_went() -> None:
    table = PageTable(9)
    singles(table, Claim(), b"root")
    a, b = claim(table, A, A, B), claim(table, B, A, B)
    fill(table, a, b"a1", b"a2", parent=b"root")
    singles(table, a, b"a3", b"a4", b"a5", b"a6")
    assert evicted(table, 4, a) == [b"a2", b"a1", b"root"]
    assert table.owned == {A: 8}
    assert evicted(table, 1, b) == [b"a3"]


def test_a_page_evicted_by_name_and_granted_to_another_is_in_one_order() -> None:
    table = PageTable(3)
    for number in range(400):
        owner = (A, B)[number % 2]
        fill(table, claim(table, owner, A, B), b"%d" % number)
        table.evict(table.index[b"%d" % number])
    assert sum(map(len, table._heaps.values())) < 200, "dead entries are tidied away"


def oracle(
    sealed: dict[int, tuple[int, int, int | None]], who: Claim, owned: Counter[int], free: int, wanted: int
) -> list[int] | None:
    """``sealed``: page to (owner, used, parent). Look at all pages again for each victim."""
    owned = owned.copy()
    owned[who.owner] += wanted
    left, victims, everybody = dict(sealed), list[int](), False
    while len(victims) < wanted - free:
        over = set() if everybody else {owner for owner in who.attached if owned[owner] > who.share}
        parents = {parent for _, _, parent in left.values()}
        due = [
            (used, page)
            for page, (owner, used, _) in left.items()
            if page not in parents and (not over or owner in over or owner not in who.attached)
        ]
        if not due and (not over or who.owner in over):
            return None
        everybody |= not due or not over
        if due:
            victims.append(min(due)[1])
            owned[left.pop(victims[-1])[0]] -= 1
    return victims


@pytest.mark.parametrize("seed", range(60))
def test_victims_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    table = PageTable(rng.randrange(3, 16))
    sealed: dict[int, tuple[int, int, int | None]] = {}
    owned: Counter[int] = Counter()
    leased: list[tuple[int, int]] = []
    for number in range(120):
        attached = frozenset(rng.sample([A, B, C], rng.randrange(1, 4)))
        who = Claim(rng.choice(sorted(attached)), attached, (table.pages - 1) // len(attached))
        wanted = rng.randrange(1, 4)
        free = table.pages - 1 - sum(owned.values())
        expected = oracle(sealed, who, owned, free, wanted)
        granted = table.grant(wanted, claim=who)
        assert (granted is None) == (expected is None)
        if granted is not None and expected is not None:
            for page in expected:
                owned[sealed.pop(page)[0]] -= 1
            assert len(granted[2]) == len(expected) and not sealed.keys() & granted[0]
            owned[who.owner] += wanted
            leased += [(page, who.owner) for page in granted[0]]
        while leased and rng.random() < 0.8:
            page, owner = leased.pop(rng.randrange(len(leased)))
            if rng.random() < 0.2:
                table.discard(page)
                owned[owner] -= 1
                continue
            parent = rng.choice([None, *sealed]) if rng.random() < 0.7 else None
            table.seal([(page, b"%d" % (number * 100 + page), None if parent is None else table.keys[parent])])
            sealed[page] = owner, table._tick, parent
        if sealed and rng.random() < 0.3:
            page = rng.choice(sorted(sealed))
            table.use([page])
            at: int | None = page
            while at is not None and at in sealed:
                sealed[at] = sealed[at][0], table._tick, sealed[at][2]
                at = sealed[at][2]
        leaves = sealed.keys() - {parent for _, _, parent in sealed.values()}
        if leaves and rng.random() < 0.2:
            page = rng.choice(sorted(leaves))
            table.evict(page)
            owned[sealed.pop(page)[0]] -= 1
        assert problems(table) == []
        assert Counter(table.owned) == +owned


# -- what an engine may hold ---------------------------------------------------------------------


@pytest.fixture
def driver() -> Driver:
    return DurableDriver()


def engines(driver: Driver) -> dict[str, dict[str, int]]:
    shown: dict[str, dict[str, int]] = report(driver.state, driver.now)["pools"][0]["engines"]
    return shown


def pair(driver: Driver, max_held: int | None = None) -> tuple[Engine, Engine]:
    return driver.engine("e", num_host_pages=9, max_held=max_held), driver.engine("f", num_host_pages=9)


def test_an_engine_alone_has_no_bound(driver: Driver) -> None:
    engine = driver.engine("e", num_host_pages=5)
    engine.cache(b"a", b"b", b"c", b"d")
    assert [len(engine.lookup(b"a", b"b", b"c", b"d")["pages"]) for _ in range(3)] == [4, 4, 4]
    assert engines(driver) == {"e": {"owned": 4, "held": 12, "max_held": 4, "share": 4}}


def test_the_bound_is_the_fair_share_and_follows_who_is_attached(driver: Driver) -> None:
    e, f = pair(driver)
    with pytest.raises(
        NoPages, match=r"engine 'e' holds 0 pages of pool 'p' .* may hold 4 \(its fair share of 2"
    ) as no:
        e.lease(5)
    assert (no.value.retryable, no.value.ids) == (True, {"asked": 5, "held": 0, "max_held": 4})
    waits = driver.send(e.scheduler, "lease", n=5, wait_s=9.0)
    for session in (*f.workers, f.scheduler):
        driver.kill(session)
    assert len(driver.result(e.scheduler, waits)["pages"]) == 5
    assert engines(driver) == {"e": {"owned": 5, "held": 5, "max_held": 8, "share": 8}}


@pytest.mark.parametrize("mode", ["prefix", "each"])
def test_lookups_beyond_the_bound_give_shorter_hits(driver: Driver, mode: str) -> None:
    e, f = pair(driver, max_held=3)
    pages = f.cache(b"a", b"b", b"c", b"d")
    first = e.lookup(b"a")
    answer = e.lookup(b"x", b"a", b"b", b"c", b"d", mode=mode) if mode == "each" else e.lookup(b"a", b"b", b"c", b"d")
    if mode == "prefix":
        assert (answer["pages"], answer["states"]) == (pages[:2], "hhmm")
    else:
        assert (answer["pages"], answer["states"]) == ([-1, *pages[:2], -1, -1], "mhhmm")
    assert e.lookup(b"c", mode=mode)["states"] == "m"
    assert e.lookup(b"zz", mode=mode)["states"] == "m"
    e.release(first["hit"])
    assert e.lookup(b"c", mode=mode)["states"] == "h"
    assert f.lookup(b"a", b"b", b"c", b"d")["states"] == "hhhh"


def test_a_shortened_lookup_does_not_wait_for_what_is_being_written(driver: Driver) -> None:
    e, f = pair(driver, max_held=1)
    f.cache(b"a", b"b")
    driver.ask(f.scheduler, "reserve", keys=[b"c"])
    answer = driver.ask(e.scheduler, "lookup", keys=[b"a", b"b", b"c"], wait_s=9.0)
    assert answer["states"] == "hmm"


def test_leases_beyond_the_bound_wait_until_something_is_let_go(driver: Driver) -> None:
    e, f = pair(driver, max_held=3)
    f.cache(b"a")
    hit, lease = e.lookup(b"a"), e.lease(2)
    with pytest.raises(NoPages, match=r"holds 3 pages .* may hold 3 \(max_held\). Release hits, commit or abort"):
        driver.ask(e.scheduler, "reserve", keys=[b"r"])
    assert len(f.lease(2)["pages"]) == 2, "the other engine goes on"
    waits = driver.send(e.scheduler, "reserve", keys=[b"r"], wait_s=9.0)
    driver.ask(e.workers[0], "release", hits=[hit["hit"]])
    e.drained(0, hits=[hit["hit"]])
    assert driver.waits(e.scheduler, waits), "a rank may still be loading"
    e.drained(1, hits=[hit["hit"]])
    assert driver.result(e.scheduler, waits)["keys"] == [b"r"]
    driver.ask(e.scheduler, "seal", lease=lease["lease"], keys=[b"x", b"y"])
    e.commit(lease["lease"])
    assert engines(driver)["e"] | {"owned": 3, "held": 1} == engines(driver)["e"]


def test_another_scheduler_may_raise_the_bound_and_a_restart_keeps_it(driver: Driver) -> None:
    e, f = pair(driver, max_held=1)
    f.cache(b"a", b"b", b"c")
    waits = driver.send(e.scheduler, "lease", n=2, wait_s=9.0)
    head = driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="p", engine="e")
    assert driver.waits(e.scheduler, waits)
    head = driver.hello(Role.SCHEDULER)
    driver.ask(head, "attach", pool="p", engine="e", max_held=6)
    assert len(driver.result(e.scheduler, waits)["pages"]) == 2
    e.lookup(b"a", b"b", b"c")
    assert isinstance(driver, DurableDriver)
    assert engines(driver) == {
        "e": {"owned": 2, "held": 5, "max_held": 6, "share": 4},
        "f": {"owned": 3, "held": 0, "max_held": 4, "share": 4},
    }
    after = driver.restarted()
    assert engines(after)["e"] == engines(driver)["e"]
    assert engines(after)["f"]["owned"] == 0, "sealed pages belong to nobody after a restart"
    assert after.table().owned == {0: 3, after.pool().owners["e"]: 2}


@pytest.mark.parametrize("max_held", [0, -1, True, "3", 1.5])
def test_a_bound_that_cannot_be_is_refused_before_anything_changes(driver: Driver, max_held: object) -> None:
    driver.engine("e")
    with pytest.raises(ProtocolError, match="max_held must be an integer from 1"):
        driver.ask(driver.hello(Role.SCHEDULER), "attach", pool="p", engine="new", max_held=max_held)
    assert [i.engine for i in driver.state.incarnations.values()] == ["e"]


# -- owners --------------------------------------------------------------------------------------


def test_the_error_of_an_engine_over_its_share_names_the_numbers(driver: Driver) -> None:
    e, f = pair(driver, max_held=8)
    f.cache(b"a", b"b", b"c")
    e.lease(5)
    with pytest.raises(NoPages, match="over its fair share.* it has 5 pages, and its share of 2 engines is 4"):
        e.lease(1)
    assert f.lookup(b"a", b"b", b"c")["states"] == "hhh"


def test_an_engines_next_launch_owns_what_the_engine_had(driver: Driver) -> None:
    e, f = pair(driver)
    e.cache(b"a", b"b")
    for session in (*e.workers, e.scheduler):
        driver.kill(session)
    assert engines(driver)["e"] == {"owned": 2, "held": 0, "max_held": 0, "share": 0}
    driver.engine("e", num_host_pages=9)
    assert engines(driver)["e"] == {"owned": 2, "held": 0, "max_held": 4, "share": 4}


def test_names_without_sessions_and_pages_are_forgotten(driver: Driver) -> None:
    driver.engine("e")
    for number in range(5):
        other = driver.engine(f"other{number}")
        page = other.cache(b"k")
        driver.ask(other.scheduler, "evict", keys=[b"k"])
        for session in (*other.workers, other.scheduler):
            driver.kill(session)
        assert page
    assert driver.pool().owners == {"e": 1}
    assert set(driver.table()._heaps) <= {0, 1}
