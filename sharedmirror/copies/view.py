"""A geometry seen as one line of bytes per page. Pure arithmetic on addresses; numpy only.

A *view* lays the planes' slices of one page behind one another on a line of bytes, whose coordinate is
called ``x``. Planes that are adjacent in a host frame make one *record*, so that a whole page is one
record in the ``page`` layout and a plane is one in the ``slab`` layout; nothing that uses a view tells the
layouts apart. A *piece* is a range of x. A *tile* is a piece of one slice, the unit of the kernels.

Kept here: a record holds no byte between slices that is no slice's; records, groups and pieces start
at multiples of 16, so that whatever is aligned in memory is aligned in a staging slot too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sharedmirror.copies.pairs import Ids

if TYPE_CHECKING:
    from sharedmirror.copies.interface import Geometry

__all__ = [
    "TILE_FIELDS",
    "Addresses",
    "Band",
    "Piece",
    "TileTable",
    "View",
    "build_view",
    "group_planes",
    "layered_view",
]

FIRST_SHARE = 0.1
LATER_GROUPS = 3
"""Layers are loaded in groups: a first one with this share of the bytes, then at most so many of equal size."""
COPY_BYTES = 512 << 10
"""Groups of layers are at least so large that a page's copies, at a microsecond of CPU each, move this much."""
ROWS_COST = 3
"""A 2D copy costs as much CPU as so many single ones in a batch."""
TILE_BYTES = 16 << 10
SMALL_TILE_BYTES = 4 << 10
TILE_FIELDS = 8
_WORD_BYTES = 8
_TILE_WORDS = 2048
_MOST_ROWS = 64
_ALIGN = 16
_FAR = 1 << 62


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where the planes lie, one entry per plane in ``tensor_pairs`` order; ``edges`` are sorted."""

    device_base: Ids
    device_stride: Ids
    slice_bytes: Ids
    host_base: Ids
    host_stride: Ids
    edges: Ids

    @classmethod
    def of(cls, geometry: Geometry) -> Addresses:
        """Return the addresses of a geometry's planes."""
        device_base, device_stride, slice_bytes, host_base, host_stride = np.array(
            [(p.device_base, p.device_stride, p.slice_bytes, p.host_base, p.host_stride) for p in geometry.planes],
            np.int64,
        ).reshape(-1, 5).T.copy()  # fmt: skip
        edges = np.array(geometry.host_edges, np.int64)
        return cls(device_base, device_stride, slice_bytes, host_base, host_stride, edges)

    @cached_property
    def page_bytes(self) -> int:
        """Payload bytes of one page."""
        return int(self.slice_bytes.sum())

    @cached_property
    def _shortest(self) -> tuple[int, int]:
        """The shortest slice of planes in which neighbours are one stretch of bytes on both sides, and of others."""
        tight = (self.device_stride == self.slice_bytes) & (self.host_stride == self.slice_bytes)
        return tuple(int(self.slice_bytes[which].min(initial=_FAR)) for which in (tight, ~tight))  # type: ignore[return-value]

    def shortest_stretch(self, pages: int) -> int:
        """Return the least, over all planes, of the stretch of bytes that a run of pages is."""
        growing, fixed = self._shortest
        return min(pages * growing, fixed)


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tiles of one word size: a kernel moves each with words of ``word`` bytes, ``rows`` tiles at a time.

    ``fields`` has shape (tiles, TILE_FIELDS), in ascending x: device address in page 0, device stride, x,
    the record's first and last x, bytes, host address in frame 0, host stride.
    """

    word: int
    tile_bytes: int
    rows: int
    fields: Ids

    def between(self, low: Ids, high: Ids) -> tuple[Ids, Ids]:
        """Return (first tile, number of tiles) of each range [low, high) of x."""
        x = np.ascontiguousarray(self.fields[:, 2])
        first = np.searchsorted(x, low)
        return first, np.searchsorted(x, high) - first


@dataclass(frozen=True)
class Band:
    """Rows of equal width at equal distances: one part of each of some records.

    ``host`` is the first row's address in frame 0, ``dense`` its place in a slot that holds one page;
    both places grow by their pitch from row to row.
    """

    host: int
    host_stride: int
    host_pitch: int
    dense: int
    dense_pitch: int
    width: int
    rows: int

    def split(self) -> list[Band]:
        """Return the band's rows as bands of one row."""
        hosts = range(self.host, self.host + self.rows * self.host_pitch, self.host_pitch)
        places = range(self.dense, self.dense + self.rows * self.dense_pitch, self.dense_pitch)
        return [Band(a, self.host_stride, 0, b, 0, self.width, 1) for a, b in zip(hosts, places, strict=True)]


