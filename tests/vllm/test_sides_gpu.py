"""A rank's copies on a GPU, in vLLM's order: what a store reads, what a load writes over, when either is over.

Run by ``scripts/test-gpu`` where vLLM can be imported. A kernel that sleeps on the device makes a missing wait
visible: without it the copy would be over long before the blocks are written, or would still read what comes later.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from sharedmirror.copies import plan as plan_module
from sharedmirror.copies.staged import StagedEngine
from tests.vllm.test_sides import HIT, MISS, PAD, Tier, ask, keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]

SLEEP_CYCLES = 400_000_000
"""About a fifth of a second."""
PAGE = 4096
ROUTES = ("direct", "plain", "staged")
BLOCKS, OTHERS = [5, 9, 2, 30], [40, 41, 42, 43]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every engine wait for its kernels: without them there is one route only."""
    make = StagedEngine.__init__

    def make_and_wait(engine: StagedEngine, *arguments: Any, **options: Any) -> None:
        make(engine, *arguments, **options)
        assert engine.wait_for_kernels()

    monkeypatch.setattr(StagedEngine, "__init__", make_and_wait)


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every copy take one way of the engine."""
    monkeypatch.setattr(plan_module, "SMALL_BYTES", 1 << 40 if request.param == "direct" else -1)
    monkeypatch.setattr(plan_module, "PLAIN_BYTES", 0 if request.param == "plain" else 1 << 60)
    return str(request.param)


@pytest.fixture(params=["null stream", "own stream"])
def model(request: pytest.FixtureRequest) -> torch.cuda.Stream:
    """The stream on which the model runs."""
    return torch.cuda.default_stream() if request.param == "null stream" else torch.cuda.Stream()


def sleep_and_fill(tier: Tier, model: torch.cuda.Stream, value: int, blocks: list[int]) -> torch.cuda.Event:
    """Let the model's stream sleep, then write blocks; return the end of it."""
    with torch.cuda.stream(model):
        at = torch.tensor(blocks, device=tier.device)
        tier.rows[0][:1].clone().index_fill_(0, at[:1] * 0, value)  # to load the kernel may wait for the device
        torch.cuda._sleep(1)
        torch.cuda.synchronize(tier.device)
        torch.cuda._sleep(SLEEP_CYCLES)
        for row in tier.rows:
            row.index_fill_(0, at, value)
        written = torch.cuda.Event()
        written.record(model)
        return written


def begun(tier: Tier, job: int) -> Any:
    """Return the job once its copies are on the device."""
    found = tier.worker._jobs[job]
    deadline = time.monotonic() + 20
    while not found.bytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def submit_store(tier: Tier, model: torch.cuda.Stream, order: Any, blocks: list[int]) -> int:
    tier.jobs += 1
    with torch.cuda.stream(model):
        assert tier.worker.submit_store(tier.jobs, tier.spec(blocks), order)
    return tier.jobs


def submit_load(tier: Tier, model: torch.cuda.Stream, order: Any, blocks: list[int]) -> int:
    tier.jobs += 1
    with torch.cuda.stream(model):
        assert tier.worker.submit_load(tier.jobs, order, tier.spec(blocks))
    return tier.jobs


def result_after(tier: Tier, job: int, before: torch.cuda.Event) -> bool:
    """Ask for the job's result as vLLM does; it may not come before ``before``."""
    assert not before.query(), "the device was too fast for this test"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        results = tier.worker.get_finished()
        over = before.query()
        if results:
            assert over, "reported before it was complete"
            assert [result.job_id for result in results] == [job]
            return bool(results[0].success)
    pytest.fail("the job does not end")


def loaded(tier: Tier, some: list[Any], name: str, blocks: list[int] = OTHERS) -> list[torch.Tensor]:
    """Load chunks for another request and return the blocks they went into."""
    reader = tier.request(name, some)
    assert ask(tier, reader, some) == [HIT] * len(some)
    assert tier.load(reader, some, tier.spec(blocks))
    tier.manager.complete_load(set(some), reader)
    return [row[blocks, : tier.page].cpu() for row in tier.rows]


