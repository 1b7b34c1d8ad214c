"""Whose pages may be evicted for whom: plain values for one grant.

While an engine is over its fair share, only such engines and owners that are not attached give pages. Knows
nothing of pools and sessions: ``shares`` says who is attached, and what a share is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

NOBODY = 0
"""The owner of pages whose engine is not known."""


@dataclass(frozen=True)
class Claim:
    """Who asks for pages, and which owners have a fair ``share`` to defend, because they are attached."""

    owner: int = NOBODY
    attached: Collection[int] = ()
    share: int = 0


class Givers:
    """Whose pages may be evicted for one grant of ``wanted`` pages; follows what is taken."""

    def __init__(self, claim: Claim, owned: Mapping[int, int], wanted: int) -> None:
        self._share = claim.share
        self._asks = claim.owner
        self._charged = {owner: owned.get(owner, 0) for owner in claim.attached}
        if claim.owner in self._charged:
            self._charged[claim.owner] += wanted
        alone = len(self._charged) < 2
        self.over = set() if alone else {owner for owner, count in self._charged.items() if count > claim.share}
        """Owners over their share; while there are any, only they and those who are not attached may give."""

    def may_give(self, owner: int) -> bool:
        """Whether a page of ``owner`` may be taken now."""
        return not self.over or owner in self.over or owner not in self._charged

    def took(self, owner: int) -> bool:
        """Note a page taken; returns whether owners may give from now on that could not before."""
        if owner not in self._charged:
            return False
        self._charged[owner] -= 1
        if owner not in self.over or self._charged[owner] > self._share:
            return False
        self.over.discard(owner)
        return not self.over

    def widen(self) -> bool:
        """Those who may give have no more: the others have to, for an asker that stays within its share."""
        if not self.over or self._asks in self.over:
            return False
        self.over.clear()
        return True
