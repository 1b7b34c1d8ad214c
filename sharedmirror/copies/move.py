"""The one kernel of the staged engine: it moves tiles between device pages and dense memory.

A tile is a piece of one plane's slice (``view.TileTable``). The kernel runs over pages times tiles and
moves each either between the device page and its place in a staging buffer, or straight between the
device page and the host frame, which the device reads and writes over the link.

All arguments are 64-bit integers, so one binary serves every size. Only ``kernels`` imports this
module: importing triton takes longer than attaching.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from sharedmirror.copies.view import TILE_FIELDS, TileTable

__all__ = ["Binary", "compile_mover"]

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


_ARGUMENTS = ("table", "pages", "frames", "count", "first", "tiles", "low", "high", "staging")
_jit = triton.jit(_move, do_not_specialize=list(_ARGUMENTS))


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: image, name, threads of a block and the shared memory that it wants."""

    image: bytes
    name: str
    threads: int
    shared_bytes: int


def compile_mover(table: TileTable, *, to_dense: bool, direct: bool) -> Binary:
    """Compile the kernel for a table's word and tile size, for the current device; triton keeps it on disk."""
    kind, size = _WORDS[table.word]
    # Odd and beyond 32 bits, so that every argument is compiled as a plain 64-bit integer.
    arguments = [(1 << 40) + 1] * len(_ARGUMENTS)
    made = _jit.warmup(
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
    return Binary(made.asm["cubin"], made.metadata.name, 32 * _WARPS, made.metadata.shared)
