"""What vLLM's sleep mode asks of a rank's copies.

vLLM waits for its device, then unmaps the blocks. An order that waits in one of our threads is not on
the device yet: its copy would read unmapped memory later, and that ends the process. vLLM calls no hook
of a connector's worker before it sleeps, so its allocator, of which a process has one, is asked to tell.

After a sleep the blocks lie at the same addresses, with other contents. vLLM has reset the tier by then,
so what was ordered before has no lease any more. The mirrors' own memory on the device stays: it is allocated
in the keeper's thread, which is outside vLLM's pools.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from vllm.logger import init_logger

__all__ = ["Pausable", "guard_sleep", "sleeping_allocator"]

_log = init_logger("vllm.sharedmirror")


class Pausable(Protocol):
    """What copies."""

    def pause(self) -> None:
        """Finish the copies under way and begin no other."""
        ...

    def resume(self) -> None:
        """Copy again."""
        ...


def sleeping_allocator() -> Any:
    """Return vLLM's allocator that can unmap the blocks, or None where sleep mode is off."""
    # Looked up where vLLM would have put it: importing it is for platforms that have it.
    module = sys.modules.get("vllm.device_allocator.cumem")
    return getattr(getattr(module, "CuMemAllocator", None), "instance", None)


def guard_sleep(allocator: Any, worker: Pausable) -> None:
    """Have ``worker`` pause before ``allocator`` unmaps anything, and resume when everything is mapped."""
    sleep, discard, wake_up = allocator.sleep, allocator.discard, allocator.wake_up

    def follow() -> None:
        if not any(data.is_asleep for data in allocator.pointer_to_data.values()):
            worker.resume()

    def unmapping(unmap: Any) -> Any:
        def guarded(*arguments: Any, **named: Any) -> None:
            worker.pause()
            try:
                unmap(*arguments, **named)
            finally:
                follow()

        return guarded

    def waking(*arguments: Any, **named: Any) -> None:
        wake_up(*arguments, **named)
        follow()

    allocator.sleep, allocator.discard, allocator.wake_up = unmapping(sleep), unmapping(discard), waking
    _log.info("event=sleep_guarded")
