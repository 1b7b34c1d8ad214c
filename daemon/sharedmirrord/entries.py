"""What the record store's header and journal entries say, written and read back.

An entry's payload is a msgpack array of operations: ``[1, kind, id, value]`` puts a record,
``[2, kind, id]`` deletes one, ``[3, pool, [slot, ...]]`` overwrites slots. A checkpoint is an entry that
puts every live record. The store's own records have the kind ``table``, the pool as id, and
``[offset, pages]`` as value.

Reading back trusts nothing: valid checksums over nonsense end in ProtocolError, never in another
exception and never in a write outside the store's ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from sharedmirror.errors import ProtocolError, SharedMirrorError, UsageError
from sharedmirrord.core.durable import Slot
from sharedmirrord.journal import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    HEADER_PAYLOAD_BYTES,
    SEQUENCE_LIMIT,
    Area,
    HeaderPage,
    Heap,
    Storage,
    Window,
)
from sharedmirrord.tables import SLOT_BYTES, Table, encode

TABLE = "table"
_PUT, _DELETE, _SLOTS = 1, 2, 3
_INSTANCE_BYTES = 16
_PLACES_BYTES = 256
"""Room in the header for what the store itself keeps there."""

_packer = msgpack.Packer(use_bin_type=True)


@dataclass(frozen=True)
class StoreHeader:
    """What the header says of the daemon; ``instance`` has 16 bytes, ``arenas`` names and sizes in bytes."""

    instance: bytes
    boot_id: str
    uid: int
    socket: str
    epoch: int
    arenas: tuple[tuple[str, int], ...]

    def check(self) -> None:
        """Raise UsageError when the header cannot be stored."""
        size_bytes, limit = len(_pack(asdict(self), "header", 0)), HEADER_PAYLOAD_BYTES - _PLACES_BYTES
        if len(self.instance) != _INSTANCE_BYTES:
            raise UsageError(f"the instance has {len(self.instance)} bytes and must have {_INSTANCE_BYTES}")
        if size_bytes > limit:
            raise UsageError(f"the header takes {size_bytes} bytes and may take {limit}; use a shorter socket path")


@dataclass
class StoreState:
    """All that a store is made of, but for its header page; ``first`` is the checkpoint's sequence number."""

    header: StoreHeader
    heap: Heap
    active: Area
    spare: Area
    records: dict[tuple[str, int], bytes]
    tables: dict[int, Table]
    first: int
    sequence: int

    def header_payload(self) -> bytes:
        """Return what the header page is to hold."""
        places = {
            "active": [self.active.window.offset, self.active.window.length],
            "spare": [self.spare.window.offset, self.spare.window.length],
            "first": self.first,
            "heap_end": self.heap.end,
        }
        return _pack({**asdict(self.header), **places}, "header", 0)

    def checkpoint(self) -> bytes:
        """Return the payload of an entry that puts every live record."""
        return pack_entry(list(self.records.values()))


def pack_put(kind: str, id: int, value: Any) -> bytes:
    """Return the operation that puts a record; raises UsageError on what msgpack cannot hold."""
    return _pack((_PUT, kind, id, value), kind, id)


def pack_delete(kind: str, id: int) -> bytes:
    """Return the operation that deletes a record."""
    return _pack((_DELETE, kind, id), kind, id)


def pack_slots(pool: int, slots: Sequence[Slot]) -> bytes:
    """Return the operation that overwrites slots."""
    return _pack((_SLOTS, pool, slots), "slots of pool", pool)


def pack_entry(operations: Sequence[bytes]) -> bytes:
    """Return the payload of an entry."""
    count: bytes = _packer.pack_array_header(len(operations))
    return count + b"".join(operations)


def value_of(operation: bytes) -> Any:
    """Return the value of an operation that puts a record."""
    return _unpacker(operation).unpack()[3]


