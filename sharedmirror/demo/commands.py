"""The words between the story and its workers: plain data that is pickled over a pipe.

Torch-free, since the story's process is. Each command is answered by one value or by a ``Failure``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharedmirror.control import Hit
from sharedmirror.types import Lease

Pairs = list[tuple[int, int]]
"""(device page, host page) each."""


@dataclass(frozen=True)
class ModelShape:
    """The whole model, before it is split over the ranks. The defaults are the demo's."""

    vocab: int = 256
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 1408
    page_size: int = 32
    seed: int = 20

    @property
    def name(self) -> str:
        """What tells this model's pages from another's."""
        return repr(self)


@dataclass(frozen=True)
class Start:
    """The first message to a worker: what it is. Answered by a ``Started``."""

    shape: ModelShape
    rank: int
    world_size: int
    num_device_pages: int
    num_host_pages: int
    pool: str
    engine: str
    socket: str
    rendezvous: str
    device: str


@dataclass(frozen=True)
class Started:
    """The worker has its model, its peers and its mirror. ``attach_s`` is what the mirror took."""

    device: str
    attach_s: float
    bytes_per_host_page: int


@dataclass(frozen=True)
class Prefill:
    """Compute the KV of ``tokens``. Answered by the seconds it took."""

    tokens: tuple[int, ...]
    block_table: tuple[int, ...]
    chunk: int


@dataclass(frozen=True)
class Store:
    """Copy device pages into leased host pages and commit them. Answered by the seconds it took."""

    lease: Lease
    pairs: Pairs


@dataclass(frozen=True)
class Load:
    """Copy the hit's host pages to the device. Answered by the seconds it took."""

    hit: Hit
    pairs: Pairs


@dataclass(frozen=True)
class Continue:
    """Run ``tokens`` at position ``start`` and decode ``count`` tokens. Answered by an ``Answer``."""

    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Answer:
    """A continuation. ``logits`` are the bytes of float32 ``(count, vocab)``, so equal means equal bit for bit."""

    tokens: tuple[int, ...]
    logits: bytes
    computed_tokens: int
    seconds: float


@dataclass(frozen=True)
class ForgetAll:
    """Fill the device pool with NaN. Answered by None."""


@dataclass(frozen=True)
class FlipByte:
    """Flip the top bit of one byte of a host page, behind the mirror's back; only ``rank`` does. Answered by None."""

    rank: int
    host_page: int
    plane: int
    byte: int


@dataclass(frozen=True)
class Stop:
    """Close the mirror and exit. Answered by None."""


@dataclass(frozen=True)
class Failure:
    """A command raised; ``text`` is the traceback."""

    text: str
