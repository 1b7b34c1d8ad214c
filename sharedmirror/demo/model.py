"""A small real decoder, one tensor-parallel rank of it: RMSNorm, rotary GQA attention, gated MLP, greedy decode.

Weights are seeded and cut out of the whole model's, so every world size runs the same model. Heads and the
MLP are sharded; each layer sums twice over the ranks.

Bit for bit: the same calls with the same shapes give the same bits. A run that loaded its prefix and one
that computed it differ in nothing after the prefix, as long as both go on with the same ``forward`` shapes.
Attention reads exactly the rows up to its position and never a masked row, because NaN times zero is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from sharedmirror.demo.commands import ModelShape
from sharedmirror.demo.pool import PagedPool

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all ranks and returns the sum on the tensor's device."""


@dataclass(frozen=True)
class _LayerWeights:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Continuation:
    """What a greedy run gave: ``n`` token ids, and the logits each was taken from, shape ``(n, vocab)``."""

    tokens: list[int]
    logits: torch.Tensor
    computed_tokens: int


class Decoder:
    """One rank's part of the model. ``all_reduce`` sums over the ranks."""

    def __init__(
        self, shape: ModelShape, *, rank: int, world_size: int, device: torch.device, all_reduce: AllReduce
    ) -> None:
        if shape.kv_heads % world_size or shape.heads % shape.kv_heads or shape.mlp % world_size:
            raise ValueError(f"{shape} cannot be split over {world_size} ranks")
        self.shape = shape
        self.heads = shape.heads // world_size
        self.kv_heads = shape.kv_heads // world_size
        self.device = device
        self._all_reduce = all_reduce
        generator = torch.Generator().manual_seed(shape.seed)

        def columns(outputs: int) -> torch.Tensor:
            """Return this rank's outputs of a weight that takes the whole hidden vector."""
            return _random(shape.hidden, outputs, generator).chunk(world_size, dim=1)[rank].contiguous().to(device)

        def rows(inputs: int) -> torch.Tensor:
            """Return this rank's inputs of a weight that gives the whole hidden vector."""
            return _random(inputs, shape.hidden, generator).chunk(world_size, dim=0)[rank].contiguous().to(device)

        self._embedding = torch.randn(shape.vocab, shape.hidden, generator=generator).to(device)
        self._layers = [
            _LayerWeights(
                q=columns(shape.heads * shape.head_dim),
                k=columns(shape.kv_heads * shape.head_dim),
                v=columns(shape.kv_heads * shape.head_dim),
                out=rows(shape.heads * shape.head_dim),
                gate=columns(shape.mlp),
                up=columns(shape.mlp),
                down=rows(shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        self._head = _random(shape.hidden, shape.vocab, generator).to(device)
        self._frequencies = (10_000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)).to(device)

    def new_pool(self, num_pages: int) -> PagedPool:
        """Return a device pool of this rank's heads, all NaN."""
        shape = self.shape
        return PagedPool(
            layers=shape.layers,
            num_pages=num_pages,
            page_size=shape.page_size,
            kv_heads=self.kv_heads,
            head_dim=shape.head_dim,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], start: int, block_table: Sequence[int], pool: PagedPool) -> torch.Tensor:
        """Run ``tokens`` at positions from ``start`` on and write their KV; return the last logits ``(vocab,)``."""
        end = start + len(tokens)
        rows = pool.rows_of(torch.tensor(block_table, device=self.device), end)
        positions = torch.arange(start, end, device=self.device)
        hidden = self._embedding[torch.tensor(list(tokens), device=self.device)]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(layer, _normed(hidden), positions, rows, index, pool)
            normed = _normed(hidden)
            hidden = hidden + self._all_reduce((silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down)
        return _normed(hidden[-1:])[0] @ self._head

    def _attention(
        self,
        layer: _LayerWeights,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        index: int,
        pool: PagedPool,
    ) -> torch.Tensor:
        count, end, head_dim = len(positions), len(rows), self.shape.head_dim
        query = self._rotated((hidden @ layer.q).view(count, self.heads, head_dim), positions)
        keys, values = pool.k_buffer[index], pool.v_buffer[index]
        keys[rows[-count:]] = self._rotated((hidden @ layer.k).view(count, self.kv_heads, head_dim), positions)
        values[rows[-count:]] = (hidden @ layer.v).view(count, self.kv_heads, head_dim)

        # (kv head, queries that share it, head_dim) against (kv head, positions, head_dim)
        group = self.heads // self.kv_heads
        query = query.view(count, self.kv_heads, group, head_dim).permute(1, 2, 0, 3)
        query = query.reshape(self.kv_heads, group * count, head_dim)
        scores = query @ keys[rows].permute(1, 2, 0) * head_dim**-0.5
        scores = scores.view(self.kv_heads, group, count, end)
        future = torch.arange(end, device=self.device) > positions[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).view(self.kv_heads, group * count, end)
        mixed = (weights @ values[rows].permute(1, 0, 2)).view(self.kv_heads, group, count, head_dim)
        return self._all_reduce(mixed.permute(2, 0, 1, 3).reshape(count, -1) @ layer.out)

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions[:, None] * self._frequencies)[:, None, :]
        first, second = heads.chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def prefill(self, tokens: Sequence[int], block_table: Sequence[int], pool: PagedPool, chunk: int) -> None:
        """Write the KV of ``tokens`` from position 0 on, ``chunk`` tokens at a time."""
        for start in range(0, len(tokens), chunk):
            self.forward(tokens[start : start + chunk], start, block_table, pool)

    def continue_from(
        self, tokens: Sequence[int], start: int, block_table: Sequence[int], pool: PagedPool, count: int
    ) -> Continuation:
        """Run ``tokens`` at ``start``, after a prefix in the pool, and decode greedily to ``count`` tokens."""
        logits = [self.forward(tokens, start, block_table, pool)]
        chosen = [int(logits[0].argmax())]
        position = start + len(tokens)
        while len(chosen) < count:
            logits.append(self.forward(chosen[-1:], position, block_table, pool))
            chosen.append(int(logits[-1].argmax()))
            position += 1
        return Continuation(chosen, torch.stack(logits).cpu(), position - start)


def _random(inputs: int, outputs: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(inputs, outputs, generator=generator) / math.sqrt(inputs)


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    return torch.mul(hidden, torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6))
