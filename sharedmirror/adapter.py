"""From an engine's device pool to planes and the very tensors.

A ``DevicePool`` is built from a duck-typed pool (``k_buffer``, ``v_buffer``, state slabs) or from a
``PoolLayout`` with tensors. It keeps three promises:

- planes come in ``tensor_pairs`` order: distinct K, distinct V, then state in slab order;
- two tensor objects over the same bytes are one plane, two that share only some bytes are refused;
- a slice is contiguous on the device. Rows further apart than they are long are mirrored where a
  page is one row (only payload bytes are copied), and refused elsewhere.

Tensors are bytes here: no dtype, head or layer has a meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sharedmirror.errors import LayoutError
from sharedmirror.layout import PlaneSpec, PoolLayout, check_positive

__all__ = ["DevicePool", "flat_bytes_per_host_page"]

LayerPlanes = tuple[int | None, int | None, int | None, int | None]
"""Plane indices of a layer's K, V, conv and ssm."""


@dataclass(frozen=True)
class _Extent:
    """Where a tensor's rows lie in memory: ``rows`` times ``row`` bytes, ``stride`` bytes apart."""

    start: int
    rows: int
    row: int
    stride: int

    @property
    def end(self) -> int:
        return self.start + (self.rows - 1) * self.stride + self.row

    def overlaps(self, other: _Extent) -> bool:
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.stride == other.stride:
            # Interleaved views of one storage: equal pitch, rows in different columns.
            apart = (other.start - self.start) % self.stride
            return not (self.row <= apart and apart + other.row <= self.stride)
        return True


