"""Ranks of engines as real processes: each has a mirror, and pages whose bytes follow from their keys."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from sharedmirror import Lease, SharedHostMirror
from sharedmirror.control import Client, Hit, connect

if TYPE_CHECKING:
    from tests.conftest import Daemon

ROWS, ROW_BYTES = 4, 8192
PAGE_BYTES = 2 * ROWS * ROW_BYTES
"""Of each rank."""
DEVICE_PAGES = 64
PATIENCE_S = 20.0
Pairs = Sequence[tuple[bytes, int]]
"""Keys and host pages."""
# Its descriptor stays open: before the tests that count descriptors, not in the first of them.
multiprocessing.resource_tracker.ensure_running()


def pattern(model: str, rank: int, key: bytes) -> torch.Tensor:
    """Return what a page with this key holds."""
    made = torch.Generator().manual_seed(zlib.crc32(f"{model}/{rank}/".encode() + key))
    return torch.randint(0, 256, (2 * ROWS, ROW_BYTES), generator=made, dtype=torch.uint8)


class _Side:
    """What runs in a rank's process."""

    def __init__(self, model: str, rank: int, mirror: SharedHostMirror, pool: SimpleNamespace) -> None:
        self.model, self.rank, self.mirror, self.pool = model, rank, mirror, pool
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loads: list[int] = []

    def put(self, device: int, content: torch.Tensor) -> None:
        rows = slice(device * ROWS, (device + 1) * ROWS)
        self.pool.k_buffer[0][rows], self.pool.v_buffer[0][rows] = content[:ROWS], content[ROWS:]

    def get(self, device: int) -> torch.Tensor:
        rows = slice(device * ROWS, (device + 1) * ROWS)
        return torch.cat([self.pool.k_buffer[0][rows], self.pool.v_buffer[0][rows]])

    def store(self, lease: Lease, pairs: Pairs, commit: bool = True) -> Any:
        for begin in range(0, len(pairs), DEVICE_PAGES):
            part = pairs[begin : begin + DEVICE_PAGES]
            for device, (key, _) in enumerate(part):
                self.put(device, pattern(self.model, self.rank, key))
            self.mirror.store(lease, [(device, page) for device, (_, page) in enumerate(part)]).wait(PATIENCE_S)
        return self.mirror.commit(lease) if commit else None

    def commit(self, lease: Lease) -> Any:
        return self.mirror.commit(lease)

    def load(self, hit: Hit, pairs: Pairs, first: int = 0) -> int:
        """Load pages; returns how many hold what they must, and raises when one does not."""
        for begin in range(0, len(pairs), DEVICE_PAGES):
            part = list(enumerate(pairs[begin : begin + DEVICE_PAGES], first))
            for device, _ in part:
                self.put(device, torch.zeros(2 * ROWS, ROW_BYTES, dtype=torch.uint8))
            self.mirror.load(hit, [(device, page) for device, (_, page) in part]).wait(PATIENCE_S)
            for device, (key, page) in part:
                if not torch.equal(self.get(device), pattern(self.model, self.rank, key)):
                    raise AssertionError(f"page {page} of rank {self.rank} does not hold the bytes of {key!r}")
        return len(pairs)

    def load_on_and_on(self, hit: Hit, pairs: Pairs) -> None:
        """Load the same pages until ``stop``, in another thread, to device pages of its own."""
        self._loads = [0, 0]

        def run() -> None:
            while not self._stop.is_set():
                try:
                    self._loads[0] += self.load(hit, pairs, DEVICE_PAGES)
                except AssertionError:
                    self._loads[1] += 1

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def stop(self) -> list[int]:
        """Return how many pages were loaded, and how many loads brought wrong bytes."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        return self._loads

    def loads(self) -> int:
        return self._loads[0]

    def backed(self) -> int:
        return self.mirror._attachment.backed

    def host_page(self, page: int) -> torch.Tensor:
        return torch.cat([host[page].clone() for _, host in self.mirror.tensor_pairs])


def rank_main(pipe: Connection, model: str, rank: int, count: Any, options: dict[str, Any]) -> None:
    def tensor() -> torch.Tensor:
        return torch.zeros(2 * DEVICE_PAGES * ROWS, ROW_BYTES, dtype=torch.uint8)

    pool = SimpleNamespace(page_size=ROWS, k_buffer=[tensor()], v_buffer=[tensor()])
    try:
        mirror = SharedHostMirror(pool, count, rank=rank, pages="leased", layout="page", **options)
    except Exception as error:
        pipe.send(error)
        return
    with mirror:
        side = _Side(model, rank, mirror, pool)
        pipe.send("attached")
        while (command := pipe.recv()) != "close":
            try:
                pipe.send(getattr(side, command[0])(*command[1:]))
            except Exception as error:
                pipe.send(error)
    pipe.send("closed")


class Rank:
    """One rank, as its test sees it."""

    def __init__(self, model: str, rank: int, count: Any, options: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=rank_main, args=(theirs, model, rank, count, options))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def result(self) -> Any:
        assert self.pipe.poll(2 * PATIENCE_S), "the rank does not answer"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.result()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send("close")
            assert self.result() == "closed"
            self.process.join(PATIENCE_S)

    def finish(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_S)
        self.process.close()
        self.pipe.close()


class Engine:
    """The ranks of a model and its scheduler. ``model`` names pool, engine and bytes, unless ``options`` do."""

    def __init__(self, daemon: Daemon, model: str, count: Any, world_size: int = 2, **options: Any) -> None:
        self.model = model
        options = {"socket": daemon.socket, "name": model, "engine": model, "world_size": world_size, **options}
        self._where = options["socket"], options["name"], options["engine"]
        self.ranks = [Rank(model, rank, count, options) for rank in range(world_size)]
        self._client: Client | None = None

    def wait(self) -> Engine:
        """Wait until all ranks have attached; raises what one of them got."""
        for rank in self.ranks:
            assert rank.result() == "attached"
        return self

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect(*self._where)
        return self._client

    def each(self, *command: Any) -> list[Any]:
        """Have all ranks do the same at once."""
        for rank in self.ranks:
            rank.pipe.send(command)
        return [rank.result() for rank in self.ranks]

    def cache(self, keys: Sequence[bytes], wait_s: float = PATIENCE_S) -> None:
        """Make keys readable."""
        reservation = self.client.reserve(keys, wait_s=wait_s)
        if reservation.lease is not None:
            self.each("store", reservation.lease, list(reservation.granted.items()))

    def check(self, keys: Sequence[bytes]) -> int:
        """Load those of the keys that are there, on every rank; returns how many they are."""
        with self.client.lookup(keys, "each") as hit:
            pairs = found(hit, keys)
            if pairs:
                self.each("load", hit, pairs)
            return len(pairs)

    def close(self) -> None:
        """Leave in peace."""
        if self._client is not None:
            self._client.close()
        for rank in self.ranks:
            rank.close()

    def finish(self) -> None:
        if self._client is not None:
            self._client.close()
        for rank in self.ranks:
            rank.finish()


def found(hit: Hit, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Return the keys that a lookup in mode "each" found, with their pages."""
    return [(key, page) for key, page in zip(keys, hit.pages, strict=True) if page >= 0]


@contextmanager
def engines() -> Iterator[Callable[..., Engine]]:
    """Make engines, and end what is left of them."""
    with ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Engine:
            engine = Engine(*arguments, **options)
            stack.callback(engine.finish)
            return engine

        yield make
