"""Arena memory and the CUDA driver: prefaulted and registered chunk by chunk, in the background.

What it keeps:

- the first chunk is registered when the constructor returns; after ``begin`` the others follow in
  order in a thread, and ``require`` waits for what a copy needs: so attaching to any size takes as long
  as one chunk;
- the next chunk is prefaulted, in threads, while the driver registers this one: the driver would fault
  its pages one after the other, which takes longer;
- chunks are short, because the driver holds locks that other processes on the device need;
- where a region may grow and shrink, chunks end where it may end, so that none has to be taken apart;
- each return code is checked; memory is never unmapped while it is registered.

Driver calls go through the driver API: a failed runtime call leaves an error pending that surfaces in a
stranger's call. A forked child never unregisters: that belongs to the process that registered.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from sharedmirror.errors import MemoryFault

__all__ = ["CHUNK_BYTES", "HostRegistration", "device_node", "refuse_mps"]

CHUNK_BYTES = 1 << 30
"""One registration. Longer ones stall kernel launches of other processes for longer; see BENCHMARKS.md."""
_PIECE_BYTES = 32 << 20
_MAX_THREADS = 16
_MADV_POPULATE_WRITE = 23
_PORTABLE, _DEVICEMAP = 1, 2
_PCI_ID_BYTES = 32

_log = logging.getLogger("sharedmirror")

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostRegistration:
    """Registers one mapped region for ``device``.

    ``edges`` are the addresses where one chunk ends and the next begins; no copy may cross one. Raises
    MemoryFault, with the driver's name for the error, when the first chunk is refused; a later refusal
    is raised by ``require``.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        device: torch.device,
        *,
        chunk_bytes: int | None = None,
        edges: Sequence[int] | None = None,
        driver: Any = None,
    ) -> None:
        """Register the first chunk. ``edges`` are addresses where chunks end; by default every ``chunk_bytes``."""
        self._driver = _load_driver() if driver is None else driver
        chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._end = address + size_bytes
        self._registered: list[int] = []
        self._ready = address
        self._fault: MemoryFault | None = None
        self._changed = threading.Condition()
        self._stop = False
        self._urgent = 0
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._device = self._call("cuDeviceGet", device.index or 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.edges = tuple(range(address + chunk_bytes, self._end, chunk_bytes) if edges is None else edges)
        first, *self._rest = self._chunks(address, self._end)
        try:
            self._run([first])
            if self._fault is not None:
                raise self._fault
        except BaseException:
            self.close()
            raise

    def _chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        bounds = [start, *(edge for edge in self.edges if start < edge < end), end]
        return [(low, high - low) for low, high in zip(bounds, bounds[1:], strict=False)]

    def extend(self, end: int) -> None:
        """Register what was mapped behind, up to address ``end``; raises MemoryFault when that is refused."""
        if self._context is None or end <= self._end:
            return
        self._settle()
        if self._fault is not None:
            raise self._fault
        start, self._end = self._end, end
        self._run(self._chunks(start, end))
        fault, self._fault = self._fault, None
        if fault is not None:
            self.cut(start)
            raise fault
        self.require(end)

    def cut(self, end: int) -> None:
        """Unregister the chunks from address ``end`` on; the caller knows that no copy is under way there.

        Raises MemoryFault when the driver refuses; all that is still registered stays so.
        """
        if self._context is None or end >= self._end:
            return
        self._settle()
        with self._current():
            while self._registered and self._registered[-1] >= end:
                self._call("cuMemHostUnregister", self._registered[-1])
                self._registered.pop()
        with self._changed:
            self._ready, self._end = min(self._ready, end), end
            self._changed.notify_all()

    def _settle(self) -> None:
        """Let what is registered in the background come to its end."""
        self.begin()
        if self._thread is not None:
            self._thread.join()

    def begin(self) -> None:
        """Go on in the background; not before other work that needs the driver and must not wait is done."""
        if self._rest and self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._rest,), name="sharedmirror-register", daemon=True
            )
            self._thread.start()

    def _run(self, chunks: list[tuple[int, int]]) -> None:
        begin = time.monotonic()
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="sharedmirror-prefault") as pool, self._current():
                pieces = _prefault(pool, *chunks[0])
                for at, (start, length) in enumerate(chunks):
                    for piece in pieces:
                        piece.result()
                    pieces = _prefault(pool, *chunks[at + 1]) if at + 1 < len(chunks) and not self._stop else []
                    with self._changed:
                        # The driver holds the process's lock for a whole chunk: copies under way go first.
                        self._changed.wait_for(lambda: not self._urgent or self._stop)
                    if self._stop:
                        return
                    self._call("cuMemHostRegister", start, length, _PORTABLE | _DEVICEMAP)
                    with self._changed:
                        self._registered.append(start)
                        self._ready = start + length
                        self._changed.notify_all()
                    _log.debug("event=registered bytes_left=%d", self._end - self._ready)
        except MemoryFault as fault:
            _log.error("event=register_failed reason=%r", fault.message)
            with self._changed:
                self._fault = fault
                self._changed.notify_all()
            return
        size_bytes = sum(length for _, length in chunks)
        _log.info("event=registered bytes=%d seconds=%.3f", size_bytes, time.monotonic() - begin)

    @property
    def complete(self) -> bool:
        """Whether every chunk is registered."""
        return self._ready == self._end

    def require(self, end: int) -> None:
        """Wait until all memory below address ``end`` is registered; raises MemoryFault when that failed."""
        if self._ready >= end:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready >= end or self._fault is not None or self._stop or self._end < end
            )
        if self._ready < end:
            raise self._fault or MemoryFault("the memory was given back while it was being registered")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no further chunk meanwhile."""
        with self._changed:
            self._urgent += 1
        try:
            yield
        finally:
            with self._changed:
                self._urgent -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Unregister; the caller has drained all copies. A second call, or one in a fork, does nothing.

        Raises MemoryFault when the driver refuses; what is still registered is kept for another try.
        """
        if self._context is None or os.getpid() != self._pid:
            return
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._current():
            while self._registered:
                self._call("cuMemHostUnregister", self._registered[-1])
                self._registered.pop()
        self._context = None
        self._call("cuDevicePrimaryCtxRelease", self._device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        # A thread that never touched the device has no context, and the driver calls need one.
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._driver, name)(*arguments)
        if int(code) != 0:
            shown = getattr(code, "name", str(code))
            raise MemoryFault(f"{name} failed with {shown}{_REMEDIES.get(shown, '')}", cuda=shown)
        return values[0] if values else None


