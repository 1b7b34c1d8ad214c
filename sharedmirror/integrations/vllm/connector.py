"""``SharedMirrorConnector``: vLLM's offloading connector, with loads that may fail.

The stock connector takes a failed load for a broken program and ends the engine. This one tells the
scheduler which requests' loads failed; they are computed instead (with vLLM's
``kv_load_failure_policy="recompute"``), and the keys that led there are forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from sharedmirror.errors import UsageError
from sharedmirror.integrations.vllm.identity import announcing
from sharedmirror.integrations.vllm.manager import SharedMirrorManager
from sharedmirror.integrations.vllm.worker import SharedMirrorWorker

__all__ = ["SharedMirrorConnector"]

_SPEC = {"spec_name": "SharedMirrorOffloadingSpec", "spec_module_path": "sharedmirror.integrations.vllm"}

_log = init_logger("vllm.sharedmirror")


class SharedMirrorConnector(OffloadingConnector):
    """Named by ``kv_connector`` and ``kv_connector_module_path``; brings its spec along."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        _bring_spec(vllm_config)
        transfer = vllm_config.kv_transfer_config
        if role is KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "event=failure_policy policy=%s: a failed load will end its request with an error; set "
                "kv_load_failure_policy to recompute", transfer.kv_load_failure_policy,
            )  # fmt: skip
        with announcing(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return what exports the metrics; vLLM asks in a process in which no connector was made."""
        _bring_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Set this rank's side up."""
        super().register_kv_caches(kv_caches)
        self._worker().hide_failures = True

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report what is over, and which loads failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker().take_failed()
        return results

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell the manager of failed loads before it hears that they are over."""
        for req_id in connector_output.failed_recving or ():
            _log.warning("event=recompute request=%s", req_id)
            self._manager().load_failed(req_id)
            self._store_again(req_id)
        super().update_connector_output(connector_output)

    def _store_again(self, req_id: str) -> None:
        """What is computed now was counted as stored when its load began."""
        status: Any = self.scheduler._req_status.get(req_id)
        for group in status.group_states if status is not None else ():
            group.next_stored_chunk_idx = 0

    def _worker(self) -> SharedMirrorWorker:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if not isinstance(worker, SharedMirrorWorker):
            raise UsageError("this is not the side of a rank, or its caches are not registered")
        return worker

    def _manager(self) -> SharedMirrorManager:
        manager = self.scheduler.manager
        if not isinstance(manager, SharedMirrorManager):
            raise UsageError("SharedMirrorConnector works with SharedMirrorOffloadingSpec only")
        return manager


def _bring_spec(vllm_config: VllmConfig) -> None:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    for name, value in _SPEC.items():
        if extra.setdefault(name, value) != value:
            raise UsageError(f"{name} must be {value!r} with SharedMirrorConnector, or left out")
