"""One rank of the demo's engine: a process that obeys commands from a pipe.

It ends with ``Stop``, or when the pipe is at its end because the story's process is gone.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from sharedmirror.demo.commands import (
    Answer,
    Continue,
    Failure,
    FlipByte,
    ForgetAll,
    Load,
    Prefill,
    Start,
    Started,
    Stop,
    Store,
)
from sharedmirror.demo.model import Decoder
from sharedmirror.mirror import SharedHostMirror

TRANSFER_TIMEOUT_S = 60.0
FLIPPED_BIT = 0x80


class Worker:
    """The rank's model, device pool and mirror."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.device = _device(start)
        _make_repeatable(self.device)
        self._model = Decoder(
            start.shape, rank=start.rank, world_size=start.world_size, device=self.device, all_reduce=_sum_over_ranks
        )
        self._pool = self._model.new_pool(start.num_device_pages)
        began = time.perf_counter()
        self._mirror = SharedHostMirror(
            self._pool,
            num_host_pages=start.num_host_pages,
            socket=start.socket,
            name=start.pool,
            engine=start.engine,
            rank=start.rank,
            world_size=start.world_size,
            pages="leased",
            layout="page",
        )
        self._attach_s = time.perf_counter() - began
        self._actions: dict[type, Callable[[Any], Any]] = {
            Prefill: self._prefill,
            Store: self._store,
            Load: self._load,
            Continue: self._continue,
            ForgetAll: lambda _: self._pool.fill_nan(),
            FlipByte: self._flip,
            Stop: lambda _: self._mirror.close(),
        }

    @property
    def started(self) -> Started:
        """What the story is told of this rank."""
        return Started(str(self.device), self._attach_s, self._mirror.bytes_per_host_page())

    def obey(self, command: object) -> object:
        """Carry out one command and return its answer."""
        return self._actions[type(command)](command)

    def _prefill(self, command: Prefill) -> float:
        began = time.perf_counter()
        self._model.prefill(command.tokens, command.block_table, self._pool, command.chunk)
        self._synchronize()
        return time.perf_counter() - began

    def _store(self, command: Store) -> float:
        began = time.perf_counter()
        self._mirror.store(command.lease, command.pairs, self._stream()).wait(TRANSFER_TIMEOUT_S)
        self._mirror.commit(command.lease)
        return time.perf_counter() - began

    def _load(self, command: Load) -> float:
        began = time.perf_counter()
        self._mirror.load(command.hit, command.pairs, self._stream()).wait(TRANSFER_TIMEOUT_S)
        return time.perf_counter() - began

    def _continue(self, command: Continue) -> Answer:
        began = time.perf_counter()
        made = self._model.continue_from(command.tokens, command.start, command.block_table, self._pool, command.count)
        seconds = time.perf_counter() - began
        return Answer(tuple(made.tokens), made.logits.numpy().tobytes(), made.computed_tokens, seconds)

    def _flip(self, command: FlipByte) -> None:
        if command.rank != self.rank:
            return
        _, host = self._mirror.tensor_pairs[command.plane]
        host[command.host_page].view(torch.uint8).view(-1)[command.byte] ^= FLIPPED_BIT

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _device(start: Start) -> torch.device:
    wants_cuda = start.device == "cuda" or (start.device == "auto" and torch.cuda.is_available())
    if not wants_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", start.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    # Through the CPU, so that two ranks may share one GPU, which NCCL refuses.
    summed = tensor.cpu()
    dist.all_reduce(summed)
    return summed.to(tensor.device)


def _make_repeatable(device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def serve(pipe: Connection) -> None:
    """Obey commands until ``Stop``; raises EOFError when the other side is gone."""
    start: Start = pipe.recv()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{start.rendezvous}",
        rank=start.rank,
        world_size=start.world_size,
        timeout=timedelta(seconds=60),
    )
    worker = Worker(start)
    pipe.send(worker.started)
    command: object = None
    while not isinstance(command, Stop):
        command = pipe.recv()
        pipe.send(worker.obey(command))
    dist.destroy_process_group()


def main() -> None:
    """Run as ``python -m sharedmirror.demo.worker FD``; FD is this side of the pipe."""
    # The peers are on this machine, and its name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with Connection(int(sys.argv[1])) as pipe:
        try:
            serve(pipe)
        except EOFError:
            sys.exit(1)
        except Exception:
            pipe.send(Failure(traceback.format_exc()))
            sys.exit(1)


if __name__ == "__main__":
    main()
