"""What is wrong with the memory that the daemon stands on, for ``status``: names that vanished, a full mount.

A segment whose name was unlinked (systemd's ``RemoveIPC``, a cleaner of /dev/shm) works on, but no
daemon would find it again: the cache ends with this process.
"""

from __future__ import annotations

import os

from sharedmirrord import memory

SHM_LOW_BYTES = 64 << 20
"""Less room than this in /dev/shm is an alarm: growth of the records, and other programs, are about to fail."""


def of_memory(arena_name: str, arena_fd: int, records_name: str) -> dict[str, str]:
    """Return code and message of each alarm; ``arena_fd`` is -1 once the arena is closed."""
    found = {}
    gone = [name for name in (arena_name, records_name) if not os.path.exists(memory.SHM_DIR + name)]
    if arena_fd >= 0 and os.fstat(arena_fd).st_nlink == 0 and arena_name not in gone:
        gone.insert(0, arena_name)  # another object has its name by now
    if gone:
        found["unlinked"] = (
            f"{', '.join(gone)} vanished from {memory.SHM_DIR}: this daemon works on, but the next one cannot adopt "
            f"its cache; set RemoveIPC=no in logind.conf, or run as a system user, and keep cleaners off /dev/shm"
        )
    free = memory.shm_free()
    if free is not None and free < SHM_LOW_BYTES:
        found["shm_full"] = (
            f"{memory.SHM_DIR} has only {memory.show_bytes(free)} left: new pools may not get their page tables; "
            f"remove what other programs left there, or give the mount more room"
        )
    return found
