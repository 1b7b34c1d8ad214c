"""Driver calls for several GPUs: memory that other processes may open, and words that streams wait for."""

from __future__ import annotations

import ctypes
from typing import Any

from sharedmirror.copies.driver import Driver, bind

__all__ = ["HANDLE_BYTES", "PeerDriver"]

HANDLE_BYTES = 64
_GREATER_OR_EQUAL = 0
_WITH_BARRIER = 0
_LAZY_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2


class _Handle(ctypes.Structure):
    """A CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_P, _U, _N = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetUuid_v2": (_P, ctypes.c_int),
    "cuMemAlloc_v2": (_P, _N),
    "cuMemFree_v2": (_P,),
    "cuIpcGetMemHandle": (_P, _P),
    "cuIpcOpenMemHandle_v2": (_P, _Handle, _U),
    "cuIpcCloseMemHandle": (_P,),
    "cuMemHostRegister_v2": (_P, _N, _U),
    "cuMemHostUnregister": (_P,),
    "cuMemHostGetDevicePointer_v2": (_P, _P, _U),
    "cuStreamWaitValue32_v2": (_P, _P, ctypes.c_uint32, _U),
    "cuStreamWriteValue32_v2": (_P, _P, ctypes.c_uint32, _U),
}


class PeerDriver(Driver):
    """The driver for one device of several. Raises AttributeError where the driver is too old."""

    def __init__(self, device: int) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        calls = {name: bind(library, name, types) for name, types in _SIGNATURES.items()}
        super().__init__(device)
        self._calls.update(calls)
        self._wait_word, self._write_word = calls["cuStreamWaitValue32_v2"], calls["cuStreamWriteValue32_v2"]

    def wait_word(self, stream: int, address: int, value: int) -> None:
        """Make later work on the stream wait until a 32-bit word is ``value`` or, in a circle, past it."""
        code = self._wait_word(stream, address, value, _GREATER_OR_EQUAL)
        if code:
            self._refuse("cuStreamWaitValue32", code)

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Write a word when all earlier work on the stream is done, for whoever reads it on any device."""
        code = self._write_word(stream, address, value, _WITH_BARRIER)
        if code:
            self._refuse("cuStreamWriteValue32", code)

    def device_id(self) -> bytes:
        """Return the 16 bytes that name the device, whatever its number in a process."""
        uuid = (ctypes.c_char * 16)()
        self._call("cuDeviceGetUuid_v2", uuid, self.device)
        return bytes(uuid.raw)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of device memory that can be opened by other processes."""
        return self._made("cuMemAlloc_v2", size_bytes)

    def free(self, address: int) -> None:
        """Free what ``allocate`` returned."""
        self._call("cuMemFree_v2", address)

    def handle_of(self, address: int) -> bytes:
        """Return the handle by which another process opens allocated memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """Return where another process's memory lies for this device; raises CopyError where that cannot be."""
        return self._made("cuIpcOpenMemHandle_v2", _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_handle(self, address: int) -> None:
        """Let go of what ``open_handle`` returned."""
        self._call("cuIpcCloseMemHandle", address)

    def register(self, address: int, size_bytes: int) -> int:
        """Register host memory; return where this device finds it."""
        self._call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE | _DEVICEMAP)
        return self._made("cuMemHostGetDevicePointer_v2", address, 0)

    def unregister(self, address: int) -> None:
        """Take back a registration."""
        self._call("cuMemHostUnregister", address)
