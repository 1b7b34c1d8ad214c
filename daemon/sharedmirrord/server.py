"""The daemon's event loop: sockets, processes and time on one side, the pure core on the other.

Every event goes through ``_apply``, which makes the core's writes durable, then sends, then lets go
of sessions that are over; so a reply never describes what a crash could lose (invariant 7). Nothing
here blocks: prefaulting and the search for a dead session's holders run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from sharedmirror import __version__, wire
from sharedmirror.errors import (
    DaemonUnavailable,
    EnvironmentFault,
    InstanceChanged,
    MemoryFault,
    ProtocolError,
    SharedMirrorError,
    UsageError,
)
from sharedmirror.types import Role
from sharedmirrord import alarms, failpoints, lifecycle, memory, notify, proof
from sharedmirrord.arena import Arena
from sharedmirrord.boards import Boards
from sharedmirrord.connection import Connection
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import away, machine, report, sessions, watching
from sharedmirrord.core.durable import CreateTable, DropTable
from sharedmirrord.core.model import Effects, Peer, State
from sharedmirrord.index import Indexes
from sharedmirrord.records import RecordStore

log = logging.getLogger("sharedmirrord")

_HANDSHAKE_S = 30.0
_STOP_S = 5.0
_CHECK_FIRST_S, _CHECK_LAST_S = 0.02, 1.0
_DOUBT_AFTER_S = 0.25
"""A killed process's files and memory may go a moment after its pidfd speaks; only then is it in doubt."""
_SAVE_AGAIN_S = 1.0


@dataclass
class Settings:
    """What the daemon was started with."""

    socket_path: str
    session_dir: str
    allowed_uids: frozenset[int]
    keep: bool
    instance: bytes
    epoch: int


@dataclass
class _Life:
    """A session's watch, and how far the search for its end has come."""

    watch: proof.LifeWatch
    connection: Connection | None
    ended_at: float | None = None
    delay_s: float = _CHECK_FIRST_S
    said: tuple[tuple[str, ...], tuple[int, ...]] | None = None


