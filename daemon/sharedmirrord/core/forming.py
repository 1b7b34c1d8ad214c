"""What a new pool gets when all of its ranks are known: its page count, and its regions in the arena."""

from __future__ import annotations

from sharedmirror.errors import ArenaBusy, ArenaFull, MemoryFault, PoolMismatch
from sharedmirror.types import REGION_ALIGNMENT_BYTES, Plane, PoolKind
from sharedmirrord.core import room
from sharedmirrord.core.elastic import Elastic, step_pages
from sharedmirrord.core.model import Effects, Pool, Region, State
from sharedmirrord.core.regions import Placement, Wish, frame_bytes, place


def allocate(state: State, pool: Pool, out: Effects) -> None:
    """Group the planes by the ranks that share them, size the pool and take its regions.

    Raises PoolMismatch, ArenaFull, MemoryFault or ArenaBusy, and changes nothing then, but that other pools may begin
    to give back.
    """
    groups = _groups(pool)
    properties = pool.properties
    frames = properties.frames_per_page
    page_bytes = tuple(frame_bytes(planes) * frames for planes in groups.values())
    count, least = pool.count, 2 if properties.kind is PoolKind.LEASED else 1
    if count is None:
        free = room.available_bytes(state)
        count = max(0, free // 2 - len(groups) * REGION_ALIGNMENT_BYTES) // sum(page_bytes)
    most = count if isinstance(count, int) else count[1]
    placements = [place(planes, most * frames, properties.layout) for planes in groups.values()]
    sizes = [placement.size_bytes for placement in placements]
    elastic = None
    if isinstance(count, tuple):
        elastic = Elastic(count[0], most, step_pages(page_bytes, most), page_bytes)
        sizes = [elastic.region_bytes(at, elastic.backed) for at in range(len(page_bytes))]
    if most < least:
        raise _arena_full(state, pool, least, least * sum(page_bytes), sum(page_bytes))
    _make_room(state, pool, most, sum(page_bytes), elastic, sum(sizes), out)
    pool.num_host_pages, pool.bytes_per_page, pool.elastic = most, sum(page_bytes), elastic
    regions: list[Region] = []
    for ranks, size_bytes in zip(groups, sizes, strict=True):
        extents = state.space.allocate(size_bytes, _wish(pool, ranks))
        if extents is None:
            raise RuntimeError("the arena has less room than it counts")
        regions.append(Region(state.new_id(), ranks, tuple((0, at, size) for at, size in extents), size_bytes))
    pool.regions = regions
    pool.places = _places(pool, groups, placements)


def _wish(pool: Pool, ranks: tuple[int, ...]) -> Wish:
    """Return where a region is to lie: on the node of its ranks' GPUs, or on all of them."""
    nodes = {pool.nodes.get(rank) for rank in ranks}
    return nodes.pop() if len(nodes) == 1 else "shared"


def _groups(pool: Pool) -> dict[tuple[int, ...], list[Plane]]:
    """Return the planes of each region, by the ranks that share it."""
    owners: dict[tuple[str, int], list[int]] = {}
    known: dict[tuple[str, int], Plane] = {}
    for rank in sorted(pool.planes):
        for plane in pool.planes[rank]:
            mark = (plane.name, plane.shard)
            if known.setdefault(mark, plane) != plane:
                raise PoolMismatch(
                    f"rank {rank} brings {plane}, another rank {known[mark]}: equal shards hold equal bytes"
                )
            owners.setdefault(mark, []).append(rank)
    groups: dict[tuple[int, ...], list[Plane]] = {}
    for mark, holders in owners.items():
        groups.setdefault(tuple(holders), []).append(known[mark])
    return groups


def _places(
    pool: Pool, groups: dict[tuple[int, ...], list[Plane]], placements: list[Placement]
) -> dict[int, list[tuple[int, int, int]]]:
    where = {
        (plane.name, plane.shard): (region.id, placement.bases[i], placement.strides[i])
        for planes, region, placement in zip(groups.values(), pool.regions, placements, strict=True)
        for i, plane in enumerate(planes)
    }
    return {rank: [where[plane.name, plane.shard] for plane in planes] for rank, planes in pool.planes.items()}


def _make_room(
    state: State, pool: Pool, most: int, per_page: int, elastic: Elastic | None, needed: int, out: Effects
) -> None:
    """Make room for a pool that needs so many bytes now, and may have ``most`` pages later."""
    most_bytes = needed if elastic is None else elastic.size_bytes(elastic.most)
    if most_bytes > state.space.size_bytes:
        raise _arena_full(state, pool, most, most_bytes, per_page)
    if pool.properties.kind is PoolKind.LEASED:
        _check_table(state, pool, most)
    if room.reclaim(state, needed, pool, out):
        return
    givers = room.ask(state, needed, pool, (needed, most_bytes))
    if not givers:
        raise _arena_full(state, pool, most if elastic is None else elastic.backed, needed, per_page)
    names = sorted(giver.name for giver in givers)
    raise ArenaBusy(
        f"pool {pool.name!r} needs {needed} bytes; {room.available_bytes(state)} of {state.space.size_bytes} are free "
        f"or in pools that nobody uses, and pools {names} are giving back the rest",
        pools=names,
    )


def _check_table(state: State, pool: Pool, pages: int) -> None:
    """Raise MemoryFault where the records have no room for a page table: nobody is to wait for it."""
    there = state.table_room
    if there is None or pages * there.slot_bytes <= there.free_bytes:
        return
    left_open = (
        "" if pool.count is not None else " (num_host_pages is left open, so they take half of the arena's rest)"
    )
    raise MemoryFault(
        f"pool {pool.name!r} of {pages} pages{left_open} needs a page table of {pages * there.slot_bytes} bytes in "
        f"/dev/shm beside the arena; {there.free_bytes} are to be had. Ask for fewer host pages, remove what else lies "
        f"there, or enlarge it: `mount -o remount,size=SIZE /dev/shm` as root, or --shm-size of the container",
        asked_bytes=pages * there.slot_bytes,
        free_bytes=there.free_bytes,
    )


def _arena_full(state: State, pool: Pool, pages: int, size_bytes: int, per_page: int) -> ArenaFull:
    free = room.available_bytes(state)
    return ArenaFull(
        f"pool {pool.name!r} asks for {pages} pages of {per_page} bytes ({size_bytes} bytes); the arena has {free} of "
        f"{state.space.size_bytes} bytes free or in pools that nobody uses. "
        f"Ask for fewer host pages, or start the daemon with more --memory",
        asked=size_bytes,
        free=free,
    )
