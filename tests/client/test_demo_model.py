"""The demo's decoder: the same bits after a prefix that was computed and one that was copied in, and only then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from sharedmirror.demo.commands import ModelShape
from sharedmirror.demo.keys import KEY_BYTES, page_keys
from sharedmirror.demo.model import AllReduce, Continuation, Decoder
from sharedmirror.demo.pool import PagedPool
from sharedmirror.demo.prompt import DECODED_TOKENS, Prompt, long_prompt

SHAPE = ModelShape(vocab=64, hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=96, page_size=8, seed=3)
CPU = torch.device("cpu")
TOKENS = [(index * index * 7 + index) % SHAPE.vocab for index in range(53)]
PREFIX = len(TOKENS) // SHAPE.page_size * SHAPE.page_size
NUM_PAGES = 10
FIRST_TABLE = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
OTHER_TABLE = FIRST_TABLE[::-1]


class ThreadedSum:
    """Sums over ranks that are threads, always in rank order."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=30)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * world_size

    def of_rank(self, rank: int) -> AllReduce:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = tensor
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return total

        return all_reduce


def on_ranks(world_size: int, act: Callable[[Decoder], Continuation]) -> list[Continuation]:
    """Run ``act`` on each rank's decoder at once."""
    adder = ThreadedSum(world_size)
    results: dict[int, Continuation] = {}

    def run(rank: int) -> None:
        decoder = Decoder(SHAPE, rank=rank, world_size=world_size, device=CPU, all_reduce=adder.of_rank(rank))
        results[rank] = act(decoder)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world_size)]


def prefilled(decoder: Decoder, table: Sequence[int]) -> PagedPool:
    pool = decoder.new_pool(NUM_PAGES)
    decoder.prefill(TOKENS[:PREFIX], table, pool, chunk=16)
    return pool


def continued(decoder: Decoder, pool: PagedPool, table: Sequence[int]) -> Continuation:
    return decoder.continue_from(TOKENS[PREFIX:], PREFIX, table, pool, count=6)


def copied_to_other_pages(decoder: Decoder, source: PagedPool) -> PagedPool:
    target = decoder.new_pool(NUM_PAGES)
    pairs = list(zip(FIRST_TABLE, OTHER_TABLE, strict=True))[: PREFIX // SHAPE.page_size]
    size = SHAPE.page_size
    for old, new in zip(source.k_buffer + source.v_buffer, target.k_buffer + target.v_buffer, strict=True):
        for old_page, new_page in pairs:
            new[new_page * size : (new_page + 1) * size] = old[old_page * size : (old_page + 1) * size]
    return target


def same_bits(one: Continuation, other: Continuation) -> bool:
    return one.tokens == other.tokens and one.logits.numpy().tobytes() == other.logits.numpy().tobytes()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copied_prefix_continues_bit_for_bit_like_a_computed_one(world_size: int) -> None:
    def compute(decoder: Decoder) -> Continuation:
        return continued(decoder, prefilled(decoder, FIRST_TABLE), FIRST_TABLE)

    def copy(decoder: Decoder) -> Continuation:
        return continued(decoder, copied_to_other_pages(decoder, prefilled(decoder, FIRST_TABLE)), OTHER_TABLE)

    computed, copied = on_ranks(world_size, compute), on_ranks(world_size, copy)
    assert all(same_bits(one, other) for one, other in zip(computed, copied, strict=True))
    assert all(same_bits(one, computed[0]) for one in computed)
    assert not computed[0].logits.isnan().any()
    assert computed[0].computed_tokens == len(TOKENS) - PREFIX + 5


def test_a_prefix_that_was_never_copied_shows_as_nan() -> None:
    (result,) = on_ranks(1, lambda decoder: continued(decoder, decoder.new_pool(NUM_PAGES), FIRST_TABLE))
    assert result.logits.isnan().all()


@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize("layer", [0, SHAPE.layers - 1])
def test_one_flipped_sign_in_the_prefix_changes_the_logits(plane: str, layer: int) -> None:
    def flip(decoder: Decoder) -> Continuation:
        pool = prefilled(decoder, FIRST_TABLE)
        buffers = pool.k_buffer if plane == "k" else pool.v_buffer
        buffers[layer][FIRST_TABLE[2] * SHAPE.page_size, 0, 0].neg_()
        return continued(decoder, pool, FIRST_TABLE)

    (intact,) = on_ranks(1, lambda decoder: continued(decoder, prefilled(decoder, FIRST_TABLE), FIRST_TABLE))
    (flipped,) = on_ranks(1, flip)
    assert not same_bits(intact, flipped)
    assert not flipped.logits.isnan().any()


def test_every_world_size_runs_the_same_model() -> None:
    def act(decoder: Decoder) -> Continuation:
        return continued(decoder, prefilled(decoder, FIRST_TABLE), FIRST_TABLE)

    (whole,), sharded = on_ranks(1, act), on_ranks(2, act)
    torch.testing.assert_close(sharded[0].logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_the_prefix_matters_to_the_answer() -> None:
    def other_prefix(decoder: Decoder) -> Continuation:
        pool = decoder.new_pool(NUM_PAGES)
        decoder.prefill(TOKENS[1:PREFIX] + [0], FIRST_TABLE, pool, chunk=16)
        return continued(decoder, pool, FIRST_TABLE)

    (one,) = on_ranks(1, lambda decoder: continued(decoder, prefilled(decoder, FIRST_TABLE), FIRST_TABLE))
    (other,) = on_ranks(1, other_prefix)
    assert not torch.allclose(one.logits[0], other.logits[0], atol=1e-3)


def test_a_world_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be split over 4 ranks"):
        Decoder(SHAPE, rank=0, world_size=4, device=CPU, all_reduce=lambda tensor: tensor)


def test_a_pool_uses_only_the_pages_of_the_block_table() -> None:
    decoder = Decoder(SHAPE, rank=0, world_size=1, device=CPU, all_reduce=lambda tensor: tensor)
    pool = prefilled(decoder, FIRST_TABLE)
    written = {page for page in range(NUM_PAGES) if not pool.k_buffer[0].view(NUM_PAGES, -1)[page].isnan().any()}
    assert written == set(FIRST_TABLE[: PREFIX // SHAPE.page_size])
    pool.fill_nan()
    assert all(rows.isnan().all() for rows in pool.k_buffer + pool.v_buffer)


def test_page_keys_name_the_whole_prefix() -> None:
    tokens = list(range(40))
    keys = page_keys(tokens, 8, "m")
    assert len(keys) == len(set(keys)) == 5
    assert all(len(key) == KEY_BYTES for key in keys)
    assert page_keys(tokens[:39], 8, "m") == keys[:4]

    changed = page_keys([*tokens[:17], 99, *tokens[18:]], 8, "m")
    assert changed[:2] == keys[:2]
    assert not set(changed[2:]) & set(keys)
    assert not set(page_keys(tokens, 8, "another")) & set(keys)


@pytest.mark.parametrize("num_tokens", [2, 32, 33, 64, 65, 3000])
def test_the_prompt_is_whole_pages_and_a_tail(num_tokens: int) -> None:
    shape = ModelShape()
    prompt: Prompt = long_prompt(shape, num_tokens)
    assert len(prompt.prefix) + len(prompt.tail) == num_tokens
    assert len(prompt.prefix) == len(prompt.keys) * shape.page_size
    assert 1 <= len(prompt.tail) <= shape.page_size
    assert prompt.num_pages * shape.page_size >= num_tokens + DECODED_TOKENS
    assert sorted(prompt.block_table(1)) == list(range(prompt.num_pages))
