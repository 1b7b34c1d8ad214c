"""Loads of shared planes by several GPUs together: each pulls a part over its own link, peers copy the rest.

``turns`` says who does what in which order, ``watchdog`` what happens if somebody does not; here are the streams,
the memory and the meeting. The first load meets the other ranks: each puts a handle of its slots on the board and
opens those of the others. When one of them cannot, no rank loads together: all see that on the board.

Kept here: what the decision hangs on is the same on each rank; a load together starts after all work on its
stream, and work that comes later sees every byte; slots are freed only when no other rank can be reading
them, and are kept until the process ends where that is not known.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from sharedmirror.copies.interface import Geometry, Stream
from sharedmirror.copies.kernels import MoveKernels
from sharedmirror.copies.lane import ID_ROOM, IdRing
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import sort_by_frame
from sharedmirror.copies.staged import CudaCompletion
from sharedmirror.copies.submission import Lines
from sharedmirror.copies.together.board import Board, Card, Kind, State, wait_until
from sharedmirror.copies.together.peers import PeerDriver
from sharedmirror.copies.together.turns import Member, Streams, Turns, digest_of
from sharedmirror.copies.together.watchdog import Round, Watchdog, failure
from sharedmirror.copies.view import Addresses, View, build_view
from sharedmirror.errors import ClosedError, CopyError, UsageError
from sharedmirror.types import BOARD_BLOCK_BYTES

__all__ = ["Exchange", "Together"]

TOGETHER_BYTES = 32 << 20
"""Smaller loads are over before the ranks have waited for each other."""
SLOT_BYTES = 16 << 20
LEAST_SLOT_BYTES = 2 << 20
SLOTS = 3
LANDING_SLOTS = 2
PATIENCE_S = 10.0
"""How long a rank waits for the others, from its call on."""
SAME_DEVICE = False
"""Whether ranks on one device load together: only tests want it."""
MOST_PAGES = ID_ROOM // 4
_LEAVE_S = 1.0

_log = logging.getLogger("sharedmirror")
_KEPT: list[object] = []
"""Exchanges whose slots another rank may be reading still: they live until the process ends."""


class Together:
    """The end of one load together."""

    def __init__(self, event: torch.cuda.Event, begun: Round, watchdog: Watchdog) -> None:
        self._streams, self._round, self._watchdog = CudaCompletion(event), begun, watchdog

    def done(self) -> bool:
        """Return whether every byte is there; raises PartMissing, RanksDisagree or CopyError."""
        if not self._streams.done():
            return False
        self._watchdog.check(self._round)
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Block until done, at most ``timeout_s`` seconds; return done()."""
        return self._streams.wait(timeout_s) and self.done()


