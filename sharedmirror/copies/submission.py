"""Tables of kernel launches and copies in the form that the driver takes, filled a whole call at a time.

Building them is a few numpy operations per call; then each chunk costs a few driver calls with addresses
into the tables. The tables must outlive the driver calls that read them, and nothing longer: the driver
copies what it reads.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sharedmirror.copies.driver import Driver, Kernel, launch_shapes, row_copies, row_operations
from sharedmirror.copies.kernels import ARGUMENTS
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import Chunks, Copies, Cuts
from sharedmirror.copies.view import View

__all__ = ["Arguments", "CopyTables", "DirectTables", "LaunchTables", "Lines", "Ring"]

BLOCKS = 32
"""Blocks of 128 threads that gather or scatter, at 400 to 700 GB/s. More, fewer and larger ones disturbed a
memory-bound chain more: 64 made it 1.08 (stores) and 1.11 (loads) times as long instead of 1.05 and 1.08, 8 blocks
of 512 threads 1.07 and 1.13."""
_WIDTH = ARGUMENTS + 2
_SHAPE_BYTES = 56
_KEPT_TEMPLATES = 64


class Ring(Protocol):
    """Staging slots, the one that comes next, and the streams: of the copies, and of each slot's kernels."""

    slots: tuple[int, ...]
    next_slot: int
    compute: tuple[int, ...]
    copies: int


class Lines:
    """A view, its tile tables on the device, and how it was cut before."""

    def __init__(self, view: View, device: torch.device) -> None:
        self.view = view
        self.cuts = Cuts(view)
        self.templates: dict[tuple[Chunks, int, int], _Template] = {}
        self._tables = [torch.from_numpy(table.fields).to(device) for table in view.tables]
        self.addresses = [int(table.data_ptr()) for table in self._tables]

    def release(self) -> None:
        """Let go of the device's memory."""
        self._tables, self.templates = [], {}


class Arguments:
    """Rows of 64-bit kernel arguments.

    Two null arguments follow each row: newer compilers add scratch pointers at the end, and the driver
    reads only as many as the kernel has.
    """

    def __init__(self, values: Ids) -> None:
        self.values = values
        self._addresses = int(values.ctypes.data) + 8 * np.arange(values.size, dtype=np.int64)
        self._first = int(self._addresses.ctypes.data)

    def row(self, row: int) -> int:
        """Return the address of the addresses of a row's arguments."""
        return self._first + 8 * row * _WIDTH


