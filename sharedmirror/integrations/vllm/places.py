"""A rank's place in the pools: from vLLM's tensors to planes, and the mirrors over them.

The planes of a cache group carry its layers' names, so the ranks of another pipeline stage have other
planes, and a layer whose bytes several ranks hold alike (MLA latents, few KV heads) is one shard of
theirs. Pages may be padded; only the payload is mirrored.

``MirrorKeeper`` attaches in a thread and comes back when the daemon was replaced: a daemon that is
not there costs vLLM the tier and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from sharedmirror import DevicePool, PlaneSpec, PoolLayout, SharedHostMirror
from sharedmirror.errors import ClosedError, InstanceChanged, LayoutError, SharedMirrorError, UsageError
from sharedmirror.integrations.vllm.options import Options

__all__ = ["MirrorKeeper", "Place", "device_pool"]

_LOOK_S = 1.0
_LONGEST_PAUSE_S = 5.0
_VOID = (InstanceChanged, ClosedError)

_log = init_logger("vllm.sharedmirror")


def device_pool(
    caches: CanonicalKVCaches, refs: Sequence[CanonicalKVCacheRef], config: OffloadingConfig, group: int
) -> DevicePool:
    """Return the planes and tensors of one cache group; raises LayoutError for what cannot be mirrored."""
    names = list(config.groups[group].layer_names)
    if len(names) != len(refs):  # layers packed into one tensor are one plane
        names = [f"{names[0]}+{len(names) - 1}"] if len(refs) == 1 else [f"{names[0]}#{at}" for at in range(len(refs))]
    planes, tensors, seen = [], [], set()
    for name, ref in zip(names, refs, strict=True):
        if ref.tensor_idx in seen:
            continue
        seen.add(ref.tensor_idx)
        cache = caches.tensors[ref.tensor_idx]
        row_bytes = cache.tensor.shape[1]
        if not 0 < ref.page_size_bytes <= row_bytes:
            raise LayoutError(f"layer {name} has pages of {ref.page_size_bytes} bytes in rows of {row_bytes}")
        tensors.append(cache.tensor[:, : ref.page_size_bytes])
        shard, shards = _shard(ref, config)
        planes.append(PlaneSpec(name, ref.page_size_bytes, 1, shard, shards))
    return DevicePool(PoolLayout(planes, config.groups[group].tokens_per_block), tensors)


def _shard(ref: CanonicalKVCacheRef, config: OffloadingConfig) -> tuple[int | None, int | None]:
    """Say which ranks hold the same bytes; only where vLLM vouches for it, and only over tensor parallelism."""
    parallel, mapping = config.parallel, ref.mapping
    if mapping is None or not mapping.parallelism_agnostic or parallel.world_size != parallel.tp_size:
        return None, None
    if mapping.num_writers < 2 or parallel.tp_size % mapping.num_writers:
        return None, None
    return parallel.rank // mapping.num_writers, parallel.tp_size // mapping.num_writers


@dataclass(frozen=True)
class Place:
    """An attached mirror, and the daemon's instance it is attached to."""

    mirror: SharedHostMirror
    instance: str


class MirrorKeeper:
    """Keeps one mirror a cache group attached; ``places`` are None while there is no daemon.

    The constructor waits up to ``attach_wait_s`` seconds and raises what makes sharing impossible, such as
    PoolMismatch or LayoutError; a daemon that is away, busy or full is tried again for as long as vLLM lives.
    """

    def __init__(
        self, pools: Sequence[DevicePool], names: Sequence[str], config: OffloadingConfig, engine: str, tag: str,
        options: Options,
    ) -> None:  # fmt: skip
        self.places: tuple[Place, ...] | None = None
        self._pools, self._names, self._config = tuple(pools), tuple(names), config
        self._engine, self._tag, self._options = engine, tag, options
        self._refusal: UsageError | None = None
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="sharedmirror-keeper", daemon=True)
        self._thread.start()
        self._tried.wait(options.attach_wait_s)
        if self._refusal is not None:
            raise self._refusal

    def close(self) -> None:
        """Wait for copies under way and leave the pools."""
        self._closing.set()
        self._thread.join(timeout=2 * _LONGEST_PAUSE_S)
        self._leave()

    def _run(self) -> None:
        pause_s = 0.1
        while not self._closing.is_set():
            try:
                if self.places is None:
                    self.places = self._attach()
                    self._said = ""
                    self._tried.set()
                for place in self.places:
                    place.mirror.poll()
                pause_s = 0.1
                self._closing.wait(_LOOK_S)
                continue
            except _VOID as error:
                _log.warning("event=mirror_lost reason=%r", error.message)
                self._leave()
            except UsageError as error:
                self._refused(error)
            except SharedMirrorError as error:
                self._say(error)
                if not _may_come_soon(error):
                    self._tried.set()
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _attach(self) -> tuple[Place, ...]:
        begin = time.monotonic()
        places: list[Place] = []
        parallel = self._config.parallel
        try:
            for pool, name in zip(self._pools, self._names, strict=True):
                mirror = SharedHostMirror(
                    pool, self._options.num_host_pages, socket=self._options.socket, name=name, engine=self._engine,
                    rank=parallel.rank, world_size=parallel.world_size, pages="leased", layout="page",
                    frames_per_page=self._config.cache.blocks_per_chunk, tag=self._tag,
                )  # fmt: skip
                places.append(Place(mirror, _instance_of(mirror)))
        except BaseException:
            for place in places:
                place.mirror.close()
            raise
        seconds = time.monotonic() - begin
        for place, name in zip(places, self._names, strict=True):
            mirror = place.mirror
            _log.info(
                "event=attached pool=%s engine=%s rank=%d chunks=%d bytes=%d seconds=%.2f", name, self._engine,
                parallel.rank, mirror.num_host_pages - 1, mirror.num_host_pages * mirror.bytes_per_host_page(), seconds,
            )  # fmt: skip
        return tuple(places)

    def _leave(self) -> None:
        places, self.places = self.places, None
        for place in places or ():
            with contextlib.suppress(SharedMirrorError):
                place.mirror.close()

    def _refused(self, error: UsageError) -> None:
        self._say(error)
        if not self._tried.is_set():
            self._refusal = error
            self._tried.set()
            self._closing.set()

    def _say(self, error: SharedMirrorError) -> None:
        if error.message != self._said:
            self._said = error.message
            _log.warning("event=no_tier reason=%r: serving without it, and trying again", error.message)


def _instance_of(mirror: SharedHostMirror) -> str:
    return str(mirror._attachment.channel.instance)  # type: ignore[attr-defined]


def _may_come_soon(error: SharedMirrorError) -> bool:
    """Whether the start is worth delaying: other ranks are on their way, or the daemon is prefaulting."""
    return error.code in ("ranks_missing", "engine_busy", "pool_not_found")
