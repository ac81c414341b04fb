"""Cut: which step can everybody reach, and which will nobody ever.

Comes in: what every rank holds, as last seen (views may be old). Goes out: the newest stamp all
ranks hold, and whether a stamp is hopeless. Never looks anywhere itself.

Invariant (docs/protocol.md): pages only gain the newest stamps and lose a stamp only after a newer
one was held by all, so a cut computed from old views is a true cut, at worst an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keepstep.model.snapshot import RankStatus, SlotState, Stamp


class Holding(NamedTuple):
    """What one rank holds: sealed stamps, the one being written, and the newest step it has decided
    about."""

    sealed: frozenset[Stamp]
    pending: Stamp | None
    decided_step: int


def holding_of(status: RankStatus) -> Holding:
    """The holding a status page tells."""
    sealed = frozenset([v.stamp for v in status.slots if v.state is SlotState.SEALED])
    pending = [v.stamp for v in status.slots if v.state is SlotState.WRITING]
    return Holding(sealed, pending[0] if pending else None, status.decided_step)


def common(sealed: Sequence[Iterable[Stamp]]) -> frozenset[Stamp]:
    """The stamps that every rank holds; empty when there are no ranks."""
    sets = [frozenset(s) for s in sealed]
    return frozenset.intersection(*sets) if sets else frozenset()


def cut(holdings: Sequence[Holding], world_size: int) -> Stamp | None:
    """The newest stamp sealed on all `world_size` ranks; None when a rank is unseen or none is
    common."""
    if len(holdings) < world_size:
        return None
    return max(common([h.sealed for h in holdings]), default=None)


def hopeless(stamp: Stamp, holdings: Sequence[Holding]) -> bool:
    """True when some rank has decided about that step and neither holds nor writes it: it will
    never be common."""
    return any(
        h.decided_step >= stamp.step and stamp not in h.sealed and h.pending != stamp
        for h in holdings
    )
