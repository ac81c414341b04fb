"""Commit: which generation everybody may rely on, and which is to be protected next. Led by one
keeper of the mesh.

Comes in: each rank's facts and the last horizon its node has received, as reported (they may be
old). Goes out: the leader's horizon, whenever it changes. Never looks anywhere itself; who leads
next needs nothing but new reports.

* A stamp that every rank has sealed becomes the *target*: only then does anybody copy it, so no
  byte is sent for a generation that can never be whole, and all nodes copy the same one. It stays
  the target, whoever leads, until it is committed. The first of an epoch is what all went back to.
* When every rank's target is protected, it is *committed*: the horizon. What is older may be
  overwritten, here and at the holders.
* A new epoch *inherits* the horizon of the one before, as far as it is still there: until something
  is committed in the new surroundings, that is what a lost node can be rebuilt from. Without it
  nobody would know which older generation may be overwritten, and holders that keep two of them
  would have no slot for a new one, for ever.
* A stamp at which replicas differ, and what was computed from it, is never a target, so it is
  neither copied nor committed; it is overwritten (core/detection/replicas.py).
* A stamp at which ranks that share a snapshot differ is held by nobody, and never will be
  (core/resume/cut.py): it is no target either.
* Beside floor and target only the newest stamp that every rank has, and what may still become one,
  is `alive`: a killed process goes back to that, however long the target takes on a slow link. What
  is not alive is hopeless, once every rank has decided about its step.

Invariants (docs/protocol.md): the horizon never goes back within an epoch; a committed stamp was,
at one moment, proven on every holder of every rank; nobody gives it up before a newer one was.
GEMINI (SOSP'23) leaves this protocol open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from keepstep.core.detection.replicas import (
    OBSERVED_STEPS,
    Agreement,
    blame,
    first_difference,
)
from keepstep.core.resume.cut import Holding, agree, common
from keepstep.model.horizon import Horizon
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.snapshot import Stamp


class RankFacts(NamedTuple):
    """One rank's snapshots: what it holds itself, and which of them all its holders have proven."""

    rank: int
    own: Holding
    protected: frozenset[Stamp] = frozenset()


def first_horizon(
    epoch: int, resumed: Stamp | None, last: Horizon, held: Collection[Stamp]
) -> Horizon:
    """What a node's page shows when an epoch begins, from what it showed last and the stamps that
    all the node's ranks still hold."""
    floor = last.floor
    there = floor is not None and resumed is not None and floor <= resumed and floor in held
    return Horizon(epoch, inherited=floor if there else None)


def newer(known: Horizon, received: Horizon) -> Horizon:
    """The later of two horizons, whoever led when they were sent; `received` when they are of one
    age."""
    return received if _age(received) >= _age(known) else known


def _age(horizon: Horizon) -> tuple[int, Stamp, Stamp, int]:
    never = Stamp(-1, 0)
    return horizon.epoch, horizon.floor or never, horizon.committed or never, horizon.decided_step