class Exchange:
    """Loads the planes of ``geometry`` together with the other ranks of ``ranks``, who bring the same planes.

    ``memory`` is the board. Nothing is allocated before the first load that is large enough.
    """

    def __init__(
        self, geometry: Geometry, memory: mmap.mmap, ranks: tuple[int, ...], rank: int, *,
        slot_bytes: int | None = None, slots: int | None = None, landing_slots: int | None = None,
        least_bytes: int | None = None, patience_s: float | None = None,
    ) -> None:  # fmt: skip
        self._board = Board(memory, ranks, rank)
        self._geometry = geometry
        self._addresses = Addresses.of(geometry)
        self._slot_bytes = slot_bytes or max(LEAST_SLOT_BYTES, 2 * SLOT_BYTES // len(ranks))
        self._counts = slots or SLOTS, landing_slots or LANDING_SLOTS
        self._least_bytes = TOGETHER_BYTES if least_bytes is None else least_bytes
        self._watchdog = Watchdog(self._board, PATIENCE_S if patience_s is None else patience_s)
        self._lock = threading.Lock()
        self._rig: _Rig | None = None
        self._met: bool | None = None
        self._number = 0
        self._closed = False

    @property
    def active(self) -> bool | None:
        """Whether the ranks load together; None before they have met."""
        return self._met and self._usable()

    def load(self, number: int, device_pages: Ids, host_frames: Ids, stream: Stream) -> Together | None:
        """Copy host to device as if enqueued on ``stream``; None when each rank is to load by itself.

        ``number`` is the hit's. Raises PartMissing or RanksDisagree when the others do not come, CopyError.
        """
        small = len(device_pages) * self._addresses.page_bytes < self._least_bytes
        if small or len(device_pages) > MOST_PAGES:
            return None
        with self._lock:
            if self._closed:
                raise ClosedError("the copy engine is closed")
            if not self._usable() or not self._meet() or self._rig is None:
                return None
            pages, frames = sort_by_frame(device_pages, host_frames)
            return self._submit(self._rig, digest_of(number, frames), pages, frames, stream)

    def drain(self) -> None:
        """Block until every load together is over, at the latest when the others' time is up; raises CopyError."""
        with self._lock:
            if self._rig is not None:
                self._rig.drain()

    def close(self) -> None:
        """Drain, leave the board, and free what nobody reads any more; raises CopyError."""
        with self._lock:
            if self._closed:
                return
            rig = self._rig
            if rig is not None:
                rig.drain()
                if self._met:
                    wait_until(lambda: rig.turns.all_taken() or not self._usable(), self._watchdog.patience_s)
                rig.close_peers()
            self._closed = True
            if self._met is not None:
                self._board.say(State.LEFT)
            if rig is not None:
                alone = wait_until(lambda: not self._board.behind(State.LEFT), _LEAVE_S if self._met else 0.0)
                rig.close(free=alone)
                if not alone:
                    _KEPT.append(rig)
            self._watchdog.close()
            self._rig = None

    def _usable(self) -> bool:
        board = self._board
        left = any(board.state(each) is State.LEFT for each in board.others)
        return self._met is not False and board.aborted is None and not left

    # -- meeting ----------------------------------------------------------------------------------

    def _meet(self) -> bool:
        """Meet the other ranks, once; raises PartMissing when they do not come in time."""
        if self._met is not None:
            return self._met
        board, rig, fault = self._board, None, ""
        try:
            rig = _Rig(self._geometry, self._addresses, board, self._slot_bytes, *self._counts)
        except (CopyError, RuntimeError, AttributeError, OSError) as error:
            fault = str(error)
        deadline = time.monotonic() + self._watchdog.patience_s
        card = rig.card() if rig is not None else Card(os.getpid(), b"", b"", b"")
        entered, self._rig = board.enter(card), rig
        if not entered:
            self._met = False
            return False
        if rig is not None:
            self._await(State.HERE, deadline)
            fault = rig.reach(board)
        board.say(State.CANNOT if fault else State.READY)
        self._await(State.READY, deadline)
        states = [board.state(each) for each in range(len(board.ranks))]
        self._met = all(state is State.READY for state in states)
        _log.info("event=exchange ranks=%s together=%s reason=%r", list(board.ranks), self._met, fault)
        if self._met:
            self._watchdog.start()
        return self._met

    def _await(self, state: State, deadline: float) -> None:
        board = self._board
        wait_until(lambda: not board.behind(state) or board.aborted is not None, max(0.0, deadline - time.monotonic()))
        missing = board.behind(state)
        if missing:
            self._met = False
            abort = board.abort(Kind.MISSING, missing[0])
            raise failure(abort, self._watchdog.patience_s)

    # -- loads ------------------------------------------------------------------------------------

    def _submit(self, rig: _Rig, digest: int, pages: Ids, frames: Ids, stream: Stream) -> Together | None:
        outer, number = rig.stream(stream), self._number + 1
        # The others judge their loads within a moment, or abort.
        if not self._board.may_post(number):
            wait_until(lambda: self._board.may_post(number) or not self._usable(), 2 * self._watchdog.patience_s)
            if not self._board.may_post(number) or not self._usable():
                return None
        self._number = number
        cuts = rig.turns.cut(frames)
        begun = self._watchdog.begin(number, digest, rig.turns.needs(cuts))
        with self._all_or_abort(rig, begun):
            host, ids = rig.ids.put(pages)
            rig.turns.submit(number, frames, cuts, host, ids, outer.cuda_stream)
            event = rig.event()
            rig.ids.taken(event)
            outer.wait_event(event)
        return Together(event, begun, self._watchdog)

    @contextmanager
    def _all_or_abort(self, rig: _Rig, begun: Round) -> Iterator[None]:
        """After an error end loading together, wait for what was submitted, and raise it as CopyError."""
        with rig.driver:
            try:
                yield
            except BaseException as error:
                self._watchdog.fail(begun)
                with suppress(CopyError, RuntimeError):
                    rig.synchronize()
                    self._watchdog.settle(begun)
                if isinstance(error, RuntimeError):
                    raise CopyError(f"the device reported an error during a copy: {error}") from error
                raise


class _Rig:
    """Streams, slots, kernels and registrations of one rank's loads together."""

    def __init__(
        self, geometry: Geometry, addresses: Addresses, board: Board, slot_bytes: int, slots: int, landing_slots: int
    ) -> None:
        index = geometry.device.index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        view = build_view(addresses, [geometry.order])
        self._digest = _shape_digest(view, addresses, board, slot_bytes, slots)
        self._board, self._slot_bytes, self._slots = board, slot_bytes, slots
        self._opened: dict[int, int] = {}
        self._registered = self._ring = 0
        with torch.cuda.device(self._device):
            self.driver = driver = PeerDriver(self._device.index)
            with driver, self._all_or_none():
                self.device_id = driver.device_id()
                self._ring = driver.allocate(slots * slot_bytes)
                self._handle = driver.handle_of(self._ring)
                board_address = self._register()
                self.streams = streams = Streams(*(driver.create_stream() for _ in range(len(Streams._fields))))
                self._outer = torch.cuda.ExternalStream(self.streams.others, device=self._device)
                kernels = MoveKernels(driver, self._device, view.tables)
                landing = len(board.others) * landing_slots
                self._landing = torch.empty((landing, slot_bytes), dtype=torch.uint8, device=self._device)
                places = [int(row.data_ptr()) for row in self._landing]
                self.members = []
                for member in range(len(board.ranks)):
                    mine = member == board.me
                    here = self._slots_at(self._ring) if mine else [places.pop() for _ in range(landing_slots)]
                    copies, compute = (streams.pull, streams.own) if mine else (streams.fetch, streams.others)
                    free, computes = [driver.create_event() for _ in here], (compute,) * len(here)
                    lines = Lines(view, self._device)
                    self.members.append(Member(lines, tuple(here), [], free, computes, copies))
                if not kernels.settle():
                    raise CopyError("its kernels could not be compiled")
                moves = kernels.all(view.tables, to_dense=False, direct=False)
                self.turns = Turns(
                    driver, board, board_address, moves, self.members, self.streams, slot_bytes, addresses.edges
                )
                self.ids = IdRing(self._device)
                self._try_words(board_address + board.finished(board.me))
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """After an error let go of what others could open, and of the board."""
        try:
            yield
        except BaseException:
            with suppress(CopyError):
                if self._registered:
                    self.driver.unregister(self._registered)
                if self._ring:
                    self.driver.free(self._ring)
            raise

    def _register(self) -> int:
        """Register the blocks of the group; return where the device would find the start of the board."""
        low, high = (BOARD_BLOCK_BYTES * rank for rank in (self._board.ranks[0], self._board.ranks[-1] + 1))
        start = int(self._board.bytes.ctypes.data) + low
        found = self.driver.register(start, high - low) - low
        self._registered = start
        return found

    def _try_words(self, address: int) -> None:
        """Raise CopyError where streams cannot write words and wait for them."""
        self.driver.write_word(self.streams.pull, address, 0)
        self.driver.wait_word(self.streams.pull, address, 0)
        self.driver.synchronize(self.streams.pull)

    def _slots_at(self, address: int) -> list[int]:
        return [address + self._slot_bytes * slot for slot in range(self._slots)]

    def card(self) -> Card:
        """Return what the others need to know."""
        return Card(os.getpid(), self._handle, self.device_id, self._digest)

    def reach(self, board: Board) -> str:
        """Open the slots of the others; return what is in the way, or nothing."""
        for member in board.others:
            card, rank = board.card(member), board.ranks[member]
            if board.state(member) is State.CANNOT:
                return f"rank {rank} cannot"
            if card is None or card.digest != self._digest:
                return f"rank {rank} has another layout or version"
            if card.device == self.device_id and not SAME_DEVICE:
                return f"rank {rank} is on the same device"
            try:
                with self.driver:
                    self._opened[member] = self.driver.open_handle(card.handle)
            except CopyError as error:
                return f"the slots of rank {rank} cannot be reached: {error.message}"
            self.members[member].sources = self._slots_at(self._opened[member])
        return ""

    def stream(self, stream: Stream) -> torch.cuda.Stream:
        """Return the caller's stream."""
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if not isinstance(stream, torch.cuda.Stream) or stream.device != self._device:
            raise UsageError(f"stream is {stream!r}; give a torch.cuda.Stream of {self._device}, or None")
        return stream

    def event(self) -> torch.cuda.Event:
        """Return an event that is complete when all that was submitted is."""
        event = torch.cuda.Event()
        event.record(self._outer)
        return event

    def drain(self) -> None:
        """Block until every load is over; raises CopyError."""
        try:
            for event in self.ids.events():
                event.synchronize()
        except RuntimeError as error:
            raise CopyError(f"the device reported an error during a copy: {error}") from error

    def synchronize(self) -> None:
        """Block until all streams are empty; raises CopyError."""
        for stream in self.streams:
            self.driver.synchronize(stream)

    def close_peers(self) -> None:
        """Let go of the others' slots; raises CopyError."""
        with self.driver:
            self.synchronize()
            while self._opened:
                self.driver.close_handle(self._opened.popitem()[1])

    def close(self, *, free: bool) -> None:
        """Let go of everything; of the slots only if ``free``. Raises CopyError."""
        with self.driver:
            events = [event for member in self.members for event in member.free]
            self.driver.destroy(list(self.streams), events)
            self.driver.unregister(self._registered)
            if free:
                self.driver.free(self._ring)
        if free:
            self.driver.close()
        for member in self.members:
            member.lines.release()
        del self._landing, self.ids


def _shape_digest(view: View, addresses: Addresses, board: Board, slot_bytes: int, slots: int) -> bytes:
    """Return a digest of all that decides what is in a slot, and in which."""
    records = view.records.copy()
    records[:, 2] -= int(addresses.host_base.min())
    found = hashlib.blake2b(repr((board.ranks, slot_bytes, slots, view.groups)).encode(), digest_size=16)
    for each in (records, view.cuts):
        found.update(each.tobytes())
    return found.digest()
