"""Kills and stops a daemon, four workers and two schedulers at random while they work, and counts violations.

``crash-loop --minutes M --seed S``. Two engines of two ranks share a pool so small that it evicts all
the time. Besides SIGKILL from outside the daemon dies at failpoints, in its recovery too, and workers
die with ghosts (see ``crash_worker``). At the end nobody is killed any more: every readable page is
verified once again, and no page may be left leased, quarantined or pinned.

The last line is "N violations"; the exit code is 1 if N is not 0.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Client as Dial
from typing import Any

import torch
from crash_scheduler import Scheduler
from crash_stage import ENGINES, HOST_PAGES, PATIENCE_S, RANKS, Stage
from crash_worker import Worker

from sharedmirror.channel import Channel
from sharedmirror.errors import SharedMirrorError
from sharedmirror.types import Role

ACTION_EVERY_S = (1.2, 3.4)
"""Between two things done to a role: with two kills out of three about 170 kills in ten minutes."""
STOP_S = (0.05, 1.5)
FAILPOINTS = [
    "records.commit", "records.appended", "records.committed", "records.checkpoint", "records.turned", "reply.before",
    "reply.after", "hello.before", "hello.after", "resume.before", "resume.sent", "forget.before", "forget.after",
]  # fmt: skip
RECOVERY_FAILPOINTS = ["adopt.recovered", "adopt.arena", "adopt.epoch"]
ROLES = ("daemon", "worker", "scheduler")


@dataclass
class Actor:
    """One of the processes, and how to start it again."""

    role: str
    engine: int = 0
    rank: int = 0
    pid: int = 0
    starts: int = 0
    continue_at: float | None = None

    @property
    def name(self) -> str:
        return self.role if self.role == "daemon" else f"{self.role} {self.engine}.{self.rank}"


def play(stage: Stage, role: str, engine: int, rank: int, seed: str) -> int:
    """Be a worker or a scheduler until killed or stopped; returns the exit code."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        if role == "worker":
            Worker(stage, engine, rank, seed).serve()
        else:
            Scheduler(stage, engine, seed).run()
    except Exception as error:
        stage.violation(f"{role} {engine}.{rank} ended: {type(error).__name__}: {error}")
        return 1
    return 0


