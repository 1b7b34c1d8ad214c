"""A rank's copies over a real daemon: chunks, ranks that share bytes, errors half way, sleep and shutdown."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    ReqContext,
)

from sharedmirror.errors import CopyError
from sharedmirror.integrations.vllm.link import PoolLink
from sharedmirror.integrations.vllm.manager import SharedMirrorManager
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.integrations.vllm.places import MirrorKeeper, device_pool
from sharedmirror.integrations.vllm.sleeping import guard_sleep
from sharedmirror.integrations.vllm.spec import SharedMirrorOffloadingSpec
from sharedmirror.integrations.vllm.worker import SharedMirrorWorker
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.transfers import Transfer
from tests.vllm.test_parts import config
from tests.vllm.test_sides import BLOCKS, BYTES, DEVICE, HIT, MISS, PAD, ask, keys

PATIENCE_S = 20.0


class Held:
    """Transfers that are not over before ``go``; ``begun`` is set when somebody waits for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._open = threading.Event(), threading.Event()
        wait = Transfer.wait

        def held(transfer: Transfer, timeout_s: float | None = None) -> None:
            self.begun.set()
            assert self._open.wait(PATIENCE_S)
            wait(transfer, timeout_s)

        monkeypatch.setattr(Transfer, "wait", held)

    def go(self) -> None:
        self._open.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go()


@pytest.mark.parametrize(("first", "count"), [(0, 8), (1, 7), (3, 1), (2, 3), (4, 4), (5, 2)])
def test_chunks_of_several_blocks(tiers: Any, first: int, count: int) -> None:
    tier, some = tiers(per_chunk=4), keys(2)
    context = tier.request("a", some)
    blocks = [9, 3, 30, 31, 12, 5, 60, 1]
    assert tier.store(context, some, tier.spec(blocks)) == some
    want = [row[blocks[first : first + count]].clone() for row in tier.rows]
    for row in tier.rows:
        row.fill_(1)
    tier.step()
    asked = some[first // 4 : -(-(first + count) // 4)]
    assert ask(tier, context, asked) == [HIT] * len(asked)
    at = list(range(40, 40 + count))
    assert tier.load(context, asked, tier.spec(at, first=first))
    for row, expected in zip(tier.rows, want, strict=True):
        assert torch.equal(row[at, :BYTES], expected[:, :BYTES])
        row[at, :BYTES] = 1
        assert bool((row == 1).all()), "a byte beside the blocks was written"


# -- ranks that hold the same bytes --------------------------------------------------------------


class SharingRanks:
    """Two ranks of one engine whose layer has the same bytes on both, as MLA's latents have."""

    def __init__(self, socket: str) -> None:
        options = Options(socket=socket, num_host_pages=33, pending_wait_s=0.0, attach_wait_s=PATIENCE_S)
        row = torch.randint(-128, 127, (BLOCKS, BYTES + PAD), dtype=torch.int8, device=DEVICE)
        self.rows = [row, row.clone()]
        self.keepers: list[Any] = [None, None]
        threads = [threading.Thread(target=self._attach, args=(rank, options)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.workers = [SharedMirrorWorker(keeper, DEVICE, 1, options) for keeper in self.keepers]
        self.link = PoolLink("mla", "0", options)
        self.link.wait(PATIENCE_S)
        self.manager = SharedMirrorManager([self.link], [(0, 16)], options, events=False)

    def _attach(self, rank: int, options: Options) -> None:
        parallel = config().parallel.__class__(rank, 2, 2, 1, 1, 1, 0, 1, None, False)
        mine = config(parallel=parallel)
        mapping = CanonicalPageMapping(BYTES, BYTES, (CopyRun(0, 0, BYTES, 1, 0, 0),), 2, rank, True)
        refs = [CanonicalKVCacheRef(0, BYTES, mapping)]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(self.rows[rank], BYTES + PAD)], [refs])
        pool = device_pool(caches, refs, mine, 0)
        self.keepers[rank] = MirrorKeeper([pool], ["mla"], mine, "0", "", options)

    def finish(self, job: int, until: Any) -> None:
        for worker in self.workers:
            worker.wait({job})
            until(lambda worker=worker: [result.job_id for result in worker.get_finished()] == [job])

    def close(self) -> None:
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()


def test_ranks_with_the_same_bytes_hold_one_copy(daemon: Any, wait_until: Any) -> None:
    ranks, some = SharingRanks(daemon.socket), keys(8)
    try:
        assert all(keeper.places[0].mirror._parts for keeper in ranks.keepers), "each stores its turns only"
        context = ReqContext(req_id="a")
        for at, key in enumerate(some):
            context.set_offload_key_position(key, 16 * (at + 1))
        ranks.manager.on_new_request(context)
        blocks = [7, 1, 50, 3, 12, 40, 8, 30]
        want = ranks.rows[0][blocks, :BYTES].clone()
        spec = tiers_spec(blocks)
        output = ranks.manager.prepare_store(some, context)
        for worker in ranks.workers:
            assert worker.submit_store(1, spec, output.store_spec)
        ranks.finish(1, wait_until)
        ranks.manager.complete_store(set(some), context)
        for row in ranks.rows:
            row.fill_(1)
        assert [ranks.manager.lookup(key, context) for key in some] == [HIT] * 8
        order = ranks.manager.prepare_load(some, context)
        for worker in ranks.workers:
            assert worker.submit_load(2, order, tiers_spec(list(range(20, 28))))
        ranks.finish(2, wait_until)
        for row in ranks.rows:
            assert torch.equal(row[20:28, :BYTES], want)
            assert bool((row[:20] == 1).all())
            assert bool((row[20:, BYTES:] == 1).all())
        ranks.manager.complete_load(set(some), context)
    finally:
        ranks.close()


def tiers_spec(blocks: list[int]) -> Any:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])


