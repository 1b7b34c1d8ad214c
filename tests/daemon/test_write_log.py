"""A kill at any store to memory: each operation has happened wholly or not at all, and the run goes on.

A scripted run is logged store by store. For every prefix of the log, and for torn last stores, the
next daemon must find one of two states: the one before the operation under way, or the one after it.
Invariants 1 to 6 are ``state_problems``; 7 and 8 are the answers; 9 and 10 the two states.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from sharedmirrord.core import machine
from sharedmirrord.core.model import Effects, State
from sharedmirrord.core.transitions import PageState
from sharedmirrord.journal import ALIGNMENT_BYTES
from sharedmirrord.records import RecordStore
from tests.daemon.core_driver import Engine
from tests.daemon.durable_driver import DurableDriver, recovered, recovered_from, stored_records
from tests.daemon.durable_view import durable_view, plain, state_problems
from tests.daemon.store_memory import ByteStorage, Store, kills, recording

TORN = 0.45
"""Share of the longer stores that are also seen torn; chosen for the time that the test takes."""


@dataclass
class Step:
    """One event: how many stores were made when its answers went out, and what was durable then."""

    event: machine.Event | None
    stores: int
    view: dict[str, Any]
    answered: dict[int, dict[str, Any]]
    """The last answer of each session that is still there."""
    held: dict[int, tuple[list[int], list[int]]]
    """Leases and hits of each session that may come back."""


@dataclass
class Run:
    start: bytes = b""
    log: list[Store] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class LoggedDriver(DurableDriver):
    """Notes after each event what a kill must not lose."""

    def __init__(self) -> None:
        self.run: Run | None = None
        super().__init__()

    def apply(self, event: machine.Event) -> Effects:
        effects = super().apply(event)
        self.note(event)
        return effects

    def note(self, event: machine.Event | None) -> None:
        if self.run is not None:
            attached = [s for s in self.state.sessions.values() if s.incarnation is not None]
            answered = {s.id: plain(s.last_reply) for s in attached if s.last_reply is not None}
            held = {s.id: (sorted(s.leases), sorted(s.hits)) for s in attached}
            self.run.steps.append(Step(event, len(self.run.log), durable_view(self.state), answered, held))


def tell(driver: LoggedDriver) -> None:
    """A run in which everything happens that leaves a record."""
    e = driver.engine("e", num_host_pages=9)
    f = driver.engine("f", num_host_pages=9)
    driver.engine("s", world_size=1, pool="static", kind="static", scheduler=False, num_host_pages=3)
    ask = driver.ask
    first = e.cache(b"a", b"b", b"c")
    e.cache(b"d", parent=b"a")
    half = f.lease(3)
    f.commit(half["lease"], half["pages"][:2], ranks=[0])
    ask(f.scheduler, "seal", lease=half["lease"], keys=[b"x", b"y"], pages=half["pages"][:2])
    kept = e.lookup(b"a", b"b")
    loose = f.lookup(b"c", b"a", mode="each")
    f.commit(half["lease"], half["pages"][:1], ranks=[1])
    ask(f.scheduler, "release", hits=[loose["hit"]])
    again = ask(e.scheduler, "reserve", keys=[b"b", b"p", b"y"], parent=b"a")
    e.commit(again["lease"])
    driver.disconnect(f.workers[0])
    f.drained(1, hits=[loose["hit"]])
    driver.died(f.workers[0])
    f.drained(1, [half["lease"]])
    ask(e.scheduler, "evict", keys=[b"c", b"b"])
    many = ask(e.scheduler, "reserve", keys=[b"q%d" % i for i in range(3)], parent=None)
    e.commit(many["lease"], many["pages"][:1])
    ask(e.scheduler, "abort", lease=many["lease"], pages=many["pages"][1:2])
    driver.gone(f.workers[0])
    fresh = driver.hello()
    driver.ask_attach(fresh, engine="f", rank=0, num_host_pages=9)
    e.drained(0, pages=[[many["lease"], many["pages"][1:2]]])
    ask(e.scheduler, "clear")
    e.drained(0, [many["lease"]])
    e.drained(1, [many["lease"]], pages=[[many["lease"], many["pages"][1:2]]])
    waiting = driver.send(e.scheduler, "lease", n=8, wait_s=5.0)
    e.cache_by(f.scheduler, b"new") if isinstance(e, Busy) else None
    driver.tick(6.0)
    assert not driver.waits(e.scheduler, waiting)
    e.release(kept["hit"])
    last = e.lease(5)
    e.commit(last["lease"], last["pages"][2:], ranks=[1])
    ask(e.workers[0], "detach", unmapped=False)
    ask(e.workers[0], "unmapped")
    f.lookup(b"a", mode="each")
    driver.disconnect(e.scheduler)
    driver.gone(e.scheduler)
    assert first


class Busy(Engine):
    pass
