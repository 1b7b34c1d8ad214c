"""Every error: listed, documented, with a code of its own, and the same on the other side."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import msgpack
import pytest

from sharedmirror import errors
from sharedmirror.errors import SharedMirrorError


def tree(root: type[SharedMirrorError]) -> list[type[SharedMirrorError]]:
    below = (kind for child in root.__subclasses__() for kind in tree(child))
    return [root, *(kind for kind in below if kind.__module__ == root.__module__)]


KINDS = tree(SharedMirrorError)
BRANCHES = (errors.UsageError, errors.PeerError, errors.EnvironmentFault)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_all_is_complete_and_sorted() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    assert set(errors.__all__) == {kind.__name__ for kind in KINDS}


def test_codes_are_unique_stable_words() -> None:
    codes = [kind.code for kind in KINDS]
    assert sorted(set(codes)) == sorted(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)
    assert all("code" in vars(kind) for kind in KINDS)


def test_the_module_shows_the_tree() -> None:
    drawn = re.findall(r"^(?: {4}\|?[ |]*\+-- | {4})([A-Z]\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    assert sorted(drawn) == errors.__all__


@each_kind
def test_the_docstring_says_when(kind: type[SharedMirrorError]) -> None:
    text = inspect.getdoc(kind) or ""
    assert text.startswith(("Raised when ", "Raised on ")) or kind is SharedMirrorError
    assert text.endswith(".")


@each_kind
def test_each_belongs_to_one_branch(kind: type[SharedMirrorError]) -> None:
    assert sum(issubclass(kind, branch) for branch in BRANCHES) == (kind is not SharedMirrorError)


@each_kind
def test_the_wire_and_pickle_keep_type_message_and_ids(kind: type[SharedMirrorError]) -> None:
    error = kind("page 7 is over", page=7, ranks=[0, 1], pool="p")
    travelled = errors.from_wire(msgpack.unpackb(msgpack.packb(error.to_wire())))
    for other in (travelled, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind
        assert (other.message, str(other), other.ids) == ("page 7 is over", "page 7 is over", error.ids)
        assert (other.code, other.retryable) == (kind.code, kind.retryable)


def test_a_callers_mistake_is_a_value_error_and_never_retryable() -> None:
    for kind in tree(errors.UsageError):
        assert issubclass(kind, ValueError) and not kind.retryable


@pytest.mark.parametrize("retryable", [True, False])
def test_an_unknown_code_gives_the_root_with_its_flag(retryable: bool) -> None:
    error = errors.from_wire({"code": "of_tomorrow", "message": "m", "retryable": retryable, "ids": {"a": 1}})
    assert type(error) is SharedMirrorError
    assert (error.message, error.retryable, error.ids) == ("m", retryable, {"a": 1})


@pytest.mark.parametrize("body", [{}, {"code": 3}, {"code": None, "ids": [1]}, {"code": "usage", "ids": None}])
def test_a_garbled_error_is_still_an_error(body: dict[str, object]) -> None:
    assert isinstance(errors.from_wire(body), SharedMirrorError)


def test_ids_with_any_name_survive() -> None:
    """A daemon of another release may send ids whose names are parameters of ours, or no identifiers."""
    for name in ("message", "self", "kind", "not an identifier"):
        error = errors.from_wire({"code": "usage", "message": "m", "ids": {name: 1}})
        assert (error.message, error.ids) == ("m", {name: 1})
        assert pickle.loads(pickle.dumps(error)).ids == {name: 1}
