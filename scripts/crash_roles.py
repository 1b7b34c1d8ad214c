"""The victims of ``crash-loop``: what its workers and schedulers do until they are killed.

A page's bytes follow from its key, the rank and the plane, so whoever loads it knows what it must
hold. A worker at times dies right after it forked a ghost: a child that goes on writing into the
pages that the worker was storing into, or reading those it was loading, as a device would. What a
process may see when another was killed is counted; everything else is a violation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client as Dial
from multiprocessing.connection import Connection, Listener
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sharedmirror.control import Client, Hit, connect
from sharedmirror.errors import RankAttached, SharedMirrorError, StaleLease
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import KeyState, Lease

POOL, ENGINES, RANKS, LAYERS = "crash", 2, 2, 2
HOST_PAGES, DEVICE_PAGES, PAGE_ROWS = 65, 24, 16
GROUPS, GROUP_KEYS = 40, 8
"""Keys hang together in prefixes; there are five times as many as pages."""
PATIENCE_S = 40.0
"""Longer than any restart takes: who waits this long hangs."""

GHOST_BYTE = 0xEE


@dataclass(frozen=True)
class Stage:
    """What every process is told."""

    directory: str
    socket: str
    report_fd: int

    def worker_path(self, engine: int, rank: int) -> str:
        return os.path.join(self.directory, f"worker{engine}.{rank}")

    @property
    def calm_path(self) -> str:
        """A file that is there once nobody is to die any more."""
        return os.path.join(self.directory, "calm")

    def report(self, **what: Any) -> None:
        # One write of less than a pipe's atomic size, so that lines of different processes stay whole.
        os.write(self.report_fd, json.dumps(what).encode()[:4000] + b"\n")

    def count(self, **numbers: int) -> None:
        self.report(count=numbers)

    def violation(self, text: str) -> None:
        self.report(violation=text)


class WorkerLost(Exception):
    """Raised when a worker died or is not there."""


def content(key: bytes, rank: int, plane: int, size_bytes: int) -> np.ndarray[Any, Any]:
    mark = b"%b/%d/%d" % (key, rank, plane)
    return np.frombuffer(hashlib.shake_128(mark).digest(size_bytes), np.uint8)


# -- workers -------------------------------------------------------------------------------------


class Worker:
    """One rank: stores, commits and loads as its engine's scheduler says."""

    def __init__(self, stage: Stage, engine: int, rank: int, seed: str) -> None:
        self.stage, self.rank, self.random = stage, rank, random.Random(seed)
        self.name = f"worker {engine}.{rank}"
        self.path = stage.worker_path(engine, rank)
        shape = (DEVICE_PAGES * PAGE_ROWS, 2, 16)
        tensors = [torch.zeros(shape, dtype=torch.float16) for _ in range(2 * LAYERS)]
        pool = SimpleNamespace(page_size=PAGE_ROWS, k_buffer=tensors[:LAYERS], v_buffer=tensors[LAYERS:])
        self.mirror = self._attach(pool, engine)
        # Plain bytes: in a forked child the mirror refuses, and torch is better left alone.
        self.device = [t.view(torch.uint8).numpy().reshape(DEVICE_PAGES, -1) for t in tensors]
        self.host = [host.view(torch.uint8).numpy() for _, host in self.mirror.tensor_pairs]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.listener = Listener(self.path, "AF_UNIX")

    def _attach(self, pool: Any, engine: int) -> SharedHostMirror:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return SharedHostMirror(
                    pool, HOST_PAGES, socket=self.stage.socket, name=POOL, engine=str(engine), rank=self.rank,
                    world_size=RANKS, pages="leased", layout="page",
                )  # fmt: skip
            except SharedMirrorError as error:
                self.stage.count(**{f"attach:{error.code}": 1})
                if time.monotonic() > deadline or not (error.retryable or isinstance(error, RankAttached)):
                    raise
            time.sleep(0.05)

    def serve(self) -> None:
        stopped = False
        while not stopped:
            with self.listener.accept() as peer, contextlib.suppress(EOFError, ConnectionError):
                while not stopped:
                    command, *arguments = peer.recv()
                    stopped = command == "stop"
                    peer.send(self._answer(command, arguments, peer))
        self.listener.close()
        self.host = []
        self.mirror.close()

    def _answer(self, command: str, arguments: list[Any], peer: Connection[Any, Any]) -> Any:
        if command in ("stop", "ping"):
            return command
        try:
            return self._store(peer, *arguments) if command == "store" else self._load(peer, *arguments)
        except StaleLease as error:
            return error

    def _store(self, peer: Connection[Any, Any], lease: Lease, keys: list[bytes], how: str) -> set[int]:
        """Store the lease's pages and commit them; returns the pages that became readable or lost to a twin."""
        pairs = list(enumerate(lease.pages))
        for at, key in enumerate(keys):
            for plane, rows in enumerate(self.device):
                rows[at] = content(key, self.rank, plane, rows.shape[1])
        self.mirror.store(lease, pairs).wait(PATIENCE_S)
        self.stage.count(**{"pages stored": len(pairs)})
        chance = self.random.random()
        if chance < 0.01:
            self._die_with_ghost(peer, lambda: self._haunt(lease.pages))
        elif chance < 0.03:
            self._fork(peer, lambda: time.sleep(self.random.uniform(0.5, 2.0)), closes=self.random.random() < 0.5)
        done: set[int] = set()
        if how == "none":
            return done
        if how == "queued":
            self.mirror.commit(lease, wait=False)
            while True:
                progress = self.mirror.poll()
                for _, error in progress.failed:
                    raise error
                for _, sealed in progress.sealed:
                    done |= {*sealed.sealed, *sealed.duplicates}
                if not progress.waiting:
                    return done
        half = len(pairs) // 2
        for part in [None] if how == "whole" or not half else [lease.pages[:half], lease.pages[half:]]:
            answer = self.mirror.commit(lease, part, timeout_s=PATIENCE_S)
            if answer is not None:
                done |= {*answer.sealed, *answer.duplicates}
        return done

    def _load(self, peer: Connection[Any, Any], hit: Hit, keys: list[bytes]) -> int:
        wanted = [(page, key) for page, key in zip(hit.pages, keys, strict=False) if page >= 0]
        for rows in self.device:
            rows[:] = 0
        self.mirror.load(hit, [(at, page) for at, (page, _) in enumerate(wanted)]).wait(PATIENCE_S)
        for at, (page, key) in enumerate(wanted):
            self._verify(key, page, [rows[at] for rows in self.device], "was loaded")
        self.stage.count(**{"pages verified": len(wanted)})
        if self.random.random() < 0.01:
            self._die_with_ghost(peer, lambda: self._watch(wanted))
        return len(wanted)

    def _verify(self, key: bytes, page: int, planes: list[Any], how: str) -> bool:
        for plane, got in enumerate(planes):
            expected = content(key, self.rank, plane, got.size)
            if not np.array_equal(got.reshape(-1), expected):
                wrong = np.flatnonzero(got.reshape(-1) != expected)
                ghost = " with a ghost's bytes" if (got == GHOST_BYTE).any() else ""
                self.stage.violation(
                    f"{self.name}: page {page}, key {key.decode()}, plane {plane} {how}{ghost}: "
                    f"{wrong.size} of {expected.size} bytes are wrong, from byte {wrong[0]}"
                )
                return False
        return True

    # -- ghosts ----------------------------------------------------------------------------------

    def _die_with_ghost(self, peer: Connection[Any, Any], work: Callable[[], None]) -> None:
        if os.path.exists(self.stage.calm_path):
            return
        self._fork(peer, work, closes=self.random.random() < 0.5)
        self.stage.count(ghosts=1)
        os.kill(os.getpid(), signal.SIGKILL)

    def _fork(self, peer: Connection[Any, Any], work: Callable[[], None], *, closes: bool) -> None:
        """Leave a child behind; it ``closes`` its descriptors or keeps them, and holds the mapping either way."""
        if os.fork():
            return
        try:
            # The engine's own sockets tell its scheduler that the worker is dead: they must end with it.
            os.close(peer.fileno())
            self.listener.close()
            if closes:
                os.closerange(3, self.stage.report_fd)
                os.closerange(self.stage.report_fd + 1, 4096)
            work()
        finally:
            os._exit(0)

    def _haunt(self, pages: Sequence[int]) -> None:
        until = time.monotonic() + self.random.uniform(0.3, 2.0)
        while time.monotonic() < until:
            for host in self.host:
                host[list(pages)] = GHOST_BYTE
            time.sleep(0.002)

    def _watch(self, wanted: Sequence[tuple[int, bytes]]) -> None:
        until = time.monotonic() + self.random.uniform(0.3, 2.0)
        while time.monotonic() < until:
            for page, key in wanted:
                planes = [host[page] for host in self.host]
                if not self._verify(key, page, planes, "changed under a dead worker's load"):
                    return
            time.sleep(0.01)


