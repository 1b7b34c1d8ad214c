"""The tier's own metrics, in the form in which vLLM exports them."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

__all__ = ["Metric", "definitions"]


class Metric:
    """Names of the metrics."""

    UP = "vllm:sharedmirror_up"
    HITS = "vllm:sharedmirror_hit_chunks"
    MISSES = "vllm:sharedmirror_missed_lookups"
    STORED = "vllm:sharedmirror_stored_chunks"
    SKIPPED = "vllm:sharedmirror_skipped_chunks"
    EVICTED = "vllm:sharedmirror_evicted_chunks"
    FAILED_LOADS = "vllm:sharedmirror_failed_loads"
    FAILED_CALLS = "vllm:sharedmirror_failed_calls"


def definitions() -> dict[str, Any]:
    """Return what vLLM needs to export them."""
    gauges = {Metric.UP: "1 while the sharedmirror daemon is in use, 0 while vLLM serves without it."}
    counters = {
        Metric.HITS: "Chunks that lookups found in the tier.",
        Metric.MISSES: "Lookups that ended at a chunk the tier does not have.",
        Metric.STORED: "Chunks stored.",
        Metric.SKIPPED: "Chunks not stored: no daemon, or no page free or evictable.",
        Metric.EVICTED: "Chunks evicted to make room for this engine's stores.",
        Metric.FAILED_LOADS: "Requests whose load failed and whose prompt was recomputed.",
        Metric.FAILED_CALLS: "Calls the daemon did not answer in time.",
    }
    found: dict[str, OffloadingMetricMetadata] = {
        name: OffloadingGaugeMetadata(documentation=text) for name, text in gauges.items()
    }
    return found | {name: OffloadingCounterMetadata(documentation=text) for name, text in counters.items()}
