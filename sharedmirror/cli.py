"""The ``sharedmirror`` command: ``status``, ``watch``, ``drop``, ``demo`` and ``gc``.

``status`` answers within 0.3 s, so nothing here imports torch or numpy, and rich only when it draws.

``sharedmirror status --json`` prints the daemon's status map as it came, one line. Fields of schema 1 (sizes in
bytes, times in seconds; later releases add fields and take none away under the same number):

- ``schema``: 1.
- ``daemon``: ``version``, ``pid``, ``instance`` (a new one with each new arena), ``epoch`` (starts over one arena),
  ``uptime_s``, ``socket``, ``state`` ("prefaulting", "ready", "stopping"), ``pin`` ("mlock", "cuda", "none"),
  ``pinned_bytes``, ``huge_page_share`` (0 to 1), ``keep`` (whether the arena stays on exit), ``rss_bytes``.
- ``arena``: ``bytes_total``, ``bytes_ready`` (prefaulted), ``bytes_allocated`` (in pools), ``bytes_free``.
- ``pools``, each: ``id``, ``name``, ``tag``, ``number`` (raised by ``clear``), ``kind`` ("static", "leased"),
  ``layout`` ("slab", "page"), ``page_size``, ``frames_per_page``, ``world_size``, ``num_host_pages`` (the most that it
  may have), ``min_host_pages``, ``backed_pages`` (those that have memory now), ``giving_back_pages`` (how many of them
  are to go), ``giving_back_awaits`` (pids that have yet to unmap some),
  ``bytes_per_host_page`` (over all ranks), ``bytes_saved_per_host_page`` (spared by sharing),
  ``state`` ("forming", "ready"), ``ranks_attached`` (engine to its ranks),
  ``pages`` (counts: ``reserved``, ``free``, ``leased``, ``sealed``, ``pinned`` (of the sealed), ``quarantined``),
  ``hits``, ``misses``, ``evictions``, ``engines`` (name to ``owned``: pages that it leased and that are still there;
  ``held``: in open leases and hits; ``max_held``; ``share``: its fair share, 0 when it is not attached).
- ``sessions``, each: ``id``, ``pid``, ``uid``, ``engine``, ``role`` ("worker", "scheduler", "observer"), ``rank``,
  ``pool``, ``state`` ("attached", "waiting", "lost", "dead", "detached"), ``age_s``, ``missing`` (evidence of its
  death that is missing: "process", "socket", "lock"), ``holders`` (pids that may hold its memory), ``pins``,
  ``leases`` (each: ``id``, ``pages``, ``age_s``, ``missing_ranks``, ``revoked``).
- ``ended``, the last 100 sessions, each: ``id``, ``pid``, ``engine``, ``role``, ``rank``, ``pool``, ``how``, ``ago_s``.
- ``quarantine``, each: ``pool``, ``lease``, ``pages`` (a count), ``session``, ``pid``, ``missing``, ``holders``.
- ``alarms``, each: ``code``, ``message``.

``sharedmirror watch --json`` prints one object a batch: ``kind`` and ``keys`` (in hex) as ``sharedmirror.watching``
tells them, ``position`` ([instance, epoch, pool, sequence], null until a snapshot is complete).
"""

from __future__ import annotations

import enum
import json
import os
import sys
import time
from typing import Annotated, Any, NoReturn

import typer

from sharedmirror import __version__
from sharedmirror.channel import Channel
from sharedmirror.errors import DaemonUnavailable, SharedMirrorError
from sharedmirror.types import Role

EXIT_FAILED = 1
EXIT_NO_DAEMON = 3
WATCH_INTERVAL_S = 1.0


class Device(str, enum.Enum):
    """Where the demo's engines run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Share a node's pinned host KV cache: see what the daemon holds, watch it outlive an engine."""


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the status map, one JSON object a line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew each second until Ctrl-C.")] = False,
    socket: Annotated[str | None, typer.Option(help="The daemon's socket, if not the default one.")] = None,
) -> None:
    """Show the daemon, its pools, sessions, quarantine and alarms. Exit code 3 if no daemon answers."""
    try:
        with Channel.open(socket, role=Role.OBSERVER) as channel:
            _show(channel, as_json=as_json, watch=watch)
    except KeyboardInterrupt:
        raise typer.Exit from None
    except OSError as error:
        _end_unwritten(error)
    except SharedMirrorError as error:
        typer.echo(f"sharedmirror: {' '.join(error.message.split())}", err=True)
        raise typer.Exit(EXIT_NO_DAEMON if isinstance(error, DaemonUnavailable) else EXIT_FAILED) from error


