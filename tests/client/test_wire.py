"""Frames: every cut of the stream, every bad byte, and the meeting of protocol ranges."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharedmirror import __version__, wire
from sharedmirror.errors import ProtocolError, VersionMismatch

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


@given(st.lists(BODIES, max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_frames_come_back_however_the_stream_is_cut(bodies: list[dict[str, Any]], cuts: list[int]) -> None:
    stream = b"".join(map(wire.encode, bodies))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = wire.FrameDecoder()
    found = []
    for low, high in zip(edges, edges[1:], strict=False):
        found += decoder.feed(stream[low:high])
    assert found == bodies
    assert not decoder.partial


def test_an_unfinished_frame_is_held_until_its_last_byte() -> None:
    stream = wire.encode({"op": "x", "id": 1})
    decoder = wire.FrameDecoder()
    for at in range(len(stream) - 1):
        assert decoder.feed(stream[at : at + 1]) == []
        assert decoder.partial
    assert decoder.feed(stream[-1:]) == [{"op": "x", "id": 1}]
    assert not decoder.partial


def test_a_frame_of_the_limit_passes_and_one_byte_more_does_not() -> None:
    overhead = len(wire.encode({"x": bytes(1 << 20)})) - 4 - (1 << 20)
    largest = {"x": bytes(wire.MAX_FRAME_BYTES - overhead)}
    stream = wire.encode(largest)
    assert len(stream) == 4 + wire.MAX_FRAME_BYTES
    assert wire.FrameDecoder().feed(stream) == [largest]
    with pytest.raises(ProtocolError, match=f"{wire.MAX_FRAME_BYTES + 1} bytes is over the limit.*fewer pages"):
        wire.encode({"x": bytes(wire.MAX_FRAME_BYTES - overhead + 1)})


def test_an_oversized_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ProtocolError, match=f"announces {wire.MAX_FRAME_BYTES + 1} bytes"):
        wire.FrameDecoder().feed(struct.pack("<I", wire.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x81\xa1a",
        b"\x80\x80",
        b"\x81\xa1\xff\x01",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([1, 2]),
        msgpack.packb("hello"),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        msgpack.packb({b"op": 2}),
        msgpack.packb({"a": {1: 2}}),
    ],
    ids=lambda payload: payload[:8].hex() or "empty",
)
def test_what_is_no_map_of_strings_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.FrameDecoder().feed(framed(payload))


@given(st.binary(max_size=64))
def test_garbage_gives_frames_or_a_protocol_error_and_nothing_else(payload: bytes) -> None:
    try:
        frames = wire.FrameDecoder().feed(framed(payload))
    except ProtocolError:
        return
    assert all(isinstance(frame, dict) for frame in frames)


@pytest.mark.parametrize(("theirs", "agreed"), [([1, 1], 1), ((1, 1), 1), ([0, 1], 1), ([1, 9], 1)])
def test_ranges_that_meet_give_the_highest_common_version(theirs: Any, agreed: int) -> None:
    assert wire.negotiate(theirs, who="client", version="1.2.3") == agreed


@pytest.mark.parametrize("theirs", [[0, 0], [2, 2], [2, 7], [-3, -1], [1 << 80, 1 << 81], [3, 1]])
def test_ranges_that_do_not_meet_name_both_sides(theirs: list[int]) -> None:
    with pytest.raises(VersionMismatch) as caught:
        wire.negotiate(theirs, who="daemon", version="9.8.7")
    message = caught.value.message
    assert f"daemon 9.8.7 speaks protocol {theirs[0]} to {theirs[1]}" in message
    assert re.search(rf"this side.* {wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}", message)
    assert __version__ in message
    assert "install the same" in message


@pytest.mark.parametrize("theirs", [None, 1, [], [1], [1, 1, 1], ["1", "1"], [1, None], {"min": 1}, [1.0, 1.0], "11"])
def test_what_is_no_range_is_a_protocol_error(theirs: object) -> None:
    with pytest.raises(ProtocolError, match="no protocol range"):
        wire.negotiate(theirs, who="client", version="1")
