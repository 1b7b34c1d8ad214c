"""One rank's place in a pool: the channel, the mapped regions and their registration.

What it keeps:

- coming fails wholly: an error half way leaves nothing mapped, registered or attached;
- leaving goes in one order: registrations, then mappings, then the word to the daemon;
- of an elastic pool it maps what it has needed so far, and unmaps what the daemon takes back; what it was once
  told to unmap it unmaps once, also when it is told again;
- the channel stays open while any memory of the arena is mapped here: its session is what tells the
  daemon that the memory cannot be used for another pool yet.

The caller has drained its copies before it leaves, or it abandons the attachment.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol

import torch

from sharedmirror.channel import Channel
from sharedmirror.copies.geometry import Placement
from sharedmirror.copies.together.board import map_board
from sharedmirror.descriptors import close_all
from sharedmirror.errors import (
    ClosedError,
    ForkedError,
    MemoryFault,
    ProtocolError,
    SharedMirrorError,
    StaleLease,
)
from sharedmirror.mapping import RegionMapping
from sharedmirror.protocol import Errand
from sharedmirror.registration import HostRegistration, device_node, refuse_mps
from sharedmirror.types import Role

__all__ = ["Attachment", "ChannelLike", "Gate", "OpenChannel"]

_log = logging.getLogger("sharedmirror")

_BOARD_TRIES, _BOARD_PAUSE_S = 50, 0.01

_DETACH_S = 1.0
"""How long whoever leaves waits for the daemon's answer; it is then awaited in the background."""
_SAY_AGAIN_FIRST_S, _SAY_AGAIN_LAST_S = 0.05, 1.0

_ABANDONED: list[object] = []
"""Attachments whose copies could not be drained: they live until the process dies, which is the proof."""


