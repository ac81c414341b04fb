"""Own pages: what the status pages of this node's ranks say, and what of it is reported.

Comes in: which pages are said to have changed, and what is protected. Goes out: the pages as last
looked at, and one line for all ranks that are alike, which those that train together nearly always
are. A page that nobody named is looked at by whoever asks for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from keepstep.core.resume.cut import holding_of
from keepstep.model.messages.peers import RanksReport
from keepstep.model.snapshot import RankStatus, SlotView, Stamp

# what a report tells of a rank: equal for ranks that are alike
_Facts = tuple[tuple[SlotView, ...], int, tuple[Stamp, ...] | None, int, int]


class OwnPages:
    """Of these ranks. `read`: what a rank's page says now."""

    def __init__(self, ranks: range, read: Callable[[int], RankStatus | None]) -> None:
        self._ranks = ranks
        self._read = read
        self._known: dict[int, RankStatus] = {}
        self._changed: set[int] = set()

    def changed(self, ranks: Iterable[int]) -> None:
        """Their pages tell more than was seen."""
        self._changed.update(ranks)

    def all(self) -> Mapping[int, RankStatus]:
        """As they are, as far as they can be read."""
        self._changed.update(self._ranks)
        return self.known()

    def known(self) -> Mapping[int, RankStatus]:
        """The same, with a look at those alone that have changed."""
        for rank in self._changed:
            status = self._read(rank) if rank in self._ranks else None
            if status is None:
                self._known.pop(rank, None)
            else:
                self._known[rank] = status
        self._changed.clear()
        return self._known


def reported(
    pages: Mapping[int, RankStatus], protected: Mapping[int, tuple[Stamp, ...]] | None
) -> tuple[RanksReport, ...]:
    """What a report says of these ranks. `protected`: what all holders of each have proven; None:
    what is sealed counts as that."""
    kinds: list[tuple[_Facts, RankStatus, list[int]]] = []
    for rank in sorted(pages):
        status = pages[rank]
        proven = None if protected is None else protected.get(rank, ())
        facts = (
            *(status.slots, status.decided_step, proven),
            *(status.replica_group, status.share_plan),
        )
        for known, _, ranks in kinds:
            if known == facts:
                ranks.append(rank)
                break
        else:
            kinds.append((facts, status, [rank]))
    return tuple([_row(ranks, status, facts[2]) for facts, status, ranks in kinds])


def _row(ranks: list[int], status: RankStatus, protected: tuple[Stamp, ...] | None) -> RanksReport:
    own = holding_of(status)
    sealed = tuple(sorted(own.sealed))
    return RanksReport(
        ranks=tuple(ranks),
        sealed=sealed,
        pending=own.pending,
        decided_step=own.decided_step,
        protected=sealed if protected is None else tuple(sorted(protected)),
        group=own.group,
        digests=own.digests,
        shares=own.shares,
        plan=own.plan,
    )
