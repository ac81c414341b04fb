"""Capture stages: what one stage of a capture hands to the next.

Values only: what was begun, that there was no room, what is under way, how it went.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from keepstep.model.numbers import NotFinite
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp
from keepstep.ports import Gathered, StateCopy
from keepstep.runtime.rank.manifests import SlotManifest
from keepstep.runtime.rank.sharing import ShareOrder


@dataclass(frozen=True)
class NoRoom:
    """The state has grown beyond the slot. What the slot must hold instead."""

    payload_bytes: int
    manifest_bytes: int


class Sealed(NamedTuple):
    """How a capture went. `moved`: the tensors that changed under it; it is torn then. `bad`: those
    that are not finite; nobody is to resume from it."""

    moved: tuple[str, ...] = ()
    copy_ns: int = 0
    seal_ns: int = 0
    payload_bytes: int = 0
    loss: float = float("nan")
    share: Share | None = None
    lacking_bytes: int = 0
    digest: int = 0  # of what other ranks have, too
    bad: NotFinite = NotFinite()


@dataclass(frozen=True)
class BegunSnapshot:
    """A snapshot of which all has been copied that may move. `order`: how it is shared. `mark`: of
    the groups, at the boundary."""

    gathered: Gathered
    copy: StateCopy
    manifest: SlotManifest
    order: ShareOrder | None
    mark: object


@dataclass
class UnderWay:
    """A snapshot, from its boundary until it is sealed and the trainer has come by."""

    index: int
    stamp: Stamp
    copy: StateCopy
    is_sealed: bool = False
