"""A thousand stories, each told by its seed; every way of a page is gone, and planted bugs are found.

``SHAREDMIRROR_SEEDS`` sets how many seeds are run, or which: ``178:179`` runs seed 178 alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sharedmirror.away import Away
from sharedmirror.errors import InstanceChanged
from sharedmirrord.core import away, changes, growth, hits, leases, machine, room, sessions
from sharedmirrord.core.durable import Put
from sharedmirrord.core.elastic import Elastic
from sharedmirrord.core.model import Effects, OpenHit, OpenLease, Pool, Session, State
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import TRANSITIONS, PageEvent, PageState
from sharedmirrord.index import IndexWriter
from tests.daemon.simulated_daemon import Daemon
from tests.daemon.simulated_processes import Violation
from tests.daemon.simulation import simulate

CHUNKS = 10
SEEDS = range(*map(int, os.environ.get("SHAREDMIRROR_SEEDS", "0:1000").split(":")))
FOUND_WITHIN = 60
"""Seeds in which a planted bug must show."""
FAULTS = (
    "crashes", "kills", "stops", "drops", "reconnects", "duplicates", "impostors", "detached", "doubts", "loads",
    "shrinks", "extensions", "away",
)  # fmt: skip

Ways = set[tuple[int, PageEvent]]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ways]:
    """The ways that pages went."""
    gone: Ways = set()
    move, move_all = PageTable._move, PageTable._move_all

    def one(self: PageTable, page: int, event: PageEvent) -> None:
        gone.add((self.states[page], event))
        move(self, page, event)

    def many(self: PageTable, pages: Sequence[int], before: PageState, event: PageEvent) -> None:
        if pages:
            gone.add((before, event))
        move_all(self, pages, before, event)

    monkeypatch.setattr(PageTable, "_move", one)
    monkeypatch.setattr(PageTable, "_move_all", many)
    yield gone


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_breaks_in_any_story(chunk: int, ways: Ways) -> None:
    counts: dict[str, int] = {}
    seeds = SEEDS[chunk::CHUNKS]
    for seed in seeds:
        world = simulate(seed)
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
    if len(seeds) >= 20:
        assert ways == TRANSITIONS.keys()
        assert all(counts.get(fault, 0) >= len(seeds) for fault in FAULTS), counts


def test_a_seed_tells_one_story() -> None:
    first, second = simulate(5), simulate(5)
    assert first.counts == second.counts
    assert first.memory == second.memory
    assert first.daemon.answers == second.daemon.answers
    assert first.daemon.storage.image() == second.daemon.storage.image()
    assert simulate(6).daemon.answers != first.daemon.answers


# Planted bugs. -----------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[str, Plant, int]] = {}
"""Name of the bug to what the violation must say, what plants it, and the seed to begin with."""


def bug(says: str, first_seed: int = 0) -> Callable[[Plant], Plant]:
    def note(plant: Plant) -> Plant:
        BUGS[plant.__name__] = says, plant, first_seed
        return plant

    return note


@bug("7: answer|4: a copy|8: request|lost its session|is lost")
def answers_go_out_before_the_writes_are_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Daemon, "replies_first", True)


@bug("4: a copy|lost its session")
def a_closed_socket_frees_the_pages(patch: pytest.MonkeyPatch) -> None:
    life = machine._life

    def wrong(state: State, event: Any, now: float, out: Effects) -> None:
        life(state, event, now, out)
        session = state.sessions.get(event.session)
        if isinstance(event, machine.Disconnected) and session is not None and session.incarnation is not None:
            leases.writer_ended(state, session, True, out)

    patch.setattr(machine, "_life", wrong)


@bug("4: a copy|lost its session")
def an_ended_process_counts_as_proof(patch: pytest.MonkeyPatch) -> None:
    ended = leases.writer_ended
    patch.setattr(leases, "writer_ended", lambda state, session, certain, out: ended(state, session, True, out))


@bug("10: |4: a copy")
def generations_begin_anew_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    restore = PageTable.restore

    def wrong(self: PageTable, page: int, state: PageState, generation: int, *rest: Any) -> None:
        restore(self, page, state, 0 if state is PageState.FREE else generation, *rest)

    patch.setattr(PageTable, "restore", wrong)


@bug("5: page|6: hits pin|6: pinned|is not queued|an exception: InvalidTransition")
def pinned_pages_are_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PageTable, "_evictable", lambda self, page: self.states[page] == PageState.SEALED and not self._children[page]
    )
    victims = PageTable._victims

    def wrong(self: PageTable, *arguments: Any) -> list[int] | None:
        pins, self.pins = self.pins, {}
        found = victims(self, *arguments)
        self.pins = pins
        return found

    patch.setattr(PageTable, "_victims", wrong)


@bug("5: page|4: a copy|10: an operation")
def a_commit_counts_for_the_next_rank_too(patch: pytest.MonkeyPatch) -> None:
    commit = leases.commit

    def wrong(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
        lease = leases._lease_of(state, session, arguments)
        bits = leases._usable(state, lease, arguments.get("pages"))
        for rank in lease.writers:
            if rank != session.rank:
                lease.committed[rank] = lease.committed.get(rank, 0) | bits
                out.writes.append(Put("commit", lease.id << 16 | rank, lease.commit_record(rank)))
        return commit(state, session, arguments, now, out)

    patch.setitem(machine.MUTATING, "commit", wrong)


@bug("5: page|4: a copy|10: an operation")
def a_commit_counts_for_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    commit = leases.commit

    def wrong(state: State, session: Session, arguments: dict[str, Any], now: float, out: Effects) -> dict[str, Any]:
        lease = leases._lease_of(state, session, arguments)
        rank, writers = session.rank, dict(lease.writers)
        if rank == 1 and writers.get(1) == session.id:
            session.rank, lease.writers[0] = 0, session.id
        try:
            return commit(state, session, arguments, now, out)
        finally:
            session.rank = rank
            lease.writers.update(writers)

    patch.setitem(machine.MUTATING, "commit", wrong)


@bug("4: a copy|4: lease|10: an operation")
def evidence_of_one_rank_is_taken_for_all(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: OpenLease) -> int:
        bits = 0
        for rank in self.writers:
            bits |= self.committed.get(rank, 0) | self.drained.get(rank, 0)
        return bits & self.open

    patch.setattr(OpenLease, "evident", wrong)


@bug("8: request|is left|are left|lost|10:")
def a_retry_is_done_again(patch: pytest.MonkeyPatch) -> None:
    request = machine._request

    def wrong(state: State, event: machine.Request, now: float, out: Effects) -> None:
        session = state.sessions.get(event.session)
        if session is not None and session.last_request == event.id and event.op != "attach":
            session.last_request -= 1
        request(state, event, now, out)

    patch.setattr(machine, "_request", wrong)


@bug("5: page|6: hit")
def a_released_hit_is_unpinned_without_drained(patch: pytest.MonkeyPatch) -> None:
    let_go = hits.let_go

    def wrong(state: State, hit: OpenHit, out: Effects) -> None:
        let_go(state, hit, out)
        if hit.id in state.hits:
            hit.awaited.clear()
            hits.settle(state, hit, out)

    patch.setattr(hits, "let_go", wrong)


@bug("a stranger may resume")
def a_wrong_token_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def wrong(state: State, number: int, peer: Any) -> None:
        session = state.sessions.get(number)
        if session is None or session.state.value == "dead" or session.peer.pid != peer.pid:
            raise InstanceChanged("attach again")

    patch.setattr(sessions, "check_resume", wrong)


@bug("4: leases are left|6: hits are left|hangs")
def drained_is_not_asked_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "ask_again", lambda state, session, out: None)
    patch.setattr(hits, "ask_again", lambda state, session, out: None)


@bug("watch: pool")
def a_clear_is_not_told(patch: pytest.MonkeyPatch) -> None:
    _silence(patch, changes.CLEARED)


@bug("watch: pool")
def an_eviction_is_not_told(patch: pytest.MonkeyPatch) -> None:
    _silence(patch, changes.EVICTED)


def _silence(patch: pytest.MonkeyPatch, silent: int) -> None:
    add = changes.ChangeLog.add

    def wrong(self: changes.ChangeLog, kind: int, key: bytes) -> None:
        if kind != silent:
            add(self, kind, key)

    patch.setattr(changes.ChangeLog, "add", wrong)


@bug("2: .* maps")
def memory_is_free_before_every_worker_has_answered(patch: pytest.MonkeyPatch) -> None:
    tell = growth._tell

    def wrong(state: State, pool: Pool, elastic: Elastic, level: int, out: Effects) -> None:
        tell(state, pool, elastic, level, out)
        elastic.awaited = set(sorted(elastic.awaited)[1:])

    patch.setattr(growth, "_tell", wrong)


@bug("2: .* maps")
def a_process_that_has_ended_counts_as_unmapped(patch: pytest.MonkeyPatch) -> None:
    died = sessions.died

    def wrong(state: State, session: Session, now: float, out: Effects) -> None:
        died(state, session, now, out)
        growth.worker_gone(state, session)

    patch.setattr(sessions, "died", wrong)


@bug("2: .* maps")
def a_worker_that_left_counts_as_unmapped(patch: pytest.MonkeyPatch) -> None:
    users = room.users

    def wrong(state: State, pool: Pool) -> list[Session]:
        return [session for session in users(state, pool) if session.state.value != "detached"]

    patch.setattr(room, "users", wrong)


@bug("2: .* never gives back")
def who_comes_back_is_not_told_again_to_unmap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "ask_again", lambda state, session, out: None)


@bug("2: |10: |4: a copy")
def pages_in_use_are_taken(patch: pytest.MonkeyPatch) -> None:
    withdraw = growth._withdraw
    patch.setattr(growth, "_withdraw", lambda *arguments: withdraw(*arguments) or True)


@bug("5: page|6: hits .* are lost")
def pages_are_freed_before_the_survivors_have_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "waited_for", lambda self, pool: [])


@bug("5: page|6: hits .* are lost")
def pages_are_evicted_by_name_before_the_survivors_have_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hits, "refuse_to_free", lambda state, pool, what: None)


@bug("5: page", first_seed=180)
def nobody_asks_the_workers_of_a_scheduler_that_never_came_back(patch: pytest.MonkeyPatch) -> None:
    fence = away.fence

    def wrong(state: State, session: Session, number: int, out: Effects) -> None:
        if number != away.ALL:
            fence(state, session, number, out)

    patch.setattr(away, "fence", wrong)


@bug("5: page|6: hits")
def nobody_asks_for_the_loads_under_hits_that_were_released_without_a_daemon(patch: pytest.MonkeyPatch) -> None:
    fence = away.fence

    def wrong(state: State, session: Session, number: int, out: Effects) -> None:
        if number == away.ALL:
            fence(state, session, number, out)

    patch.setattr(away, "fence", wrong)


@bug("6: hits are held and refused")
def a_hit_taken_without_a_daemon_is_not_pinned_by_the_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(away, "adopt", lambda state, session, claims, out: [])


@bug("5: page|6: hits")
def an_index_is_used_after_the_next_daemon_was_told(patch: pytest.MonkeyPatch) -> None:
    claims = Away.claims

    def wrong(self: Away) -> dict[str, Any]:
        index, told = self.index, claims(self)
        self.index = index
        return told

    patch.setattr(Away, "claims", wrong)


@bug("5: page|6: hits .* are lost")
def the_index_shows_what_is_about_to_be_freed(patch: pytest.MonkeyPatch) -> None:
    unbound = IndexWriter.unbound

    def wrong(self: IndexWriter, page: int, key: bytes) -> None:
        if self._table.states[page] == PageState.FREE:
            unbound(self, page, key)

    patch.setattr(IndexWriter, "unbound", wrong)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says, plant, first_seed = BUGS[name]
    plant(monkeypatch)
    with pytest.raises(Violation, match=f"^seed [0-9]+ at [0-9.]+ s: .*({says})"):
        for seed in range(first_seed, first_seed + FOUND_WITHIN):
            simulate(seed)