@dataclass
class Commit:
    """One epoch's."""

    world_size: int
    epoch: int
    facts: dict[int, RankFacts] = field(default_factory=dict)
    horizon: Horizon = field(init=False)
    announced: Horizon | None = None  # the last that was returned
    _agreement: Agreement = field(init=False)
    _difference: ReplicaDifference | None = None  # the first of the epoch
    # ranks that train together are much alike
    _kinds: Counter[tuple[Holding, frozenset[Stamp]]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.horizon = Horizon(self.epoch)
        self._agreement = Agreement(self.epoch)

    def report(self, facts: Iterable[RankFacts], received: Horizon) -> Horizon | None:
        """Take what a node reports of its ranks, and the last horizon on its page. Returns the one
        to announce, if there is a new one.

        Nothing is announced before all ranks were reported: then whatever anybody has acted upon is
        known here.
        """
        for fact in facts:
            self._take(fact)
        known = self.horizon
        if received.epoch == self.epoch and _stamps(received) != _stamps(known):
            self.horizon = replace(
                known,
                committed=_later(known.committed, received.committed),
                target=_later(known.target, received.target),
                inherited=_later(known.inherited, received.inherited),
            )
        if len(self.facts) < self.world_size:
            return None
        self.horizon = self._decide()
        if self.announced is not None and not self._tells_more(self.announced):
            return None
        self.announced = self.horizon
        return self.horizon

    def forget_protected(self) -> None:
        """Another policy holds: what the holders under the one before have proven counts no more.
        What is committed stays so."""
        for fact in [*self.facts.values()]:
            self._take(fact._replace(protected=frozenset()))

    def _take(self, fact: RankFacts) -> None:
        old = self.facts.get(fact.rank)
        if old == fact:
            return
        if old is not None:
            kind = old.own, old.protected
            self._kinds[kind] -= 1
            if not self._kinds[kind]:
                del self._kinds[kind]
        self.facts[fact.rank] = fact
        self._kinds[fact.own, fact.protected] += 1

    def _tells_more(self, announced: Horizon) -> bool:
        """Would anybody act otherwise? That a step was decided about is news only when it makes
        hopeless what somebody has."""
        now = self.horizon
        if _stamps(now) != _stamps(announced):
            return True
        if (now.agreed_steps, now.difference) != (announced.agreed_steps, announced.difference):
            return True
        return any(
            now.is_hopeless(s) and not announced.is_hopeless(s)
            for own, _ in self._kinds
            for s in own.sealed
        )

    def _decide(self) -> Horizon:
        everywhere = common([own.sealed for own, _ in self._kinds])
        held = self._shared_alike(everywhere)
        apart = everywhere - held  # what some rank lacks of these is with nobody
        self._compare(held)
        protected = self._sound(common([p for _, p in self._kinds]) - apart)
        held = self._sound(held)
        committed = _later(self.horizon.committed, max(protected, default=None))
        floor = _later(self.horizon.inherited, committed)
        sealed = [s for s in held if (floor is None or s >= floor) and s not in protected]
        target = self.horizon.target
        # one at a time, to its end: a newer one in its place might never be finished either
        if target not in sealed:
            target = _next_target(self.epoch, committed, sealed)
        newest = max(held, default=None)
        oldest = _later(floor, _later(target, newest))
        pending = {own.pending for own, _ in self._kinds if own.pending is not None}
        known = frozenset(pending.union(*(own.sealed for own, _ in self._kinds))) - apart
        candidates = [s for s in self._sound(known) if oldest is None or s >= oldest or s == target]
        alive = frozenset(s for s in candidates if all(_may_have(own, s) for own, _ in self._kinds))
        return Horizon(
            self.epoch,
            committed,
            target,
            alive,
            min(own.decided_step for own, _ in self._kinds),
            self.horizon.inherited,
            agreed_steps=min(self._agreement.steps, OBSERVED_STEPS),
            difference=self._difference,
        )

    def held(self) -> frozenset[Stamp]:
        """The stamps that all ranks hold, as last reported."""
        return self._shared_alike(common([own.sealed for own, _ in self._kinds]))

    def _shared_alike(self, everywhere: frozenset[Stamp]) -> frozenset[Stamp]:
        """Those of which nobody lacks what no other has."""
        sharing = [
            own for (own, _), count in self._kinds.items() if own.shares for _ in range(count)
        ]
        return frozenset(stamp for stamp in everywhere if agree(stamp, sharing))

    def _compare(self, held: frozenset[Stamp]) -> None:
        """What replicas tell of the stamps that all ranks hold."""
        told = [own for own, _ in self._kinds]
        if self._difference is None:
            stamp = first_difference(told, held)
            if stamp is not None:
                self._difference = blame({r: f.own for r, f in self.facts.items()}, stamp)
        if self._difference is None:
            self._agreement.saw(told, held)

    def _sound(self, stamps: frozenset[Stamp]) -> frozenset[Stamp]:
        wrong = self._difference
        return (
            stamps if wrong is None else frozenset(s for s in stamps if not wrong.is_condemned(s))
        )


def _next_target(epoch: int, committed: Stamp | None, sealed: Collection[Stamp]) -> Stamp | None:
    """The newest. Until something is committed in this epoch, what all went back to goes first: it
    may have been committed, and its leader lost before anybody heard of it."""
    resumed = [] if committed is not None else [s for s in sealed if s.epoch < epoch]
    return max(resumed or sealed, default=None)


def _stamps(horizon: Horizon) -> tuple[Stamp | None, ...]:
    return horizon.committed, horizon.target, horizon.inherited


def _later(one: Stamp | None, other: Stamp | None) -> Stamp | None:
    return max((s for s in (one, other) if s is not None), default=None)


def _may_have(own: Holding, stamp: Stamp) -> bool:
    return stamp in own.sealed or stamp == own.pending or own.decided_step < stamp.step