class ChannelLike(Protocol):
    """The part of ``Channel`` that a mirror uses."""

    arena_fds: list[int]

    def call(
        self,
        op: str,
        *,
        timeout_s: float | None = None,
        fds: Any = None,
        come_back: bool = True,
        errand: Errand | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send a request and return its answer; ``fds`` takes the descriptors that come with it.

        Without ``come_back`` raises at once while the daemon is away; with an ``errand`` it may be asked again.
        """
        ...

    def check_usable(self) -> None:
        """Raise ForkedError, ClosedError or InstanceChanged where the connection is of no more use."""
        ...

    def listen(self, then: Callable[[], float | None] | None = None) -> None:
        """Start the thread that takes pushes; it runs ``then`` after each."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


OpenChannel = Callable[[str | None, Callable[[dict[str, Any]], None]], ChannelLike]
"""Opens a channel, given the socket's path (None: the default) and what takes pushes."""


def open_channel(socket: str | None, on_push: Callable[[dict[str, Any]], None]) -> ChannelLike:
    """Connect to the daemon as a worker."""
    return Channel.open(socket, role=Role.WORKER, on_push=on_push)


class Attachment:
    """Attached regions, ready for views: ``regions[i].bytes`` and ``placements[plane]``.

    ``order`` names the plane that each entry of the request's ``planes`` is.
    """

    def __init__(
        self,
        open_channel: OpenChannel,
        socket: str | None,
        on_push: Callable[[dict[str, Any]], None],
        request: dict[str, Any],
        order: Sequence[int],
        device: torch.device,
    ) -> None:
        if device.type == "cuda":
            refuse_mps()
        self.channel = open_channel(socket, on_push)
        self._changing = threading.Lock()
        """Held while the mapping changes."""
        self._owed: dict[int, _Shrink] = {}
        self._unmapped_for = 0
        self._abandoned = False
        self._maps: dict[int, RegionMapping] = {}
        """The regions of an elastic pool by id, also after leaving: views may keep them mapped."""
        self.regions: list[RegionMapping] = []
        self.registrations: list[HostRegistration] = []
        try:
            # The daemon puts this rank's memory near its GPU, if it can.
            near: dict[str, Any] = {"node": device_node(device)} if device.type == "cuda" else {}
            reply = self.channel.call("attach", **request, **near)
        except BaseException:
            self.channel.close()
            raise
        self._farewell = _Farewell(self.channel)
        try:
            self.pool, self.num_host_pages, announced = _read(reply)
            self.backed = int(reply.get("backed", self.num_host_pages))
            """How many pages have memory in this process."""
            if sorted(order) != list(range(len(announced))):
                raise ProtocolError(f"the daemon placed {len(announced)} planes; this rank announced {len(order)}")
            self.placements = [announced[order.index(plane)] for plane in range(len(order))]
            self.before = reply
            """The attach reply: it also tells which leases and hits from before are not for this rank."""
            self.region_ids = [int(region["id"]) for region in reply["regions"]]
            self.sharers = [[int(rank) for rank in region["ranks"]] for region in reply["regions"]]
            """For each region, the ranks that share it."""
            for region in reply["regions"]:
                gone, size_bytes = self._farewell.region_gone, region.get("max_bytes")
                mapped = RegionMapping(self.channel.arena_fds, _extents(region), gone, size_bytes=size_bytes)
                self.regions.append(mapped)
                self._farewell.region_came()
                if "levels" in region:
                    self._maps[int(region["id"])] = mapped
            if device.type == "cuda":
                for mapped, region in zip(self.regions, reply["regions"], strict=True):
                    self.registrations.append(mapped.register(device, region.get("levels", ())))
        except BaseException:
            self.leave()
            raise

    @property
    def host_edges(self) -> list[int]:
        """Addresses that no single copy may cross: where one registration ends and the next begins."""
        return [edge for registration in self.registrations for edge in registration.edges]

    @property
    def registering(self) -> list[HostRegistration]:
        """The registrations that are under way in the background."""
        return [registration for registration in self.registrations if not registration.complete]

    def board(self) -> mmap.mmap | None:
        """Return the board on which this engine's ranks meet; None where the daemon has none to give."""
        fds: list[int] = []
        try:
            for _ in range(_BOARD_TRIES):
                if self.channel.call("board", fds=fds).get("board") != "later":
                    break
                time.sleep(_BOARD_PAUSE_S)
            return map_board(fds[0]) if fds else None
        except (SharedMirrorError, OSError) as error:
            _log.warning("event=no_board reason=%r: each rank loads by itself", str(error))
            return None
        finally:
            close_all(fds)

    def require(self, last_frame: int, slice_bytes: Sequence[int]) -> None:
        """Wait until frames up to ``last_frame`` are registered in every plane; raises MemoryFault.

        ``slice_bytes`` has one number a plane. Without CUDA there is nothing to wait for.
        """
        if not self.registering:
            return
        for place, size in zip(self.placements, slice_bytes, strict=True):
            end = self.regions[place.region].address + place.base + last_frame * place.stride + size
            self.registrations[place.region].require(end)

    def back(self, pages: int) -> None:
        """Map the memory of the first ``pages`` pages, which the caller may copy to or from.

        Asks the daemon, once, when this process has not mapped them yet: raises DaemonUnavailable (retryable)
        while it is away, StaleLease when the pages have no memory any more, MemoryFault.
        """
        if pages <= self.backed:
            return
        with self._changing:
            if pages <= self.backed:
                return
            reply = self.channel.call("extents")
            for region in reply["regions"]:
                if region["id"] in self._maps:
                    self._maps[region["id"]].extend(self.channel.arena_fds, _extents(region))
            self.backed = max(self.backed, int(reply["backed"]))
            if pages > self.backed:
                raise StaleLease(
                    f"host page {pages - 1} has no memory any more: its lease or hit is over", page=pages - 1
                )

    def on_shrink(self, body: dict[str, Any]) -> None:
        """Note that the daemon wants memory back; ``unmap`` does it."""
        sizes = {int(region): int(size_bytes) for region, size_bytes in body["regions"]}
        self._owed[int(body["number"])] = _Shrink(int(body["pages"]), sizes)

    @property
    def owed(self) -> list[tuple[int, int]]:
        """What the daemon wants back, and was not yet answered: number of its word, and how many pages stay."""
        return [] if self._abandoned else sorted((number, shrink.pages) for number, shrink in self._owed.items())

    def unmap(self, number: int) -> None:
        """Unmap what the daemon wants back and say so; the caller has no copy under way there.

        Raises MemoryFault when the driver keeps it: then it is not said.
        """
        shrink = self._owed[number]
        with self._changing:
            # Once only: if the answer got lost, the pool may have grown again by the time that it is repeated.
            if number > self._unmapped_for:
                for region, mapped in self._maps.items():
                    mapped.cut(shrink.sizes[region])
                self.backed = min(self.backed, shrink.pages)
                self._unmapped_for = number
        self.channel.call("shrunk", number=number)
        self._owed.pop(number, None)

    def begin_registering(self) -> None:
        """Register in the background what is not yet; the engine's own work with the driver comes first."""
        for registration in self.registrations:
            registration.begin()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Let copies be submitted before the next chunk is registered; ``require`` comes first."""
        with ExitStack() as stack:
            for registration in self.registering:
                stack.enter_context(registration.paused())
            yield

    def leave(self) -> None:
        """Unregister, unmap what nobody views any more, and detach; the caller has drained its copies.

        Raises MemoryFault when the driver keeps a registration; that memory then stays mapped.
        """
        with self._changing:
            faults = [fault for fault in map(_unregister, self.registrations) if fault is not None]
            self.registrations = []
            for region in self.regions:
                region.release()
            self.regions = []
        self._farewell.say()
        if faults:
            raise faults[0]

    def abandon(self) -> None:
        """Keep everything until the process dies: copies may still be under way."""
        self._abandoned = True
        _ABANDONED.append(self)


@dataclass(frozen=True)
class _Shrink:
    """How much of a pool stays when it gives back: pages, and the bytes of each region by id."""

    pages: int
    sizes: dict[int, int]


class _Farewell:
    """Tells the daemon that the rank has left, and later that its last view is gone.

    Whoever leaves does not wait for a daemon that is away: a thread goes on until the daemon has heard it, another
    instance answers, or the process ends, which says the same. The channel is closed after that.
    """

    def __init__(self, channel: ChannelLike) -> None:
        self._channel = channel
        # Reentrant, both: the end of a view may be noticed by the garbage collector, at any moment in any thread.
        self._lock = threading.RLock()
        self._gone: SimpleQueue[None] = SimpleQueue()
        self._mapped = 0
        self._waiting = False

    def region_came(self) -> None:
        with self._lock:
            self._mapped += 1

    def region_gone(self) -> None:
        with self._lock:
            self._mapped -= 1
            if self._mapped or not self._waiting:
                return
            self._waiting = False
        # Not said in this thread: it may hold any lock, the channel's too.
        self._gone.put(None)

    def say(self) -> None:
        with self._lock:
            self._waiting = True
            unmapped = not self._mapped
        errand = Errand()
        said = self._said("detach", errand, timeout_s=_DETACH_S, come_back=False, unmapped=unmapped)
        if said and unmapped:
            self._channel.close()
            return
        try:
            thread = threading.Thread(
                target=self._go_on, args=(None if said else errand, unmapped), name="sharedmirror-farewell", daemon=True
            )
            thread.start()
        except RuntimeError:
            _log.debug("event=detach_not_said reason=interpreter_exit")

    def _go_on(self, errand: Errand | None, unmapped: bool) -> None:
        if errand is not None:
            self._insist("detach", errand, unmapped=unmapped)
        if not unmapped:
            self._gone.get()
            self._insist("unmapped", Errand())
        self._channel.close()

    def _insist(self, op: str, errand: Errand, **arguments: Any) -> None:
        pause_s = _SAY_AGAIN_FIRST_S
        while not self._said(op, errand, **arguments):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SAY_AGAIN_LAST_S)

    def _said(self, op: str, errand: Errand, **arguments: Any) -> bool:
        """Whether no more is to be said: the daemon has heard it, or never will."""
        try:
            self._channel.call(op, errand=errand, **arguments)
        except SharedMirrorError as error:
            if error.retryable:
                _log.debug("event=%s_later reason=%r", op, error.message)
                return False
            # Nothing is lost: the end of the process says the same.
            _log.warning("event=%s_not_said reason=%r", op, error.message)
        return True


class Gate:
    """Lets calls through until it is closed, and knows how many are inside.

    Entering raises ForkedError in a forked child and ClosedError after ``close``.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._inside = 0
        self.closed = False

    def check(self) -> None:
        """Raise what entering would raise."""
        self.check_fork()
        if self.closed:
            raise ClosedError("this mirror is closed")

    def check_fork(self) -> None:
        """Raise ForkedError in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedError("this mirror belongs to the parent process; open another one in the child", pid=self._pid)

    def __enter__(self) -> None:
        self.check()
        with self._changed:
            self.check()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Block until no call is inside."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)

    def close(self) -> bool:
        """Let no more calls in and wait for those inside; return False when it was closed before."""
        self.check_fork()
        with self._changed:
            if self.closed:
                return False
            self.closed = True
        self.settle()
        return True


def _unregister(registration: HostRegistration) -> MemoryFault | None:
    try:
        registration.close()
    except MemoryFault as fault:
        return fault
    return None


def _extents(region: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(int(arena), int(offset), int(length)) for arena, offset, length in region["extents"]]


def _read(reply: dict[str, Any]) -> tuple[int, int, list[Placement]]:
    try:
        placements = [Placement(int(region), int(base), int(stride)) for region, base, stride in reply["planes"]]
        for region in reply["regions"]:
            if sum(int(length) for _, _, length in region["extents"]) != int(region["bytes"]):
                raise ProtocolError(f"the extents of region {region['id']} do not sum to its {region['bytes']} bytes")
        return int(reply["pool"]), int(reply["num_host_pages"]), placements
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the daemon's answer to attach makes no sense: {error!r}") from error
