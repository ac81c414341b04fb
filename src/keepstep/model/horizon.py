"""Horizon: the leader's word about which generation everybody may rely on. `core/commit.py` decides it."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class Horizon:
    """The leader's word. `alive`: stamps that every rank has or may still get; `decided_step`: all have decided up to there."""

    epoch: int
    committed: Stamp | None = None
    target: Stamp | None = None
    alive: frozenset[Stamp] = frozenset()
    decided_step: int = -1

    def is_hopeless(self, stamp: Stamp) -> bool:
        """True when that stamp will never be held by every rank. The horizon itself never is."""
        return stamp.step <= self.decided_step and stamp not in self.alive and stamp != self.committed
