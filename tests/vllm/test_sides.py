"""The manager and the worker over a real daemon, without vLLM's engine around them."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingGroupConfig

from sharedmirror.errors import CopyError
from sharedmirror.integrations.vllm.link import PoolLink
from sharedmirror.integrations.vllm.manager import SharedMirrorManager
from sharedmirror.integrations.vllm.metrics import Metric
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.integrations.vllm.places import MirrorKeeper, device_pool
from sharedmirror.integrations.vllm.worker import SharedMirrorWorker
from tests.vllm.test_parts import config

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
BLOCKS, BYTES, PAD = 64, 96, 32
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Tier:
    """One engine's two sides, with ``groups`` cache groups of two layers."""

    def __init__(
        self, socket: str, *, groups: int = 1, name: str = "0", device: torch.device = DEVICE, page: int = BYTES,
        per_chunk: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        self.device, self.page, tokens = device, page, 16 * per_chunk
        self.options = Options(socket=socket, **({"num_host_pages": 33, "pending_wait_s": 0.0} | options))
        layers = [(f"layer.{2 * g}", f"layer.{2 * g + 1}") for g in range(groups)]
        self.config = config(
            groups=tuple(OffloadingGroupConfig(16, names, g) for g, names in enumerate(layers)),
            parallel=config().parallel.__class__(0, 1, 1, 1, 1, 1, 0, 1, None, False),
            cache=OffloadingCacheConfig(16, per_chunk),
        )
        shape = (BLOCKS, page + PAD)
        rows = [torch.randint(-128, 127, shape, dtype=torch.int8, device=device) for _ in range(2 * groups)]
        self.rows = rows
        tensors = [CanonicalKVCacheTensor(tensor, page + PAD) for tensor in rows]
        refs = [[CanonicalKVCacheRef(2 * g + at, page) for at in range(2)] for g in range(groups)]
        caches = CanonicalKVCaches(tensors, refs)
        names = [f"p{g}" for g in range(groups)]
        pools = [device_pool(caches, refs[g], self.config, g) for g in range(groups)]
        self.keeper = MirrorKeeper(pools, names, self.config, name, "", self.options)
        self.worker = SharedMirrorWorker(self.keeper, device, per_chunk, self.options)
        self.links = [PoolLink(each, name, self.options) for each in names]
        for link in self.links:
            link.wait(10)
        self.manager = SharedMirrorManager(self.links, [(g, tokens) for g in range(groups)], self.options, events=True)
        self.jobs = 0

    def request(self, name: str, keys: list[OffloadKey]) -> ReqContext:
        context = ReqContext(req_id=name)
        for group in range(len(self.links)):
            mine = [key for key in keys if key[-1] == group]
            for at, key in enumerate(mine):
                context.set_offload_key_position(key, 16 * self.config.cache.blocks_per_chunk * (at + 1))
        self.manager.on_new_request(context)
        return context

    def spec(self, blocks: list[int], sizes: list[int] | None = None, first: int = 0) -> GPULoadStoreSpec:
        sizes = sizes or [len(blocks)]
        return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=[first] * len(sizes))

    def store(self, context: ReqContext, keys: list[OffloadKey], spec: GPULoadStoreSpec) -> list[OffloadKey]:
        output = self.manager.prepare_store(keys, context)
        if output.keys_to_store:
            self.jobs += 1
            assert self.worker.submit_store(self.jobs, spec, output.store_spec)
            self.finish(self.jobs)
            self.manager.complete_store(set(output.keys_to_store), context)
        return list(output.keys_to_store)

    def load(self, context: ReqContext, keys: list[OffloadKey], spec: GPULoadStoreSpec) -> bool:
        order = self.manager.prepare_load(keys, context)
        self.jobs += 1
        assert self.worker.submit_load(self.jobs, order, spec)
        return self.finish(self.jobs)

    def finish(self, job: int) -> bool:
        self.worker.wait({job})
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for result in self.worker.get_finished():
                assert result.job_id == job
                return bool(result.success)
            time.sleep(0.002)
        pytest.fail("the job does not end")

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new, ()))

    def count(self, name: str) -> float:
        return float(self.manager.get_stats().reduce().get(name, 0))

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