def test_a_store_reads_what_the_model_writes_before_it(tiers: Any, route: str, model: torch.cuda.Stream) -> None:
    tier, some = tiers(page=PAGE), keys(4)
    context = tier.request("a", some)
    order = tier.manager.prepare_store(some, context).store_spec
    written = sleep_and_fill(tier, model, 7, BLOCKS)
    assert result_after(tier, submit_store(tier, model, order, BLOCKS), written)
    tier.manager.complete_store(set(some), context)
    assert all(bool((row == 7).all()) for row in loaded(tier, some, "b"))


def test_blocks_that_were_waited_for_may_be_written_again(tiers: Any, route: str, model: torch.cuda.Stream) -> None:
    """Preemption: vLLM waits for the job, then gives the blocks to another request, on any stream."""
    tier, some = tiers(page=PAGE), keys(4)
    context = tier.request("a", some)
    order = tier.manager.prepare_store(some, context).store_spec
    other = torch.cuda.Stream()
    sleep_and_fill(tier, model, 7, BLOCKS)
    job = submit_store(tier, model, order, BLOCKS)
    tier.worker.wait({job})
    with torch.cuda.stream(other):
        for row in tier.rows:
            row.fill_(3)
    other.synchronize()
    assert tier.finish(job)
    assert all(bool((row == 7).all()) for row in loaded(tier, some, "b"))


def test_a_load_comes_after_what_was_to_be_written_there(tiers: Any, route: str, model: torch.cuda.Stream) -> None:
    """Blocks are zeroed, and a request before may still be writing them: on the device, when the order comes."""
    tier, some = tiers(page=PAGE), keys(4)
    context = tier.request("a", some)
    tier.store(context, some, tier.spec(BLOCKS))
    want = [row[BLOCKS, :PAGE].cpu() for row in tier.rows]
    assert ask(tier, context, some) == [HIT] * 4
    order = tier.manager.prepare_load(some, context)
    zeroed = sleep_and_fill(tier, model, 0, OTHERS)
    assert result_after(tier, submit_load(tier, model, order, OTHERS), zeroed)
    # What is reported is there for every stream, and for one that knows of no event too.
    reader = torch.cuda.Stream()
    with torch.cuda.stream(reader):
        seen = [row.clone() for row in tier.rows]
    reader.synchronize()
    for row, expected in zip(seen, want, strict=True):
        assert torch.equal(row[OTHERS, :PAGE].cpu(), expected)
        assert bool((row[OTHERS, PAGE:] == 0).all()), "padding stays as it was"


def test_orders_do_not_wait_for_the_model_in_vllms_thread(tiers: Any, route: str, model: torch.cuda.Stream) -> None:
    tier, some = tiers(page=PAGE), keys(8)
    context = tier.request("a", some)
    orders = [tier.manager.prepare_store(some[at : at + 4], context).store_spec for at in (0, 4)]
    written = sleep_and_fill(tier, model, 7, BLOCKS + OTHERS)
    jobs = {submit_store(tier, model, orders[0], BLOCKS), submit_store(tier, model, orders[1], OTHERS)}
    assert tier.worker.get_finished() == []
    assert not written.query(), "an order or a question waited for the device"
    tier.worker.wait(jobs)
    assert written.query()
    while jobs:
        jobs -= {result.job_id for result in tier.worker.get_finished()}
    assert all(bool((row == 7).all()) for row in loaded(tier, some, "b", list(range(50, 58))))


def test_a_reset_does_not_give_pages_away_that_are_being_written(
    tiers: Any, daemon: Any, model: torch.cuda.Stream
) -> None:
    tier, some, more = tiers(page=PAGE, num_host_pages=5), keys(4), keys(4, seed=1)
    context = tier.request("a", some)
    order = tier.manager.prepare_store(some, context).store_spec
    written = sleep_and_fill(tier, model, 7, BLOCKS)
    job = submit_store(tier, model, order, BLOCKS)
    begun(tier, job)
    tier.manager.reset_cache()
    other = tier.request("b", more)
    early = tier.manager.prepare_store(more, other)
    assert not early.keys_to_store or written.query(), "pages with a copy under way were granted again"
    if early.keys_to_store:
        pytest.skip("the device was too fast for this test")
    assert tier.finish(job)
    daemon.wait_pages("p0", free=4)
    assert tier.store(other, more, tier.spec(OTHERS)) == more
    want = [row[OTHERS, :PAGE].cpu() for row in tier.rows]
    torch.cuda.synchronize()
    assert ask(tier, tier.request("c", some), some[:1]) == [MISS]
    for row, expected in zip(loaded(tier, more, "d", [50, 51, 52, 53]), want, strict=True):
        assert torch.equal(row, expected)


