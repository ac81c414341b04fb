"""Reports: what the program tells of its steps.

Comes in: a step's loss, its tokens, and the phase that the program is in. Goes out: the loss, as it
was told, to the step's boundary; tokens and phase to the rank's pages. Reads no tensor: what is on
a device is not waited for.

Invariant: `loss_now` is what was told within the present step, None before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepstep.core.economics.retention import METRICS
from keepstep.errors import ConfigError
from keepstep.model.snapshot import Phase
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.step_measure import StepMeasure, as_count

TOKENS = "tokens"


class Reports:
    """Of one job, on the trainer's thread."""

    def __init__(self, rank: Rank, measure: StepMeasure) -> None:
        self._rank, self._measure = rank, measure
        self.loss: Any = None
        self.loss_now: Any = None

    def step_begins(self) -> None:
        self.loss_now = None

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        unknown = set(metrics) - {*METRICS, TOKENS}
        if unknown:
            known = ", ".join((*METRICS, TOKENS))
            raise ConfigError(f"report() expected {known}, found {sorted(unknown)}")
        if TOKENS in metrics:
            self._measure.worked(as_count(metrics[TOKENS]))
        if "loss" not in metrics:
            return
        loss: Any = metrics["loss"]
        self.loss = self.loss_now = loss.detach() if hasattr(loss, "detach") else loss

    def enter(self, phase: str) -> None:
        """Raises ConfigError."""
        try:
            value = Phase[phase.upper()]
        except KeyError:
            known = [p.name.lower() for p in Phase]
            raise ConfigError(f"enter() expected one of {known}, found {phase!r}") from None
        self._measure.announced(value)
        self._rank.announce(value, self._rank.step + 1)
