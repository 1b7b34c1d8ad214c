"""Engines for the tests of the control side: a pool, its workers and its scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from sharedmirror.control import Client, connect
from sharedmirror.types import Lease

if TYPE_CHECKING:
    from tests.conftest import Daemon, Processes, Worker
_numbers = itertools.count()


class Engine:
    """A pool of 8 pages to lease, its workers and its scheduler."""

    def __init__(self, daemon: Daemon, workers: list[Worker], client: Client, name: str) -> None:
        self.daemon, self.workers, self.client, self.name = daemon, workers, client, name

    def pages(self) -> dict[str, int]:
        return dict(self.daemon.pool(self.name)["pages"])

    def commit(self, lease: Lease | None, pages: list[int] | None = None) -> list[dict[str, Any]]:
        assert lease is not None
        return [worker.commit(lease, pages) for worker in self.workers]

    def write(self, *keys: bytes, parent: bytes | None = None) -> tuple[int, ...]:
        """Make keys readable and return their pages."""
        lease = self.client.lease(len(keys))
        self.commit(lease)
        assert self.client.seal(lease, keys, parent=parent).sealed == lease.pages
        return lease.pages


@pytest.fixture
def name() -> str:
    return f"control{next(_numbers)}"


@pytest.fixture
def two(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Engine]:
    """An engine of two ranks that drain at once."""
    workers = processes.engine(shared_daemon.socket, 2, answers=True, pool=name)
    with connect(shared_daemon.socket, name) as client:
        yield Engine(shared_daemon, workers, client, name)


@pytest.fixture
def one(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Engine]:
    """An engine of one rank that drains at once."""
    workers = processes.engine(shared_daemon.socket, 1, answers=True, pool=name)
    with connect(shared_daemon.socket, name) as client:
        yield Engine(shared_daemon, workers, client, name)


@pytest.fixture
def slow(shared_daemon: Daemon, processes: Processes, name: str) -> Iterator[Engine]:
    """An engine of one rank that drains only when a test says so."""
    workers = processes.engine(shared_daemon.socket, 1, pool=name)
    with connect(shared_daemon.socket, name) as client:
        yield Engine(shared_daemon, workers, client, name)
