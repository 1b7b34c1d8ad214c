"""Words to the service manager (systemd's ``sd_notify``).

A daemon that no manager watches says nothing; a manager that cannot be reached is no reason to fail,
so nothing here raises.
"""

from __future__ import annotations

import os
import socket

_SEND_TIMEOUT_S = 0.5
"""A manager's full queue must not hold up the event loop for longer."""


def sd_notify(state: str) -> bool:
    """Send ``state``, such as ``READY=1``; returns whether a service manager took it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(_SEND_TIMEOUT_S)
            channel.sendto(state.encode(), address)
    except (OSError, ValueError):
        return False
    return True


def ready() -> bool:
    """Say that the daemon serves."""
    return sd_notify("READY=1")


def stopping() -> bool:
    """Say that the daemon is shutting down."""
    return sd_notify("STOPPING=1")


def status(text: str) -> bool:
    """Say in one line what the daemon does."""
    return sd_notify("STATUS=" + " ".join(text.split()))
