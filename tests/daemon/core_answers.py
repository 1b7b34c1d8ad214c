"""Judges the core's answers by the reference model: which are right, and what the model learns of them.

``Judge.answered`` must see the answers in the order in which the core gave them: that is the order in
which the things happened.
"""

from __future__ import annotations

from typing import Any

from tests.daemon.core_model import Model, ModelHit, ModelLease, ModelPool, ModelSession

Arguments = dict[str, Any]
Body = dict[str, Any]

STALE = {"stale_lease", "cleared"}


class Judge:
    """Holds the questions that are open and checks each answer against the model."""

    def __init__(self) -> None:
        self.model = Model()
        self.questions: dict[tuple[int, int], tuple[str, Arguments]] = {}

    def asked(self, session: int, request: int, op: str, arguments: Arguments) -> None:
        self.questions[session, request] = op, arguments

    def answered(self, number: int, body: Body) -> None:
        """Check one answer of a question other than ``attach``."""
        op, arguments = self.questions.pop((number, body["id"]))
        session = self.model.sessions[number]
        pool = self.model.pools[session.pool]
        expected = self._refusal(op, session, pool, arguments)
        got = body["error"]["code"] if "error" in body else ""
        if expected is None:
            assert not got, f"{self._number(op)}: {op} {arguments} was refused with {body}"
            getattr(self, "_" + op)(session, pool, arguments, body)
        else:
            assert got in expected, f"{self._number(op)}: {op} {arguments} should give {expected}, not {body}"

    @staticmethod
    def _number(op: str) -> str:
        return "invariant 9" if op in ("commit", "seal", "abort", "release") else "model"

    # -- what must be refused --------------------------------------------------------------------

    def _refusal(self, op: str, session: ModelSession, pool: ModelPool, arguments: Arguments) -> set[str] | None:
        if op in ("lease", "reserve"):
            return self._refused_grant(op, session, pool, arguments)
        if op in ("commit", "seal", "abort"):
            return self._refused_lease(op, session, arguments)
        if op == "release":
            hits = [self.model.hits[n] for n in arguments["hits"] if n in self.model.hits]
            return STALE if any(hit.incarnation != session.incarnation for hit in hits) else None
        return None

    def _wanted(self, pool: ModelPool, arguments: Arguments) -> list[bytes]:
        pending = self.model.pending(pool)
        return [key for key in arguments["keys"] if key not in pool.binding and key not in pending]

    def _known(self, pool: ModelPool, arguments: Arguments) -> set[int]:
        return {pool.binding[key] for key in [*arguments["keys"], arguments["parent"]] if key in pool.binding}

    def _refused_grant(self, op: str, session: ModelSession, pool: ModelPool, arguments: Arguments) -> set[str] | None:
        protected: set[int] = set()
        if op == "lease":
            wanted = arguments["n"]
        else:
            wanted = len(self._wanted(pool, arguments))
            protected = self._known(pool, arguments)
            if not wanted:
                return None
        if not 0 < wanted < len(pool.pages):
            return {"usage"}
        if self.model.writers(session, pool) is None:
            return {"ranks_missing"}
        victims = self.model.victims(pool, session.engine, wanted, protected)
        return {"no_pages"} if victims is None or self.model.room(session) < wanted else None

    def _refused_lease(self, op: str, session: ModelSession, arguments: Arguments) -> set[str] | None:
        lease = self.model.leases.get(arguments["lease"])
        pages = arguments["pages"]
        if lease is None or lease.incarnation != session.incarnation:
            return STALE
        if any(page not in lease.pages for page in pages or ()):
            return {"bad_page"} | STALE
        if op == "abort":
            return None
        if op == "commit" and (session.rank is None or lease.writers.get(session.rank) != session.id):
            return STALE
        named = lease.pages if op == "seal" and pages is None else pages
        if op == "seal" and len(arguments["keys"]) != len(named):
            return {"bad_key"}
        if named is not None and not named:
            return {"bad_page"} | STALE
        usable = self.model.usable(lease, named)
        if lease.number != lease.pool.number or not usable or (named is not None and usable != set(named)):
            return STALE
        return STALE if op == "seal" and usable & lease.keys.keys() else None

    # -- what the answers say --------------------------------------------------------------------

    def _lease(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        assert len(body["pages"]) == len(set(body["pages"])) == arguments["n"], "leases are all or nothing"
        self.model.grant(session, body, [], [])

    def _reserve(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        keys = arguments["keys"]
        wanted, pending = self._wanted(pool, arguments), self.model.pending(pool)
        parents = dict(zip(keys, [arguments["parent"], *keys], strict=False))
        known = self._known(pool, arguments)
        before = {page: pool.pages[page].generation for page in known}
        assert body["present"] == [key for key in keys if key in pool.binding]
        assert body["pending"] == [key for key in keys if key in pending and key not in pool.binding]
        assert body["keys"] == wanted
        if wanted:
            protected = [key for key in [*keys, arguments["parent"]] if key in pool.binding]
            self.model.grant(session, body, wanted, [parents[key] for key in wanted], protected)
        pool.use(known)
        assert before == {page: pool.pages[page].generation for page in known}, "a key of the call was evicted for it"

    def _commit(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        lease = self.model.leases[arguments["lease"]]
        assert session.rank is not None
        usable = self.model.usable(lease, arguments["pages"])
        lease.committed[session.rank] |= usable
        self._settled(lease, usable, body)

    def _seal(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        lease = self.model.leases[arguments["lease"]]
        pages = lease.pages if arguments["pages"] is None else arguments["pages"]
        parent = arguments["parent"]
        for page, key in zip(pages, arguments["keys"], strict=True):
            lease.keys[page], lease.parents[page] = key, parent
            parent = key
        self._settled(lease, set(pages), body)

    def _settled(self, lease: ModelLease, named: set[int], body: Body) -> None:
        sealed, duplicates = self.model.settle(lease)
        pending = {p for p in named if p in lease.open and p in lease.keys and p not in lease.revoked}
        assert sorted(body["sealed"]) == sorted(sealed), f"invariant 5: sealed {body['sealed']} instead of {sealed}"
        assert sorted(body["duplicates"]) == sorted(duplicates), "invariant 5: other duplicates"
        assert set(body["pending"]) == pending

    def _abort(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        lease = self.model.leases[arguments["lease"]]
        self.model.revoke(lease, lease.open if arguments["pages"] is None else arguments["pages"])

    def _drained(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        """Counted when it was asked: it is evidence also if the answer comes late."""

    def _detach(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        self.model.ended(session.id, "detached")

    def _unmapped(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        assert session.life == "detached"

    def _lookup(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        keys, binding, pending = arguments["keys"], pool.binding, self.model.pending(pool)
        for key, page in zip(keys, body["pages"], strict=False):
            if page >= 0:
                where = pool.pages[page]
                assert binding.get(key) == page, f"invariant 5: {key!r} was found in page {page}"
                assert where.state == "sealed" and where.key == key, f"invariant 5: page {page} is {where.state}"
        letters = "".join("h" if key in binding else "p" if key in pending else "m" for key in keys)
        pages = [binding.get(key, -1) for key in keys]
        if arguments["mode"] == "prefix":
            length = next((at for at, key in enumerate(keys) if key not in binding), len(keys))
            pages = pages[:length]
            letters = "h" * length + "".join("p" if key in pending else "m" for key in keys[length:])
        pages, letters = self._held_back(session, arguments["mode"], pages, letters)
        assert body["pages"] == pages, f"invariant 5: {body['pages']} instead of {pages}"
        assert body["states"] == letters
        found = {page: pool.pages[page].generation for page in pages if page >= 0}
        assert bool(body["hit"]) == bool(found)
        if found:
            pool.use(found)
            self.model.hits[body["hit"]] = ModelHit(body["hit"], pool, session.incarnation, session.id, found)

    def _held_back(self, session: ModelSession, mode: str, pages: list[int], letters: str) -> tuple[list[int], str]:
        """What is left of an answer to a lookup when the engine may not hold all of it."""
        room = max(0, self.model.room(session))
        there = [at for at, page in enumerate(pages) if page >= 0]
        if len(there) <= room:
            return pages, letters
        if mode == "prefix":
            return pages[:room], "h" * room + "m" * (len(letters) - room)
        late = set(there[room:])
        return (
            [-1 if at in late else page for at, page in enumerate(pages)],
            "".join("m" if at in late else letter for at, letter in enumerate(letters)),
        )

    def _contains(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        pending = self.model.pending(pool)
        letters = ["h" if key in pool.binding else "p" if key in pending else "m" for key in arguments["keys"]]
        assert body["states"] == "".join(letters)

    def _touch(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        found = [pool.binding[key] for key in arguments["keys"] if key in pool.binding]
        assert body["touched"] == len(found)
        pool.use(found)

    def _release(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        for number in arguments["hits"]:
            if number in self.model.hits:
                self.model.let_go(self.model.hits[number])

    def _evict(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        evicted, pinned = self.model.evict(pool, arguments["keys"])
        assert body["evicted"] == evicted
        assert body["pinned"] == pinned, f"invariant 6: pinned are {pinned}, not {body['pinned']}"

    def _clear(self, session: ModelSession, pool: ModelPool, arguments: Arguments, body: Body) -> None:
        assert body["freed"] == self.model.clear(pool)
