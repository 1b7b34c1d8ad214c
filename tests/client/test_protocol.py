"""The client's half of the channel, without a socket: what is matched, what is refused, what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from sharedmirror import __version__, wire
from sharedmirror.errors import NoPages, ProtocolError, VersionMismatch
from sharedmirror.protocol import Answer, ClientProtocol, Phase
from sharedmirror.types import Role

HELLO: dict[str, Any] = {
    "id": 0, "protocol": 1, "version": "0.0.1", "instance": b"i" * 16, "epoch": 3, "session": 7, "token": b"t" * 16,
    "arenas": [4096],
}  # fmt: skip


def greeted() -> ClientProtocol:
    protocol = ClientProtocol(Role.WORKER, __version__)
    protocol.hello()
    protocol.receive(wire.encode(HELLO))
    return protocol


def answers(events: list[Answer | dict[str, Any]]) -> list[Answer]:
    assert all(isinstance(event, Answer) for event in events)
    return [event for event in events if isinstance(event, Answer)]


def test_hello_says_who_speaks_and_what() -> None:
    (frame,) = wire.FrameDecoder().feed(ClientProtocol(Role.SCHEDULER, "1.2.3").hello())
    assert frame == {
        "op": "hello",
        "id": 0,
        "protocol": [1, 1],
        "version": "1.2.3",
        "role": "scheduler",
        "resume": None,
    }


def test_the_greeting_is_kept() -> None:
    protocol = greeted()
    greeting = protocol.greeting
    assert protocol.phase is Phase.OPEN and greeting is not None
    assert (greeting.instance, greeting.epoch, greeting.version) == (b"i" * 16, 3, "0.0.1")
    assert (greeting.session, greeting.token, greeting.arenas) == (7, b"t" * 16, [4096])


def test_an_observer_is_greeted_without_token_and_arenas() -> None:
    protocol = ClientProtocol(Role.OBSERVER, __version__)
    protocol.hello()
    protocol.receive(wire.encode({name: HELLO[name] for name in HELLO if name not in ("token", "arenas")}))
    assert protocol.greeting is not None and protocol.greeting.arenas == []


@pytest.mark.parametrize("name", ["instance", "epoch", "version", "session"])
def test_a_greeting_that_lacks_something_is_refused(name: str) -> None:
    protocol = ClientProtocol(Role.WORKER, __version__)
    protocol.hello()
    with pytest.raises(ProtocolError, match=name):
        protocol.receive(wire.encode({key: value for key, value in HELLO.items() if key != name}))
    assert protocol.phase is not Phase.OPEN


@pytest.mark.parametrize(
    "change", [{"instance": "text"}, {"epoch": "x"}, {"session": None}, {"arenas": ["x"]}, {"arenas": 3}]
)
def test_a_garbled_greeting_is_refused(change: dict[str, Any]) -> None:
    protocol = ClientProtocol(Role.WORKER, __version__)
    protocol.hello()
    with pytest.raises(ProtocolError, match="hello"):
        protocol.receive(wire.encode(HELLO | change))
    assert protocol.phase is not Phase.OPEN


@pytest.mark.parametrize("theirs", [0, 2])
def test_a_daemon_that_chose_another_protocol_is_refused(theirs: int) -> None:
    protocol = ClientProtocol(Role.WORKER, __version__)
    protocol.hello()
    with pytest.raises(VersionMismatch, match=rf"daemon 0\.0\.1 speaks protocol {theirs} to {theirs}, .* 1 to 1"):
        protocol.receive(wire.encode(HELLO | {"protocol": theirs}))
    assert protocol.phase is not Phase.OPEN


def test_a_new_connection_of_the_session_goes_on_with_its_ids_and_may_repeat_one() -> None:
    protocol = greeted()
    protocol.request("lease", {"n": 1})
    after = protocol.successor()
    assert after.phase is Phase.GREETING and after.greeting is None
    (hello,) = wire.FrameDecoder().feed(after.hello({"session": 7}))
    assert hello["resume"] == {"session": 7}
    after.receive(wire.encode(HELLO))
    number, data = after.request("lease", {"n": 1}, again=1)
    assert number == 1 and wire.FrameDecoder().feed(data) == [{"op": "lease", "id": 1, "n": 1}]
    after.receive(wire.encode({"id": 1}))
    assert after.request("lease", {"n": 1})[0] == 2


def test_a_refused_hello_is_the_daemons_error() -> None:
    protocol = ClientProtocol(Role.WORKER, __version__)
    protocol.hello()
    (answer,) = answers(protocol.receive(wire.encode({"id": 0, "error": VersionMismatch("too old").to_wire()})))
    with pytest.raises(VersionMismatch, match="too old"):
        answer.result()
    assert protocol.phase is Phase.GREETING


def test_ids_grow_and_answers_find_their_request() -> None:
    protocol = greeted()
    for number in (1, 2, 3):
        got, data = protocol.request("lease", {"n": 4})
        assert got == number
        assert wire.FrameDecoder().feed(data) == [{"op": "lease", "id": number, "n": 4}]
        (answer,) = answers(protocol.receive(wire.encode({"id": number, "pages": [number]})))
        assert answer.id == number and answer.result()["pages"] == [number]


def test_arguments_cannot_take_the_place_of_op_and_id() -> None:
    protocol = greeted()
    _, data = protocol.request("lease", {"op": "clear", "id": 99})
    assert wire.FrameDecoder().feed(data) == [{"op": "lease", "id": 1}]


def test_an_error_is_raised_as_its_type_with_its_ids() -> None:
    protocol = greeted()
    protocol.request("lease", {"n": 4})
    (answer,) = answers(protocol.receive(wire.encode({"id": 1, "error": NoPages("none", asked=4).to_wire()})))
    with pytest.raises(NoPages) as caught:
        answer.result()
    assert caught.value.ids == {"asked": 4} and caught.value.retryable
    assert protocol.request("lease", {"n": 1})[0] == 2


def test_a_frame_that_the_daemon_could_not_read_answers_the_request() -> None:
    protocol = greeted()
    protocol.request("lease", {"n": 4})
    (answer,) = answers(protocol.receive(wire.encode({"id": 0, "error": ProtocolError("not msgpack").to_wire()})))
    assert answer.id == 1
    with pytest.raises(ProtocolError, match="not msgpack"):
        answer.result()


def test_pushes_keep_their_place_among_answers() -> None:
    protocol = greeted()
    protocol.request("commit", {})
    first, last = {"push": "revoked", "leases": [1]}, {"push": "released", "hits": [2]}
    events = protocol.receive(wire.encode(first) + wire.encode({"id": 1, "sealed": []}) + wire.encode(last))
    assert events[0] == first and events[2] == last
    assert isinstance(events[1], Answer)


@pytest.mark.parametrize("number", [0, 2, None, "1", -1, [1]])
def test_an_answer_to_nothing_that_was_asked_is_refused(number: object) -> None:
    protocol = greeted()
    protocol.request("commit", {})
    with pytest.raises(ProtocolError, match="answered request .*, not 1"):
        protocol.receive(wire.encode({"id": number, "sealed": []}))


def test_an_answer_that_nobody_waits_for_is_refused() -> None:
    with pytest.raises(ProtocolError, match="answered request 5, not None"):
        greeted().receive(wire.encode({"id": 5}))


def test_requests_wait_for_the_greeting_and_for_each_other_and_end_with_the_connection() -> None:
    protocol = ClientProtocol(Role.WORKER, __version__)
    with pytest.raises(ProtocolError, match="greeting"):
        protocol.request("lease", {})
    protocol = greeted()
    protocol.request("lease", {})
    with pytest.raises(ProtocolError, match="request 1 is still under way"):
        protocol.request("lease", {})
    protocol.end()
    with pytest.raises(ProtocolError, match="closed"):
        protocol.request("lease", {})


def test_a_request_too_large_to_send_takes_no_id_and_leaves_the_way_free() -> None:
    protocol = greeted()
    with pytest.raises(ProtocolError, match="over the limit"):
        protocol.request("seal", {"keys": [bytes(wire.MAX_FRAME_BYTES)]})
    assert protocol.request("lease", {"n": 1})[0] == 1
