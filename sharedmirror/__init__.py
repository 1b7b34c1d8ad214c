"""sharedmirror: a node's pinned host tier for KV caches, kept by a daemon and shared by engines.

``SharedHostMirror`` is the workers' side, ``connect`` the scheduler's. Nothing is imported before it is
used, so a scheduler or a tool starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharedmirror.adapter import DevicePool
    from sharedmirror.control import Client, Evicted, Hit, connect
    from sharedmirror.errors import SharedMirrorError
    from sharedmirror.layout import PlaneSpec, PoolLayout
    from sharedmirror.mirror import SharedHostMirror, flat_bytes_per_host_page
    from sharedmirror.types import KeyState, Lease, Reservation, Sealed
    from sharedmirror.watching import Change, ChangeKind, Position, Watch, watch

__version__ = "0.1.0"

_HOMES = {
    "Change": "watching",
    "ChangeKind": "watching",
    "Client": "control",
    "DevicePool": "adapter",
    "Evicted": "control",
    "Hit": "control",
    "KeyState": "types",
    "Lease": "types",
    "PlaneSpec": "layout",
    "PoolLayout": "layout",
    "Position": "watching",
    "Reservation": "types",
    "Sealed": "types",
    "SharedHostMirror": "mirror",
    "SharedMirrorError": "errors",
    "Watch": "watching",
    "connect": "control",
    "flat_bytes_per_host_page": "mirror",
    "watch": "watching",
}

__all__ = [
    "Change",
    "ChangeKind",
    "Client",
    "DevicePool",
    "Evicted",
    "Hit",
    "KeyState",
    "Lease",
    "PlaneSpec",
    "PoolLayout",
    "Position",
    "Reservation",
    "Sealed",
    "SharedHostMirror",
    "SharedMirrorError",
    "Watch",
    "connect",
    "flat_bytes_per_host_page",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sharedmirror' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sharedmirror.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
