"""``watch`` on the core: a reader by the client's own rule ends with the right keys, whatever happens meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sharedmirror import wire
from sharedmirror.errors import PoolMismatch, PoolNotFound, ProtocolError, SharedMirrorError, WrongPoolKind
from sharedmirror.watching import Change, ChangeKind, _Place
from sharedmirrord.core import changes, machine, pages, watching
from tests.daemon.core_driver import Driver, Engine, packed, snapshot, unpacked

INSTANCE = "ab" * 16
LONG = b"k" * 64


def ask(driver: Driver, **arguments: Any) -> dict[str, Any]:
    """Return the answer as it arrives."""
    body = unpacked(packed({"pool": "p", **arguments}))
    return dict(unpacked(packed(watching.watch(driver.state, body, INSTANCE, 3))))


class Reader:
    """A router, with the client's own reading of the answers."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.keys: set[bytes] = set()
        self.place = _Place(None)
        self.told: list[Change] = []
        self.history: dict[int, set[bytes]] = {}
        """The readable keys after so many events, where a test noted them."""

    def note(self) -> None:
        table = self.driver.table()
        self.history[table.changes.sequence] = set(table.index)

    def read(self, limit: int) -> None:
        """Take one answer."""
        body = ask(self.driver, since=self.place.at, cursor=self.place.cursor, limit=limit)
        if body["gap"]:
            self.keys.clear()
            self.place = _Place(None)
            return
        for change in self.place.take(body):
            assert len(change.keys) <= limit
            change.apply_to(self.keys)
            self.told.append(change)
            if change.position is not None and change.position.sequence in self.history:
                assert self.keys == self.history[change.position.sequence], change.kind

    @property
    def done(self) -> bool:
        return self.place.cursor is None and self.place.lag == 0

    def catch_up(self, limit: int) -> None:
        self.read(limit)
        while not self.done:
            self.read(limit)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def engine(driver: Driver) -> Engine:
    return driver.engine()


