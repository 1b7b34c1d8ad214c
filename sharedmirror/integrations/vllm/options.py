"""What a user may set in ``kv_connector_extra_config``; every wrong value is refused at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharedmirror.errors import UsageError

__all__ = ["Options"]

_OF_VLLM = frozenset(
    {
        "spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only",
        "self_describing_kv_events", "canonical_layout",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Settings of the tier.

    ``socket`` is the daemon's (None: the default). ``pool`` begins the pool's name. ``tag`` tells weights
    apart that share a model name. ``engine`` names this engine to the daemon (None: vLLM's engine id).
    ``num_host_pages`` is for each cache group, in chunks (None: an existing pool's, else half of what the
    arena has left).

    ``call_timeout_s`` bounds a call of the scheduler; after it the answer is a miss. ``pending_wait_s``
    bounds how long a request waits for chunks that somebody is writing. ``attach_wait_s`` bounds how
    long the start waits for the daemon. A load not begun after ``load_timeout_s`` counts as failed.
    """

    socket: str | None = None
    pool: str = "vllm"
    tag: str = ""
    engine: str | None = None
    num_host_pages: int | None = None
    call_timeout_s: float = 0.25
    pending_wait_s: float = 0.1
    attach_wait_s: float = 20.0
    load_timeout_s: float = 30.0

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Options:
        """Read the settings; raises UsageError naming the one that is wrong or unknown."""
        given = {name: value for name, value in extra_config.items() if name not in _OF_VLLM}
        unknown = sorted(given.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise UsageError(
                f"kv_connector_extra_config has {unknown}; sharedmirror knows {sorted(cls.__dataclass_fields__)}"
            )
        for name in ("socket", "pool", "tag", "engine"):
            if given.get(name) is not None and not isinstance(given[name], str):
                raise UsageError(f"{name} in kv_connector_extra_config must be text, not {given[name]!r}")
        for name in ("call_timeout_s", "pending_wait_s", "attach_wait_s", "load_timeout_s"):
            value = given.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 3600:
                raise UsageError(f"{name} in kv_connector_extra_config must be seconds from 0 to 3600, not {value!r}")
        pages = given.get("num_host_pages")
        if pages is not None and (isinstance(pages, bool) or not isinstance(pages, int) or pages < 2):
            raise UsageError(
                f"num_host_pages in kv_connector_extra_config must be a whole number from 2, not {pages!r}"
            )
        return cls(**given)
