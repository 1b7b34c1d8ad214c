"""What the core knows: pools, engine incarnations, sessions, leases and hits, and the records they leave.

Positions within a lease are bits of Python integers: bit i stands for the lease's page i. So a commit
of any number of pages, and the question which pages every writer committed, are single operations.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sharedmirror.errors import SharedMirrorError
from sharedmirror.types import Layout, Plane, PoolKind, Role
from sharedmirrord.core.durable import Write
from sharedmirrord.core.elastic import Elastic
from sharedmirrord.core.pages import PageTable
from sharedmirrord.core.regions import ArenaSpace


@dataclass(frozen=True)
class Peer:
    """Who is behind a connection, as the rim found out. ``pid`` is 0 where it cannot be known."""

    pid: int
    uid: int
    start_time: int
    token_hash: bytes


class SessionState(str, enum.Enum):
    """How much is known of a session's life."""

    NEW = "new"
    WAITING = "waiting"
    ATTACHED = "attached"
    LOST = "lost"
    DEAD = "dead"
    DETACHED = "detached"


@dataclass
class Session:
    """One connected process; DEAD means that its process has ended but may have left forks."""

    id: int
    peer: Peer
    role: Role
    state: SessionState = SessionState.NEW
    pool: int | None = None
    incarnation: int | None = None
    rank: int | None = None
    since: float = 0.0
    connected: bool = True
    last_request: int = 0
    last_reply: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()
    leases: set[int] = field(default_factory=set)
    """Leases that this session took; they are revoked when it ends."""
    hits: set[int] = field(default_factory=set)
    mark: int = 0
    """Of a scheduler: names its hits from times without a daemon. Given at attach, so that it tells who came first."""
    away: int = 0
    """Hits that it took without a daemon, with numbers below, are over or known; see ``core.away``."""

    @property
    def may_copy(self) -> bool:
        """Whether a copy of this process may still be under way: it has neither drained nor gone."""
        return self.state is not SessionState.DETACHED

    @property
    def lives(self) -> bool:
        """Whether the process is attached, as far as is known."""
        return self.state in (SessionState.ATTACHED, SessionState.LOST)

    def record(self) -> dict[str, Any]:
        """Return the durable form."""
        return {
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "start_time": self.peer.start_time,
            "token_hash": self.peer.token_hash,
            "role": self.role.value,
            "detached": self.state is SessionState.DETACHED,
            "pool": self.pool,
            "incarnation": self.incarnation,
            "rank": self.rank,
            "mark": self.mark,
            "away": self.away,
        }


@dataclass
class Incarnation:
    """One launch of an engine over one pool name."""

    id: int
    engine: str
    pool_name: str
    launch: str | None
    ranks: dict[int, int] = field(default_factory=dict)
    """The session that is each rank now; a dead one stays until another takes its place."""
    sessions: set[int] = field(default_factory=set)
    """Every session that is not proven gone."""
    max_held: int | None = None
    """How many pages it may hold, if its scheduler said so; durable."""
    held: int = 0
    """Pages of its open leases and of its hits; a page in two hits counts twice."""

    def record(self) -> dict[str, Any]:
        """Return the durable form."""
        return {
            "engine": self.engine, "pool_name": self.pool_name, "launch": self.launch, "max_held": self.max_held
        }  # fmt: skip


Count: TypeAlias = int | tuple[int, int]
"""How many host pages a pool is asked to have: a number, or the least and the most."""


@dataclass(frozen=True)
class Properties:
    """What every rank of a pool must agree on."""

    page_size: int
    world_size: int
    layout: Layout
    kind: PoolKind
    frames_per_page: int


@dataclass(frozen=True)
class Region:
    """One region: its extents as (arena, offset, bytes) and the ranks that share it."""

    id: int
    ranks: tuple[int, ...]
    extents: tuple[tuple[int, int, int], ...]
    size_bytes: int


