"""``watch``: the readable keys of a pool in pages, and what became of them since, for routers.

A router is no engine, so this needs no session, changes nothing and never waits: whoever follows a
pool asks again. A position names the daemon's instance and epoch, the pool and a sequence; one that
this log does not reach back to, or that is of another log, is answered by ``gap``.

Keys may come and go between the pages of a snapshot. Whoever notes the position of the first page and
applies all events after it, in order, ends with the right keys: of each key the last event counts,
and without one the page that it was found on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharedmirror.errors import PoolNotFound, ProtocolError
from sharedmirrord.core import arguments as arg
from sharedmirrord.core.leases import table_of
from sharedmirrord.core.model import State
from sharedmirrord.core.sessions import pool_named

LIMIT = 4096
MAX_LIMIT = 8192
"""Keys in one answer, of the snapshot and of the events each: far below a frame, and a few ms of work."""


def watch(state: State, arguments: Mapping[str, Any], instance: str, epoch: int) -> dict[str, Any]:
    """Answer one ``watch``; ``instance`` and ``epoch`` are the daemon's.

    ``since`` asks for the events after a position, ``cursor`` (or no ``since``) for a page of the
    snapshot, both for both. ``position`` is where the events of this answer end, ``newest`` the
    sequence as of this answer. Raises PoolNotFound, PoolMismatch (which tag?) and WrongPoolKind.
    """
    name, tag = arg.text(arguments, "pool"), arg.optional_text(arguments, "tag")
    since = _position(arguments.get("since"))
    cursor = arg.optional_integer(arguments, "cursor", 0, 1 << 32)
    limit = LIMIT if arguments.get("limit") is None else arg.integer(arguments, "limit", 1, MAX_LIMIT)
    pool = pool_named(state, name, tag)
    if not pool.ready:
        raise PoolNotFound(f"pool {name!r} is not ready: not all workers of its engine have attached", pool=name)
    table = table_of(pool)
    log = table.changes
    here = [instance, epoch, pool.id]
    answer: dict[str, Any] = {"tag": pool.tag, "gap": False, "newest": log.sequence}
    sequence = log.sequence
    if since is not None:
        runs = log.since(since[3], limit) if since[:3] == here else None
        if runs is None:
            return answer | {"gap": True, "position": [*here, log.sequence]}
        sequence = runs[-1][2] if runs else since[3]
        answer["events"] = runs
    if since is None or cursor is not None:
        answer["keys"], answer["cursor"] = table.readable(cursor or 0, limit)
    return answer | {"position": [*here, sequence]}


def _position(value: Any) -> list[Any] | None:
    if value is None:
        return None
    if not (
        isinstance(value, list)
        and len(value) == 4
        and isinstance(value[0], str)
        and all(type(number) is int and number >= 0 for number in value[1:])
    ):
        raise ProtocolError("since must be a position that an earlier answer gave: [instance, epoch, pool, sequence]")
    return value