def test_an_aborted_request_keeps_what_its_load_reads(tiers: Any, daemon: Any, model: torch.cuda.Stream) -> None:
    tier, some = tiers(page=PAGE), keys(4)
    context = tier.request("a", some)
    tier.store(context, some, tier.spec(BLOCKS))
    want = [row[BLOCKS, :PAGE].cpu() for row in tier.rows]
    assert ask(tier, context, some) == [HIT] * 4
    order = tier.manager.prepare_load(some, context)
    zeroed = sleep_and_fill(tier, model, 0, OTHERS)
    job = submit_load(tier, model, order, OTHERS)
    tier.manager.on_request_finished(context)
    assert daemon.pool("p0")["pages"]["pinned"] == 4
    assert result_after(tier, job, zeroed) if not zeroed.query() else tier.finish(job)
    tier.manager.complete_load(set(some), context)
    daemon.wait_pages("p0", pinned=0)
    for row, expected in zip(tier.rows, want, strict=True):
        assert torch.equal(row[OTHERS, :PAGE].cpu(), expected)


def test_shutdown_with_a_store_on_the_device(tiers: Any, daemon: Any, model: torch.cuda.Stream) -> None:
    tier, some = tiers(page=PAGE), keys(4)
    order = tier.manager.prepare_store(some, tier.request("a", some)).store_spec
    written = sleep_and_fill(tier, model, 7, BLOCKS)
    job = submit_store(tier, model, order, BLOCKS)
    under_way = tier.worker._jobs[job]
    tier.worker.shutdown()
    assert written.query() or not under_way.bytes, "the blocks may be freed now, and a copy still reads them"
    tier.close()
    daemon.wait_status(lambda status: not status["sessions"], "nobody is attached")
    torch.cuda.synchronize()
    again = tiers(page=PAGE)
    assert ask(again, again.request("a", some), some[:1]) == [MISS], "it was not committed"


def test_a_pause_waits_for_the_device(tiers: Any, route: str, model: torch.cuda.Stream) -> None:
    """When it returns, vLLM unmaps the blocks."""
    tier, some = tiers(page=PAGE), keys(8)
    context = tier.request("a", some)
    orders = [tier.manager.prepare_store(some[at : at + 4], context).store_spec for at in (0, 4)]
    written = sleep_and_fill(tier, model, 7, BLOCKS)
    first = submit_store(tier, model, orders[0], BLOCKS)
    under_way = begun(tier, first)
    second = submit_store(tier, model, orders[1], OTHERS)
    waiting = tier.worker._jobs[second]
    tier.worker.pause()
    assert written.query() and under_way.copied.is_set() and waiting.copied.is_set()
    assert waiting.bytes == 0
    for row in tier.rows:
        row.fill_(1)
    torch.cuda.synchronize()
    tier.worker.resume()
    jobs = {first, second}
    while jobs:
        jobs -= {result.job_id for result in tier.worker.get_finished()}
    assert all(bool((row == 7).all()) for row in loaded(tier, some[:4], "b"))