_REMEDIES = {
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "; close this process's other mirror of it first",
    "CUDA_ERROR_OUT_OF_MEMORY": "; raise the limit of locked memory (ulimit -l) or lower num_host_pages",
    "CUDA_ERROR_NOT_PERMITTED": "; raise the limit of locked memory (ulimit -l)",
}


def _prefault(pool: ThreadPoolExecutor, start: int, length: int) -> list[Future[int]]:
    """Map a chunk's pages, which the daemon has populated, into this process.

    A refusal (before Linux 5.14) costs only time: the driver then faults the pages itself.
    """
    pieces = [(at, min(_PIECE_BYTES, start + length - at)) for at in range(start, start + length, _PIECE_BYTES)]
    return [pool.submit(_libc.madvise, at, size, _MADV_POPULATE_WRITE) for at, size in pieces]


def refuse_mps() -> None:
    """Raise MemoryFault when this process's CUDA work would go through an MPS server.

    There a client's copies are made by the server, so that the client's death proves nothing about them.
    """
    control = os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control")
    try:
        if not stat.S_ISFIFO(os.stat(control).st_mode):
            return
        # Opening for writing succeeds only while the control daemon has the other end.
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return
    raise MemoryFault(
        f"CUDA MPS is active ({control}); under MPS the death of a worker does not prove that its copies have ended, "
        f"so its pages could never be reused safely. Stop MPS, or set CUDA_MPS_PIPE_DIRECTORY to an empty directory"
    )


def device_node(device: torch.device, *, driver: Any = None, sys: str = "/sys") -> int | None:
    """Return the NUMA node that a CUDA device hangs on; None where nobody tells, or the machine has none.

    It only says where memory is best, so no failure here is an error.
    """
    try:
        driver = _load_driver() if driver is None else driver
        code, *values = driver.cuDeviceGet(device.index or 0)
        if int(code) == 0:
            code, *values = driver.cuDeviceGetPCIBusId(_PCI_ID_BYTES, values[0])
        if int(code) != 0:
            _log.debug("event=no_numa_node device=%s reason=%r", device, getattr(code, "name", code))
            return None
        name = bytes(values[0]).partition(b"\0")[0].decode("ascii").lower()  # sysfs has small letters
        with open(os.path.join(sys, "bus/pci/devices", name, "numa_node"), encoding="ascii") as file:
            node = int(file.read())
    except (MemoryFault, OSError, ValueError) as error:
        _log.debug("event=no_numa_node device=%s reason=%r", device, str(error))
        return None
    return node if node >= 0 else None


def _load_driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MemoryFault(
            "CUDA pools need the package cuda-bindings to register host memory: pip install 'sharedmirror[cuda]'"
        ) from error
