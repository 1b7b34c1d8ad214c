"""Many clients at once: descriptors, memory, and nobody waits for a slow reader."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

from sharedmirror.channel import Channel
from sharedmirror.types import Role

if TYPE_CHECKING:
    from tests.conftest import Daemon, Starter
    from tests.daemon.conftest import Raw

DEFAULT_SOFT_LIMIT = 1024
MANY = 500
IDLE = 1000
IDLE_BYTES = 100 << 20


@pytest.fixture
def descriptors(nothing_left: None) -> Iterator[None]:
    """Let this process have the descriptors of a thousand clients."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4 * IDLE:
        pytest.skip("the hard limit of open files is too low here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_clients(daemon: Daemon, stack: contextlib.ExitStack, count: int) -> list[Channel]:
    roles = (Role.WORKER, Role.SCHEDULER)
    return [
        stack.enter_context(Channel.open(daemon.socket, role=roles[number % 2], timeout_s=20))
        for number in range(count)
    ]


def test_the_default_limit_of_open_files_is_enough_for_500_clients(descriptors: None, start: Starter) -> None:
    daemon = start(before=["sh", "-c", f'ulimit -Sn {DEFAULT_SOFT_LIMIT}; exec "$@"', "sh"])
    with contextlib.ExitStack() as stack:
        clients = open_clients(daemon, stack, MANY)
        assert {len(client.arena_fds) for client in clients} == {1}
        assert psutil.Process(daemon.pid).num_fds() > DEFAULT_SOFT_LIMIT
        assert daemon.status()["alarms"] == []
        assert "event=accept_failed" not in daemon.log()


def test_a_thousand_idle_sessions_cost_little_and_a_slow_reader_stalls_none(
    descriptors: None, start: Starter, raw: Callable[[str], Raw]
) -> None:
    daemon = start()
    before = daemon.status()["daemon"]["rss_bytes"]
    with contextlib.ExitStack() as stack:
        clients = open_clients(daemon, stack, IDLE)
        cost = daemon.status()["daemon"]["rss_bytes"] - before
        assert cost < IDLE_BYTES, f"{cost} bytes"
        slow = raw(daemon.socket)
        slow.hello("observer")
        # Answers of some 15 MiB that nobody reads, and half a frame.
        slow.send(*({"op": "status", "id": number} for number in range(15_000)))
        half = raw(daemon.socket)
        half.sock.sendall(b"\xff\x00\x00")
        longest = 0.0
        for client in clients:
            began = time.monotonic()
            assert client.call("status", timeout_s=20)["status"]["daemon"]["pid"] == daemon.pid
            longest = max(longest, time.monotonic() - began)
        # No measurement: whoever was stalled waited for the slow one for ever.
        assert longest < 20
    daemon.wait_status(lambda status: status["daemon"]["rss_bytes"] - before < IDLE_BYTES)
