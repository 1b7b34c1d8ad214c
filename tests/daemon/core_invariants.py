"""Invariants 1 to 6 and 9 of the design, one function each, checked after every step of the stateful test.

Invariant 8 is a rule of ``core_story``; some checks of the same numbers are in ``core_model`` and
``core_answers``, where an answer is judged.
"""

from __future__ import annotations

from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from sharedmirror.types import Role
from sharedmirrord.core import machine
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.transitions import PageState
from tests.daemon.core_answers import Judge
from tests.daemon.core_driver import Driver, snapshot
from tests.daemon.core_model import DEAD, ModelHit, ModelLease, ModelPage, ModelPool, ModelSession


class CoreInvariants(RuleBasedStateMachine):
    """A core, its model, and what must hold of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.judge = Judge()
        self.model = self.judge.model
        self.joining: dict[tuple[int, int], tuple[Role, int | None]] = {}
        self.last: dict[int, tuple[int, str, dict[str, Any]]] = {}
        """The last request of each session that changes something."""
        self.names: dict[int, tuple[str, str]] = {}
        """Pool and engine of each session."""
        self.bounds: dict[int, int | None] = {}
        """The ``max_held`` that a scheduler's attach named."""
        self.seen: dict[tuple[int, int], int] = {}
        self.marks: dict[int, list[int]] = {}

    # -- the rim ---------------------------------------------------------------------------------

    def observe(self, event: machine.Event) -> None:
        """Apply an event and let the model follow, in the order in which things happened."""
        before = snapshot(self.driver.state)
        effects = self.driver.apply(event)
        for session, body in effects.replies:
            if (session, body["id"]) in self.joining:
                self._joined(session, body)
            else:
                self.judge.answered(session, body)
        if isinstance(event, machine.Request) and effects.replies and "error" in effects.replies[0][1]:
            if event.op != "attach" and len(effects.replies) == 1:
                assert snapshot(self.driver.state) == before, f"invariant 9: {event} was refused and changed something"

    def _joined(self, session: int, body: dict[str, Any]) -> None:
        role, rank = self.joining.pop((session, body["id"]))
        if "error" in body:
            return
        incarnation = self.driver.state.sessions[session].incarnation
        assert incarnation is not None
        pool = self.driver.state.pools[body["pool"]]
        if pool.id not in self.model.pools:
            world = pool.properties.world_size
            self.model.pools[pool.id] = ModelPool(pool.id, world, [ModelPage() for _ in range(body["num_host_pages"])])
        name = pool.name, self.driver.state.incarnations[incarnation].engine
        for other in self.model.sessions.values():
            if self.names[other.id] == name and other.incarnation != incarnation:
                assert other.life in DEAD, f"invariant 4: session {other.id} of the launch before is still there"
        self.names[session] = name
        if self.bounds.get(session) is not None:
            self.model.max_held[incarnation] = self.bounds[session] or 0
        self.model.joined(ModelSession(session, role, pool.id, incarnation, rank, name[1]))

    def ask(self, session: ModelSession, op: str, **arguments: Any) -> None:
        """Send a request. What ``drained`` says is evidence from now on."""
        driver = self.driver
        if any(waiter.session == session.id for waiter in driver.state.waiters):
            return
        driver.requests[session.id] += 1
        request = driver.requests[session.id]
        self.judge.asked(session.id, request, op, arguments)
        if op in machine.MUTATING:
            self.last[session.id] = request, op, arguments
        if op == "drained":
            self.model.drained(session.id, arguments["leases"], arguments["hits"], arguments["pages"])
        self.observe(machine.Request(session.id, request, op, arguments))

    # -- what must hold --------------------------------------------------------------------------

    def table(self, pool: ModelPool) -> PageTable:
        table = self.driver.state.pools[pool.id].table
        assert table is not None
        return table

    def page_states(self) -> list[tuple[ModelPool, int, PageState, int]]:
        """Pool, page, state and generation of every page, as the core has them."""
        found = []
        for pool in self.model.pools.values():
            table = self.table(pool)
            found += [(pool, p, PageState(table.states[p]), table.generations[p]) for p in range(table.pages)]
        return found

    @invariant()
    def invariant_1_each_page_is_in_one_state(self) -> None:
        for pool, page, state, _ in self.page_states():
            model = pool.pages[page]
            expected = "reserved" if page == 0 else model.state
            if model.lease is not None and page in model.lease.doubted and page in model.lease.revoked:
                expected = "quarantined"
            assert state.name.lower() == expected, f"invariant 1: page {page} is {state.name}, not {expected}"
        for pool in self.model.pools.values():
            table = self.table(pool)
            assert sum(table.counts) == table.pages, f"invariant 1: {table.counts} for {table.pages} pages"

    @invariant()
    def invariant_2_one_lease_a_page_and_no_regions_overlap(self) -> None:
        held = [(lease.pool.id, page) for lease in self.model.leases.values() for page in lease.open]
        assert len(held) == len(set(held)), f"invariant 2: {held}"
        open_pages = {
            (lease.pool, lease.pages[at])
            for lease in self.driver.state.leases.values()
            for at in range(len(lease.pages))
            if lease.open >> at & 1
        }
        assert open_pages == set(held), f"invariant 2: the core has {open_pages} open, the model {held}"
        taken = sorted(
            extent for pool in self.driver.state.pools.values() for region in pool.regions for extent in region.extents
        )
        for (arena, offset, size), (after, start, _) in zip(taken, taken[1:], strict=False):
            assert arena != after or offset + size <= start, "invariant 2: regions overlap"

    @invariant()
    def invariant_3_generations_only_grow(self) -> None:
        for pool, page, _, generation in self.page_states():
            before = self.seen.get((pool.id, page), 0)
            assert generation >= before, f"invariant 3: page {page} went from generation {before} to {generation}"
            assert generation == pool.pages[page].generation, f"invariant 3: page {page} has {generation}"
            self.seen[pool.id, page] = generation
        for number in self.model.pools:
            marks = self.driver.state.pools[number].marks()
            highest = max(self.table(self.model.pools[number]).generations)
            assert highest < max(1, marks[1]), "invariant 3: a generation is not below the durable mark"
            before_marks, self.marks[number] = self.marks.get(number, [0, 0]), marks
            assert self.marks[number] >= before_marks, "invariant 3: the durable marks went back"

    @invariant()
    def invariant_4_no_page_is_free_without_evidence_of_every_writer(self) -> None:
        table = {(pool.id, page): state for pool, page, state, _ in self.page_states()}
        for lease in self.model.leases.values():
            for page in lease.open:
                state = table[lease.pool.id, page]
                writing = lease.may_write(page)
                settled = state in (PageState.FREE, PageState.SEALED)
                assert not (writing and settled), f"invariant 4: page {page} is {state.name}, ranks {writing} may write"

    @invariant()
    def invariant_5_keys_lead_to_sealed_pages_whose_bytes_stay(self) -> None:
        for pool in self.model.pools.values():
            table = self.table(pool)
            assert table.index == pool.binding, f"invariant 5: keys {table.index}, should be {pool.binding}"
            for key, page in table.index.items():
                assert table.states[page] == PageState.SEALED, f"invariant 5: {key!r} leads to an unsealed page"
                assert table.keys[page] == key, f"invariant 5: {key!r} leads to a page of another key"

    @invariant()
    def invariant_6_pins_hold_until_every_worker_has_drained(self) -> None:
        for hit in self.model.hits.values():
            table = self.table(hit.pool)
            for page, generation in hit.pages.items():
                same = table.states[page] == PageState.SEALED and table.generations[page] == generation
                assert same, f"invariant 6: page {page} of hit {hit.id} was let go or granted again"
        for pool in self.model.pools.values():
            table = self.table(pool)
            expected = self.model.pinned(pool)
            assert table.pins == expected, f"invariant 6: pins are {table.pins}, should be {expected}"

    @invariant()
    def whoever_must_answer_was_told(self) -> None:
        """The pushes name every lease and hit that a worker still has to answer."""
        for lease in self.model.leases.values():
            for rank, number in lease.writers.items():
                if lease.revoked & lease.open and self.model.sessions[number].life == "attached":
                    assert self._told(number, lease, rank), f"rank {rank} was never told of {lease.id}"
        for hit in self.model.hits.values():
            for number in hit.awaited if hit.released else ():
                assert self._told_hit(number, hit), f"session {number} was never told that hit {hit.id} is released"

    def _told(self, number: int, lease: ModelLease, rank: int) -> bool:
        named: set[int] = set()
        for push in self.driver.pushes[number]:
            if push["push"] == "revoked" and lease.id in push["leases"]:
                return True
            if push["push"] == "revoked_pages" and push["lease"] == lease.id:
                named |= set(push["pages"])
        return lease.revoked & lease.open <= named

    def _told_hit(self, number: int, hit: ModelHit) -> bool:
        return any(p["push"] == "released" and hit.id in p["hits"] for p in self.driver.pushes[number])
