"""``sharedmirror gc``: list what dead daemons of this user left in /dev/shm, and remove it when told to.

It follows the rule of ``adoption``: only the own uid's segments, with a sane header, while no daemon
holds the socket's lock and no process can still map the arena. Exit code 1 when something that was to
be removed could not be.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from sharedmirror import paths
from sharedmirror.errors import SharedMirrorError
from sharedmirrord import adoption, lifecycle, memory


def run(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what is dead. Without it, nothing is touched.")
    ] = False,
) -> None:
    """List the segments of dead daemons of this user; with --remove, remove them."""
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    failed = False
    found = list(adoption.leftovers())
    for left in found:
        what = f"{left.records_name}: {memory.show_bytes(left.size_bytes)}"
        try:
            sys.stdout.write(f"{what}: {_judge(left, remove)}\n")
        except SharedMirrorError as error:
            failed = True
            sys.stdout.write(f"{what}: kept: {error.message}\n")
    if not found:
        sys.stdout.write("no segments of this user\n")
    elif not remove:
        sys.stdout.write("nothing was removed; --remove removes what is dead\n")
    raise typer.Exit(1 if failed and remove else 0)


def _judge(left: adoption.Leftover, remove: bool) -> str:
    if left.unfinished:
        if remove:
            adoption.remove_unfinished(left)
        return "removed" if remove else "dead; it was never finished"
    if left.header is None:
        raise adoption.CannotAdopt(left.problem)
    path = left.header.socket
    try:
        with lifecycle.instance_lock(paths.lock_path(path), path):
            live = adoption.live_sessions(left.header)
            if live:
                return f"in use: sessions {live} of {path} live on"
            if not remove:
                return f"dead; a daemon started on {path} would adopt it"
            adoption.remove(left)
            return "removed"
    except lifecycle.AlreadyRunning as error:
        return f"in use by the daemon with pid {error.ids['pid']}"


if __name__ == "__main__":
    typer.run(run)
