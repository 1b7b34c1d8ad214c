"""One load by several GPUs: who pulls which pages, and in which order all of it is enqueued.

The frames of a load are the same on each rank. Sorted, they are cut into one stretch a rank. A rank pulls its stretch
from the host, chunk by chunk, into slots that the others may read; it scatters each chunk into its own device
pages, and fetches the chunks of the others from their slots. What is in a slot depends on the frames alone, so a rank
scatters the others' chunks by its own device pages without a word from them.

    pull     wait: all have consumed what was in the slot; copies from the host
    tell     write produced, while the next chunk is on the link already
    own      scatter
    fetch    wait: produced; copy from the other's slot; write consumed
    others   scatter; at the end write finished

Why it cannot lock up. Give the pull of chunk k the number (k, 0) and the fetch of a chunk k of another rank (k, 1),
where k counts on from load to load. A rank enqueues in the order of these numbers. A fetch (k, 1) waits for
a pull (k, 0), a pull (k, 0) for fetches (k - slots, 1): always for smaller numbers. So even where a GPU runs all of
its streams one behind the other, as streams that share a hardware queue may do, the rank whose next number is the
smallest can go on. This holds among loads together; what a rank enqueued before one must not wait for what another rank
enqueues after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sharedmirror.copies.driver import Kernel
from sharedmirror.copies.pairs import Ids
from sharedmirror.copies.plan import Chunks, Ramp, plan_staged
from sharedmirror.copies.submission import CopyTables, LaunchTables, Lines
from sharedmirror.copies.together.board import Board
from sharedmirror.copies.together.peers import PeerDriver

__all__ = ["Member", "Streams", "Turns", "chunk_order", "digest_of", "stretches"]

_WORD = 0xFFFFFFFF


class Streams(NamedTuple):
    """The streams of a rank's loads together."""

    pull: int
    tell: int
    own: int
    fetch: int
    others: int


@dataclass(eq=False)
class Member:
    """One rank's chunks as this rank sees them.

    ``slots`` are where they come to lie in this device's memory, ``sources`` the slots in the memory of the rank that
    pulls them (none for this rank's own), ``free`` events that a slot has been emptied here.
    ``compute`` is the stream of each slot's kernels: one for all.
    """

    lines: Lines
    slots: tuple[int, ...]
    sources: list[int]
    free: list[int]
    compute: tuple[int, ...]
    copies: int
    count: int = 0
    """Chunks so far, of all loads."""
    next_slot: int = 0


