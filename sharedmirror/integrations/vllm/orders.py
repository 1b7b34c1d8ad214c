"""What the scheduler's manager tells the ranks to copy, and which block goes with which host frame.

Orders travel pickled. An order names the daemon's instance: ids of leases and hits mean nothing to
another one, and the same number could be in use there.

Nothing here talks to the daemon or touches a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LoadStoreSpec

from sharedmirror.errors import PageError
from sharedmirror.types import Lease

__all__ = ["GroupLoad", "GroupStore", "LoadOrder", "Pinned", "StoreOrder", "load_pairs", "split_groups", "store_pairs"]

Pairs = npt.NDArray[np.int64]
"""(device block, host frame) rows."""


@dataclass(frozen=True)
class Pinned:
    """A hit as the ranks see it."""

    instance: str
    id: int
    pool: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class GroupStore:
    """Pages of one cache group's pool to be written, in the order of the group's chunks."""

    instance: str
    lease: Lease


@dataclass(frozen=True)
class GroupLoad:
    """Pages of one cache group's pool to be read: (hit, host pages) runs, in the order of the group's chunks."""

    runs: tuple[tuple[Pinned, tuple[int, ...]], ...]


@dataclass
class StoreOrder(LoadStoreSpec):
    """One entry a cache group; None where the group stores nothing."""

    groups: tuple[GroupStore | None, ...]


@dataclass
class LoadOrder(LoadStoreSpec):
    """One entry a cache group; None where the group loads nothing, or nothing that is there any more."""

    req_id: str
    groups: tuple[GroupLoad | None, ...]


def split_groups(
    blocks: npt.NDArray[np.int32], group_sizes: list[int], block_indices: list[int], groups: int
) -> list[tuple[npt.NDArray[np.int64], int]]:
    """Return each group's device blocks, and the index of its first block in the request."""
    if len(group_sizes) != groups or len(block_indices) != groups:
        raise PageError(f"vLLM named blocks of {len(group_sizes)} cache groups; the tier was set up for {groups}")
    ends = np.cumsum(group_sizes)
    parts = np.split(blocks.astype(np.int64), ends[:-1])
    return list(zip(parts, (int(index) for index in block_indices), strict=True))


def store_pairs(blocks: npt.NDArray[np.int64], pages: tuple[int, ...], per_chunk: int) -> Pairs:
    """Pair whole chunks of blocks with the frames of ``pages``; raises PageError when they do not fit."""
    frames = _frames(pages, per_chunk)
    if len(blocks) != len(frames):
        raise PageError(f"{len(blocks)} blocks do not fill {len(pages)} chunks of {per_chunk}")
    return np.stack((blocks, frames), axis=1)


def load_pairs(blocks: npt.NDArray[np.int64], pages: tuple[int, ...], per_chunk: int, first_block: int) -> Pairs:
    """Pair blocks with the frames they are in; the first and the last chunk may be needed in part only.

    ``first_block`` is the index in the request of the first block; chunks begin at multiples of
    ``per_chunk``. Raises PageError when the blocks need more or fewer chunks than ``pages``.
    """
    skipped = first_block % per_chunk
    if -(-(skipped + len(blocks)) // per_chunk) != len(pages):
        raise PageError(f"{len(blocks)} blocks from block {first_block} do not lie in {len(pages)} chunks")
    frames = _frames(pages, per_chunk)[skipped : skipped + len(blocks)]
    return np.stack((blocks, frames), axis=1)


def _frames(pages: tuple[int, ...], per_chunk: int) -> npt.NDArray[np.int64]:
    starts = np.asarray(pages, dtype=np.int64).reshape(-1, 1) * per_chunk
    return (starts + np.arange(per_chunk)).ravel()
