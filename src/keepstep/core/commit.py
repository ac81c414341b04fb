"""Commit: which generation everybody may rely on, and which is to be protected next. Led by one keeper of the round.

Comes in: each rank's facts, as its keeper last reported them (they may be old). Goes out: the leader's word, a `Horizon`, whenever it
changes. Never looks anywhere itself; who leads next needs nothing but new reports.

* A stamp that every rank has sealed becomes the *target*: only then does anybody copy it, so no byte is sent for a generation
  that can never be whole, and all nodes copy the same one.
* When every rank's target is protected, it is *committed*: the horizon. What is older may be overwritten, here and at the holders.
* A stamp is hopeless when every rank has decided about its step and it is not `alive`: some rank neither has nor writes it, and never will.

Invariants (docs/protocol.md): the horizon never goes back within an epoch; a committed stamp was, at one moment, proven on every holder of
every rank; nobody gives it up before a newer one was. GEMINI (SOSP'23) leaves this protocol open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from keepstep.core.cut import Holding, common
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's snapshots: what it holds itself, and which of them all its holders have proven."""

    rank: int
    own: Holding
    protected: frozenset[Stamp] = frozenset()


@dataclass
class Commit:
    """One epoch's. `resumed`: what all ranks loaded from memory to begin it, None when they began from the store or afresh.

    Until something is committed, what an older epoch left may be the only state a lost node can be rebuilt from. So nothing is called
    hopeless before the resumed stamp is protected again (every rank has it, hence it will be).
    """

    world_size: int
    epoch: int
    resumed: Stamp | None
    facts: dict[int, RankFacts] = field(default_factory=dict)
    horizon: Horizon = field(init=False)

    def __post_init__(self) -> None:
        self.horizon = Horizon(self.epoch)

    def report(self, facts: Iterable[RankFacts]) -> Horizon | None:
        """Take what a node reports of its ranks. Returns the new word if it changed."""
        self.facts.update((f.rank, f) for f in facts)
        if len(self.facts) < self.world_size:
            return None
        before, self.horizon = self.horizon, self._decide()
        return self.horizon if self.horizon != before else None

    def _decide(self) -> Horizon:
        ranks = list(self.facts.values())
        committed, target = self.horizon.committed, self.horizon.target
        protected = common([f.protected for f in ranks])
        newest = max(protected, default=None)
        if newest is not None and (committed is None or newest > committed):
            committed = newest
        sealed = [s for s in common([f.own.sealed for f in ranks]) if (committed is None or s > committed) and s not in protected]
        if target not in sealed:  # one at a time, to its end: a newer one in its place might never be finished either
            target = max(sealed, default=None)
        candidates = {s for f in ranks for s in (f.own.sealed | ({f.own.pending} if f.own.pending else set()))}
        alive = frozenset(s for s in candidates if (committed is None or s > committed) and all(_may_have(f.own, s) for f in ranks))
        decided = min(f.own.decided_step for f in ranks)
        if committed is None and self.resumed is not None:
            decided = -1
        return Horizon(self.epoch, committed, target, alive, decided)


def _may_have(own: Holding, stamp: Stamp) -> bool:
    return stamp in own.sealed or stamp == own.pending or own.decided_step < stamp.step
