"""The CUDA driver calls of the staged engine, through ctypes on ``libcuda``.

A call costs about a microsecond here, where torch's costs five and more, and a transfer makes hundreds.
Arguments that differ from call to call are prepared as numpy tables, and calls get addresses into them.

Every method that enqueues work wants the device's context current (``with driver:``) and raises CopyError
when the driver refuses. The interpreter lock is let go during each call: a full queue blocks the caller,
and whoever must start the work that empties it may be another thread of this process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sharedmirror.copies.pairs import Ids
from sharedmirror.errors import CopyError

if TYPE_CHECKING:
    from sharedmirror.copies.move import Binary

__all__ = [
    "BATCH_COPIES",
    "FIRST_COPIES",
    "Driver",
    "Kernel",
    "batches",
    "bind",
    "launch_shapes",
    "row_copies",
    "row_operations",
]

BATCH_COPIES = 1024
"""Most copies in one batch call: very long batches have crashed some drivers."""
FIRST_COPIES = 32
"""Most copies in the first of several batch calls: none begins before its call is over."""
_P, _I, _U, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_HOST_POINTER_USABLE = 91
_UNIFIED = 4
_SOURCE_ORDER_STREAM = 1
_PREFER_OVERLAP = 1
_OPERAND_POINTER = 1

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuGetErrorString": (_I, _P),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuDevicePrimaryCtxRelease_v2": (_I,),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuModuleLoadData": (_P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuLaunchKernelEx": (_P, _P, _P, _P),
    "cuStreamCreateWithPriority": (_P, _U, _I),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, _U),
    "cuEventCreate": (_P, _U),
    "cuEventRecord": (_P, _P),
    "cuEventDestroy_v2": (_P,),
    "cuMemcpyAsync": (_P, _P, _N, _P),
    "cuMemcpy2DAsync_v2": (_P, _P),
}
_BATCH_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # Driver 13 dropped the address at which 12.8 and later report the copy that failed.
    "cuMemcpyBatchAsync_v2": (_P, _P, _P, _N, _P, _P, _N, _P),
    "cuMemcpyBatchAsync": (_P, _P, _P, _N, _P, _P, _N, _P, _P),
}
_ROWS_BATCH_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpy3DBatchAsync_v2": (_N, _P, ctypes.c_ulonglong, _P),
    "cuMemcpy3DBatchAsync": (_N, _P, _P, ctypes.c_ulonglong, _P),
}
_OPERATION_BYTES = 112


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel and the shape of its blocks."""

    function: int
    threads: int
    shared_bytes: int


