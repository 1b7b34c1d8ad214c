"""A core driver whose writes go to a real record store, so that its daemon can be killed and started again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sharedmirrord.core import machine
from sharedmirrord.core.model import Effects, State
from sharedmirrord.core.recover import recover
from sharedmirrord.records import RecordStore
from tests.daemon.core_driver import Driver, Records, packed
from tests.daemon.durable_view import state_problems
from tests.daemon.store_memory import ARENA_BYTES, ByteStorage, new_store


def recovered(
    store: RecordStore, now: float = 5.0, memory_bytes: int = ARENA_BYTES, nodes: Sequence[int] = ()
) -> State:
    return recover(store.records(), store.slots, memory_bytes, now, nodes)


def recovered_from(image: bytes) -> State:
    """Return the state that a daemon finds which starts over this memory."""
    with RecordStore.open(ByteStorage(image, len(image))) as store:
        return recovered(store)


D = TypeVar("D", bound="DurableDriver")


class DurableDriver(Driver):
    """A driver with a record store; ``restarted`` is the next daemon over the same memory."""

    def __init__(self, memory_bytes: int = ARENA_BYTES, *, ready: bool = True, nodes: Sequence[int] = ()) -> None:
        self.storage, self.store = new_store()
        super().__init__(memory_bytes, ready=ready, nodes=nodes)

    def apply(self, event: machine.Event) -> Effects:
        effects = super().apply(event)
        self.store.commit(effects.writes)
        return effects

    def check(self) -> None:
        super().check()
        problems = state_problems(self.state)
        assert problems == [], problems

    def recovered(self) -> State:
        return recovered_from(self.storage.image())

    def restarted(self: D, state: State | None = None) -> D:
        """Kill this daemon and start the next; request ids and what was sent go on."""
        after = type(self).__new__(type(self))
        after.__dict__.update(self.__dict__)
        after.storage = ByteStorage(self.storage.image())
        after.store = RecordStore.open(after.storage)
        space = self.state.space
        nodes = [node for node, _, _ in space.parts]
        after.state = recovered(after.store, self.now, space.size_bytes, nodes) if state is None else state
        after.records = stored_records(after.store)
        after.apply(machine.Ready())
        return after

    def resume(
        self, session: int, leases: list[int] | None = None, hits: list[int] | None = None, retry: int | None = None
    ) -> Effects:
        """Bring a session back. It names ``leases`` and ``hits``, or all that the daemon knows it has."""
        known = self.state.sessions[session]
        held = sorted(known.leases) if leases is None else leases
        return self.apply(machine.Resume(session, held, sorted(known.hits) if hits is None else hits, retry))

    def ask_attach(self, session: int, **changes: Any) -> dict[str, Any]:
        """Attach a worker that must be admitted at once."""
        return self.result(session, self.attach(session, **changes))

    def pushed(self, effects: Effects, session: int) -> list[dict[str, Any]]:
        """Return what an event made the daemon say to a session."""
        return [body for number, body in effects.pushes if number == session]


def stored_records(store: RecordStore) -> Records:
    records = Records()
    for (kind, number), value in store.records().items():
        records.values[kind][number] = packed(value)
    for pool in store.tables():
        slots = [slot for slot in store.slots(pool) if slot is not None]
        assert len(slots) == store.tables()[pool]
        records.tables[pool] = slots
    return records
