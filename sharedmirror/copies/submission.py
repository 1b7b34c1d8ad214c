"""Tables of kernel launches and copies in the form that the driver takes, filled a whole call at a time.

Building them is a few numpy operations per call; then each chunk costs a few driver calls with addresses
into the tables. The tables must outlive the driver calls that read them, and nothing longer: the driver
copies what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from sharedmirror.copies.driver import Driver, Kernel, launch_shapes, row_copies
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import Chunks, Copies, Cuts
from sharedmirror.copies.view import ARGUMENTS, View

__all__ = ["Arguments", "CopyTables", "LaunchTables", "Lines", "Ring", "direct_launches"]

BLOCKS = 32
"""Blocks of 128 threads that gather or scatter, at 400 to 700 GB/s. More, fewer and larger ones disturbed a
memory-bound chain more: 64 made it 1.08 (stores) and 1.11 (loads) times as long instead of 1.05 and 1.08, 8 blocks
of 512 threads 1.07 and 1.13."""
LONG_COPY_BYTES = 8 << 20
"""Up to here copies go in batches: between single ones the link rests for 2.4 us, in a batch it does not."""
_WIDTH = len(ARGUMENTS) + 2
_SHAPE_BYTES = 56
_KEPT_TEMPLATES = 64
_ROW_BYTES = 128


class Ring(Protocol):
    """Staging slots, the one that comes next, and the stream of the kernels that fill or empty them."""

    slots: list[int]
    next_slot: int
    compute: int


class Lines:
    """A view, its tile tables on the device, and how it was cut before."""

    def __init__(self, view: View, device: torch.device) -> None:
        self.view = view
        self.cuts = Cuts(view)
        self.templates: dict[tuple[Chunks, int, int], tuple[Ids, Ids, list[bool]]] = {}
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
        self._values = values
        self._addresses = int(values.ctypes.data) + 8 * np.arange(values.size, dtype=np.int64)
        self._first = int(self._addresses.ctypes.data)

    def row(self, row: int) -> int:
        """Return the address of the addresses of a row's arguments."""
        return self._first + 8 * row * _WIDTH


class LaunchTables:
    """The kernels of a call's chunks."""

    def __init__(
        self, driver: Driver, kernels: list[Kernel], lines: Lines, chunks: Chunks, lane: Ring, ids: int
    ) -> None:
        key = (chunks, lane.next_slot, lane.compute)
        template = lines.templates.get(key)
        if template is None:
            if len(lines.templates) >= _KEPT_TEMPLATES:
                lines.templates.clear()
            template = lines.templates[key] = _launch_template(kernels, lines, chunks, lane)
        values, self._shapes, self._empty = template
        values = values.copy()
        values[:, 1] += ids
        self._driver, self._kernels, self._arguments = driver, kernels, Arguments(values)
        self._first_shape = int(self._shapes.ctypes.data)

    def submit(self, chunk: int) -> None:
        """Enqueue the kernels of one chunk: one for each table that has tiles in it."""
        for row, kernel in enumerate(self._kernels, chunk * len(self._kernels)):
            if not self._empty[row]:
                self._driver.launch(kernel, self._first_shape + _SHAPE_BYTES * row, self._arguments.row(row))


def _launch_template(kernels: list[Kernel], lines: Lines, chunks: Chunks, lane: Ring) -> tuple[Ids, Ids, list[bool]]:
    """Return the arguments for ids at address 0, the shapes, and which rows have nothing to do."""
    number, tables, _ = chunks.launches.shape
    values = np.zeros((number, tables, _WIDTH), np.int64)
    values[..., 0] = lines.addresses
    values[..., 1] = 8 * chunks.launches[..., 0]
    values[..., 3:8] = chunks.launches[..., 1:]
    slots = np.array(lane.slots, np.int64)
    values[..., 8] = slots[(lane.next_slot + np.arange(number)) % len(slots)][:, None]
    per_block = np.array([table.rows for table in lines.view.tables], np.int64)
    blocks = np.minimum(BLOCKS, -(-chunks.launches[..., 1] * chunks.launches[..., 3] // per_block)).reshape(-1)
    threads = np.tile([kernel.threads for kernel in kernels], number)
    shared = np.tile([kernel.shared_bytes for kernel in kernels], number)
    return values.reshape(-1, _WIDTH), launch_shapes(blocks, threads, shared, lane.compute), (blocks == 0).tolist()


def direct_launches(
    lines: Lines, kernels: list[Kernel], groups: int, ids: int, count: int, stream: int, most_blocks: int
) -> Iterator[tuple[Kernel, int, Arguments]]:
    """Yield the launches that move the first groups of ``count`` pages straight between device and host."""
    bounds = np.array([0]), np.array([lines.view.groups[groups]])
    for kernel, table, address in zip(kernels, lines.view.tables, lines.addresses, strict=True):
        tiles = len(table.fields) if groups == len(lines.view.groups) - 1 else int(table.between(*bounds)[1][0])
        if tiles:
            values = np.array([(address, ids, ids + 8 * count, count, 0, tiles, 0, 0, 0, 0, 0)], np.int64)
            blocks = np.array([min(most_blocks, -(-count * tiles // table.rows))])
            shape = launch_shapes(blocks, np.array([kernel.threads]), np.array([kernel.shared_bytes]), stream)
            yield kernel, shape.ctypes.data, Arguments(values)


class CopyTables:
    """The copies of a call's chunks."""

    def __init__(self, driver: Driver, copies: Copies, to_host: bool) -> None:
        table = np.asfortranarray(copies.table)
        host, device, width, rows, host_pitch, device_pitch = table.T
        self._driver = driver
        self._targets, self._sources = (host, device) if to_host else (device, host)
        self._sizes = width
        self._starts = tuple(int(column.ctypes.data) for column in (self._targets, self._sources, width))
        self._bounds, self._middles = copies.bounds.tolist(), copies.middles.tolist()
        self._batches = driver.has_batches and int(width.max()) < LONG_COPY_BYTES
        if self._bounds[1:] != self._middles:
            pitches = (host_pitch, device_pitch) if to_host else (device_pitch, host_pitch)
            self._rows = row_copies(self._targets, self._sources, *pitches, width, rows)
            self._first_row = int(self._rows.ctypes.data)

    def submit(self, chunk: int, stream: int) -> None:
        """Enqueue the copies of one chunk."""
        first, middle, last = self._bounds[chunk], self._middles[chunk], self._bounds[chunk + 1]
        if middle - first > 1 and self._batches:
            targets, sources, sizes = self._starts
            at = 8 * first
            self._driver.copy_batch(targets + at, sources + at, sizes + at, middle - first, stream)
        else:
            for one in range(first, middle):
                self._driver.copy(int(self._targets[one]), int(self._sources[one]), int(self._sizes[one]), stream)
        for row in range(middle, last):
            self._driver.copy_rows(self._first_row + _ROW_BYTES * row, stream)
