"""Every error of sharedmirror.

::

    SharedMirrorError
    +-- UsageError (also a ValueError): the caller's mistake
    |   +-- LayoutError           planes that cannot be mirrored
    |   +-- PageError             a bad, negative or repeated page id
    |   +-- KeyInputError         a key that is empty, too long, repeated or missing
    |   +-- PoolMismatch          a pool that has other properties than the ones asked for
    |   +-- ShardMismatch         ranks that share a plane hold different bytes
    |   +-- RankError             a rank outside the world, or a world that cannot be
    |   +-- RankAttached          a living process already is this rank
    |   +-- WrongPoolKind         a raw copy in a leased pool, or a lease in a static one
    |   +-- StaleLease            a lease or hit that is over: committed, revoked or released
    |       +-- Cleared           a lease from before the pool was cleared
    |   +-- ClosedError           a call after close()
    |   +-- ForkedError           a call in a forked child
    +-- PeerError: the other side's fault
    |   +-- ProtocolError         bytes that are no protocol of ours
    |   +-- VersionMismatch       no protocol version in common
    |   +-- StaleRequest          a request id older than the last one answered
    |   +-- InstanceChanged       another daemon instance: what we held is gone
    +-- EnvironmentFault: the machine, or another process on it
        +-- DaemonUnavailable     no daemon, or none that answers (retryable)
        +-- CallTimeout           no answer or no completion in time (retryable)
        +-- NoPages               not enough free or evictable pages (retryable)
        +-- PoolNotFound          no such pool yet (retryable)
        +-- PoolInUse             processes still use a pool that was to be dropped
        +-- NotResumed            processes from before a restart may still be loading (retryable)
        +-- RanksMissing          ranks of the engine have not attached (retryable)
        +-- EngineBusy            a forerunner of this engine is not proven gone (retryable)
        +-- ArenaFull             the arena has not enough room
        +-- ArenaBusy             pools are giving back the room that is needed (retryable)
        +-- MemoryFault           memory could not be had, mapped or pinned
        +-- CopyError             the device reported an error during a copy
            +-- PartMissing       a rank did not bring its part of a load together
            +-- RanksDisagree     ranks that load together load different things

``code`` is stable and travels on the control channel; ``ids`` carries the ids concerned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ArenaBusy",
    "ArenaFull",
    "CallTimeout",
    "Cleared",
    "ClosedError",
    "CopyError",
    "DaemonUnavailable",
    "EngineBusy",
    "EnvironmentFault",
    "ForkedError",
    "InstanceChanged",
    "KeyInputError",
    "LayoutError",
    "MemoryFault",
    "NoPages",
    "NotResumed",
    "PageError",
    "PartMissing",
    "PeerError",
    "PoolInUse",
    "PoolMismatch",
    "PoolNotFound",
    "ProtocolError",
    "RankAttached",
    "RankError",
    "RanksDisagree",
    "RanksMissing",
    "ShardMismatch",
    "SharedMirrorError",
    "StaleLease",
    "StaleRequest",
    "UsageError",
    "VersionMismatch",
    "WrongPoolKind",
]


class SharedMirrorError(Exception):
    """Root of all errors; ``ids`` holds the ids concerned, such as ``page``, ``lease`` or ``pid``."""

    code = "internal"
    retryable = False

    def __init__(self, message: str, /, **ids: Any) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.ids))

    def to_wire(self) -> dict[str, Any]:
        """Return the error as it travels on the control channel."""
        return {"code": self.code, "message": self.message, "retryable": self.retryable, "ids": self.ids}


def _rebuild(kind: type[SharedMirrorError], message: str, ids: dict[str, Any]) -> SharedMirrorError:
    error = kind(message)
    error.ids = ids
    return error


class UsageError(SharedMirrorError, ValueError):
    """Raised when a call's arguments, or the moment of the call, cannot be right."""

    code = "usage"


class LayoutError(UsageError):
    """Raised when a pool's planes cannot be mirrored."""

    code = "layout"


class PageError(UsageError):
    """Raised when a page id is out of range, repeated, or not one that the caller may touch."""

    code = "bad_page"


class KeyInputError(UsageError):
    """Raised when a key is empty, too long, repeated in one call, or one too few or too many."""

    code = "bad_key"


class PoolMismatch(UsageError):
    """Raised when a pool exists with other properties; the message holds both values."""

    code = "pool_mismatch"


class ShardMismatch(UsageError):
    """Raised when ranks that share a plane committed different bytes; the page was not sealed."""

    code = "shard_mismatch"


