"""A worker dies in the middle of stores from a GPU: what is granted again never shows its bytes.

The device goes on copying for a while after a SIGKILL, and as long as a fork of the worker lives (see
``sharedmirrord.proof``); so the pages may be granted again only with the proof.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror.control import connect
from sharedmirror.errors import NoPages
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import Lease
from tests.client import dying_worker
from tests.conftest import exists, until

if TYPE_CHECKING:
    from tests.conftest import Daemon, Starter

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

NEW = 0x55
PAGES = dying_worker.PAGES - 1
WATCH_S = 3.0
"""Longer than a dead worker's device was seen to go on: 0.2 s, and 2.4 s with a fork alive."""
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def driver() -> None:
    """Open the driver's descriptors before tests count them."""
    torch.zeros(1, device=DEVICE)


class Victim:
    """The worker that dies, and the child that it leaves."""

    def __init__(self, starter: Starter, socket: str, layout: str) -> None:
        line = [sys.executable, dying_worker.__file__, socket, DEVICE, layout]
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment(starter)
        )
        self.child = 0
        assert self.read() == "attached"

    @staticmethod
    def _environment(starter: Starter) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return starter.environment(PYTHONPATH=os.pathsep.join(paths))

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def store(self, lease: Lease) -> None:
        self.write(pickle.dumps(lease).hex())
        assert self.read() == "storing"

    def fork(self, kind: str) -> None:
        self.write(kind)
        self.child = int(self.read())

    def end_child(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            until(lambda: not exists(self.child), "the child ends")
            self.child = 0

    def finish(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.end_child()


@pytest.fixture
def watched(start: Starter) -> Iterator[tuple[Daemon, list[Any]]]:
    """A daemon, and a list of what is to be closed at the end."""
    daemon = start(memory="256MiB")
    closing: list[Any] = []
    yield daemon, closing
    for thing in reversed(closing):
        thing()
    gc.collect()
    # The last view may have gone just now, and is reported in the background.
    daemon.wait_status(lambda status: not status["sessions"], "no session is left")


def pages_of(mirror: SharedHostMirror, pages: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the host bytes of these pages, one tensor per plane."""
    span = dying_worker.PAGE_SIZE
    found = []
    for _, host in mirror.tensor_pairs:
        by_page = host if host.shape[0] == dying_worker.PAGES else host.view(dying_worker.PAGES, span, -1)
        found.append(by_page[torch.tensor(pages)])
    return found


def shows_old(mirror: SharedHostMirror, pages: tuple[int, ...]) -> bool:
    return any(bool((plane == dying_worker.OLD).any()) for plane in pages_of(mirror, pages))


def fill(client: Any, mirror: SharedHostMirror, pages: int, mark: bytes) -> Lease:
    """Lease so many pages, fill them with the new pattern and seal them."""
    lease: Lease = client.lease(pages)
    mirror.store(lease, list(enumerate(lease.pages))).wait(PATIENCE_S)
    mirror.commit(lease)
    keys = [mark + b"%d" % at for at in range(pages)]
    assert client.seal(lease, keys).sealed == lease.pages
    return lease


def watch(mirror: SharedHostMirror, lease: Lease) -> None:
    """Look at sealed pages for a while: they hold the new pattern and nothing else."""
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        for plane in pages_of(mirror, lease.pages):
            assert bool((plane == NEW).all()), "the dead worker's bytes showed up in pages that were granted again"


@pytest.mark.parametrize("layout", ["page", "slab"])
@pytest.mark.parametrize("fork", ["", "keeps", "maps"])
def test_the_bytes_of_a_worker_killed_while_storing_never_show_up(
    watched: tuple[Daemon, list[Any]], start: Starter, layout: str, fork: str
) -> None:
    daemon, closing = watched
    victim = Victim(start, daemon.socket, layout)
    closing.append(victim.finish)
    heir = dying_worker.attach(daemon.socket, DEVICE, layout, "new", NEW)
    closing.append(heir.close)
    old_scheduler = connect(daemon.socket, engine="old")
    closing.append(old_scheduler.close)
    # Its fair share beside the dead engine would be half of the pool.
    client = connect(daemon.socket, engine="new", max_held=PAGES)
    closing.append(client.close)

    doubtful = old_scheduler.lease(PAGES // 2)
    victim.store(doubtful)
    if fork:
        victim.fork(fork)
    victim.process.kill()
    victim.process.wait(PATIENCE_S)

    if fork:
        status = daemon.wait_status(lambda status: status["quarantine"])
        (entry,) = status["quarantine"]
        assert entry["pages"] == PAGES // 2 and entry["holders"] == [victim.child]
        with pytest.raises(NoPages):
            client.lease(PAGES // 2 + 1)
        # The rest of the pool is filled while the dead worker's device may still be writing.
        beside = fill(client, heir, PAGES // 2, b"beside")
        assert not set(beside.pages) & set(doubtful.pages)
        watch(heir, beside)
        client.evict([b"beside%d" % at for at in range(PAGES // 2)])
        victim.end_child()
    daemon.wait_pages("default", free=PAGES, quarantined=0, leased=0)
    # The last of the dead worker's bytes lie here still; from now on they may not come back.
    assert shows_old(heir, doubtful.pages)
    lease = fill(client, heir, PAGES, b"again")
    assert set(doubtful.pages) <= set(lease.pages)
    watch(heir, lease)
    # What the heir reads back is its own.
    for tensor, _ in heir.tensor_pairs:
        tensor.zero_()
    with client.lookup([b"again%d" % at for at in range(PAGES)]) as hit:
        heir.load(hit, list(enumerate(hit.pages))).wait(PATIENCE_S)
    for tensor, _ in heir.tensor_pairs:
        assert bool((tensor[: PAGES * dying_worker.PAGE_SIZE] == NEW).all())
