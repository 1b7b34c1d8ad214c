"""Invariants 1 to 6, 8 and 9 hold in every story; and a core with a planted bug is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from sharedmirrord.core import hits, leases, machine
from sharedmirrord.core.claims import Givers
from sharedmirrord.core.durable import Delete, SetSlots
from sharedmirrord.core.model import Effects, OpenHit, OpenLease, Session, State, Waiter, each_bit
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_story import CoreStory
from tests.daemon.planted import assert_found

QUICK = settings(
    deadline=None,
    database=None,
    stateful_step_count=50,
    # To explain a failure takes longer than to shrink it, and says less here.
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


CoreStory.TestCase.settings = settings(QUICK, max_examples=400)
# Only a failure, while it is made smaller, takes so long.
TestCore = pytest.mark.timeout(400)(CoreStory.TestCase)

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[str, Plant]] = {}
"""Name of the bug to what the failure must say, and what plants it."""


def bug(says: str) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        BUGS[plant.__name__] = says, plant
        return plant

    return note


@bug("invariant [14]")
def evidence_of_one_rank_is_skipped(patch: pytest.MonkeyPatch) -> None:
    def evident(lease: OpenLease) -> int:
        bits = lease.open
        for rank in list(lease.writers)[1:]:
            bits &= lease.committed.get(rank, 0) | lease.drained.get(rank, 0)
        return bits

    patch.setattr(OpenLease, "evident", evident)


@bug("invariant [146]")
def a_closed_socket_counts_as_death(patch: pytest.MonkeyPatch) -> None:
    life = machine._life

    def wrong(state: State, event: Any, now: float, out: Effects) -> None:
        life(state, machine.Gone(event.session) if isinstance(event, machine.Disconnected) else event, now, out)

    patch.setattr(machine, "_life", wrong)


@bug("invariant [14]")
def an_ended_process_counts_as_proof(patch: pytest.MonkeyPatch) -> None:
    ended = leases.writer_ended
    patch.setattr(leases, "writer_ended", lambda state, session, certain, out: ended(state, session, True, out))


@bug("invariant [14]")
def time_counts_as_evidence(patch: pytest.MonkeyPatch) -> None:
    expire = machine._expire

    def wrong(state: State, now: float, out: Effects) -> None:
        for lease in list(state.leases.values()):
            if now - lease.since > 100:
                lease.drained = dict.fromkeys(lease.writers, lease.full)
                leases.revoke(state, lease, lease.open, out)
                leases.settle(state, lease, out)
        expire(state, now, out)

    patch.setattr(machine, "_expire", wrong)


@bug("invariant [14]|no_pages")
def drained_counts_for_pages_that_nobody_revoked(patch: pytest.MonkeyPatch) -> None:
    drained = leases.drained

    def wrong(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> None:
        for number in arguments["leases"]:
            lease = state.leases.get(number)
            if lease is not None and session.rank is not None and lease.writers.get(session.rank) == session.id:
                lease.drained[session.rank] = lease.full
        drained(state, session, arguments, now, out)

    patch.setattr(leases, "drained", wrong)


@bug("invariant 3|records|problems|2: the free")
def generations_begin_again(patch: pytest.MonkeyPatch) -> None:
    discard = PageTable.discard

    def wrong(table: PageTable, page: int) -> None:
        discard(table, page)
        table.generations[page] = 0

    patch.setattr(PageTable, "discard", wrong)


@bug("invariant [16]|6: pinned|no_pages")
def pins_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PageTable,
        "_evictable",
        lambda table, page: table.states[page] == PageState.SEALED and not table._children[page],
    )


@bug("invariant [16]|no_pages")
def pins_end_with_the_release(patch: pytest.MonkeyPatch) -> None:
    settle = hits.settle

    def wrong(state: State, hit: OpenHit, out: Effects) -> bool:
        hit.awaited.clear()
        return settle(state, hit, out)

    patch.setattr(hits, "settle", wrong)


@bug("invariant [16]|no_pages")
def pins_end_with_their_holder(patch: pytest.MonkeyPatch) -> None:
    def wrong(state: State, session: Session, out: Effects) -> None:
        for number in list(session.hits):
            hit = state.hits[number]
            session.hits.discard(number)
            hit.released, hit.awaited = True, set()
            hits.settle(state, hit, out)

    patch.setattr(hits, "holder_ended", wrong)


@bug("invariant [15]")
def one_ranks_commit_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    def complete(lease: OpenLease) -> int:
        bits = 0
        for committed in lease.committed.values():
            bits |= committed
        return bits & lease.open

    patch.setattr(OpenLease, "complete", complete)


@bug("invariant 5")
def a_later_page_takes_over_the_key(patch: pytest.MonkeyPatch) -> None:
    settle = leases.settle

    def wrong(state: State, lease: OpenLease, out: Effects) -> Any:
        table = leases.table_of(state.pools[lease.pool])
        for at in each_bit(lease.complete() & lease.keyed & ~lease.revoked):
            page = table.index.get(lease.keys[at] or b"")
            if page is not None and page not in table.pins:
                table.evict(page)
                out.writes.append(SetSlots(lease.pool, (table.slot(page, lease.number),)))
        return settle(state, lease, out)

    patch.setattr(leases, "settle", wrong)


@bug("invariant 8")
def a_repeated_request_is_done_again(patch: pytest.MonkeyPatch) -> None:
    answer = machine._answer

    def wrong(state: State, session: Session, waiter: Waiter, body: dict[str, Any], out: Effects) -> None:
        answer(state, session, waiter, body, out)
        session.last_request = 0

    patch.setattr(machine, "_answer", wrong)


@bug("invariant [1589]")
def a_revoked_lease_can_be_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "_usable", lambda state, lease, pages: leases._positions(lease, pages) & lease.open)


@bug("invariant [159]|clear|never told of")
def clear_forgets_what_is_pending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hits, "revoke_keyed", lambda state, pool, out: None)


@bug("records")
def a_hit_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hits, "Put", lambda kind, number, value: Delete(kind, number))


@bug("records")
def freed_pages_are_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hits, "SetSlots", lambda pool, slots: Delete("slots", 0))


@bug("shares:|no_pages")
def everybody_gives_to_an_engine_over_its_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Givers, "may_give", lambda givers, owner: True)


@bug("shares:|no_pages")
def an_engine_goes_on_giving_when_it_is_within_its_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Givers, "took", lambda givers, owner: False)


@bug("no_pages|model: reserve|model: lease")
def an_engine_over_its_share_is_served_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Givers, "widen", lambda givers: bool(givers.over) and not givers.over.clear())


@bug("shares:|owners have|no_pages")
def a_page_stays_with_its_first_owner(patch: pytest.MonkeyPatch) -> None:
    grant = PageTable.grant

    def wrong(table: PageTable, *arguments: Any, **more: Any) -> Any:
        before = list(table._owners)
        found = grant(table, *arguments, **more)
        for page, owner in enumerate(before):
            if owner and found and page in found[0]:
                table._charge(table._owners[page], -1)
                table._charge(owner, 1)
                table._owners[page] = owner
        return found

    patch.setattr(PageTable, "grant", wrong)


@bug("invariant 5|refused|no_pages|instead of")
def what_a_released_hit_held_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    settle = hits.settle

    def wrong(state: State, hit: OpenHit, out: Effects) -> bool:
        done = settle(state, hit, out)
        if done:
            state.incarnations[hit.incarnation].held += len(hit.pages)
        return done

    patch.setattr(hits, "settle", wrong)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says, plant = BUGS[name]
    plant(monkeypatch)
    assert_found(CoreStory, QUICK, says)
