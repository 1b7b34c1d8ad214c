from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharedmirror.adapter import DevicePool, flat_bytes_per_host_page
from sharedmirror.errors import LayoutError
from sharedmirror.layout import PlaneSpec, PoolLayout


def rows(count: int = 32, *row: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros((count, *(row or (2, 4))), dtype=dtype)


def duck(**values: Any) -> Any:
    return SimpleNamespace(**{"page_size": 8, "k_buffer": [rows()], "v_buffer": [rows()], **values})


def hybrid() -> tuple[Any, list[torch.Tensor]]:
    """Layers: KV a, state 0, KV b, KV a again (shared), state 1."""
    ka, va, kb, vb = (rows() for _ in range(4))
    slabs = [(rows(4, 3), rows(4, 5, dtype=torch.float32)) for _ in range(2)]
    states = {1: slabs[0], 4: slabs[1]}

    def get_state_buffers(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in states:
            raise ValueError(f"layer {layer} has no state")
        return states[layer]

    pool = duck(
        k_buffer=[ka, None, kb, ka, None],
        v_buffer=[va, None, vb, va, None],
        state_slabs=slabs,
        get_state_buffers=get_state_buffers,
    )
    return pool, [ka, kb, va, vb, *slabs[0], *slabs[1]]


def test_order_names_and_layers() -> None:
    duck_pool, expected = hybrid()
    pool = DevicePool.from_pool(duck_pool)
    assert all(mine is theirs for mine, theirs in zip(pool.tensors, expected, strict=True))
    assert [spec.name for spec in pool.layout.planes] == ["k0", "k1", "v0", "v1", "conv0", "ssm0", "conv1", "ssm1"]
    assert pool.layout.row_spans == (8, 8, 8, 8, 1, 1, 1, 1)
    assert (pool.num_k_tensors, pool.num_device_pages, pool.page_size) == (2, 4, 8)
    assert [pool.tensor_index_of_layer(layer) for layer in (0, 2, 3)] == [0, 1, 0]
    assert [pool.state_tensor_indices_of_layer(layer) for layer in range(5)] == [None, (4, 5), None, None, (6, 7)]
    with pytest.raises(ValueError, match="state layer"):
        pool.tensor_index_of_layer(1)
    with pytest.raises(LayoutError, match="layer 5 is not in 0..4"):
        pool.tensor_index_of_layer(5)
    assert flat_bytes_per_host_page(duck_pool) == 4 * 8 * 16 + 2 * (3 * 2 + 5 * 4)
    assert flat_bytes_per_host_page(pool, frames_per_page=2) == 2 * flat_bytes_per_host_page(duck_pool)


def test_copy_order_keeps_the_promises_of_events() -> None:
    pool = DevicePool.from_pool(hybrid()[0])
    order, after = pool.copy_order()
    assert sorted(order) == list(range(8))
    covered = [set(order[:count]) for count in after]
    seen: set[int] = set()
    for k, v, conv, ssm in pool.layers:
        mine = {plane for plane in (k, v, conv, ssm) if plane is not None}
        if v is not None:
            assert seen | {k, v} <= covered[v]
        if ssm is not None:
            assert seen | mine <= covered[ssm]
        seen |= mine
    assert all(plane in covered[plane] for plane in range(8))
    assert covered[-1] == set(range(8))
    # Layer order pays only if early events do not wait for late layers.
    assert len(covered[4]) < 8


def test_planes_outside_all_layers_are_copied_too() -> None:
    pool = DevicePool.from_pool(duck(state_slabs=[(rows(4), rows(4))]))
    order, after = pool.copy_order()
    assert order == (0, 1, 2, 3)
    assert after == (1, 2, 3, 4)


def test_same_bytes_in_two_objects_are_one_plane() -> None:
    k, v = rows(), rows()
    pool = DevicePool.from_pool(duck(k_buffer=[k, k.view(32, 2, 4)], v_buffer=[v, v[:]]))
    assert [spec.name for spec in pool.layout.planes] == ["k0", "v0"]
    assert pool.tensors[0] is k
    assert [pool.tensor_index_of_layer(layer) for layer in (0, 1)] == [0, 0]


def test_byte_pages_view_the_tensor() -> None:
    tensor = torch.arange(32 * 3, dtype=torch.int16).view(32, 3)
    pool = DevicePool(PoolLayout([PlaneSpec("a", 6, 8)], 8), [tensor])
    view = pool.byte_pages(0)
    assert view.shape == (4, 48)
    view[1, 0] = 99
    assert tensor[8, 0] == 99
    assert view.data_ptr() == tensor.data_ptr()


def test_padded_pages_are_payload_only() -> None:
    storage = torch.zeros((4, 10), dtype=torch.uint8)
    pool = DevicePool(PoolLayout([PlaneSpec("a", 6, 1), PlaneSpec("b", 4, 1)], 8), [storage[:, :6], storage[:, 6:]])
    assert [tuple(pool.byte_pages(plane).stride()) for plane in (0, 1)] == [(10, 1), (10, 1)]
    pool.byte_pages(0).fill_(1)
    pool.byte_pages(1).fill_(2)
    assert storage.tolist() == [[1] * 6 + [2] * 4] * 4


def one(name: str, tensor: torch.Tensor, row_bytes: int, span: int) -> DevicePool:
    return DevicePool(PoolLayout([PlaneSpec(name, row_bytes, span)], 8), [tensor])


def test_bad_tensors_are_named() -> None:
    wide = rows(32, 8)
    with pytest.raises(LayoutError, match="'a' is padded"):
        one("a", wide[:, :4], 8, 8)
    with pytest.raises(LayoutError, match="a has shape .* not contiguous"):
        one("a", rows(32, 2, 4).transpose(1, 2), 16, 8)
    with pytest.raises(LayoutError, match="a is expanded"):
        one("a", rows(1).expand(32, 2, 4), 16, 8)
    with pytest.raises(LayoutError, match="'a' has 33 rows"):
        one("a", rows(33), 16, 8)
    with pytest.raises(LayoutError, match="'a' has rows of 16 bytes; its layout says 15"):
        one("a", rows(), 15, 8)
    with pytest.raises(LayoutError, match="a has shape .* no rows"):
        one("a", rows(0), 16, 8)
    with pytest.raises(LayoutError, match="a is a list"):
        one("a", [1], 16, 8)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="meta"):
        one("a", torch.zeros((32, 4), device="meta"), 16, 8)
    with pytest.raises(LayoutError, match="as many tensors"):
        DevicePool(PoolLayout([PlaneSpec("a", 16, 8)], 8), [])


def test_planes_that_do_not_fit_together() -> None:
    with pytest.raises(LayoutError, match="'v0' has 5 device pages and plane 'k0' 4"):
        DevicePool.from_pool(duck(v_buffer=[rows(40)]))


def test_overlaps_are_named() -> None:
    storage = rows(64)
    with pytest.raises(LayoutError, match="'k0' and 'v0' share memory"):
        DevicePool.from_pool(duck(k_buffer=[storage[:32]], v_buffer=[storage[16:48]]))
    with pytest.raises(LayoutError, match="'k0' and 'v0' share memory"):
        DevicePool.from_pool(duck(k_buffer=[storage[:32]], v_buffer=[storage[:32]]))
    with pytest.raises(LayoutError, match="'k0' and 'conv0' share memory"):
        DevicePool.from_pool(duck(k_buffer=[storage[:32]], state_slabs=[(storage[:4], rows(4))]))
    # Side by side in one storage is no overlap.
    DevicePool.from_pool(duck(k_buffer=[storage[:32]], v_buffer=[storage[32:]]))
    wide = torch.zeros((4, 10), dtype=torch.uint8)
    layout = PoolLayout([PlaneSpec("a", 6, 1), PlaneSpec("b", 5, 1)], 8)
    with pytest.raises(LayoutError, match="'a' and 'b' share memory"):
        DevicePool(layout, [wide[:, :6], wide[:, 5:]])


def test_dedup_orders_that_differ() -> None:
    k, v, other = rows(), rows(), rows()
    with pytest.raises(LayoutError, match="layer 1: its K is distinct K tensor 0 but its V is distinct V tensor 1"):
        DevicePool.from_pool(duck(k_buffer=[k, k], v_buffer=[v, other]))
    with pytest.raises(LayoutError, match="state slab 1"):
        conv = rows(4)
        DevicePool.from_pool(duck(state_slabs=[(conv, rows(4)), (conv, rows(4))]))


def test_pools_that_are_none() -> None:
    with pytest.raises(LayoutError, match="k_buffer"):
        DevicePool.from_pool(SimpleNamespace(page_size=8))
    with pytest.raises(LayoutError, match="at least one plane"):
        DevicePool.from_pool(duck(k_buffer=[None], v_buffer=[None]))
    with pytest.raises(LayoutError, match="layer 0 has only one of K and V"):
        DevicePool.from_pool(duck(v_buffer=[None]))
    with pytest.raises(LayoutError, match="2 layers and v_buffer 1"):
        DevicePool.from_pool(duck(k_buffer=[rows(), rows()]))
    with pytest.raises(LayoutError, match="state slab 0 is no"):
        DevicePool.from_pool(duck(state_slabs=[rows(4)]))
    with pytest.raises(LayoutError, match="page_size"):
        DevicePool.from_pool(duck(page_size=0))
    with pytest.raises(LayoutError, match="in no state slab"):
        DevicePool.from_pool(duck(state_slabs=[(rows(4), rows(4))], get_state_buffers=lambda layer: (rows(4), rows(4))))
