"""The schedulers of ``crash-loop``: each publishes, reads and evicts at random for its engine.

What a process may see when another was killed is counted; everything else is a violation.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from multiprocessing.connection import Client as Dial
from multiprocessing.connection import Connection
from typing import Any

from crash_stage import GROUP_KEYS, GROUPS, PATIENCE_S, POOL, RANKS, Stage

from sharedmirror.control import Client, Hit, connect
from sharedmirror.errors import SharedMirrorError, StaleLease
from sharedmirror.types import AWAY_HITS, KeyState, Lease


class WorkerLost(Exception):
    """Raised when a worker died or is not there."""


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
            # Reading needs no daemon.
            work = self.random.choices(works, [1, 20, 0, 0] if self.client._channel.lost else [5, 6, 1, 1])[0]
            try:
                self._meet()
                work()
                self.stage.count(operations=1)
            except WorkerLost:
                self._part()
                time.sleep(0.02)
            except SharedMirrorError as error:
                self.stage.count(**{f"refused:{error.code}": 1})
                if error.code not in ("no_pages", "ranks_missing", "not_resumed"):
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
            self._load(hit, keys)
            if self.random.random() < 0.2:
                time.sleep(self.random.uniform(0, 1.0))
                self._load(hit, keys)
            if hit.id >= AWAY_HITS:
                self.stage.count(**{"hits without a daemon": 1})
                if self.random.random() < 0.8:
                    return
            found = [key for page, key in zip(hit.pages, keys, strict=False) if page >= 0]
            lost = [k for k, s in zip(found, self.client.contains(found), strict=True) if s is not KeyState.HIT]
            if lost:
                self.stage.violation(f"{self.name}: {lost} are pinned by hit {hit.id} and not readable")

    def _load(self, hit: Hit, keys: list[bytes]) -> int:
        """Have all ranks load a hit: each page must be of its last grant in all of them; returns the pages verified."""
        answers = self._tell("load", hit, keys)
        pages = [page for page in hit.pages if page >= 0]
        if any(answer != answers[0] for answer in answers):
            self.stage.violation(f"{self.name}: pages {pages} have generations {answers} in the ranks")
        self.stage.report(loaded=list(zip(pages, answers[0], strict=True)))
        return sum(map(len, answers))

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
                        self.stage.count(**{"pages audited": self._load(hit, keys)})
        except (WorkerLost, SharedMirrorError) as error:
            self.stage.violation(f"{self.name}: in the last round, without kills: {error!r}")
