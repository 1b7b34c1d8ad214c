"""Who may share a pool: its name says everything on which the meaning of a key and its bytes depends.

vLLM's keys are hashes of tokens. They say nothing of the model, its dtype, or how the cache is split
over ranks, and equal tokens give equal keys whatever the weights. So all of that is in the pool's name,
and engines that differ in any of it meet in different pools.

The name must come out the same in the scheduler and in every rank, so only what all of them know goes in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.v1.kv_offload.config import OffloadingConfig

from sharedmirror.errors import UsageError
from sharedmirror.integrations.vllm.options import Options

__all__ = ["announced", "announcing", "check_keys_are_stable", "engine_name", "pool_names", "pool_tag"]

_announced: ContextVar[Any] = ContextVar("sharedmirror_vllm_config", default=None)

# These seed the first hash of every chain with random bytes, new in each process.
_SALTED_PER_PROCESS = ("xxhash", "xxhash_cbor")
_HASH_CHARACTERS = 12
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_MAX_TAG_BYTES = 250


@contextlib.contextmanager
def announcing(vllm_config: Any) -> Iterator[None]:
    """Let what is built inside see vLLM's whole configuration; a spec is given only a part of it."""
    token = _announced.set(vllm_config)
    try:
        yield
    finally:
        _announced.reset(token)


def announced() -> Any:
    """Return vLLM's configuration if somebody announced it, else None."""
    return _announced.get()


def check_keys_are_stable(vllm_config: Any) -> None:
    """Raise UsageError when block hashes are salted per process: nothing could ever be found again."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in _SALTED_PER_PROCESS and os.environ.get("PYTHONHASHSEED") is None:
        raise UsageError(
            f"--prefix-caching-hash-algo {algorithm} salts block hashes anew in each process, so no other engine and "
            f"no restarted one would ever find them. Use sha256, or give all engines the same PYTHONHASHSEED"
        )


def engine_name(config: OffloadingConfig, options: Options) -> str:
    """Return this engine's name for the daemon, equal in scheduler and ranks."""
    return options.engine or f"vllm-{config.engine_id}"


def pool_names(config: OffloadingConfig, options: Options) -> list[str]:
    """Return one pool's name a cache group: engines that may share bytes have equal names."""
    facts = _facts(config, options)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_HASH_CHARACTERS]
    return [f"{family(config, options)}{digest}/{group.group_id}" for group in config.groups]


def family(config: OffloadingConfig, options: Options) -> str:
    """Return how the names of all pools of this model begin, whatever else differs."""
    return f"{options.pool}/{os.path.basename(config.model.name.rstrip('/'))[-80:]}/"


def pool_tag(config: OffloadingConfig, options: Options) -> str:
    """Return in words what the name's digest stands for, for people who read the daemon's status."""
    facts = _facts(config, options)
    words = (
        f"vllm {facts['vllm']} {facts['dtype']} tp{facts['tp']} pp{facts['pp']} "
        f"chunk {facts['groups'][0][1]}x{facts['blocks_per_chunk']} seed {facts['hash_seed']} tag {options.tag!r} "
        f"{config.model.name}"
    )
    return words.encode()[:_MAX_TAG_BYTES].decode(errors="ignore")


def _facts(config: OffloadingConfig, options: Options) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "vllm": ".".join(vllm.__version__.split("+")[0].split(".")[:2]),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "world": parallel.world_size,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.group_id, group.tokens_per_block] for group in config.groups],
        "kv_layout": config.kv_cache_layout,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "weights": _weights(announced()),
        "checkpoint": _checkpoint(config.model.name, announced()),
        "tag": options.tag,
    }


def _weights(vllm_config: Any) -> list[str] | None:
    """Return what tells models of one name apart, and their pages and keys, as far as the configuration knows."""
    if vllm_config is None:
        return None
    model = vllm_config.model_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()
    settings = (
        model.revision, model.quantization, model.dtype, vllm_config.attention_config.backend,
        vllm_config.cache_config.prefix_caching_hash_algo,
    )  # fmt: skip
    return [*map(str, settings), shape]


def _checkpoint(model: str, vllm_config: Any) -> str | None:
    """Return what tells the weights behind one name apart: the commit, or samples of the files."""
    if os.path.isdir(model):
        return _sampled(model)
    revision = None if vllm_config is None else vllm_config.model_config.revision
    with contextlib.suppress(Exception):  # a name that is in no cache has no commit
        config = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(config, str):
            return Path(config).parent.name
    return None


@functools.cache
def _sampled(directory: str) -> str:
    """Hash sizes and some bytes of the weights. Training changes nearly all of them, so a few will tell."""
    digest = hashlib.sha256()
    for path in sorted(Path(directory).iterdir()):
        if path.suffix not in (".safetensors", ".bin", ".pt", ".gguf"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * (2 * sample + 1) // (2 * _SAMPLES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
