"""A real vLLM with the tier: the same tokens as without it, over restarts, faults and two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

BLOCK = 32
Prompts = Callable[..., list[list[int]]]


def full_blocks(prompts: list[list[int]]) -> int:
    """Return the tokens of prompts that lie in full blocks, less the one that is always computed."""
    return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def settled(tier: Any) -> None:
    """Wait until nothing is leased or pinned any more."""

    def quiet(status: Any) -> bool:
        pages = [pool["pages"] for pool in status["pools"]]
        return not any(page["leased"] or page["pinned"] for page in pages)

    tier.wait_status(quiet, "nothing leased or pinned")


def one_by_one(engine: Any, asked: list[list[int]]) -> list[list[int]]:
    """Generate so that no prompt finds another's beginning on the device."""
    found = []
    for prompt in asked:
        assert engine.ask("reset", connector=False)
        found += engine.tokens([prompt])
    return found


def test_tokens_are_those_without_the_tier(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(60)
    plain, engine = engines.begin(None), engines.begin()
    expected = plain.started().tokens(asked)
    assert engine.started().tokens(asked) == expected
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > 0.5 * full_blocks(asked), "the device cache is too small for all of them"
    assert engine.metric("sharedmirror_up") == 1
    assert engine.metric("sharedmirror_stored_chunks") > 0
    assert engine.metric("sharedmirror_hit_chunks") > 0
    assert engine.metric("sharedmirror_missed_lookups") > 0
    assert engine.metric("kv_offload_store_bytes") > 0
    assert engine.metric("kv_offload_load_bytes") > 0


def test_a_pool_smaller_than_what_is_asked(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(60)
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    extra = {"num_host_pages": 200, "self_describing_kv_events": True}
    plain, engine = engines.begin(None), engines.begin(extra=extra, kv_events_config=events)
    expected = plain.started().tokens(asked)
    engine.started().ask("watch_events")
    for _ in range(2):
        assert engine.tokens(asked) == expected
    assert engine.metric("sharedmirror_evicted_chunks") > 0
    counts = engine.ask("events")
    assert counts["BlockStored"] > counts["BlockRemoved"] > 0
    assert counts["tokens of a block"] == [BLOCK]
    settled(tier)


def test_a_load_that_copies_nothing_changes_the_tokens(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines("faulty")
    expected = engine.tokens(asked)
    settled(tier)
    # The device blocks now hold something else.
    engine.tokens(prompts(12, families=12, seed=8))
    assert engine.ask("reset", connector=False)
    before = engine.external_hits()
    engine.fault("nothing")
    assert engine.tokens(asked) != expected
    assert engine.external_hits() > before
    engine.fault("")
    assert one_by_one(engine, asked) == expected


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ({}, 12),
        ({"tensor_parallel_size": 2}, 6),
        # Without a compiled model vLLM 0.32 on the CPU leaves the warm-up out, and its second stage fails.
        (
            {
                "pipeline_parallel_size": 2,
                "enforce_eager": False,
                "compilation_config": {"mode": 1, "backend": "eager"},
            },
            4,
        ),
    ],
    ids=["one", "tensor", "pipeline"],
)
def test_a_killed_engine_leaves_its_cache_to_the_next(
    tier: Any, engines: Any, prompts: Prompts, ranks: dict[str, Any], count: int
) -> None:
    asked = prompts(count, families=3)
    first = engines(in_process=not ranks, **ranks)
    expected = first.tokens(asked)
    assert first.tokens(asked) == expected
    settled(tier)
    first.kill()
    second = engines("faulty", in_process=not ranks, **ranks)
    assert one_by_one(second, asked) == expected
    assert second.external_hits() >= 0.9 * full_blocks(asked)
    settled(tier)
    if ranks:  # A load that fails on one rank only has failed.
        second.fault("fail_rank_1")
        assert one_by_one(second, asked[:3]) == expected[:3]
        assert second.metric("sharedmirror_failed_loads") == 3
        settled(tier)


def test_two_engines_share_one_pool(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked, others = prompts(16), prompts(16, seed=8)
    first, second = engines.begin(), engines.begin()
    first.started()
    second.started()
    expected = first.tokens(asked)
    settled(tier)
    assert second.tokens(asked) == expected
    assert second.external_hits() >= 0.4 * full_blocks(asked)
    first.send("generate", prompts=others)
    second.send("generate", prompts=list(reversed(others)))
    assert first.answer()["tokens"] == list(reversed(second.answer()["tokens"]))
    assert len(tier.status()["pools"]) == 1


def test_loads_that_fail_end_in_right_tokens(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines("faulty")
    expected = engine.tokens(asked)
    settled(tier)
    assert engine.ask("reset", connector=False)
    engine.fault("fail")
    assert engine.tokens(asked) == expected
    assert engine.metric("sharedmirror_failed_loads") > 0
    settled(tier)
    engine.fault("")
    before = engine.external_hits()
    assert one_by_one(engine, asked) == expected
    # What was forgotten after a failure was stored again when it was computed.
    assert engine.external_hits() - before >= 0.9 * full_blocks(asked)


def test_the_stock_connector_works_too(start: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    tier = start(memory="256MiB")
    engine = engines("stock")
    expected = engine.tokens(asked)
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > 0
    engine.send("generate", prompts=asked)
    tier.kill()
    assert engine.answer()["tokens"] == expected
    start(memory="256MiB")
    assert one_by_one(engine, asked) == expected


@pytest.mark.parametrize("connector", ["shared", "stock"])
def test_salted_hashes_are_refused_at_start(engines: Any, connector: str) -> None:
    engine = engines.begin(connector, prefix_caching_hash_algo="xxhash")
    engine.wait()
    assert "salts block hashes anew in each process" in engine.log()


def test_no_daemon_at_the_start(start: Any, engines: Any, prompts: Prompts, wait_until: Any) -> None:
    asked = prompts(12, families=12)
    engine = engines()
    expected = engine.tokens(asked)
    assert engine.metric("sharedmirror_up") == 0
    assert engine.metric("sharedmirror_skipped_chunks") > 0
    assert "event=no_tier" in engine.log()
    start(memory="256MiB")
    # The engine tells of the tier in its steps.
    wait_until(lambda: engine.tokens(asked[:1]) == expected[:1] and engine.metric("sharedmirror_up") == 1)
    for _ in range(2):
        assert engine.ask("reset", connector=False)
        assert engine.tokens(asked) == expected
    assert engine.external_hits() >= 0.9 * full_blocks(asked)


def test_the_daemon_is_killed_under_load(start: Any, engines: Any, prompts: Prompts) -> None:
    tier = start(memory="256MiB")
    asked = prompts(24)
    engine = engines(in_process=False, tensor_parallel_size=2)
    expected = engine.tokens(asked)
    engine.send("generate", prompts=asked)
    tier.kill()
    assert engine.answer()["tokens"] == expected
    tier = start(memory="256MiB")
    assert engine.tokens(asked) == expected
    engine.send("generate", prompts=asked)
    tier.kill()
    tier = start(memory="256MiB")
    assert engine.answer()["tokens"] == expected
    before = engine.external_hits()
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > before
    settled(tier)


def test_another_daemon_comes(start: Any, engines: Any, prompts: Prompts, wait_until: Any) -> None:
    asked = prompts(12, families=12)
    tier = start(memory="256MiB")
    engine = engines()
    expected = engine.tokens(asked)
    tier.kill()
    for name in tier.segments():
        os.unlink(f"/dev/shm/{name}")
    tier = start(memory="256MiB")
    wait_until(lambda: [s for s in tier.status()["sessions"] if s["role"] == "scheduler"], "the scheduler is back")
    wait_until(lambda: engine.tokens(asked[:1]) == expected[:1] and engine.metric("sharedmirror_up") == 1)
    for _ in range(2):
        assert engine.ask("reset", connector=False)
        assert engine.tokens(asked) == expected
    assert engine.external_hits() >= 0.9 * full_blocks(asked)


def test_preempted_requests(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12, shared=100, own=150)
    settings: list[dict[str, Any]] = [{"tier": None}, {}, {"extra": {"offload_prompt_only": False}}]
    plain, *others = [engines.begin(**each) for each in settings]
    expected = plain.started().tokens(asked, 100)
    for engine in others:
        assert engine.started().tokens(asked, 100) == expected
        assert engine.metric("num_preemptions") > 0
        assert engine.tokens(asked, 100) == expected
        settled(tier)


def test_aborted_requests_let_their_pages_go(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines("faulty")
    engine.fault("slow")
    expected = engine.tokens(asked)
    assert engine.ask("reset", connector=False)
    for steps in (1, 2, 3):
        names = engine.ask("add", prompts=asked)
        engine.ask("steps", count=steps)
        engine.ask("abort", names=names[::2])
        done = engine.ask("steps", count=None)
        assert [done[name] for name in names[1::2]] == expected[1::2]
        assert engine.ask("reset", connector=False)
    assert engine.tokens(asked) == expected
    settled(tier)


def test_a_reset_of_the_connector_forgets_everything(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines()
    expected = engine.tokens(asked)
    settled(tier)
    assert engine.ask("reset", connector=True)
    assert tier.status()["pools"][0]["pages"]["sealed"] == 0
    assert engine.tokens(asked) == expected
    assert engine.external_hits() == 0
    names = engine.ask("add", prompts=prompts(12, families=12, seed=9))
    engine.ask("steps", count=3)
    assert engine.ask("reset", connector=True, running=True)
    done = engine.ask("steps", count=None)
    assert engine.ask("reset", connector=True)
    fresh = engine.tokens(prompts(12, families=12, seed=9))
    assert [done[name] for name in names] == fresh
    settled(tier)


def test_an_engine_that_ends_in_the_middle(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(40)
    # Of a load, by its own shutdown.
    first = engines("faulty")
    expected = first.tokens(asked[:12])
    assert first.ask("reset", connector=False)
    first.fault("slow")
    first.ask("add", prompts=asked[:12])
    first.ask("steps", count=2)
    first.stop()
    settled(tier)
    # Of a store, by SIGTERM.
    second = engines(in_process=False)
    before = tier.status()["pools"][0]["pages"]["sealed"]
    second.send("generate", prompts=asked[12:])
    tier.wait_status(lambda status: status["pools"][0]["pages"]["sealed"] > before + 20, "something is stored")
    second.terminate()
    settled(tier)
    pages = tier.status()["pools"][0]["pages"]
    assert pages["quarantined"] == 0
    assert pages["sealed"] > before + 20
    assert one_by_one(engines(), asked[:12]) == expected


def test_an_engine_that_sleeps_and_wakes(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines("faulty", in_process=False)
    expected = engine.tokens(asked)
    settled(tier)
    # Level 0 stops the scheduler: the tier keeps what it has.
    engine.ask("sleep", level=0)
    engine.ask("wake", tags=["scheduling"])
    assert one_by_one(engine, asked) == expected
    assert engine.external_hits() >= 0.9 * full_blocks(asked)
    # Level 1 in the middle of loads: vLLM resets the tier too, since weights may change while it sleeps.
    assert engine.ask("reset", connector=False)
    engine.fault("slow")
    engine.ask("add", prompts=asked)
    engine.ask("steps", count=2)
    engine.ask("sleep", level=1)
    tier.wait_pages(tier.status()["pools"][0]["name"], sealed=0, leased=0, pinned=0)
    engine.ask("wake", tags=None)
    engine.ask("steps", count=None)
    engine.fault("")
    assert engine.tokens(asked) == expected
    settled(tier)
    before = engine.external_hits()
    assert one_by_one(engine, asked) == expected
    assert engine.external_hits() - before >= 0.9 * full_blocks(asked)


def test_chunks_of_several_blocks(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(20)
    plain, engine = engines.begin(None), engines.begin(extra={"blocks_per_chunk": 4, "num_host_pages": 400})
    expected = plain.started().tokens(asked)
    assert engine.started().tokens(asked) == expected
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > 0
    settled(tier)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("gemma", {}),
        # With a state, numbers depend on what else is in the batch, with or without a tier.
        ("lfm", {"max_num_seqs": 1, "enable_prefix_caching": True}),
    ],
    ids=["windows", "states"],
)
def test_cache_groups_with_pages_of_their_own(
    tier: Any, engines: Any, prompts: Prompts, model: str, settings: dict[str, Any]
) -> None:
    # Little is computed behind what is loaded, so that a state matters.
    asked = prompts(12, families=12, own=250)
    settings = {"model": model, "num_gpu_blocks_override": 96, **settings}
    plain, first = engines.begin(None, **settings), engines.begin(**settings)
    expected = one_by_one(plain.started(), asked)
    assert first.started().tokens(asked) == expected
    settled(tier)
    groups = len(tier.status()["pools"])
    assert groups > 1
    first.kill()
    second = engines("faulty", **settings)
    assert one_by_one(second, asked) == expected
    assert second.external_hits() >= 0.9 * full_blocks(asked)
    settled(tier)
    for group in range(groups):
        second.tokens(prompts(12, families=12, seed=8))
        second.fault(f"nothing of group {group}")
        assert one_by_one(second, asked) != expected, f"the pages of group {group} matter"
        second.fault("")


def test_latents_are_kept_once_for_all_ranks(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(4, families=4)
    settings = {"model": "mla", "dtype": "bfloat16", "extra": {"num_host_pages": 500}}
    one_rank = engines.begin(**settings)
    two_ranks = engines(in_process=False, tensor_parallel_size=2, **settings)
    one_rank.started()
    for prompt in asked:
        two_ranks.tokens([prompt])
        # Rounded numbers depend on how much is computed at once: what comes from the device is the measure.
        from_device = two_ranks.tokens([prompt])
        settled(tier)
        assert two_ranks.ask("reset", connector=False)
        assert two_ranks.tokens([prompt]) == from_device
    assert two_ranks.external_hits() >= 0.9 * full_blocks(asked)
    one, two = sorted(tier.status()["pools"], key=lambda pool: pool["world_size"])
    assert one["bytes_per_host_page"] == two["bytes_per_host_page"]
