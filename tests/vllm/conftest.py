"""Real vLLM engines over real daemons. Without vLLM nothing here is collected; see scripts/test-vllm."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import select
import signal
import socket
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
PATIENCE_S = 240.0
PAUSE_S = 0.02
FAREWELL_S = 30.0
VLLMS_OWN = ("psm_", "sem.", "vllm_")
BLOCK = 32


class Template:
    """A running ``engine_process.py``, which has imported vLLM and forks engines."""

    def __init__(self) -> None:
        # One thread an engine: the machine's cores are for the engines and daemons of a test.
        environment = {
            "PYTHONPATH": str(HERE), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def fork(self, settings: dict[str, Any]) -> None:
        """Begin an engine."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the template; its engines have ended."""
        self._process.communicate(timeout=PATIENCE_S)


class Engine:
    """A real vLLM engine in a process of its own."""

    def __init__(self, template: Template, settings: dict[str, Any], directory: Path, name: str) -> None:
        self._log = directory / f"{name}.log"
        self._fault = directory / f"{name}.fault"
        self._shared_memory: set[int] = set()
        self._buffer = b""
        path = str(directory / name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(PATIENCE_S)
            environment = {"FAULT": str(self._fault), **settings.pop("environment")}
            template.fork({"socket": path, "log": str(self._log), "environment": environment, **settings})
            self._connection = listener.accept()[0]
        self.pid = int(self.answer()["pid"])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def started(self) -> Engine:
        """Wait until the engine is up."""
        self.start_s = float(self.answer()["start_s"])
        self._look()
        return self

    def send(self, do: str, **arguments: Any) -> None:
        self._connection.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._buffer:
            if not select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"the engine does not answer: {self.log()[-6000:]}")
            data = self._connection.recv(1 << 16)
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

    def fault(self, name: str) -> None:
        """Have the loads of a "faulty" engine go wrong from now on; see faults.py. "" ends it."""
        self._fault.write_text(name)

    def processes(self) -> list[int]:
        """Return the processes of the engine's tree: those of its Unix session."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                # Behind the name, which may hold anything: state, parent, group, session.
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid and fields[0] not in "ZX":
                    found.append(int(entry))
        return found

    def kill(self) -> None:
        """SIGKILL the whole tree."""
        while pids := self._look():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(PAUSE_S)

    def terminate(self) -> None:
        """Send SIGTERM to the whole tree, as a service manager does, and wait until it has ended."""
        self._look()
        os.killpg(self.pid, signal.SIGTERM)
        self.wait()

    def begin_stop(self) -> None:
        """End the engine as an operator would, without waiting."""
        self._look()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """End the engine as an operator would."""
        self.begin_stop()
        self.wait()

    def wait(self) -> None:
        """Wait until the whole tree has ended."""
        if not self._ends_within(PATIENCE_S):
            pytest.fail(f"the engine does not end: {self.log()[-6000:]}")

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    def finish(self) -> None:
        """End what is left of the engine, and remove what vLLM leaves behind where it is killed."""
        self.begin_stop()
        self._ends_within(FAREWELL_S)
        self.kill()
        self._connection.close()
        for entry in os.scandir("/dev/shm"):
            if entry.name.startswith(VLLMS_OWN) and entry.inode() in self._shared_memory:
                os.unlink(entry.path)

    def _look(self) -> list[int]:
        """Return the tree's processes, and note vLLM's own shared memory: what they have mapped is theirs."""
        pids = self.processes()
        for pid in pids:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    # Address, rights, offset, device, inode, name. A semaphore's name is not that in the folder.
                    fields = line.split(maxsplit=5)
                    if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                        self._shared_memory.add(int(fields[4]))
        return pids


class Engines:
    """Starts engines and ends them."""

    def __init__(self, template: Template, directory: Path, socket: str, models: Path) -> None:
        self._template = template
        self._directory = directory
        self._models = models
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
        # A slow machine shall not cost hits.
        patience = {"call_timeout_s": 5.0, "attach_wait_s": PATIENCE_S}
        extra = {"socket": self.socket, "num_host_pages": 1200, **patience, **(extra or {})}
        settings = {
            "in_process": in_process,
            "environment": environment or {},
            "llm": {
                "model": self.model(model), "skip_tokenizer_init": True, "dtype": "float32", "block_size": BLOCK,
                "max_model_len": 1024, "num_gpu_blocks_override": 64, "enforce_eager": True,
                "max_num_batched_tokens": 512, "disable_log_stats": False, "seed": 0,
                "kv_transfer_config": self._connector(tier, extra),
            } | llm,
        }  # fmt: skip
        engine = Engine(self._template, settings, self._directory, f"engine{len(self.engines)}")
        self.engines.append(engine)
        return engine

    def __call__(self, tier: str | None = "shared", **settings: Any) -> Engine:
        """Start an engine and wait until it is up."""
        return self.begin(tier, **settings).started()

    def model(self, kind: str) -> str:
        """Return the directory of a small model, written by the first who asks."""
        from tests.vllm.tiny_model import write_model

        directory = self._models / kind
        return str(directory) if directory.exists() else write_model(directory, kind)

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
            for engine in self.engines:
                engine.begin_stop()


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """The process that engines are forked from."""
    template = Template()
    yield template
    template.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small models are."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def engines(template: Template, models: Path, start: Any) -> Iterator[Engines]:
    """Start engines that use the socket of ``start``'s daemons."""
    engines = Engines(template, start.directory, start.path(), models)
    try:
        yield engines
    finally:
        engines.finish()
        for daemon in start.daemons:
            if daemon.process.poll() is None:
                daemon.wait_status(lambda status: not status["sessions"], "no session is left")


@pytest.fixture
def tier(start: Any) -> Any:
    """A daemon with room for the engines' pools."""
    return start(memory="256MiB")


@pytest.fixture(scope="session", autouse=True)
def device_is_open() -> None:
    """The driver opens descriptors when a process first copies: before the tests that count descriptors."""
    import numpy as np
    import torch

    if not torch.cuda.is_available():
        return
    from sharedmirror.copies.interface import Geometry, PlaneGeometry
    from sharedmirror.copies.staged import StagedEngine

    for device in [torch.device("cuda", number) for number in range(torch.cuda.device_count())]:
        there = torch.zeros((2, 4096), dtype=torch.uint8, device=device)
        here = torch.zeros((2, 4096), dtype=torch.uint8, pin_memory=True)
        engine = StagedEngine(Geometry((PlaneGeometry("plane", there, here),), device, (0,), (1,)))
        engine.wait_for_kernels()
        for copy in (engine.store, engine.load):
            copy(np.array([0]), np.array([1]), torch.cuda.Stream(device)).wait(60)
        engine.close()


@pytest.fixture
def tiers(daemon: Any) -> Iterator[Callable[..., Any]]:
    """Make both sides of an engine over ``daemon``, without an engine; see ``test_sides.Tier``."""
    from tests.vllm.test_sides import Tier

    made: list[Tier] = []

    def make(**settings: Any) -> Tier:
        made.append(Tier(daemon.socket, **settings))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


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
