"""Replicas: whether ranks that must hold the same still do, since when not, and who is wrong.

Comes in: what each rank's page tells: of each sealed snapshot one digest of all tensors that other
ranks have, too, and the group of ranks among which digests may be compared. Goes out: the first
stamp at which a group's digests differ, the ranks that have not what most have, and the tensors in
which they differ. Reads no byte of a state.

* **Nothing is assumed.** That tensors are replicated is a claim (DistributedDataParallel, a
  DTensor's `Replicate`), or not even that. Its digests are compared from the first on, but none is
  judged before the ranks have agreed once; where nobody claims it, before they have agreed at
  `OBSERVED_STEPS` stamps, each time on something new. A claim that was never true alarms nobody.
* **Only what all ranks hold is judged**: stamps that could become the cut. So all who look find the
  same, however old the pages are that they read: a slot is overwritten when its stamp is older than
  a horizon or will never be common, and a stamp at which replicas differ is neither.
* **Behind the first difference nothing counts** in that epoch, whether digests agree again or not:
  gradients have mixed what was wrong into everybody's state.
* **The majority is right**: of more than two ranks, what more than half of them hold. Of two nobody
  can say which one is wrong, and both are named.

Invariant: a digest tells of one stamp of one rank and never changes, so views of different ages may
be mixed. Silence is no agreement: a stamp that one of the group has no digest of is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from keepstep.model.replicas import NAMED, ReplicaDifference
from keepstep.model.snapshot import Stamp
from keepstep.model.units import counted

# The lowest bits of a digest are no part of it.
JUDGED = 1  # its rank has seen the group agree: a difference is a fault
CONDEMNS = 2  # and what differs is never to be resumed from
MARKS = JUDGED | CONDEMNS
# so many different states in a row are equal on all ranks only if they are made alike
OBSERVED_STEPS = 4
CLAIMED_STEPS = 1


class Digests(Protocol):
    """What a rank tells of its sealed snapshots, as far as it has digests of them; group 0 is
    none."""

    @property
    def group(self) -> int: ...

    @property
    def digests(self) -> tuple[tuple[Stamp, int], ...]: ...


def marked(found: int, is_judged: bool, condemns: bool) -> int:
    """A digest as pages tell it. Never 0: that is none."""
    marks = (JUDGED | (CONDEMNS if condemns else 0)) if is_judged else 0
    digest = (found & ~MARKS) | marks
    return digest or MARKS + 1


def first_difference(
    told: Collection[Digests], common: Iterable[Stamp], mark: int = JUDGED
) -> Stamp | None:
    """The first of the `common` stamps at which ranks of one group differ whose digests all have
    that mark. `told`: each thing that any rank tells, once is enough."""
    if _are_alike(told):
        return None
    for stamp in sorted(common):
        for digests in _by_group(told, stamp).values():
            if all(d & mark for d in digests) and len({d & ~MARKS for d in digests}) > 1:
                return stamp
    return None


def sound(told: Collection[Digests], common: frozenset[Stamp]) -> frozenset[Stamp]:
    """Of the stamps that all ranks hold, those that are not condemned: not the first at which
    replicas differ, nor what was computed from it."""
    wrong = first_difference(told, common, CONDEMNS)
    if wrong is None:
        return common
    return frozenset(s for s in common if s.epoch != wrong.epoch or s.step < wrong.step)


def blame(told: Mapping[int, Digests], stamp: Stamp) -> ReplicaDifference:
    """Who is wrong at that stamp, which `first_difference` has found: of the first group that
    differs there. `told`: by rank."""
    groups: dict[int, dict[int, int]] = {}
    for rank, one in sorted(told.items()):
        digest = dict(one.digests).get(stamp, 0)
        if one.group:
            groups.setdefault(one.group, {})[rank] = digest
    for digests in groups.values():
        counts = Counter(d & ~MARKS for d in digests.values())
        if len(counts) == 1 or not all(d & JUDGED for d in digests.values()):
            continue
        condemns = all(d & CONDEMNS for d in digests.values())
        most, count = counts.most_common(1)[0]
        is_certain = 2 * count > len(digests)
        wrong = [r for r, d in digests.items() if not is_certain or d & ~MARKS != most]
        return ReplicaDifference(stamp, tuple(wrong), len(digests), is_certain, condemns)
    raise AssertionError(f"no group differs at {stamp}")


def _are_alike(told: Collection[Digests]) -> bool:
    """Whether all tell the same, as they do nearly always."""
    return len({(one.group, one.digests) for one in told}) <= 1


def _by_group(told: Iterable[Digests], stamp: Stamp) -> dict[int, set[int]]:
    """What the ranks of each group tell of that stamp; 0 for one that tells nothing."""
    found: dict[int, set[int]] = {}
    for one in told:
        if one.group:
            found.setdefault(one.group, set()).add(dict(one.digests).get(stamp, 0))
    return found


@dataclass
class Agreement:
    """At how many stamps of this epoch the groups have agreed since they last differed, each time
    on something new."""

    epoch: int
    steps: int = 0
    _newest: tuple[Stamp, tuple[tuple[int, int], ...]] | None = None

    def saw(self, told: Collection[Digests], common: Iterable[Stamp]) -> int:
        """What ranks tell of what all of them hold; `steps` then."""
        stamp = max((s for s in common if s.epoch == self.epoch), default=None)
        if stamp is None or (self._newest is not None and self._newest[0] >= stamp):
            return self.steps
        found = _by_group(told, stamp)
        agreed = []
        for group, digests in sorted(found.items()):
            values = {d & ~MARKS for d in digests}
            if len(values) > 1:
                self.steps = 0  # what was equal before was so by chance, or by turns
                return 0
            if 0 in digests:
                return self.steps
            agreed.append((group, values.pop()))
        if agreed:
            is_new = self._newest is None or self._newest[1] != tuple(agreed)
            self._newest = stamp, tuple(agreed)
            self.steps += is_new
        return self.steps


class Agreed(NamedTuple):
    """What a rank makes of it. `steps`: see `Agreement`."""

    steps: int
    is_claimed: bool

    @property
    def is_shown(self) -> bool:
        """Whether the group has shown that its ranks hold the same."""
        return self.steps >= (CLAIMED_STEPS if self.is_claimed else OBSERVED_STEPS)


def differing(names: Sequence[str], mine: Sequence[int], theirs: Sequence[int]) -> list[str]:
    """The tensors whose checksums are not equal. Raises ValueError when those are not of the same
    tensors."""
    return [n for n, one, other in zip(names, mine, theirs, strict=True) if one != other]


def tensors_in_words(names: Sequence[str], total: int) -> str:
    """Which of so many tensors differ."""
    first = ", ".join(names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{first}{more} ({len(names)} of {counted(total, 'tensor')})"
