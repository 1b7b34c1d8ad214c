"""``SharedMirrorOffloadingSpec``: what vLLM's offloading connector builds its two sides from.

vLLM makes one in the scheduler and one in each rank. ``replicated_layout`` stays False: with it the
connector would send stores to rank 0 only, and a page needs every rank's commit.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from sharedmirror.errors import UsageError
from sharedmirror.integrations.vllm import identity
from sharedmirror.integrations.vllm.link import PoolLink
from sharedmirror.integrations.vllm.manager import SharedMirrorManager
from sharedmirror.integrations.vllm.metrics import definitions
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.integrations.vllm.places import MirrorKeeper, device_pool
from sharedmirror.integrations.vllm.sleeping import guard_sleep, sleeping_allocator
from sharedmirror.integrations.vllm.worker import SharedMirrorWorker

__all__ = ["SharedMirrorOffloadingSpec"]


class SharedMirrorOffloadingSpec(OffloadingSpec):
    """The tier of one engine; ``Options`` says what ``kv_connector_extra_config`` may hold.

    Raises UsageError at start for what cannot be shared or is not supported.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._options = Options.read(self.extra_config)
        vllm_config = identity.announced() or get_current_vllm_config_or_none()
        if vllm_config is not None:
            identity.check_keys_are_stable(vllm_config)
        if config.canonical_layout:
            raise UsageError("canonical_layout is not supported by this tier; leave it out")
        if len(config.groups) > 1 and self.blocks_per_chunk > 1:
            raise UsageError(
                f"this model has {len(config.groups)} cache groups; blocks_per_chunk is supported with one group only"
            )
        self._names = identity.pool_names(config, self._options)
        self._engine = identity.engine_name(config, self._options)
        self._tag = identity.pool_tag(config, self._options)
        self._manager: SharedMirrorManager | None = None
        self._worker: SharedMirrorWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics that the manager fills in."""
        return definitions()

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side; it keeps the connection in the background."""
        if self._manager is None:
            related = identity.family(self.config, self._options)
            links = [PoolLink(name, self._engine, self._options, related=related) for name in self._names]
            groups = [(group.group_id, group.tokens_per_block * self.blocks_per_chunk) for group in self.config.groups]
            for link in links:  # the ranks have attached, or given up for now, before vLLM makes its scheduler
                link.wait(self._options.attach_wait_s)
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = SharedMirrorManager(links, groups, self._options, events=events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this rank's side; waits a while for the daemon, and serves without it if it is not there."""
        if self._worker is None:
            pools = [device_pool(kv_caches, refs, self.config, at) for at, refs in enumerate(kv_caches.group_data_refs)]
            keeper = MirrorKeeper(pools, self._names, self.config, self._engine, self._tag, self._options)
            self._worker = SharedMirrorWorker(keeper, pools[0].device, self.blocks_per_chunk, self._options)
            allocator = sleeping_allocator()
            if allocator is not None:
                guard_sleep(allocator, self._worker)
        return self._worker
