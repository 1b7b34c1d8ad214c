"""Renders the daemon's status map as rich tables. Pure: a map in, renderables out.

The map may come from a daemon of another release, so a field that is missing shows as "-". All of it fits
into 80 columns. The map's fields are documented in ``sharedmirror.cli``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Map = Mapping[str, Any]

MISSING = "-"
_STATE_STYLES = {
    "ready": "green",
    "attached": "green",
    "forming": "yellow",
    "prefaulting": "yellow",
    "waiting": "yellow",
    "stopping": "yellow",
    "lost": "red",
    "dead": "red",
    "died": "red",
}


def render(status: Map) -> list[RenderableType]:
    """Return what shows ``status``, from top to bottom; parts with nothing to show are left out."""
    pools = _maps(status, "pools")
    names = {pool.get("id"): str(pool.get("name")) for pool in pools}
    sessions = _maps(status, "sessions")
    parts: list[RenderableType | None] = [
        _daemon(_map(status, "daemon"), _map(status, "arena")),
        _pools(pools),
        _pages(pools),
        _engines(pools),
        _sessions(sessions, names),
        _leases(sessions),
        _ended(_maps(status, "ended"), names),
        _quarantine(_maps(status, "quarantine"), names),
        *_alarms(_maps(status, "alarms")),
    ]
    return [part for part in parts if part is not None]


def _daemon(daemon: Map, arena: Map) -> RenderableType:
    grid = _table("Daemon", "", "", header=False)
    rows: dict[str, str | Text] = {
        "version": f"{_of(daemon, 'version')}, pid {_of(daemon, 'pid')}, {_of(daemon, 'socket')}",
        "state": _state(daemon.get("state")),
        "instance": f"{_of(daemon, 'instance')}, epoch {_of(daemon, 'epoch')}, up {duration(daemon.get('uptime_s'))}",
        "arena": (
            f"{size(arena.get('bytes_ready'))} ready of {size(arena.get('bytes_total'))}, "
            f"{size(arena.get('bytes_allocated'))} in pools, {size(arena.get('bytes_free'))} free"
        ),
        "memory": (
            f"huge pages {share(daemon.get('huge_page_share'))}, pin {_of(daemon, 'pin')} "
            f"({size(daemon.get('pinned_bytes'))}), resident {size(daemon.get('rss_bytes'))}"
        ),
        "on exit": _on_exit(daemon.get("keep")),
    }
    for name, value in rows.items():
        _add_row(grid, name, value)
    return grid


def _on_exit(keep: object) -> str:
    if keep is None:
        return MISSING
    return "keeps the arena" if keep else "unlinks the arena"


def _pools(pools: list[Map]) -> RenderableType | None:
    table = _table("Pools", "pool", "tag", "kind", "layout", "pages", "bytes a page", "state", "ranks attached")
    for pool in pools:
        attached = _map(pool, "ranks_attached")
        ranks = [f"{engine}: {_numbers(held)} of {_of(pool, 'world_size')}" for engine, held in attached.items()]
        rows = f"{_of(pool, 'page_size')} rows, {_of(pool, 'frames_per_page')} fr."
        if pool.get("bytes_saved_per_host_page"):
            rows += f"\n{size(pool['bytes_saved_per_host_page'])} spared"
        _add_row(
            table,
            f"{_of(pool, 'name')}\nid {_of(pool, 'id')}.{_of(pool, 'number')}",
            _of(pool, "tag"),
            _of(pool, "kind"),
            _of(pool, "layout"),
            _backed(pool),
            f"{size(pool.get('bytes_per_host_page'))}\n{rows}",
            _state(pool.get("state")),
            "\n".join(ranks) or MISSING,
        )
    return table if pools else None


def _backed(pool: Map) -> str:
    """Return how many pages a pool has, and between which bounds where it grows and shrinks."""
    least, most, backed = (pool.get(name) for name in ("min_host_pages", "num_host_pages", "backed_pages"))
    if least is None or least == most:
        return _count(most)
    text = f"{_count(backed)}\n{_count(least)} to\n{_count(most)}"
    if pool.get("giving_back_pages"):
        text += f"\n-{_count(pool['giving_back_pages'])}"
    if pool.get("giving_back_awaits"):
        text += f"\nawaits {_numbers(pool['giving_back_awaits'])}"
    return text


def _pages(pools: list[Map]) -> RenderableType | None:
    states = ("reserved", "free", "leased", "sealed", "pinned", "quarantined")
    headings = ("pool", "resv.", "free", "leased", "sealed", "pinned", "quar.", "hits", "misses", "evicted")
    table = _table("Pages", *headings, numbers_from=1)
    for pool in pools:
        pages = _map(pool, "pages")
        counts = [pages.get(state) for state in states]
        totals = [pool.get(total) for total in ("hits", "misses", "evictions")]
        _add_row(table, _of(pool, "name"), *map(_count, counts + totals))
    return table if pools else None


def _engines(pools: list[Map]) -> RenderableType | None:
    table = _table("Engines", "pool", "engine", "pages", "fair share", "held", "may hold", numbers_from=2)
    for pool in pools:
        for engine, has in _map(pool, "engines").items():
            counts = [_map({"has": has}, "has").get(name) for name in ("owned", "share", "held", "max_held")]
            _add_row(table, _of(pool, "name"), str(engine), *map(_count, counts))
    return table if table.row_count else None


def _sessions(sessions: list[Map], names: Mapping[Any, str]) -> RenderableType | None:
    table = _table("Sessions", "id", "pid", "uid", "engine", "role", "pool", "state", "age", "leases", "pins")
    for session in sessions:
        _add_row(
            table,
            _of(session, "id"),
            _of(session, "pid"),
            _of(session, "uid"),
            _of(session, "engine"),
            _role(session),
            _pool(session, names),
            _evidence(session),
            duration(session.get("age_s")),
            _count(len(_maps(session, "leases"))),
            _count(session.get("pins")),
        )
    return table if sessions else None


def _leases(sessions: list[Map]) -> RenderableType | None:
    table = _table("Leases", "lease", "session", "pages", "age", "ranks missing", "state")
    for session in sessions:
        for lease in _maps(session, "leases"):
            pages = lease.get("pages")
            _add_row(
                table,
                _of(lease, "id"),
                _of(session, "id"),
                _count(len(pages) if isinstance(pages, (list, tuple)) else pages),
                duration(lease.get("age_s")),
                _numbers(lease.get("missing_ranks")),
                "revoked" if lease.get("revoked") else "open",
            )
    return table if table.row_count else None


def _ended(ended: list[Map], names: Mapping[Any, str]) -> RenderableType | None:
    table = _table("Ended sessions", "id", "pid", "engine", "role", "pool", "how", "ago")
    for session in ended:
        _add_row(
            table,
            _of(session, "id"),
            _of(session, "pid"),
            _of(session, "engine"),
            _role(session),
            _pool(session, names),
            _state(session.get("how")),
            duration(session.get("ago_s")),
        )
    return table if ended else None


def _quarantine(quarantine: list[Map], names: Mapping[Any, str]) -> RenderableType | None:
    table = _table("Quarantine", "pool", "lease", "pages", "session", "pid", "evidence missing", "held by")
    for entry in quarantine:
        _add_row(
            table,
            _pool(entry, names),
            _of(entry, "lease"),
            _count(entry.get("pages")),
            _of(entry, "session"),
            _of(entry, "pid"),
            ", ".join(map(str, entry.get("missing") or [])) or MISSING,
            _numbers(entry.get("holders")),
        )
    return table if quarantine else None


def _alarms(alarms: list[Map]) -> list[RenderableType]:
    return [
        Text.assemble(("alarm ", "bold red"), (_of(alarm, "code"), "bold"), _printable(f": {_of(alarm, 'message')}"))
        for alarm in alarms
    ]


def _evidence(session: Map) -> Text:
    text = _state(session.get("state"))
    if session.get("missing"):
        text.append("\nno proof: " + ", ".join(map(str, session["missing"])), style="red")
    if session.get("holders"):
        text.append("\nheld by " + _numbers(session["holders"]), style="red")
    return text


def _role(session: Map) -> str:
    rank = session.get("rank")
    return _of(session, "role") if rank is None else f"{_of(session, 'role')} {rank}"


def _pool(entry: Map, names: Mapping[Any, str]) -> str:
    pool = entry.get("pool")
    return MISSING if pool is None or pool == "" else names.get(pool, str(pool))


def _table(title: str, *headings: str, header: bool = True, numbers_from: int | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=header)
    for index, heading in enumerate(headings):
        is_number = numbers_from is not None and index >= numbers_from
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    table.padding = (0, 1, 0, 0)
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    # Names are chosen by clients: as Text they are no markup, and without control characters no terminal commands.
    table.add_row(*(cell if isinstance(cell, Text) else Text(_printable(cell)) for cell in cells))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _state(state: object) -> Text:
    return Text(MISSING if state is None else _printable(str(state)), style=_STATE_STYLES.get(str(state), ""))


def _map(status: Map, name: str) -> Map:
    value = status.get(name)
    return value if isinstance(value, Mapping) else {}


def _maps(status: Map, name: str) -> list[Map]:
    value = status.get(name)
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, Iterable) else []


def _of(entry: Map, name: str) -> str:
    value = entry.get(name)
    return MISSING if value is None or value == "" else str(value)


def _numbers(numbers: Iterable[object] | None) -> str:
    return ", ".join(map(str, numbers or [])) or MISSING


def _count(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else MISSING


def size(size_bytes: object) -> str:
    """Return bytes in the largest binary unit that leaves at least 1, such as ``1.5 GiB``."""
    if not isinstance(size_bytes, (int, float)):
        return MISSING
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if amount.is_integer() else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def duration(seconds: object) -> str:
    """Return seconds as people say them: ``12 s``, ``3 min``, ``5 h 20 min``, ``4 d 2 h``."""
    if not isinstance(seconds, (int, float)):
        return MISSING
    minutes = int(seconds) // 60
    if seconds < 10:
        return f"{seconds:.1f} s"
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes // 60 % 24} h"


def share(part: object) -> str:
    """Return a share between 0 and 1 as percent."""
    return f"{part:.0%}" if isinstance(part, (int, float)) else MISSING
