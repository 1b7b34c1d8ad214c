"""Frames of the control channel, without I/O.

A frame is a 4-byte little-endian length and one msgpack map of at most 16 MiB. A request is
``{"op", "id", ...}``; its answer ``{"id", ...}`` or ``{"id", "error": {...}}``; a map with ``push``
is the daemon's own word and answers nothing. Each connection opens with ``hello``, which states the
range of protocol versions a side speaks.

The decoder never buffers more than one frame beyond what it was fed, and refuses a frame by its
length before its bytes arrive.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from sharedmirror import __version__
from sharedmirror.errors import ProtocolError, VersionMismatch

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_FRAME_BYTES = 16 << 20
MAX_FDS = 16
"""Descriptors that one message may carry."""

_HEADER = struct.Struct("<I")


def encode(body: dict[str, Any]) -> bytes:
    """Return ``body`` as one frame; raises ProtocolError when it is over 16 MiB."""
    payload: bytes = msgpack.packb(body, use_bin_type=True)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}; send fewer pages per call"
        )
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into maps; ``feed`` bytes, then iterate ``frames``."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add bytes and return the frames that are now complete.

        Raises ProtocolError on an oversized frame, on bytes that are not msgpack, and on anything
        but a map with string keys.
        """
        buffer = self._buffer
        buffer += data
        frames: list[dict[str, Any]] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame announces {size} bytes; the limit is {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + size
            if len(buffer) < end:
                break
            frames.append(_decode(bytes(memoryview(buffer)[start + _HEADER.size : end])))
            start = end
        if start:
            del buffer[:start]
        return frames

    @property
    def partial(self) -> bool:
        """Whether bytes of an unfinished frame are held."""
        return bool(self._buffer)


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        body = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, RecursionError) as error:  # ValueError is the root of msgpack's own kinds
        raise ProtocolError(f"a frame of {len(payload)} bytes is not msgpack: {type(error).__name__}") from error
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise ProtocolError("a frame holds something else than a map with string keys")
    return body


def negotiate(theirs: Any, *, who: str, version: str) -> int:
    """Return the highest protocol that both sides speak.

    ``theirs`` is the peer's ``[min, max]``, ``who`` names it ("daemon" or "client") and ``version``
    is its release. Raises VersionMismatch when the ranges do not meet.
    """
    if not (isinstance(theirs, (list, tuple)) and len(theirs) == 2 and all(isinstance(n, int) for n in theirs)):
        raise ProtocolError(f"the {who} sent no protocol range")
    low, high = max(PROTOCOL_MIN, int(theirs[0])), min(PROTOCOL_MAX, int(theirs[1]))
    if low > high:
        raise VersionMismatch(
            f"the {who} {version} speaks protocol {theirs[0]} to {theirs[1]}, "
            f"this side, {__version__}, speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}; "
            f"install the same sharedmirror release on both sides"
        )
    return high
