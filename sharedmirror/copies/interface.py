"""What a mirror and a copy engine agree on.

A ``Geometry`` says where every plane's slices lie on both sides. A ``CopyEngine`` moves the slices of
given (device page, host frame) pairs in every plane. It may trust its arguments: ids are in range,
a store names no host frame twice and a load no device page twice.

What each engine keeps:

- a copy comes after all work already on ``stream`` and before all work put on it later;
- its own work never goes on the legacy null stream;
- every byte of the slice is copied, and no byte beside it is touched on either side;
- no copy crosses one of ``Geometry.host_edges``: the driver refuses copies over two registrations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sharedmirror.copies.pairs import Ids

__all__ = ["Completion", "CopyEngine", "Event", "Geometry", "PlaneGeometry", "Stream"]

Stream = Any
"""A ``torch.cuda.Stream``, or None for the current stream of the pool's device."""


@dataclass(frozen=True, eq=False)
class PlaneGeometry:
    """One plane on both sides, as bytes.

    ``device`` has shape (device pages, slice bytes) and ``host`` (host frames, slice bytes), both
    uint8; rows are contiguous, and may lie further apart than they are long.
    """

    name: str
    device: torch.Tensor
    host: torch.Tensor

    @property
    def slice_bytes(self) -> int:
        """Bytes of one page in this plane."""
        return self.device.shape[1]

    @property
    def device_base(self) -> int:
        """Address of device page 0."""
        return self.device.data_ptr()

    @property
    def device_stride(self) -> int:
        """Bytes from one device page to the next."""
        return self.device.stride(0)

    @property
    def host_base(self) -> int:
        """Address of host frame 0 in this process."""
        return self.host.data_ptr()

    @property
    def host_stride(self) -> int:
        """Bytes from one host frame to the next."""
        return self.host.stride(0)


@dataclass(frozen=True, eq=False)
class Geometry:
    """All planes of a mirror, in ``tensor_pairs`` order.

    ``order`` are plane indices in the order in which a load should fill them (layer by layer).
    ``event_after[i]`` is how many planes of ``order`` must be full before the event of plane i.
    ``host_edges`` are sorted addresses that no single copy may cross.
    """

    planes: tuple[PlaneGeometry, ...]
    device: torch.device
    order: tuple[int, ...]
    event_after: tuple[int, ...]
    host_edges: tuple[int, ...] = field(default=())


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that a CPU mirror offers too."""

    def query(self) -> bool:
        """Return whether all work before the event is done."""
        ...

    def synchronize(self) -> None:
        """Block until the event is done."""
        ...

    def wait(self, stream: Any = None) -> None:
        """Make later work on ``stream`` (None: the current one) wait for the event."""
        ...


class Completion(Protocol):
    """The end of one call's copies."""

    def done(self) -> bool:
        """Return whether every copy is complete; raises CopyError when the device reported an error."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Block until done, at most ``timeout_s`` seconds; return done()."""
        ...


class CopyEngine(Protocol):
    """Moves slices between device pages and host frames. Every method may be called from any thread."""

    def store(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Completion:
        """Copy device to host; raises CopyError when the device refuses the work."""
        ...

    def load(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Completion:
        """Copy host to device; raises CopyError when the device refuses the work."""
        ...

    def load_with_events(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> list[Event]:
        """Like load; return one event per plane, in ``tensor_pairs`` order."""
        ...

    def drain(self) -> None:
        """Block until every copy ever submitted is complete; raises CopyError."""
        ...

    def close(self) -> None:
        """Drain, and let go of every tensor. Raises CopyError when the drain fails, and keeps them then."""
        ...
