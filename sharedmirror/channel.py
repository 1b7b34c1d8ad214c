"""The blocking control channel: one Unix socket, one request at a time, safe between threads.

It passes this process's pidfd with hello and receives the session file and the arenas' descriptors.
The session file stays open and mapped for the life of the channel: its lock tells the daemon that
this process, or a fork of it, could still map the arena.

When the daemon goes away the channel comes back to it: it reconnects with backoff, resumes its
session and repeats the request under way with the same id, which the daemon answers once. Another
instance of the daemon is no daemon to come back to: InstanceChanged, for good.

Must not import torch or numpy: schedulers and the CLI start with this module.
"""

from __future__ import annotations

import array
import contextlib
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from sharedmirror import __version__, paths
from sharedmirror.descriptors import READ_BYTES, close_all, is_other_file, receive
from sharedmirror.errors import (
    CallTimeout,
    ClosedError,
    DaemonUnavailable,
    ForkedError,
    InstanceChanged,
    ProtocolError,
    SharedMirrorError,
)
from sharedmirror.protocol import Answer, AwayLike, ClientProtocol, Errand, Greeting, Phase
from sharedmirror.types import Role

log = logging.getLogger("sharedmirror")

_WAIT_MARGIN_S = 5.0
"""A call that asks the daemon to wait gives it this much longer to answer."""
_TRY_S = 2.0
_BACKOFF_FIRST_S, _BACKOFF_LAST_S = 0.01, 0.5

Push = dict[str, Any]
Held = Callable[[], tuple[list[int], list[int]]]
"""Tells the ids of the leases and of the hits that a session took and still means to use."""


_LAST_WORDS_S = 0.2
"""How long a connection that takes no hello is read for what the daemon said before it closed."""
_GLANCE_S, _GLANCE_AGAIN_S = 0.05, 0.5
"""How long a daemon that has only begun to listen is given to say hello, and how often it is asked."""


class _Lost(DaemonUnavailable):
    """The connection is lost; the session may be resumed."""


