"""A worker's poll and close while its daemon is dead or does not answer, and a new mirror in the same process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sharedmirror.control import Client, connect
from sharedmirror.errors import InstanceChanged
from sharedmirror.mirror import SharedHostMirror
from sharedmirror.types import Lease
from tests.daemon.comeback import POOL, Comeback

if TYPE_CHECKING:
    from tests.conftest import Starter

PAGES, PLANE_BYTES = 9, 64
Until = Callable[..., Any]
Mirrors = Callable[[], SharedHostMirror]
NEVER_S = 5.0
"""Much more than what may not wait takes, and half of what the channel would wait for."""
LEAVER = """
import os, signal, sys
from types import SimpleNamespace
import torch
from sharedmirror.mirror import SharedHostMirror
plane = torch.zeros(16, 8, dtype=torch.uint8)
pool = SimpleNamespace(page_size=4, k_buffer=[plane], v_buffer=[plane.clone()])
mirror = SharedHostMirror(pool, 9, socket=sys.argv[1], rank=0, world_size=1, pages="leased")
os.kill(int(sys.argv[2]), signal.SIGKILL)
mirror.close()
print("left")
"""


@pytest.fixture
def life(start: Starter) -> Comeback:
    return Comeback(start)


@pytest.fixture
def attach(life: Comeback, wait_until: Until) -> Iterator[Mirrors]:
    """Make mirrors; at the end all have left."""
    made: list[SharedHostMirror] = []

    def make() -> SharedHostMirror:
        planes = [torch.zeros(16, 8, dtype=torch.uint8) for _ in range(2)]
        pool = SimpleNamespace(page_size=4, k_buffer=planes[:1], v_buffer=planes[1:])
        made.append(SharedHostMirror(pool, PAGES, socket=life.socket, rank=0, world_size=1, pages="leased"))
        return made[-1]

    yield make
    if life.daemon.process.poll() is not None:
        life.again()
    for mirror in made:
        mirror.close()
    made.clear()
    gc.collect()
    wait_until(lambda: not farewells(), "all farewells are said")


def farewells() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sharedmirror-farewell"]


def soon(call: Callable[[], Any]) -> Any:
    """Return what the call returns; fails when it waits for the daemon."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(NEVER_S)


def queue(client: Client, mirror: SharedHostMirror) -> Lease:
    """Queue a commit of a page that has its key already: with the commit its lease is over."""
    lease = client.lease(1)
    mirror.store(lease, [(1, lease.pages[0])]).wait(20)
    assert client.seal(lease, [b"key%d" % lease.id]).pending == lease.pages
    assert mirror.commit(lease, wait=False) is None
    return lease


def poll_until_sealed(mirror: SharedHostMirror, lease: Lease, wait_until: Until) -> None:
    def sealed() -> bool:
        progress = mirror.poll()
        assert progress.failed == ()
        return [(number, answer.sealed) for number, answer in progress.sealed] == [(lease.id, lease.pages)]

    wait_until(sealed, "the commit is answered")
    assert mirror.poll().waiting == 0


def test_poll_does_not_wait_for_a_dead_daemon_and_sends_when_it_is_back(
    life: Comeback, attach: Mirrors, wait_until: Until
) -> None:
    mirror = attach()
    with connect(life.socket, timeout_s=20) as client:
        lease = queue(client, mirror)
        life.daemon.kill()
        for _ in range(3):
            progress = soon(mirror.poll)
            assert (progress.sealed, progress.failed, progress.waiting) == ((), (), 1)
        life.again()
        poll_until_sealed(mirror, lease, wait_until)


def test_poll_does_not_wait_for_a_daemon_that_only_listens(life: Comeback, attach: Mirrors, wait_until: Until) -> None:
    """The listener, which comes back, keeps the channel meanwhile."""
    mirror = attach()
    with connect(life.socket, timeout_s=20) as client:
        lease = queue(client, mirror)
        life.daemon.kill()
        with mirror._attachment.channel._lock:  # type: ignore[attr-defined]
            wait_until(lambda: soon(mirror.poll).waiting == 1)
        life.again()
        poll_until_sealed(mirror, lease, wait_until)


