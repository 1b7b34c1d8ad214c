"""What clients did while no daemon lived: hits that they took from the index, and the fences that end them.

Nothing sealed is freed before every process from before a restart has spoken (``State.waited_for``). So
a scheduler's hits from the time without a daemon are as good as pins, until it resumes: then it names
those that it still holds, with pages and generations, and they become hits like any other.

Those that it does not name are over, but workers may still be loading under them, and so they may when
the scheduler never comes back. A fence asks each worker of the engine: it is a released hit without
pages, drained as any other, which stands for all such hits of a session below a number. While it
stands, nothing sealed in its pool is freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharedmirror.errors import ProtocolError
from sharedmirror.types import AWAY_NUMBERS, away_hit, split_away_hit
from sharedmirrord.core import arguments as arg
from sharedmirrord.core import hits
from sharedmirrord.core.durable import Put
from sharedmirrord.core.model import Effects, OpenHit, Session, State
from sharedmirrord.core.transitions import PageState

ALL = AWAY_NUMBERS - 1
"""The number of the fence that stands for all hits of a session."""


@dataclass(frozen=True)
class Claim:
    """A hit that a scheduler took without a daemon and still holds."""

    hit: int
    pages: list[int]
    generations: list[int]


@dataclass(frozen=True)
class Claims:
    """All that a scheduler still holds; its other hits with numbers below ``below`` are over."""

    below: int
    held: tuple[Claim, ...]


def read(value: Any, session: Session) -> Claims | None:
    """Return what a resuming session says of its time without a daemon; raises ProtocolError."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("hits"), list):
        raise ProtocolError("away must be a map with below and hits")
    below = arg.integer(value, "below", 0, ALL - 1)
    held = []
    for entry in value["hits"]:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ProtocolError("a hit from the time without a daemon is [hit, pages, generations]")
        named = dict(zip(("hit", "pages", "generations"), entry, strict=True))
        claim = Claim(arg.integer(named, "hit"), arg.integers(named, "pages"), arg.integers(named, "generations"))
        owner, number = split_away_hit(claim.hit)
        if owner != session.mark or not 0 < number < below:
            raise ProtocolError(f"hit {claim.hit} is none that session {session.id} may have taken without a daemon")
        if not claim.pages or not len(claim.pages) == len(set(claim.pages)) == len(claim.generations):
            raise ProtocolError(f"the pages and generations of hit {claim.hit} do not fit")
        held.append(claim)
    if len({claim.hit for claim in held}) != len(held):
        raise ProtocolError("a hit from the time without a daemon is named twice")
    return Claims(below, tuple(held))


def lost(state: State, session: Session, claims: Claims | None) -> list[int]:
    """Return the claimed hits that can not be kept; none, unless records were damaged."""
    return [] if claims is None else [claim.hit for claim in _new(session, claims) if not _whole(state, session, claim)]


def _new(session: Session, claims: Claims) -> list[Claim]:
    """Return the hits that no daemon was told of. Of the others, those that are not known any more were released."""
    return [claim for claim in claims.held if split_away_hit(claim.hit)[1] > session.away]


def _whole(state: State, session: Session, claim: Claim) -> bool:
    table = state.pools[session.pool].table if session.pool is not None else None
    if table is None or session.id not in state.survivors:
        return False  # it had a daemon to ask
    return all(
        0 < page < table.pages and table.states[page] == PageState.SEALED and table.generations[page] == generation
        for page, generation in zip(claim.pages, claim.generations, strict=True)
    )


def adopt(state: State, session: Session, claims: Claims, out: Effects) -> list[int]:
    """Make hits of what is claimed and not known yet; returns those that the session holds."""
    held = [claim.hit for claim in claims.held if claim.hit in state.hits]
    if session.pool is None or session.incarnation is None:
        return held
    table = state.pools[session.pool].table
    for claim in _new(session, claims):
        if table is not None and claim.hit not in state.hits and _whole(state, session, claim):
            held.append(claim.hit)
            hit = OpenHit(claim.hit, session.pool, session.incarnation, session.id, claim.pages)
            table.use(hit.pages)
            table.pin(hit.pages)
            state.hits[hit.id] = hit
            state.incarnations[session.incarnation].held += len(hit.pages)
            session.hits.add(hit.id)
            out.writes.append(Put("hit", hit.id, hit.record()))
    return held


def fence(state: State, session: Session, number: int, out: Effects) -> None:
    """Have every worker of the engine say that its loads under the session's other hits are over."""
    if session.pool is None or session.incarnation is None or not session.mark or number <= session.away:
        return
    session.away = number
    if number != ALL:  # its record goes at this very moment
        out.writes.append(Put("session", session.id, session.record()))
    hit = OpenHit(away_hit(session.mark, number), session.pool, session.incarnation, session.id, [], released=True)
    hit.awaited = {worker.id for worker in state.workers(session.incarnation) if worker.may_copy}
    if hit.awaited:
        state.hits[hit.id] = hit
        state.fences.add(hit.id)
        out.writes.append(Put("hit", hit.id, hit.record()))
        body = hits.released(state, [hit.id])
        out.pushes += [(worker, body) for worker in hit.awaited]
