"""Share classes: which ranks of a job, on whichever nodes, are replicas that keep one snapshot.
Decided by the keeper that leads.

    a rank without a plan tells a digest of all it might share -> ranks that tell the same of a step
    that all hold: a class -> each makes the plan of it, and shows its number -> all show the same:
    from then on each keeps its share -> one shows another, or they differ at a step: it is over ->
    nobody shows its number any more: it is forgotten

Comes in: what every rank holds and tells, as reported. Goes out: the classes that there are. Over
nodes nobody sees others' tables, so that replicas are ranks that are equal in all that may be
shared, and never some tensors of theirs (`shares.py` does that on one node). REFT's sharding groups
(arXiv 2310.12670), found and not configured.

Invariant: no rank's safety rests on this. A class that is wrong, late or forgotten costs snapshots
that count for nobody (`core/resume/cut.py`, `agree`), since every digest that is told under a plan
has that plan's number in it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.core.resume.cut import Holding, agree, common
from keepstep.model.shares import CANDIDATE, MOST_RUNS, ShareClass, members_of, rank_runs
from keepstep.model.snapshot import Stamp

ADOPTED_WITHIN_STEPS = 16  # of the newest of its members, else the class is given up
BEFORE_ALL = Stamp(-1, 0)


@dataclass
class ShareClasses:
    """One epoch's. `classes`: None as long as not all ranks have told what they go by: another
    leader may have made some before, or all have found theirs in what they resumed from."""

    world_size: int
    classes: tuple[ShareClass, ...] | None = None
    _first_steps: dict[int, int] = field(default_factory=dict)  # by rank: as it was first seen
    # by members: the stamp that all held when they were made one class
    _since: dict[tuple[int, ...], Stamp] = field(default_factory=dict)

    def look(self, holdings: Mapping[int, Holding]) -> bool:
        """At what every rank tells now, by rank. Whether the classes are others than before."""
        if len(holdings) < self.world_size:
            return False
        if self.classes is None:
            for rank, held in holdings.items():
                self._first_steps.setdefault(rank, held.decided_step)
            # what a rank goes by is on its page for sure when it has passed a boundary
            if any(h.decided_step <= self._first_steps[r] for r, h in holdings.items()):
                return False
        before = self.classes
        known = self._shown(holdings) if before is None else before
        nexts = (self._next(each, holdings) for each in known)
        kept = [each for each in nexts if each is not None]
        taken = {rank for each in kept for rank in each.members}
        kept += self._found({r: h for r, h in holdings.items() if r not in taken})
        self._since = {each.members: self._since.get(each.members, BEFORE_ALL) for each in kept}
        self.classes = tuple(sorted(kept))
        return self.classes != before

    def _shown(self, holdings: Mapping[int, Holding]) -> list[ShareClass]:
        """By the numbers that ranks show."""
        by_number: dict[int, list[int]] = {}
        for rank, held in holdings.items():
            if held.plan:
                by_number.setdefault(held.plan, []).append(rank)
        return [
            ShareClass(rank_runs(ranks), 0, number)
            for number, ranks in by_number.items()
            if len(ranks) > 1 and len(rank_runs(ranks)) <= MOST_RUNS
        ]

    def _next(self, known: ShareClass, holdings: Mapping[int, Holding]) -> ShareClass | None:
        """What has become of it; None: nobody goes by it any more."""
        members = [holdings[rank] for rank in known.members]
        plans = {held.plan for held in members}
        since = self._since.get(known.members, BEFORE_ALL)
        if known.is_over:
            is_followed = known.number in plans if known.number else plans != {0}
            return known if is_followed else None
        if known.number:
            is_followed = plans == {known.number} and not differing(members, since)
            return known if is_followed else known._replace(is_over=True)
        if len(plans) == 1 and 0 not in plans:
            return known._replace(number=plans.pop())
        newest = max(held.decided_step for held in members)
        is_late = newest > since.step + ADOPTED_WITHIN_STEPS
        return known._replace(is_over=True) if is_late or len(plans - {0}) > 1 else known

    def _found(self, holdings: Mapping[int, Holding]) -> list[ShareClass]:
        """Among ranks that are of no class."""
        stamp = max(common([held.sealed for held in holdings.values()]), default=None)
        if stamp is None:
            return []
        alike: dict[int, list[int]] = {}
        for rank, held in holdings.items():
            told = dict(held.shares).get(stamp)
            if told is not None and told.ranks == CANDIDATE and not held.plan:
                alike.setdefault(told.digest, []).append(rank)
        found = []
        for digest, ranks in alike.items():
            runs = rank_runs(ranks)
            if len(ranks) > 1 and len(runs) <= MOST_RUNS:
                found.append(ShareClass(runs, digest))
                self._since[members_of(runs)] = stamp
        return found


def differing(members: Sequence[Holding], since: Stamp) -> list[Stamp]:
    """Stamps that all members have sealed after that one, and of which what some lack is with
    nobody."""
    everywhere = common([held.sealed for held in members])
    return sorted(s for s in everywhere if s > since and not agree(s, members))


def class_of(rank: int, classes: Iterable[ShareClass]) -> ShareClass | None:
    """The one that it is a member of."""
    return next((each for each in classes if rank in each.members), None)