class _Template:
    """The kernels of all calls that are cut alike: between two of them only the place of the page ids differs."""

    def __init__(self, kernels: list[Kernel], lines: Lines, chunks: Chunks, lane: Ring) -> None:
        number, tables, _ = chunks.launches.shape
        values = np.zeros((number, tables, _WIDTH), np.int64)
        values[..., 0] = lines.addresses
        values[..., 1] = 8 * chunks.launches[..., 0]
        values[..., 3:8] = chunks.launches[..., 1:]
        slots, streams = np.array([lane.slots, lane.compute], np.int64)[
            :, (lane.next_slot + np.arange(number)) % len(lane.slots)
        ]
        values[..., 8] = slots[:, None]
        per_block = np.array([table.rows for table in lines.view.tables], np.int64)
        blocks = np.minimum(BLOCKS, -(-chunks.launches[..., 1] * chunks.launches[..., 3] // per_block)).reshape(-1)
        threads = np.tile([kernel.threads for kernel in kernels], number)
        shared = np.tile([kernel.shared_bytes for kernel in kernels], number)
        self.arguments = Arguments(values.reshape(-1, _WIDTH))
        self.ids = 0
        self._shapes = launch_shapes(blocks, threads, shared, np.repeat(streams, tables))
        self.first_shape = int(self._shapes.ctypes.data)
        self.empty = (blocks == 0).tolist()

    def move(self, ids: int) -> None:
        """Make all rows name page ids at this address; launches that were submitted keep theirs."""
        self.arguments.values[:, 1] += ids - self.ids
        self.ids = ids


class LaunchTables:
    """The kernels of a call's chunks; used with the lane's lock held, as the tables serve the next call too."""

    def __init__(
        self, driver: Driver, kernels: list[Kernel], lines: Lines, chunks: Chunks, lane: Ring, ids: int
    ) -> None:
        key = (chunks, lane.next_slot, lane.copies)
        template = lines.templates.get(key)
        if template is None:
            if len(lines.templates) >= _KEPT_TEMPLATES:
                lines.templates.clear()
            template = lines.templates[key] = _Template(kernels, lines, chunks, lane)
        template.move(ids)
        self._driver, self._kernels, self._template = driver, kernels, template

    def submit(self, chunk: int) -> None:
        """Enqueue the kernels of one chunk: one for each table that has tiles in it."""
        template = self._template
        for row, kernel in enumerate(self._kernels, chunk * len(self._kernels)):
            if not template.empty[row]:
                self._driver.launch(kernel, template.first_shape + _SHAPE_BYTES * row, template.arguments.row(row))


class DirectTables:
    """The kernels of one lane that move the first groups of pages straight between device and host."""

    def __init__(self, driver: Driver, kernels: list[Kernel], lines: Lines, groups: int, most_blocks: int) -> None:
        bounds, every = (np.array([0]), np.array([lines.view.groups[groups]])), groups == len(lines.view.groups) - 1
        tables = lines.view.tables
        self._tiles = [len(each.fields) if every else int(each.between(*bounds)[1][0]) for each in tables]
        values = np.zeros((len(tables), _WIDTH), np.int64)
        values[:, 0], values[:, 5] = lines.addresses, self._tiles
        self._driver, self._kernels, self._most_blocks = driver, kernels, most_blocks
        self._arguments = Arguments(values)
        self._rows = [table.rows for table in tables]
        threads, shared = ([getattr(kernel, name) for kernel in kernels] for name in ("threads", "shared_bytes"))
        blocks = np.zeros(len(tables), np.int64)
        self._shapes = launch_shapes(blocks, np.array(threads), np.array(shared), 0)
        self._first_shape = int(self._shapes.ctypes.data)

    def submit(self, ids: tuple[int, int, int], stream: int) -> None:
        """Enqueue them; ``ids``: where device pages and host frames are listed, and how many they are."""
        self._arguments.values[:, 1:4] = ids
        self._shapes[:, 4] = stream
        count = ids[2]
        for row, (kernel, tiles) in enumerate(zip(self._kernels, self._tiles, strict=True)):
            if tiles:
                # The blocks are 32 bits, and so is what follows them: always 1.
                self._shapes[row, 0] = min(self._most_blocks, -(-count * tiles // self._rows[row])) | 1 << 32
                self._driver.launch(kernel, self._first_shape + _SHAPE_BYTES * row, self._arguments.row(row))


class CopyTables:
    """The copies of a call's chunks."""

    def __init__(self, driver: Driver, copies: Copies, to_host: bool) -> None:
        self._table = copies.table
        column = 8 * len(self._table)
        first = int(self._table.ctypes.data)
        self._driver = driver
        self._targets, self._sources = (first, first + column) if to_host else (first + column, first)
        self._sizes = first + 2 * column
        self._order = (0, 1) if to_host else (1, 0)
        self._bounds = copies.bounds.tolist()
        self._middles = self._bounds[1:] if copies.middles is None else copies.middles.tolist()
        if copies.middles is not None:
            host, device, width, rows, host_pitch, device_pitch = self._table.T
            ours, theirs = (host, host_pitch), (device, device_pitch)
            (target, target_pitch), (source, source_pitch) = (ours, theirs) if to_host else (theirs, ours)
            describe = row_operations if driver.has_row_batches else row_copies
            self._rows = describe(target, source, target_pitch, source_pitch, width, rows)
            self._row_bytes = self._rows.strides[0]
            self._first_row = int(self._rows.ctypes.data)

    def submit(self, chunk: int, stream: int) -> None:
        """Enqueue the copies of one chunk: single ones in a batch, as the link rests between any two others."""
        first, middle, last = self._bounds[chunk], self._middles[chunk], self._bounds[chunk + 1]
        if self._driver.has_batches and middle - first > 1:
            at = 8 * first
            targets, sources, sizes = self._targets + at, self._sources + at, self._sizes + at
            self._driver.copy_batch(targets, sources, sizes, middle - first, stream)
        else:
            target, source = self._order
            for row in self._table[first:middle].tolist():
                self._driver.copy(row[target], row[source], row[2], stream)
        if middle == last:
            return
        first_row = self._first_row + self._row_bytes * middle
        if self._driver.has_row_batches:
            self._driver.copy_rows_batch(first_row, last - middle, stream)
        else:
            for row in range(last - middle):
                self._driver.copy_rows(first_row + self._row_bytes * row, stream)
