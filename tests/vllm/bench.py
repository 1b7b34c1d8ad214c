"""Prints what the README says of vLLM: what lookups cost a scheduler, and the time to the first token.

Run by ``./scripts/test-vllm bench``. Nothing here is a test: the numbers are the machine's.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conftest import Starter
from tests.vllm.conftest import Engine, Engines, Template
from tests.vllm.test_sides import Tier, keys
from tests.vllm.tiny_model import VOCABULARY, write_model

CHUNKS = 1000
ROUNDS = 50
PAUSE_S = 0.05
PROMPTS = 5
LENGTHS = (1000, 4000, 8000)


def lookups(start: Starter) -> None:
    """Print milliseconds of the scheduler for a prompt of 1,000 blocks."""
    daemon = start(memory="64MiB")
    tier, chunks = Tier(daemon.socket, num_host_pages=4 * CHUNKS), keys(CHUNKS)
    try:
        context = tier.request("writer", chunks)
        output = tier.manager.prepare_store(chunks, context)
        tier.worker.submit_store(0, tier.spec([at % 64 for at in range(CHUNKS)]), output.store_spec)
        tier.finish(0)
        tier.manager.complete_store(set(output.keys_to_store), context)
        took: dict[str, list[float]] = {}
        for number in range(ROUNDS):
            reader, absent = tier.request(f"r{number}", chunks), keys(CHUNKS, seed=1 + number)
            stranger = tier.request(f"s{number}", absent)
            for what in ("all there", "all there, asked again in the next step"):
                with _timed(took, what):
                    for key in chunks:
                        tier.manager.lookup(key, reader)
                tier.step()
            with _timed(took, "nothing there"):
                tier.manager.lookup(absent[0], stranger)
            with _timed(took, "pages for all reserved"):
                output = tier.manager.prepare_store(absent, stranger)
            for group in output.store_spec.groups:
                tier.links[0].abort(group.instance, group.lease)
            for request in (reader, stranger):
                tier.manager.on_request_finished(request)
            time.sleep(PAUSE_S)
        for what, seconds in took.items():
            best, median, worst = (1e3 * pick(seconds) for pick in (min, statistics.median, max))
            _say(f"{CHUNKS} chunks, {what}: median {median:.2f} ms, best {best:.2f}, worst {worst:.2f}")
    finally:
        tier.close()


def first_token(start: Starter, template: Template) -> None:
    """Print milliseconds to the first token: without a tier, with a cold one, and after SIGKILL and restart."""
    with tempfile.TemporaryDirectory() as models:
        write_model(Path(models) / "llama", layers=8)
        start(memory="2GiB")
        engines = Engines(template, start.directory, start.path(), Path(models))
        settings = {"max_model_len": 8192, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 300}
        try:
            chance = random.Random(1)
            for length in LENGTHS:
                asked = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(PROMPTS)]
                plain = engines(None, **settings)
                without = _median(plain, asked)
                plain.finish()
                first = engines("shared", extra={"num_host_pages": None}, **settings)
                cold = _median(first, asked)
                time.sleep(1)  # the last prompt's stores
                first.kill()
                second = engines("shared", extra={"num_host_pages": None}, **settings)
                warm = _median(second, asked)
                second.finish()
                _say(f"{length} tokens: no tier {without:.0f} ms, cold {cold:.0f} ms, warm after a kill {warm:.0f} ms")
        finally:
            engines.finish()


def _median(engine: Engine, asked: Sequence[list[int]]) -> float:
    engine.ask("first_token", prompt=[5] * 64)
    return 1e3 * statistics.median(float(engine.ask("first_token", prompt=prompt)) for prompt in asked)


@contextlib.contextmanager
def _timed(took: dict[str, list[float]], what: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    took.setdefault(what, []).append(time.perf_counter() - begun)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print all of it."""
    start = Starter()
    try:
        lookups(start)
    finally:
        start.finish()
    start, template = Starter(), Template()
    try:
        first_token(start, template)
    finally:
        start.finish()
        template.close()


if __name__ == "__main__":
    main()
