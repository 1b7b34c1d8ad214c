"""A paged KV pool as engines have it: token rows of K and V per layer, addressed through block tables.

This is the duck-typed pool that ``SharedHostMirror`` mirrors: ``page_size``, ``k_buffer``, ``v_buffer``.
"""

from __future__ import annotations

import math

import torch


class PagedPool:
    """``num_pages`` device pages of ``page_size`` rows, each row ``(kv_heads, head_dim)``, for K and V of each layer.

    A fresh pool is all NaN: a page that is read without having been written or loaded shows at once.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        shape = (num_pages * page_size, kv_heads, head_dim)
        self.page_size = page_size
        self.num_pages = num_pages
        self.k_buffer = [torch.empty(shape, device=device) for _ in range(layers)]
        self.v_buffer = [torch.empty(shape, device=device) for _ in range(layers)]
        self.fill_nan()

    def fill_nan(self) -> None:
        """Forget every page."""
        for rows in (*self.k_buffer, *self.v_buffer):
            rows.fill_(math.nan)

    def rows_of(self, block_table: torch.Tensor, end: int) -> torch.Tensor:
        """Return the pool rows of a sequence's first ``end`` positions, shape ``(end,)``."""
        positions = torch.arange(end, device=block_table.device)
        return block_table[positions // self.page_size] * self.page_size + positions % self.page_size
