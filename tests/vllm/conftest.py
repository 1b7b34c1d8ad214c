"""Real vLLM engines over real daemons. Without vLLM nothing here is collected; see scripts/test-vllm."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent
PATIENCE_S = 180.0
BLOCK = 32


class Engine:
    """A running ``engine_process.py``."""

    def __init__(self, settings: dict[str, Any], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_process.py"), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(HERE), **environment},
            )  # fmt: skip
        self._buffer = b""

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def started(self) -> Engine:
        """Wait until the engine is up."""
        self.start_s = float(self.answer()["start_s"])
        return self

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        fd, deadline = self.process.stdout.fileno(), time.monotonic() + PATIENCE_S
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"the engine does not answer: {self.log()[-4000:]}")
            data = os.read(fd, 1 << 16)
            if not data:
                pytest.fail(f"the engine ended: {self.log()[-6000:]}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.answer()

    def tokens(self, prompts: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
        found: list[list[int]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens)["tokens"]
        return found

    def metric(self, name: str) -> float:
        return float(self.ask("metrics").get(f"vllm:{name}", 0))

    def external_hits(self) -> int:
        """Return the prompt tokens that came out of the tier."""
        return int(self.metric("external_prefix_cache_hits"))

    def processes(self) -> list[int]:
        """Return the processes of the engine's tree: those of its Unix session."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                # Behind the name, which may hold anything: state, parent, group, session.
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    found.append(int(entry))
        return found

    def kill(self) -> None:
        """SIGKILL the whole tree."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """End the engine as an operator would."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)

    def finish(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            if self.process.poll() is None:
                self.stop()
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


class Engines:
    """Starts engines and ends them."""

    def __init__(self, directory: Path, socket: str) -> None:
        self.directory = directory
        self.socket = socket
        self.engines: list[Engine] = []

    def begin(
        self,
        tier: str | None = "shared",
        *,
        in_process: bool = True,
        environment: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
        model: str = "llama",
        **llm: Any,
    ) -> Engine:
        """Start an engine without waiting; ``tier`` is None, "shared", "stock" or "faulty"."""
        extra = {"socket": self.socket, "num_host_pages": 1200, "call_timeout_s": 2.0, **(extra or {})}
        settings = {
            "in_process": in_process,
            "llm": {
                "model": self.model(model), "skip_tokenizer_init": True, "dtype": "float32", "block_size": BLOCK,
                "max_model_len": 1024, "num_gpu_blocks_override": 64, "enforce_eager": True,
                "max_num_batched_tokens": 512, "disable_log_stats": False, "seed": 0,
                "kv_transfer_config": self._connector(tier, extra),
            } | llm,
        }  # fmt: skip
        base = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        log = self.directory / f"engine{len(self.engines)}.log"
        engine = Engine(settings, log, base | (environment or {}))
        self.engines.append(engine)
        return engine

    def __call__(self, tier: str | None = "shared", **settings: Any) -> Engine:
        """Start an engine and wait until it is up."""
        return self.begin(tier, **settings).started()

    def model(self, kind: str) -> str:
        from tests.vllm.tiny_model import write_model

        return write_model(self.directory / kind, kind)

    def _connector(self, tier: str | None, extra: dict[str, Any]) -> dict[str, Any] | None:
        if tier is None:
            return None
        both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        if tier == "stock":
            extra |= {
                "spec_name": "SharedMirrorOffloadingSpec", "spec_module_path": "sharedmirror.integrations.vllm"
            }  # fmt: skip
            return both | {"kv_connector": "OffloadingConnector"}
        name, module = {
            "shared": ("SharedMirrorConnector", "sharedmirror.integrations.vllm"),
            "faulty": ("FaultyConnector", "faults"),
        }[tier]
        return both | {"kv_connector": name, "kv_connector_module_path": module}

    def finish(self) -> None:
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.finish)


@pytest.fixture
def engines(start: Any, tmp_path: Path) -> Iterator[Engines]:
    """Start engines that use the socket of ``start``'s daemons."""
    before = set(os.listdir("/dev/shm"))
    engines = Engines(tmp_path, start.path())
    try:
        yield engines
    finally:
        engines.finish()
        for daemon in start.daemons:
            if daemon.process.poll() is None:
                daemon.wait_status(lambda status: not status["sessions"], "no session is left")
        # A killed engine leaves vLLM's own names behind.
        for name in set(os.listdir("/dev/shm")) - before:
            if name.startswith(("psm_", "sem.mp-")):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def tier(start: Any) -> Any:
    """A daemon with room for the engines' pools."""
    return start(memory="256MiB")


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """Make prompts: ``count`` of them, with shared beginnings and ends of their own."""

    def make(count: int, *, seed: int = 7, shared: int = 200, own: int = 280, families: int = 5) -> list[list[int]]:
        from tests.vllm.tiny_model import VOCABULARY

        chance = random.Random(seed)

        def some(length: int) -> list[int]:
            return [chance.randrange(3, VOCABULARY) for _ in range(length)]

        beginnings = [some(shared) for _ in range(families)]
        return [beginnings[number % families] + some(own) for number in range(count)]

    return make
