"""This rank's commits: waited for, or queued until their copies are complete.

A commit is sent only when every copy into its pages is complete; a failed copy makes it fail for
good. A commit whose answer got lost stays queued and is asked for again, as the same request.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from sharedmirror.attachment import ChannelLike
from sharedmirror.errors import CallTimeout, CopyError, SharedMirrorError
from sharedmirror.protocol import Errand
from sharedmirror.transfers import Commit, Ledger
from sharedmirror.types import LeaseId, PageId, Sealed

__all__ = ["CommitQueue", "Progress"]

_ANSWER_S, _GLANCE_S = 0.2, 0.002
"""How long ``poll`` waits for the answer to a commit, and to one that it had sent before."""

SealedCommits = tuple[tuple[LeaseId, Sealed], ...]
FailedCommits = tuple[tuple[LeaseId, SharedMirrorError], ...]


@dataclass(frozen=True)
class Progress:
    """What ``poll`` found.

    ``sealed`` are the answers to commits sent by this call, ``failed`` commits that can never be sent
    (a copy failed, or the lease is over), ``revoked`` the leases revoked since the last poll, and
    ``waiting`` how many commits are still queued.
    """

    sealed: SealedCommits
    failed: FailedCommits
    revoked: tuple[LeaseId, ...]
    waiting: int


@dataclass(frozen=True)
class _Queued:
    """A commit in the queue. Its answer may come after ``poll`` has returned, or to another connection."""

    commit: Commit
    errand: Errand = field(default_factory=Errand)


class CommitQueue:
    """Sends commits over ``channel`` and notes them in ``ledger``."""

    def __init__(self, channel: ChannelLike, ledger: Ledger) -> None:
        self._channel = channel
        self._ledger = ledger
        self._lock = threading.Lock()
        self._queue: list[_Queued] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._queue)

    def add(self, commit: Commit) -> None:
        """Queue a commit for ``send_ready``."""
        with self._lock:
            self._queue.append(_Queued(commit))

    def send_now(self, commit: Commit, timeout_s: float) -> Sealed:
        """Wait for the commit's copies and send it.

        Raises CallTimeout or CopyError, having taken the freeze of the pages back, or what the daemon says.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for transfer in commit.transfers:
                transfer.wait(max(0.0, deadline - time.monotonic()))
        except (CallTimeout, CopyError):
            self._ledger.thaw(commit)
            raise
        # A copy that used up the time is no reason to give up on the last, short step.
        return self._send(commit, max(1.0, deadline - time.monotonic()))

    def send_ready(self, *, wait: bool = False) -> tuple[SealedCommits, FailedCommits]:
        """Send what has completed; return the answers and what can never be sent.

        With ``wait`` a daemon that is away is waited for, once. Without, what got no answer at once is left for
        another call, and nothing is sent while the connection is lost.
        """
        with self._lock:
            queue, self._queue = self._queue, []
        sealed: list[tuple[LeaseId, Sealed]] = []
        failed: list[tuple[LeaseId, SharedMirrorError]] = []
        left: list[_Queued] = []
        away = False
        for queued in queue:
            commit, errand = queued.commit, queued.errand
            lease = LeaseId(commit.lease)
            try:
                # While the daemon is away each further call would only wait again.
                if away or not all([transfer.done() for transfer in commit.transfers]):
                    left.append(queued)
                elif wait:
                    sealed.append((lease, self._send(commit, None, errand=errand)))
                else:
                    timeout_s = _GLANCE_S if errand.number else _ANSWER_S
                    sealed.append((lease, self._send(commit, timeout_s, errand=errand, come_back=False)))
            except SharedMirrorError as error:
                if error.retryable:
                    left.append(queued)
                    away = True
                else:
                    failed.append((lease, error))
        with self._lock:
            self._queue[:0] = left
        return tuple(sealed), tuple(failed)

    def _send(self, commit: Commit, timeout_s: float | None, **how: Any) -> Sealed:
        body: dict[str, Any] = {"lease": commit.lease, "pages": commit.wire_pages}
        if commit.samples:
            body["checks"] = [sample.to_wire() for sample in commit.samples]
        reply = self._channel.call("commit", timeout_s=timeout_s, **how, **body)
        self._ledger.committed(commit)
        return Sealed(
            tuple(PageId(page) for page in reply["sealed"]),
            tuple(PageId(page) for page in reply["pending"]),
            {PageId(page): PageId(winner) for page, winner in reply["duplicates"]},
        )
