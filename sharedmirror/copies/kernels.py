"""The kernels of the staged engine, compiled in the background.

Triton compiles them (``move``); importing it takes a second where nobody else has, and a process's first
compilation of a kind another. Attaching does not wait for that: until the kernels are there, and for
good where they cannot be had, the engine does without. Launching goes through the driver, because a
launch from Python through Triton costs several times as much CPU.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence

import torch

from sharedmirror.copies.driver import Driver, Kernel
from sharedmirror.copies.view import TileTable
from sharedmirror.errors import CopyError

__all__ = ["ARGUMENTS", "MoveKernels"]

ARGUMENTS = 9
"""Arguments of the kernel: table, pages, frames, count, first, tiles, low, high, staging."""

_Key = tuple[int, int, bool, bool]
_log = logging.getLogger("sharedmirror")


class MoveKernels:
    """The kernels for some tables, in both directions, staged and direct."""

    def __init__(self, driver: Driver, device: torch.device, tables: Sequence[TileTable]) -> None:
        self._driver, self._device = driver, device
        self._kernels: dict[_Key, Kernel] = {}
        self.ready = False
        """Whether every kernel is there; once it is, it stays so."""
        self._thread = threading.Thread(
            target=self._compile, args=(list(tables),), name="sharedmirror-kernels", daemon=True
        )
        self._thread.start()

    def settle(self) -> bool:
        """Wait until all are compiled, or one of them failed; return ``ready``."""
        self._thread.join()
        return self.ready

    def all(self, tables: Sequence[TileTable], *, to_dense: bool, direct: bool) -> list[Kernel]:
        """Return the kernel for each table; only when ``ready``."""
        return [self._kernels[_key(table, to_dense, direct)] for table in tables]

    def _compile(self, tables: list[TileTable]) -> None:
        try:
            compile_mover = importlib.import_module("sharedmirror.copies.move").compile_mover
            with torch.cuda.device(self._device):
                for table in tables:
                    for to_dense in (True, False):
                        for direct in (True, False):
                            key = _key(table, to_dense, direct)
                            if key not in self._kernels:
                                binary = compile_mover(table, to_dense=to_dense, direct=direct)
                                with self._driver:
                                    self._kernels[key] = self._driver.load_kernel(binary)
            self.ready = True
        except ImportError as error:
            _log.warning("event=slow_copies reason=%r remedy='install triton'", str(error))
        except CopyError as error:
            _log.warning("event=slow_copies reason=%r", error.message)
        except Exception as error:
            # Triton raises whatever its compilers do; copies go on without kernels, only slower.
            _log.warning("event=slow_copies reason=%r remedy='see why triton cannot compile'", repr(error))


def _key(table: TileTable, to_dense: bool, direct: bool) -> _Key:
    return table.word, table.tile_bytes, to_dense, direct
