"""Ranks on GPUs of their own that load shared planes together; see ``test_exchange_gpu.py``."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from sharedmirror import SharedHostMirror
from sharedmirror.transfers import Transfer

ROWS = 16
POISON = 0xA5
PATIENCE_S = 60.0
ONE_DEVICE = bool(os.environ.get("SHAREDMIRROR_TEST_ONE_DEVICE"))
"""Both ranks on one GPU: slow, and enough to see whether the bytes are right."""


class Shape:
    """What a pool is made of: bytes of a row in each plane, pages on the device and on the host."""

    def __init__(self, row_bytes: Sequence[int], device_pages: int, host_pages: int, layout: str) -> None:
        self.row_bytes, self.device_pages = tuple(row_bytes), device_pages
        self.host_pages, self.layout = host_pages, layout

    def made(self, device: torch.device) -> list[torch.Tensor]:
        """Return planes of bytes that are the same on each rank."""
        generator, rows = torch.Generator(device=device).manual_seed(5), self.device_pages * ROWS
        return [
            torch.randint(0, 256, (rows, width), dtype=torch.uint8, device=device, generator=generator)
            for width in self.row_bytes
        ]


class Side:
    """What runs in a rank's process."""

    def __init__(self, rank: int, socket: str, shape: Shape, settings: dict[str, Any]) -> None:
        from sharedmirror.copies.together import exchange

        exchange.SAME_DEVICE = ONE_DEVICE
        for name, value in settings.items():
            setattr(exchange, name, value)
        self.device = torch.device("cuda", 0 if ONE_DEVICE else rank)
        torch.cuda.set_device(self.device)
        self.shape = shape
        self.planes = shape.made(self.device)
        self.first = [plane.clone() for plane in self.planes]
        half = len(self.planes) // 2
        pool = SimpleNamespace(page_size=ROWS, k_buffer=self.planes[:half], v_buffer=self.planes[half:])
        self.mirror = SharedHostMirror(
            pool, shape.host_pages, socket=socket, rank=rank, world_size=2, pages="leased", layout=shape.layout,
            shard=(0, 1),
        )  # fmt: skip
        self.transfers: list[Transfer] = []

    def store(self, lease: Any) -> None:
        """Store device page i as the lease's page i."""
        self.mirror.store(lease, list(enumerate(lease.pages))).wait(PATIENCE_S)
        self.mirror.commit(lease)

    def poison(self) -> None:
        for plane in self.planes:
            plane.fill_(POISON)
        torch.cuda.synchronize(self.device)

    def load(self, hit: Any, pairs: list[tuple[int, int]], wait: bool = True) -> None:
        """Load together."""
        transfer = self.mirror.load(hit, pairs, together=True)
        self.transfers.append(transfer)
        if wait:
            transfer.wait(PATIENCE_S)

    def wait(self) -> list[str]:
        """Return how each load ended, oldest first."""
        ends = []
        for transfer in self.transfers:
            try:
                transfer.wait(PATIENCE_S)
                ends.append("done")
            except Exception as error:
                ends.append(type(error).__name__)
            ends[-1] += "" if not transfer.in_flight else " in flight"
        self.transfers = []
        return ends

    def wrong(self, origin: dict[int, int]) -> list[tuple[int, int]]:
        """Return (plane, device page) where not exactly the pages of ``origin`` hold what they must."""
        torch.cuda.synchronize(self.device)
        found = []
        for number, (plane, first) in enumerate(zip(self.planes, self.first, strict=True)):
            now, then = plane.view(self.shape.device_pages, -1), first.view(self.shape.device_pages, -1)
            wanted = torch.full_like(now, POISON)
            to, of = (torch.tensor(list(each), device=self.device) for each in (origin.keys(), origin.values()))
            wanted[to] = then[of]
            found += [(number, page) for page in (now != wanted).any(1).nonzero().flatten().tolist()]
        return found

    def busy_load(self, hit: Any, pairs: list[tuple[int, int]]) -> bool:
        """Fill pages late on a stream, load on it, copy on it: the copy is of what was loaded."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for plane in self.planes:
                plane.fill_(POISON)
            transfer = self.mirror.load(hit, pairs, stream, together=True)
            copies = [plane.clone() for plane in self.planes]
        transfer.wait(PATIENCE_S)
        stream.synchronize()
        return all(torch.equal(copy, plane) for copy, plane in zip(copies, self.planes, strict=True))

    def active(self) -> Any:
        engine: Any = self.mirror._engine
        return engine._together[1].active if engine._together is not None else None

    def close(self) -> None:
        self.mirror.close()


def rank_main(pipe: Connection, rank: int, socket: str, shape: Shape, settings: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    try:
        side = Side(rank, socket, shape, settings)
        pipe.send("attached")
    except Exception as error:
        pipe.send(error)
        return
    while (command := pipe.recv()) != "end":
        try:
            run: Callable[..., Any] = getattr(side, command[0])
            pipe.send(run(*command[1:]))
        except Exception as error:
            pipe.send(error)


class RankProcess:
    """A rank, seen from the test."""

    def __init__(self, rank: int, socket: str, shape: Shape, settings: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, far = spawn.Pipe()
        self.process = spawn.Process(target=rank_main, args=(far, rank, socket, shape, settings))
        self.process.start()
        far.close()

    def tell(self, *command: Any) -> None:
        self.pipe.send(command)

    def answer(self) -> Any:
        if not self.pipe.poll(3 * PATIENCE_S):
            raise TimeoutError("the rank does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def end(self) -> None:
        if self.process.is_alive():
            try:
                self.ask("close")
                self.pipe.send("end")
            except Exception:
                self.process.kill()
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()
