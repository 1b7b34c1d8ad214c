"""The reference engine: one ``copy_`` per pair and plane, nothing clever.

It is the oracle that the tests compare the other engines with. Every call is complete on return.
"""

from __future__ import annotations

import torch

from sharedmirror.copies.interface import Event, Geometry, Stream
from sharedmirror.copies.pairs import Ids

__all__ = ["CompletedEvent", "Done", "ReferenceEngine"]


class CompletedEvent:
    """An event of work that was complete before the event existed."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, stream: Stream = None) -> None:
        """Return at once."""


class Done:
    """A completion of work that is complete."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Return True at once."""
        return True


class ReferenceEngine:
    """Copies slice by slice and waits for each call's end."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry: Geometry | None = geometry

    def store(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Done:
        """Copy device to host."""
        return self._copy(device_pages, host_frames, stream, to_host=True)

    def load(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> Done:
        """Copy host to device."""
        return self._copy(device_pages, host_frames, stream, to_host=False)

    def load_with_events(self, device_pages: Ids, host_frames: Ids, stream: Stream) -> list[Event]:
        """Copy host to device; every event is complete."""
        self.load(device_pages, host_frames, stream)
        return [CompletedEvent() for _ in self._planes().planes]

    def drain(self) -> None:
        """Return at once: nothing outlasts its call."""

    def close(self) -> None:
        """Let go of every tensor."""
        self._geometry = None

    def _planes(self) -> Geometry:
        if self._geometry is None:
            raise RuntimeError("the copy engine is closed")
        return self._geometry

    def _copy(self, device_pages: Ids, host_frames: Ids, stream: Stream, *, to_host: bool) -> Done:
        geometry = self._planes()
        if geometry.device.type == "cuda":
            (stream or torch.cuda.current_stream(geometry.device)).synchronize()
        for plane in geometry.planes:
            for page, frame in zip(device_pages.tolist(), host_frames.tolist(), strict=True):
                if to_host:
                    plane.host[frame].copy_(plane.device[page])
                else:
                    plane.device[page].copy_(plane.host[frame])
        if geometry.device.type == "cuda":
            torch.cuda.synchronize(geometry.device)
        return Done()
