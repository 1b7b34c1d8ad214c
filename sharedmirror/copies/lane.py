"""One direction of the staged engine: its streams, its staging slots, its room for page ids.

Each slot has a stream for its kernels: beside a model whose kernels fill every multiprocessor others get
in only between two of those, and then the kernels of all slots should. Copies are on a single stream of
their own, so that one chunk is gathered or scattered while another is on the link: two copies in one
direction at once were measured to be slower together (48 GB/s instead of 51 and more).

Kept here: whatever a kernel or a copy under way reads or writes stays as it is until an event says that
the call is complete; nothing waits for the device, unless the room for page ids is used up.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from sharedmirror.copies.driver import Driver
from sharedmirror.copies.pairs import Ids

if TYPE_CHECKING:
    from sharedmirror.copies.submission import DirectTables

__all__ = ["ID_ROOM", "IdRing", "Lane"]

ID_ROOM = 1 << 19
"""Page ids of the calls under way: 4 MiB pinned and on the device; 2,000 calls of 256 pages."""


class IdRing:
    """Pinned room for page ids and as much on the device, handed out in a circle."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = torch.empty(ID_ROOM, dtype=torch.int64, pin_memory=True)
        self._on_device = torch.empty(ID_ROOM, dtype=torch.int64, device=device)
        self._ids = self._pinned.numpy()
        self._next = self._used = 0
        self._put = (0, 0)
        self._under_way: deque[tuple[torch.cuda.Event, int]] = deque()

    def put(self, *columns: Ids) -> tuple[int, int]:
        """Write ids one column after the other; return the host's and the device's address of the first.

        At most ID_ROOM // 2 ids. Without ``taken`` the room is free again.
        """
        count = sum(map(len, columns))
        skipped = ID_ROOM - self._next if self._next + count > ID_ROOM else 0
        while self._under_way and (self._used + skipped + count > ID_ROOM or self._under_way[0][0].query()):
            event, room = self._under_way.popleft()
            event.synchronize()
            self._used -= room
        start = at = (self._next + skipped) % ID_ROOM
        for column in columns:
            self._ids[at : at + len(column)] = column
            at += len(column)
        self._put = (at, skipped + count)
        return self._pinned.data_ptr() + 8 * start, self._on_device.data_ptr() + 8 * start

    def taken(self, event: torch.cuda.Event) -> None:
        """Keep what was put last until ``event``."""
        self._next, room = self._put
        self._under_way.append((event, room))
        self._used += room

    def events(self) -> list[torch.cuda.Event]:
        """Return the events of all calls that may be under way."""
        return [event for event, _ in self._under_way]


class Lane:
    """Streams, slots and ids of one direction. Its methods are called with its lock held."""

    def __init__(self, driver: Driver, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.lock = threading.Lock()
        self.ids = IdRing(device)
        self.slot_bytes = slot_bytes
        self._staging = torch.empty((slots, slot_bytes), dtype=torch.uint8, device=device)
        self.slots = tuple(int(row.data_ptr()) for row in self._staging)
        self.free = [driver.create_event() for _ in range(slots)]
        """Recorded when the last chunk in a slot has left it."""
        self.next_slot = 0
        self.direct: dict[tuple[bool, int], DirectTables] = {}
        """Kernels without staging that were launched before: for the whole view or not, and so many groups."""
        # A higher priority for kernels was measured to change nothing: blocks that run are not interrupted.
        self.compute, self.copies = tuple(driver.create_stream() for _ in range(slots)), driver.create_stream()
        self._driver = driver
        self._mark = driver.create_event()
        self._outer = {raw: torch.cuda.ExternalStream(raw, device=device) for raw in (*self.compute, self.copies)}

    def follow(self, before: int, *streams: int) -> None:
        """Make later work on ``streams`` wait for all work that is on the stream ``before``."""
        self._driver.record(self._mark, before)
        for stream in streams:
            self._driver.wait(stream, self._mark)

    def join(self, stream: int) -> None:
        """Make later work on one of the lane's streams wait for the kernels of all slots."""
        for before in self.compute:
            if before != stream:
                self.follow(before, stream)

    def event(self, stream: int) -> torch.cuda.Event:
        """Return a new event that is complete when all work on one of the lane's streams is."""
        event = torch.cuda.Event()
        event.record(self._outer[stream])
        return event

    def synchronize(self) -> None:
        """Block until all streams are empty."""
        for stream in self._outer:
            self._driver.synchronize(stream)

    def destroy(self) -> None:
        """Destroy the streams, which must be empty."""
        self._driver.destroy(list(self._outer), [self._mark, *self.free])

    def release(self) -> None:
        """Let go of the memory on the device and of the pinned room."""
        del self._staging, self.ids
