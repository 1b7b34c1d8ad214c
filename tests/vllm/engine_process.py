"""Real vLLM engines, each in a process of its own, told by lines of JSON what to do.

Importing vLLM takes longer than starting a small engine, so one process imports it and forks an engine for each
line on its stdin: ``{"socket": path, "log": path, "environment": {...}, "in_process": bool, "llm": {...}}``. The
engine connects to the socket and says its pid. Then each line ``{"do": name, ...}`` gets a line as an answer; the
end of the lines ends the engine. vLLM's own words go to the log.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any


def main() -> None:
    """Fork an engine for each line."""
    from vllm import LLM  # noqa: F401

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else reaps the engines
    for line in sys.stdin:
        if os.fork() == 0:
            code = 1
            try:
                serve(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                # Taking the interpreter apart takes longer than all of the engine's own end.
                sys.stderr.flush()
                os._exit(code)


def serve(settings: dict[str, Any]) -> None:
    """Be one engine, in a Unix session of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(os.devnull) as nothing, open(settings["log"], "w") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(settings["environment"])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if settings["in_process"] else "1"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(settings["socket"])
        with connection.makefile("rw") as lines:
            obey(lines, settings["llm"])


def obey(lines: Any, llm: dict[str, Any]) -> None:
    """Start the engine, do what the lines say, and end it."""
    from vllm import LLM

    def answer(body: object) -> None:
        lines.write(json.dumps(body) + "\n")
        lines.flush()

    answer({"pid": os.getpid()})
    begun = time.monotonic()
    engine = Engine(LLM(**llm))
    answer({"start_s": time.monotonic() - begun})
    for line in lines:
        order = json.loads(line)
        answer(getattr(engine, order.pop("do"))(**order))
    engine.llm.llm_engine.engine_core.shutdown()


class Engine:
    """What the tests ask of an engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._number = 0
        self._published: list[Any] = []

    def generate(self, prompts: list[list[int]], max_tokens: int = 8) -> dict[str, Any]:
        """Return the greedy tokens of each prompt, and how many tokens came out of which cache."""
        begun = time.monotonic()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], _greedy(max_tokens), use_tqdm=False
        )
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "seconds": time.monotonic() - begun,
        }

    def first_token(self, prompt: list[int]) -> float:
        """Return the seconds to the first token of one prompt."""
        begun = time.monotonic()
        self.llm.generate([{"prompt_token_ids": prompt}], _greedy(1), use_tqdm=False)
        return time.monotonic() - begun

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters and gauges, summed over their labels."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                found[metric.name] = found.get(metric.name, 0) + value
        return found

    def reset(self, connector: bool, running: bool = False) -> bool:
        """Reset the prefix cache, and with ``connector`` the tier."""
        return bool(self.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def sleep(self, level: int) -> None:
        """Put the engine to sleep; aborts what is under way."""
        self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None) -> None:
        """Wake the engine."""
        self.llm.wake_up(tags)

    def watch_events(self) -> None:
        """Note from now on what vLLM publishes of its caches."""
        publisher = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self._published.extend(batch.events)

    def events(self) -> dict[str, Any]:
        """Return how many of the tier's events were published, and the block sizes that they name."""
        ours = [event for event in self._published if getattr(event, "medium", None) == "CPU"]
        counts: dict[str, Any] = dict(collections.Counter(type(event).__name__ for event in ours))
        stored = [event for event in ours if type(event).__name__ == "BlockStored"]
        sizes = {len(event.token_ids) // len(event.block_hashes) for event in stored}
        return counts | {"tokens of a block": sorted(sizes)}

    def add(self, prompts: list[list[int]], max_tokens: int = 8) -> list[str]:
        """Add requests without running them."""
        names = []
        for prompt in prompts:
            self._number += 1
            names.append(f"r{self._number}")
            self.llm.llm_engine.add_request(names[-1], {"prompt_token_ids": prompt}, _greedy(max_tokens))
        return names

    def steps(self, count: int | None) -> dict[str, list[int]]:
        """Run ``count`` steps, or all that are left (None); return the tokens of what finished."""
        done: dict[str, list[int]] = {}
        while self.llm.llm_engine.has_unfinished_requests() and (count is None or count > 0):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            count = None if count is None else count - 1
        return done

    def abort(self, names: list[str]) -> None:
        """Abort requests."""
        self.llm.llm_engine.abort_request(names)


def _greedy(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    main()
