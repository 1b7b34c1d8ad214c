"""``SharedHostMirror``: an engine's device pages, mirrored in the daemon's memory.

This is the worker's side. It checks every call completely before a byte moves, hands the copies to
the engine that fits the device, and speaks for this rank: it commits what is complete and answers
revocations. It never waits for the daemon while it copies, and never tells the daemon of a copy that
is not complete.

All methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any

import torch

from sharedmirror.adapter import DevicePool, flat_bytes_per_host_page
from sharedmirror.attachment import Attachment, Gate, OpenChannel, open_channel
from sharedmirror.commits import CommitQueue, Progress
from sharedmirror.copies.cpu import CpuEngine
from sharedmirror.copies.geometry import build_geometry, host_tensor
from sharedmirror.copies.interface import Completion, CopyEngine, Event, Geometry, Stream
from sharedmirror.copies.pairs import Ids, PagePairs, check_pairs
from sharedmirror.copies.sharing import Part, PartsTogether, SharedStoreEngine, subset, take_samples
from sharedmirror.copies.together.board import MOST_RANKS
from sharedmirror.errors import (
    CopyError,
    MemoryFault,
    RankError,
    SharedMirrorError,
    StaleLease,
    UsageError,
    WrongPoolKind,
)
from sharedmirror.transfers import HitLike, Ledger, SampleLike, Transfer
from sharedmirror.types import (
    Layout,
    Lease,
    LeaseId,
    PoolKind,
    Sealed,
    check_lease,
    check_text,
    check_timeout,
    launch_id,
)

__all__ = ["Progress", "SharedHostMirror", "flat_bytes_per_host_page"]

ATTACH_WAIT_S = 30.0
"""How long attach waits for the engine's other ranks, or for the proof of a forerunner's death."""
_PART_STAGING_BYTES = 8 << 20
_ANSWER_AGAIN_S = 2e-3
_MOST_PAGES = (1 << 32) - 2
"""A pool's page table has no more; the daemon says the same."""
_MOST_FRAMES, _MOST_WORLD = 1 << 20, 65535

_log = logging.getLogger("sharedmirror")


