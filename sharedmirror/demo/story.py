"""The story of the demo.

The first engine computes a long prefix, shares its pages and goes on with the text; what it says is the
reference. It dies. The second engine knows nothing and its device pool is NaN. It must find the prefix, load
it and say the same, bit for bit; and it must not when the load is left out or one bit of the cache is wrong.

This process is both engines' scheduler. Whatever ends ``tell``, its processes are gone afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharedmirror import control
from sharedmirror.demo.commands import Answer, FlipByte, ForgetAll, Load, ModelShape, Pairs, Prefill, Start, Store
from sharedmirror.demo.daemon import Daemon
from sharedmirror.demo.engine import Engine
from sharedmirror.demo.processes import DemoFailure
from sharedmirror.demo.prompt import DECODED_TOKENS, long_prompt
from sharedmirror.demo.report import Report
from sharedmirror.types import KeyState

WORLD_SIZE = 2
PREFILL_CHUNK = 128
ARENA = "32MiB"
POOL = ENGINE = "demo"
DEATH_TIMEOUT_S = 10.0
SIGN_BYTE = 3
"""The byte of a little-endian float32 whose top bit is the sign."""


class Story:
    """``tell`` it once. ``status`` is the daemon's status map from near the end, ``pids`` every process started."""

    def __init__(self, report: Report, device: str) -> None:
        self.status: dict[str, Any] | None = None
        self.pids: list[int] = []
        self._report = report
        self._device = device
        self._shape = ModelShape()
        self._prompt = long_prompt(self._shape)
        self._prefill_s = 0.0
        self._daemon: Daemon | None = None

    def segments_left(self) -> list[str]:
        """Return the names of the daemon's shared memory objects that are still there."""
        return self._daemon.segments() if self._daemon else []

    def tell(self, folder: Path) -> None:
        """Tell it, with sockets and logs in ``folder``; raises DemoFailure when it cannot go on."""
        began = time.perf_counter()
        with Daemon(folder, ARENA) as daemon:
            self._daemon = daemon
            self.pids.append(daemon.pid)
            if not daemon.segments():
                raise DemoFailure("the daemon's shared memory is not in /dev/shm")
            self._report.step(f"daemon, pid {daemon.pid}: {ARENA} ready in {time.perf_counter() - began:.2f} s")
            reference = self._first_life(daemon, folder)
            self._second_life(daemon, folder, reference)
            self._report.check("the daemon ended with exit code 0", daemon.stop() == 0)

    def _first_life(self, daemon: Daemon, folder: Path) -> Answer:
        prompt, table = self._prompt, self._prompt.block_table(1)
        with self._engine(daemon, folder, "first") as engine:
            with control.connect(daemon.socket, POOL, ENGINE, launch="first") as scheduler:
                self._prefill_s = max(engine.call(Prefill(prompt.prefix, table, PREFILL_CHUNK), float))
                self._report.step(f"prefilled {len(prompt.prefix)} tokens in {self._prefill_s:.3f} s")
                self._share(engine, scheduler, table)
                reference = self._answer(engine, table)
                self._report.step(f"went on with {DECODED_TOKENS} tokens in {reference.seconds:.3f} s: the reference")
                engine.begin(prompt.continuation(table))
            engine.kill()
            self._report.step(f"SIGKILL to both ranks, {_listed(engine.pids)}, while they decode")
            self._report.check("the daemon has proof of both deaths", _proven_dead(daemon, engine.pids))
        return reference

    def _share(self, engine: Engine, scheduler: control.Client, table: tuple[int, ...]) -> None:
        keys = self._prompt.keys
        reservation = scheduler.reserve(keys)
        if reservation.lease is None or len(reservation.granted) != len(keys):
            raise DemoFailure(f"{len(reservation.granted)} of {len(keys)} pages were granted in an empty pool")
        pairs: Pairs = [(page, int(reservation.granted[key])) for page, key in zip(table, keys, strict=False)]
        store_s = max(engine.call(Store(reservation.lease, pairs), float))
        self._report.step(f"stored and committed {len(keys)} pages, {_amount(engine, len(keys))}, in {store_s:.3f} s")
        states = scheduler.contains(keys)
        self._report.check(
            f"all {len(keys)} pages are sealed under their prefix hashes", list(states) == [KeyState.HIT] * len(keys)
        )

    def _second_life(self, daemon: Daemon, folder: Path, reference: Answer) -> None:
        keys, table = self._prompt.keys, self._prompt.block_table(2)
        with self._engine(daemon, folder, "second") as engine:
            with (
                control.connect(daemon.socket, POOL, ENGINE, launch="second") as scheduler,
                scheduler.lookup(keys) as hit,
            ):
                self._report.check(f"the lookup finds all {len(keys)} pages of the prefix", len(hit) == len(keys))
                if len(hit) != len(keys):
                    raise DemoFailure("without the whole prefix there is nothing to compare")
                self._report.step("the device pool is NaN, its pages are other ones than before")
                skipped = self._answer(engine, table)
                self._report.check("with the load left out the answer differs", not _same(skipped, reference))
                self._load_and_compare(engine, hit, table, reference)
                self._damage_and_compare(engine, hit, table, reference)
                self.status = daemon.status()
            self._report.check("both ranks ended with exit code 0", engine.stop() == [0] * WORLD_SIZE)

    def _load_and_compare(self, engine: Engine, hit: control.Hit, table: tuple[int, ...], reference: Answer) -> None:
        load_s = self._load(engine, hit, table)
        self._report.step(
            f"loaded {len(hit)} pages, {_amount(engine, len(hit))}, in {load_s:.3f} s; "
            f"their prefill took {self._prefill_s:.3f} s"
        )
        loaded = self._answer(engine, table)
        computed = len(self._prompt.tail) + DECODED_TOKENS - 1
        self._report.check("no token of the prefix was computed again", loaded.computed_tokens == computed)
        self._report.check(f"the {DECODED_TOKENS} tokens equal the reference's", loaded.tokens == reference.tokens)
        self._report.check("their logits equal the reference's bit for bit", loaded.logits == reference.logits)

    def _damage_and_compare(self, engine: Engine, hit: control.Hit, table: tuple[int, ...], reference: Answer) -> None:
        first_v_plane = self._shape.layers
        flip = FlipByte(rank=WORLD_SIZE - 1, host_page=int(hit.pages[-1]), plane=first_v_plane, byte=SIGN_BYTE)
        engine.call(flip, type(None))
        self._report.step(f"flipped a bit in one of the {_amount(engine, len(hit))} of host memory")
        self._load(engine, hit, table)
        damaged = self._answer(engine, table)
        self._report.check("with one host byte flipped the answer differs", not _same(damaged, reference))
        engine.call(flip, type(None))
        self._load(engine, hit, table)
        restored = self._answer(engine, table)
        self._report.check("with the byte flipped back it is the reference again", _same(restored, reference))

    def _answer(self, engine: Engine, table: tuple[int, ...]) -> Answer:
        answers = engine.call(self._prompt.continuation(table), Answer)
        if any(not _same(answer, answers[0]) for answer in answers):
            raise DemoFailure("the ranks disagree about tokens or logits")
        return answers[0]

    def _load(self, engine: Engine, hit: control.Hit, table: tuple[int, ...]) -> float:
        """Forget everything on the device, then load the hit's pages; return the load's seconds."""
        pairs: Pairs = [(page, int(host)) for page, host in zip(table, hit.pages, strict=False)]
        engine.call(ForgetAll(), type(None))
        return max(engine.call(Load(hit, pairs), float))

    @contextmanager
    def _engine(self, daemon: Daemon, folder: Path, launch: str) -> Iterator[Engine]:
        began = time.perf_counter()
        starts = [
            Start(
                shape=self._shape,
                rank=rank,
                world_size=WORLD_SIZE,
                num_device_pages=self._prompt.num_pages,
                num_host_pages=len(self._prompt.keys) + 1,  # and the null page
                pool=POOL,
                engine=ENGINE,
                socket=daemon.socket,
                rendezvous=str(folder / f"rendezvous-{launch}"),
                device=self._device,
            )
            for rank in range(WORLD_SIZE)
        ]
        with Engine(starts, launch=launch, folder=folder) as engine:
            self.pids += engine.pids
            devices = sorted({started.device for started in engine.started})
            attach_s = max(started.attach_s for started in engine.started)
            self._report.step(
                f"{launch} engine: pids {_listed(engine.pids)} on {', '.join(devices)}, "
                f"up in {time.perf_counter() - began:.2f} s (attach {attach_s:.3f} s)"
            )
            yield engine


def _same(answer: Answer, other: Answer) -> bool:
    return answer.tokens == other.tokens and answer.logits == other.logits


def _proven_dead(daemon: Daemon, pids: list[int]) -> bool:
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = {session["pid"] for session in daemon.status()["ended"]}
        if ended.issuperset(pids):
            return True
        time.sleep(0.05)
    return False


def _amount(engine: Engine, num_pages: int) -> str:
    size_bytes = num_pages * sum(started.bytes_per_host_page for started in engine.started)
    return f"{size_bytes / 2**20:.1f} MiB"


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
