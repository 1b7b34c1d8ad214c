"""What the manager remembers of each request: the pages held for it, and what is not there this step.

A chunk that a lookup found stays held, under the request, until its load is over or the request is
done with the tier. What was not found is remembered only for the step, since it may come.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from sharedmirror.integrations.vllm.link import Held
from sharedmirror.integrations.vllm.orders import GroupLoad, Pinned

__all__ = ["GroupView", "RequestState"]


@dataclass
class GroupView:
    """One cache group's chunks of one request, in prefix order."""

    suffix: bytes
    """The last four bytes of the group's keys."""
    tokens_per_chunk: int
    keys: list[OffloadKey] = field(default_factory=list)
    at: dict[OffloadKey, int] = field(default_factory=dict)
    asked: range | None = None
    """Which of the keys were asked for, and whatever lies between them."""
    downward: bool = False
    """Whether vLLM scans the group from its end, as it does where a window is all that is needed."""
    _seen: int = 0

    def refresh(self, context: ReqContext) -> None:
        """Take in the keys that vLLM has announced for the request since the last time."""
        positions = context._offload_key_positions
        if len(positions) == self._seen:
            return
        self._seen = len(positions)
        # Keys inside a chunk (of a recurrent state's tail) are asked for one by one.
        self.keys = [
            key for key, end in positions.items() if key.endswith(self.suffix) and end % self.tokens_per_chunk == 0
        ]
        self.at = {key: at for at, key in enumerate(self.keys)}

    def parent(self, key: OffloadKey, context: ReqContext) -> OffloadKey | None:
        """Return the chunk before ``key``, which may end inside a chunk."""
        at = self.at.get(key)
        if at is None:
            at = (context.get_offload_key_position(key) or 0) // self.tokens_per_chunk
        return self.keys[at - 1] if 0 < at <= len(self.keys) else None


@dataclass
class RequestState:
    """One request."""

    life: int
    groups: list[GroupView]
    held: dict[OffloadKey, tuple[Held, int]] = field(default_factory=dict)
    """The hit and the host page of each chunk that is held."""
    absent: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    absent_step: int = -1
    pending_since: float | None = None
    hits: list[list[Held]] = field(default_factory=list)
    """All hits taken for the request, a list a group."""
    loading: tuple[OffloadKey, ...] = ()
    no_loads: bool = False
    """Set when a load failed: from then on the request computes for itself."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.hits = [[] for _ in self.groups]

    def let_go(self) -> list[list[Held]]:
        """Forget what is held and return the hits to be released, a list a group."""
        taken, self.hits = self.hits, [[] for _ in self.groups]
        self.held.clear()
        self.absent.clear()
        for group in self.groups:
            group.asked = None
        return taken

    def load(self, keys: Collection[OffloadKey]) -> GroupLoad | None:
        """Return the order to load ``keys`` of one group; None when one of them is not held."""
        runs: list[tuple[Held, list[int]]] = []
        for key in keys:
            found = self.held.get(key)
            if found is None:
                return None
            held, page = found
            if not runs or runs[-1][0] is not held:
                runs.append((held, []))
            runs[-1][1].append(page)
        return GroupLoad(
            tuple((Pinned(h.instance, h.hit.id, h.hit.pool, h.hit.pages), tuple(pages)) for h, pages in runs)
        )
