"""Commit: which generation everybody may rely on, and which is to be protected next. Led by one
keeper of the round.

Comes in: each rank's facts and the last word its node has heard, as reported (they may be old).
Goes out: the leader's word, a `Horizon`, whenever it changes. Never looks anywhere itself; who
leads next needs nothing but new reports.

* A stamp that every rank has sealed becomes the *target*: only then does anybody copy it, so no
  byte is sent for a generation that can never be whole, and all nodes copy the same one. It stays
  the target, whoever leads, until it is committed.
* When every rank's target is protected, it is *committed*: the horizon. What is older may be
  overwritten, here and at the holders.
* A new epoch *inherits* the horizon of the one before, as far as it is still there: until something
  is committed in the new surroundings, that is what a lost node can be rebuilt from. Without it
  nobody would know which older generation may be overwritten, and holders that keep two of them
  would have no slot for a new one, for ever.
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

from keepstep.core.resume.cut import Holding, common
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Stamp


class RankFacts(NamedTuple):
    """One rank's snapshots: what it holds itself, and which of them all its holders have proven."""

    rank: int
    own: Holding
    protected: frozenset[Stamp] = frozenset()


def first_word(
    epoch: int, resumed: Stamp | None, last: Horizon, held: Collection[Stamp]
) -> Horizon:
    """What a node's page says when an epoch begins, from what it said last and the stamps all the
    node's ranks still hold."""
    floor = last.floor
    there = floor is not None and resumed is not None and floor <= resumed and floor in held
    return Horizon(epoch, inherited=floor if there else None)


def newer(known: Horizon, said: Horizon) -> Horizon:
    """The later of two words, whoever led when they were said; `said` when they are of one age."""
    return said if _age(said) >= _age(known) else known


def _age(word: Horizon) -> tuple[int, Stamp, Stamp, int]:
    never = Stamp(-1, 0)
    return word.epoch, word.floor or never, word.committed or never, word.decided_step


@dataclass
class Commit:
    """One epoch's."""

    world_size: int
    epoch: int
    facts: dict[int, RankFacts] = field(default_factory=dict)
    horizon: Horizon = field(init=False)
    said: Horizon | None = None
    # ranks that train together are much alike
    _kinds: Counter[tuple[Holding, frozenset[Stamp]]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.horizon = Horizon(self.epoch)

    def report(self, facts: Iterable[RankFacts], heard: Horizon) -> Horizon | None:
        """Take what a node reports of its ranks, and the last word on its page. Returns the word to
        say, if there is a new one.

        Nothing is said before all ranks were reported: then whatever anybody has acted upon is
        known here.
        """
        for fact in facts:
            self._take(fact)
        known = self.horizon
        if heard.epoch == self.epoch and _stamps(heard) != _stamps(known):
            self.horizon = replace(
                known,
                committed=_later(known.committed, heard.committed),
                target=_later(known.target, heard.target),
                inherited=_later(known.inherited, heard.inherited),
            )
        if len(self.facts) < self.world_size:
            return None
        self.horizon = self._decide()
        if self.said is not None and not self._says_more(self.said):
            return None
        self.said = self.horizon
        return self.horizon

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

    def _says_more(self, said: Horizon) -> bool:
        """Would anybody act otherwise? That a step was decided about is news only when it makes
        hopeless what somebody has."""
        now = self.horizon
        if _stamps(now) != _stamps(said):
            return True
        return any(
            now.is_hopeless(s) and not said.is_hopeless(s)
            for own, _ in self._kinds
            for s in own.sealed
        )

    def _decide(self) -> Horizon:
        protected = common([p for _, p in self._kinds])
        held = common([own.sealed for own, _ in self._kinds])
        committed = _later(self.horizon.committed, max(protected, default=None))
        floor = _later(self.horizon.inherited, committed)
        sealed = [s for s in held if (floor is None or s >= floor) and s not in protected]
        target = self.horizon.target
        # one at a time, to its end: a newer one in its place might never be finished either
        if target not in sealed:
            target = max(sealed, default=None)
        newest = max(held, default=None)
        oldest = _later(floor, _later(target, newest))
        pending = {own.pending for own, _ in self._kinds if own.pending is not None}
        candidates = {
            s
            for s in pending.union(*(own.sealed for own, _ in self._kinds))
            if oldest is None or s >= oldest or s == target
        }
        alive = frozenset(s for s in candidates if all(_may_have(own, s) for own, _ in self._kinds))
        return Horizon(
            self.epoch,
            committed,
            target,
            alive,
            min(own.decided_step for own, _ in self._kinds),
            self.horizon.inherited,
        )


def _stamps(word: Horizon) -> tuple[Stamp | None, ...]:
    return word.committed, word.target, word.inherited


def _later(one: Stamp | None, other: Stamp | None) -> Stamp | None:
    return max((s for s in (one, other) if s is not None), default=None)


def _may_have(own: Holding, stamp: Stamp) -> bool:
    return stamp in own.sealed or stamp == own.pending or own.decided_step < stamp.step
