"""Every wrong type or range in a request is refused with a word about what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sharedmirror.errors import KeyInputError, ProtocolError, UsageError
from sharedmirror.types import Plane
from sharedmirrord.core import arguments as arg


def test_good_values_pass() -> None:
    given = {"n": 3, "t": "ü" * 128, "f": False, "s": 2, "p": [0, 7], "keys": [b"a", b"x" * 64]}
    assert arg.integer(given, "n") == 3
    assert arg.text(given, "t") == "ü" * 128
    assert arg.flag(given, "f", True) is False
    assert arg.seconds(given, "s") == 2.0
    assert arg.integers(given, "p") == [0, 7]
    assert arg.keys(given) == [b"a", b"x" * 64]


def test_absent_values_have_defaults() -> None:
    assert arg.optional_integer({}, "n") is None
    assert arg.text({}, "t", "d") == "d"
    assert arg.flag({}, "f", True) is True
    assert arg.seconds({}, "s") == 0.0
    assert arg.integers({}, "p") == []


@pytest.mark.parametrize("value", [None, True, -1, 1 << 63, 1.0, "1", b"1", [1]])
def test_bad_integer(value: Any) -> None:
    with pytest.raises(ProtocolError, match="n must be an integer from 0"):
        arg.integer({"n": value}, "n")


def test_page_counts() -> None:
    given = [arg.page_count({"num_host_pages": value}, 99) for value in (None, 1, 99, [2, 2], (3, 99))]
    assert given == [None, 1, 99, (2, 2), (3, 99)]


@pytest.mark.parametrize("value", [0, 100, True, 2.0, "9", [2], [2, 3, 4], [2, 3.0], [True, 3], ["2", "3"], {}])
def test_bad_page_counts(value: Any) -> None:
    with pytest.raises(ProtocolError, match="num_host_pages must be"):
        arg.page_count({"num_host_pages": value}, 99)


@pytest.mark.parametrize("value", [[1, 9], [9, 8], [2, 100], [-1, 5]])
def test_bad_bounds_of_page_counts(value: Any) -> None:
    with pytest.raises(UsageError, match="the least is 2"):
        arg.page_count({"num_host_pages": value}, 99)


@pytest.mark.parametrize("value", [None, 3, b"x", "x" * 257, "ü" * 129, ["x"]])
def test_bad_text(value: Any) -> None:
    with pytest.raises(ProtocolError, match="t must be a string of at most 256 bytes"):
        arg.text({"t": value}, "t")


def test_text_that_no_utf8_can_hold_is_measured() -> None:
    assert arg.text({"t": "\ud800"}, "t") == "\ud800"


@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_bad_flag(value: Any) -> None:
    with pytest.raises(ProtocolError, match="f must be true or false"):
        arg.flag({"f": value}, "f", True)


@pytest.mark.parametrize("value", [True, -0.1, 86401, float("nan"), float("inf"), "1", [1]])
def test_bad_seconds(value: Any) -> None:
    with pytest.raises(ProtocolError, match="s must be seconds from 0 to 86400"):
        arg.seconds({"s": value}, "s")


@pytest.mark.parametrize("value", [3, "12", [1, -1], [True], [1.0], [None], {1: 2}])
def test_bad_integers(value: Any) -> None:
    with pytest.raises(ProtocolError, match="p must be a list of non-negative integers"):
        arg.integers({"p": value}, "p")


@pytest.mark.parametrize(
    ("key", "says"),
    [(b"", "1 to 64 bytes, not 0"), (b"x" * 65, "1 to 64 bytes, not 65"), ("k", "must be bytes, not str"), (3, "int")],
)
def test_bad_key(key: Any, says: str) -> None:
    with pytest.raises(KeyInputError, match=says):
        arg.check_key(key)
    with pytest.raises(KeyInputError, match=says):
        arg.keys({"keys": [b"good", key]})


def test_a_key_twice_names_the_position() -> None:
    with pytest.raises(KeyInputError, match="position 2 comes twice") as caught:
        arg.keys({"keys": [b"a", b"b", b"a"]})
    assert caught.value.ids == {"position": 2}
    assert arg.keys({"keys": [b"a", b"a"]}, distinct=False) == [b"a", b"a"]


@pytest.mark.parametrize("value", [None, b"keys", {"a": 1}, (b"a",)])
def test_keys_are_a_list(value: Any) -> None:
    with pytest.raises(ProtocolError, match="keys must be a list"):
        arg.keys({"keys": value})


def test_planes() -> None:
    plane = Plane("k", 1, 2, 64, 4)
    assert arg.planes({"planes": [plane.to_wire()]}, 0) == (plane,)


BAD_PLANES: list[tuple[Any, str]] = [
    (None, "rank 3 must announce 1 to"),
    ([], "rank 3 must announce 1 to"),
    ([["k", 0, 1, 64]], "a plane is"),
    ([[b"k", 0, 1, 64, 4]], "a plane is"),
    ([("k", 0, 1, 64, 4)], "a plane is"),
    ([["k", 0, 1, 64, True]], "a number that is none"),
    ([["k", 0, 1, 64.0, 4]], "a number that is none"),
    ([["k", 1, 1, 64, 4]], "out of range"),
    ([["k", -1, 1, 64, 4]], "out of range"),
    ([["k", 0, 0, 64, 4]], "out of range"),
    ([["k", 0, 1, 0, 4]], "out of range"),
    ([["k", 0, 1, 64, 0]], "out of range"),
    ([["k", 0, 1, 1 << 50, 4]], "out of range"),
    ([["k", 0, 1, 64, 4], ["k", 0, 1, 64, 4]], "announced a plane twice"),
]


@pytest.mark.parametrize(("value", "says"), BAD_PLANES)
def test_bad_planes(value: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        arg.planes({"planes": value}, 3)


@pytest.mark.parametrize("read", [arg.integer, arg.text, arg.seconds, arg.integers])
def test_long_nonsense_is_not_echoed_whole(read: Callable[..., Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        read({"x": {"y": "z" * 5000}}, "x")
    assert len(caught.value.message) < 300