@dataclass(frozen=True, eq=False)
class Piece:
    """The range [low, high) of x: what its records are on the host, and in which group it lies."""

    low: int
    high: int
    group: int
    bands: tuple[Band, ...]


@dataclass(frozen=True, eq=False)
class View:
    """The planes on the line of bytes, in groups that become complete one after the other.

    ``planes`` are plane indices in ascending x; ``records`` has shape (records, 4): first and last x, host
    address in frame 0, host stride. ``groups`` are the bounds of the groups in x, ``group_of_plane`` the
    group of each plane by plane index. ``columns`` are group, slice bytes, device base, device stride, host base
    and host stride, each of shape (planes, 1), in the order of ``planes``.
    """

    planes: tuple[int, ...]
    group_of_plane: tuple[int, ...]
    tables: tuple[TileTable, ...]
    records: Ids
    groups: tuple[int, ...]
    cuts: Ids
    columns: Ids
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict)

    def pieces(self, limit_bytes: int) -> tuple[Piece, ...]:
        """Return the groups, cut into pieces of at most ``limit_bytes`` (at least 64 KiB) of x."""
        if limit_bytes not in self._pieces:
            self._pieces[limit_bytes] = tuple(self._cut(max(limit_bytes, 4 * TILE_BYTES)))
        return self._pieces[limit_bytes]

    def copy_bytes(self, group: int) -> int:
        """Return how many bytes of one page a copy of this group moves, 2D copies counted at their cost."""
        low, high = self.groups[group : group + 2]
        return (high - low) // sum(min(band.rows, ROWS_COST) for band in _bands(self.records, low, high))

    def _cut(self, limit_bytes: int) -> list[Piece]:
        pieces = []
        for group, (low, high) in enumerate(zip(self.groups[:-1], self.groups[1:], strict=True)):
            bounds = self._bounds(low, high, limit_bytes)
            pieces += [
                Piece(a, b, group, _bands(self.records, a, b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
            ]
        return pieces

    def _bounds(self, low: int, high: int, limit_bytes: int) -> list[int]:
        """Return bounds from ``low`` to ``high`` at about equal distances of at most ``limit_bytes``."""
        parts = -(-(high - low) // limit_bytes)
        while True:
            wanted = low + (high - low) * np.arange(1, parts, dtype=np.int64) // parts
            inner = self.cuts[np.searchsorted(self.cuts, wanted, side="right") - 1]
            bounds = [low, *np.unique(inner[inner > low]).tolist(), high]
            if max(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)) <= limit_bytes:
                return bounds
            parts += 1


def group_planes(
    addresses: Addresses, order: Sequence[int], event_after: Sequence[int], shares: Sequence[float]
) -> list[list[int]]:
    """Cut ``order`` where the given shares of the bytes are reached and an event may be."""
    ends, total = set(event_after), addresses.page_bytes
    grouped: list[list[int]] = [[]]
    filled = 0
    for position, plane in enumerate(order, start=1):
        grouped[-1].append(plane)
        filled += int(addresses.slice_bytes[plane])
        reached = len(grouped) <= len(shares) and filled >= total * shares[len(grouped) - 1]
        if reached and position in ends and position < len(order):
            grouped.append([])
    return grouped


def layered_view(addresses: Addresses, order: Sequence[int], event_after: Sequence[int]) -> View:
    """Return the view for loads that are watched layer by layer.

    The first group is small, so that its event comes early. The others are as many as leave copies long
    enough: short ones cost more than they bring forward.
    """
    for rest in range(LATER_GROUPS, 0, -1):
        shares = [FIRST_SHARE + (1 - FIRST_SHARE) * at / rest for at in range(rest)]
        view = build_view(addresses, group_planes(addresses, order, event_after, shares))
        if all(view.copy_bytes(group) >= COPY_BYTES for group in range(1, len(view.groups) - 1)):
            break
    return view


def build_view(addresses: Addresses, groups: Sequence[Sequence[int]]) -> View:
    """Lay the planes of each group on the line, in the order of their host addresses."""
    planes: list[int] = []
    group_of_plane = [0] * len(addresses.slice_bytes)
    records: list[list[int]] = []
    places: list[tuple[int, int, int]] = []  # plane, x, record
    bounds, x = [0], 0
    for number, group in enumerate(groups):
        first = len(records)
        for plane in sorted(group, key=lambda p: int(addresses.host_base[p])):
            size, host, stride = (
                int(column[plane]) for column in (addresses.slice_bytes, addresses.host_base, addresses.host_stride)
            )
            if len(records) == first or not _adjoins(records[-1], host, size, stride):
                x = -(-x // _ALIGN) * _ALIGN
                records.append([x, x, host, stride])
            places.append((plane, x, len(records) - 1))
            x += size
            records[-1][1] = x
            planes.append(plane)
            group_of_plane[plane] = number
        x = -(-x // _ALIGN) * _ALIGN
        bounds.append(x)
    table = np.array(records, np.int64).reshape(-1, 4)
    tables = _tile_tables(addresses, table, places)
    cuts = np.unique(np.concatenate([each.fields[:, 2] for each in tables])) if tables else np.zeros(0, np.int64)
    columns = np.stack([
        np.array(group_of_plane, np.int64), addresses.slice_bytes, addresses.device_base, addresses.device_stride,
        addresses.host_base, addresses.host_stride,
    ])[:, planes, None]  # fmt: skip
    return View(tuple(planes), tuple(group_of_plane), tables, table, tuple(bounds), cuts[cuts % _ALIGN == 0], columns)


def _adjoins(record: list[int], host: int, size: int, stride: int) -> bool:
    start, end, base, record_stride = record
    width = end - start
    return stride == record_stride and host == base + width and width % _ALIGN == 0 and width + size <= stride


def _tile_tables(addresses: Addresses, records: Ids, places: list[tuple[int, int, int]]) -> tuple[TileTable, ...]:
    kinds: dict[tuple[int, int], list[Ids]] = {}
    for plane, x, record in places:
        first, last = (int(value) for value in records[record, :2])
        device, stride, size, host, host_stride = (
            int(column[plane])
            for column in (
                addresses.device_base, addresses.device_stride, addresses.slice_bytes, addresses.host_base,
                addresses.host_stride,
            )
        )  # fmt: skip
        word = int(np.gcd.reduce([_ALIGN, last - first, device, stride, size, host, host_stride]))
        tile = _tile_bytes(word, size)
        at = np.arange(0, size, tile, dtype=np.int64)
        rows = np.empty((len(at), TILE_FIELDS), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4] = device + at, stride, x + at, first, last
        rows[:, 5], rows[:, 6], rows[:, 7] = np.minimum(tile, size - at), host + at, host_stride
        kinds.setdefault((word, tile), []).append(rows)
    tables = []
    for (word, tile), fields in kinds.items():
        at_once = max(1, _TILE_WORDS * min(word, _WORD_BYTES) // tile)
        tables.append(TileTable(word, tile, min(_MOST_ROWS, at_once), np.concatenate(fields)))
    return tuple(tables)


def _tile_bytes(word: int, size: int) -> int:
    """Return a power of two: large tiles need fewer table reads, small ones leave fewer threads idle."""
    most = _TILE_WORDS * min(word, _WORD_BYTES)
    wanted = TILE_BYTES if size % TILE_BYTES == 0 else min(SMALL_TILE_BYTES, 1 << (size - 1).bit_length())
    return max(_ALIGN, min(most, wanted))


def _bands(records: Ids, low: int, high: int) -> tuple[Band, ...]:
    """Return the parts of the records in [low, high), equal ones at equal distances taken together."""
    bands: list[Band] = []
    first = int(np.searchsorted(records[:, 1], low, side="right"))
    for start, end, host, stride in records[first:].tolist():
        if start >= high:
            break
        begin, width = max(start, low), min(end, high) - max(start, low)
        row = Band(host + begin - start, stride, 0, begin - low, 0, width, 1)
        joined = _join(bands[-1], row) if bands else None
        if joined is None:
            bands.append(row)
        else:
            bands[-1] = joined
    return tuple(bands)


def _join(band: Band, row: Band) -> Band | None:
    if (band.width, band.host_stride) != (row.width, row.host_stride):
        return None
    last = band.rows - 1
    host_pitch = row.host - (band.host + last * band.host_pitch)
    dense_pitch = row.dense - (band.dense + last * band.dense_pitch)
    if host_pitch < band.width or (last and (host_pitch, dense_pitch) != (band.host_pitch, band.dense_pitch)):
        return None
    return Band(band.host, band.host_stride, host_pitch, band.dense, dense_pitch, band.width, band.rows + 1)