@dataclass
class Pool:
    """A set of regions with one page table. ``ready`` once every rank has announced its planes."""

    id: int
    name: str
    tag: str
    properties: Properties
    num_host_pages: int | None
    """For an elastic pool the most that it may have: its page table has so many."""
    former: int
    """The incarnation whose first attach created the pool."""
    ready: bool = False
    failure: SharedMirrorError | None = None
    announced: dict[int, int] = field(default_factory=dict)
    """While forming: the session that announced each rank."""
    asked: dict[int, Count | None] = field(default_factory=dict)
    """While forming: how many host pages each rank asked for."""
    nodes: dict[int, int | None] = field(default_factory=dict)
    """While forming: the NUMA node of each rank's GPU, where it said one."""
    planes: dict[int, tuple[Plane, ...]] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    places: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """For each rank, in plane order: region id, base, stride."""
    table: PageTable | None = None
    elastic: Elastic | None = None
    """How many of the pages have memory; None: all of them, always."""
    holder: int | None = None
    """The incarnation that holds a static pool."""
    number: int = 1
    generation_high: int = 0
    """No generation at or above it was granted; durable, so that damage cannot set generations back."""
    alarms: dict[str, str] = field(default_factory=dict)
    """What an operator must know of this pool, by code; it goes when the pool is dropped."""
    pending: dict[bytes, int] = field(default_factory=dict)
    """How many leased pages have each key that is not readable yet."""
    owners: dict[str, int] = field(default_factory=dict)
    """The number under which each engine owns pages: of those that are attached or have pages."""
    attached: frozenset[int] = frozenset()
    """The owners that are attached; see ``shares``."""
    share: int = 0
    """The fair share of each of them, in pages."""
    bytes_per_page: int = 0
    hits: int = 0
    misses: int = 0
    used: float = 0.0
    """When a session last came or went. Not durable: after a restart it is the time of adoption."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena that the pool has."""
        return sum(region.size_bytes for region in self.regions)

    @property
    def count(self) -> Count | None:
        """How many pages the pool was asked to have; while forming, what one of its ranks says."""
        if self.elastic is not None:
            return self.elastic.least, self.elastic.most
        if self.ready:
            return self.num_host_pages
        return next((count for count in self.asked.values() if count is not None), None)

    @property
    def visible_pages(self) -> int:
        """How many pages a worker may map now."""
        return (self.num_host_pages or 0) if self.elastic is None else self.elastic.visible

    def record(self) -> dict[str, Any]:
        """Return the durable form."""
        properties = self.properties
        return {
            "name": self.name,
            "tag": self.tag,
            "page_size": properties.page_size,
            "world_size": properties.world_size,
            "layout": properties.layout.value,
            "kind": properties.kind.value,
            "frames_per_page": properties.frames_per_page,
            "num_host_pages": self.num_host_pages,
            "elastic": None if self.elastic is None else self.elastic.record(),
            "planes": [[rank, [plane.to_wire() for plane in planes]] for rank, planes in self.planes.items()],
            "regions": [[r.id, r.ranks, r.extents, r.size_bytes] for r in self.regions],
            "places": [[rank, places] for rank, places in self.places.items()],
            "holder": self.holder,
            "bytes_per_page": self.bytes_per_page,
        }

    def marks(self) -> list[int]:
        """Return the pool's durable numbers: clear number and generation high-water mark."""
        return [self.number, self.generation_high]


@dataclass
class OpenLease:
    """A lease with pages that are neither sealed nor freed yet."""

    id: int
    pool: int
    incarnation: int
    owner: int
    since: float
    number: int
    pages: list[int]
    generations: list[int]
    writers: dict[int, int]
    """Rank to session, as they were when the lease was granted."""
    keys: list[bytes | None]
    parents: list[bytes | None]
    by_reserve: bool = False
    open: int = 0
    keyed: int = 0
    revoked: int = 0
    committed: dict[int, int] = field(default_factory=dict)
    drained: dict[int, int] = field(default_factory=dict)
    """Evidence besides commits: positions under which a rank will never write again."""
    positions: dict[int, int] = field(default_factory=dict)
    checks: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """For (position, region): the first checksum of shared bytes that came, and its rank."""

    @property
    def full(self) -> int:
        """The bits of all pages that the lease ever had."""
        return (1 << len(self.pages)) - 1

    def complete(self) -> int:
        """Positions to which every writer has committed."""
        bits = self.open
        for rank in self.writers:
            bits &= self.committed.get(rank, 0)
        return bits

    def evident(self) -> int:
        """Open positions for which there is evidence of every writer."""
        bits = self.open
        for rank in self.writers:
            bits &= self.committed.get(rank, 0) | self.drained.get(rank, 0)
        return bits

    def missing_ranks(self) -> list[int]:
        """Ranks that have neither committed nor given other evidence for all that is open."""
        return [rank for rank in self.writers if self.open & ~(self.committed.get(rank, 0) | self.drained.get(rank, 0))]

    def record(self) -> dict[str, Any]:
        """Return the durable form; commits have records of their own."""
        return {
            "pool": self.pool,
            "incarnation": self.incarnation,
            "owner": self.owner,
            "number": self.number,
            "pages": self.pages,
            "generations": self.generations,
            "writers": list(self.writers.items()),
            "keys": self.keys if self.keyed else None,
            "parents": self.parents if self.keyed else None,
            "by_reserve": self.by_reserve,
            "open": pack_bits(self.open),
            "revoked": pack_bits(self.revoked),
        }

    def commit_record(self, rank: int) -> list[Any]:
        """Return the durable form of a rank's commits, and of the checksums that it was the first to give."""
        said = [[*at, checksum] for at, (checksum, first) in self.checks.items() if first == rank]
        return [pack_bits(self.committed.get(rank, 0)), said]