class Driver:
    """The driver for one device; ``with driver:`` makes its primary context current in this thread."""

    def __init__(self, device: int) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._calls = {name: bind(library, name, types) for name, types in _SIGNATURES.items()}
        name = next((name for name in _BATCH_SIGNATURES if hasattr(library, name)), None)
        self.has_batches = name is not None
        if name is not None:
            self._batch = bind(library, name, _BATCH_SIGNATURES[name])
        # One attribute for all copies. The bytes are read in stream order: kernels before may have written them.
        self._attributes = np.array([_SOURCE_ORDER_STREAM, 0, 0, 0, 0, _PREFER_OVERLAP], np.int32)
        self._attribute_of, self._failed_at = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        failed_at = (self._failed_at.ctypes.data,) if name == "cuMemcpyBatchAsync" else ()
        name = next((name for name in _ROWS_BATCH_SIGNATURES if hasattr(library, name)), None)
        self.has_row_batches = name is not None
        if name is not None:
            self._rows_batch = bind(library, name, _ROWS_BATCH_SIGNATURES[name])
        self._rows_failed_at = (self._failed_at.ctypes.data,) if name == "cuMemcpy3DBatchAsync" else ()
        self._batch_tail = (self._attributes.ctypes.data, self._attribute_of.ctypes.data, 1, *failed_at)
        self._modules: list[int] = []
        self._call("cuInit", 0)
        self.device = self._made("cuDeviceGet", device, kind=ctypes.c_int)
        self._context = self._made("cuDevicePrimaryCtxRetain", self.device)
        self._launch, self._copy = self._calls["cuLaunchKernelEx"], self._calls["cuMemcpyAsync"]
        self._copy_rows = self._calls["cuMemcpy2DAsync_v2"]
        self._wait, self._record = self._calls["cuStreamWaitEvent"], self._calls["cuEventRecord"]

    def __enter__(self) -> Driver:
        self._call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._calls["cuCtxPopCurrent_v2"](ctypes.byref(ctypes.c_void_p()))

    @property
    def reads_registered_memory(self) -> bool:
        """Whether kernels may use the host's own addresses of registered memory."""
        flag = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(flag), _HOST_POINTER_USABLE, self.device)
        return bool(flag.value)

    def load_kernel(self, binary: Binary) -> Kernel:
        """Load a compiled kernel; it stays until ``close``."""
        module = self._made("cuModuleLoadData", binary.image)
        self._modules.append(module)
        function = self._made("cuModuleGetFunction", module, binary.name.encode())
        return Kernel(function, binary.threads, binary.shared_bytes)

    def launch(self, kernel: Kernel, shape: int, arguments: int) -> None:
        """Enqueue a kernel; ``shape`` is the address of a row of ``launch_shapes``.

        ``arguments`` is the address of the addresses of its arguments.
        """
        code = self._launch(shape, kernel.function, arguments, None)
        if code:
            self._refuse("cuLaunchKernelEx", code)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue one copy."""
        code = self._copy(target, source, size_bytes, stream)
        if code:
            self._refuse("cuMemcpyAsync", code)

    def copy_batch(self, targets: int, sources: int, sizes_bytes: int, count: int, stream: int) -> None:
        """Enqueue ``count`` copies; the arguments are addresses of 64-bit numbers. Only where ``has_batches``."""
        for low, number in batches(count):
            at = 8 * low
            code = self._batch(targets + at, sources + at, sizes_bytes + at, number, *self._batch_tail, stream)
            if code:
                self._refuse("cuMemcpyBatchAsync", code)

    def copy_rows(self, description: int, stream: int) -> None:
        """Enqueue a 2D copy; ``description`` is the address of a row of ``row_copies``."""
        code = self._copy_rows(description, stream)
        if code:
            self._refuse("cuMemcpy2DAsync", code)

    def copy_rows_batch(self, operations: int, count: int, stream: int) -> None:
        """Enqueue ``count`` 2D copies; ``operations`` is the address of a row of ``row_operations``."""
        for low, number in batches(count):
            code = self._rows_batch(number, operations + _OPERATION_BYTES * low, *self._rows_failed_at, 0, stream)
            if code:
                self._refuse("cuMemcpy3DBatchAsync", code)

    def create_stream(self) -> int:
        """Return a new stream that does not wait for the legacy null stream."""
        return self._made("cuStreamCreateWithPriority", _NON_BLOCKING, 0)

    def create_event(self) -> int:
        """Return a new event without timing."""
        return self._made("cuEventCreate", _DISABLE_TIMING)

    def record(self, event: int, stream: int) -> None:
        """Record the event; whoever waited for it before waits for what it was then."""
        code = self._record(event, stream)
        if code:
            self._refuse("cuEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event as it is now."""
        code = self._wait(stream, event, 0)
        if code:
            self._refuse("cuStreamWaitEvent", code)

    def synchronize(self, stream: int) -> None:
        """Block until the stream is empty."""
        self._call("cuStreamSynchronize", stream)

    def destroy(self, streams: list[int], events: list[int]) -> None:
        """Destroy streams and events."""
        for stream in streams:
            self._call("cuStreamDestroy_v2", stream)
        for event in events:
            self._call("cuEventDestroy_v2", event)

    def close(self) -> None:
        """Unload the kernels and let go of the context."""
        with self:
            while self._modules:
                self._call("cuModuleUnload", self._modules.pop())
        self._call("cuDevicePrimaryCtxRelease_v2", self.device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            self._refuse(name, code)

    def _made(self, name: str, *arguments: Any, kind: Any = ctypes.c_void_p) -> int:
        """Call a function that writes what it made through its first argument."""
        made = kind()
        self._call(name, ctypes.byref(made), *arguments)
        return int(made.value or 0)

    def _refuse(self, name: str, code: int) -> None:
        text = ctypes.c_char_p()
        self._calls["cuGetErrorString"](code, ctypes.byref(text))
        what = text.value.decode() if text.value else "unknown error"
        raise CopyError(f"{name} failed with {code}: {what}", cuda=code)


def batches(count: int) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of each batch call for so many copies."""
    low, most = 0, FIRST_COPIES
    while low < count:
        yield low, min(most, count - low)
        low, most = low + most, BATCH_COPIES


def launch_shapes(blocks: Ids, threads: Ids, shared_bytes: Ids, streams: Ids | int) -> Ids:
    """Return launch configurations (CUlaunchConfig), one per row of the result; they have 56 bytes."""
    table = np.zeros((len(blocks), 14), np.uint32)
    table[:, 0], table[:, 3], table[:, 6] = blocks, threads, shared_bytes
    table[:, (1, 2, 4, 5)] = 1
    shapes: Ids = table.view(np.int64)
    shapes[:, 4] = streams
    return shapes


def row_copies(targets: Ids, sources: Ids, target_pitches: Ids, source_pitches: Ids, widths: Ids, rows: Ids) -> Ids:
    """Return descriptions of 2D copies (CUDA_MEMCPY2D), one per row of the result."""
    table = np.zeros((len(targets), 16), np.int64)
    table[:, 2] = table[:, 9] = _UNIFIED
    table[:, 4], table[:, 6] = sources, source_pitches
    table[:, 11], table[:, 13] = targets, target_pitches
    table[:, 14], table[:, 15] = widths, rows
    return table


def row_operations(targets: Ids, sources: Ids, target_pitches: Ids, source_pitches: Ids, widths: Ids, rows: Ids) -> Ids:
    """Return the same as operations of a batch (CUDA_MEMCPY3D_BATCH_OP), one per row of the result."""
    table = np.zeros((len(targets), _OPERATION_BYTES // 8), np.int64)
    table[:, 0] = table[:, 5] = _OPERAND_POINTER
    table[:, 1], table[:, 2], table[:, 3] = sources, source_pitches, rows
    table[:, 6], table[:, 7], table[:, 8] = targets, target_pitches, rows
    table[:, 10], table[:, 11], table[:, 12] = widths, rows, 1
    table[:, 13] = _SOURCE_ORDER_STREAM | _PREFER_OVERLAP << 32
    return table


def bind(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
    """Return a function of the library with its types; raises AttributeError."""
    function = getattr(library, name)
    function.argtypes, function.restype = types, ctypes.c_int
    bound: Callable[..., int] = function
    return bound
