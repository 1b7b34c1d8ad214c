"""How far a pool's address range is backed with memory. Arithmetic and plain values only.

A pool whose page count was left open between two bounds has addresses for the most it may have, and
memory for its first ``backed`` pages. It grows and shrinks at its end, from level to level: each level adds
whole multiples of 2 MiB to the pool's regions, and the levels are the same for the pool's whole life.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from sharedmirror.types import REGION_ALIGNMENT_BYTES
from sharedmirrord.core.regions import aligned

_LEVELS = 64
_MAX_STEP_BYTES = 1 << 30


def step_pages(page_bytes: Sequence[int], most: int) -> int:
    """Return by how many pages a pool of at most ``most`` pages grows: a 64th of its largest region, 1 GiB at most."""
    largest = max(page_bytes)
    step_bytes = aligned(most * largest // _LEVELS, REGION_ALIGNMENT_BYTES)
    return max(1, max(REGION_ALIGNMENT_BYTES, min(step_bytes, _MAX_STEP_BYTES)) // largest)


@dataclass
class Elastic:
    """The memory of one elastic pool, from ``least`` to ``most`` pages; ``page_bytes`` are those of each region."""

    least: int
    most: int
    step: int
    page_bytes: tuple[int, ...]
    backed: int = 0
    told: tuple[int, int] | None = None
    """The shrinking that the workers were told of: its number, and how many pages stay. Durable."""
    awaited: set[int] = field(default_factory=set)
    """The sessions that may still have the end mapped that they were told to unmap."""
    target: int = 0
    """How many pages it is to have; fewer than ``backed`` while it gives back."""
    wanted: int = 0
    """How many pages it could use, and has too few for, while it is below its fair share."""
    todo: list[int] = field(default_factory=list)
    """Pages from ``target`` on, ascending, that were in use and are not looked at yet; ``held`` are still in use."""
    held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = range(self.step, self.most + self.step, self.step)
        self.levels = sorted({self._fit(min(count, self.most)) for count in counts})
        self.backed = self.backed or self.level(self.least)
        self.target = self.backed

    @property
    def giving(self) -> bool:
        """Whether memory of the pool is being given back."""
        return self.target < self.backed

    @property
    def visible(self) -> int:
        """How many pages a worker may map: not those that are about to go."""
        return self.backed if self.told is None else self.told[1]

    def _fit(self, pages: int) -> int:
        """Return how many pages fit into the whole pieces that ``pages`` pages need."""
        fitting = (aligned(pages * size, REGION_ALIGNMENT_BYTES) // size for size in self.page_bytes)
        return min(self.most, *fitting)

    def level(self, pages: int) -> int:
        """Return the lowest level with ``pages`` pages, or the highest."""
        return self.levels[min(bisect_left(self.levels, pages), len(self.levels) - 1)]

    def below(self, pages: int) -> int:
        """Return the highest level with fewer than ``pages`` pages, or the lowest that the pool may have."""
        return max(self.levels[max(0, bisect_left(self.levels, pages) - 1)], self.level(self.least))

    def within(self, size_bytes: int) -> int:
        """Return the highest level that takes at most so many bytes, or the lowest that the pool may have."""
        at = bisect_right(self.levels, size_bytes, key=self.size_bytes)
        return max(self.levels[max(0, at - 1)], self.level(self.least))

    def region_bytes(self, region: int, pages: int) -> int:
        """Return how many bytes region number ``region`` of the pool has with ``pages`` pages."""
        return aligned(pages * self.page_bytes[region], REGION_ALIGNMENT_BYTES)

    def size_bytes(self, pages: int) -> int:
        """Return how many bytes of the arena the pool has with ``pages`` pages."""
        return sum(self.region_bytes(region, pages) for region in range(len(self.page_bytes)))

    def record(self) -> list[object]:
        """Return the durable form; the rest is in the pool's own record."""
        return [self.least, self.step, self.backed, None if self.told is None else list(self.told)]
