"""The command ``sharedmirrord``: start the daemon in the foreground, as systemd likes it.

Exit codes: 0 after SIGTERM or SIGINT, 1 when the environment refuses (no memory, a socket in use), 2 for
bad usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypedDict, cast

import typer
import uvloop

from sharedmirror import __version__, paths
from sharedmirror.errors import SharedMirrorError, UsageError
from sharedmirrord import adoption, failpoints, lifecycle, memory
from sharedmirrord.arena import Arena
from sharedmirrord.core.model import State
from sharedmirrord.core.regions import ArenaSpace
from sharedmirrord.core.transitions import PageState
from sharedmirrord.entries import StoreHeader
from sharedmirrord.records import RecordStore
from sharedmirrord.segment import Segment
from sharedmirrord.server import Server, Settings

log = logging.getLogger("sharedmirrord")

_RECORDS_BYTES = 4 << 20
_LAST_UID = (1 << 32) - 2
"""The one above it means no uid."""


class Pin(str, enum.Enum):
    """How the arena is pinned."""

    MLOCK = "mlock"
    CUDA = "cuda"
    NONE = "none"


class HugePages(str, enum.Enum):
    """Whether the arena asks for huge pages."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def run(
    memory_size: Annotated[
        str, typer.Option("--memory", help="Size of the mirror: 64GiB, 500MB, or 80% of what may be had.")
    ],
    socket: Annotated[
        str | None, typer.Option(help="Where to listen. Default: $SHAREDMIRROR_SOCKET, or the run directory.")
    ] = None,
    pin: Annotated[
        Pin, typer.Option(help="mlock; cuda makes the daemon register the memory too; none is for tests.")
    ] = Pin.MLOCK,
    huge_pages: Annotated[
        HugePages, typer.Option(help="Huge pages: if the mount allows, required, or not at all.")
    ] = HugePages.AUTO,
    allow_uid: Annotated[
        list[int] | None,
        typer.Option(min=0, max=_LAST_UID, help="Serve this uid too, besides root and the daemon's own."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the memory in place at the end.")] = False,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Give up what an earlier daemon left."),
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Keep a node's pinned mirror of KV caches in shared memory and lease it to engines."""
    _ = version
    logging.basicConfig(
        level=os.environ.get("SHAREDMIRROR_LOG", "INFO"),
        format="sharedmirrord: level=%(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        _serve(memory_size, socket, pin.value, huge_pages.value, frozenset(allow_uid or ()), keep, reset)
    except UsageError as error:
        raise typer.BadParameter(error.message) from None
    except SharedMirrorError as error:
        sys.stderr.write(f"sharedmirrord: {error.message}\n")
        raise typer.Exit(1) from None


def _serve(
    size: str, socket: str | None, pin: str, huge_pages: str, uids: frozenset[int], keep: bool, reset: bool
) -> None:
    failpoints.arm()
    _raise_file_limit()
    path = paths.check_socket_path(os.path.abspath(socket) if socket else paths.default_socket())
    with _said_of("--memory"):
        wanted = memory.parse_size(size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lifecycle.instance_lock(paths.lock_path(path), path))
        left = adoption.choose(path, reset=reset)
        listener = stack.enter_context(lifecycle.listening_socket(path, for_others=bool(uids)))
        options = _ArenaOptions(
            huge_pages=cast(Literal["auto", "always", "never"], huge_pages),
            pin=cast(Literal["mlock", "cuda", "none"], pin),
        )
        if left is None:
            with _said_of("--memory"):
                size_bytes = memory.resolve(wanted, _available())
            memory_of = _create(stack, path, size_bytes, options)
        else:
            memory_of = _adopt(stack, left.records_name, wanted, options)
        header = memory_of.store.header
        settings = Settings(
            path, adoption.session_dir(header), uids | {0, os.getuid()}, keep, header.instance, header.epoch
        )
        # Until it is known that nobody needs them, the segments stay.
        memory_of.arena.keep = memory_of.segment.keep = True
        live = uvloop.run(_run(settings, memory_of, listener))
        memory_of.arena.keep = memory_of.segment.keep = keep or live
        log.info("event=stopped socket=%s kept=%s", path, memory_of.arena.keep)
        if not memory_of.arena.keep:
            tables = [pool.table for pool in memory_of.state.pools.values() if pool.table is not None]
            if sealed := sum(table.counts[PageState.SEALED] for table in tables):
                log.warning("event=cache_dropped sealed_pages=%d remedy='--keep keeps it over a stop'", sealed)
            adoption.remove_session_dir(header)
            failpoints.reach("exit.sessions")
        else:
            why = "--keep" if keep else "live sessions"
            log.warning(
                "event=kept reason=%r segments=%s,%s remedy='a daemon started on this socket adopts them; "
                "sharedmirror gc --remove removes them'",
                why,
                memory_of.arena.name,
                memory_of.segment.name,
            )


@contextlib.contextmanager
def _said_of(option: str) -> Iterator[None]:
    """Have a UsageError name the option whose value is wrong."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", **error.ids) from None


def _raise_file_limit() -> None:
    """Use all descriptors that the hard limit gives: a session takes three, and the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _available() -> memory.Available:
    """Return what may be had, less what the records take in /dev/shm."""
    found = memory.available()
    shm_bytes = None if found.shm_bytes is None else max(0, found.shm_bytes - _RECORDS_BYTES)
    return replace(found, shm_bytes=shm_bytes)


class _ArenaOptions(TypedDict):
    huge_pages: Literal["auto", "always", "never"]
    pin: Literal["mlock", "cuda", "none"]


@dataclass
class _Memory:
    """What the daemon owns: the arena, the segment of its records, and what they say."""

    arena: Arena
    segment: Segment
    store: RecordStore
    state: State


def _create(stack: contextlib.ExitStack, path: str, size_bytes: int, options: _ArenaOptions) -> _Memory:
    instance = secrets.token_bytes(16)
    arena_name, records_name = lifecycle.segment_names(instance)
    # The records come first: they name the arena, so that nothing is left that nobody would find again.
    segment = stack.enter_context(Segment.create(records_name, _RECORDS_BYTES))
    fcntl.flock(segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see adoption: no header yet, but not left behind
    failpoints.reach("create.segment")
    header = StoreHeader(instance, lifecycle.boot_id(), os.getuid(), path, 1, ((arena_name, size_bytes),))
    store = stack.enter_context(RecordStore.create(segment, header))
    failpoints.reach("create.records")
    stack.callback(failpoints.reach, "exit.arena")
    arena = stack.enter_context(Arena.create(arena_name, size_bytes, **options))
    failpoints.reach("create.arena")
    return _Memory(arena, segment, store, State(ArenaSpace(size_bytes, memory.memory_nodes())))


def _adopt(stack: contextlib.ExitStack, records_name: str, wanted: memory.Size, options: _ArenaOptions) -> _Memory:
    segment = stack.enter_context(Segment.open(records_name))
    store = stack.enter_context(adoption.open_store(segment))
    state = adoption.restore(store)
    failpoints.reach("adopt.recovered")
    name, size_bytes = store.header.arenas[0]
    if wanted.size_bytes is not None and wanted.size_bytes != size_bytes:
        log.warning(
            "event=size_kept asked=%d has=%d remedy='--reset gives the cache up'", wanted.size_bytes, size_bytes
        )
    stack.callback(failpoints.reach, "exit.arena")
    arena = stack.enter_context(Arena.adopt(name, size_bytes, **options))
    failpoints.reach("adopt.arena")
    store.set_epoch(store.header.epoch + 1)
    failpoints.reach("adopt.epoch")
    adoption.sweep_sessions(store.header, state.sessions)
    log.info("event=adopted instance=%s epoch=%d sessions=%d", records_name, store.header.epoch, len(state.sessions))
    return _Memory(arena, segment, store, state)


async def _run(settings: Settings, memory_of: _Memory, listener: object) -> bool:
    """Serve until a signal; returns whether sessions live on."""
    # A full collection walks every page's key, for longer than a call may take; the core makes no cycles.
    gc.set_threshold(50_000, 20, 1_000_000)
    server = Server(settings, memory_of.arena, memory_of.store, memory_of.state)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, server.stop)
    server.watch_survivors()
    await server.run(listener)  # type: ignore[arg-type]
    return server.has_live_sessions


def main() -> None:
    """Entry point of ``sharedmirrord``."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"sharedmirrord {__version__}\n")
        return
    typer.run(run)
