"""The scheduler's connection to one pool, which never makes the scheduler wait for long.

What it keeps:

- a call of the scheduler is one round trip with a deadline. If it fails, the link is out of use until
  its own thread has found the daemon again; meanwhile every answer is "nothing there", at once;
- what needs no answer (releases, aborts, evictions) is done by the thread, and done again after an
  outage: nothing that was taken is forgotten;
- after ``clear`` nothing stored before is ever answered, also when the daemon was away at the time;
- another instance of the daemon is a new life: ``life`` changes, and what was held before is void.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from vllm.logger import init_logger

from sharedmirror import Client, connect
from sharedmirror.control import Hit
from sharedmirror.errors import (
    CallTimeout,
    ClosedError,
    InstanceChanged,
    NoPages,
    PoolNotFound,
    RanksMissing,
    SharedMirrorError,
    StaleLease,
)
from sharedmirror.integrations.vllm.options import Options
from sharedmirror.types import KeyState, Lease, Reservation

__all__ = ["Granted", "Held", "PoolLink"]

_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_FORM_WAIT_S = 1.0
"""How long one try waits for the ranks to create the pool; short, so that shutdown need not wait long."""
_FORGET_S = 0.05
_SETTLE_S = 20.0
"""A lease whose stores vLLM reported complete should be committed by then; what is not, is given up."""

_VOID = (InstanceChanged, ClosedError)

_log = init_logger("vllm.sharedmirror")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A hit, and the daemon's instance in which its number means something."""

    instance: str
    hit: Hit


class Granted(NamedTuple):
    """What ``reserve`` said, and the daemon's instance that said it."""

    instance: str
    reservation: Reservation


class _Connection(NamedTuple):
    client: Client
    instance: str


