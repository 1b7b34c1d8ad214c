"""Boards on which the ranks of an engine launch meet to load together; see ``sharedmirror.copies.together.board``.

The daemon makes one when a rank asks and hands the same to the others. It never reads one. Nobody can find
a board by name or resize it, and it goes with its last holder.
"""

from __future__ import annotations

import fcntl
import logging
import os

from sharedmirror.types import BOARD_BLOCK_BYTES
from sharedmirrord.core.model import State

log = logging.getLogger("sharedmirrord")


class Boards:
    """The boards of all engine launches that have asked for one."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._of: dict[int, int] = {}

    def get(self, incarnation: int, world_size: int) -> int | None:
        """Return the descriptor of a launch's board, which stays the daemon's; None where the kernel has none."""
        self.prune()
        if incarnation not in self._of:
            try:
                self._of[incarnation] = _make(BOARD_BLOCK_BYTES * world_size)
            except (OSError, AttributeError) as error:
                log.warning("event=no_board incarnation=%d reason=%r", incarnation, str(error))
                return None
        return self._of[incarnation]

    def prune(self) -> None:
        """Let go of the boards of launches that are over."""
        for number in [number for number in self._of if number not in self._state.incarnations]:
            os.close(self._of.pop(number))


def _make(size_bytes: int) -> int:
    fd = os.memfd_create("sharedmirror-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
