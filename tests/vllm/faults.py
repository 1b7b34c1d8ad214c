"""Connectors that do wrong on purpose, for vLLM to load in every process of an engine."""

from __future__ import annotations

import os
import time
from typing import Any

from sharedmirror.errors import CopyError
from sharedmirror.integrations.vllm.connector import SharedMirrorConnector
from sharedmirror.integrations.vllm.spec import SharedMirrorOffloadingSpec

__all__ = ["FaultyConnector", "SharedMirrorOffloadingSpec"]


class FaultyConnector(SharedMirrorConnector):
    """``FAULT`` says what goes wrong with loads: "nothing" copies nothing and reports success.

    "fail" fails every second load, "fail_rank_1" those of rank 1, "slow" takes its time.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker: Any = self._worker()
        copy_in, fault, seen = worker._copy_in, os.environ["FAULT"], [0]
        rank = worker._keeper._config.parallel.rank

        def faulty(job: Any, transfers: list[Any]) -> None:
            seen[0] += 1
            if fault == "nothing":
                return
            if (fault == "fail" and seen[0] % 2) or (fault == "fail_rank_1" and rank == 1):
                raise CopyError("a fault on purpose")
            if fault == "slow":
                time.sleep(0.3)
            copy_in(job, transfers)

        worker._copy_in = faulty
