from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from sharedmirror.copies.pairs import check_pairs, merge_runs
from sharedmirror.errors import LayoutError, PageError
from sharedmirror.layout import PlaneSpec, PoolLayout
from sharedmirror.types import Plane


def test_bytes_and_planes() -> None:
    layout = PoolLayout([PlaneSpec("kv", 576, 16, shard=0, shards=1), PlaneSpec("scale", 6, 1)], page_size=16)
    assert layout.bytes_per_page() == 576 * 16 + 6
    assert layout.row_spans == (16, 1)
    assert layout.to_planes(rank=1, world_size=4) == [Plane("kv", 0, 1, 9216, 16), Plane("scale", 1, 4, 6, 1)]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"name": "x", "row_bytes": 0, "span": 1}, "row_bytes of plane 'x'"),
        ({"name": "x", "row_bytes": 4, "span": -1}, "span of plane 'x'"),
        ({"name": "x", "row_bytes": 4.0, "span": 1}, "row_bytes of plane 'x'"),
        ({"name": "x", "row_bytes": True, "span": 1}, "row_bytes of plane 'x'"),
        ({"name": "", "row_bytes": 4, "span": 1}, "name"),
        ({"name": "x", "row_bytes": 4, "span": 1, "shard": 2, "shards": 2}, "shard 2 of plane 'x'"),
        ({"name": "x", "row_bytes": 4, "span": 1, "shard": 0}, "plane 'x'"),
        ({"name": "x", "row_bytes": 4, "span": 1, "shard": 0, "shards": 0}, "shards of plane 'x'"),
        (
            {"name": "x", "row_bytes": 4, "span": 1, "shard": 0, "shards": 1 << 70},
            "shards of plane 'x' .* at most 65536",
        ),
    ],
)
def test_bad_plane_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        PlaneSpec(**values)


def test_bad_layouts() -> None:
    plane = PlaneSpec("a", 4, 1)
    with pytest.raises(LayoutError, match="at least one plane"):
        PoolLayout([], 16)
    with pytest.raises(LayoutError, match="'a' is used 2 times"):
        PoolLayout([plane, PlaneSpec("b", 4, 1), plane], 16)
    with pytest.raises(LayoutError, match="page_size"):
        PoolLayout([plane], 0)


def test_sizes_need_no_torch() -> None:
    code = "import sys, sharedmirror.layout, sharedmirror.copies.pairs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


GOOD: list[Any] = [
    [(0, 3), (2, 1)],
    ((0, 3), (2, 1)),
    [[0, 3], [2, 1]],
    iter([(0, 3), (2, 1)]),
    [(np.int64(0), 3), (2, np.uint8(1))],
    np.array([[0, 3], [2, 1]]),
    np.array([[0, 3], [2, 1]], dtype=np.uint8),
    np.array([[0, 3, 9], [2, 1, 9]], dtype=np.int32)[:, :2],
]


@pytest.mark.parametrize("pairs", GOOD)
def test_good_pairs(pairs: Any) -> None:
    device, host = check_pairs(pairs, 4, 4, "store")
    assert device.dtype == host.dtype == np.int64
    assert (device.tolist(), host.tolist()) == ([0, 2], [3, 1])


@pytest.mark.parametrize("pairs", [[], np.zeros((0, 2), np.int64)])
def test_no_pairs(pairs: Any) -> None:
    assert len(check_pairs(pairs, 4, 4, "load")[0]) == 0


BAD: list[tuple[Any, str]] = [
    ([(0, 0), (1,)], r"pair 1 is \(1,\)"),
    ([(0, 0, 0)], "pair 0"),
    ([0, 1], "tuples"),
    (7, "tuples"),
    ([(0, 1.0)], "pair 0 .* not float"),
    ([(0, 1), (True, 2)], "pair 1 .* not bool"),
    ([(0, np.bool_(True))], "pair 0 .* not bool"),
    (["ab"], "pair 0 .* not str"),
    ([(0, None)], "pair 0 .* not NoneType"),
    ([(0, 1), (0, -1)], r"pair 1, \(0, -1\): host frame -1"),
    ([(-1, 1)], r"pair 0, \(-1, 1\): device page -1"),
    ([(4, 1)], "device page 4 is not in 0..3"),
    ([(0, 8)], "host frame 8 is not in 0..7"),
    ([(0, 1 << 70)], "pair 0"),
    ([(0, 1 << 63)], "pair 0"),
    (np.zeros((2, 3), np.int64), r"shape \(2, 3\)"),
    (np.zeros(2, np.int64), r"shape \(2,\)"),
    (np.zeros((1, 2)), "float64"),
    (np.zeros((1, 2), np.bool_), "bool"),
    (np.array([[0, 1 << 63]], np.uint64), "no page id"),
    (np.array([[0, -1]]), "host frame -1"),
]


@pytest.mark.parametrize(("pairs", "named"), BAD)
def test_bad_pairs_are_named(pairs: Any, named: str) -> None:
    with pytest.raises(PageError, match=named):
        check_pairs(pairs, 4, 8, "load")


@pytest.mark.parametrize("as_array", [False, True])
def test_repeats(as_array: bool) -> None:
    def pairs(*values: tuple[int, int]) -> Any:
        return np.array(values) if as_array else list(values)

    with pytest.raises(PageError, match=r"pair 2, \(3, 1\): .*host frame 1 twice in one store; the first is pair 0"):
        check_pairs(pairs((0, 1), (1, 2), (3, 1)), 4, 4, "store")
    with pytest.raises(PageError, match=r"pair 1, \(0, 2\): .*device page 0 twice in one load"):
        check_pairs(pairs((0, 1), (0, 2)), 4, 4, "load")
    # One device page to two host pages, and one host page to two device pages, are well defined.
    assert len(check_pairs(pairs((0, 1), (0, 2)), 4, 4, "store")[0]) == 2
    assert len(check_pairs(pairs((1, 0), (2, 0)), 4, 4, "load")[0]) == 2


def test_null_page_may_repeat_in_static_pools_only() -> None:
    padded = [(3, 1), (1, 0), (2, 0), (0, 0)]
    device, host = check_pairs(padded, 4, 4, "store", null_frames=1)
    assert sorted(zip(device.tolist(), host.tolist(), strict=True)) == [(0, 0), (3, 1)]
    with pytest.raises(PageError, match="host frame 0 twice"):
        check_pairs(padded, 4, 4, "store")
    with pytest.raises(PageError, match="host frame 2 twice"):
        check_pairs([(0, 2), (1, 2)], 4, 4, "store", null_frames=2)
    # Padding of a load repeats the very pair; anything else would leave the page undefined.
    assert len(check_pairs([(3, 1), (0, 0), (0, 0)], 4, 4, "load", null_frames=1)[0]) == 2
    with pytest.raises(PageError, match="device page 0 twice"):
        check_pairs([(0, 1), (0, 0)], 4, 4, "load", null_frames=1)


def test_merge_runs() -> None:
    device = np.array([7, 2, 3, 4, 9])
    host = np.array([5, 1, 2, 3, 6])
    runs = zip(*(array.tolist() for array in merge_runs(device, host)), strict=True)
    assert list(runs) == [(2, 1, 3), (7, 5, 1), (9, 6, 1)]
    assert [len(array) for array in merge_runs(device[:0], host[:0])] == [0, 0, 0]
