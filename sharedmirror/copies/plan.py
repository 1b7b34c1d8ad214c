"""The plan of a transfer: which copies, in which chunks. Pure arithmetic on addresses; numpy only.

A *chunk* is a piece of a view (``view.Piece``) of some pages; it fills at most one staging slot:

    slot:  record, then page, then byte        [record 0: page 0, page 1, ...][record 1: page 0, ...]

so that pages which are neighbours on the host are one run of bytes in the slot too. Kernels move between
device pages and slots, tile by tile, copy engines between slots and host.

Kept here: every byte of every slice is copied once and no byte beside it; no copy crosses a host edge;
all arithmetic is 64-bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from sharedmirror.copies.pairs import Ids, merge_runs
from sharedmirror.copies.view import TILE_BYTES, Addresses, Band, Piece, View

__all__ = [
    "Chunks",
    "Copies",
    "Cut",
    "Cuts",
    "Places",
    "Ramp",
    "Route",
    "choose_route",
    "head_pages",
    "plan_plain",
    "plan_staged",
    "sort_by_frame",
    "starts_by_kernel",
]

CHUNKS = 8
"""Loads that are watched layer by layer are cut into at least so many chunks."""
LEAST_CHUNK_BYTES = 1 << 20
RAMP_BYTES = 8 << 20
"""The first chunk of a store and the last of a load: nothing of it is on the link while a kernel moves it. One is
enough, as kernels are ten times as fast as the link; beside a model that lets them in twice in a millisecond each
further one would cost a turn."""
SMALL_BYTES = 6 << 20
"""Up to here a kernel moves straight between device and host: 4 MiB in 0.12 ms, and over before it disturbs much."""
HEAD_BYTES = SMALL_BYTES
"""So much of a call of at most SHORT_BYTES is moved by a kernel too: planning the rest takes the processor as long
as the link needs for it, and longer calls hardly feel it."""
SHORT_BYTES = 128 << 20
PLAIN_BYTES = 1 << 20
"""From this length of a contiguous stretch on, the copy engine needs no staging to be at full speed."""
ROW_BYTES = 256 << 10
"""Rows of a copy into a slab's contiguous run are made this wide where the run is long enough."""
KERNEL_COPY_BYTES = 64 << 10
"""Below this, copies to the device are slow: the driver sends their bytes along with the commands."""
FEW_ROWS = 4
"""Up to this many rows, single copies in a batch cost less than one 2D copy."""
MAX_PITCH = (1 << 31) - 1
"""The driver's limit for the distance of two rows."""
_FAR = 1 << 62
_KEPT_CUTS = 64


class Ramp(Enum):
    """Whether a call begins or ends with a small chunk."""

    NONE = "none"
    UP = "up"
    DOWN = "down"


class Route(Enum):
    """How a call's bytes travel."""

    DIRECT = "direct"
    """One kernel between device and host."""
    PLAIN = "plain"
    """The copy engine between device and host."""
    STAGED = "staged"
    """Kernels between device and staging slots, the copy engine between slots and host."""