# -- schedulers ----------------------------------------------------------------------------------


class Scheduler:
    """One engine's scheduler: publishes, reads and evicts at random."""

    def __init__(self, stage: Stage, engine: int, seed: str) -> None:
        self.stage, self.engine, self.random = stage, engine, random.Random(seed)
        self.name = f"scheduler {engine}"
        self.peers: list[Connection[Any, Any]] = []
        self.stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        self.client = self._connect()

    def _stop(self, *_: Any) -> None:
        self.stopped = True

    def _connect(self) -> Client:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return connect(self.stage.socket, POOL, str(self.engine), timeout_s=PATIENCE_S, wait_s=5)
            except SharedMirrorError as error:
                self.stage.count(**{f"connect:{error.code}": 1})
                if not error.retryable or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def run(self) -> None:
        works = [self._publish, self._read, self._evict, self._ask]
        while not self.stopped:
            work = self.random.choices(works, [5, 6, 1, 1])[0]
            try:
                self._meet()
                work()
                self.stage.count(operations=1)
            except WorkerLost:
                self._part()
                time.sleep(0.02)
            except SharedMirrorError as error:
                self.stage.count(**{f"refused:{error.code}": 1})
                if error.code not in ("no_pages", "ranks_missing"):
                    self.stage.violation(f"{self.name}: {work.__name__}: {type(error).__name__}: {error.message}")
                time.sleep(0.02)
        self._audit()
        self._part()
        self.client.close()

    # -- its workers -----------------------------------------------------------------------------

    def _meet(self) -> None:
        if self.peers:
            return
        try:
            for rank in range(RANKS):
                self.peers.append(Dial(self.stage.worker_path(self.engine, rank), "AF_UNIX"))
        except OSError:
            raise WorkerLost from None

    def _part(self) -> None:
        for peer in self.peers:
            peer.close()
        self.peers = []

    def _tell(self, *command: Any, ranks: list[int] | None = None) -> list[Any]:
        """Have all workers do something; raises WorkerLost, or StaleLease where a rank was refused."""
        told = [self.peers[rank] for rank in ranks or range(RANKS)]
        answers = []
        try:
            for peer in told:
                peer.send(command)
            for peer in told:
                if not peer.poll(PATIENCE_S):
                    self.stage.violation(f"{self.name}: a worker has not answered {command[0]} for {PATIENCE_S} s")
                    raise WorkerLost
                answers.append(peer.recv())
        except (EOFError, OSError):
            raise WorkerLost from None
        for answer in answers:
            if isinstance(answer, StaleLease):
                self._tell("ping")  # only a death among the workers excuses it
                raise answer
        return answers

    # -- what it does ----------------------------------------------------------------------------

    def _keys(self) -> tuple[list[bytes], bytes | None]:
        group, start = self.random.randrange(GROUPS), self.random.randrange(GROUP_KEYS)
        count = self.random.randint(1, GROUP_KEYS - start)
        keys = [b"g%d.%d" % (group, number) for number in range(GROUP_KEYS)]
        return keys[start : start + count], keys[start - 1] if start else None

    def _publish(self) -> None:
        keys, parent = self._keys()
        wait_s = self.random.choice([0, 0, 0.5])
        reserves = self.random.random() < 0.5
        if reserves:
            lease = self.client.reserve(keys, parent, wait_s=wait_s).lease
            if lease is None or lease.keys is None:
                return
            keys = list(lease.keys)
        else:
            lease = self.client.lease(len(keys), wait_s=wait_s)
        self.stage.report(
            grant=list(zip(lease.pages, lease.generations, strict=True)), engine=self.engine, lease=lease.id
        )
        try:
            self._fill(lease, keys, parent, reserves)
        except (WorkerLost, StaleLease) as reason:
            self._abort(lease)
            if isinstance(reason, StaleLease):
                self._tell("ping")
            raise
        finally:
            self.stage.report(closed=lease.id)

    def _fill(self, lease: Lease, keys: list[bytes], parent: bytes | None, keyed: bool) -> None:
        if self.random.random() < 0.1:
            self._tell("store", lease, keys, "none")
            self.client.abort(lease)
            self.stage.count(aborts=1)
            return
        done: set[int] = set()
        if not keyed and self.random.random() < 0.5:
            self.client.seal(lease, keys, parent=parent)
            keyed = True
        for pages in self._tell("store", lease, keys, self.random.choice(["whole", "parts", "queued"])):
            done |= pages
        if not keyed:
            sealed = self.client.seal(lease, keys, parent=parent)
            done |= {*sealed.sealed, *sealed.duplicates}
        if done != set(lease.pages):
            missing = sorted(set(lease.pages) - done)
            self.stage.violation(f"{self.name}: all committed lease {lease.id}, but pages {missing} are not sealed")
        self.stage.count(**{"pages sealed": len(done)})

    def _abort(self, lease: Lease) -> None:
        with contextlib.suppress(StaleLease):
            self.client.abort(lease)
            self.stage.count(aborts=1)

    def _read(self) -> None:
        if self.random.random() < 0.5:
            keys = [b"g%d.%d" % (self.random.randrange(GROUPS), number) for number in range(GROUP_KEYS)]
            hit = self.client.lookup(keys, "each")
        else:
            group = self.random.randrange(GROUPS)
            keys = [b"g%d.%d" % (group, number) for number in range(GROUP_KEYS)]
            hit = self.client.lookup(keys)
        with hit:
            if not len(hit):
                return
            self._tell("load", hit, keys)
            if self.random.random() < 0.2:
                time.sleep(self.random.uniform(0, 1.0))
                self._tell("load", hit, keys)
            found = [key for page, key in zip(hit.pages, keys, strict=False) if page >= 0]
            lost = [k for k, s in zip(found, self.client.contains(found), strict=True) if s is not KeyState.HIT]
            if lost:
                self.stage.violation(f"{self.name}: {lost} are pinned by hit {hit.id} and not readable")

    def _evict(self) -> None:
        self.stage.count(**{"keys evicted": len(self.client.evict(self._keys()[0]).evicted)})

    def _ask(self) -> None:
        self.client.touch(self._keys()[0])
        self.client.contains(self._keys()[0])

    def _audit(self) -> None:
        """Nobody is killed any more: load and verify every page that is readable."""
        self._part()
        try:
            self._meet()
            for group in range(GROUPS):
                keys = [b"g%d.%d" % (group, number) for number in range(GROUP_KEYS)]
                with self.client.lookup(keys, "each") as hit:
                    if len(hit):
                        self.stage.count(**{"pages audited": sum(self._tell("load", hit, keys))})
        except (WorkerLost, SharedMirrorError) as error:
            self.stage.violation(f"{self.name}: in the last round, without kills: {error!r}")


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
