"""Failpoints: how they are written and what they do."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from sharedmirror.errors import MemoryFault, UsageError
from sharedmirrord import failpoints

SCRIPT = """
from sharedmirrord import failpoints
failpoints.arm()
for number in range(5):
    print(number, flush=True)
    failpoints.reach("here")
    failpoints.reach("elsewhere")
"""


def run(text: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={failpoints.VARIABLE: text}, capture_output=True, text=True, timeout=20
    )
    return result.returncode, result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, "01234"),
        ("there=kill", 0, "01234"),
        ("here=kill", -9, "0"),
        ("there=kill,here=kill:3", -9, "012"),
        ("here=kill:6", 0, "01234"),
    ],
)
def test_kill_is_at_the_named_place_and_time(text: str, code: int, said: str) -> None:
    assert run(text) == (code, said)


def test_error_is_raised_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("a=error:2,b=error"))
    for _ in range(2):
        with pytest.raises(MemoryFault, match="the failpoint a was reached"):
            failpoints.reach("a")
    failpoints.reach("a")
    for _ in range(5):
        with pytest.raises(MemoryFault):
            failpoints.reach("b")


def test_sleep_sleeps_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("a=sleep:0.25"))
    failpoints.reach("a")
    failpoints.reach("b")
    failpoints.reach("a")
    assert slept == [0.25, 0.25]


@pytest.mark.parametrize("text", ["a", "a=", "a=die", "a=kill:x", "a=sleep", "a=sleep:", "a=die:3"])
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=f"SHAREDMIRROR_FAILPOINTS holds '{text}'"):
        failpoints.parse(f"b=kill,{text}")
