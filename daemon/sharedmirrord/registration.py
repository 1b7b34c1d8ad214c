"""Registration of memory with the CUDA driver, for ``pin="cuda"`` only.

Invariants: memory is registered in chunks, all of which are taken back when one is refused; the primary
context of device 0 is held until ``close`` and no longer, and is current only during a call.

It must not import CUDA before a registration is made, and it maps and unmaps nothing: the caller closes
the registration before the memory goes.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from sharedmirror.errors import MemoryFault

CHUNK_BYTES = 16 << 30
"""What one driver call registers: the driver refuses 512 GiB, and long calls stall other processes."""

_log = logging.getLogger(__name__)


class CudaRegistration:
    """The registration of an arena with the driver. Any thread may call it, one at a time.

    Making one raises MemoryFault when cuda.bindings or the driver is missing.
    """

    def __init__(self) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise MemoryFault("pin=cuda needs cuda.bindings: run `pip install 'sharedmirror[cuda]'`") from error
        self._chunks: list[int] = []
        self._device: Any = None
        try:
            self._call("cuInit", 0)
            device = self._call("cuDeviceGet", 0)
            self._context = self._call("cuDevicePrimaryCtxRetain", device)
        except RuntimeError as error:
            raise MemoryFault("pin=cuda finds no CUDA driver: install it, or use pin=mlock") from error
        self._device = device

    def register(self, address: int, size_bytes: int) -> None:
        """Register one chunk, portable and mapped; a refusal takes back all chunks and raises MemoryFault."""
        driver = self._driver
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._call("cuMemHostRegister", address, size_bytes, flags)
            self._chunks.append(address)
        except MemoryFault:
            self._unregister()
            raise
        finally:
            self._call("cuCtxPopCurrent")

    def close(self) -> None:
        """Take back all registrations and let go of the context."""
        device, self._device = self._device, None
        if device is None:
            return
        try:
            self._call("cuCtxPushCurrent", self._context)
            try:
                self._unregister()
            finally:
                self._call("cuCtxPopCurrent")
        finally:
            self._call("cuDevicePrimaryCtxRelease", device)

    def _unregister(self) -> None:
        chunks, self._chunks = self._chunks, []
        for address in chunks:
            code = self._driver.cuMemHostUnregister(address)[0]
            if int(code):
                _log.warning("event=unregister_failed address=%#x result=%s", address, getattr(code, "name", code))

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._driver, name)(*arguments)
        if int(code):
            label = getattr(code, "name", code)
            raise MemoryFault(f"pin=cuda: {name} failed with {label}; use pin=mlock, or see dmesg", result=int(code))
        return values[0] if values else None