# -- errors, the end, and sleep ------------------------------------------------------------------


def test_a_store_that_fails_half_way_is_over_when_its_copies_are(
    tiers: Any, daemon: Any, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tiers(groups=2)
    some = keys(2) + keys(2, group=1)
    context = tier.request("a", some)
    store, calls = SharedHostMirror.store, []

    def once(*arguments: Any) -> Transfer:
        calls.append(arguments)
        if len(calls) == 2:
            raise CopyError("on purpose")
        return store(*arguments)

    monkeypatch.setattr(SharedHostMirror, "store", once)
    output = tier.manager.prepare_store(some, context)
    assert tier.worker.submit_store(1, tier.spec([0, 1, 2, 3], [2, 2]), output.store_spec)
    assert held.begun.wait(PATIENCE_S)
    assert not tier.worker._jobs[1].copied.is_set(), "the first group's copies still read the blocks"
    held.go()
    assert tier.finish(1), "vLLM takes no other answer"
    assert [daemon.pool(name)["pages"]["sealed"] for name in ("p0", "p1")] == [0, 0]


def test_shutdown_waits_for_copies_and_drops_the_rest(tiers: Any, daemon: Any, held: Held) -> None:
    tier, some = tiers(), keys(4)
    context = tier.request("a", some)
    orders = [tier.manager.prepare_store(some[at : at + 2], context).store_spec for at in (0, 2)]
    for job, order in enumerate(orders):
        assert tier.worker.submit_store(job, tier.spec([2 * job, 2 * job + 1]), order)
    assert held.begun.wait(PATIENCE_S)
    first, second = tier.worker._jobs[0], tier.worker._jobs[1]
    ending = threading.Thread(target=tier.worker.shutdown)
    ending.start()
    assert not first.copied.is_set()
    held.go()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert first.copied.is_set() and second.copied.is_set()
    assert second.bytes == 0, "it was not begun"
    assert daemon.pool("p0")["pages"]["sealed"] == 0


class Allocator:
    """What of vLLM's allocator matters: it unmaps, here by writing over, and knows what is asleep."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self.calls: list[str] = []
        self.pointer_to_data = {0: SimpleNamespace(is_asleep=False), 1: SimpleNamespace(is_asleep=False)}

    def _unmap(self, which: list[int]) -> None:
        assert all(job.copied.is_set() for job in self._tier.worker._jobs.values()), "copies under way"
        for row in self._tier.rows:
            row.fill_(1)
        for pointer in which:
            self.pointer_to_data[pointer].is_asleep = True

    def sleep(self, offload_tags: tuple[str, ...] = ()) -> None:
        self.calls.append("sleep")
        self._unmap([0, 1])

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append("discard")
        self._unmap([1] if "kv_cache" in tags else [])

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append("wake_up")
        for pointer, tag in enumerate(("weights", "kv_cache")):
            if tags is None or tag in tags:
                self.pointer_to_data[pointer].is_asleep = False


def test_no_copy_goes_on_while_vllm_sleeps(tiers: Any, daemon: Any, held: Held) -> None:
    tier = tiers()
    allocator = Allocator(tier)
    guard_sleep(allocator, tier.worker)
    some = keys(4)
    context = tier.request("a", some)
    want = [row[:2].clone() for row in tier.rows]
    orders = [tier.manager.prepare_store(some[at : at + 2], context).store_spec for at in (0, 2)]
    for job, order in enumerate(orders):
        assert tier.worker.submit_store(job, tier.spec([2 * job, 2 * job + 1]), order)
    assert held.begun.wait(PATIENCE_S)
    jobs = dict(tier.worker._jobs)
    falling = threading.Thread(target=allocator.sleep, kwargs={"offload_tags": ("weights",)})
    falling.start()
    assert allocator.calls == [], "a copy is under way"
    held.go()
    falling.join(PATIENCE_S)
    assert allocator.calls == ["sleep"]
    assert jobs[0].bytes and not jobs[1].bytes, "what was not begun is not begun any more"
    for name in ("weights", "kv_cache"):
        # Half awake is asleep.
        late = tier.manager.prepare_store(keys(1, seed=5), tier.request("late", keys(1, seed=5)))
        if late.keys_to_store:
            tier.worker.submit_store(8, tier.spec([4]), late.store_spec)
            tier.worker.wait({8})
            assert tier.worker._jobs[8].bytes == 0
        allocator.wake_up([name])
    daemon.wait_pages("p0", sealed=2)
    assert {result.job_id for result in wait_results(tier, 3)} == {0, 1, 8}
    assert ask(tier, tier.request("b", some), some[:2]) == [HIT] * 2
    assert ask(tier, tier.request("c", some), some[2:]) != [HIT] * 2
    reader = tier.request("d", some)
    assert ask(tier, reader, some[:2]) == [HIT] * 2
    assert tier.load(reader, some[:2], tier.spec([20, 21])), "it copies again"
    for row, expected in zip(tier.rows, want, strict=True):
        assert torch.equal(row[20:22, :BYTES], expected[:, :BYTES])


def wait_results(tier: Any, count: int) -> list[Any]:
    results: list[Any] = []
    deadline = threading.Event()
    for _ in range(2000):
        results += tier.worker.get_finished()
        if len(results) == count:
            return results
        deadline.wait(0.01)
    pytest.fail(f"only {results} are over")


def test_a_rank_hears_of_sleep_from_vllms_allocator(tiers: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(tiers())
    cumem = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    row = torch.zeros((BLOCKS, BYTES), dtype=torch.int8, device=DEVICE)
    refs = [CanonicalKVCacheRef(0, BYTES)]
    alone = config().parallel.__class__(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    spec = SharedMirrorOffloadingSpec(
        config(parallel=alone, extra_config={"socket": daemon.socket, "num_host_pages": 9})
    )
    worker = spec.get_worker(CanonicalKVCaches([CanonicalKVCacheTensor(row, BYTES)], [refs]))
    try:
        allocator.sleep()
        assert worker._paused
        allocator.wake_up(["kv_cache"])
        assert worker._paused, "the weights are asleep"
        allocator.wake_up(["weights"])
        assert not worker._paused
    finally:
        worker.shutdown()


def test_a_load_fails_while_the_blocks_are_discarded(tiers: Any) -> None:
    tier, some = tiers(), keys(2)
    allocator = Allocator(tier)
    guard_sleep(allocator, tier.worker)
    tier.worker.hide_failures = True
    context = tier.request("a", some)
    tier.store(context, some, tier.spec([0, 1]))
    assert ask(tier, context, some) == [HIT] * 2
    allocator.discard(("cudagraph",))
    assert tier.load(context, some, tier.spec([8, 9])) and not tier.worker.take_failed(), "nothing is unmapped"
    allocator.discard(("kv_cache",))
    assert tier.load(context, some, tier.spec([10, 11]))
    assert tier.worker.take_failed() == {"a"}
    assert all(bool((row == 1).all()) for row in tier.rows), "nothing was written"
    allocator.wake_up(None)
    assert tier.load(context, some, tier.spec([10, 11])) and not tier.worker.take_failed()


def test_what_was_ordered_before_a_reset_is_not_found_after_it(tiers: Any, daemon: Any) -> None:
    """A step's stores are kept for the next step by vLLM; after a sleep their blocks have other contents."""
    tier, some = tiers(), keys(2)
    context = tier.request("a", some)
    order = tier.manager.prepare_store(some, context).store_spec
    tier.manager.reset_cache()
    for row in tier.rows:
        row.fill_(1)
    tier.worker.submit_store(1, tier.spec([0, 1]), order)
    assert tier.finish(1)
    daemon.wait_pages("p0", sealed=0)
    assert ask(tier, tier.request("b", some), some[:1]) == [MISS]