def choose_route(addresses: Addresses, pages: Ids, frames: Ids) -> Route:
    """Return the route for these pages, from the layout, the number of bytes and the length of runs."""
    if len(pages) * addresses.page_bytes <= SMALL_BYTES:
        return Route.DIRECT
    if addresses.shortest_stretch(len(pages)) < PLAIN_BYTES:
        return Route.STAGED
    # In the order given: whoever has runs names them in order, and sorting would cost more than it finds.
    runs = 1 + int(np.count_nonzero((pages[1:] - pages[:-1] != 1) | (frames[1:] - frames[:-1] != 1)))
    return Route.PLAIN if addresses.shortest_stretch(len(pages) // runs) >= PLAIN_BYTES else Route.STAGED


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies in the order of submission, chunk by chunk.

    ``table`` has the columns host address, device address, width, rows, host pitch, device pitch (bytes), each of
    them contiguous. In chunk c, the copies ``bounds[c]`` to ``middles[c]`` are single rows, those up to
    ``bounds[c + 1]`` not; without ``middles`` all are single rows.
    """

    table: Ids
    bounds: Ids
    middles: Ids | None


@dataclass(frozen=True)
class Cut:
    """What decides how a call is cut: everything but the pages themselves."""

    pages: int
    per_chunk: int
    chunk_bytes: int
    first_group: int
    ramp: Ramp


@dataclass(frozen=True, eq=False)
class Chunks:
    """How a number of pages is cut, whichever pages they are: piece by piece, block of pages by block.

    ``starts`` are the first page of each block, ``counts`` its pages. ``launches`` has shape (chunks, tables, 6):
    index of the first page, pages, first tile, tiles, low x, high x. ``group_ends`` are the numbers of chunks
    after which a group is complete. ``block_of`` and ``at_of`` say for each page its block and its place there, and
    ``index`` and ``ones`` are 0, 1, ... and as many ones.
    """

    pieces: tuple[Piece, ...]
    starts: Ids
    counts: Ids
    launches: Ids
    group_ends: tuple[int, ...]
    block_of: Ids
    at_of: Ids
    index: Ids
    ones: Ids
    _places: dict[tuple[int, tuple[int, ...]], Places] = field(default_factory=dict)

    @classmethod
    def of(cls, view: View, cut: Cut) -> Chunks:
        """Cut a view and a number of pages."""
        every = view.pieces(cut.chunk_bytes // cut.per_chunk)
        pieces = tuple(piece for piece in every if piece.group >= cut.first_group)
        counts = np.array(_blocks(cut, view.groups[-1] - view.groups[cut.first_group]), np.int64)
        starts = np.cumsum(counts) - counts
        low, high = (np.array([getattr(piece, name) for piece in pieces], np.int64) for name in ("low", "high"))
        rows = np.empty((len(pieces), len(counts), len(view.tables), 6), np.int64)
        rows[..., 0], rows[..., 1] = starts[None, :, None], counts[None, :, None]
        for at, tiles in enumerate(view.tables):
            first, number = tiles.between(low, high)
            rows[:, :, at, 2], rows[:, :, at, 3] = first[:, None], number[:, None]
        rows[..., 4], rows[..., 5] = low[:, None, None], high[:, None, None]
        pieces_of = np.bincount([piece.group for piece in pieces], minlength=len(view.groups) - 1)
        ends = np.cumsum(pieces_of[cut.first_group :]) * len(counts)
        block_of = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        index = np.arange(cut.pages, dtype=np.int64)
        launches, ones = rows.reshape(-1, len(view.tables), 6), np.ones_like(index)
        return cls(
            pieces, starts, counts, launches, tuple(ends.tolist()), block_of, index - starts[block_of], index, ones
        )

    def places(self, slots: tuple[int, ...], first_slot: int) -> Places:
        """Return where pages lie when chunk c is in slot ``(first_slot + c) % len(slots)``."""
        key = first_slot % len(slots), slots
        if key not in self._places:
            self._places[key] = Places(self, np.roll(np.array(slots, np.int64), -first_slot))
        return self._places[key]


class Places:
    """Where each page of a call lies in the staging slots, kept because calls of equal size come again."""

    def __init__(self, chunks: Chunks, slots: Ids) -> None:
        self._chunks = chunks
        self._slot_of = slots[np.arange(len(chunks.launches)) % len(slots)].reshape(-1, len(chunks.counts))
        self._known: dict[tuple[int, Band], Ids] = {}

    def of(self, piece: int, band: Band) -> Ids:
        """Return the device address of a band's first row, for each page."""
        known = self._known.get((piece, band))
        if known is None:
            chunks = self._chunks
            block = chunks.block_of
            known = self._slot_of[piece][block] + chunks.counts[block] * band.dense + chunks.at_of * band.width
            self._known[piece, band] = known
        return known


class Cuts:
    """The chunks of one view, kept because engines move like numbers of pages again and again."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._known: dict[Cut, Chunks] = {}

    def get(self, frames: Ids, slot_bytes: int, first_group: int = 0, ramp: Ramp = Ramp.NONE) -> Chunks:
        """Return the chunks for these frames, which are in ascending order; the groups before are left out."""
        if len(self.view.groups) - first_group > 2:
            ramp = Ramp.NONE
        even = ramp is Ramp.NONE
        chunk_bytes = _chunk_bytes(self.view.groups[-1] * len(frames), slot_bytes) if even else slot_bytes
        cut = Cut(len(frames), _pages_per_chunk(self.view, frames, chunk_bytes), chunk_bytes, first_group, ramp)
        if cut not in self._known:
            if len(self._known) >= _KEPT_CUTS:
                self._known.clear()
            self._known[cut] = Chunks.of(self.view, cut)
        return self._known[cut]


def plan_staged(chunks: Chunks, frames: Ids, slots: tuple[int, ...], first_slot: int, edges: Ids) -> Copies:
    """Return the copies between slots and host; chunk c is in slot ``(first_slot + c) % len(slots)``.

    ``slots`` are addresses. The frames are in ascending order (``sort_by_frame``).
    """
    blocks, number = len(chunks.counts), len(chunks.launches)
    places, runs = chunks.places(slots, first_slot), _Runs.of(frames, chunks.starts)
    parts = [
        part
        for at, piece in enumerate(chunks.pieces)
        for band in piece.bands
        for part in _band_copies(band, runs, frames, chunks, places, at, at * blocks)
    ]
    if len(parts) == 1:
        return _arrange(*parts[0], number, edges, sorted_by_chunk=True)
    table = np.empty((sum(len(part[1]) for part in parts), 6), np.int64, order="F")
    np.concatenate([part[0] for part in parts], out=table)
    return _arrange(table, np.concatenate([part[1] for part in parts]), number, edges)


def sort_by_frame(pages: Ids, frames: Ids) -> tuple[Ids, Ids]:
    """Return both in the order of the frames, so that neighbours on the host are neighbours in a slot."""
    order = frames.argsort()
    return pages[order], frames[order]


def starts_by_kernel(view: View) -> bool:
    """Return whether the first group of several is so small that a kernel on host memory is the fastest."""
    return len(view.groups) > 2 and view.copy_bytes(0) < KERNEL_COPY_BYTES


def head_pages(view: View, pages: int) -> int:
    """Return how many pages of a short call a kernel on host memory takes first."""
    page_bytes = view.groups[-1]
    return (
        min(HEAD_BYTES // page_bytes, pages // 2) if len(view.groups) == 2 and pages * page_bytes <= SHORT_BYTES else 0
    )


def _chunk_bytes(total_bytes: int, slot_bytes: int) -> int:
    """Return the size of a chunk; powers of two, so that a view is cut into pieces in few ways."""
    wanted = max(LEAST_CHUNK_BYTES, total_bytes // CHUNKS)
    return slot_bytes if wanted >= slot_bytes else min(slot_bytes, 1 << (wanted.bit_length() - 1))


def _blocks(cut: Cut, page_bytes: int) -> list[int]:
    """Return how many pages each block has."""
    most = cut.per_chunk
    small = 0 if cut.ramp is Ramp.NONE else min(max(1, RAMP_BYTES // page_bytes), cut.pages, most)
    whole, left = divmod(cut.pages - small, most)
    counts = [count for count in (small, *[most] * whole, left) if count]
    return counts[::-1] if cut.ramp is Ramp.DOWN else counts


def _pages_per_chunk(view: View, frames: Ids, chunk_bytes: int) -> int:
    """Return how many pages share a chunk: as many as fit, or more where that makes wider rows of long runs."""
    widest = max(high - low for low, high in zip(view.groups[:-1], view.groups[1:], strict=True))
    fitting = max(1, chunk_bytes // widest)
    wide = min(-(-ROW_BYTES * len(view.records) // view.groups[-1]), chunk_bytes // (4 * TILE_BYTES))
    if wide > fitting:
        wide = min(wide, len(frames) // (1 + int(np.count_nonzero(frames[1:] - frames[:-1] != 1))))
    return fitting if wide <= fitting else 1 << (wide.bit_length() - 1)


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of neighbouring frames within a block: index of the first, its frame, number."""

    start: Ids
    frame: Ids
    length: Ids

    @classmethod
    def of(cls, frames: Ids, starts: Ids) -> _Runs:
        """Return the runs of sorted frames, in blocks that start at these indices."""
        new = np.empty(len(frames) + 1, dtype=bool)
        np.not_equal(frames[1:], frames[:-1] + 1, out=new[1:-1])
        new[starts] = new[-1] = True
        bounds = new.nonzero()[0]
        start = bounds[:-1]
        return cls(start, frames[start], bounds[1:] - start)


def _band_copies(
    band: Band, runs: _Runs, frames: Ids, chunks: Chunks, places: Places, piece: int, first_chunk: int
) -> list[tuple[Ids, Ids]]:
    """Return the copies of one band of a piece, and the chunk of each."""
    dense = band.width == band.host_stride
    if not dense:
        # Frames that lie apart cannot be one row: each run is a 2D copy per row of the band, or each frame one.
        if band.rows > 1 and len(runs.start) * band.rows < len(chunks.block_of):
            return [
                part
                for row in band.split()
                for part in _band_copies(row, runs, frames, chunks, places, piece, first_chunk)
            ]
        if band.rows > 1 or len(runs.start) * FEW_ROWS >= len(chunks.block_of):
            runs = _Runs(chunks.index, frames, chunks.ones)
    # Columns are contiguous: the driver reads them where they are.
    table = np.empty((len(runs.start), 6), np.int64, order="F")
    host, device, width, rows, host_pitch, device_pitch = table.T
    np.multiply(runs.frame, band.host_stride, out=host)
    host += band.host
    block = chunks.block_of[runs.start]
    device[:] = places.of(piece, band)[runs.start]
    if dense or band.rows > 1:
        np.multiply(runs.length, band.width, out=width)
        rows[:], host_pitch[:] = band.rows, band.host_pitch
        device_pitch[:] = chunks.counts[block] * band.dense_pitch if band.rows > 1 else 0
    else:
        width[:], rows[:], host_pitch[:], device_pitch[:] = band.width, runs.length, band.host_stride, band.width
    return [(table, first_chunk + block)]


def plan_plain(view: View, pages: Ids, frames: Ids, edges: Ids) -> Copies:
    """Return the copies straight between device and host; a chunk is a group of the view."""
    page, frame, length = merge_runs(pages, frames)
    group, size, device_base, device_stride, host_base, host_stride = view.columns
    table = np.empty((len(view.planes) * len(page), 6), np.int64, order="F")
    host, device, width, rows, host_pitch, device_pitch = table.T.reshape(6, len(view.planes), len(page))
    np.add(host_base, frame * host_stride, out=host)
    np.add(device_base, page * device_stride, out=device)
    width[:], rows[:], host_pitch[:], device_pitch[:] = size, length, host_stride, device_stride
    chunk = np.repeat(group, len(page))
    return _arrange(table, chunk, len(view.groups) - 1, edges, sorted_by_chunk=True)


def _arrange(table: Ids, chunk: Ids, chunks: int, edges: Ids, *, sorted_by_chunk: bool = False) -> Copies:
    """Bring copies into the form that the driver takes, and into the order of the chunks."""
    several = int(table[:, 3].max()) > 1
    if several:
        solid = (table[:, 4] == table[:, 2]) & (table[:, 5] == table[:, 2])
        np.multiply(table[:, 2], table[:, 3], out=table[:, 2], where=solid)
        np.copyto(table[:, 3], 1, where=solid)
        several = not solid.all()
    crossing = _crossing(table, edges, several)
    if crossing is not None:
        table, chunk = _replace(table, chunk, crossing, lambda crossed: _cut_at_edges(crossed, edges))
    key = chunk
    if several:
        rows = table[:, 3]
        split = (rows > 1) & ((rows <= FEW_ROWS) | (table[:, 4] > MAX_PITCH) | (table[:, 5] > MAX_PITCH))
        table, chunk = _replace(table, chunk, split, _single_rows)
        key = 2 * chunk + (table[:, 3] > 1)
    if (several or crossing is not None or not sorted_by_chunk) and (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        table, key = table[order], key[order]
    if not several:
        bounds = np.searchsorted(key, np.arange(chunks + 1))
        return Copies(np.asfortranarray(table), bounds, None)
    marks = np.searchsorted(key, np.arange(2 * chunks + 1))
    return Copies(np.asfortranarray(table), marks[::2], marks[1::2])


def _replace(
    table: Ids, chunk: Ids, which: npt.NDArray[np.bool_], cut: Callable[[Ids], tuple[Ids, Ids]]
) -> tuple[Ids, Ids]:
    """Cut some copies into several; ``cut`` returns those, and the index of the copy each came from."""
    if not which.any():
        return table, chunk
    parts, owner = cut(table[which])
    return np.concatenate([table[~which], parts]), np.concatenate([chunk[~which], chunk[which][owner]])


def _count_up(lengths: Ids) -> Ids:
    """Return 0, 1, ... up to each length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - lengths, lengths)


def _crossing(table: Ids, edges: Ids, several: bool) -> npt.NDArray[np.bool_] | None:
    """Return which copies have an edge strictly inside the host bytes from their first to their last, if any has."""
    if not len(edges):
        return None
    last = table[:, 0] + table[:, 2]
    if several:
        last += (table[:, 3] - 1) * table[:, 4]
    crossing: npt.NDArray[np.bool_] = edges.searchsorted(table[:, 0], "right") != edges.searchsorted(last, "left")
    return crossing if crossing.any() else None


def _single_rows(table: Ids) -> tuple[Ids, Ids]:
    """Return each row of 2D copies as a copy of its own."""
    owner = np.repeat(np.arange(len(table), dtype=np.int64), table[:, 3])
    row = _count_up(table[:, 3])
    single = table[owner]
    single[:, 0] += row * single[:, 4]
    single[:, 1] += row * single[:, 5]
    single[:, 3:] = (1, 0, 0)
    return single, owner


def _cut_at_edges(table: Ids, edges: Ids) -> tuple[Ids, Ids]:
    """Cut copies at edges: between two rows where the edge lies between them, else the row itself.

    Each round takes from every copy what lies before its next edge.
    """
    parts: list[Ids] = []
    owners: list[Ids] = []
    owner = np.arange(len(table), dtype=np.int64)
    limits = np.append(edges, _FAR)
    while len(table):
        host, device, width, rows, host_pitch, device_pitch = table.T
        host_pitch = np.where(rows == 1, width, host_pitch)
        edge = limits[np.searchsorted(edges, host, side="right")]
        begun = np.minimum(rows, -(-(edge - host) // host_pitch))
        inside = edge - (host + (begun - 1) * host_pitch)
        whole = begun - (inside < width)
        last_host, last_device = host + (begun - 1) * host_pitch, device + (begun - 1) * device_pitch
        one, none = np.ones_like(rows), np.zeros_like(rows)
        before = np.stack([host, device, width, whole, host_pitch, device_pitch], 1)
        head = np.stack([last_host, last_device, inside, one, none, none], 1)
        tail = np.stack([edge, last_device + inside, width - inside, one, none, none], 1)
        after = table + np.stack([begun * host_pitch, begun * device_pitch, none, -begun, none, none], 1)
        cut, more = whole < begun, begun < rows
        parts += [before[whole > 0], head[cut]]
        owners += [owner[whole > 0], owner[cut]]
        table, owner = np.concatenate([tail[cut], after[more]]), np.concatenate([owner[cut], owner[more]])
    return np.concatenate(parts), np.concatenate(owners)
