"""The status view shows every field of the map, at 80 columns, and survives a map of another release."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sharedmirror import status_view

SAMPLE: dict[str, Any] = {
    "schema": 1,
    "daemon": {
        "version": "0.1.0",
        "pid": 4211,
        "instance": "9f31c07a5512",
        "epoch": 7,
        "uptime_s": 19_260.4,
        "socket": "/run/sharedmirror/daemon.sock",
        "state": "prefaulting",
        "pin": "mlock",
        "pinned_bytes": 3 << 30,
        "huge_page_share": 0.75,
        "keep": True,
        "rss_bytes": 50 << 20,
    },
    "arena": {
        "bytes_total": 64 << 30,
        "bytes_ready": 48 << 30,
        "bytes_allocated": 20 << 30,
        "bytes_free": 44 << 30,
    },
    "pools": [
        {
            "id": 2,
            "name": "llama",
            "tag": "fp8-v1",
            "kind": "leased",
            "layout": "page",
            "page_size": 64,
            "frames_per_page": 3,
            "world_size": 4,
            "num_host_pages": 1_120,
            "bytes_per_host_page": 4_500_000,
            "state": "forming",
            "ranks_attached": {"eng-a": [0, 1, 2], "eng-b": [3]},
            "pages": {"reserved": 1, "free": 611, "leased": 222, "sealed": 284, "pinned": 33, "quarantined": 2},
            "hits": 5_151,
            "misses": 6_262,
            "evictions": 7_373,
            "number": 9,
            "engines": {"eng-c": {"owned": 408, "held": 199, "max_held": 205, "share": 559}},
        }
    ],
    "sessions": [
        {
            "id": 31,
            "pid": 5001,
            "uid": 1000,
            "engine": "eng-a",
            "role": "worker",
            "rank": 2,
            "pool": 2,
            "state": "lost",
            "age_s": 75.2,
            "missing": ["lock"],
            "holders": [5077],
            "leases": [{"id": 88, "pages": 222, "age_s": 600.0, "missing_ranks": [1, 3], "revoked": True}],
            "pins": 33,
        },
        {
            "id": 32,
            "pid": 5002,
            "uid": 0,
            "engine": "eng-a",
            "role": "scheduler",
            "rank": None,
            "pool": 2,
            "state": "attached",
            "age_s": 3.0,
            "missing": [],
            "holders": [],
            "leases": [],
            "pins": 0,
        },
    ],
    "ended": [
        {
            "id": 12,
            "pid": 4999,
            "engine": "eng-z",
            "role": "worker",
            "rank": 1,
            "pool": 2,
            "how": "died",
            "ago_s": 200_000.0,
        }
    ],
    "quarantine": [
        {"pool": 2, "lease": 77, "pages": 2, "session": 13, "pid": 4998, "missing": ["socket"], "holders": [6006, 6007]}
    ],
    "alarms": [{"code": "old_lease", "message": "lease 88 is 600 s old; ranks 1, 3 have not committed"}],
}


def shown(status: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in status_view.render(status):
        console.print(part)
    return out.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "0.1.0", "4211", "/run/sharedmirror/daemon.sock", "prefaulting", "9f31c07a5512", "epoch 7", "5 h 21 min",
        "48 GiB ready of 64 GiB", "20 GiB in pools", "44 GiB free", "huge pages 75%", "pin mlock (3 GiB)",
        "resident 50 MiB", "keeps the arena",
        "llama", "id 2.9", "fp8-v1", "leased", "page", "1,120", "4.3 MiB", "64 rows, 3 fr.", "forming",
        "eng-a: 0, 1, 2 of 4", "eng-b: 3 of 4", "611", "222", "284", "33", "5,151", "6,262", "7,373",
        "5001", "1000", "worker 2", "lost", "75 s", "no proof: lock", "held by 5077", "scheduler", "3.0 s",
        "88", "10 min", "1, 3", "revoked",
        "4999", "eng-z", "worker 1", "died", "2 d 7 h",
        "eng-c", "408", "199", "205", "559",
        "77", "4998", "socket", "6006, 6007",
        "alarm old_lease: lease 88 is 600 s old",
    ],
)  # fmt: skip
def test_every_field_is_shown(text: str) -> None:
    # On a wide terminal, since at 80 columns a cell may wrap.
    assert text in shown(SAMPLE, width=160)


def test_pools_sessions_and_quarantine_keep_their_rows_apart() -> None:
    lines = shown(SAMPLE, width=160).splitlines()
    pages = next(line for line in lines if "611" in line)
    assert pages.split() == ["llama", "1", "611", "222", "284", "33", "2", "5,151", "6,262", "7,373"]
    quarantined = next(line for line in lines if "6006" in line)
    assert quarantined.split() == ["llama", "77", "2", "13", "4998", "socket", "6006,", "6007"]


def test_it_fits_into_80_columns_without_cutting_a_number() -> None:
    text = shown(SAMPLE)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for whole in ("5,151", "6,262", "7,373", "5001", "5002", "1,120", "quar."):
        assert whole in text


def test_an_empty_daemon_shows_no_empty_tables() -> None:
    text = shown({**SAMPLE, "pools": [], "sessions": [], "ended": [], "quarantine": [], "alarms": []})
    assert "Daemon" in text
    for title in ("Pools", "Pages", "Engines", "Sessions", "Leases", "Ended", "Quarantine", "alarm"):
        assert title not in text


@pytest.mark.parametrize("status", [{}, {"daemon": None, "pools": [{}], "sessions": [{"leases": [{}]}], "ended": [{}]}])
def test_missing_fields_show_as_a_dash(status: dict[str, Any]) -> None:
    assert "-" in shown(status)


def test_markup_in_a_name_is_shown_as_it_is() -> None:
    pool = {**SAMPLE["pools"][0], "name": "[red]x[/red]", "tag": "[/]"}
    text = shown({**SAMPLE, "pools": [pool]}, width=160)
    assert "[red]x[/red]" in text
    assert "[/]" in text


def test_a_name_cannot_command_the_terminal() -> None:
    session = {**SAMPLE["sessions"][0], "engine": "a\x1b[2Jb"}
    text = shown({**SAMPLE, "sessions": [session]}, width=160)
    assert "\x1b" not in text
    assert "a?[2Jb" in text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB"), (None, "-")],
)
def test_sizes(size_bytes: int | None, text: str) -> None:
    assert status_view.size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (119, "119 s"),
        (120, "2 min"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
        (None, "-"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert status_view.duration(seconds) == text


def test_a_pool_that_grows_and_shrinks_shows_how_far_it_is() -> None:
    changes = {"min_host_pages": 64, "backed_pages": 512, "giving_back_pages": 32, "giving_back_awaits": [4711]}
    text = shown({**SAMPLE, "pools": [SAMPLE["pools"][0] | changes]}, width=160)
    for word in ("512", "64 to", "1,120", "-32", "awaits 4711"):
        assert word in text
    fixed = {"min_host_pages": 1_120, "backed_pages": 1_120, "giving_back_pages": 0, "giving_back_awaits": []}
    text = shown({**SAMPLE, "pools": [SAMPLE["pools"][0] | fixed]}, width=160)
    assert "1,120" in text and "1,120 to" not in text
