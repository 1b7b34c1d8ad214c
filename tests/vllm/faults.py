"""Connectors that do wrong on purpose, for vLLM to load in every process of an engine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sharedmirror.errors import CopyError
from sharedmirror.integrations.vllm.connector import SharedMirrorConnector
from sharedmirror.integrations.vllm.spec import SharedMirrorOffloadingSpec

__all__ = ["FaultyConnector", "SharedMirrorOffloadingSpec"]


class FaultyConnector(SharedMirrorConnector):
    """The file that ``FAULT`` names says what goes wrong with loads; without it all is well.

    "nothing" copies nothing and reports success, "nothing of group 1" only of that cache group, "fail" fails every
    second load, "fail_rank_1" those of rank 1, "slow" takes its time.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker: Any = self._worker()
        copy_in, groups, seen = worker._copy_in, worker._groups, [0]
        rank = worker._keeper._config.parallel.rank

        def faulty(job: Any, transfers: list[Any]) -> None:
            fault = Path(os.environ["FAULT"]).read_text() if os.path.exists(os.environ["FAULT"]) else ""
            seen[0] += 1
            if fault == "nothing":
                return
            if (fault == "fail" and seen[0] % 2) or (fault == "fail_rank_1" and rank == 1):
                raise CopyError("a fault on purpose")
            if fault == "slow":
                time.sleep(0.3)
            left_out = int(fault.rpartition(" ")[2]) if fault.startswith("nothing of group") else -1
            worker._groups = lambda job: (group for group in groups(job) if group[0] != left_out)
            copy_in(job, transfers)
            worker._groups = groups

        worker._copy_in = faulty