class RankError(UsageError):
    """Raised when a rank does not fit its world size."""

    code = "bad_rank"


class RankAttached(UsageError):
    """Raised when a living process already is this rank of this engine."""

    code = "rank_attached"


class WrongPoolKind(UsageError):
    """Raised on a raw copy in a leased pool, or a lease in a static one."""

    code = "wrong_pool_kind"


class StaleLease(UsageError):
    """Raised when a lease or hit is over; nothing was changed."""

    code = "stale_lease"


class Cleared(StaleLease):
    """Raised when a lease was granted before its pool was cleared."""

    code = "cleared"


class ClosedError(UsageError):
    """Raised on use after close."""

    code = "closed"


class ForkedError(UsageError):
    """Raised when a forked child uses its parent's mirror or connection."""

    code = "forked"


class PeerError(SharedMirrorError):
    """Raised when the other side of the channel broke the protocol."""

    code = "peer"


class ProtocolError(PeerError):
    """Raised when bytes on the channel are not a frame of this protocol."""

    code = "protocol"


class VersionMismatch(PeerError):
    """Raised when client and daemon have no protocol version in common."""

    code = "version"


class StaleRequest(PeerError):
    """Raised when a request id is older than the last one answered."""

    code = "stale_request"


class InstanceChanged(PeerError):
    """Raised when the daemon is another instance; leases, hits and mappings of the old one are void."""

    code = "instance_changed"


class EnvironmentFault(SharedMirrorError):
    """Raised when the machine, or another process on it, is in the way."""

    code = "environment"


class DaemonUnavailable(EnvironmentFault):
    """Raised when no daemon answers on the socket."""

    code = "daemon_unavailable"
    retryable = True


class CallTimeout(EnvironmentFault):
    """Raised when an answer or a completion did not come in time."""

    code = "timeout"
    retryable = True


class NoPages(EnvironmentFault):
    """Raised when a pool has not enough free or evictable pages."""

    code = "no_pages"
    retryable = True


class PoolNotFound(EnvironmentFault):
    """Raised when no pool of that name is there or ready."""

    code = "pool_not_found"
    retryable = True


class PoolInUse(EnvironmentFault):
    """Raised when a pool was to be dropped that processes may still map; ``ids["pids"]`` names them."""

    code = "pool_in_use"


class NotResumed(EnvironmentFault):
    """Raised when pages would be freed that processes from before a restart may load; ``ids["pids"]`` names them."""

    code = "not_resumed"
    retryable = True


class RanksMissing(EnvironmentFault):
    """Raised when ranks of the engine have not attached in time; ``ids["ranks"]`` names them."""

    code = "ranks_missing"
    retryable = True


class EngineBusy(EnvironmentFault):
    """Raised when an engine's forerunner is not proven gone; ``ids["pids"]`` names who may hold it."""

    code = "engine_busy"
    retryable = True


class ArenaFull(EnvironmentFault):
    """Raised when the arena has not enough room; the message holds bytes asked and bytes free."""

    code = "arena_full"


class ArenaBusy(EnvironmentFault):
    """Raised when the room that is needed is still being given back; ``ids["pools"]`` names by which pools."""

    code = "arena_busy"
    retryable = True


class MemoryFault(EnvironmentFault):
    """Raised when memory could not be had, mapped, locked or registered."""

    code = "memory"


class CopyError(EnvironmentFault):
    """Raised when the device reported an error during a copy; nothing was committed."""

    code = "copy"
    settled = False
    """Whether the copies have ended, for all that they failed."""


class PartMissing(CopyError):
    """Raised when a rank did not bring its part of a load together; ``ids["ranks"]`` names it.

    The device pages of the load are undefined, and its copies are over. Load again.
    """

    code = "part_missing"
    settled = True


class RanksDisagree(CopyError):
    """Raised when ranks that load together load different things; ``ids["ranks"]`` names one that differs.

    The device pages of the load are undefined, and its copies are over.
    """

    code = "ranks_disagree"
    settled = True


def _tree(root: type[SharedMirrorError]) -> dict[str, type[SharedMirrorError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(SharedMirrorError)


def from_wire(body: Mapping[str, Any]) -> SharedMirrorError:
    """Return the error that a reply's ``error`` map describes; unknown codes give the root class."""
    ids = body.get("ids")
    kind = _BY_CODE.get(str(body.get("code")), SharedMirrorError)
    error = kind(str(body.get("message")))
    error.ids = {str(name): value for name, value in ids.items()} if isinstance(ids, dict) else {}
    if kind is SharedMirrorError:
        error.retryable = bool(body.get("retryable"))
    return error