def stretches(count: int, members: int) -> list[tuple[int, int]]:
    """Cut ``count`` sorted frames into a stretch a member, as equal as may be."""
    bounds = [count * member // members for member in range(members + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def chunk_order(numbers: Sequence[int], me: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, member) in the order of submission: chunk by chunk, a rank's own before the others'."""
    members = [(me + step) % len(numbers) for step in range(len(numbers))]
    for chunk in range(max(numbers)):
        for member in members:
            if chunk < numbers[member]:
                yield chunk, member


def digest_of(number: int, frames: Ids) -> int:
    """Return 64 bits that differ when the hit's number or the sorted frames do."""
    found = hashlib.blake2b(f"{number} {len(frames)} ".encode(), digest_size=8)
    found.update(frames.tobytes())
    return int.from_bytes(found.digest(), "little")


class Turns:
    """Plans and enqueues the loads of one rank. Calls come one at a time."""

    def __init__(
        self, driver: PeerDriver, board: Board, board_address: int, kernels: list[Kernel], members: Sequence[Member],
        streams: Streams, slot_bytes: int, edges: Ids,
    ) -> None:  # fmt: skip
        """``board_address`` is where streams find the board; members are in the board's order."""
        self._driver, self._board, self._words = driver, board, board_address
        self._kernels, self._members, self._streams = kernels, list(members), streams
        self._slot_bytes, self._edges = slot_bytes, edges
        self._slots = len(self._members[board.me].slots)
        self._mark = driver.create_event()

    def cut(self, frames: Ids) -> list[Chunks | None]:
        """Return the chunks of each member's stretch of the sorted frames; None where it is empty."""
        bounds = stretches(len(frames), len(self._members))
        return [
            member.lines.cuts.get(frames[low:high], self._slot_bytes, ramp=Ramp.DOWN) if high > low else None
            for member, (low, high) in zip(self._members, bounds, strict=True)
        ]

    def needs(self, cuts: Sequence[Chunks | None]) -> dict[int, int]:
        """Return the words that a load waits for, by offset on the board, and up to where."""
        board, needs = self._board, {}
        for member, chunks in enumerate(cuts):
            last = self._members[member].count + _number(chunks)
            if chunks is not None and member == board.me:
                if last > self._slots:
                    needs.update({board.consumed(each, board.me): last - self._slots for each in board.others})
            elif chunks is not None:
                needs[board.produced(member)] = last
        return needs

    def submit(self, number: int, frames: Ids, cuts: Sequence[Chunks | None], pages: int, ids: int, outer: int) -> None:
        """Enqueue load ``number`` as if on the stream ``outer``; all of it is done when the stream ``others`` is.

        ``pages`` and ``ids`` are addresses on host and device: there lie the pages of the sorted frames, and there they
        are to be.
        """
        driver, board, members, streams = self._driver, self._board, self._members, self._streams
        self.follow(streams.own, outer)
        driver.copy(ids, pages, 8 * len(frames), streams.own)
        self.follow(streams.others, streams.own)
        self.follow(streams.pull, outer)
        bounds = stretches(len(frames), len(members))
        launches: dict[int, LaunchTables] = {}
        mine, copies = cuts[board.me], None
        if mine is not None:
            low, high = bounds[board.me]
            own = members[board.me]
            plan = plan_staged(mine, frames[low:high], own.slots, own.next_slot, self._edges)
            copies = CopyTables(driver, plan, to_host=False)
        for chunk, at in chunk_order([_number(chunks) for chunks in cuts], board.me):
            if at == board.me and copies is not None:
                self._pull(members[at], copies, chunk)
            else:
                self._fetch(at, _size(cuts[at], chunk))
            if at not in launches and (chunks := cuts[at]) is not None:
                lines, first = members[at].lines, ids + 8 * bounds[at][0]
                launches[at] = LaunchTables(driver, self._kernels, lines, chunks, members[at], first)
            launches[at].submit(chunk)
            slot = members[at].next_slot
            driver.record(members[at].free[slot], members[at].compute[slot])
            members[at].count += 1
            members[at].next_slot = members[at].count % len(members[at].slots)
        self.follow(streams.others, streams.own)
        driver.write_word(streams.others, self._words + board.finished(board.me), number & _WORD)

    def follow(self, stream: int, before: int) -> None:
        """Make later work on ``stream`` wait for all work that is on the stream ``before``."""
        self._driver.record(self._mark, before)
        self._driver.wait(stream, self._mark)

    def _pull(self, own: Member, copies: CopyTables, chunk: int) -> None:
        driver, board, stream = self._driver, self._board, self._streams.pull
        before = own.count + 1 - self._slots
        if before > 0:
            for reader in board.others:
                driver.wait_word(stream, self._words + board.consumed(reader, board.me), before & _WORD)
        driver.wait(stream, own.free[own.next_slot])
        copies.submit(chunk, stream)
        self.follow(own.compute[own.next_slot], stream)
        driver.wait(self._streams.tell, self._mark)
        driver.write_word(self._streams.tell, self._words + board.produced(board.me), (own.count + 1) & _WORD)

    def _fetch(self, at: int, size_bytes: int) -> None:
        driver, board, stream, other = self._driver, self._board, self._streams.fetch, self._members[at]
        driver.wait_word(stream, self._words + board.produced(at), (other.count + 1) & _WORD)
        driver.wait(stream, other.free[other.next_slot])
        source = other.sources[other.count % len(other.sources)]
        driver.copy(other.slots[other.next_slot], source, size_bytes, stream)
        driver.write_word(stream, self._words + board.consumed(board.me, at), (other.count + 1) & _WORD)
        self.follow(other.compute[other.next_slot], stream)

    def all_taken(self) -> bool:
        """Return whether every other rank has consumed all that this one produced."""
        board = self._board
        count = self._members[board.me].count
        return all(board.reached(board.consumed(each, board.me), count) for each in board.others)


def _number(chunks: Chunks | None) -> int:
    return 0 if chunks is None else len(chunks.launches)


def _size(chunks: Chunks | None, chunk: int) -> int:
    """Return how many bytes of its slot a chunk fills."""
    if chunks is None:
        return 0
    pages, low, high = (int(chunks.launches[chunk, 0, column]) for column in (1, 4, 5))
    return pages * (high - low)
