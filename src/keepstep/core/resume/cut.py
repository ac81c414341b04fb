"""Cut: which step can everybody reach, and which will nobody ever.

Comes in: what every rank holds, as last seen (views may be old). Goes out: the newest stamp all
ranks hold, and whether a stamp is hopeless. A stamp at which replicas differ, and what was computed
from it, is nobody's cut (core/detection/replicas.py). Never looks anywhere itself.

What a rank shares with others (model/shares.py) it holds when they have sealed the same bytes: a
stamp at which replicas differ is held by nobody, and never will be, for what is sealed stays as it
is.

Invariant (docs/protocol.md): pages only gain the newest stamps and lose a stamp only after a newer
one was held by all, so a cut computed from old views is a true cut, at worst an older one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keepstep.core.detection.replicas import sound
from keepstep.model.shares import Share
from keepstep.model.snapshot import RankStatus, SlotState, Stamp


class Holding(NamedTuple):
    """What one rank holds: sealed stamps, the one being written, the newest step it has decided
    about, and what of those stamps it shares. `digests`: of the sealed stamps that have one, in
    their order; they may be compared with those of the same `group`. `plan`: the number of that by
    which it shares, 0 without one."""

    sealed: frozenset[Stamp]
    pending: Stamp | None
    decided_step: int
    group: int = 0
    digests: tuple[tuple[Stamp, int], ...] = ()
    shares: tuple[tuple[Stamp, Share], ...] = ()
    plan: int = 0


def holding_of(status: RankStatus) -> Holding:
    """The holding a status page tells."""
    sealed = frozenset([v.stamp for v in status.slots if v.state is SlotState.SEALED])
    pending = [v.stamp for v in status.slots if v.state is SlotState.WRITING]
    shares = tuple(
        [
            (view.stamp, view.share)
            for view in status.slots
            if view.share is not None and view.state is SlotState.SEALED
        ]
    )
    digests: tuple[tuple[Stamp, int], ...] = ()
    if status.replica_group:
        slots = status.slots
        told = [(v.stamp, v.digest) for v in slots if v.digest and v.state is SlotState.SEALED]
        digests = tuple(sorted(told))
    holds = (sealed, pending[0] if pending else None, status.decided_step)
    return Holding(*holds, status.replica_group, digests, shares, status.share_plan)


def common(sealed: Sequence[Iterable[Stamp]]) -> frozenset[Stamp]:
    """The stamps that every rank holds; empty when there are no ranks."""
    sets = [frozenset(s) for s in sealed]
    return frozenset.intersection(*sets) if sets else frozenset()


def agree(stamp: Stamp, holdings: Iterable[Holding]) -> bool:
    """Whether what each of them does not keep itself of `stamp` is kept by the others."""
    return is_complete(
        [share for holding in holdings for at, share in holding.shares if at == stamp]
    )


def is_complete(told: Sequence[Share]) -> bool:
    """The same, by what each of them tells of that stamp."""
    counts = Counter(share.digest for share in told)
    return all(counts[share.digest] >= share.ranks for share in told)


def cut(holdings: Sequence[Holding], world_size: int) -> Stamp | None:
    """The newest stamp sealed on all `world_size` ranks at which no replicas differ; None when a
    rank is unseen or there is none."""
    if len(holdings) < world_size:
        return None
    held = sound(holdings, common([h.sealed for h in holdings]))
    return max([stamp for stamp in held if agree(stamp, holdings)], default=None)


def hopeless(stamp: Stamp, holdings: Sequence[Holding], world_size: int) -> bool:
    """True when the stamp will never be common: some rank has decided about that step and neither
    holds nor writes it, or all of them have sealed it and replicas differ."""
    if any(
        h.decided_step >= stamp.step and stamp not in h.sealed and h.pending != stamp
        for h in holdings
    ):
        return True
    is_everywhere = len(holdings) == world_size and all(stamp in h.sealed for h in holdings)
    return is_everywhere and not agree(stamp, holdings)
