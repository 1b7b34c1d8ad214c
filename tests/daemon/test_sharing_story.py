"""Whatever several engines with shared planes do, readers see the bytes of the key; planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from sharedmirrord.core import hits, leases
from sharedmirrord.core.model import OpenLease
from tests.daemon.planted import assert_found
from tests.daemon.sharing_story import SharingStory

QUICK = settings(
    deadline=None,
    database=None,
    stateful_step_count=60,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
SharingStory.TestCase.settings = settings(QUICK, max_examples=150)
# Only a failure, while it is made smaller, takes so long.
TestSharing = pytest.mark.timeout(400)(SharingStory.TestCase)

Plant = Callable[[pytest.MonkeyPatch], None]


def nobody_has_to_give_evidence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenLease, "evident", lambda lease: lease.open)


def one_rank_commits_for_all(patch: pytest.MonkeyPatch) -> None:
    def complete(lease: OpenLease) -> int:
        bits = 0
        for committed in lease.committed.values():
            bits |= committed
        return bits & lease.open

    patch.setattr(OpenLease, "complete", complete)


def shared_bytes_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases, "_compare", lambda *arguments: None)


def a_released_hit_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    settle = hits.settle

    def wrong(state: Any, hit: Any, out: Any) -> bool:
        hit.awaited.clear()
        return settle(state, hit, out)

    patch.setattr(hits, "settle", wrong)


def the_dead_write_no_more(patch: pytest.MonkeyPatch) -> None:
    ended = leases.writer_ended
    patch.setattr(leases, "writer_ended", lambda state, session, certain, out: ended(state, session, True, out))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "plant",
    [
        nobody_has_to_give_evidence,
        one_rank_commits_for_all,
        shared_bytes_are_not_compared,
        the_dead_write_no_more,
        a_released_hit_waits_for_nobody,
    ],
)
def test_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert_found(SharingStory, QUICK, r"4: |5: |6: |10: |\[.*(4|5): ")
