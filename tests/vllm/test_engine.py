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


def test_tokens_are_those_without_the_tier(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(60)
    plain, engine = engines.begin(None), engines.begin()
    expected = plain.started().tokens(asked)
    plain.finish()
    assert engine.started().tokens(asked) == expected
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > 0.5 * full_blocks(asked), "the device cache is too small for all of them"
    assert engine.metric("sharedmirror_up") == 1
    assert engine.metric("sharedmirror_stored_chunks") > 0
    assert engine.metric("sharedmirror_hit_chunks") > 0
    assert engine.metric("kv_offload_store_bytes") > 0
    assert engine.metric("kv_offload_load_bytes") > 0


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_load_that_copies_nothing_changes_the_tokens(tier: Any, engines: Any, prompts: Prompts, model: str) -> None:
    asked = prompts(12, families=12)
    engine = engines("faulty", environment={"FAULT": "nothing"}, model=model, num_gpu_blocks_override=96)
    expected = engine.tokens(asked)
    settled(tier)
    # The device blocks now hold something else.
    engine.tokens(prompts(12, families=12, seed=8))
    assert engine.ask("reset", connector=False)
    before = engine.external_hits()
    assert engine.tokens(asked) != expected
    assert engine.external_hits() > before


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_engine_leaves_its_cache_to_the_next(tier: Any, engines: Any, prompts: Prompts, ranks: int) -> None:
    asked = prompts(12)
    settings = {"in_process": ranks == 1, "tensor_parallel_size": ranks}
    first = engines(**settings)
    expected = first.tokens(asked)
    assert first.tokens(asked) == expected
    settled(tier)
    first.kill()
    second = engines(**settings)
    # One at a time: no prompt finds another's beginning on the device.
    for prompt, tokens in zip(asked, expected, strict=True):
        assert second.ask("reset", connector=False)
        assert second.tokens([prompt]) == [tokens]
    assert second.external_hits() >= 0.9 * full_blocks(asked)
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
    first = engines()
    expected = first.tokens(asked)
    settled(tier)
    first.finish()
    second = engines("faulty", environment={"FAULT": "fail"})
    assert second.tokens(asked) == expected
    assert second.metric("sharedmirror_failed_loads") > 0
    settled(tier)
    second.finish()
    third = engines()
    assert third.tokens(asked) == expected
    # What was forgotten after a failure was stored again when it was computed.
    assert third.external_hits() >= 0.9 * full_blocks(asked)


def test_a_load_that_fails_on_one_rank_only(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(6, families=6)
    settings = {"in_process": False, "tensor_parallel_size": 2, "environment": {"FAULT": "fail_rank_1"}}
    engine = engines("faulty", **settings)
    expected = engine.tokens(asked)
    assert engine.ask("reset", connector=False)
    settled(tier)
    assert engine.tokens(asked) == expected
    assert engine.metric("sharedmirror_failed_loads") == len(asked)
    settled(tier)


def test_the_stock_connector_works_too(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines("stock")
    expected = engine.tokens(asked)
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > 0


def test_no_daemon_at_the_start(start: Any, engines: Any, prompts: Prompts, wait_until: Any) -> None:
    asked = prompts(12, families=12)
    engine = engines()
    expected = engine.tokens(asked)
    assert engine.metric("sharedmirror_up") == 0
    assert engine.metric("sharedmirror_skipped_chunks") > 0
    start(memory="256MiB")
    # The engine tells of the tier in its steps.
    wait_until(lambda: engine.tokens(asked[:1]) == expected[:1] and engine.metric("sharedmirror_up") == 1)
    for _ in range(2):
        assert engine.ask("reset", connector=False)
        assert engine.tokens(asked) == expected
    assert engine.external_hits() >= 0.9 * full_blocks(asked)


def test_the_daemon_is_killed_under_load(start: Any, engines: Any, prompts: Prompts) -> None:
    tier = start(memory="256MiB")
    asked = prompts(60)
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
    plain.finish()
    for engine in others:
        assert engine.started().tokens(asked, 100) == expected
        assert engine.metric("num_preemptions") > 0
        assert engine.tokens(asked, 100) == expected
        settled(tier)
        engine.finish()


def test_aborted_requests_let_their_pages_go(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12, families=12)
    engine = engines("faulty", environment={"FAULT": "slow"})
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
    engine = engines(in_process=False)
    engine.send("generate", prompts=asked)
    tier.wait_status(lambda status: status["pools"][0]["pages"]["sealed"] > 20, "something is stored")
    engine.process.terminate()
    engine.process.wait(60)
    engine.kill()
    status = tier.wait_status(
        lambda s: s["pools"][0]["pages"]["leased"] == s["pools"][0]["pages"]["pinned"] == 0, "nothing held"
    )
    assert status["pools"][0]["pages"]["quarantined"] == 0
    assert status["pools"][0]["pages"]["sealed"] > 20


def test_chunks_of_several_blocks(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(20)
    plain, engine = engines.begin(None), engines.begin(extra={"blocks_per_chunk": 4, "num_host_pages": 400})
    expected = plain.started().tokens(asked)
    assert engine.started().tokens(asked) == expected
    assert engine.tokens(asked) == expected
    assert engine.external_hits() > 0
    settled(tier)


def test_cache_groups_with_pages_of_their_own(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12)
    settings = {"model": "gemma", "num_gpu_blocks_override": 96}
    plain, first = engines.begin(None, **settings), engines.begin(**settings)
    expected = plain.started().tokens(asked)
    assert first.started().tokens(asked) == expected
    settled(tier)
    assert len(tier.status()["pools"]) > 1
    first.kill()
    second = engines(**settings)
    for prompt, tokens in zip(asked, expected, strict=True):
        assert second.ask("reset", connector=False)
        assert second.tokens([prompt]) == [tokens]
    assert second.external_hits() >= 0.9 * full_blocks(asked)
    settled(tier)


def test_latents_are_kept_once_for_all_ranks(tier: Any, engines: Any, prompts: Prompts) -> None:
    asked = prompts(12)
    settings = {"model": "mla", "dtype": "bfloat16", "extra": {"num_host_pages": 500}}
    one_rank = engines.begin(**settings)
    two_ranks = engines(in_process=False, tensor_parallel_size=2, **settings)
    one_rank.started()
    two_ranks.tokens(asked)
    settled(tier)
    for prompt in asked:
        assert two_ranks.ask("reset", connector=False)
        two_ranks.tokens([prompt])
    assert two_ranks.external_hits() >= 0.9 * full_blocks(asked)
    one, two = sorted(tier.status()["pools"], key=lambda pool: pool["world_size"])
    assert one["bytes_per_host_page"] == two["bytes_per_host_page"]