def test_both_directions_at_once_byte_for_byte(tiers: Any, route: str) -> None:
    """Several groups with padded pages; stores and loads of other blocks are under way together."""
    tier = tiers(groups=2, page=PAGE, num_host_pages=200)
    old, new = keys(12) + keys(12, group=1), keys(12, seed=1) + keys(12, group=1, seed=1)
    a, b, c, d = list(range(12)), list(range(12, 24)), list(range(24, 36)), list(range(36, 48))
    writer = tier.request("a", old)
    assert tier.store(writer, old, tier.spec(a + b, [12, 12])) == old
    before = [row.cpu() for row in tier.rows]
    reader = tier.request("b", old)
    assert ask(tier, reader, old) == [HIT] * 24
    load = tier.manager.prepare_load(old, reader)
    store = tier.manager.prepare_store(new, tier.request("c", new)).store_spec
    model = torch.cuda.Stream()
    sleep_and_fill(tier, model, 5, d)
    with torch.cuda.stream(model):
        assert tier.worker.submit_store(90, tier.spec(c[::-1] + d, [12, 12]), store)
        # The blocks of group 0 are not those of group 1: the same numbers, in other tensors.
        assert tier.worker.submit_load(91, load, tier.spec(d + c, [12, 12]))
    jobs = {90, 91}
    while jobs:
        for result in tier.worker.get_finished():
            assert result.success and result.transfer_size == 2 * 12 * 2 * PAGE
            jobs.remove(result.job_id)
    got = [row.cpu() for row in tier.rows]
    for at in (0, 1):
        assert torch.equal(got[at][d, :PAGE], before[at][a, :PAGE])
        assert torch.equal(got[2 + at][c, :PAGE], before[2 + at][b, :PAGE])
        assert bool((got[at][d, PAGE:] == 5).all()) and torch.equal(got[2 + at][c, PAGE:], before[2 + at][c, PAGE:])
    rest = [index for index in range(64) if index not in c + d]
    assert all(torch.equal(row[rest], old_row[rest]) for row, old_row in zip(got, before, strict=True))
    third = tier.request("d", new)
    assert ask(tier, third, new) == [HIT] * 24
    assert tier.load(third, new, tier.spec(a + b, [12, 12]))
    for at in (0, 1):
        assert torch.equal(tier.rows[at][a, :PAGE].cpu(), before[at][c[::-1], :PAGE])
        assert bool((tier.rows[2 + at][b, :PAGE] == 5).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_blocks_on_another_device_than_the_current_one(tiers: Any, route: str) -> None:
    """Every rank of one process, or a process that was given all devices."""
    tier, some = tiers(page=PAGE, device=torch.device("cuda", 1)), keys(4)
    assert torch.cuda.current_device() == 0
    context = tier.request("a", some)
    order = tier.manager.prepare_store(some, context).store_spec
    model = torch.cuda.Stream(1)
    written = sleep_and_fill(tier, model, 7, BLOCKS)
    with torch.cuda.device(1):
        torch.cuda.set_stream(model)
    try:
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(1) == model
        tier.jobs += 1
        assert tier.worker.submit_store(tier.jobs, tier.spec(BLOCKS), order)
    finally:
        with torch.cuda.device(1):
            torch.cuda.set_stream(torch.cuda.default_stream(1))
    assert result_after(tier, tier.jobs, written)
    tier.manager.complete_store(set(some), context)
    assert all(bool((row == 7).all()) for row in loaded(tier, some, "b"))
    assert torch.cuda.current_device() == 0


def test_many_orders_from_a_thread_while_the_model_runs(tiers: Any, route: str) -> None:
    """Every order is right, whatever is under way beside it."""
    tier = tiers(page=PAGE, num_host_pages=400)
    model, stop = torch.cuda.Stream(), threading.Event()

    def work() -> None:
        noise = torch.randn(1024, 1024, device=tier.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                noise = torch.tanh(noise @ noise)
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for turn in range(30):
            some = keys(8, seed=turn)
            context = tier.request(f"w{turn}", some)
            order = tier.manager.prepare_store(some, context).store_spec
            blocks = [(8 * turn + at) % 32 for at in range(8)]
            with torch.cuda.stream(model):
                for row in tier.rows:
                    row[blocks] = turn
                job = submit_store(tier, model, order, blocks)
            tier.worker.wait({job})
            with torch.cuda.stream(model):
                for row in tier.rows:
                    row[blocks] = -1
            assert tier.finish(job)
            tier.manager.complete_store(set(some), context)
            found = loaded(tier, some, f"r{turn}", list(range(40, 48)))
            assert all(bool((row == turn).all()) for row in found), turn
    finally:
        stop.set()
        thread.join()
    assert all(row.shape == (64, PAGE + PAD) for row in tier.rows)
