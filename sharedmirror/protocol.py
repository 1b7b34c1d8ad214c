"""The client's half of the control channel, without I/O.

Bytes go in, events come out: answers, matched to their request by id, and the daemon's own words.
One request is under way at a time. The blocking and the asyncio flavour both drive this class.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

from sharedmirror import errors, wire
from sharedmirror.errors import ProtocolError, SharedMirrorError
from sharedmirror.types import Role


class Phase(enum.Enum):
    """How far a connection has come."""

    GREETING = "greeting"
    OPEN = "open"
    CLOSED = "closed"


@dataclass
class Answer:
    """What came of a request: a body, or an error to raise."""

    id: int
    body: dict[str, Any] = field(default_factory=dict)
    error: SharedMirrorError | None = None

    def result(self) -> dict[str, Any]:
        """Return the body, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.body


@dataclass
class Errand:
    """A request that is asked again until its answer is there: always under its one id, so that it happens once."""

    number: int = 0
    """Zero until it was sent once."""
    frame: tuple[str, dict[str, Any]] = ("", {})
    answer: Answer | None = None


@dataclass
class Greeting:
    """The daemon's hello: who it is, and the session it gave."""

    instance: bytes
    epoch: int
    version: str
    session: int
    token: bytes
    arenas: list[int]


class AwayLike(Protocol):
    """What a session may go on with while no daemon answers; see ``sharedmirror.away``."""

    def gone(self) -> bool:
        """Whether the daemon has ended, and nothing depends on the next one yet."""
        ...

    def claims(self) -> dict[str, Any]:
        """Return what the next daemon is to know; from now on this session depends on it."""
        ...

    def resumed(self, lost: list[int]) -> None:
        """The next daemon has heard the claims, and could not keep these."""
        ...


class ClientProtocol:
    """One connection's state."""

    def __init__(self, role: Role, version: str) -> None:
        self.phase = Phase.GREETING
        self.greeting: Greeting | None = None
        self._role = role
        self._version = version
        self._decoder = wire.FrameDecoder()
        self._last = 0
        self._waiting: int | None = None

    def successor(self) -> ClientProtocol:
        """Return the state of a new connection of the same session: its request ids go on."""
        after = ClientProtocol(self._role, self._version)
        after._last = self._last
        return after

    def hello(self, resume: dict[str, Any] | None = None) -> bytes:
        """Return the first frame to send; a pidfd of this process goes with it.

        ``resume`` names the session to come back to, and what it holds.
        """
        self._waiting = 0
        return wire.encode(
            {
                "op": "hello",
                "id": 0,
                "protocol": [wire.PROTOCOL_MIN, wire.PROTOCOL_MAX],
                "version": self._version,
                "role": self._role.value,
                "resume": resume,
            }
        )

    def request(self, op: str, arguments: dict[str, Any], again: int | None = None) -> tuple[int, bytes]:
        """Return the id and the frame of a request; the one before must be answered.

        ``again`` is the id of a request that was sent on an earlier connection and is repeated.
        """
        if self.phase is not Phase.OPEN:
            raise ProtocolError(f"a request {op!r} in phase {self.phase.value}")
        if self._waiting is not None:
            raise ProtocolError(f"request {self._waiting} is still under way")
        number = self._last + 1 if again is None else again
        data = wire.encode({**arguments, "op": op, "id": number})
        self._last = max(self._last, number)
        self._waiting = number
        return number, data

    def receive(self, data: bytes) -> list[Answer | dict[str, Any]]:
        """Take bytes and return answers (``Answer``) and pushes (maps), in order."""
        events: list[Answer | dict[str, Any]] = []
        for frame in self._decoder.feed(data):
            if "push" in frame:
                events.append(frame)
            else:
                events.append(self._answer(frame))
        return events

    def end(self) -> None:
        """The connection is at its end."""
        self.phase = Phase.CLOSED

    def _answer(self, frame: dict[str, Any]) -> Answer:
        number = frame.get("id")
        error = errors.from_wire(frame["error"]) if isinstance(frame.get("error"), dict) else None
        if error is not None and (number == self._waiting or number == 0):
            # Id 0 outside the greeting: the daemon could not read what we sent, and closes.
            answer = Answer(self._waiting or 0, error=error)
            self._waiting = None
            return answer
        if number != self._waiting:
            raise ProtocolError(f"the daemon answered request {number!r:.40}, not {self._waiting}")
        self._waiting = None
        if self.phase is Phase.GREETING:
            self._greet(frame)
        return Answer(int(number or 0), frame)

    def _greet(self, frame: dict[str, Any]) -> None:
        protocol = frame.get("protocol")
        wire.negotiate([protocol, protocol], who="daemon", version=str(frame.get("version")))
        try:
            greeting = Greeting(
                bytes(frame["instance"]), int(frame["epoch"]), str(frame["version"]), int(frame["session"]),
                bytes(frame.get("token", b"")), [int(size) for size in frame.get("arenas", ())],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the daemon's hello lacks or garbles {error}") from None
        self.greeting, self.phase = greeting, Phase.OPEN