class Channel:
    """A connection to the daemon; see ``open``.

    ``arena_fds`` are the arenas' descriptors (workers and schedulers only); the channel
    owns the descriptors. ``instance`` and ``epoch`` tell who answers.
    """

    def __init__(self, path: str, role: Role, timeout_s: float, on_push: Callable[[Push], None] | None) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.arena_fds: list[int] = []
        self.late_answers: list[dict[str, Any]] = []
        """Answers to calls that had timed out; whoever uses the channel decides what becomes of them."""
        self.held: Held | None = None
        self.away: AwayLike | None = None
        self.on_answer: Callable[[dict[str, Any]], None] | None = None
        """Told of each answer before anything else may happen on the channel, a resume above all."""
        self._role = role
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._protocol = ClientProtocol(role, __version__)
        self._greeting: Greeting | None = None
        self._on_push = on_push
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._void: InstanceChanged | None = None
        self._attached = False
        self._late: set[int] = set()
        self._errand: Errand | None = None
        self._session_file: mmap.mmap | None = None
        self._session_fd = -1
        self._listener: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._answer = Answer(0)
        self._then: Callable[[], float | None] | None = None
        self._pushed = False
        self._glanced = 0.0

    @classmethod
    def open(
        cls,
        socket_path: str | None = None,
        *,
        role: Role,
        timeout_s: float = 10.0,
        on_push: Callable[[Push], None] | None = None,
    ) -> Channel:
        """Connect and shake hands.

        ``socket_path`` defaults to the daemon's own default. ``on_push`` gets the daemon's own words,
        in whichever thread reads them; it must not call the channel. Raises DaemonUnavailable when
        nobody answers, VersionMismatch when the releases do not fit.
        """
        channel = cls(paths.check_socket_path(socket_path or paths.default_socket()), role, timeout_s, on_push)
        try:
            channel._connect(time.monotonic() + timeout_s)
            channel._greet()
        except BaseException:
            channel._discard()
            raise
        return channel

    # -- connecting ------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._sock.connect(self.path)
        except OSError as error:
            if isinstance(error, PermissionError):
                remedy = f"uid {os.getuid()} may not use this socket: start the daemon with --allow-uid {os.getuid()}"
            elif is_other_file(self.path):
                remedy = "the file is no socket: name the daemon's socket"
            else:
                remedy = "start one with `sharedmirrord --memory SIZE`, or set SHAREDMIRROR_SOCKET"
            raise DaemonUnavailable(
                f"no daemon answers on {self.path} ({error.strerror or error}); {remedy}", socket=self.path
            ) from None

    def _greet(self) -> None:
        fds = self._shake_hands(None, time.monotonic() + self.timeout_s)
        if self._role is Role.OBSERVER:
            close_all(fds)
        else:
            self._take_descriptors(fds)

    def _take_descriptors(self, fds: list[int]) -> None:
        greeting = self.greeting
        if len(fds) != 1 + len(greeting.arenas):
            close_all(fds)
            raise ProtocolError(f"the daemon passed {len(fds)} descriptors for {len(greeting.arenas)} arenas")
        self._session_fd, self.arena_fds = fds[0], fds[1:]
        # Read-only and never touched: only its existence counts.
        self._session_file = mmap.mmap(self._session_fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)

    def _shake_hands(self, resume: dict[str, Any] | None, deadline: float) -> list[int]:
        hello = self._protocol.hello(resume)
        pidfd = -1
        rights = []
        lost: _Lost | None = None
        try:
            if self._role is not Role.OBSERVER:
                with contextlib.suppress(OSError, AttributeError):
                    pidfd = os.pidfd_open(os.getpid())
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
            self._send(hello, rights)
        except _Lost as error:
            # A daemon that does not serve this user closes at once; what it said before that still counts.
            lost, deadline = error, min(deadline, time.monotonic() + _LAST_WORDS_S)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        fds: list[int] = []
        try:
            self._read_until(0, deadline, fds)
            self._answer.result()
        except (_Lost, CallTimeout) as error:
            close_all(fds)
            if lost is None and isinstance(error, CallTimeout):
                raise
            reason = error if lost is None or isinstance(error, _Lost) else lost
            raise DaemonUnavailable(
                f"{reason.message} before it said hello; if it does not serve uid {os.getuid()}, "
                f"start it with --allow-uid {os.getuid()}",
                socket=self.path,
            ) from None
        except BaseException:
            close_all(fds)
            raise
        self._greeting = self._greeting or self._protocol.greeting
        return fds

    def _reconnect(self, deadline: float, retry: int | None, stay_away: Callable[[], bool] | None = None) -> None:
        """Come back to the daemon, trying until ``deadline``; ``retry`` is the request to be repeated.

        Tries no more once ``stay_away`` says so and no daemon serves.
        Raises DaemonUnavailable, or InstanceChanged when what this session held is gone.
        """
        if self._role is Role.OBSERVER or self._greeting is None:
            raise DaemonUnavailable(f"the connection to the daemon on {self.path} is lost; connect again")
        pause_s = _BACKOFF_FIRST_S
        come_back: Callable[[int | None], None] = self._resume
        while True:
            if stay_away is not None and stay_away() and not self.serves():
                raise DaemonUnavailable(f"the daemon on {self.path} is away", socket=self.path)
            try:
                come_back(retry)
                self._pushed = self._pushed or self._then is not None  # it may owe the next daemon something
                if self._wake is not None and threading.current_thread() is not self._listener:
                    os.write(self._wake[1], b"r")  # the listener waits on the socket before
                return
            except InstanceChanged as error:
                if self._attached:
                    self._void = error
                    raise
                # Nothing was attached, so nothing is lost: a new session is as good.
                self._protocol.end()
                come_back = self._begin_again
                continue
            except (DaemonUnavailable, CallTimeout) as error:
                self._protocol.end()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DaemonUnavailable(f"the daemon on {self.path} is away: {error.message}") from None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _BACKOFF_LAST_S)

    def _begin_again(self, _retry: int | None) -> None:
        self._renew_socket()
        until = time.monotonic() + min(self.timeout_s, _TRY_S)
        self._connect(until)
        fds = self._shake_hands(None, until)
        older, file = [*self.arena_fds, self._session_fd], self._session_file
        self._greeting = self._protocol.greeting
        self._take_descriptors(fds)
        close_all(older)
        if file is not None:
            file.close()

    def _renew_socket(self) -> None:
        self._sock.close()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._protocol = self._protocol.successor()
        self._late.clear()

    def serves(self) -> bool:
        """Whether a daemon says hello at once, on another connection. One that only listens is seldom asked."""
        if time.monotonic() < self._glanced + _GLANCE_AGAIN_S:
            return False
        try:
            Channel.open(self.path, role=Role.OBSERVER, timeout_s=_GLANCE_S).close()
        except CallTimeout:
            self._glanced = time.monotonic()
            return False
        except SharedMirrorError:
            return False
        return True

    def _resume(self, retry: int | None) -> None:
        greeting = self.greeting
        if self.away is not None:
            # A daemon that only listens, because it begins or is about to die, is no reason to give the index up.
            Channel.open(self.path, role=Role.OBSERVER, timeout_s=min(self.timeout_s, _TRY_S)).close()
        self._renew_socket()
        # One try has its own time: the deadline says how long tries go on, and may be now.
        until = time.monotonic() + min(self.timeout_s, _TRY_S)
        self._connect(until)
        # First of all: whatever is let go without a daemon is let go before this, or not any more.
        claims = self.away.claims() if self.away is not None else None
        leases, hits = self.held() if self.held is not None else ([], [])
        body = {
            "instance": greeting.instance,
            "session": greeting.session,
            "token": greeting.token,
            "leases": leases,
            "hits": hits,
            "retry": retry,
            "away": claims,
        }
        close_all(self._shake_hands(body, until))
        if self.away is not None:
            self.away.resumed(list(self._answer.body.get("lost", ())))
        log.info("event=resumed session=%d socket=%s", greeting.session, self.path)

    # -- who answers -----------------------------------------------------------------------------

    @property
    def greeting(self) -> Greeting:
        """What the daemon said in its first hello."""
        greeting = self._greeting or self._protocol.greeting
        if greeting is None:
            raise ProtocolError("the daemon has not said hello")
        return greeting

    @property
    def instance(self) -> str:
        """The daemon's instance, in hex."""
        return self.greeting.instance.hex()

    @property
    def epoch(self) -> int:
        """The daemon's start count over its arena, as of now."""
        return (self._protocol.greeting or self.greeting).epoch

    @property
    def session(self) -> int:
        """The id of this connection's session."""
        return self.greeting.session

    # -- calls -----------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether the connection is lost, and this session is not back yet."""
        return self._protocol.phase is Phase.CLOSED

    def call(
        self,
        op: str,
        *,
        timeout_s: float | None = None,
        stay_away: Callable[[], bool] | None = None,
        fds: list[int] | None = None,
        come_back: bool = True,
        errand: Errand | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send a request and return its answer.

        ``timeout_s`` bounds the wait for the answer, a restart of the daemon included; by default the
        channel's, and longer by what ``wait_s`` asks of the daemon. Raises the daemon's typed error,
        CallTimeout, DaemonUnavailable while the daemon is away, InstanceChanged when another came.
        After CallTimeout or DaemonUnavailable the request may have happened.

        ``stay_away`` says whether the caller can do without a daemon that is away: DaemonUnavailable then
        comes at once. ``fds`` takes the descriptors that come with the answer; they are the caller's.

        Without ``come_back`` it comes at once in any case, and the listener or another call comes back. With an
        ``errand`` the call may be made again, with the same one, and gets the answer to the first request.
        """
        self.check_usable()
        if not come_back and self._protocol.phase is not Phase.OPEN:
            raise DaemonUnavailable(f"the daemon on {self.path} is away", socket=self.path)
        if stay_away is not None and self.lost and stay_away() and not self.serves():
            raise DaemonUnavailable(f"the daemon on {self.path} is away", socket=self.path)
        if timeout_s is None:
            wait_s = arguments.get("wait_s") or 0
            timeout_s = self.timeout_s + (wait_s + _WAIT_MARGIN_S if wait_s else 0)
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise CallTimeout(f"another call kept the channel for {timeout_s:g} s")
        try:
            self.check_usable()
            return self._exchange(op, arguments, deadline, stay_away, fds, come_back, errand)
        finally:
            if self._pushed and self._wake is not None and threading.current_thread() is not self._listener:
                os.write(self._wake[1], b"p")
            self._lock.release()

    def _exchange(
        self,
        op: str,
        arguments: dict[str, Any],
        deadline: float,
        stay_away: Callable[[], bool] | None,
        fds: list[int] | None,
        come_back: bool,
        errand: Errand | None,
    ) -> dict[str, Any]:
        number: int | None = None
        while True:
            try:
                if self._protocol.phase is Phase.CLOSED:
                    if not come_back:
                        raise DaemonUnavailable(f"the daemon on {self.path} is away", socket=self.path)
                    self._reconnect(deadline, number, stay_away)
                self._repeat_errand()
                for late in sorted(self._late):  # answers come in order
                    self._read_until(late, deadline)
                if errand is not None and errand.answer is not None:
                    return errand.answer.result()
                number, data = self._protocol.request(op, arguments, number)
                if errand is not None:
                    errand.number, errand.frame, self._errand = number, (op, arguments), errand
                self._send(data, [])
                self._read_until(number, deadline, fds)
                body = self._answer.result()
                self._attached = self._attached or op == "attach"
                if self.on_answer is not None:
                    self.on_answer(body)
                return body
            except _Lost as error:
                if self._role is Role.OBSERVER or time.monotonic() >= deadline:
                    raise DaemonUnavailable(error.message, socket=self.path) from None

    def _repeat_errand(self) -> None:
        """Send again, before anything newer, the request that an earlier connection has left without an answer."""
        errand = self._errand
        if errand is not None and errand.number not in self._late:
            _, data = self._protocol.request(*errand.frame, errand.number)
            self._late.add(errand.number)
            self._send(data, [])

    def _send(self, data: bytes, rights: list[tuple[int, int, Any]]) -> None:
        try:
            sent = self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except TimeoutError:
            self._protocol.end()
            raise CallTimeout(f"the daemon on {self.path} takes no requests") from None
        except OSError as error:
            self._protocol.end()
            raise _Lost(f"the connection to the daemon on {self.path} is lost: {error.strerror}") from None

    def _read_until(self, number: int, deadline: float, fds: list[int] | None = None) -> None:
        """Read until the answer to ``number`` has come, into ``self._answer``; ``fds`` takes descriptors."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self._late.add(number)
                raise CallTimeout(f"the daemon on {self.path} has not answered in time")
            self._sock.settimeout(left)
            try:
                if fds is not None:
                    data, received = receive(self._sock)
                    fds += received
                else:
                    data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                self._protocol.end()
                raise _Lost(f"the connection to the daemon on {self.path} is lost: {error.strerror}") from None
            if not data:
                self._protocol.end()
                raise _Lost(f"the daemon on {self.path} has closed the connection")
            if self._take(data, number):
                return

    def _take(self, data: bytes, number: int | None) -> bool:
        """Hand out what came in; True when the answer to ``number`` was among it."""
        found = False
        try:
            events = self._protocol.receive(data)
        except ProtocolError:
            self._protocol.end()
            raise
        for event in events:
            if isinstance(event, Answer):
                if self._errand is not None and event.id == self._errand.number:
                    self._errand.answer, self._errand = event, None
                    self._late.discard(event.id)
                elif event.id in self._late:
                    self._late.discard(event.id)
                    self.late_answers.append(event.body)
                if event.id == number:
                    self._answer, found = event, True
            elif self._on_push is not None:
                self._on_push(event)
                self._pushed = True
        return found

    # -- the listener ----------------------------------------------------------------------------

    def run_then(self) -> None:
        """Have the listener run what ``listen`` was given, soon."""
        self._pushed = True
        if self._wake is not None:
            os.write(self._wake[1], b"p")

    def listen(self, then: Callable[[], float | None] | None = None) -> None:
        """Start a thread that takes the daemon's words, and comes back to it, while no call is under way.

        ``then`` runs in that thread after ``on_push`` was given something, by whichever thread; it may
        call the channel, and returns after how many seconds it wants to run again, or None.
        """
        self.check_usable()
        if self._listener is None:
            self._then = then
            self._wake = os.pipe2(os.O_CLOEXEC)
            self._listener = threading.Thread(target=self._listen, name="sharedmirror-listener", daemon=True)
            self._listener.start()

    def _listen(self) -> None:
        again_s: float | None = None
        pause_s = _BACKOFF_FIRST_S
        while self._wait(0 if self._pushed else again_s, pause_s):
            with self._lock:
                if self._closed or self._void is not None:
                    return
                try:
                    if self._protocol.phase is Phase.CLOSED:
                        self._reconnect(time.monotonic(), None)
                    pause_s = _BACKOFF_FIRST_S
                    self._take_waiting()
                except SharedMirrorError as error:
                    log.debug("event=away error=%r", error.message)
                    pause_s = min(2 * pause_s, _BACKOFF_LAST_S)
                    continue
                pushed, self._pushed = self._pushed, False
            if self._then is not None and (pushed or again_s is not None):
                try:
                    again_s = self._then()
                except SharedMirrorError as error:
                    log.warning("event=answer_failed error=%r", error.message)
                    again_s = 1.0

    def _wait(self, timeout_s: float | None, pause_s: float) -> bool:
        """Wait for something to do, at most ``pause_s`` while the daemon is away; False when the channel closes."""
        if self._wake is None or self._closed:
            return False
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        # Asked once: a call in another thread may lose the connection, or come back, at any moment.
        fd = -1 if self._protocol.phase is Phase.CLOSED else self._sock.fileno()
        if fd < 0:
            timeout_s = pause_s
        else:
            # Without pushes to take, answers are no reason to wake up: only the end of the connection is.
            poll.register(fd, select.POLLIN if self._on_push else select.POLLRDHUP)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
        if self._wake[0] in ready:
            os.read(self._wake[0], 4096)
        return not self._closed

    def _take_waiting(self) -> None:
        """Take what has arrived, without waiting. A call that is under way reads its own answer."""
        if self._protocol.phase is Phase.CLOSED:
            return
        try:
            self._sock.settimeout(0)
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take(data, None)
        else:
            self._protocol.end()

    # -- the end ---------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ForkedError in a forked child, ClosedError after close, InstanceChanged after that."""
        if os.getpid() != self._pid:
            raise ForkedError("this connection belongs to the parent process; open another one", pid=self._pid)
        if self._closed:
            raise ClosedError("this connection is closed")
        if self._void is not None:
            raise InstanceChanged(self._void.message, **self._void.ids)

    def interrupt(self) -> None:
        """End the connection under a call in another thread, which then raises; ``close`` need not wait for it."""
        if os.getpid() == self._pid:  # a forked child has its parent's connection
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the descriptors; may be called again.

        The session file's mapping goes too: say ``detach`` first, or keep the channel while memory of
        the arena is mapped.
        """
        if os.getpid() != self._pid:
            return  # the descriptors in a forked child are the parent's evidence too; leave them
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._wake is not None:
                os.write(self._wake[1], b"x")
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join()
        self._discard()

    def _discard(self) -> None:
        self._closed = True
        self._sock.close()
        close_all([*self.arena_fds, *(self._wake or ()), self._session_fd])
        self.arena_fds, self._wake, self._session_fd = [], None, -1
        if self._session_file is not None:
            self._session_file.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
