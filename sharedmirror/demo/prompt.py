"""The demo's long text, cut into what the cache can keep and what it cannot."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sharedmirror.demo.commands import Continue, ModelShape
from sharedmirror.demo.keys import page_keys

TEXT_TOKENS = 3000
DECODED_TOKENS = 32


@dataclass(frozen=True)
class Prompt:
    """``prefix`` fills whole pages, which have ``keys``; ``tail`` is one token or more.

    ``num_pages`` is the device pages that the text and its continuation need.
    """

    prefix: tuple[int, ...]
    tail: tuple[int, ...]
    keys: list[bytes]
    num_pages: int

    def block_table(self, seed: int) -> tuple[int, ...]:
        """Return the device pages in the order of the text: scattered, and another way for each seed."""
        pages = list(range(self.num_pages))
        random.Random(seed).shuffle(pages)
        return tuple(pages)

    def continuation(self, block_table: tuple[int, ...]) -> Continue:
        """Return the command that goes on after the prefix."""
        return Continue(self.tail, len(self.prefix), block_table, DECODED_TOKENS)


def long_prompt(shape: ModelShape, num_tokens: int = TEXT_TOKENS) -> Prompt:
    """Return a text of ``num_tokens`` tokens (two or more), one a byte."""
    days = (f"On day {day} the engine wrote {day * day} pages, and the night took them. " for day in range(num_tokens))
    tokens = tuple("".join(days).encode()[:num_tokens])
    length = (num_tokens - 1) // shape.page_size * shape.page_size
    return Prompt(
        prefix=tokens[:length],
        tail=tokens[length:],
        keys=page_keys(tokens[:length], shape.page_size, shape.name),
        num_pages=-(-(num_tokens + DECODED_TOKENS) // shape.page_size),
    )
