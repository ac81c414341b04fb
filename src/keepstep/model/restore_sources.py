"""Restore sources: what nodes have proven that they hold, and from where a rank's snapshot is
fetched.

Values only, which cross between keepers. `core/resume/sources.py` decides about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from keepstep.model.bounds import Rank
from keepstep.model.shares import RankRun, Share, rank_runs
from keepstep.model.snapshot import Stamp


class HeldSnapshot(NamedTuple):
    """A whole snapshot that a node holds: of its own rank, or a copy of another node's."""

    rank: Rank
    stamp: Stamp


class HeldParity(NamedTuple):
    """A parity that a node holds: the one that `rank`, a member of `stripe_group`, keeps."""

    rank: Rank
    stamp: Stamp
    stripe_group: tuple[Rank, ...]
    tolerates: Rank


class HeldShare(NamedTuple):
    """What a snapshot that a node holds, or that one of its parities is of, tells of what its rank
    shares."""

    rank: Rank
    stamp: Stamp
    share: Share


@dataclass(frozen=True, slots=True)
class Inventory:
    """One node's proven contents."""

    snapshots: frozenset[HeldSnapshot] = frozenset()
    parities: frozenset[HeldParity] = frozenset()
    shares: frozenset[HeldShare] = frozenset()


class GroupMember(NamedTuple):
    """A member of a stripe group, and the node that has both its data and its parity."""

    rank: Rank
    node: Rank


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """Where a rank's snapshot comes from.

    `copies`: nodes with all of it. Without any, it is decoded from `members` of its `stripe_group`,
    enough of them.
    """

    rank: Rank
    copies: tuple[Rank, ...] = ()
    stripe_group: tuple[Rank, ...] = ()
    tolerates: Rank = 0
    members: tuple[GroupMember, ...] = ()


class SharedSources(NamedTuple):
    """Ranks that share one snapshot and live on several nodes: where the part of each of them comes
    from."""

    parts: tuple[RestoreSource, ...]

    @property
    def runs(self) -> tuple[RankRun, ...]:
        """Their ranks."""
        return rank_runs(part.rank for part in self.parts)