@dataclass
class Server:
    """Serves one arena until it is stopped."""

    settings: Settings
    arena: Arena
    store: RecordStore
    state: State
    lives: dict[int, _Life] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    alarms: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._stopped = asyncio.Event()
        # Opened now: status answers also when descriptors have run out.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._unsaved: list[Effects] = []
        self._indexes = Indexes(self.state, self.settings.epoch, self._loop.call_later)
        self._boards = Boards(self.state)
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch_survivors(self) -> None:
        """Look after the sessions from before a restart: each resumes, or is proven gone."""
        for session in list(self.state.sessions.values()):
            watch = proof.LifeWatch.adopt(
                self.settings.session_dir, session.id, session.peer.pid, session.peer.start_time
            )
            watch.may_copy = session.role is Role.WORKER
            self.lives[session.id] = _Life(watch, None)
            if not watch.may_copy:
                self._loop.call_soon(self._check, session.id)
            if watch.pidfd is not None:
                self._loop.add_reader(watch.pidfd, self._process_ended, session.id)
            elif watch.ended:
                self._loop.call_soon(self._process_ended, session.id)

    # -- life of the daemon ----------------------------------------------------------------------

    async def run(self, listener: socket.socket) -> None:
        """Serve on a listening socket until ``stop``; raises MemoryFault when the arena cannot be had."""
        self._listener = listener
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)
        prefault = asyncio.ensure_future(asyncio.to_thread(self.arena.prefault, self._progress))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({prefault, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if prefault.done() and not self._stopped.is_set():
                prefault.result()
                self._ready()
            await stopped
        finally:
            self.arena.stop.set()
            stopped.cancel()
            await asyncio.gather(prefault, return_exceptions=True)
            await self._close()

    def stop(self) -> None:
        """Grant no more leases, answer what waits, and end ``run``."""
        if not self._stopped.is_set():
            notify.stopping()
            self._stopped.set()

    def _ready(self) -> None:
        self._apply(machine.Ready())
        if not self._unsaved and not self._indexes.followed:
            self._indexes.follow()
        arena = self.arena
        log.info(
            "event=ready socket=%s bytes=%d pin=%s pinned_bytes=%d huge_page_share=%.2f seconds=%.2f",
            self.settings.socket_path, arena.size_bytes, arena.pin, arena.pinned_bytes, arena.huge_page_share(),
            time.monotonic() - self._started,
        )  # fmt: skip
        notify.ready()

    def _progress(self, ready_bytes: int) -> None:
        notify.status(f"prefaulting: {ready_bytes} of {self.arena.size_bytes} bytes")

    async def _close(self) -> None:
        """Answer what waits and close within 5 s, whether or not clients take their answers."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        self._apply(machine.Stop())
        deadline = time.monotonic() + _STOP_S - 1.0
        # The clients' reading gives no event to wait for.
        while any(c.unsent_bytes for c in self.connections) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.end("the daemon stops")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def has_live_sessions(self) -> bool:
        """Whether a process that attached, or a fork of it, may still map the arena."""
        return any(
            session.incarnation is not None
            and bool(self.lives[session.id].watch.missing() if session.id in self.lives else ())
            for session in self.state.sessions.values()
        )

    # -- the core --------------------------------------------------------------------------------

    def _apply(self, event: machine.Event) -> None:
        asked = isinstance(event, machine.Request) and event.op == "attach"
        if asked or any(waiter.op == "attach" for waiter in self.state.waiters):
            free = memory.shm_free()
            self.state.table_room = None if free is None else self.store.table_room(free)
        effects = machine.apply(self.state, event, time.monotonic())
        if effects.writes or effects.replies or effects.pushes or effects.forgotten or effects.notes:
            self._unsaved.append(effects)
            self._save()
        self._set_timer()

    def _save(self) -> None:
        """Make writes durable in order and let their answers go; what cannot be saved yet waits."""
        while self._unsaved:
            effects = self._unsaved[0]
            try:
                if effects.writes:
                    self.store.commit(effects.writes)
            except MemoryFault as error:
                # Answers stay back: they would describe what a crash could lose.
                self.alarms["records"] = f"records cannot be saved, calls wait: {error.message}"
                log.error("event=save_failed error=%r", error.message)
                self._loop.call_later(_SAVE_AGAIN_S, self._save)
                return
            self._unsaved.pop(0)
            self.alarms.pop("records", None)
            for note in effects.notes:
                log.info("%s", note)
            if not self._unsaved:
                self._update_indexes(effects)
            failpoints.reach("reply.before")
            for session, body in [*effects.pushes, *effects.replies]:
                life = self.lives.get(session)
                if life is not None and life.connection is not None:
                    life.connection.send(body)
            failpoints.reach("reply.after")
            for session in effects.forgotten:
                self._forget(session)
            if effects.forgotten:
                self._boards.prune()

    def _update_indexes(self, effects: Effects) -> None:
        """All is durable: readers may see it, before the answers go out."""
        self._indexes.flush()
        # Tables from before a restart come once the daemon is ready: it is ready the sooner.
        new = any(isinstance(write, (CreateTable, DropTable)) for write in effects.writes)
        if new or (self.state.ready and not self._indexes.followed):
            self._indexes.follow()

    def _set_timer(self) -> None:
        deadline = machine.next_deadline(self.state)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = self._loop.call_later(delay, self._apply, machine.Tick())

    # -- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self.alarms["accept"] = (
                f"connections are refused: {error.strerror}; raise the limit of open files (LimitNOFILE)"
            )
            log.error("event=accept_failed error=%r", error.strerror)
            # The listener stays readable; without a pause the loop would spin.
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(0.1, self._accept_again)
            return
        self.alarms.pop("accept", None)
        connection = Connection(self._loop, sock, self._frames, self._ended)
        if connection.uid not in self.settings.allowed_uids:
            log.warning("event=refused uid=%d pid=%d", connection.uid, connection.pid)
            connection.end("this uid is not served")
            return
        self.connections.add(connection)
        self._loop.call_later(_HANDSHAKE_S, self._check_handshake, connection)

    def _accept_again(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _check_handshake(self, connection: Connection) -> None:
        if connection.session is None:
            connection.end("no hello in time")

    def _frames(self, connection: Connection, frames: list[dict[str, Any]], fds: list[int]) -> None:
        try:
            for frame in frames:
                if connection.closed:
                    return
                try:
                    self._frame(connection, frame, fds)
                except SharedMirrorError as error:
                    number = frame.get("id")
                    connection.send({"id": number if isinstance(number, int) else 0, "error": error.to_wire()})
                    if connection.session is None:
                        connection.end_after_sending(error.message)
                        return
                except Exception as error:  # a bug of ours: the client is told, and the others are served on
                    log.exception("event=internal_error op=%r", frame.get("op"))
                    told = SharedMirrorError(f"the daemon failed: {type(error).__name__}; see its log")
                    connection.send({"id": frame["id"] if type(frame.get("id")) is int else 0, "error": told.to_wire()})
        finally:
            for fd in fds:
                os.close(fd)

    def _frame(self, connection: Connection, frame: dict[str, Any], fds: list[int]) -> None:
        op, number = frame.get("op"), frame.get("id")
        if not isinstance(op, str) or type(number) is not int or not 0 <= number < 1 << 62:
            raise ProtocolError("a request has an op and an id from 0")
        if connection.session is None:
            if op != "hello":
                raise ProtocolError("a connection begins with hello")
            self._hello(connection, frame, fds)
        elif op == "status":
            connection.send({"id": number, "status": self.status()})
        elif op == "watch":
            if self._unsaved:
                raise DaemonUnavailable("the daemon's records are full; changes are told once they are saved")
            told = watching.watch(self.state, frame, self.settings.instance.hex(), self.settings.epoch)
            connection.send({"id": number, **told})
        elif op == "drop":
            free = self.state.space.free_bytes
            self._apply(machine.Drop(arg.text(frame, "pool"), arg.optional_text(frame, "tag")))
            if self._unsaved:
                raise EnvironmentFault("the daemon's records are full; try again when /dev/shm has room")
            connection.send({"id": number, "freed": self.state.space.free_bytes - free})
        elif op == "hello":
            raise ProtocolError("hello was said already")
        elif connection.session not in self.lives:
            raise UsageError(
                "this connection may only ask for status, watch or drop: its session has ended, or it is an observer"
            )
        elif op == "index":
            self._pass_index(connection, number)
        elif op == "board":
            self._pass_board(connection, number)
        else:
            self._apply(machine.Request(connection.session, number, op, frame))

    def _pass_index(self, connection: Connection, number: int) -> None:
        """Answer ``index``: ``here`` with a descriptor, ``later`` while it is built, or ``none``."""
        pool = self.state.sessions[connection.session or 0].pool
        if pool is None:
            raise UsageError("attach to a pool first", session=connection.session)
        index = self._indexes.get(pool)
        if index is None:
            connection.send({"id": number, "index": "none"})
        elif not index.ready or connection.unsent_bytes:  # a descriptor cannot wait in a queue of bytes
            connection.send({"id": number, "index": "later"})
        else:
            reader = index.reader()
            try:
                connection.send({"id": number, "index": "here"}, [reader])
            finally:
                os.close(reader)

    def _pass_board(self, connection: Connection, number: int) -> None:
        """Answer ``board``: ``here`` with a descriptor, ``later``, or ``none``."""
        session = self.state.sessions[connection.session or 0]
        if session.incarnation is None or session.rank is None or session.pool is None:
            raise UsageError("attach to a pool as a worker first", session=connection.session)
        if connection.unsent_bytes:  # a descriptor cannot wait in a queue of bytes
            connection.send({"id": number, "board": "later"})
            return
        fd = self._boards.get(session.incarnation, self.state.pools[session.pool].properties.world_size)
        connection.send({"id": number, "board": "none" if fd is None else "here"}, None if fd is None else [fd])

    def _hello(self, connection: Connection, frame: dict[str, Any], fds: list[int]) -> None:
        version = str(frame.get("version"))[:64]
        protocol = wire.negotiate(frame.get("protocol"), who="client", version=version)
        try:
            role = Role(frame.get("role"))
        except ValueError:
            raise ProtocolError(f"unknown role {frame.get('role')!r:.80}") from None
        session = self.state.new_id()
        body = {
            "id": frame["id"],
            "protocol": protocol,
            "version": __version__,
            "instance": self.settings.instance,
            "epoch": self.settings.epoch,
            "session": session,
        }
        if role is Role.OBSERVER:
            connection.session = session
            connection.send(body)
            return
        pidfd = fds.pop(0) if fds else None
        if frame.get("resume") is not None:
            self._resume(connection, frame["resume"], pidfd, body)
            return
        try:
            pid = self._check_pid(connection, pidfd)
            if pidfd is None and pid:
                with contextlib.suppress(OSError, AttributeError):
                    pidfd = os.pidfd_open(pid)
            watch, theirs = proof.LifeWatch.create(self.settings.session_dir, session, pidfd)
        except (SharedMirrorError, OSError) as error:
            if pidfd is not None:
                os.close(pidfd)
            if isinstance(error, OSError):
                raise EnvironmentFault(
                    f"the daemon cannot keep a session: {error.strerror}; raise LimitNOFILE or free disk space"
                ) from None
            raise
        watch.may_copy = role is Role.WORKER
        token = secrets.token_bytes(16)
        try:
            self.lives[session] = _Life(watch, connection)
            connection.session = session
            self._apply(machine.Hello(session, self._peer(connection, pid, token), role))
            if self._unsaved:
                raise EnvironmentFault("the daemon's records are full: it takes no sessions until /dev/shm has room")
            if pidfd is not None:
                self._loop.add_reader(pidfd, self._process_ended, session)
            else:
                log.warning(
                    "event=unprovable session=%d pid=%d: no pidfd; its pages stay quarantined if it dies", session, pid
                )
            failpoints.reach("hello.before")
            connection.send(body | {"token": token, "arenas": [self.arena.size_bytes]}, [theirs, self.arena.fd])
            failpoints.reach("hello.after")
        finally:
            os.close(theirs)

    def _resume(self, connection: Connection, asked: Any, pidfd: int | None, body: dict[str, Any]) -> None:
        try:
            if not isinstance(asked, dict):
                raise ProtocolError("resume must be a map")
            if asked.get("instance") != self.settings.instance:
                raise InstanceChanged("this daemon is another instance: what was attached is gone; attach again")
            session = arg.integer(asked, "session")
            token = asked.get("token")
            if not isinstance(token, bytes):
                raise ProtocolError("resume names no token")
            leases, hits = arg.integers(asked, "leases"), arg.integers(asked, "hits")
            retry = arg.optional_integer(asked, "retry")
            peer = self._peer(connection, self._check_pid(connection, pidfd), token)
            sessions.check_resume(self.state, session, peer)
            claims = away.read(asked.get("away"), self.state.sessions[session])
            life = self.lives[session]
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        older, life.connection, life.watch.connected = life.connection, connection, True
        connection.session = session
        if older is not None:
            older.end("a newer connection of the session came")
        if pidfd is not None and life.watch.pidfd is None:
            life.watch.pidfd = pidfd
            self._loop.add_reader(pidfd, self._process_ended, session)
        elif pidfd is not None:
            os.close(pidfd)
        log.info("event=resumed session=%d pid=%d", session, peer.pid)
        failpoints.reach("resume.before")
        lost = away.lost(self.state, self.state.sessions[session], claims)
        if lost:
            log.error("event=hits_lost session=%d hits=%s", session, lost)
        body |= {"session": session, "token": token, "arenas": [self.arena.size_bytes], "lost": lost}
        connection.send(body)
        failpoints.reach("resume.sent")
        self._apply(machine.Resume(session, leases, hits, retry, claims))

    @staticmethod
    def _peer(connection: Connection, pid: int, token: bytes) -> Peer:
        started = proof.start_time(pid) if pid else 0
        return Peer(pid, connection.uid, started, hashlib.sha256(token).digest())

    def _check_pid(self, connection: Connection, pidfd: int | None) -> int:
        if pidfd is None:
            return connection.pid
        pid = proof.pid_of_pidfd(pidfd)
        if pid and connection.pid and pid != connection.pid:
            raise ProtocolError(f"the pidfd passed is of process {pid}, the socket of process {connection.pid}")
        return connection.pid or pid

    def _ended(self, connection: Connection, reason: str) -> None:
        self.connections.discard(connection)
        session = connection.session
        life = self.lives.get(session) if session is not None else None
        if session is None or life is None or life.connection is not connection:
            return
        life.connection, life.watch.connected = None, False
        log.debug("event=disconnected session=%d reason=%r", session, reason)
        self._apply(machine.Disconnected(session))
        if session in self.lives:
            self._check(session)

    # -- the end of processes --------------------------------------------------------------------

    def _process_ended(self, session: int) -> None:
        life = self.lives.get(session)
        if life is None:
            return
        if life.watch.pidfd is not None:
            self._loop.remove_reader(life.watch.pidfd)
        life.ended_at = time.monotonic()
        if life.connection is not None:
            life.connection.drain_input()
        self._check(session)

    def _check(self, session: int) -> None:
        """Ask for the proof; while it is missing, say so and ask again."""
        life = self.lives.get(session)
        if life is None or (life.ended_at is None and (life.connection is not None or life.watch.may_copy)):
            return
        missing = life.watch.missing()
        if not missing:
            log.info("event=gone session=%d", session)
            self._apply(machine.Gone(session))
            return
        if life.ended_at is not None and time.monotonic() - life.ended_at >= _DOUBT_AFTER_S:
            self._start(self._doubt(session, life, missing))
        self._loop.call_later(life.delay_s, self._check, session)
        life.delay_s = min(life.delay_s * 2, _CHECK_LAST_S)

    async def _doubt(self, session: int, life: _Life, missing: tuple[str, ...]) -> None:
        holders = await asyncio.to_thread(life.watch.holders)
        if session in self.lives and (missing, holders) != life.said:
            life.said = (missing, holders)
            log.warning("event=doubt session=%d missing=%s holders=%s", session, ",".join(missing), holders)
            self._apply(machine.Died(session, missing, holders))

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, session: int) -> None:
        life = self.lives.pop(session, None)
        if life is None:
            return
        if life.watch.pidfd is not None:
            self._loop.remove_reader(life.watch.pidfd)
        failpoints.reach("forget.before")
        life.watch.close()
        failpoints.reach("forget.after")

    # -- status ----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the status map; its schema is told in ``sharedmirror.cli``."""
        arena, space = self.arena, self.state.space
        ready = arena.bytes_ready
        state = "stopping" if self._stopped.is_set() else "ready" if self.state.ready else "prefaulting"
        told = report.report(self.state, time.monotonic())
        _, records_name = lifecycle.segment_names(self.settings.instance)
        memory_alarms = alarms.of_memory(arena.name, arena.fd, records_name)
        said = {**self.alarms, **memory_alarms}.items()
        told["alarms"] = [{"code": code, "message": text} for code, text in said] + told["alarms"]
        return {
            "schema": 1,
            "daemon": {
                "version": __version__,
                "pid": os.getpid(),
                "instance": self.settings.instance.hex(),
                "epoch": self.settings.epoch,
                "uptime_s": time.monotonic() - self._started,
                "socket": self.settings.socket_path,
                "state": state,
                "pin": arena.pin,
                "pinned_bytes": arena.pinned_bytes,
                "huge_page_share": arena.huge_page_share(),
                "keep": self.settings.keep,
                "rss_bytes": _resident_bytes(self._statm),
            },
            "arena": {
                "bytes_total": arena.size_bytes,
                "bytes_ready": ready,
                "bytes_allocated": space.size_bytes - space.free_bytes,
                "bytes_free": space.free_bytes,
            },
            **told,
        }


def _resident_bytes(statm: int) -> int:
    """Resident memory of this process, the arena's pages (shared memory) not counted."""
    _size, resident, shared = os.pread(statm, 256, 0).split()[:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
