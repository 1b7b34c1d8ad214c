"""The daemon of the demo: ``sharedmirrord`` as a process of its own, on a socket in a temporary folder."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from sharedmirror.channel import Channel
from sharedmirror.demo.processes import DemoFailure, end, launched
from sharedmirror.errors import DaemonUnavailable
from sharedmirror.types import Role

READY_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 10.0
INSTANCE_DIGITS = 12
"""How much of the instance is in the names of its shared memory objects."""


class Daemon:
    """A running daemon with ``memory`` of arena. A context manager; its log is kept in ``folder``."""

    def __init__(self, folder: Path, memory: str) -> None:
        self.socket = str(folder / "daemon.sock")
        self._memory = memory
        self._log = folder / "daemon.log"
        self._mark = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Daemon:
        arguments = ["--memory", self._memory, "--socket", self.socket, "--pin", "mlock"]
        with ExitStack() as stack:
            log = stack.enter_context(self._log.open("wb"))
            self._process = launched(
                stack, [sys.executable, "-m", "sharedmirrord", *arguments], patience_s=EXIT_TIMEOUT_S, stderr=log
            )
            self._wait_until_ready(self._process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        if self._process is None:
            raise DemoFailure("the daemon was not started")
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """Return the daemon's status map."""
        with Channel.open(self.socket, role=Role.OBSERVER) as channel:
            status: dict[str, Any] = channel.call("status")["status"]
        return status

    def segments(self) -> list[str]:
        """Return the names of this daemon's shared memory objects that are in /dev/shm."""
        return [path.name for path in Path("/dev/shm").iterdir() if self._mark and self._mark in path.name]

    def stop(self) -> int:
        """End the daemon with SIGTERM; return its exit code."""
        if self._process is None:
            raise DemoFailure("the daemon was not started")
        end(self._process, EXIT_TIMEOUT_S)
        return self._process.returncode

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise DemoFailure(f"the daemon ended with exit code {process.returncode}:\n{self._log.read_text()}")
            try:
                daemon = self.status()["daemon"]
                self._mark = daemon["instance"][:INSTANCE_DIGITS]
                if daemon["state"] == "ready":
                    return
            except DaemonUnavailable:
                pass
            time.sleep(0.02)
        raise DemoFailure(f"the daemon was not ready within {READY_TIMEOUT_S:.0f} s:\n{self._log.read_text()}")