class DevicePool:
    """Planes and their device tensors, in ``tensor_pairs`` order.

    ``tensors[i]`` holds the rows of ``layout.planes[i]``; its first dimension counts rows and is
    ``num_device_pages * span`` long. ``layers[i]`` names the planes of layer i where layers are known.

    Raises LayoutError, naming the plane, when the tensors cannot be mirrored: rows that are not
    contiguous, sizes that differ from the layout's, tensors on several devices, overlapping tensors.
    """

    def __init__(
        self,
        layout: PoolLayout,
        tensors: Sequence[torch.Tensor],
        *,
        layers: Sequence[LayerPlanes] = (),
        num_k_tensors: int = 0,
    ) -> None:
        self.layout = layout
        self.tensors = tuple(tensors)
        self.layers = tuple(layers)
        self.num_k_tensors = num_k_tensors
        self.page_size = layout.page_size
        if len(self.tensors) != len(layout.planes):
            raise LayoutError(f"{len(layout.planes)} planes need as many tensors, not {len(self.tensors)}")
        extents = [_extent(spec.name, tensor) for spec, tensor in zip(layout.planes, self.tensors, strict=True)]
        self.num_device_pages = _common_pages(layout, extents)
        self.device = _common_device(layout, self.tensors)
        _refuse_overlaps(layout, extents)
        self._extents = extents

    @classmethod
    def from_pool(cls, pool: Any) -> DevicePool:
        """Return ``pool`` itself if it is one, else read the duck-typed pool.

        Raises LayoutError when attributes are missing or do not fit together.
        """
        return pool if isinstance(pool, DevicePool) else _read_duck(pool)

    def sharded(self, shard: int, shards: int) -> DevicePool:
        """Return the same pool with every plane as shard ``shard`` of ``shards``; raises LayoutError."""
        planes = [replace(plane, shard=shard, shards=shards) for plane in self.layout.planes]
        layout = PoolLayout(planes, self.layout.page_size)
        return DevicePool(layout, self.tensors, layers=self.layers, num_k_tensors=self.num_k_tensors)

    def byte_pages(self, plane: int) -> torch.Tensor:
        """Return plane's bytes as a uint8 view of shape (num_device_pages, slice bytes)."""
        spec, extent, tensor = self.layout.planes[plane], self._extents[plane], self.tensors[plane]
        offset = tensor.storage_offset() * tensor.element_size()
        view = torch.empty(0, dtype=torch.uint8, device=self.device)
        size, stride = (self.num_device_pages, spec.slice_bytes), (extent.stride * spec.span, 1)
        view.set_(tensor.untyped_storage(), offset, size, stride)
        return view

    def tensor_index_of_layer(self, layer: int) -> int:
        """Return the plane index of the layer's K; V is ``num_k_tensors`` further on.

        Raises ValueError for a layer without KV ("state layer") and for one that is not there.
        """
        index = self._layer(layer)[0]
        if index is None:
            raise LayoutError(f"layer {layer} is a state layer: it has no KV", layer=layer)
        return index

    def state_tensor_indices_of_layer(self, layer: int) -> tuple[int, int] | None:
        """Return the plane indices (conv, ssm) of the layer's state, or None."""
        _, _, conv, ssm = self._layer(layer)
        return None if conv is None or ssm is None else (conv, ssm)

    def copy_order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (order, event_after) for ``copies.interface.Geometry``.

        Planes are ordered by the first layer that uses them. A V or ssm event waits for every plane
        of all layers up to the last one that uses it, since an engine fences that layer on it.
        """
        order: list[int] = []
        after = [0] * len(self.tensors)
        for k, v, conv, ssm in self.layers:
            for plane in (k, v, conv, ssm):
                if plane is None:
                    continue
                if not after[plane]:
                    order.append(plane)
                    after[plane] = len(order)
                if plane in (v, ssm):
                    after[plane] = len(order)
        for plane in range(len(self.tensors)):
            if not after[plane]:
                order.append(plane)
                after[plane] = len(order)
        after[-1] = len(order)
        return tuple(order), tuple(after)

    def _layer(self, layer: int) -> LayerPlanes:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise LayoutError(f"a layer is a whole number, not {layer!r:.40}")
        if not 0 <= layer < len(self.layers):
            raise LayoutError(f"layer {layer} is not in 0..{len(self.layers) - 1}", layer=layer)
        return self.layers[layer]


def flat_bytes_per_host_page(pool: Any, frames_per_page: int = 1) -> int:
    """Return the payload bytes of one host page over all planes of ``pool``; allocates nothing."""
    return DevicePool.from_pool(pool).layout.bytes_per_page() * frames_per_page


class _Planes:
    """Distinct tensors of one family (K, V, conv or ssm), in order of first appearance."""

    def __init__(self, prefix: str, span: int) -> None:
        self.prefix = prefix
        self.span = span
        self.tensors: list[torch.Tensor] = []
        self.extents: list[_Extent] = []

    def add(self, tensor: torch.Tensor, where: str) -> int:
        extent = _extent(where, tensor)
        if extent in self.extents:
            return self.extents.index(extent)
        self.tensors.append(tensor)
        self.extents.append(extent)
        return len(self.tensors) - 1

    def specs(self) -> list[PlaneSpec]:
        return [PlaneSpec(f"{self.prefix}{i}", extent.row, self.span) for i, extent in enumerate(self.extents)]


def _read_duck(pool: Any) -> DevicePool:
    try:
        page_size, k_buffer, v_buffer = pool.page_size, list(pool.k_buffer), list(pool.v_buffer)
    except AttributeError as error:
        raise LayoutError(
            f"a device pool has page_size, k_buffer and v_buffer: {error}; "
            f"describe other pools with PoolLayout and DevicePool"
        ) from error
    check_positive(page_size, "page_size")
    if len(k_buffer) != len(v_buffer):
        raise LayoutError(
            f"k_buffer has {len(k_buffer)} layers and v_buffer {len(v_buffer)}; they need the same number"
        )
    keys, values = _Planes("k", page_size), _Planes("v", page_size)
    kv: list[int | None] = []
    for layer, (k, v) in enumerate(zip(k_buffer, v_buffer, strict=True)):
        if (k is None) != (v is None):
            raise LayoutError(f"layer {layer} has only one of K and V; give both, or None for both", layer=layer)
        kv.append(None if k is None else _same_index(keys, k, values, v, f"layer {layer}", "K", "V"))
    conv, ssm = _Planes("conv", 1), _Planes("ssm", 1)
    for number, slab in enumerate(getattr(pool, "state_slabs", None) or ()):
        if not isinstance(slab, (tuple, list)) or len(slab) != 2:
            raise LayoutError(f"state slab {number} is no (conv, ssm) pair of tensors", slab=number)
        _same_index(conv, slab[0], ssm, slab[1], f"state slab {number}", "conv", "ssm")
    state_specs = [spec for pair in zip(conv.specs(), ssm.specs(), strict=True) for spec in pair]
    state_tensors = [tensor for pair in zip(conv.tensors, ssm.tensors, strict=True) for tensor in pair]
    first_k, first_v, first_state = 0, len(keys.tensors), len(keys.tensors) + len(values.tensors)
    layers: list[LayerPlanes] = []
    for layer, index in enumerate(kv):
        slab_index = _state_of_layer(pool, layer, conv, ssm)
        state = (None, None) if slab_index is None else (first_state + 2 * slab_index, first_state + 2 * slab_index + 1)
        layers.append((*((None, None) if index is None else (first_k + index, first_v + index)), *state))
    return DevicePool(
        PoolLayout([*keys.specs(), *values.specs(), *state_specs], page_size),
        [*keys.tensors, *values.tensors, *state_tensors],
        layers=layers,
        num_k_tensors=len(keys.tensors),
    )


def _same_index(
    left: _Planes, a: torch.Tensor, right: _Planes, b: torch.Tensor, where: str, a_name: str, b_name: str
) -> int:
    """Add a pair; both must be new, or both repeat the same earlier pair."""
    index, other = left.add(a, f"{a_name} of {where}"), right.add(b, f"{b_name} of {where}")
    if index != other:
        raise LayoutError(
            f"{where}: its {a_name} is distinct {a_name} tensor {index} but its {b_name} is distinct {b_name} tensor "
            f"{other}; {a_name} and {b_name} must be shared in the same order"
        )
    return index


def _state_of_layer(pool: Any, layer: int, conv: _Planes, ssm: _Planes) -> int | None:
    if not conv.tensors or not hasattr(pool, "get_state_buffers"):
        return None
    try:
        conv_tensor, ssm_tensor = pool.get_state_buffers(layer)
    except ValueError:
        return None
    where = f"get_state_buffers({layer})"
    pair = (_extent(f"conv of {where}", conv_tensor), _extent(f"ssm of {where}", ssm_tensor))
    for index, known in enumerate(zip(conv.extents, ssm.extents, strict=True)):
        if known == pair:
            return index
    raise LayoutError(f"{where} returns tensors that are in no state slab", layer=layer)


def _extent(name: str, tensor: Any) -> _Extent:
    """Return where the rows lie; raises LayoutError, naming the plane, when a row is not contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name} is a {type(tensor).__name__}, not a tensor", plane=name)
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise LayoutError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}; strided CPU and CUDA tensors can be mirrored",
            plane=name,
        )
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise LayoutError(f"{name} has shape {tuple(tensor.shape)}; it has no rows to mirror", plane=name)
    if not tensor[0].is_contiguous():
        raise LayoutError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its rows are not contiguous; "
            f"give a contiguous tensor, or one plane per contiguous part",
            plane=name,
        )
    rows, size = tensor.shape[0], tensor.element_size()
    row = tensor.numel() // rows * size
    stride = row if rows == 1 else tensor.stride(0) * size
    if stride < row:
        raise LayoutError(
            f"{name} is expanded: its rows of {row} bytes are {stride} bytes apart; give real memory", plane=name
        )
    return _Extent(tensor.data_ptr(), rows, row, stride)