def test_a_snapshot_comes_in_pages_and_then_what_happens(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b", b"c")
    first = ask(driver, limit=2)
    assert (first["keys"], first["gap"], first["tag"]) == ([b"a", b"b"], False, "")
    assert "events" not in first
    second = ask(driver, cursor=first["cursor"], limit=2)
    assert (second["keys"], second["cursor"]) == ([b"c"], None)
    engine.cache(b"d")
    driver.ask(engine.scheduler, "evict", keys=[b"c", b"a"])
    driver.ask(engine.scheduler, "clear")
    engine.cache(b"e")
    after = ask(driver, since=first["position"], limit=3)
    assert "keys" not in after
    assert after["events"] == [["s", [b"d"], 4], ["e", [b"c", b"a"], 6]]
    assert (after["position"], after["newest"]) == ([INSTANCE, 3, driver.pool().id, 6], 8)
    assert ask(driver, since=after["position"])["events"] == [["c", [], 7], ["s", [b"e"], 8]]


def test_eviction_for_a_lease_is_told(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b", b"c")
    position = ask(driver)["position"]
    evicted = engine.lease(4)["evicted"]
    assert evicted == [b"c", b"b"]
    assert ask(driver, since=position)["events"] == [["e", evicted, position[3] + 2]]


def test_what_never_was_readable_or_lost_to_another_is_not_told(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    position = ask(driver)["position"]
    lease = engine.lease(2)
    driver.ask(engine.scheduler, "seal", lease=lease["lease"], keys=[b"a", b"b"])
    engine.commit(lease["lease"], lease["pages"][:1])
    driver.ask(engine.scheduler, "abort", lease=lease["lease"])
    assert ask(driver, since=position)["events"] == []


def test_a_cleared_page_that_was_pinned_goes_without_a_word(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    hit = engine.lookup(b"a")["hit"]
    driver.ask(engine.scheduler, "clear")
    position = ask(driver)["position"]
    assert ask(driver)["keys"] == []
    engine.release(hit)
    assert ask(driver, since=position)["events"] == []


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_position_of_another_log_is_a_gap(driver: Driver, engine: Engine, at: int) -> None:
    engine.cache(b"a")
    position = ask(driver)["position"]
    other = [*position]
    other[at] = "cd" * 16 if at == 0 else position[at] + 1
    answer = ask(driver, since=other, cursor=0)
    assert (answer["gap"], answer["position"]) == (True, position)
    assert not answer.keys() & {"keys", "events"}


def test_a_log_that_went_on_is_a_gap(driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CAPACITY", 4)
    monkeypatch.setattr(changes, "_MASK", 3)
    driver.table().changes = changes.ChangeLog()
    reader = Reader(driver)
    reader.catch_up(8)
    for round_trip in range(3):
        engine.cache(b"%d" % round_trip)
        driver.ask(engine.scheduler, "evict", keys=[b"%d" % round_trip])
    engine.cache(b"a")
    reader.read(8)
    assert reader.keys == set()
    reader.catch_up(8)
    assert reader.keys == {b"a"}


def test_watching_changes_nothing(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a", b"b")
    before = snapshot(driver.state)
    position = ask(driver)["position"]
    ask(driver, since=position, cursor=0)
    assert snapshot(driver.state) == before


BAD: list[tuple[dict[str, Any], str]] = [
    ({"pool": 1}, "pool must be a string"),
    ({"tag": 7}, "tag must be a string"),
    ({"limit": 0}, "limit must be an integer from 1 to 8192"),
    ({"limit": 8193}, "limit must be an integer"),
    ({"limit": True}, "limit must be an integer"),
    ({"cursor": -1}, "cursor must be an integer"),
    ({"cursor": "0"}, "cursor must be an integer"),
    ({"since": 3}, "since must be a position that an earlier answer gave"),
    ({"since": [INSTANCE, 1, 1]}, "since must be"),
    ({"since": [b"x", 1, 1, 1]}, "since must be"),
    ({"since": [INSTANCE, 1, 1, -1]}, "since must be"),
    ({"since": [INSTANCE, 1, 1, True]}, "since must be"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=str)
def test_bad_arguments_are_refused(driver: Driver, engine: Engine, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        ask(driver, **arguments)


def test_which_pool(driver: Driver) -> None:
    with pytest.raises(PoolNotFound, match="no pool 'p'.*status"):
        ask(driver)
    driver.attach(driver.hello(), wait_s=5.0)
    with pytest.raises(PoolNotFound, match="'p' is not ready"):
        ask(driver)
    driver.engine("g", pool="s", kind="static", scheduler=False)
    with pytest.raises(WrongPoolKind, match="static"):
        ask(driver, pool="s")
    for tag in ("one", "two"):
        driver.engine(tag, pool="q", tag=tag, scheduler=False)
    with pytest.raises(PoolMismatch, match="say which tag"):
        ask(driver, pool="q")
    assert ask(driver, pool="q", tag="two")["tag"] == "two"


def test_a_pool_that_is_dropped_is_gone_and_the_next_one_is_another(driver: Driver, engine: Engine) -> None:
    engine.cache(b"a")
    position = ask(driver)["position"]
    for session in [*engine.workers, engine.scheduler]:
        driver.kill(session)
    driver.apply(machine.Drop("p", None))
    with pytest.raises(PoolNotFound):
        ask(driver, since=position)
    driver.engine().cache(b"z")
    assert ask(driver, since=position)["gap"]


def test_the_largest_answer_is_far_below_a_frame(driver: Driver) -> None:
    count = watching.MAX_LIMIT + 2
    engine = driver.engine(num_host_pages=count + 1, world_size=1, page_size=1, planes=[["k", 0, 1, 16, 1]])
    engine.cache(*(LONG[:-4] + number.to_bytes(4, "little") for number in range(count)))
    start = [INSTANCE, 3, driver.pool().id, 0]
    answer = watching.watch(driver.state, {"pool": "p", "since": start, "cursor": 0, "limit": 8192}, INSTANCE, 3)
    assert len(answer["keys"]) == len(answer["events"][0][1]) == watching.MAX_LIMIT
    assert len(wire.encode(answer)) < wire.MAX_FRAME_BYTES // 8


def test_a_table_with_few_keys_is_read_in_bounded_pieces(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_SCAN_PAGES", 2)
    engine.cache(b"a", b"b", b"c", b"d", b"e")
    driver.ask(engine.scheduler, "evict", keys=[b"a", b"b", b"c", b"d"])
    answer = ask(driver)
    assert (answer["keys"], answer["cursor"]) == ([], 2)
    reader = Reader(driver)
    reader.catch_up(8)
    assert reader.keys == {b"e"}
    assert ask(driver, cursor=1 << 32)["cursor"] is None


# -- whatever happens between the answers --------------------------------------------------------


def happen(driver: Driver, engine: Engine, rng: random.Random) -> None:
    """Do something to the keys of the pool."""
    keys = rng.sample([b"k%d" % number for number in range(9)], rng.randrange(1, 4))
    try:
        match rng.randrange(8):
            case 0:
                driver.ask(engine.scheduler, "evict", keys=keys)
            case 1 if rng.randrange(3) == 0:
                driver.ask(engine.scheduler, "clear")
            case 2:
                engine.release(engine.lookup(*keys, mode="each")["hit"])
            case 3:
                engine.lookup(*keys, mode="each")
            case 4 if driver.state.hits:
                engine.release(rng.choice(list(driver.state.hits)))
            case _:
                body = driver.ask(engine.scheduler, "reserve", keys=keys, parent=rng.choice([None, b"k0"]))
                if body["keys"]:
                    engine.commit(body["lease"])
    except SharedMirrorError as error:
        assert error.code in ("no_pages", "stale_lease", "page"), error


@pytest.mark.parametrize("chunk", range(4))
def test_a_reader_always_ends_with_the_right_keys(chunk: int) -> None:
    """Pages change between the pages of the snapshot; a small log loses events; the reader's set comes right."""
    for seed in range(100 * chunk, 100 * chunk + 100):
        with pytest.MonkeyPatch.context() as patch:
            try:
                tell(random.Random(seed), patch)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error


def tell(rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    capacity, limit = rng.choice([4, 16, 1 << 16]), rng.randrange(1, 10)
    patch.setattr(changes, "CAPACITY", capacity)
    patch.setattr(changes, "_MASK", capacity - 1)
    patch.setattr(pages, "_SCAN_PAGES", rng.randrange(2, 6))
    driver = Driver()
    driver.followers.skip = True  # so small a log loses what one event does
    engine = driver.engine(world_size=1, num_host_pages=8)
    readers = [Reader(driver), Reader(driver)]
    for _ in range(rng.randrange(5, 40)):
        for _ in range(rng.randrange(4)):
            happen(driver, engine, rng)
            for reader in readers:
                reader.note()
        for reader in readers:
            if rng.randrange(3):
                reader.read(limit)
            if rng.randrange(6) == 0:
                reader.catch_up(limit)
                assert reader.keys == driver.table().index.keys()
    for reader in readers:
        reader.catch_up(limit)
        assert reader.keys == driver.table().index.keys()
        later = Reader(driver)
        later.place = _Place(reader.place.at)
        later.read(limit)
        assert [change.kind for change in later.told] == [ChangeKind.SYNCED]


def test_the_reader_finds_what_moves_behind_it_while_the_snapshot_is_read(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is evicted ahead of the reader and sealed again behind it is on no page of the snapshot."""
    engine = driver.engine(world_size=1, num_host_pages=5)
    engine.cache(b"a")
    engine.cache(b"b")
    engine.cache(b"c")
    engine.cache(b"d")
    reader = Reader(driver)
    reader.read(2)
    assert reader.keys == {b"a", b"b"}
    driver.ask(engine.scheduler, "evict", keys=[b"d", b"a"])
    engine.cache(b"d")
    assert driver.table().index[b"d"] == 1
    reader.read(2)
    reader.catch_up(2)
    assert reader.keys == {b"b", b"c", b"d"}
    assert ChangeKind.SNAPSHOT not in [change.kind for change in reader.told if b"d" in change.keys]
