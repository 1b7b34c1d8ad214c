"""Page pairs: checked completely before anything is copied.

A pair is (device page, host frame). A store may not name a host frame twice, a load may not name a
device page twice: the result would depend on the order of the copies. The null page is the
exception in static pools, because engines pad with it; of several pairs that would write it one is
kept, so that it holds one of the copies and never a mixture.

Nothing here imports torch. The common case is a handful of numpy calls, whatever the number of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from sharedmirror.errors import PageError

__all__ = ["Ids", "PagePairs", "check_pairs", "merge_runs"]

Ids = npt.NDArray[np.int64]
"""Page or frame ids: one-dimensional, int64."""

PagePairs = Sequence[tuple[int, int]] | Iterable[tuple[int, int]] | npt.NDArray[Any]
"""(device page, host frame) pairs: any iterable of 2-tuples, or an integer array of shape (n, 2)."""


def check_pairs(
    pairs: PagePairs, device_pages: int, host_frames: int, kind: Literal["store", "load"], *, null_frames: int = 0
) -> tuple[Ids, Ids]:
    """Return the pairs as two int64 arrays: device pages and host frames, each of shape (n,).

    ``device_pages`` and ``host_frames`` are the sizes of the two pools; frames below ``null_frames``
    belong to the null page and may be named several times.

    Raises PageError, naming the pair by position and value, for anything that is not a pair of ints
    in range, for a host frame twice in a store and for a device page twice in a load.
    """
    table = _table(pairs)
    device = np.ascontiguousarray(table[:, 0])
    host = np.ascontiguousarray(table[:, 1])
    # As unsigned numbers, negative ids are out of range too: one comparison checks both ends.
    for column, limit, what in ((device, device_pages, "device page"), (host, host_frames, "host frame")):
        bad = column.view(np.uint64) >= np.uint64(limit)
        if bad.any():
            at = int(np.argmax(bad))
            _refuse(table, at, f"{what} {column[at]} is not in 0..{limit - 1}")
    return _unique(table, device, host, kind, null_frames)


def merge_runs(device: Ids, host: Ids) -> tuple[Ids, Ids, Ids]:
    """Return (first device page, first host frame, length) of each run in which both ids rise by one."""
    if len(host) == 0:
        return device, host, host
    steps = host[1:] - host[:-1]
    if len(steps) and steps.min() <= 0:
        order = np.argsort(host, kind="stable")
        device, host = device[order], host[order]
        steps = host[1:] - host[:-1]
    starts = np.flatnonzero((steps != 1) | (device[1:] - device[:-1] != 1)) + 1
    starts = np.concatenate((np.zeros(1, np.int64), starts))
    return device[starts], host[starts], np.diff(starts, append=len(host))


def _table(pairs: PagePairs) -> Ids:
    if isinstance(pairs, np.ndarray):
        if pairs.dtype.kind not in "iu":
            raise PageError(f"page pairs are an array of {pairs.dtype}; page ids are integers")
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise PageError(f"page pairs have shape {pairs.shape}; the shape is (n, 2)")
        if pairs.dtype == np.uint64 and pairs.size and pairs.max() > np.iinfo(np.int64).max:
            raise PageError(f"page pairs hold {pairs.max()}, which is no page id")
        return pairs.astype(np.int64, copy=False)
    return _from_sequence(pairs)


def _from_sequence(pairs: Iterable[Any]) -> Ids:
    try:
        listed = pairs if isinstance(pairs, (list, tuple)) else list(pairs)
        widths = set(map(len, listed))
        flat = list(chain.from_iterable(listed))
    except TypeError as error:
        raise PageError(f"page pairs are (device page, host page) tuples: {error}") from error
    if widths - {2}:
        at = next(i for i, pair in enumerate(listed) if len(pair) != 2)
        raise PageError(f"pair {at} is {listed[at]!r}; a pair is (device page, host page)", pair=at)
    # numpy would quietly turn True into 1, so the types are looked at first.
    for kind in set(map(type, flat)):
        if issubclass(kind, (bool, np.bool_)) or not issubclass(kind, (int, np.integer)):
            at = next(i for i, value in enumerate(flat) if type(value) is kind) // 2
            remedy = "; pass tensor.tolist() or tensor.cpu().numpy()" if kind.__name__ == "Tensor" else ""
            raise PageError(f"pair {at} is {listed[at]!r}; page ids are ints, not {kind.__name__}{remedy}", pair=at)
    try:
        return np.array(flat, dtype=np.int64).reshape(-1, 2)
    except OverflowError as error:
        at = next(i for i, value in enumerate(flat) if not -(1 << 63) <= value < 1 << 63) // 2
        raise PageError(f"pair {at} is {listed[at]!r}, which is out of range", pair=at) from error


def _unique(table: Ids, device: Ids, host: Ids, kind: Literal["store", "load"], null_frames: int) -> tuple[Ids, Ids]:
    target = host if kind == "store" else device
    ranked = np.sort(target)
    if not (ranked[1:] == ranked[:-1]).any():
        return device, host
    # Only here, where something is repeated, is it worth telling padding from a mistake.
    last = {int(value): at for at, value in enumerate(target)}
    keep = np.zeros(len(target), dtype=bool)
    keep[list(last.values())] = True
    for at in np.flatnonzero(~keep).tolist():
        winner = last[int(target[at])]
        padding = host[at] < null_frames and (kind == "store" or host[at] == host[winner])
        if not padding:
            what = (
                f"host frame {target[at]} twice in one store"
                if kind == "store"
                else f"device page {target[at]} twice in one load"
            )
            _refuse(table, winner, f"it names {what}; the first is pair {at}")
    return device[keep], host[keep]


def _refuse(table: Ids, at: int, why: str) -> NoReturn:
    device, host = (int(value) for value in table[at])
    raise PageError(f"pair {at}, ({device}, {host}): {why}", pair=at, device_page=device, host_page=host)
