"""What the core asks to be made durable, as plain values.

An operation yields a list of writes. The record store commits the list as a whole, before the reply
of the operation is sent. A page that is leased needs no slot of its own: the lease's record names
page and generation, and counts for more than an older slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

NO_PAGE = 0xFFFFFFFF
"""Stands for "no parent" in a slot."""


class Slot(NamedTuple):
    """The durable words of one page; ``number`` is the pool's clear number when it was sealed."""

    page: int
    state: int
    generation: int
    number: int
    key: bytes
    parent: int
    parent_generation: int


@dataclass(frozen=True, slots=True)
class Put:
    """Keep ``value`` (msgpack types only) as the record ``kind``, ``id``; replaces an older one."""

    kind: str
    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget the record ``kind``, ``id``; it need not exist."""

    kind: str
    id: int


@dataclass(frozen=True, slots=True)
class SetSlots:
    """Overwrite slots of one pool's page table."""

    pool: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class CreateTable:
    """Make room for the page table of a new pool; its slots start as free with generation 0."""

    pool: int
    pages: int


@dataclass(frozen=True, slots=True)
class DropTable:
    """Give back the room of a pool's page table."""

    pool: int


Write: TypeAlias = Put | Delete | SetSlots | CreateTable | DropTable
