"""Names pages by what they hold: a chain of hashes over the tokens of the prefix.

A page's KV depends on every token before it, so its key must too: each key hashes the key before it.
The first link is the model's name, so two models never share a page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 32


def page_keys(tokens: Sequence[int], page_size: int, model: str) -> list[bytes]:
    """Return one key of 32 bytes for each full page of ``tokens``, in prefix order.

    ``tokens`` are ids below 2**32. A last page that is not full has no key, as it would still change.
    """
    link = hashlib.sha256(model.encode()).digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = array("I", tokens[start : start + page_size])
        link = hashlib.sha256(link + page.tobytes()).digest()
        keys.append(link)
    return keys
