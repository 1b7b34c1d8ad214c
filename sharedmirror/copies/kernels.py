"""The one kernel of the staged engine: it moves tiles between device pages and dense memory.

A tile is a piece of one plane's slice (``view.TileTable``). The kernel runs over pages times tiles and
moves each either between the device page and its place in a staging buffer, or straight between the
device page and the host frame, which the device reads and writes over the link.

Triton compiles it; launching goes through the driver, because a launch from Python through Triton
costs several times as much CPU. All arguments are 64-bit integers, so one binary serves every size.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from sharedmirror.copies.driver import Driver, Kernel
from sharedmirror.copies.view import ARGUMENTS, TILE_FIELDS, TileTable

__all__ = ["MoveKernels"]

_WARPS = 4
_WORDS = {16: (tl.int64, 8), 8: (tl.int64, 8), 4: (tl.int32, 4), 2: (tl.int16, 2), 1: (tl.int8, 1)}


def _move(  # type: ignore[no-untyped-def]  # Triton would take annotations for names in the kernel
    table,
    pages,
    frames,
    count,
    first,
    tiles,
    low,
    high,
    staging,
    TO_DENSE: tl.constexpr,
    DIRECT: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Move ``tiles`` tiles from tile ``first`` on, of ``count`` pages; chunk [low, high) of a page's bytes."""
    table = table.to(tl.pointer_type(tl.int64))
    pages = pages.to(tl.pointer_type(tl.int64))
    frames = frames.to(tl.pointer_type(tl.int64))
    jobs = (count * tiles).to(tl.int32)
    per_page = tiles.to(tl.int32)
    step = tl.num_programs(0) * ROWS
    for start in range(tl.program_id(0) * ROWS, jobs, step):
        job = start + tl.arange(0, ROWS)
        live = job < jobs
        at = job // per_page
        tile = table + (first + (job - at * per_page)) * FIELDS
        page = tl.load(pages + at, mask=live, other=0)
        device = tl.load(tile, mask=live, other=0) + page * tl.load(tile + 1, mask=live, other=0)
        if DIRECT:
            frame = tl.load(frames + at, mask=live, other=0)
            dense = tl.load(tile + 6, mask=live, other=0) + frame * tl.load(tile + 7, mask=live, other=0)
        else:
            begin = tl.maximum(tl.load(tile + 3, mask=live, other=0), low)
            end = tl.minimum(tl.load(tile + 4, mask=live, other=0), high)
            x = tl.load(tile + 2, mask=live, other=0)
            dense = staging + count * (begin - low) + at * (end - begin) + (x - begin)
        # In units of 16 bytes where all is aligned: the compiler sees then that words go in pairs.
        size = tl.load(tile + 5, mask=live, other=0) // ALIGNED * (ALIGNED // SIZE)
        word = tl.arange(0, WORDS)[None, :]
        wanted = word < size[:, None]
        inner = tl.multiple_of(device.to(tl.pointer_type(KIND))[:, None] + word, (1, ALIGNED))
        outer = tl.multiple_of(dense.to(tl.pointer_type(KIND))[:, None] + word, (1, ALIGNED))
        if TO_DENSE:
            tl.store(outer, tl.load(inner, mask=wanted), mask=wanted)
        else:
            tl.store(inner, tl.load(outer, mask=wanted), mask=wanted)


_jit = triton.jit(_move, do_not_specialize=list(ARGUMENTS))


class MoveKernels:
    """The kernel's binaries, compiled on first use for the current device."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kernels: dict[tuple[int, int, bool, bool], Kernel] = {}

    def get(self, table: TileTable, *, to_dense: bool, direct: bool) -> Kernel:
        """Return the binary for a table's word and tile size; compiles it if it is new."""
        key = (table.word, table.tile_bytes, to_dense, direct)
        if key not in self._kernels:
            self._kernels[key] = self._compile(table, to_dense, direct)
        return self._kernels[key]

    def all(self, tables: Sequence[TileTable], *, to_dense: bool, direct: bool) -> list[Kernel]:
        """Return the binary for each table."""
        return [self.get(table, to_dense=to_dense, direct=direct) for table in tables]

    def _compile(self, table: TileTable, to_dense: bool, direct: bool) -> Kernel:
        kind, size = _WORDS[table.word]
        # Odd and beyond 32 bits, so that every argument is compiled as a plain 64-bit integer.
        arguments = [(1 << 40) + 1] * len(ARGUMENTS)
        binary = _jit.warmup(
            *arguments,
            TO_DENSE=to_dense,
            DIRECT=direct,
            ALIGNED=table.word,
            KIND=kind,
            SIZE=size,
            WORDS=table.tile_bytes // size,
            ROWS=table.rows,
            FIELDS=TILE_FIELDS,
            num_warps=_WARPS,
            grid=(1,),
        )
        return self._driver.load_kernel(
            binary.asm["cubin"], binary.metadata.name, threads=32 * _WARPS, shared_bytes=binary.metadata.shared
        )