class PoolLink:
    """A connection to pool ``name`` as the scheduler of ``engine``, kept up by a thread."""

    def __init__(self, name: str, engine: str, options: Options, *, related: str = "") -> None:
        self.name = name
        self.usable = False
        """Whether calls may be made; turned on by the thread, and off by a call that failed."""
        self.life = 0
        """Counts the times that everything held became void."""
        self.calls_failed = 0
        self._engine = engine
        self._options = options
        self._related = related
        self._connection: _Connection | None = None
        self._clear_owed = False
        self._closing = False
        self._wake = threading.Event()
        self._errands: deque[tuple[str, Callable[[Client], object]]] = deque()
        """What is to be done, and in which instance of the daemon; in another one it is void."""
        self._settling: deque[tuple[float, str, Lease]] = deque()
        self._said = ""
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sharedmirror-link", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the link is usable, or it is clear that this may take long."""
        self._tried.wait(timeout_s)

    # -- the scheduler's calls -------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """How many pages one call may reserve."""
        connection = self._connection
        return 0 if connection is None else connection.client.num_host_pages - 1

    def lookup(self, keys: Sequence[bytes], mode: Literal["prefix", "each"]) -> Held | None:
        """Find and pin; None where there is no answer in time."""
        return self._try(lambda c: Held(c.instance, c.client.lookup(keys, mode)))

    def reserve(self, keys: Sequence[bytes], parent: bytes | None) -> Granted | None:
        """Lease pages for the keys that are not there; None where there are no pages, or no answer in time."""
        return self._try(lambda c: Granted(c.instance, c.client.reserve(keys, parent)))

    def forget(self, held: Sequence[Held], keys: Sequence[bytes]) -> None:
        """Let hits go and evict keys found in them that turned out bad.

        Waits a moment for the ranks to let go too: what is computed next is then stored in their place.
        """
        self.release(held)
        self._try(lambda c: self._forget(c, held, keys))

    def _forget(self, connection: _Connection, held: Sequence[Held], keys: Sequence[bytes]) -> None:
        if any(each.instance != connection.instance for each in held):
            return  # with the instance its keys went too
        client = connection.client
        _release(held)(client)
        until = time.monotonic() + _FORGET_S
        left: Sequence[bytes] = keys
        try:
            while (left := client.evict(left).pinned) and time.monotonic() < until:
                time.sleep(_FORGET_S / 50)
        finally:
            if left:  # another engine is reading them, or the daemon frees nothing yet
                self._send(connection.instance, lambda client: client.evict(left))

    def clear(self) -> None:
        """Forget every key of the pool: now, or before the link is used again."""
        self._clear_owed = True
        if self._try(lambda c: c.client.clear()) is not None:
            self._clear_owed = False
        else:
            self._out_of_use()

    def _try(self, call: Callable[[_Connection], _T]) -> _T | None:
        connection = self._connection
        if connection is None or not self.usable:
            return None
        try:
            return call(connection)
        except SharedMirrorError as error:
            if isinstance(error, (NoPages, RanksMissing)):
                _log.debug("event=refused pool=%s reason=%r", self.name, error.message)
                return None
            self.calls_failed += 1
            _log.warning("event=call_failed pool=%s reason=%r", self.name, error.message)
            if error.retryable or isinstance(error, _VOID):
                self._out_of_use()
        return None

    def _out_of_use(self) -> None:
        self.usable = False
        self._wake.set()

    # -- errands ---------------------------------------------------------------------------------

    def release(self, held: Sequence[Held]) -> None:
        """Let hits go, soon."""
        for instance in {each.instance for each in held}:
            self._send(instance, _release([each for each in held if each.instance == instance]))

    def abort(self, instance: str, lease: Lease) -> None:
        """Give a lease up."""
        self._send(instance, lambda client: client.abort(lease))

    def settle(self, instance: str, lease: Lease) -> None:
        """Expect every rank's commit of ``lease``; give up, after a while, what has not come."""
        self._settling.append((time.monotonic() + _SETTLE_S, instance, lease))

    def _send(self, instance: str, errand: Callable[[Client], object]) -> None:
        self._errands.append((instance, errand))
        self._wake.set()

    def close(self) -> None:
        """Disconnect; the daemon takes back what is still held."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, idle = _PAUSE_S, False
        while not self._closing:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                if idle or not self.usable:  # idle: is it still the same daemon?
                    self._come_back(self._connection.client)
                self._do_errands(self._connection)
                pause_s = _PAUSE_S
                idle = not self._wake.wait(_LONGEST_PAUSE_S)
            except _VOID as error:
                self._lost(error)
            except SharedMirrorError as error:
                self._say(error)
                self.usable = False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._wake.clear()
        self.usable = False
        if self._connection is not None:
            self._connection.client.close()

    def _connect(self) -> _Connection:
        options = self._options
        client = connect(options.socket, self.name, self._engine, timeout_s=options.call_timeout_s, wait_s=_FORM_WAIT_S)
        try:
            status = client.status()
        except BaseException:
            client.close()
            raise
        _log.info("event=connected pool=%s engine=%s chunks=%d", self.name, self._engine, client.num_host_pages - 1)
        ours = self.name.rpartition("/")[0]
        names = {pool["name"].rpartition("/")[0]: pool["tag"] for pool in status["pools"]}
        others = {name: tag for name, tag in names.items() if name.startswith(self._related) and name != ours}
        if self._related and others:
            _log.warning(
                "event=not_shared pool=%s others=%s: pools of this model that were made with other settings; what "
                "is in them is not found here", self.name, others,
            )  # fmt: skip
        return _Connection(client, str(status["daemon"]["instance"]))

    def _come_back(self, client: Client) -> None:
        if self._clear_owed:
            client.clear()
            self._clear_owed = False
        else:
            client.contains([])
        self.usable = True
        self._said = ""
        self._tried.set()

    def _do_errands(self, connection: _Connection) -> None:
        while self._errands:
            instance, errand = self._errands[0]
            if instance == connection.instance:
                self._do(connection.client, errand)
            self._errands.popleft()
        while self._settling and self._settling[0][0] < time.monotonic():
            _, instance, lease = self._settling[0]
            if instance == connection.instance and KeyState.PENDING in connection.client.contains(lease.keys or ()):
                _log.warning("event=never_committed pool=%s lease=%d", self.name, lease.id)
                self.abort(instance, lease)
            self._settling.popleft()

    def _do(self, client: Client, errand: Callable[[Client], object]) -> None:
        try:
            errand(client)
        except SharedMirrorError as error:
            if error.retryable or isinstance(error, _VOID):
                raise
            if not isinstance(error, StaleLease):  # a stale one is over already: what was wanted
                _log.error("event=errand_failed pool=%s reason=%r", self.name, error.message)

    def _lost(self, error: SharedMirrorError) -> None:
        """Another daemon, or none that knows us: begin anew."""
        _log.warning("event=lost pool=%s reason=%r", self.name, error.message)
        connection, self._connection = self._connection, None
        self.usable = False
        self.life += 1
        if connection is not None:
            connection.client.close()

    def _say(self, error: SharedMirrorError) -> None:
        """Log why there is no tier, once for each reason."""
        if not isinstance(error, (PoolNotFound, CallTimeout)):
            self._tried.set()
        if error.message != self._said:
            self._said = error.message
            _log.warning("event=no_tier pool=%s reason=%r: serving without it", self.name, error.message)


def _release(held: Sequence[Held]) -> Callable[[Client], None]:
    # Copies, because a hit whose release was tried once can't be tried again.
    return lambda client: client.release([dataclasses.replace(each.hit) for each in held])
