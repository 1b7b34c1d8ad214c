"""Real daemons and real client processes for the tests, and the check that they leave nothing behind.

A test asks for ``daemon`` (its own), ``shared_daemon`` (one for a module) or ``start`` (a daemon with
other arguments), and for ``processes`` to get workers. At the end no process, descriptor, thread or
segment may be left, and no daemon may have logged a traceback.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sharedmirror import errors
from sharedmirror.channel import Channel
from sharedmirror.types import Lease, Role

PATIENCE_S = 20.0
"""How long anything may take before a test gives up; nothing is asserted about time."""
PAUSE_S = 0.01
MARK = "SHAREDMIRROR_TEST_MARK"
WORKER = str(Path(__file__).with_name("worker_process.py"))


def until(condition: Callable[[], Any], what: str = "", patience_s: float = PATIENCE_S) -> Any:
    """Ask ``condition`` again until it is true, and return what it said."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not so after {patience_s:g} s: {what or condition}; last answer {found!r}")
        time.sleep(PAUSE_S)
    return found


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def marked(mark: str) -> list[int]:
    """Return the processes that were started under a test's mark, their children among them."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes() + b"\0":
                    found.append(int(entry))
    return found


class Daemon:
    """A running ``sharedmirrord``."""

    def __init__(self, socket: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.socket = socket
        self.process = process
        self.pid = process.pid
        self.leaves_segments = False
        """Set by a test that kills the daemon or makes it keep its segments."""
        self._log = log
        self._instance = ""

    def log(self) -> str:
        return self._log.read_text()

    def status(self) -> dict[str, Any]:
        with Channel.open(self.socket, role=Role.OBSERVER) as channel:
            status: dict[str, Any] = channel.call("status")["status"]
        self._instance = status["daemon"]["instance"]
        return status

    def wait_state(self, state: str) -> None:
        def reached() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"the daemon ended with {self.process.returncode}: {self.log()}")
            with contextlib.suppress(errors.DaemonUnavailable):
                return bool(self.status()["daemon"]["state"] == state)
            return False

        until(reached, f"state {state}")

    def wait_status(self, condition: Callable[[dict[str, Any]], Any], what: str = "") -> dict[str, Any]:
        """Return the first status of which ``condition`` holds."""
        seen: dict[str, Any] = {}

        def holds() -> Any:
            seen.clear()
            seen.update(self.status())
            return condition(seen)

        until(holds, what)
        return seen

    def pool(self, name: str) -> dict[str, Any]:
        (pool,) = [pool for pool in self.status()["pools"] if pool["name"] == name]
        return dict(pool)

    def wait_pages(self, name: str, **counts: int) -> None:
        """Wait until the pool's page counts are these."""
        until(lambda: counts.items() <= self.pool(name)["pages"].items(), f"{counts} in {name}")

    def segments(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if self._instance and self._instance[:12] in name]

    def session_files(self) -> list[str]:
        """Return the names of the files that prove sessions' ends."""
        return sorted(path.name for path in Path(f"{self.socket}.sessions").rglob("*") if path.is_file())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.leaves_segments = bool(self.end(signal.SIGKILL))

    def finish(self) -> None:
        """Stop, clean up, then complain about what should not be there."""
        if not self._instance:
            with contextlib.suppress(errors.SharedMirrorError):
                self.status()
        killed = self.process.poll() is not None
        code = self.end()
        left = self.segments()
        for name in left:
            os.unlink(f"/dev/shm/{name}")
        assert "Traceback" not in self.log(), self.log()
        assert killed or code == 0, self.log()
        assert self.leaves_segments or left == []