def keys(count: int, *, group: int = 0, seed: int = 0) -> list[OffloadKey]:
    return [make_offload_key(hashlib.sha256(f"{seed} {at}".encode()).digest(), group) for at in range(count)]


def ask(tier: Tier, context: ReqContext, asked: list[OffloadKey]) -> list[LookupResult]:
    return [tier.manager.lookup(key, context) for key in asked]


def test_what_was_stored_is_loaded(tiers: Any) -> None:
    tier, some = tiers(), keys(4)
    context = tier.request("a", some)
    assert ask(tier, context, some[:1]) == [MISS]
    assert tier.store(context, some, tier.spec([5, 9, 2, 30])) == some
    assert tier.store(context, some, tier.spec([5, 9, 2, 30])) == [], "it is there already"
    want = [row[[5, 9, 2, 30]].clone() for row in tier.rows]
    for row in tier.rows:
        row.fill_(1)
    tier.step()
    assert ask(tier, context, some) == [HIT] * 4
    assert tier.load(context, some, tier.spec([40, 41, 42, 43]))
    for row, expected in zip(tier.rows, want, strict=True):
        assert torch.equal(row[40:44, :BYTES], expected[:, :BYTES])
        assert bool((row[40:44, BYTES:] == 1).all()), "padding stays as it was"