def table_bytes(pages: int) -> int:
    """Return the room that a page table takes."""
    return -(-pages * SLOT_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_header(storage: Storage) -> StoreHeader:
    """Return what the header says; raises ProtocolError when the memory is no record store of this version."""
    if storage.size_bytes < HEADER_BYTES:
        raise ProtocolError(f"the memory holds no record store: it has {storage.size_bytes} bytes")
    payload = HeaderPage(storage).read()
    try:
        return _header(msgpack.unpackb(payload, raw=False))
    except SharedMirrorError:
        raise
    except Exception as error:
        raise ProtocolError(f"the header holds what no daemon wrote: {type(error).__name__}: {error}") from error


def recover(storage: Storage, page: HeaderPage) -> StoreState:
    """Return what a killed or closed store left; slots that had not reached home are written there.

    Raises ProtocolError on anything that no kill can leave behind, EnvironmentFault when the
    storage cannot be mapped.
    """
    try:
        return _Recovery(storage, page.read()).run()
    except SharedMirrorError:
        raise
    except Exception as error:  # nonsense raises many kinds, all of which mean the same here
        raise ProtocolError(f"the record store holds what no daemon wrote: {type(error).__name__}: {error}") from error


class _TablePlace:
    """Where a table is, and the newest body that the journal holds of each of its slots."""

    def __init__(self, offset: int, pages: int) -> None:
        self.place = _place([offset, table_bytes(pages)])
        self.pages = pages
        self.slots: dict[int, bytes] = {}


class _Recovery:
    """Reads the journal first and maps tables after: a dropped table's room may be another's by now."""

    def __init__(self, storage: Storage, header: bytes) -> None:
        self._storage = storage
        self._body = msgpack.unpackb(header, raw=False)
        self._records: dict[tuple[str, int], bytes] = {}
        self._tables: dict[int, _TablePlace] = {}

    def run(self) -> StoreState:
        body, storage = self._body, self._storage
        header = _header(body)
        places = [_place(body["active"]), _place(body["spare"])]
        first, heap_end = int(body["first"]), int(body["heap_end"])
        if not 0 < first < SEQUENCE_LIMIT:
            raise ValueError(f"the first entry has the sequence number {first}")
        Heap(storage, places, heap_end)
        active, spare = (Area(Window(storage, *place)) for place in places)
        sequence = active.replay(first, self._entry)
        heap = Heap(storage, [*places, *(table.place for table in self._tables.values())], heap_end)
        tables = {pool: self._table(table) for pool, table in self._tables.items()}
        return StoreState(header, heap, active, spare, self._records, tables, first, sequence)

    def _table(self, place: _TablePlace) -> Table:
        table = Table(Window(self._storage, *place.place), place.pages)
        for page, body in place.slots.items():
            table.redo(page, body)
        return table

    def _entry(self, payload: bytes) -> None:
        unpacker = _unpacker(payload)
        count = unpacker.read_array_header()
        start = unpacker.tell()
        for _ in range(count):
            operation = unpacker.unpack()
            end = unpacker.tell()
            self._operation(operation, payload[start:end])
            start = end
        if start != len(payload):
            raise ValueError(f"an entry of {len(payload)} bytes ends after {start}")

    def _operation(self, operation: Any, raw: bytes) -> None:
        match operation:
            case [1, str() as kind, int() as id, value]:
                self._records[kind, id] = raw
                if kind == TABLE:
                    offset, pages = map(int, value)
                    self._tables[id] = _TablePlace(offset, pages)
            case [2, str() as kind, int() as id]:
                self._records.pop((kind, id), None)
                if kind == TABLE:
                    self._tables.pop(id, None)
            case [3, int() as pool, list() as slots]:
                table = self._tables[pool]
                for slot in slots:
                    page = slot[0]
                    if not isinstance(page, int) or not 0 <= page < table.pages:
                        raise ValueError(f"a slot of page {page!r} in a table of {table.pages} pages")
                    table.slots[page] = encode(slot)
            case _:
                raise ValueError("an operation of no known form")


def _header(body: Any) -> StoreHeader:
    if not isinstance(body["instance"], bytes):
        raise ValueError("the instance is no bytes")
    uid, epoch = int(body["uid"]), int(body["epoch"])
    arenas = tuple((str(name), int(size)) for name, size in body["arenas"])
    header = StoreHeader(body["instance"], str(body["boot_id"]), uid, str(body["socket"]), epoch, arenas)
    header.check()
    return header


def _place(value: Any) -> tuple[int, int]:
    offset, length = map(int, value)
    if offset < HEADER_BYTES or length < ALIGNMENT_BYTES:
        raise ValueError(f"a range of {length} bytes at {offset}")
    return offset, length


def _unpacker(raw: bytes) -> Any:
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=max(len(raw), 1))
    unpacker.feed(raw)
    return unpacker


def _pack(body: Any, kind: str, id: int) -> bytes:
    try:
        packed: bytes = _packer.pack(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{kind} {id} cannot be stored: {error}") from error
    return packed