@pytest.mark.parametrize("dies", [False, True], ids=["it answers late", "it dies"])
def test_a_commit_without_an_answer_happens_once(
    life: Comeback, attach: Mirrors, wait_until: Until, dies: bool
) -> None:
    mirror = attach()
    with connect(life.socket, timeout_s=20) as client:
        lease = queue(client, mirror)
        life.daemon.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            assert soon(mirror.poll).waiting == 1
        if dies:
            life.restart()
        else:
            life.daemon.process.send_signal(signal.SIGCONT)
            life.daemon.wait_pages(POOL, sealed=1)
        poll_until_sealed(mirror, lease, wait_until)
        life.daemon.wait_pages(POOL, sealed=1, leased=0)


def test_an_answer_that_was_lost_with_its_daemon_comes_from_the_next(
    life: Comeback, attach: Mirrors, wait_until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit has ended its lease: said as a new request it would be stale."""
    mirror = attach()
    channel: Any = mirror._attachment.channel
    with connect(life.socket, timeout_s=20) as client:
        lease, send = queue(client, mirror), channel._send

        def send_and_lose(data: bytes, rights: Any) -> None:
            send(data, rights)
            life.daemon.wait_pages(POOL, sealed=1)
            life.daemon.kill()
            channel._sock.recv(1 << 16)
            monkeypatch.undo()

        monkeypatch.setattr(channel, "_send", send_and_lose)
        assert soon(mirror.poll).waiting == 1
        life.again()
        # Another request comes first: that of the commit must come before it.
        channel.call("contains", keys=[b"k"])
        poll_until_sealed(mirror, lease, wait_until)


def test_close_does_not_wait_for_a_dead_daemon_and_the_process_may_attach_again(
    life: Comeback, attach: Mirrors, wait_until: Until
) -> None:
    mirror = attach()
    channel: Any = mirror._attachment.channel
    life.daemon.kill()
    soon(mirror.close)
    assert not channel._closed
    life.again()
    second = attach()
    wait_until(lambda: channel._closed, "the first has said that it left")
    assert [s["state"] for s in life.daemon.status()["sessions"]] == ["attached"]
    with connect(life.socket, timeout_s=20) as client:
        lease = queue(client, second)
        poll_until_sealed(second, lease, wait_until)


def test_views_that_live_on_are_told_of_in_the_background_too(
    life: Comeback, attach: Mirrors, wait_until: Until
) -> None:
    mirror = attach()
    channel: Any = mirror._attachment.channel
    held = mirror.tensor_pairs[0][1][4:8]
    life.daemon.kill()
    soon(mirror.close)
    life.again()
    life.daemon.wait_status(lambda status: [s["state"] for s in status["sessions"]] == ["detached"])
    life.daemon.kill()
    held.fill_(1)
    del held
    gc.collect()
    life.again()
    wait_until(lambda: channel._closed, "the end of the view is said")
    assert life.daemon.status()["sessions"] == []


def test_the_farewell_ends_where_another_instance_answers(life: Comeback, attach: Mirrors, wait_until: Until) -> None:
    mirror = attach()
    channel: Any = mirror._attachment.channel
    life.daemon.kill()
    soon(mirror.close)
    # With nothing to adopt the next daemon is another instance.
    for name in life.daemon.segments():
        os.unlink(f"/dev/shm/{name}")
    life.again()
    with pytest.raises(InstanceChanged):
        wait_until(lambda: channel._void is not None or channel._closed)
        raise channel._void
    wait_until(lambda: channel._closed, "the channel is closed")


def test_a_process_may_end_with_its_farewell_unsaid(life: Comeback) -> None:
    line = [sys.executable, "-c", LEAVER, life.socket, str(life.daemon.pid)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
    life.daemon.process.wait(20)
    life.again()
    life.daemon.wait_status(lambda status: status["sessions"] == [])
    life.daemon.leaves_segments = True


def test_a_forked_child_of_one_that_leaves_says_nothing(life: Comeback, attach: Mirrors) -> None:
    mirror = attach()
    life.daemon.kill()
    soon(mirror.close)
    child = os.fork()
    if child == 0:
        os._exit(len(farewells()))
    assert os.waitpid(child, 0)[1] == 0
    assert len(farewells()) == 1