def test_one_round_trip_for_a_request(tiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, some = tiers(num_host_pages=1100), keys(1000)
    context = tier.request("a", some)
    tier.store(context, some, tier.spec([at % BLOCKS for at in range(1000)]))
    tier.manager.on_request_finished(context)
    client = tier.links[0]._connection.client
    calls: list[str] = []
    call = client._call

    def counted(op: str, **arguments: Any) -> Any:
        calls.append(op)
        return call(op, **arguments)

    monkeypatch.setattr(client, "_call", counted)
    context = tier.request("b", some)
    assert ask(tier, context, some) == [HIT] * 1000
    tier.step()
    assert ask(tier, context, some) == [HIT] * 1000
    assert calls.count("lookup") == 1
    # Downwards, as groups with a window are scanned.
    other = tier.request("c", some)
    assert ask(tier, other, some[::-1]) == [HIT] * 1000
    assert calls.count("lookup") <= 4
    # Absent ones are asked for again in each step, in one call too.
    absent = keys(1000, seed=1)
    nobody = tier.request("d", absent)
    for _ in range(3):
        calls.clear()
        assert ask(tier, nobody, absent[::-1]) == [MISS] * 1000
        assert calls.count("lookup") <= 2
        tier.step()


def test_a_hit_stays_until_its_load_is_over(tiers: Any, daemon: Any) -> None:
    tier, some = tiers(), keys(8)
    context = tier.request("a", some)
    tier.store(context, some, tier.spec(list(range(8))))
    reader = tier.request("b", some)
    assert ask(tier, reader, some) == [HIT] * 8
    # A second engine fills the pool: what is held must stay.
    other = tiers(name="1")
    for seed in range(1, 9):
        more = keys(8, seed=seed)
        writer = other.request(f"w{seed}", more)
        other.store(writer, more, other.spec(list(range(8))))
    assert daemon.pool("p0")["pages"]["pinned"] == 8
    assert tier.load(reader, some, tier.spec(list(range(20, 28))))
    for row in tier.rows:
        assert torch.equal(row[20:28, :BYTES], row[0:8, :BYTES])
    tier.manager.on_request_finished(reader)
    assert daemon.pool("p0")["pages"]["pinned"] == 8, "the load is not reported as over"
    tier.manager.complete_load(set(some), reader)
    daemon.wait_pages("p0", pinned=0)


def test_holds_end_with_the_request_or_its_turn(tiers: Any, daemon: Any) -> None:
    tier, some = tiers(), keys(8)
    tier.store(tier.request("a", some), some, tier.spec(list(range(8))))
    for name in ("b", "c"):
        assert ask(tier, tier.request(name, some), some) == [HIT] * 8
    assert daemon.pool("p0")["pages"]["pinned"] == 8
    tier.step("b")
    tier.manager.on_request_finished(ReqContext(req_id="c"))
    daemon.wait_pages("p0", pinned=0)


def test_a_chunk_that_is_being_written(tiers: Any) -> None:
    tier, some = tiers(pending_wait_s=0.2), keys(4)
    context = tier.request("a", some)
    output = tier.manager.prepare_store(some, context)
    reader = tier.request("b", some)
    assert ask(tier, reader, some[:2]) == [PENDING, PENDING]
    time.sleep(0.25)
    assert ask(tier, reader, some[:1]) == [MISS], "nobody waits for ever"
    tier.worker.submit_store(1, tier.spec([0, 1, 2, 3]), output.store_spec)
    tier.finish(1)
    tier.step()
    assert ask(tier, reader, some) == [HIT] * 4


def test_groups_have_pools_of_their_own(tiers: Any, daemon: Any) -> None:
    tier = tiers(groups=2)
    some = keys(3) + keys(3, group=1)
    context = tier.request("a", some)
    assert tier.store(context, some, tier.spec([1, 2, 3, 11, 12, 13], [3, 3])) == some
    assert ask(tier, context, [*some[:3], *some[:2:-1]]) == [HIT] * 6
    assert tier.load(context, [*some[:3], some[5]], tier.spec([21, 22, 23, 33], [3, 1]))
    for row in tier.rows[:2]:
        assert torch.equal(row[21:24, :BYTES], row[1:4, :BYTES])
    for row in tier.rows[2:]:
        assert torch.equal(row[33, :BYTES], row[13, :BYTES])
    assert [daemon.pool(name)["pages"]["sealed"] for name in ("p0", "p1")] == [3, 3]


def test_a_failed_load_makes_its_request_compute(tiers: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, some = tiers(), keys(4)
    context = tier.request("a", some)
    tier.store(context, some, tier.spec([0, 1, 2, 3]))
    assert ask(tier, context, some) == [HIT] * 4

    def fail(*_: Any) -> None:
        raise CopyError("on purpose")

    monkeypatch.setattr(tier.worker, "_copy_in", fail)
    assert not tier.load(context, some, tier.spec([4, 5, 6, 7]))
    assert tier.worker.take_failed() == {"a"}
    tier.manager.load_failed("a")
    tier.manager.complete_load(set(some), context)
    assert ask(tier, context, some[:1]) == [MISS]
    assert daemon.pool("p0")["pages"]["sealed"] == 0
    assert tier.manager.prepare_store(some, context).keys_to_store == some
    assert tier.count(Metric.FAILED_LOADS) == 1


def test_a_load_that_is_late_is_not_begun(tiers: Any) -> None:
    tier, some = tiers(load_timeout_s=0.0), keys(2)
    tier.worker.hide_failures = True
    context = tier.request("a", some)
    tier.store(context, some, tier.spec([0, 1]))
    assert ask(tier, context, some) == [HIT] * 2
    before = tier.rows[0].clone()
    assert tier.load(context, some, tier.spec([8, 9]))
    assert tier.worker.take_failed() == {"a"}
    assert torch.equal(tier.rows[0], before)


def test_the_stock_connector_loads_late_rather_than_never(tiers: Any) -> None:
    tier, some = tiers(load_timeout_s=0.0), keys(2)
    context = tier.request("a", some)
    tier.store(context, some, tier.spec([0, 1]))
    assert ask(tier, context, some) == [HIT] * 2
    assert tier.load(context, some, tier.spec([8, 9])), "a failure would end the engine"
    assert torch.equal(tier.rows[0][8:10, :BYTES], tier.rows[0][0:2, :BYTES])


def test_a_daemon_that_hangs_costs_one_deadline(tiers: Any, daemon: Any, wait_until: Any) -> None:
    tier, some = tiers(call_timeout_s=0.2), keys(4)
    tier.store(tier.request("a", some), some, tier.spec([0, 1, 2, 3]))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for name in ("b", "c"):
            assert ask(tier, tier.request(name, some), some[:1]) == [MISS]
            assert tier.manager.prepare_store(keys(4, seed=1), tier.request(name, some)).keys_to_store == []
        assert tier.count(Metric.FAILED_CALLS) == 1, "nobody asks again before it is back"
        assert tier.count(Metric.UP) == 0
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: tier.links[0].usable, "the link is back")
    assert ask(tier, tier.request("d", some), some) == [HIT] * 4


def test_no_daemon(start: Any) -> None:
    tier, some = Tier(start.path()), keys(4)
    try:
        context = tier.request("a", some)
        assert ask(tier, context, some[:1]) == [MISS]
        assert tier.manager.prepare_store(some, context).keys_to_store == []
        assert tier.count(Metric.UP) == 0
        tier.manager.on_request_finished(context)
    finally:
        tier.close()


def test_a_full_pool(tiers: Any) -> None:
    tier = tiers(num_host_pages=5)
    context = tier.request("a", keys(12))
    assert tier.store(context, keys(12), tier.spec([0, 1, 2, 3])) == keys(4), "as many as there is room for"
    assert ask(tier, context, keys(4)) == [HIT] * 4
    other = keys(2, seed=1)
    assert tier.manager.prepare_store(other, tier.request("b", other)).keys_to_store == [], "everything is held"
    tier.manager.on_request_finished(context)
    deadline = time.monotonic() + 20
    while tier.store(tier.request("b", other), other, tier.spec([4, 5])) != other:
        assert time.monotonic() < deadline
    events = [(event.removed, len(event.keys)) for event in tier.manager.take_events()]
    assert events == [(False, 4), (True, 2), (False, 2)]


def test_orders_of_another_instance_are_refused(start: Any, wait_until: Any) -> None:
    first = start()
    tier, some = Tier(first.socket), keys(4)
    try:
        context = tier.request("a", some)
        tier.store(context, some, tier.spec([0, 1, 2, 3]))
        assert ask(tier, context, some) == [HIT] * 4
        load = tier.manager.prepare_load(some, context)
        store = tier.manager.prepare_store(keys(4, seed=1), context).store_spec
        first.kill()
        for name in first.segments():
            os.unlink(f"/dev/shm/{name}")
        second = start(socket=first.socket)
        wait_until(lambda: tier.links[0].life == 1 and tier.links[0].usable, "the link is back")
        before = tier.rows[0].clone()
        tier.worker.submit_load(90, load, tier.spec([4, 5, 6, 7]))
        assert not tier.finish(90)
        tier.worker.submit_store(91, tier.spec([0, 1, 2, 3]), store)
        assert tier.finish(91), "vLLM takes no other answer"
        assert torch.equal(tier.rows[0], before)
        assert second.pool("p0")["pages"]["sealed"] == 0
        tier.manager.complete_load(set(some), context)
        assert ask(tier, context, some[:1]) == [MISS]
        assert tier.store(context, some, tier.spec([0, 1, 2, 3])) == some
    finally:
        tier.close()


def test_a_reset_while_the_daemon_is_away_is_not_forgotten(start: Any, wait_until: Any) -> None:
    first = start()
    tier, some = Tier(first.socket), keys(4)
    try:
        context = tier.request("a", some)
        tier.store(context, some, tier.spec([0, 1, 2, 3]))
        first.kill()
        tier.manager.reset_cache()
        second = start(socket=first.socket)
        wait_until(lambda: tier.links[0].usable, "the link is back")
        assert second.pool("p0")["pages"]["sealed"] == 0
        tier.step()
        assert ask(tier, context, some[:1]) == [MISS]
    finally:
        tier.close()