class Starter:
    """Starts daemons and stops them."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="smt-"))
        self.mark = secrets.token_hex(8)
        self.daemons: list[Daemon] = []

    def path(self, name: str = "d.sock") -> str:
        return str(self.directory / name)

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHAREDMIRROR_", "NOTIFY"))}
        return kept | {MARK: self.mark} | changes

    def __call__(
        self,
        *arguments: str,
        memory: str = "32MiB",
        pin: str = "none",
        socket: str | None = None,
        state: str | None = "ready",
        before: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> Daemon:
        """Start a daemon and wait for ``state``; ``before`` is a command line in front of the interpreter's."""
        path = socket or self.path()
        log = self.directory / f"log{len(self.daemons)}"
        line = [*before, sys.executable, "-m", "sharedmirrord", "--memory", memory, "--pin", pin, "--socket", path]
        line += arguments
        with open(log, "wb") as stderr:
            process = subprocess.Popen(line, stderr=stderr, env=self.environment(**(environment or {})))
        daemon = Daemon(path, process, log)
        self.daemons.append(daemon)
        if state is not None:
            daemon.wait_state(state)
        return daemon

    def run(self, *arguments: str, before: Sequence[str] = (), **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a daemon that is expected to refuse, to its end."""
        return subprocess.run(
            [*before, sys.executable, "-m", "sharedmirrord", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=self.environment(COLUMNS="300", **changes),
        )

    def finish(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                for daemon in self.daemons:
                    stack.callback(daemon.finish)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


class Worker:
    """A real client process; see ``worker_process.py``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.forks: list[int] = []
        self.reply: dict[str, Any] = {}
        self._buffer = b""
        self.hello = self.answer()
        """``{"session": n}``, or ``{"error": ...}`` if the daemon refused."""

    def send(self, do: str, **arguments: Any) -> None:
        def to_json(value: object) -> object:
            assert isinstance(value, bytes)
            return {"hex": value.hex()}

        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}, default=to_json).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the next answer; fails when none comes."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail("the worker does not answer")
            data = os.read(fd, 1 << 16)
            if not data:
                pytest.fail(f"the worker ended: {self.process.wait(PATIENCE_S)}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        body: dict[str, Any] = json.loads(line, object_hook=lambda m: bytes.fromhex(m["hex"]) if "hex" in m else m)
        return body

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the process do something; raises the typed error that it got."""
        self.send(do, **arguments)
        return self.result()

    def result(self) -> dict[str, Any]:
        body = self.answer()
        if "error" in body:
            raise errors.from_wire(body["error"])
        return body

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        return dict(self.ask("call", op=op, arguments=arguments)["body"])

    def commit(self, lease: Lease, pages: list[int] | None = None) -> dict[str, Any]:
        """Commit a lease that travels pickled."""
        return dict(self.ask("commit", pickled=pickle.dumps(lease), pages=pages)["body"])

    def attach(self, **changes: Any) -> dict[str, Any]:
        self.send_attach(**changes)
        self.reply = self.result()["body"]
        return self.reply

    def send_attach(self, **changes: Any) -> None:
        arguments = {
            "pool": "default", "tag": "", "engine": "0", "launch": None, "rank": 0, "world_size": 1, "page_size": 16,
            "frames_per_page": 1, "kind": "leased", "layout": "page", "num_host_pages": 9, "wait_s": PATIENCE_S,
        } | changes  # fmt: skip
        arguments.setdefault("planes", [["k0", arguments["rank"], max(1, arguments["world_size"]), 4096, 16]])
        self.send("call", op="attach", arguments=arguments)

    def pushes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("pushes")["pushes"]
        return found

    def fork(self, kind: str) -> int:
        self.forks.append(int(self.ask("fork", kind=kind)["pid"]))
        return self.forks[-1]

    def kill(self) -> None:
        """SIGKILL; returns when the process is reaped."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end_fork(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not exists(pid), f"fork {pid} ends")

    def finish(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        for pid in self.forks:
            self.end_fork(pid)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.kill()


class Processes:
    """Starts client processes and ends them."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.workers: list[Worker] = []

    def worker(self, socket: str, role: str = "worker", uid: int | None = None) -> Worker:
        line = [sys.executable, WORKER, socket, role, *([] if uid is None else [str(uid)])]
        process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, MARK: self.mark}
        )
        self.workers.append(Worker(process))
        return self.workers[-1]

    def engine(self, socket: str, world_size: int = 1, answers: bool = False, **attach: Any) -> list[Worker]:
        """Return the attached ranks of an engine; with ``answers`` they drain at once what is revoked or released."""
        workers = [self.worker(socket) for _ in range(world_size)]
        for rank, worker in enumerate(workers):
            worker.send_attach(rank=rank, world_size=world_size, **attach)
        for worker in workers:
            worker.reply = worker.result()["body"]
            if answers:
                worker.ask("answer_pushes")
        return workers

    def finish(self) -> None:
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.callback(worker.finish)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Assert that the test leaves this process as it was: descriptors and threads."""
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) - threads == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _starter() -> Iterator[Starter]:
    starter = Starter()
    try:
        yield starter
    finally:
        starter.finish()
    assert marked(starter.mark) == []


@pytest.fixture
def start(nothing_left: None) -> Iterator[Starter]:
    """Start daemons: ``start(*arguments, memory=..., ...)``; a ``Starter``."""
    yield from _starter()


@pytest.fixture
def daemon(start: Starter) -> Daemon:
    """A daemon with a small memory, ready."""
    return start()


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for a module's tests that do it no harm; each test uses a pool name of its own."""
    for starter in _starter():
        yield starter(memory="256MiB")


@pytest.fixture
def processes(start: Starter) -> Iterator[Processes]:
    """Start workers and other client processes; they end before the daemons do."""
    processes = Processes(secrets.token_hex(8))
    try:
        yield processes
    finally:
        processes.finish()
    until(lambda: marked(processes.mark) == [], "no process is left")


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """The function ``until``: ask again until it is so."""
    return until