@dataclass
class OpenHit:
    """Pages pinned for one lookup, until released and its loads are reported complete."""

    id: int
    pool: int
    incarnation: int
    session: int
    pages: list[int]
    released: bool = False
    awaited: set[int] = field(default_factory=set)
    """After release: the worker sessions that have not answered yet."""

    def record(self) -> dict[str, Any]:
        """Return the durable form."""
        return {
            "pool": self.pool,
            "incarnation": self.incarnation,
            "session": self.session,
            "pages": self.pages,
            "released": self.released,
        }


@dataclass
class Waiter:
    """A request that may be answered later; ``error`` is its answer if the deadline passes first."""

    session: int
    request: int
    op: str
    arguments: dict[str, Any]
    limit: float
    """When the wait that was asked for ends; ``deadline`` may be earlier."""
    deadline: float
    error: SharedMirrorError


@dataclass(frozen=True)
class Ended:
    """One line of the history of sessions."""

    id: int
    pid: int
    engine: str
    role: str
    rank: int | None
    pool: str
    how: str
    at: float


@dataclass
class Effects:
    """What an event leads to. The rim makes ``writes`` durable first, then sends, then forgets."""

    writes: list[Write] = field(default_factory=list)
    replies: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    pushes: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    """Sessions that are over: their files and descriptors may go."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log, as key=value."""


@dataclass(frozen=True)
class TableRoom:
    """What a new page table may take: ``free_bytes``, of which each page needs ``slot_bytes``."""

    free_bytes: int
    slot_bytes: int


@dataclass
class State:
    """Everything the daemon knows, apart from sockets and memory."""

    space: ArenaSpace
    pools: dict[int, Pool] = field(default_factory=dict)
    incarnations: dict[int, Incarnation] = field(default_factory=dict)
    current: dict[tuple[str, str], int] = field(default_factory=dict)
    """The newest incarnation of (pool name, engine)."""
    sessions: dict[int, Session] = field(default_factory=dict)
    leases: dict[int, OpenLease] = field(default_factory=dict)
    hits: dict[int, OpenHit] = field(default_factory=dict)
    waiters: list[Waiter] = field(default_factory=list)
    ended: deque[Ended] = field(default_factory=lambda: deque(maxlen=100))
    next_id: int = 1
    """One counter for sessions, pools, incarnations, leases, hits and regions; only grows."""
    id_high: int = 0
    """No id at or above it was given out; durable."""
    ready: bool = False
    """Whether the arena's memory is there; nobody attaches before."""
    survivors: set[int] = field(default_factory=set)
    """Sessions from before a restart that have neither resumed nor gone; nothing is evicted meanwhile."""
    fences: set[int] = field(default_factory=set)
    """Hits without pages that hold back all freeing in their pools; see ``core.away``."""
    stopping: bool = False
    giving: bool = False
    """Whether pages that a pool gives back are left to be looked at: the next event goes on with it."""
    sweeping: bool = False
    """Whether pages of a cleared pool are left to be freed: the next event goes on with it."""
    moved: bool = False
    """Set when something happened that a waiter may have waited for."""
    table_room: TableRoom | None = None
    """What a new page table may take now; None: as much as it needs."""

    def new_id(self) -> int:
        """Return a number that was never used before in this state."""
        self.next_id += 1
        return self.next_id - 1

    def waited_for(self, pool: int) -> list[int]:
        """Return the processes that have not spoken since a restart: nothing sealed is freed before."""
        waited = set(self.survivors)
        for number in self.fences:
            if self.hits[number].pool == pool:
                waited |= self.hits[number].awaited
        return sorted({self.sessions[number].peer.pid for number in waited})

    def workers(self, incarnation: int) -> Iterator[Session]:
        """Yield the worker sessions of an incarnation that may still hold its memory."""
        for session_id in self.incarnations[incarnation].sessions:
            session = self.sessions[session_id]
            if session.role is Role.WORKER:
                yield session


def pack_bits(bits: int) -> bytes:
    """Return bits as little-endian bytes."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def each_bit(bits: int) -> Iterator[int]:
    """Yield the numbers of the set bits, ascending; linear in the length of ``bits``."""
    text = bin(bits)
    last = len(text) - 1
    at = text.rfind("1")
    while at > 1:
        yield last - at
        at = text.rfind("1", 0, at)
