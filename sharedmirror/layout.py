"""Explicit planes: what one page consists of, without any tensor.

A pool is a list of planes. A page has one slice in each: ``span`` rows of ``row_bytes`` bytes. The
order of the planes is a promise: it is the order of ``SharedHostMirror.tensor_pairs``.

Nothing here imports torch, so that a scheduler may compute sizes too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sharedmirror.errors import LayoutError
from sharedmirror.types import MAX_SHARDS, Plane

__all__ = ["PlaneSpec", "PoolLayout"]


@dataclass(frozen=True)
class PlaneSpec:
    """One plane: ``span`` rows of ``row_bytes`` payload bytes make one page's slice.

    ``shard`` of ``shards`` says which ranks hold equal bytes: ranks that bring the same name and
    shard share one host copy. Left out, every rank is its own shard. ``shard=0, shards=1`` means
    that all ranks hold the same bytes (MLA latents).

    Raises LayoutError, naming the plane, when a number is out of range.
    """

    name: str
    row_bytes: int
    span: int
    shard: int | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise LayoutError(f"a plane needs a name, not {self.name!r}", plane=str(self.name))
        for what in ("row_bytes", "span"):
            check_positive(getattr(self, what), f"{what} of plane {self.name!r}", self.name)
        if (self.shard is None) != (self.shards is None):
            raise LayoutError(
                f"plane {self.name!r} gives only one of shard and shards; give both or none", plane=self.name
            )
        if self.shard is not None and self.shards is not None:
            check_positive(self.shards, f"shards of plane {self.name!r}", self.name)
            if self.shards > MAX_SHARDS:
                raise LayoutError(
                    f"shards of plane {self.name!r} is {self.shards}; it must be at most {MAX_SHARDS}", plane=self.name
                )
            if isinstance(self.shard, bool) or not isinstance(self.shard, int) or not 0 <= self.shard < self.shards:
                raise LayoutError(
                    f"shard {self.shard!r} of plane {self.name!r} is not in 0..{self.shards - 1}", plane=self.name
                )

    @property
    def slice_bytes(self) -> int:
        """Bytes of one page in this plane."""
        return self.row_bytes * self.span

    def to_plane(self, rank: int, world_size: int) -> Plane:
        """Return the plane as ``attach`` announces it for this rank."""
        shard = rank if self.shard is None else self.shard
        shards = world_size if self.shards is None else self.shards
        return Plane(self.name, shard, shards, self.slice_bytes, self.span)


@dataclass(frozen=True)
class PoolLayout:
    """The planes of a pool, in ``tensor_pairs`` order, and the token rows of a page.

    Raises LayoutError when there is no plane, a name comes twice, or ``page_size`` is not positive.
    """

    planes: tuple[PlaneSpec, ...]
    page_size: int

    def __init__(self, planes: Sequence[PlaneSpec], page_size: int) -> None:
        object.__setattr__(self, "planes", tuple(planes))
        object.__setattr__(self, "page_size", page_size)
        check_positive(page_size, "page_size")
        if not self.planes:
            raise LayoutError("a pool needs at least one plane")
        for plane in self.planes:
            if not isinstance(plane, PlaneSpec):
                raise LayoutError(f"planes are PlaneSpec objects, not {plane!r}")
        name, count = Counter(plane.name for plane in self.planes).most_common(1)[0]
        if count > 1:
            raise LayoutError(f"plane name {name!r} is used {count} times; names are unique in a pool", plane=name)

    @property
    def row_spans(self) -> tuple[int, ...]:
        """Rows that a page covers, one entry a plane."""
        return tuple(plane.span for plane in self.planes)

    def bytes_per_page(self) -> int:
        """Payload bytes of one page over all planes."""
        return sum(plane.slice_bytes for plane in self.planes)

    def to_planes(self, rank: int, world_size: int) -> list[Plane]:
        """Return the planes as ``attach`` announces them for this rank."""
        return [plane.to_plane(rank, world_size) for plane in self.planes]


def check_positive(value: object, what: str, plane: str | None = None) -> None:
    """Raise LayoutError, with ``what`` and the plane's name, unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        ids = {} if plane is None else {"plane": plane}
        raise LayoutError(f"{what} is {value!r}; it must be a whole number of at least 1", **ids)
