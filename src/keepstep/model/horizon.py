"""Horizon: the leader's word about which generation everybody may rely on. `core/resume/commit.py`
decides it."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.replicas import ReplicaDifference
from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class Horizon:
    """The leader's word. `alive`: stamps that may still be committed; `decided_step`: all ranks
    have decided up to there; `inherited`: what was committed in an older epoch and is still
    there; `period_steps`: multiples of it are captured (core/resume/cadence.py). `has_copies`: what
    is committed rests whole on other nodes, too. `agreed_steps`, `difference`: what replicas have
    shown (core/detection/replicas.py)."""

    epoch: int
    committed: Stamp | None = None
    target: Stamp | None = None
    alive: frozenset[Stamp] = frozenset()
    decided_step: int = -1
    inherited: Stamp | None = None
    period_steps: int = 1
    has_copies: bool = False
    agreed_steps: int = 0
    difference: ReplicaDifference | None = None

    @property
    def released(self) -> Stamp | None:
        """The newest stamp that no rank need keep itself: it was committed in this epoch, and other
        nodes have it whole. What was inherited they may have lost with their nodes."""
        return self.committed if self.has_copies else None

    @property
    def floor(self) -> Stamp | None:
        """The newest stamp that was ever committed: nobody overwrites it, what is older anybody
        may."""
        return self.committed or self.inherited

    def is_hopeless(self, stamp: Stamp) -> bool:
        """True when that stamp will never be committed. The floor never is."""
        return stamp.step <= self.decided_step and stamp not in self.alive and stamp != self.floor
