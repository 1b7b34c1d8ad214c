"""A real vLLM engine in a process of its own, told by lines of JSON what to do.

Run as ``engine_process.py SETTINGS``; ``SETTINGS`` is JSON: ``llm`` (arguments of ``vllm.LLM``) and
``in_process``. Each line on stdin is ``{"do": name, ...}``, each line on stdout an answer; vLLM's own
words go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if settings["in_process"] else "1"
    from vllm import LLM

    begun = time.monotonic()
    engine = Engine(LLM(**settings["llm"]))
    print(json.dumps({"start_s": time.monotonic() - begun, "pid": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)
    engine.llm.llm_engine.engine_core.shutdown()


class Engine:
    """What the tests ask of an engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._number = 0

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
