"""Horizon: the leader's word about which generation everybody may rely on. `core/resume/commit.py`
decides it."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class Horizon:
    """The leader's word. `alive`: stamps that may still be committed; `decided_step`: all ranks
    have decided up to there; `inherited`: what was committed in an older epoch and is still
    there; `period_steps`: multiples of it are captured (core/resume/cadence.py)."""

    epoch: int
    committed: Stamp | None = None
    target: Stamp | None = None
    alive: frozenset[Stamp] = frozenset()
    decided_step: int = -1
    inherited: Stamp | None = None
    period_steps: int = 1

    @property
    def floor(self) -> Stamp | None:
        """The newest stamp that was ever committed: nobody overwrites it, what is older anybody
        may."""
        return self.committed or self.inherited

    def is_hopeless(self, stamp: Stamp) -> bool:
        """True when that stamp will never be committed. The floor never is."""
        return stamp.step <= self.decided_step and stamp not in self.alive and stamp != self.floor
