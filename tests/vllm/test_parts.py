"""The integration's parts that need no daemon: pairs of blocks and frames, names of pools, settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from sharedmirror.errors import PageError, UsageError
from sharedmirror.integrations.vllm import check_version, identity
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.integrations.vllm.orders import load_pairs, split_groups, store_pairs
from sharedmirror.integrations.vllm.spec import SharedMirrorOffloadingSpec


def blocks(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def config(**changes: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0, world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    made = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="some-engine",
        model=OffloadingModelConfig("some/model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
    )
    return dataclasses.replace(made, **changes)


# -- pairs ---------------------------------------------------------------------------------------


def test_whole_chunks_are_stored() -> None:
    assert store_pairs(blocks(7, 3, 9, 4), (5, 2), 2).tolist() == [[7, 10], [3, 11], [9, 4], [4, 5]]
    with pytest.raises(PageError, match="3 blocks do not fill 2 chunks of 2"):
        store_pairs(blocks(7, 3, 9), (5, 2), 2)


@pytest.mark.parametrize(
    ("first", "count", "frames"),
    [
        (0, 4, [20, 21, 22, 23]),
        (4, 5, [20, 21, 22, 23, 8]),
        (2, 3, [22, 23, 8]),
        (3, 1, [23]),
        (7, 5, [23, 8, 9, 10, 11]),
    ],
)
def test_a_load_may_begin_and_end_inside_a_chunk(first: int, count: int, frames: list[int]) -> None:
    pages = (5, 2)[: -(-(first % 4 + count) // 4)]
    pairs = load_pairs(blocks(*range(100, 100 + count)), pages, 4, first)
    assert pairs[:, 0].tolist() == list(range(100, 100 + count))
    assert pairs[:, 1].tolist() == frames


def test_a_load_of_other_chunks_than_its_blocks_lie_in() -> None:
    for pages in ((5,), (5, 2, 3)):
        with pytest.raises(PageError, match="do not lie in"):
            load_pairs(blocks(1, 2, 3, 4), pages, 4, 2)


def test_blocks_of_several_groups() -> None:
    parts = split_groups(np.array([1, 2, 3], dtype=np.int32), [2, 0, 1], [4, 0, 9], 3)
    assert [(part.tolist(), first) for part, first in parts] == [([1, 2], 4), ([], 0), ([3], 9)]
    with pytest.raises(PageError, match="2 cache groups"):
        split_groups(np.array([1], dtype=np.int32), [1, 0], [0, 0], 3)


# -- names ---------------------------------------------------------------------------------------


def test_equal_engines_meet_in_one_pool() -> None:
    rank_1 = dataclasses.replace(config().parallel, rank=1)
    same = config(engine_id="another", parallel=rank_1, worker_kv_bytes_per_block=1)
    assert identity.pool_names(config(), Options()) == identity.pool_names(same, Options())
    assert identity.engine_name(config(), Options()) != identity.engine_name(same, Options())


def test_whatever_changes_the_bytes_changes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = config().parallel
    others = [
        config(model=OffloadingModelConfig("other/model", "bfloat16")),
        config(model=OffloadingModelConfig("some/model", "float16")),
        config(cache=OffloadingCacheConfig(16, 2)),
        config(groups=(OffloadingGroupConfig(32, ("layer.0",), 0),)),
        config(parallel=dataclasses.replace(parallel, tp_size=1, pp_size=2)),
        config(parallel=dataclasses.replace(parallel, tp_size=4, world_size=4)),
    ]
    names = [identity.pool_names(each, Options())[0] for each in (config(), *others)]
    names.append(identity.pool_names(config(), Options(tag="tuned"))[0])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    names.append(identity.pool_names(config(), Options())[0])
    assert len(set(names)) == len(names)


def test_other_weights_under_the_same_name(tmp_path: Path) -> None:
    def name(directory: str, content: bytes) -> str:
        model = tmp_path / directory / "model"
        model.mkdir(parents=True)
        (model / "a.safetensors").write_bytes(content)
        return identity._checkpoint(str(model), None) or ""

    weights = bytes(range(256)) * 4096
    assert name("one", weights) == name("two", weights)
    assert name("three", weights) != name("four", bytes(len(weights)))
    assert name("five", weights) != name("six", weights[:-1])


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_salted_per_process_are_refused(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    settings = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UsageError, match="Use sha256, or give all engines the same PYTHONHASHSEED"):
        identity.check_keys_are_stable(settings)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    identity.check_keys_are_stable(settings)


# -- settings ------------------------------------------------------------------------------------


def test_settings() -> None:
    read = Options.read({"spec_name": "x", "blocks_per_chunk": 4, "tag": "tuned", "num_host_pages": 10})
    assert read == Options(tag="tuned", num_host_pages=10)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cpu_bytes_to_use": 1}, "cpu_bytes_to_use"),
        ({"tag": 7}, "tag"),
        ({"num_host_pages": 1}, "num_host_pages"),
        ({"call_timeout_s": -1}, "call_timeout_s"),
        ({"pending_wait_s": True}, "pending_wait_s"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options.read(wrong)


def test_what_is_not_supported_is_refused_at_start() -> None:
    groups = (OffloadingGroupConfig(16, ("layer.0",), 0), OffloadingGroupConfig(16, ("layer.1",), 1))
    with pytest.raises(UsageError, match="blocks_per_chunk is supported with one group only"):
        SharedMirrorOffloadingSpec(config(groups=groups, cache=OffloadingCacheConfig(16, 2)))
    with pytest.raises(UsageError, match="canonical_layout"):
        SharedMirrorOffloadingSpec(config(canonical_layout=True))


def test_other_versions_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version("0.32.5+cpu")
    with pytest.raises(ImportError, match=r"tested with vLLM 0\.32; this is 0\.33\.0"):
        check_version("0.33.0")
    monkeypatch.setenv("SHAREDMIRROR_ANY_VLLM", "1")
    with pytest.warns(UserWarning, match=r"0\.33\.0"):
        check_version("0.33.0")
