"""The daemon's crash-safe memory: records and page slots that survive its own death.

A commit is one journal entry, so it happened wholly or not at all. Its slots are then written to
their home in the pool's page table. ``open`` reads the last checkpoint, replays the entries behind it
and writes again the slots that did not reach home. Invariants:

- What a returned ``commit`` wrote is found by ``open`` after a kill at any instruction, also a kill of ``open``.
- A commit that raised, because memory could not be had or a value cannot be stored, changed nothing.
- Room is written only while nothing valid refers to it, and is given back only after the entry or
  header that refers to it no more.

The store knows nothing of what records mean, and must not: it takes the core's word (``core.durable``).
It is not thread-safe; one process writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sharedmirror.errors import ClosedError, EnvironmentFault, ProtocolError, UsageError
from sharedmirrord import failpoints
from sharedmirrord.core.durable import CreateTable, Delete, Put, SetSlots, Slot, Write
from sharedmirrord.core.model import TableRoom
from sharedmirrord.entries import (
    TABLE,
    StoreHeader,
    StoreState,
    pack_delete,
    pack_entry,
    pack_put,
    pack_slots,
    recover,
    table_bytes,
    value_of,
)
from sharedmirrord.journal import (
    ALIGNMENT_BYTES,
    ENTRY_LIMIT_BYTES,
    HEADER_BYTES,
    SEQUENCE_LIMIT,
    Area,
    HeaderPage,
    Heap,
    Storage,
    entry_bytes,
)
from sharedmirrord.tables import SLOT_BYTES, Prepared, Table

__all__ = ["DEFAULT_AREA_BYTES", "JOURNAL_BYTES", "RecordStore", "StoreHeader"]

DEFAULT_AREA_BYTES = 1 << 20
JOURNAL_BYTES = 1 << 20
"""Room that a page table leaves for the journal to grow."""


class _Plan:
    """A commit that is checked, encoded and has its room, but is not written yet."""

    __slots__ = ("created", "dropped", "operations", "records", "slots", "tables")

    def __init__(self, tables: dict[int, Table]) -> None:
        self.operations: list[bytes] = []
        self.records: list[tuple[tuple[str, int], bytes | None]] = []
        self.slots: list[tuple[Table, Prepared]] = []
        self.tables = tables
        self.created: list[Table] = []
        self.dropped: list[Table] = []

    def put(self, kind: str, id: int, value: Any) -> None:
        operation = pack_put(kind, id, value)
        self.operations.append(operation)
        self.records.append(((kind, id), operation))

    def delete(self, kind: str, id: int) -> None:
        self.operations.append(pack_delete(kind, id))
        self.records.append(((kind, id), None))

    def table(self, pool: int) -> Table:
        table = self.tables.get(pool)
        if table is None:
            raise UsageError(f"pool {pool} has no page table", pool=pool)
        return table


class RecordStore:
    """Records and page tables in a storage; made by ``create`` or ``open``."""

    def __init__(self, page: HeaderPage, state: StoreState) -> None:
        """Use ``create`` or ``open`` instead."""
        self._page = page
        self._state = state
        self._interrupted = False
        self._closed = False

    @classmethod
    def create(cls, storage: Storage, header: StoreHeader, *, area_bytes: int = DEFAULT_AREA_BYTES) -> RecordStore:
        """Make an empty store; what the storage held before is forgotten.

        ``area_bytes`` is what each of the two journal areas starts with. Raises UsageError on a
        header that does not fit, MemoryFault when the storage cannot grow.
        """
        header.check()
        if storage.size_bytes < ALIGNMENT_BYTES:
            storage.grow(ALIGNMENT_BYTES)
        page = HeaderPage(storage)
        page.window.clear()
        heap = Heap(storage)
        active, spare = (Area(heap.allocate(max(area_bytes, ALIGNMENT_BYTES))[0]) for _ in range(2))
        state = StoreState(header, heap, active, spare, {}, {}, first=1, sequence=2)
        active.append(state.first, state.checkpoint())
        page.write(state.header_payload())
        return cls(page, state)

    @classmethod
    def open(cls, storage: Storage) -> RecordStore:
        """Take over what a killed or closed store left.

        Raises ProtocolError when the memory is no record store, has another version, or is damaged in
        a way that no kill can leave behind; EnvironmentFault when it cannot be mapped.
        """
        if storage.size_bytes < HEADER_BYTES:
            raise ProtocolError(f"the memory holds no record store: it has {storage.size_bytes} bytes")
        page = HeaderPage(storage)
        return cls(page, recover(storage, page))

    @property
    def header(self) -> StoreHeader:
        """The header as it was last written."""
        return self._state.header

    @property
    def bytes_used(self) -> int:
        """Bytes of the storage in use: header, journal areas and page tables."""
        return self._state.heap.used_bytes

    def records(self) -> dict[tuple[str, int], Any]:
        """Return the decoded value of each live record; tuples come back as lists."""
        return {key: value_of(operation) for key, operation in self._state.records.items() if key[0] != TABLE}

    def tables(self) -> dict[int, int]:
        """Return the number of pages in each pool's page table."""
        return {pool: table.pages for pool, table in self._state.tables.items()}

    def table_room(self, free_bytes: int) -> TableRoom:
        """Return what a page table may take where the storage can grow by ``free_bytes``, the journal's share aside."""
        return TableRoom(max(free_bytes - JOURNAL_BYTES, self._state.heap.largest_free_bytes), SLOT_BYTES)

    def slots(self, pool: int) -> Iterator[Slot | None]:
        """Yield the slots of a pool's pages in order, None where no copy is valid.

        The table must not be dropped meanwhile. Raises UsageError when the pool has no table.
        """
        return _Plan(self._state.tables).table(pool).read()

    def set_epoch(self, epoch: int) -> None:
        """Store another epoch in the header; raises UsageError when it goes back."""
        self._check_usable()
        if not self._state.header.epoch <= epoch < SEQUENCE_LIMIT:
            raise UsageError(f"epoch {epoch} cannot follow epoch {self._state.header.epoch}")
        self._interrupted = True
        self._state.header = replace(self._state.header, epoch=epoch)
        self._page.write(self._state.header_payload())
        self._interrupted = False

    def commit(self, writes: Sequence[Write]) -> None:
        """Make all writes durable, or none.

        Raises UsageError on a write that cannot be stored and MemoryFault when the storage cannot
        grow; both leave the store as it was.
        """
        self._check_usable()
        if not writes:
            return
        failpoints.reach("records.commit")
        state = self._state
        plan = _Plan(state.tables)
        try:
            for write in writes:
                self._plan(plan, write)
            payload = pack_entry(plan.operations)
            if not state.active.fits(len(payload)):
                self._turn(len(payload))
        except BaseException:
            for table in plan.created:
                state.heap.free(table.window)
            raise
        self._interrupted = True
        state.active.append(state.sequence, payload)
        failpoints.reach("records.appended")
        state.sequence += 1
        self._apply(plan)
        self._interrupted = False
        failpoints.reach("records.committed")

    def close(self) -> None:
        """Let go of all mappings; the storage keeps what was committed."""
        if not self._closed:
            self._closed = True
            tables = (table.window for table in self._state.tables.values())
            for window in (*tables, self._state.active.window, self._state.spare.window, self._page.window):
                window.close()

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the record store is closed")
        if self._interrupted:
            raise EnvironmentFault("a commit of the record store was interrupted; start the daemon again to recover it")

    def _plan(self, plan: _Plan, write: Write) -> None:
        if isinstance(write, (Put, Delete)) and write.kind == TABLE:
            raise UsageError(f"records of the kind {TABLE!r} are the store's own; use CreateTable or DropTable")
        if isinstance(write, Put):
            plan.put(write.kind, write.id, write.value)
        elif isinstance(write, SetSlots):
            table = plan.table(write.pool)
            plan.slots.append((table, table.prepare(write.slots)))
            plan.operations.append(pack_slots(write.pool, write.slots))
        elif isinstance(write, Delete):
            plan.delete(write.kind, write.id)
        elif isinstance(write, CreateTable):
            self._plan_table(plan, write)
        else:
            plan.dropped.append(plan.table(write.pool))
            plan.tables = {pool: table for pool, table in plan.tables.items() if pool != write.pool}
            plan.delete(TABLE, write.pool)

    def _plan_table(self, plan: _Plan, write: CreateTable) -> None:
        if write.pool in plan.tables:
            raise UsageError(f"pool {write.pool} has a page table already", pool=write.pool)
        if write.pages < 1:
            raise UsageError(f"pool {write.pool} asks for a page table of {write.pages} pages", pool=write.pool)
        failpoints.reach("records.grow")
        window, fresh = self._state.heap.allocate(table_bytes(write.pages))
        failpoints.reach("records.grown")
        table = Table(window, write.pages)
        plan.created.append(table)
        if not fresh:
            window.clear()
        plan.tables = {**plan.tables, write.pool: table}
        plan.put(TABLE, write.pool, [window.offset, write.pages])

    def _apply(self, plan: _Plan) -> None:
        records = self._state.records
        for key, operation in plan.records:
            if operation is None:
                records.pop(key, None)
            else:
                records[key] = operation
        for table, prepared in plan.slots:
            table.write(prepared)
        self._state.tables = plan.tables
        for table in plan.dropped:
            self._state.heap.free(table.window)

    def _turn(self, payload_bytes: int) -> None:
        """Write a checkpoint into the other area, or a bigger one, so that a payload fits behind it."""
        state = self._state
        checkpoint = state.checkpoint()
        if max(payload_bytes, len(checkpoint)) > ENTRY_LIMIT_BYTES:
            raise UsageError(f"an entry of {payload_bytes} bytes behind {len(checkpoint)} bytes of records is too long")
        target, outgrown = self._room(len(checkpoint), payload_bytes)
        self._interrupted = True
        target.tail = 0
        target.append(state.sequence, checkpoint)
        failpoints.reach("records.checkpoint")
        state.first = state.sequence
        state.sequence += 1
        state.active, state.spare = target, state.active
        self._page.write(state.header_payload())
        failpoints.reach("records.turned")
        if outgrown is not None:
            state.heap.free(outgrown.window)
        self._interrupted = False

    def _room(self, checkpoint_bytes: int, payload_bytes: int) -> tuple[Area, Area | None]:
        """Return the area for a checkpoint and the one that it replaces, if any."""
        state, spare = self._state, self._state.spare
        need = entry_bytes(checkpoint_bytes) + entry_bytes(payload_bytes) + 8
        wanted = max(need, 2 * entry_bytes(checkpoint_bytes))
        if wanted <= spare.window.length:
            return spare, None
        length = max(spare.window.length, state.active.window.length)
        while length < wanted:
            length *= 2
        try:
            failpoints.reach("records.grow")
            area = Area(state.heap.allocate(length)[0])
            failpoints.reach("records.grown")
            return area, spare
        except EnvironmentFault:
            # A store that cannot grow must still take the deletes that make room.
            if need > spare.window.length:
                raise
            return spare, None