def _show(channel: Channel, *, as_json: bool, watch: bool) -> None:
    if as_json:
        _print_json(_status(channel))
        while watch:
            time.sleep(WATCH_INTERVAL_S)
            _print_json(_status(channel))
        return

    from rich.console import Console, Group
    from rich.live import Live

    from sharedmirror.status_view import render

    console = Console()
    if not watch:
        console.print(*render(_status(channel)), sep="\n")
        return
    while not console.is_terminal:  # frame after frame: nothing of them is drawn over
        with console.capture() as frame:
            console.print(*render(_status(channel)), "", sep="\n")
        _print(frame.get())
        time.sleep(WATCH_INTERVAL_S)
    with Live(Group(*render(_status(channel))), console=console, screen=True) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            live.update(Group(*render(_status(channel))), refresh=True)


def _status(channel: Channel) -> dict[str, Any]:
    status: dict[str, Any] = channel.call("status")["status"]
    return status


def _print_json(status: dict[str, Any]) -> None:
    _print(json.dumps(status) + "\n")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end_unwritten(error: OSError) -> NoReturn:
    """End because the output takes no more: in silence if whoever read has enough, else with one line."""
    # The interpreter's own flush must not complain again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        raise typer.Exit from None
    sys.stderr.write(f"sharedmirror: the output cannot be written: {error.strerror or error}\n")
    raise typer.Exit(EXIT_FAILED) from None


@app.command()
def watch(
    name: Annotated[str, typer.Option("--pool", help="The pool's name, as `status` shows it.")] = "default",
    tag: Annotated[str | None, typer.Option(help="The pool's tag, where several pools have this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with keys in hex.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds that the pool, or the daemon, may be away.")] = 30.0,
    socket: Annotated[str | None, typer.Option(help="The daemon's socket, if not the default one.")] = None,
) -> None:
    """Follow which keys a pool holds, one line a batch, until Ctrl-C. Exit code 3 if no daemon answers."""
    from sharedmirror.watching import watch as follow

    try:
        with follow(socket, name, tag, wait_s=wait) as changes:
            for change in changes:
                # Without --json no key is shown: lines like these end up in logs.
                line = f"{change.kind.value} {len(change.keys)} keys"
                if as_json:
                    keys = [key.hex() for key in change.keys]
                    line = json.dumps({"kind": change.kind.value, "keys": keys, "position": change.position})
                _print(line + "\n")
    except KeyboardInterrupt:
        raise typer.Exit from None
    except OSError as error:
        _end_unwritten(error)
    except SharedMirrorError as error:
        sys.stderr.write(f"sharedmirror: {error.message}\n")
        raise typer.Exit(EXIT_NO_DAEMON if isinstance(error, DaemonUnavailable) else EXIT_FAILED) from None


@app.command()
def demo(
    device: Annotated[
        Device, typer.Option(help="Where the engines run; auto takes the GPU if there is one.")
    ] = Device.AUTO,
) -> None:
    """Kill an engine and watch its cache live on. Exit code 0 only if every check held."""
    from rich.console import Console

    from sharedmirror.demo.run import run

    raise typer.Exit(run(Console(), device=device.value))


@app.command()
def drop(
    name: Annotated[str, typer.Argument(help="The pool's name, as `sharedmirror status` shows it.")],
    tag: Annotated[str | None, typer.Option(help="The pool's tag, where several pools have this name.")] = None,
    socket: Annotated[str | None, typer.Option(help="The daemon's socket.")] = None,
) -> None:
    """Give a pool that nobody uses up: its cache is lost, its memory is free for other pools."""
    try:
        with Channel.open(socket, role=Role.OBSERVER) as channel:
            freed = channel.call("drop", pool=name, tag=tag)["freed"]
    except DaemonUnavailable as error:
        sys.stderr.write(f"sharedmirror: {error.message}\n")
        raise typer.Exit(EXIT_NO_DAEMON) from None
    except SharedMirrorError as error:
        sys.stderr.write(f"sharedmirror: {error.message}\n")
        raise typer.Exit(1) from None
    try:
        _print(f"pool {name!r} is dropped, {freed} bytes are free again\n")
    except OSError as error:
        _end_unwritten(error)


@app.command()
def gc(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what is dead. Without it, nothing is touched.")
    ] = False,
) -> None:
    """List what dead daemons of this user left in shared memory; with --remove, remove it."""
    # The rule for it is the daemon's, and this package does not import the daemon.
    os.execv(sys.executable, [sys.executable, "-m", "sharedmirrord.gc", *(["--remove"] if remove else [])])


def main() -> None:
    """Run the command line."""
    app()
