"""This rank's commits: waited for, or queued until their copies are complete.

A commit is sent only when every copy into its pages is complete; a failed copy makes it fail for
good. A commit whose answer got lost stays queued and is sent again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sharedmirror.attachment import ChannelLike
from sharedmirror.errors import CallTimeout, CopyError, SharedMirrorError
from sharedmirror.transfers import Commit, Ledger
from sharedmirror.types import LeaseId, PageId, Sealed

__all__ = ["CommitQueue", "Progress"]

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


class CommitQueue:
    """Sends commits over ``channel`` and notes them in ``ledger``."""

    def __init__(self, channel: ChannelLike, ledger: Ledger) -> None:
        self._channel = channel
        self._ledger = ledger
        self._lock = threading.Lock()
        self._queue: list[Commit] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._queue)

    def add(self, commit: Commit) -> None:
        """Queue a commit for ``send_ready``."""
        with self._lock:
            self._queue.append(commit)

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

    def send_ready(self) -> tuple[SealedCommits, FailedCommits]:
        """Send what has completed; return the answers and what can never be sent."""
        with self._lock:
            queue, self._queue = self._queue, []
        sealed: list[tuple[LeaseId, Sealed]] = []
        failed: list[tuple[LeaseId, SharedMirrorError]] = []
        left: list[Commit] = []
        away = False
        for commit in queue:
            lease = LeaseId(commit.lease)
            try:
                # While the daemon is away each further call would only wait again.
                if away or not all([transfer.done() for transfer in commit.transfers]):
                    left.append(commit)
                else:
                    sealed.append((lease, self._send(commit, None)))
            except SharedMirrorError as error:
                if error.retryable:
                    left.append(commit)
                    away = True
                else:
                    failed.append((lease, error))
        with self._lock:
            self._queue[:0] = left
        return tuple(sealed), tuple(failed)

    def _send(self, commit: Commit, timeout_s: float | None) -> Sealed:
        body: dict[str, object] = {"lease": commit.lease, "pages": commit.wire_pages}
        if commit.samples:
            body["checks"] = [sample.to_wire() for sample in commit.samples]
        reply = self._channel.call("commit", timeout_s=timeout_s, **body)
        self._ledger.committed(commit)
        return Sealed(
            tuple(PageId(page) for page in reply["sealed"]),
            tuple(PageId(page) for page in reply["pending"]),
            {PageId(page): PageId(winner) for page, winner in reply["duplicates"]},
        )
