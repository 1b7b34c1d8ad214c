"""The workers of ``crash-loop``: one rank each, which stores, commits and loads as its scheduler says.

At times a worker dies right after it forked a ghost: a child that goes on writing into the pages that
the worker was storing into, or reading those it was loading, as a device would.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

import numpy as np
import torch
from crash_stage import (
    DEVICE_PAGES,
    GHOST_BYTE,
    HOST_PAGES,
    PAGE_ROWS,
    PATIENCE_S,
    POOL,
    RANKS,
    Stage,
    content,
    generation_in,
)

from sharedmirror.adapter import DevicePool
from sharedmirror.control import Hit
from sharedmirror.errors import RankAttached, SharedMirrorError, StaleLease
from sharedmirror.layout import PlaneSpec, PoolLayout
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.transfers import Ledger
from sharedmirror.types import Lease

PLANES = [PlaneSpec(f"plane{number}", 64, PAGE_ROWS) for number in range(4)]
SHARED = PlaneSpec("latent", 80, PAGE_ROWS, shard=0, shards=1)
"""All ranks hold its bytes and share one host copy."""


class Worker:
    """One rank: stores, commits and loads as its engine's scheduler says."""

    def __init__(self, stage: Stage, engine: int, rank: int, seed: str) -> None:
        self.stage, self.rank, self.random = stage, rank, random.Random(seed)
        self.name = f"worker {engine}.{rank}"
        self.path = stage.worker_path(engine, rank)
        planes = [*PLANES, SHARED]
        tensors = [torch.zeros(DEVICE_PAGES * PAGE_ROWS, plane.row_bytes, dtype=torch.uint8) for plane in planes]
        self.mirror = self._attach(DevicePool(PoolLayout(planes, PAGE_ROWS), tensors), engine)
        # Plain bytes: in a forked child the mirror refuses, and torch is better left alone.
        self.device = [tensor.numpy().reshape(DEVICE_PAGES, -1) for tensor in tensors]
        self.host = [host.numpy() for _, host in self.mirror.tensor_pairs]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.listener = Listener(self.path, "AF_UNIX")

    def _attach(self, pool: DevicePool, engine: int) -> SharedHostMirror:
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
        for at, (key, generation) in enumerate(zip(keys, lease.generations, strict=True)):
            for plane, rows in enumerate(self.device):
                rows[at] = self._content(key, generation, plane, rows.shape[1])
        self.mirror.store(lease, pairs).wait(PATIENCE_S)
        self.stage.count(**{"pages stored": len(pairs)})
        chance = 1.0 if os.path.exists(self.stage.calm_path) else self.random.random()
        if chance < 0.01:
            self._ledger().begin_store(lease, lease.pages)
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

    def _load(self, peer: Connection[Any, Any], hit: Hit, keys: list[bytes]) -> list[int]:
        """Load and verify a hit's pages; returns the generation of each."""
        wanted = [(page, key) for page, key in zip(hit.pages, keys, strict=False) if page >= 0]
        for rows in self.device:
            rows[:] = 0
        self.mirror.load(hit, [(at, page) for at, (page, _) in enumerate(wanted)]).wait(PATIENCE_S)
        generations = [
            self._verify(key, page, [rows[at] for rows in self.device], "was loaded")
            for at, (page, key) in enumerate(wanted)
        ]
        self.stage.count(**{"pages verified": len(wanted)})
        if self.random.random() < 0.01 and not os.path.exists(self.stage.calm_path):
            self._ledger().begin_load(hit, [page for page, _ in wanted])
            self._die_with_ghost(peer, lambda: self._watch(wanted))
        return generations

    def _content(self, key: bytes, generation: int, plane: int, size_bytes: int) -> np.ndarray[Any, Any]:
        return content(key, generation, self.rank if plane < len(PLANES) else RANKS, plane, size_bytes)

    def _verify(self, key: bytes, page: int, planes: list[Any], how: str) -> int:
        """Return the generation under which all planes were stored, 0 after a violation."""
        generation = generation_in(planes[0])
        for plane, got in enumerate(planes):
            expected = self._content(key, generation, plane, got.size)
            if not np.array_equal(got.reshape(-1), expected):
                wrong = np.flatnonzero(got.reshape(-1) != expected)
                ghost = " with a ghost's bytes" if (got == GHOST_BYTE).any() else ""
                self.stage.violation(
                    f"{self.name}: page {page}, key {key.decode()}, generation {generation}, plane {plane} "
                    f"{how}{ghost}: {wrong.size} of {expected.size} bytes are wrong, from byte {wrong[0]}"
                )
                return 0
        return generation

    # -- ghosts ----------------------------------------------------------------------------------

    def _ledger(self) -> Ledger:
        """What a ghost does is a copy that was begun and never ends: the ledger must know, or it says drained."""
        ledger = self.mirror._ledger
        if ledger is None:
            raise RuntimeError("a leased pool has a ledger")
        return ledger

    def _die_with_ghost(self, peer: Connection[Any, Any], work: Callable[[], None]) -> None:
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