def _common_pages(layout: PoolLayout, extents: Sequence[_Extent]) -> int:
    pages = []
    for spec, extent in zip(layout.planes, extents, strict=True):
        ids = {"plane": spec.name}
        if extent.row != spec.row_bytes:
            raise LayoutError(
                f"plane {spec.name!r} has rows of {extent.row} bytes; its layout says {spec.row_bytes}", **ids
            )
        if extent.rows % spec.span:
            raise LayoutError(
                f"plane {spec.name!r} has {extent.rows} rows, which is no multiple of its span {spec.span}", **ids
            )
        if spec.span > 1 and extent.stride != extent.row:
            raise LayoutError(
                f"plane {spec.name!r} is padded: rows of {extent.row} bytes lie {extent.stride} bytes apart, so a page "
                f"of {spec.span} rows is not contiguous; give a contiguous tensor, or rows that are pages (span 1)",
                **ids,
            )
        pages.append(extent.rows // spec.span)
        if pages[-1] != pages[0]:
            first = layout.planes[0].name
            raise LayoutError(
                f"plane {spec.name!r} has {pages[-1]} device pages and plane {first!r} {pages[0]}; "
                f"all planes of a pool have the same number",
                **ids,
            )
    return pages[0]


def _common_device(layout: PoolLayout, tensors: Sequence[torch.Tensor]) -> torch.device:
    for spec, tensor in zip(layout.planes, tensors, strict=True):
        if tensor.device != tensors[0].device:
            raise LayoutError(
                f"plane {spec.name!r} is on {tensor.device}, plane {layout.planes[0].name!r} on {tensors[0].device}; "
                f"a pool's tensors are on one device",
                plane=spec.name,
            )
    return tensors[0].device


def _refuse_overlaps(layout: PoolLayout, extents: Sequence[_Extent]) -> None:
    order = sorted(range(len(extents)), key=lambda i: extents[i].start)
    for at, first in enumerate(order):
        for second in order[at + 1 :]:
            if extents[second].start >= extents[first].end:
                break
            if extents[first].overlaps(extents[second]):
                a, b = sorted((first, second))
                names = layout.planes[a].name, layout.planes[b].name
                raise LayoutError(
                    f"planes {names[0]!r} and {names[1]!r} share memory; planes must not overlap", planes=names
                )