class Loop:
    """Starts everything, does harm, keeps the score."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.directory = tempfile.mkdtemp(prefix="crash-")
        self.log_path = os.path.join(self.directory, "daemon.log")
        self.reports, write = os.pipe()
        os.set_blocking(self.reports, False)
        os.set_inheritable(write, True)
        self.stage = Stage(self.directory, os.path.join(self.directory, "d.sock"), write)
        self.daemon = Actor("daemon")
        workers = [Actor("worker", engine, rank) for engine in range(ENGINES) for rank in range(RANKS)]
        self.actors = [self.daemon, *workers, *(Actor("scheduler", engine) for engine in range(ENGINES))]
        self.counts: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self.grants: set[tuple[int, int]] = set()
        self.latest: dict[int, int] = {}
        """The generation of each page's last grant."""
        self.open: dict[int, tuple[int, set[int]]] = {}
        """Leases under way: engine and pages."""
        self.bereft: set[int] = set()
        """Pages whose lease was under way when a process of its engine died."""
        self.instance = ""
        self.evictions = (0, 0)
        """Epoch of the daemon and what it had evicted when it was last asked; it counts from each start."""
        self.harm = True
        self._buffer = b""

    # -- processes -------------------------------------------------------------------------------

    def start(self, actor: Actor) -> None:
        actor.starts += 1
        actor.continue_at = None
        if actor is self.daemon:
            actor.pid = self._start_daemon()
            return
        seed = f"{self.seed}/{actor.name}/{actor.starts}"
        sys.stdout.flush()
        actor.pid = os.fork()
        if actor.pid == 0:
            code = 1
            try:
                os.close(self.reports)
                code = play(self.stage, actor.role, actor.engine, actor.rank, seed)
            finally:
                os._exit(code)

    def _start_daemon(self) -> int:
        environment = dict(os.environ)
        failpoint = ""
        if self.harm and self.daemon.starts > 1 and self.random.random() < 0.5:
            failpoint = f"{self.random.choice(FAILPOINTS)}=kill:{self.random.choice([1, 2, 5, 20, 100])}"
            if self.random.random() < 0.3:
                failpoint = f"{self.random.choice(RECOVERY_FAILPOINTS)}=kill"
        environment["SHAREDMIRROR_FAILPOINTS"] = failpoint
        if self.harm and self.daemon.starts > 1 and self.random.random() < 0.3:
            time.sleep(self.random.uniform(0.2, 1.0))  # engines go on reading meanwhile
        line = [sys.executable, "-m", "sharedmirrord", "--memory", "16MiB", "--pin", "none"]
        with open(self.log_path, "ab") as log:
            process = subprocess.Popen([*line, "--socket", self.stage.socket], stderr=log, env=environment)
        process.returncode = 0  # reaped here, not there
        return process.pid

    def reap(self) -> None:
        """Take note of what ended, and start it again."""
        for actor in self.actors:
            if not actor.pid:
                continue
            pid, status = os.waitpid(actor.pid, os.WNOHANG)
            if not pid:
                continue
            actor.pid = 0
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and self.harm:
                self.counts[f"kills of a {actor.role}"] += 1
                self._bereave(actor)
            elif self.harm or status:
                self.violations.append(f"{actor.name} ended with {os.waitstatus_to_exitcode(status)}")
            if self.harm:
                self.start(actor)

    def _bereave(self, actor: Actor) -> None:
        if actor is not self.daemon:
            for engine, pages in self.open.values():
                if engine == actor.engine:
                    self.bereft |= pages
        if actor.role == "scheduler":
            self.open = {lease: held for lease, held in self.open.items() if held[0] != actor.engine}

    def hurt(self, role: str) -> None:
        victims = [actor for actor in self.actors if actor.role == role and actor.pid and actor.continue_at is None]
        if not victims:
            return
        victim = self.random.choice(victims)
        if self.random.random() < 0.65:
            if self.random.random() < 0.2:
                os.kill(victim.pid, signal.SIGSTOP)
            os.kill(victim.pid, signal.SIGKILL)
        else:
            os.kill(victim.pid, signal.SIGSTOP)
            victim.continue_at = time.monotonic() + self.random.uniform(*STOP_S)
            self.counts[f"stops of a {role}"] += 1

    def go_on(self, *, all: bool = False) -> None:
        for actor in self.actors:
            if actor.pid and actor.continue_at is not None and (all or actor.continue_at < time.monotonic()):
                os.kill(actor.pid, signal.SIGCONT)
                actor.continue_at = None

    # -- the score -------------------------------------------------------------------------------

    def listen(self, wait_s: float = 0.0) -> None:
        """Take the reports that are there."""
        if not select.select([self.reports], [], [], wait_s)[0]:
            return
        self._buffer += os.read(self.reports, 1 << 20)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, report: dict[str, Any]) -> None:
        self.counts.update(report.get("count", {}))
        if "violation" in report:
            self.violations.append(report["violation"])
            print(f"violation: {report['violation']}", flush=True)
        if "grant" in report:
            pages = {page for page, _ in report["grant"]}
            again = self.grants & set(map(tuple, report["grant"]))
            if again:
                self.violations.append(f"(page, generation) granted twice: {sorted(again)}")
            self.grants.update(map(tuple, report["grant"]))
            self.latest.update(report["grant"])
            self.counts["pages granted"] += len(pages)
            self.counts["pages granted again after a death"] += len(pages & self.bereft)
            self.bereft -= pages
            self.open[report["lease"]] = (report["engine"], pages)
        for page, generation in report.get("loaded", ()):
            # Told before the hit is released, as a grant is before a store: what is pinned is of its last grant.
            if generation and self.latest.get(page) != generation:
                self.violations.append(f"page {page} was loaded as of grant {generation}, not {self.latest.get(page)}")
        if "closed" in report:
            self.open.pop(report["closed"], None)

    def status(self) -> dict[str, Any] | None:
        try:
            with Channel.open(self.stage.socket, role=Role.OBSERVER, timeout_s=5) as channel:
                status: dict[str, Any] = channel.call("status")["status"]
        except SharedMirrorError:
            return None
        instance = status["daemon"]["instance"]
        if self.instance and instance != self.instance:
            self.violations.append(f"the arena was given up: instance {instance} came after {self.instance}")
        self.instance = instance
        for pool in status["pools"]:
            last = self.evictions[1] if self.evictions[0] == status["daemon"]["epoch"] else 0
            self.evictions = (status["daemon"]["epoch"], pool["evictions"])
            self.counts["evictions seen"] += pool["evictions"] - last
            pages = pool["pages"]
            if sum(pages.values()) - pages["pinned"] != HOST_PAGES:
                self.violations.append(f"the pages do not sum to {HOST_PAGES}: {pages}")
        return status

    # -- the story -------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.start(self.daemon)
        for actor in self.actors[1:]:
            self.start(actor)
        began = time.monotonic()
        due = {role: began + 2 + self.random.uniform(*ACTION_EVERY_S) for role in ROLES}
        next_status = began
        progress = (self.counts["operations"], began)
        while time.monotonic() < began + seconds and len(self.violations) < 20:
            self.listen(0.02)
            self.reap()
            self.go_on()
            now = time.monotonic()
            for role in ROLES:
                if now > due[role]:
                    self.hurt(role)
                    due[role] = now + self.random.uniform(*ACTION_EVERY_S)
            if now > next_status and self.daemon.continue_at is None:
                self.status()
                next_status = now + 0.5
            if self.counts["operations"] > progress[0]:
                progress = (self.counts["operations"], now)
            elif now > progress[1] + 60:
                self.violations.append("nothing was done for 60 s")
                break
        self._calm()
        self._finish()

    def _calm(self) -> None:
        """No more harm: everything that is dead comes back once, without failpoints."""
        self.go_on(all=True)
        with open(self.stage.calm_path, "x"):
            pass
        quiet = time.monotonic() + 1.0  # who is about to die has died by then
        while time.monotonic() < quiet:
            self.listen(0.05)
            self.reap()
        if self.daemon.pid:
            os.kill(self.daemon.pid, signal.SIGKILL)
            os.waitpid(self.daemon.pid, 0)
            self.counts["kills of a daemon"] += 1
        self.harm = False
        self.start(self.daemon)
        self._wait(lambda: self._all_there(), "all are there again")

    def _all_there(self) -> bool:
        status = self.status()
        if status is None or not status["pools"]:
            return False
        attached = [session for session in status["sessions"] if session["state"] == "attached"]
        return len(attached) == len(self.actors) - 1 and all(
            os.path.exists(self.stage.worker_path(a.engine, a.rank)) for a in self.actors if a.role == "worker"
        )

    def _finish(self) -> None:
        schedulers = [actor for actor in self.actors if actor.role == "scheduler"]
        for actor in schedulers:
            if actor.pid:
                os.kill(actor.pid, signal.SIGTERM)
        self._wait(lambda: not any(actor.pid for actor in schedulers), "the schedulers end")
        self._wait(self._settled, "no page is leased, quarantined or pinned")
        for actor in self.actors:
            if actor.role == "worker" and actor.pid:
                with contextlib.suppress(OSError), Dial(self.stage.worker_path(actor.engine, actor.rank)) as peer:
                    peer.send(("stop",))
        self._wait(lambda: not any(a.pid for a in self.actors if a.role == "worker"), "the workers end")
        self._wait(lambda: (self.status() or {}).get("sessions") == [], "every session is over")
        if self.daemon.pid:
            os.kill(self.daemon.pid, signal.SIGTERM)
        self._wait(lambda: not self.daemon.pid, "the daemon ends")
        left = [name for name in os.listdir("/dev/shm") if self.instance and self.instance[:12] in name]
        if left:
            self.violations.append(f"segments are left: {left}")

    def _settled(self) -> bool:
        status = self.status()
        if status is None:
            return False
        pages = status["pools"][0]["pages"]
        self.counts["pages sealed at the end"] = pages["sealed"]
        return not (pages["leased"] or pages["quarantined"] or pages["pinned"])

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                status = self.status() or {}
                told = {part: status.get(part) for part in ("pools", "sessions", "quarantine")}
                self.violations.append(f"not so after {PATIENCE_S} s: {what}; {json.dumps(told)[:3000]}")
                return
            self.listen(0.05)
            self.reap()
        self.listen()

    def close(self) -> None:
        """End every process and remove what is left of them."""
        for actor in self.actors:
            if actor.pid:
                os.kill(actor.pid, signal.SIGKILL)
                os.waitpid(actor.pid, 0)
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            text = log.read()
        if "Traceback" in text:
            self.violations.append(f"the daemon logged a traceback: {text[text.index('Traceback') :][:3000]}")
        for name in os.listdir("/dev/shm"):
            if self.instance and self.instance[:12] in name:
                os.unlink(f"/dev/shm/{name}")
        if self.violations:
            print(f"the log is kept: {self.log_path}")
        else:
            shutil.rmtree(self.directory, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop everything at random and count violations.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.minutes:g} minutes", flush=True)
    loop = Loop(seed)
    try:
        loop.run(arguments.minutes * 60)
    finally:
        loop.close()
    width = max(map(len, loop.counts), default=0)
    for name in sorted(loop.counts):
        print(f"{name:<{width}}  {loop.counts[name]:>8}")
    for violation in loop.violations:
        print(f"violation: {violation}")
    print(f"{len(loop.violations)} violations")
    return 1 if loop.violations else 0


if __name__ == "__main__":
    sys.exit(main())
