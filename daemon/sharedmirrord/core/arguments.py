"""Reading a request's arguments: every wrong type or range is refused before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharedmirror.errors import KeyInputError, ProtocolError, UsageError
from sharedmirror.types import MAX_KEY_BYTES, MAX_SHARDS, MAX_WAIT_S, Plane

MAX_TEXT_BYTES = 256
MAX_PLANES = 65536
MAX_SLICE_BYTES = 1 << 40
_KEY_LENGTHS = frozenset(range(1, MAX_KEY_BYTES + 1))


def integer(arguments: Mapping[str, Any], name: str, low: int = 0, high: int = (1 << 62)) -> int:
    """Return an integer argument within ``low`` and ``high``; raises ProtocolError."""
    value = arguments.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name} must be an integer from {low} to {high}, not {value!r:.80}")
    return value


def optional_integer(arguments: Mapping[str, Any], name: str, low: int = 0, high: int = (1 << 62)) -> int | None:
    """Return an integer argument or None where it is absent."""
    return None if arguments.get(name) is None else integer(arguments, name, low, high)


def page_count(arguments: Mapping[str, Any], high: int) -> int | tuple[int, int] | None:
    """Return ``num_host_pages``: a number, the least and the most, or None; raises ProtocolError or UsageError."""
    value = arguments.get("num_host_pages")
    if not isinstance(value, (list, tuple)):
        return optional_integer(arguments, "num_host_pages", 1, high)
    if len(value) != 2 or any(type(count) is not int for count in value):
        raise ProtocolError(f"num_host_pages must be a number or [least, most], not {value!r:.80}")
    least, most = value
    if not 2 <= least <= most <= high:
        raise UsageError(f"num_host_pages goes from {least} to {most}; the least is 2, and the most not less than it")
    return least, most


def text(arguments: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a string argument of at most 256 bytes."""
    value = arguments.get(name, default)
    if not isinstance(value, str) or len(value.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise ProtocolError(f"{name} must be a string of at most {MAX_TEXT_BYTES} bytes, not {value!r:.80}")
    return value


def optional_text(arguments: Mapping[str, Any], name: str) -> str | None:
    """Return a string argument or None where it is absent."""
    return None if arguments.get(name) is None else text(arguments, name)


def flag(arguments: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean argument."""
    value = arguments.get(name, default)
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} must be true or false, not {value!r:.80}")
    return value


def seconds(arguments: Mapping[str, Any], name: str) -> float:
    """Return a duration from 0 to a day; absent means 0."""
    value = 0 if arguments.get(name) is None else arguments[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_WAIT_S:
        raise ProtocolError(f"{name} must be seconds from 0 to {MAX_WAIT_S}, not {value!r:.80}")
    return float(value)


def integers(arguments: Mapping[str, Any], name: str) -> list[int]:
    """Return a list of non-negative integers; absent means none."""
    value = arguments.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise ProtocolError(f"{name} must be a list of non-negative integers")
    return value


def checks(arguments: Mapping[str, Any]) -> list[list[int]]:
    """Return the list ``checks`` of [page, region, checksum]; absent means none."""
    value = arguments.get("checks")
    if value is None:
        return []
    if not isinstance(value, list):
        raise ProtocolError("checks must be a list of [page, region, checksum]")
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 3 or any(type(n) is not int or n < 0 for n in entry):
            raise ProtocolError("checks must be a list of [page, region, checksum]")
    return value


def check_key(key: Any) -> bytes:
    """Return ``key`` if it is 1 to 64 bytes; raises KeyInputError."""
    if not isinstance(key, bytes):
        raise KeyInputError(f"a key must be bytes, not {type(key).__name__}")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise KeyInputError(f"a key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key)}", length=len(key))
    return key


def keys(arguments: Mapping[str, Any], *, distinct: bool = True) -> list[bytes]:
    """Return the list ``keys``; raises KeyInputError for a bad key or one that comes twice."""
    value = arguments.get("keys")
    if not isinstance(value, list):
        raise ProtocolError("keys must be a list")
    # The quick test first: calls carry hundreds of keys, nearly always good ones.
    if not (set(map(type, value)) <= {bytes} and set(map(len, value)) <= _KEY_LENGTHS):
        for key in value:
            check_key(key)
    if distinct and len(set(value)) != len(value):
        seen: set[bytes] = set()
        for position, key in enumerate(value):
            if key in seen:
                raise KeyInputError(f"the key at position {position} comes twice in one call", position=position)
            seen.add(key)
    return value


def planes(arguments: Mapping[str, Any], rank: int) -> tuple[Plane, ...]:
    """Return the announced planes; raises ProtocolError for what cannot be laid out."""
    value = arguments.get("planes")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PLANES:
        raise ProtocolError(f"rank {rank} must announce 1 to {MAX_PLANES} planes")
    found = []
    for item in value:
        if not (isinstance(item, list) and len(item) == 5 and isinstance(item[0], str)):
            raise ProtocolError("a plane is [name, shard, shards, slice_bytes, span]")
        name, shard, shards, slice_bytes, span = item
        if any(type(number) is not int for number in item[1:]):
            raise ProtocolError(f"plane {name!r:.80} has a number that is none")
        if not (
            0 <= shard < shards <= MAX_SHARDS and 0 < slice_bytes <= MAX_SLICE_BYTES and 0 < span <= MAX_SLICE_BYTES
        ):
            raise ProtocolError(f"plane {name!r:.80} has numbers out of range: {item[1:]}")
        found.append(Plane(name, shard, shards, slice_bytes, span))
    if len({(plane.name, plane.shard) for plane in found}) != len(found):
        raise ProtocolError(f"rank {rank} announced a plane twice")
    return tuple(found)
