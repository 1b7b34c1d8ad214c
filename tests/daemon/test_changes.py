"""The log of a pool's keys alone: what it keeps, what it loses, how it is read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharedmirrord.core import changes
from sharedmirrord.core.changes import CAPACITY, CLEARED, EVICTED, SEALED, ChangeLog, Run

LETTERS = {SEALED: "s", EVICTED: "e", CLEARED: "c"}


def note(log: ChangeLog, kind: int, *keys: bytes) -> None:
    for key in keys:
        log.add(kind, key)


def read(log: ChangeLog, sequence: int, limit: int) -> list[Run]:
    runs = log.since(sequence, limit)
    assert runs is not None
    return runs


def test_events_of_one_kind_come_together_and_in_order() -> None:
    log = ChangeLog()
    note(log, SEALED, b"a", b"b")
    note(log, EVICTED, b"a")
    note(log, CLEARED, b"", b"")
    note(log, SEALED, b"a")
    assert read(log, 0, 100) == [("s", [b"a", b"b"], 2), ("e", [b"a"], 3), ("c", [], 5), ("s", [b"a"], 6)]
    assert read(log, 1, 3) == [("s", [b"b"], 2), ("e", [b"a"], 3), ("c", [], 4)]
    assert read(log, 6, 100) == []


def test_what_is_lost_and_what_never_was_is_no_answer() -> None:
    log = ChangeLog()
    assert log.since(1, 10) is None
    assert read(log, 0, 10) == []
    note(log, SEALED, *(b"%d" % number for number in range(CAPACITY + 3)))
    assert log.since(2, 10) is None
    assert read(log, 3, 2) == [("s", [b"3", b"4"], 5)]
    assert log.since(CAPACITY + 4, 10) is None


@settings(deadline=None, database=None, print_blob=True)
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_it_is_a_list_that_forgets_its_beginning(rng: random.Random, bits: int) -> None:
    """Against a plain list, with a small log that wraps often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "CAPACITY", 1 << bits)
        patch.setattr(changes, "_MASK", (1 << bits) - 1)
        log, plain = ChangeLog(), list[tuple[str, bytes]]()
        for number in range(rng.randrange(100)):
            kind = rng.choice([SEALED, EVICTED, CLEARED])
            key = b"" if kind == CLEARED else b"%d" % number
            log.add(kind, key)
            plain.append((LETTERS[kind], key))
            sequence, limit = rng.randrange(-2, len(plain) + 3), rng.randrange(1, 40)
            runs = log.since(sequence, limit)
            if not max(0, len(plain) - (1 << bits)) <= sequence <= len(plain):
                assert runs is None
                continue
            assert runs is not None
            found: list[tuple[str, bytes]] = []
            for letter, keys, after in runs:
                assert (keys == []) == (letter == "c")
                found += [(letter, key) for key in keys or [b""] * (after - sequence - len(found))]
                assert after == sequence + len(found)
            assert found == plain[sequence : sequence + limit]
