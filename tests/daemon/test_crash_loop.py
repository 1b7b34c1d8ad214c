"""The crash loop, for a short while: everything is killed and stopped at random, and no byte is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_loop.py"
SECONDS = 25
PATIENCE_S = 110
ROUNDS = 3
EXPECTED = [
    "kills of a daemon", "kills of a worker", "kills of a scheduler", "operations", "pages sealed", "pages verified",
    "pages audited", "pages granted again after a death",
]  # fmt: skip


@pytest.mark.timeout(ROUNDS * PATIENCE_S + 10)
def test_the_crash_loop_finds_no_violation() -> None:
    counts = dict.fromkeys(EXPECTED, 0)
    # On a busy machine less happens in one round; what is expected must have happened in all of them together.
    for _ in range(ROUNDS):
        output = crash_loop()
        for name, number in re.findall(r"^(.*?) +(\d+)$", output, re.MULTILINE):
            counts[name] = counts.get(name, 0) + int(number)
        if all(counts[name] for name in EXPECTED):
            return
    pytest.fail(f"not all of {EXPECTED} happened: {counts}")


def crash_loop() -> str:
    """Run it once, without a violation; return what it printed."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--minutes", str(SECONDS / 60)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        # Whatever a failed run leaves belongs to its process group.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert process.returncode == 0 and output.splitlines()[-1] == "0 violations", output
    return output