class SharedHostMirror:
    """Host mirror of one rank's device pool, in memory that outlives the engine.

    ``device_kv_pool`` is a duck-typed pool (``page_size``, ``k_buffer``, ``v_buffer``, optionally
    ``state_slabs`` and ``get_state_buffers``) or a ``DevicePool``. ``num_host_pages`` None takes an
    existing pool's count, or lets the daemon choose; ``(least, most)``, for leased pages in layout "page",
    makes a pool that grows as it needs to and gives back when others need it. ``pages`` is "static" (the
    engine allocates host pages itself; raw copies) or "leased" (the daemon does; copies under leases and
    hits). ``layout`` is "slab" or "page". A host page has ``frames_per_page`` frames, each with room for one
    device page. ``shard`` (i, n) says that this rank's planes are shard i of n, equal on all ranks that say
    so: MLA latents are ``(0, 1)``. By default every rank is its own shard. ``rank`` and ``world_size``
    default to torch.distributed's, else 0 of 1.

    Raises LayoutError for a pool that cannot be mirrored, RankError, PoolMismatch with both values,
    DaemonUnavailable, RanksMissing, EngineBusy, RankAttached, ArenaFull, ArenaBusy or MemoryFault. A failed
    construction leaves nothing behind.

    ``page_size`` (token rows), ``num_host_pages`` (the most), ``row_spans`` (rows per page of each plane) and
    ``num_k_tensors`` are plain attributes.
    """

    def __init__(
        self,
        device_kv_pool: Any,
        num_host_pages: int | tuple[int, int] | None = None,
        *,
        socket: str | None = None,
        name: str = "default",
        engine: str = "0",
        rank: int | None = None,
        world_size: int | None = None,
        pages: str = "static",
        layout: str = "slab",
        frames_per_page: int = 1,
        tag: str = "",
        shard: tuple[int, int] | None = None,
        _open: OpenChannel = open_channel,
    ) -> None:
        self._pool = DevicePool.from_pool(device_kv_pool)
        rank, world_size = _rank_and_world(rank, world_size)
        self._rank = rank
        if shard is not None:
            if not isinstance(shard, (tuple, list)) or len(shard) != 2:
                raise UsageError(f"shard is {shard!r:.40}; it must be (i, n), shard i of n")
            self._pool = self._pool.sharded(*shard)
        try:
            self._kind, self._layout = PoolKind(pages), Layout(layout)
        except ValueError as error:
            raise UsageError(f"{error}; pages is 'static' or 'leased', layout is 'slab' or 'page'") from None
        if isinstance(num_host_pages, tuple):
            _check_bounds(num_host_pages, self._kind, self._layout)
        counts = [] if isinstance(num_host_pages, tuple) else [("num_host_pages", num_host_pages)]
        for what, value in [*counts, ("frames_per_page", frames_per_page)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{what} is {value!r}; it must be a whole number of at least 1")
            most = _MOST_PAGES if what == "num_host_pages" else _MOST_FRAMES
            if value is not None and value > most:
                raise UsageError(f"{what} is {value}; it must be at most {most}")
        check_text("name", name)
        check_text("engine", engine)
        if tag != "":
            check_text("tag", tag)
        self._gate = Gate()
        self._push_lock = threading.Lock()
        self._early: list[dict[str, Any]] | None = []
        self._ledger: Ledger | None = None
        self._static_over = False
        self._leaving = False
        self._pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._engine: CopyEngine
        self.page_size = self._pool.page_size
        self.row_spans = self._pool.layout.row_spans
        self.num_k_tensors = self._pool.num_k_tensors
        self.frames_per_page = frames_per_page
        # Announced, and so placed, layer by layer: what a layer's fence covers is one stretch of a page.
        planes, (order, _) = self._pool.layout.to_planes(rank, world_size), self._pool.copy_order()
        request = {
            "pool": name, "tag": tag, "engine": engine, "launch": launch_id(),
            "role": "worker", "rank": rank, "world_size": world_size, "page_size": self.page_size,
            "frames_per_page": frames_per_page, "kind": self._kind.value, "layout": self._layout.value,
            "num_host_pages": num_host_pages, "wait_s": ATTACH_WAIT_S,
            "planes": [planes[index].to_wire() for index in order],
        }  # fmt: skip
        self._attachment = Attachment(_open, socket, self._on_push, request, order, self._pool.device)
        try:
            self._take_place()
        except BaseException as error:
            # The frames of the failure hold views, and views hold the mapping.
            traceback.clear_frames(error.__traceback__)
            if hasattr(self, "_engine"):
                self._engine.close()
            self._pairs = ()
            self._attachment.leave()
            raise

    def _take_place(self) -> None:
        """Make host tensors and the copy engine over the mapped regions, and start to listen."""
        place = self._attachment
        self.num_host_pages = place.num_host_pages
        self._frames = place.num_host_pages * self.frames_per_page
        self._slice_bytes = [spec.slice_bytes for spec in self._pool.layout.planes]
        regions = [region.bytes for region in place.regions]
        geometry = build_geometry(self._pool, regions, place.placements, self._frames, place.host_edges)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor, at, span in zip(self._pool.tensors, place.placements, self.row_spans, strict=True):
            host = host_tensor(regions[at.region], at, tensor, span, self._frames, self._layout)
            pairs.append((tensor, host))
        self._pairs = tuple(pairs)
        self._engine, self._parts = self._make_engines(geometry)
        ledger = Ledger(place.pool, place.num_host_pages, int(place.before.get("incarnation", 0)))
        ledger.forestall(place.before)
        self._commits = CommitQueue(place.channel, ledger)
        with self._push_lock:
            self._ledger = ledger
            early, self._early = self._early or [], None
        for body in early:
            self._on_push(body)
        place.begin_registering()
        place.channel.listen(self._answer)
        if early:
            self._answer()

    def _make_engines(self, geometry: Geometry) -> tuple[CopyEngine, tuple[Part, ...]]:
        """Return the engine, and the parts that several ranks share if this rank stores only its turns."""
        whole = _make_engine(geometry)
        place = self._attachment
        # A static pool has no commit that would tell one rank of another's copy: there each rank stores all.
        if self._kind is PoolKind.STATIC or all(len(ranks) == 1 for ranks in place.sharers):
            return whole, ()
        parts, geometries = [], []
        for region, ranks in enumerate(place.sharers):
            planes = [plane for plane, at in enumerate(place.placements) if at.region == region]
            picked = subset(geometry, planes)
            engine = whole if len(planes) == len(geometry.planes) else _make_engine(picked, _PART_STAGING_BYTES)
            geometries.append(picked)
            turn = ranks.index(self._rank)
            parts.append(Part(place.region_ids[region], picked.planes, engine, len(ranks), turn))
        together = self._make_exchange(geometries)
        return SharedStoreEngine(whole, parts, self.frames_per_page, together), tuple(parts)

    def _make_exchange(self, geometries: list[Geometry]) -> tuple[int, PartsTogether] | None:
        """Return what loads planes together with other ranks, and which part's: that which most ranks share."""
        place = self._attachment
        number = max(range(len(geometries)), key=lambda at: (len(place.sharers[at]), place.region_ids[at]))
        ranks = tuple(place.sharers[number])
        if geometries[number].device.type != "cuda" or not 2 <= len(ranks) <= MOST_RANKS:
            return None
        from sharedmirror.copies.together.exchange import Exchange

        memory = place.board()
        return None if memory is None else (number, Exchange(geometries[number], memory, ranks, self._rank))

    # -- what the mirror looks like --------------------------------------------------------------

    @property
    def tensor_pairs(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """(device tensor, host tensor) of each plane: distinct K, distinct V, then state in slab order.

        The device tensor is the pool's very object. The host tensor has its dtype and, with layout
        "slab", shape ``(num_host_pages * frames_per_page * span, *row)``; with layout "page" it is a
        strided view ``(num_host_pages * frames_per_page, span, *row)``. It stays valid memory as long
        as it is held, also after ``close``.
        """
        self._gate.check()
        return self._pairs

    def bytes_per_host_page(self) -> int:
        """Return the payload bytes of one host page over all planes of this rank."""
        return self._pool.layout.bytes_per_page() * self.frames_per_page

    def tensor_index_of_layer(self, layer: int) -> int:
        """Return the index of the layer's K in ``tensor_pairs``; its V is ``num_k_tensors`` further on.

        Raises ValueError for a layer without KV, with "state layer" in its message.
        """
        return self._pool.tensor_index_of_layer(layer)

    def state_tensor_indices_of_layer(self, layer: int) -> tuple[int, int] | None:
        """Return the adjacent indices (conv, ssm) of the layer's state in ``tensor_pairs``, or None."""
        return self._pool.state_tensor_indices_of_layer(layer)

    # -- raw copies: static pools ----------------------------------------------------------------

    def store_pages(self, pairs: PagePairs, stream: Stream = None) -> None:
        """Copy (device page, host frame) pairs to the host, in every plane, as if enqueued on ``stream``.

        ``pairs`` are 2-tuples of ints or an integer array of shape (n, 2). A host frame is
        ``host_page * frames_per_page + sub``. ``stream`` None is the current stream of the pool's
        device; without CUDA the copies are complete on return.

        Raises PageError before anything is copied, WrongPoolKind in a leased pool, CopyError.
        """
        with self._gate:
            engine, (device, frames) = self._engine_of("store_pages"), self._raw(pairs, "store")
            with self._attachment.copying():
                engine.store(device, frames, stream)

    def load_pages(self, pairs: PagePairs, stream: Stream = None) -> None:
        """Copy (device page, host frame) pairs to the device; otherwise like ``store_pages``."""
        with self._gate:
            engine, (device, frames) = self._engine_of("load_pages"), self._raw(pairs, "load")
            with self._attachment.copying():
                engine.load(device, frames, stream)

    def load_pages_with_events(self, pairs: PagePairs, stream: Stream = None) -> list[Event]:
        """Like ``load_pages``; return one event per plane, in ``tensor_pairs`` order.

        A layer's V event also covers its K, its ssm event its conv and KV, and both all earlier
        layers; the last event of the list covers every copy. No event is ever recorded again.
        """
        with self._gate:
            engine, (device, frames) = self._engine_of("load_pages_with_events"), self._raw(pairs, "load")
            with self._attachment.copying():
                return engine.load_with_events(device, frames, stream)

    def _engine_of(self, call: str) -> CopyEngine:
        if self._kind is not PoolKind.STATIC:
            raise WrongPoolKind(
                f"{call} is a raw copy, and this pool is leased; use store(lease, ...) and load(hit, ...)"
            )
        self._attachment.channel.check_usable()
        if self._static_over:
            raise StaleLease("the daemon took this static pool back; close the mirror")
        return self._engine

    def _raw(self, pairs: PagePairs, kind: Any) -> tuple[Ids, Ids]:
        return self._checked(pairs, kind, null_frames=self.frames_per_page)

    def _checked(
        self, pairs: PagePairs, kind: Any, null_frames: int = 0, may: Callable[[set[int]], None] | None = None
    ) -> tuple[Ids, Ids]:
        """Return device pages and host frames, valid and with their memory mapped and registered.

        ``may`` raises for pages that are not to be copied; it is asked before memory is asked for.
        """
        device, frames = check_pairs(pairs, self._pool.num_device_pages, self._frames, kind, null_frames=null_frames)
        if len(frames):
            last = int(frames.max())
            if last // self.frames_per_page >= self._attachment.backed:
                if may is not None:
                    may(self._pages_of(frames))
                self._attachment.back(last // self.frames_per_page + 1)
            try:
                self._attachment.require(last, self._slice_bytes)
            except MemoryFault:
                if may is not None:
                    may(self._pages_of(frames))  # given back, because the lease or hit is over
                raise
        return device, frames

    # -- copies under leases and hits: leased pools ----------------------------------------------

    def store(self, lease: Lease, pairs: PagePairs, stream: Stream = None) -> Transfer:
        """Copy (device page, host frame) pairs into pages of ``lease``, as if enqueued on ``stream``.

        Raises PageError for a page outside the lease or one that this rank has committed, StaleLease
        when lease or page are over, WrongPoolKind in a static pool, CopyError. Where the pool has grown since,
        the daemon is asked for the new memory: DaemonUnavailable (retryable) while it is away, MemoryFault.
        """
        with self._gate:
            ledger = self._ledger_of("store")
            check_lease("store", lease)
            device, frames = self._checked(pairs, "store", may=lambda pages: ledger.check_store(lease, pages))
            transfer = ledger.begin_store(lease, self._pages_of(frames))
            with self._attachment.copying():
                if self._parts:
                    self._take_samples(lease, device, frames, stream)
                return _submit(transfer, self._engine.store, device, frames, stream)

    def _take_samples(self, lease: Lease, device: Ids, frames: Ids, stream: Stream) -> None:
        by_page: dict[int, list[SampleLike]] = {}
        for sample in take_samples(self._parts, lease, device, frames, self.frames_per_page, stream):
            by_page.setdefault(sample.page, []).append(sample)
        self._ledger_of("store").keep_samples(lease, by_page)

    def load(self, hit: HitLike, pairs: PagePairs, stream: Stream = None, *, together: bool = False) -> Transfer:
        """Copy (device page, host frame) pairs out of pages of ``hit``; otherwise like ``store``.

        ``together`` promises that every rank that shares planes with this one makes the same call: the same hit and
        host frames, in the same order among such calls and whatever else waits for other ranks; device pages may
        differ. Then each GPU pulls a part over its own link and they exchange the parts, where that is faster. When a
        rank does not come within 10 s, or loads something else, PartMissing or RanksDisagree is raised here or by the
        transfer, the loaded device pages are undefined, and from then on each rank loads by itself.
        """
        with self._gate:
            ledger = self._ledger_of("load")
            if not (hasattr(hit, "id") and hasattr(hit, "pages")) or isinstance(hit, Lease):
                raise UsageError(f"load copies under a Hit, not {type(hit).__name__}")
            device, frames = self._checked(pairs, "load", may=lambda pages: ledger.check_load(hit, pages))
            transfer = ledger.begin_load(hit, self._pages_of(frames))
            copy = self._engine.load
            if together and isinstance(self._engine, SharedStoreEngine):
                copy = partial(self._engine.load_together, hit.id)
            with self._attachment.copying():
                return _submit(transfer, copy, device, frames, stream)

    def commit(
        self, lease: Lease, pages: Iterable[int] | None = None, *, wait: bool = True, timeout_s: float = 30.0
    ) -> Sealed | None:
        """Say that this rank's copies into ``pages`` (None: all that are left of the lease) are complete.

        Waits for the copies, at most ``timeout_s`` seconds, then returns the daemon's answer. With
        ``wait=False`` the commit is queued instead, ``poll`` sends it, and None is returned. From the
        call on the pages take no more stores.

        Raises UsageError, CallTimeout (the pages take stores again), CopyError (nothing was committed),
        StaleLease, PageError, WrongPoolKind.
        """
        timeout_s = check_timeout(timeout_s)
        with self._gate:
            ledger = self._ledger_of("commit")
            commit = ledger.freeze(check_lease("commit", lease), pages)
            if wait:
                return self._commits.send_now(commit, timeout_s)
            self._commits.add(commit)
            return None

    def poll(self) -> Progress:
        """Send the queued commits whose copies are complete, and report revocations.

        Waits for no copy, and not for a daemon that is away: the commits then stay queued.
        """
        with self._gate:
            ledger = self._ledger_of("poll")
            sealed, failed = self._commits.send_ready()
            revoked = tuple(LeaseId(lease) for lease in ledger.take_revoked())
            return Progress(sealed, failed, revoked, len(self._commits))

    def _ledger_of(self, call: str) -> Ledger:
        if self._kind is not PoolKind.LEASED or self._ledger is None:
            raise WrongPoolKind(f"{call} needs a leased pool, and this one is static; use store_pages and load_pages")
        self._attachment.channel.check_usable()
        return self._ledger

    def _pages_of(self, frames: Ids) -> set[int]:
        pages = frames if self.frames_per_page == 1 else frames // self.frames_per_page
        return set(pages.tolist())

    # -- the daemon's word -----------------------------------------------------------------------

    def _on_push(self, body: dict[str, Any]) -> None:
        with self._push_lock:
            if self._early is not None:
                self._early.append(body)
                return
        if self._kind is PoolKind.STATIC and body["push"] in ("revoked", "revoked_pages"):
            self._static_over = True
        if body["push"] == "shrink":
            self._attachment.on_shrink(body)
        elif self._ledger is not None:
            self._ledger.on_push(body)

    def _answer(self) -> float | None:
        """Say what is drained by now; return after how many seconds to try again, or None."""
        try:
            return self._answer_now()
        except SharedMirrorError:
            if self._leaving:
                return None  # the detach says it all, and after it the daemon takes no answer
            raise

    def _answer_now(self) -> float | None:
        ledger = self._ledger
        if ledger is None:
            return None
        if self._static_over:
            # Raw copies are in no ledger: wait for the calls that came before the push, then for their copies.
            self._gate.settle()
            self._engine.drain()
        answer = ledger.answer()
        if answer:
            self._attachment.channel.call("drained", **answer.to_wire())
            ledger.answered(answer)
        busy = False
        for number, pages in self._attachment.owed:
            # The daemon has seen every lease and hit there end. A copy that is under way all the same comes first.
            if ledger.copies_from(pages):
                busy = True
            else:
                self._attachment.unmap(number)
        return _ANSWER_AGAIN_S if answer.waiting or busy else None

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all copies, send queued commits, unregister, unmap, and leave the pool.

        While the daemon is away queued commits wait for it once, at most 10 s. That this rank has left is said in
        the background, as soon as there is a daemon again; until then the process keeps its session.

        May be called again. Raises CopyError when the device cannot say that its copies are over: the
        memory then stays attached until the process ends. Raises MemoryFault when the driver keeps it.
        """
        if not self._gate.close():
            return
        try:
            self._engine.close()
        except CopyError:
            self._attachment.abandon()
            raise
        self._commits.send_ready(wait=True)
        self._pairs, self._parts = (), ()
        self._leaving = True
        self._attachment.leave()

    def __repr__(self) -> str:
        state = "closed" if self._gate.closed else f"rank={self._rank}"
        kind, layout = self._kind.value, self._layout.value
        return f"<SharedHostMirror pages={kind!r} layout={layout!r} num_host_pages={self.num_host_pages} {state}>"

    def __enter__(self) -> SharedHostMirror:
        self._gate.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SharedMirrorError as fault:
            if error is None:
                raise
            _log.error("event=close_failed reason=%r", fault.message)


def _submit(
    transfer: Transfer, copy: Callable[[Ids, Ids, Stream], Completion], device: Ids, frames: Ids, stream: Stream
) -> Transfer:
    try:
        completion = copy(device, frames, stream)
    except BaseException as error:
        if isinstance(error, UsageError) or (isinstance(error, CopyError) and error.settled):
            transfer.withdrawn()
            raise
        # Some of the copies may be under way.
        transfer.failed(error if isinstance(error, CopyError) else CopyError(f"the copies failed: {error!r}"))
        raise
    transfer.submitted(completion)
    return transfer


def _make_engine(geometry: Geometry, staging_bytes: int | None = None) -> CopyEngine:
    if geometry.device.type != "cuda":
        return CpuEngine(geometry)
    from sharedmirror.copies.staged import SLOT_BYTES, StagedEngine

    return StagedEngine(geometry, slot_bytes=staging_bytes or SLOT_BYTES)


def _check_bounds(count: tuple[Any, ...], kind: PoolKind, layout: Layout) -> None:
    if len(count) != 2 or any(isinstance(each, bool) or not isinstance(each, int) for each in count):
        raise UsageError(f"num_host_pages is {count!r}; two whole numbers are meant, the least and the most")
    if not 2 <= count[0] <= count[1] <= _MOST_PAGES:
        raise UsageError(
            f"num_host_pages is {count!r}; the least is 2 or more, and the most not less than it, up to {_MOST_PAGES}"
        )
    if kind is not PoolKind.LEASED or layout is not Layout.PAGE:
        raise UsageError(
            f"num_host_pages is {count!r}, and only a pool with pages='leased' and layout='page' can grow and shrink; "
            f"this one has pages={kind.value!r} and layout={layout.value!r}. Ask for one number of pages"
        )


def _rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if rank is None:
            rank = torch.distributed.get_rank() if distributed else 0
        if world_size is None:
            world_size = torch.distributed.get_world_size() if distributed else 1
    for what, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RankError(f"{what} is {value!r:.40}; it must be a whole number")
    if world_size > _MOST_WORLD:
        raise RankError(f"world_size is {world_size}; it must be at most {_MOST_WORLD}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise RankError(f"rank {rank} does not fit a world of {world_size}; ranks are 0..world_size-1", rank=rank)
    return rank, world_size
