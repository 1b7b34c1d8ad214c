"""The scheduler's side: what vLLM asks of a tier, answered out of pools that outlive vLLM.

What it keeps:

- a HIT can be loaded: its page is pinned, under the request, from the lookup that found it until the
  load is over or the request has no use for it;
- one round trip for all chunks of a request, whatever vLLM asks one by one; repeats cost nothing;
- no call raises into the scheduler, and none waits longer than the call's deadline: where the daemon
  does not answer, nothing is there;
- the daemon tells who wrote what. A chunk is readable when every rank has committed it, so this
  manager need not hear of a copy's end, and a rank that fails to copy takes nothing down.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from sharedmirror.integrations.vllm.link import Held, PoolLink
from sharedmirror.integrations.vllm.metrics import Metric
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.integrations.vllm.orders import GroupStore, LoadOrder, StoreOrder
from sharedmirror.integrations.vllm.requests import GroupView, RequestState
from sharedmirror.types import KeyState

__all__ = ["SharedMirrorManager"]

_MOST_KEYS = 4096
"""Of one call; a longer prompt takes another one when the scan gets there."""
_FEW_KEYS = 64
"""Of a call that repeats a question."""
_STATES = {KeyState.MISS: LookupResult.MISS, KeyState.PENDING: LookupResult.HIT_PENDING}
_LIMBO_S = 10.0
"""After a reset vLLM tells no end of the loads under way; by then they are over."""


@dataclass
class _Storing:
    """A lease under way: its order, its group, and how many of its chunks are not complete."""

    order: GroupStore
    group: int
    left: int


class SharedMirrorManager(OffloadingManager):
    """Answers vLLM's scheduler; ``links`` has one pool for each cache group, in vLLM's order.

    ``groups`` are (group id, tokens of a chunk).
    """

    def __init__(
        self, links: Sequence[PoolLink], groups: Sequence[tuple[int, int]], options: Options, *, events: bool
    ) -> None:
        self._links = tuple(links)
        self._groups = tuple((number.to_bytes(4, "big"), tokens) for number, tokens in groups)
        self._group_of = {suffix: at for at, (suffix, _) in enumerate(self._groups)}
        self._options = options
        self._requests: dict[str, RequestState] = {}
        self._step = 0
        self._storing: dict[OffloadKey, _Storing] = {}
        """The chunks whose stores vLLM has not reported complete."""
        self._limbo: list[tuple[float, list[list[Held]]]] = []
        self._events: list[OffloadingEvent] | None = [] if events else None
        self._counts: dict[str, int] = {}
        self._calls_failed = 0

    # -- lookups ---------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing is asked before the scheduler does."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the chunk can be loaded; if so it is held for the request."""
        state = self._requests.get(req_context.req_id)
        if state is None or state.life != self._life():
            state = self._open(req_context)
        if key in state.held:
            return LookupResult.HIT
        if state.absent_step != self._step:
            state.absent.clear()
            state.absent_step = self._step
        answer = state.absent.get(key)
        if answer is None:
            self._ask(state, key, req_context)
            if key in state.held:
                return LookupResult.HIT
            answer = state.absent.get(key, LookupResult.MISS)
        return self._patient(state) if answer is LookupResult.HIT_PENDING else answer

    def _life(self) -> int:
        return sum(link.life for link in self._links)

    def _open(self, context: ReqContext) -> RequestState:
        before = self._requests.get(context.req_id)
        state = RequestState(self._life(), [GroupView(suffix, tokens) for suffix, tokens in self._groups])
        if before is not None:  # another instance of the daemon: what was held is void
            state.no_loads, state.loading = before.no_loads, before.loading
        self._requests[context.req_id] = state
        return state

    def _patient(self, state: RequestState) -> LookupResult:
        """Somebody is writing the chunk: worth a short wait."""
        now = time.monotonic()
        if state.pending_since is None:
            state.pending_since = now
        waited_s = now - state.pending_since
        return LookupResult.HIT_PENDING if waited_s < self._options.pending_wait_s else LookupResult.MISS

    def _ask(self, state: RequestState, key: OffloadKey, context: ReqContext) -> None:
        """Ask the daemon for ``key`` and for what vLLM will ask next."""
        at = self._group_of[key[-4:]]
        link, group = self._links[at], state.groups[at]
        allowed = context.load_tier_filter.allows(Medium.CPU, Locality.LOCAL)
        if state.no_loads or not allowed or not self._usable():
            return
        group.refresh(context)
        keys, by_itself = self._next_keys(state, group, key)
        held = link.lookup(keys, "each" if by_itself else "prefix")
        if held is None:
            return
        hit = held.hit
        if hit.id:
            state.hits[at].append(held)
        found = len(hit)
        self._count(Metric.HITS, found)
        self._count(Metric.MISSES, int(found < len(keys)))
        if by_itself:
            pages = zip(keys, hit.pages, strict=True)
            state.held.update((k, (held, page)) for k, page in pages if page >= 0)
        else:
            state.held.update((k, (held, page)) for k, page in zip(keys, hit.pages, strict=False))
        if found < len(keys) and (by_itself or hit.states[found] is KeyState.PENDING):
            states = zip(keys, hit.states, strict=True)
            state.absent.update((k, _STATES[s]) for k, s in states if s is not KeyState.HIT)
        elif found < len(keys):
            state.absent[keys[found]] = LookupResult.MISS

    def _next_keys(self, state: RequestState, group: GroupView, key: OffloadKey) -> tuple[list[OffloadKey], bool]:
        """Return the keys to ask for, and whether each counts by itself.

        A group with full attention is scanned upwards and needs a prefix. Other groups are scanned
        downwards: seen from the second question on, which then asks for all that is left.
        """
        at = group.at.get(key)
        if at is None:
            return [key], True
        if group.asked is None or at >= group.asked.stop:
            keys = group.keys[at : at + _MOST_KEYS]
            by_itself = group.asked is not None
            group.asked = range(at if group.asked is None else group.asked.start, at + len(keys))
            return keys, by_itself
        group.downward = group.downward or at < group.asked.start
        # Else it was absent, and vLLM asks again in every step that has no room for the request.
        part = range(max(0, at + 1 - _MOST_KEYS), at + 1) if group.downward else range(at, at + _FEW_KEYS)
        group.asked = range(min(part.start, group.asked.start), group.asked.stop)
        return [k for k in group.keys[part.start : part.stop] if k not in state.held], True

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Name the tier: host memory."""
        return CacheHitSource.HOST

    # -- loads -----------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadOrder:
        """Order the load of chunks that ``lookup`` found."""
        state = self._requests.get(req_context.req_id) or self._open(req_context)
        state.loading = tuple(keys)
        parts: list[list[OffloadKey]] = [[] for _ in self._groups]
        for key in keys:
            parts[self._group_of[key[-4:]]].append(key)
        return LoadOrder(req_context.req_id, tuple(state.load(part) if part else None for part in parts))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Every rank's copies are over: let the request's pages go."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        loaded, state.loading = state.loading, ()
        bad = [key for key in loaded if key in state.held] if state.no_loads else []
        hits = state.let_go()
        for at, (suffix, _) in enumerate(self._groups):
            keys = [key for key in bad if key.endswith(suffix)]
            if keys:
                self._links[at].forget(hits[at], keys)
                hits[at] = []
        self._release(hits)
        if state.finished:
            del self._requests[req_context.req_id]

    def load_failed(self, req_id: str) -> None:
        """A rank could not load for this request: it computes for itself, and the keys are forgotten."""
        self._count(Metric.FAILED_LOADS, 1)
        state = self._requests.get(req_id)
        if state is not None:
            state.no_loads = True

    def _release(self, hits: list[list[Held]]) -> None:
        for link, taken in zip(self._links, hits, strict=True):
            link.release(taken)

    # -- stores ----------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Reserve pages for the chunks that the pool lacks; where that fails they are not stored."""
        parts: list[list[OffloadKey]] = [[] for _ in self._groups]
        for key in keys:
            parts[self._group_of[key[-4:]]].append(key)
        state = self._requests.get(req_context.req_id) or self._open(req_context)
        orders: list[GroupStore | None] = []
        to_store: list[OffloadKey] = []
        evicted: list[OffloadKey] = []
        for at, part in enumerate(parts):
            order, gone = self._reserve(at, part, state, req_context) if part else (None, ())
            orders.append(order)
            evicted += gone
            if order is not None:
                to_store += order.lease.keys or ()
        self._event(evicted, removed=True)
        self._count(Metric.EVICTED, len(evicted))
        return PrepareStoreOutput(to_store, StoreOrder(tuple(orders)), evicted)

    def _reserve(
        self, at: int, keys: list[OffloadKey], state: RequestState, context: ReqContext
    ) -> tuple[GroupStore | None, tuple[Any, ...]]:
        link, group = self._links[at], state.groups[at]
        group.refresh(context)
        fitting = keys[: link.capacity]
        granted = link.reserve(fitting, group.parent(keys[0], context)) if fitting and self._usable() else None
        if granted is None:
            self._count(Metric.SKIPPED, len(keys))
            return None, ()
        self._count(Metric.SKIPPED, len(keys) - len(fitting))
        lease = granted.reservation.lease
        if lease is None:
            return None, granted.reservation.evicted
        order = GroupStore(granted.instance, lease)
        storing = _Storing(order, at, len(lease.keys or ()))
        self._storing.update(dict.fromkeys(map(OffloadKey, lease.keys or ()), storing))
        return order, granted.reservation.evicted

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Every rank has copied, and committed or failed to: the daemon knows which."""
        done: list[OffloadKey] = []
        for key in keys:
            storing = self._storing.pop(key, None)
            if storing is None:
                continue
            done.append(key)
            storing.left -= 1
            if not storing.left:
                self._links[storing.group].settle(storing.order.instance, storing.order.lease)
        self._count(Metric.STORED, len(done))
        self._event(done, removed=False)

    # -- the request's and the step's end --------------------------------------------------------

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Let go of what the request holds, unless a load is under way."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        state.finished = True
        if not state.loading:
            del self._requests[req_context.req_id]
            self._release(state.let_go())

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """What was not there may be there in the next step; who was scheduled needs no more hits."""
        self._step += 1
        for req_id in context.new_req_ids:
            state = self._requests.get(req_id)
            if state is not None and not state.loading:
                state.pending_since = None
                self._release(state.let_go())
        while self._limbo and self._limbo[0][0] < time.monotonic():
            self._release(self._limbo.pop(0)[1])

    def reset_cache(self) -> None:
        """Forget everything in the pools, for all engines that share them."""
        for link in self._links:
            link.clear()
        for storing in {id(storing): storing for storing in self._storing.values()}.values():
            self._links[storing.group].abort(storing.order.instance, storing.order.lease)
        self._storing.clear()
        for state in self._requests.values():
            loading, state.loading = state.loading, ()
            hits = state.let_go()
            if loading:
                self._limbo.append((time.monotonic() + _LIMBO_S, hits))
            else:
                self._release(hits)
        self._requests = {req_id: state for req_id, state in self._requests.items() if not state.finished}

    def shutdown(self) -> None:
        """Disconnect."""
        for link in self._links:
            link.close()

    # -- metrics and events ----------------------------------------------------------------------

    def _usable(self) -> bool:
        return all(link.usable for link in self._links)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what this engine stored and evicted; what other engines do to the pool is not among it."""
        if self._events:
            yield from self._events
            self._events.clear()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the counts since the last call."""
        stats = OffloadingConnectorStats()
        failed = sum(link.calls_failed for link in self._links)
        self._count(Metric.FAILED_CALLS, failed - self._calls_failed)
        self._calls_failed = failed
        counts, self._counts = self._counts, {}
        for name, count in counts.items():
            stats.increase_counter(name, count)
        stats.set_gauge(Metric.UP, int(self._usable()))
        return stats

    def _count(self, name: str, count: int) -> None:
        if count:
            self._counts[name] = self._counts.get(name, 0) + count

    def _event(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(list(keys), Medium.CPU, removed, Locality.LOCAL))
