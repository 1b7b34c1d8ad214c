"""From an attach reply to host tensors and a geometry.

The reply gives each plane a region, a base and a stride; its slice of frame f lies at
``base + f * stride``. Everything is checked against the region's size before a view is made: a
wrong number here would be a write into another pool's pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sharedmirror.adapter import DevicePool
from sharedmirror.copies.interface import Geometry, PlaneGeometry
from sharedmirror.errors import ProtocolError
from sharedmirror.types import SLICE_ALIGNMENT_BYTES, Layout

__all__ = ["Placement", "build_geometry", "host_tensor"]


@dataclass(frozen=True)
class Placement:
    """Where a plane lies: index of its region, byte offset of frame 0, bytes from frame to frame."""

    region: int
    base: int
    stride: int


def build_geometry(
    pool: DevicePool,
    regions: Sequence[torch.Tensor],
    placements: Sequence[Placement],
    host_frames: int,
    host_edges: Sequence[int] = (),
) -> Geometry:
    """Return the geometry over mapped regions (1-D uint8 tensors); raises ProtocolError on a bad placement."""
    if len(placements) != len(pool.tensors):
        raise ProtocolError(f"the daemon placed {len(placements)} planes; this rank announced {len(pool.tensors)}")
    planes = []
    for index, (spec, place) in enumerate(zip(pool.layout.planes, placements, strict=True)):
        _check(spec.name, spec.slice_bytes, place, [region.numel() for region in regions], host_frames)
        host = torch.as_strided(regions[place.region], (host_frames, spec.slice_bytes), (place.stride, 1), place.base)
        planes.append(PlaneGeometry(spec.name, pool.byte_pages(index), host))
    order, event_after = pool.copy_order()
    return Geometry(tuple(planes), pool.device, order, event_after, tuple(sorted(host_edges)))


def host_tensor(
    region: torch.Tensor, place: Placement, device_tensor: torch.Tensor, span: int, host_frames: int, layout: Layout
) -> torch.Tensor:
    """Return one plane's host mirror with the device tensor's dtype, over the region's own memory.

    ``slab``: shape ``(host_frames * span, *row)``, contiguous. ``page``: a strided view of shape
    ``(host_frames, span, *row)``. Raises ProtocolError when the placement allows no such view.
    """
    row = tuple(device_tensor.shape[1:])
    item = device_tensor.element_size()
    row_items = device_tensor.numel() // device_tensor.shape[0]
    typed = region.view(device_tensor.dtype)
    inner = torch.empty(row, device="meta").stride()
    tight = place.stride == span * row_items * item
    if place.stride % item or (layout is Layout.SLAB and not tight):
        raise ProtocolError(
            f"a stride of {place.stride} bytes fits no {layout.value} layout of {tuple(device_tensor.shape)}"
        )
    if layout is Layout.SLAB:
        return torch.as_strided(typed, (host_frames * span, *row), (row_items, *inner), place.base // item)
    size, stride = (host_frames, span, *row), (place.stride // item, row_items, *inner)
    return torch.as_strided(typed, size, stride, place.base // item)


def _check(name: str, slice_bytes: int, place: Placement, sizes: list[int], host_frames: int) -> None:
    if not 0 <= place.region < len(sizes):
        raise ProtocolError(f"the daemon placed plane {name!r} in region {place.region} of {len(sizes)}")
    end = place.base + (host_frames - 1) * place.stride + slice_bytes
    if place.base < 0 or place.stride < slice_bytes or end > sizes[place.region]:
        raise ProtocolError(
            f"the daemon placed plane {name!r} at {place.base} with stride {place.stride} for {host_frames} frames of "
            f"{slice_bytes} bytes; the region has {sizes[place.region]} bytes"
        )
    if place.base % SLICE_ALIGNMENT_BYTES:
        raise ProtocolError(f"the daemon placed plane {name!r} at {place.base}, not on {SLICE_ALIGNMENT_BYTES} bytes")
