"""Micro-batches: the parts of a step's global batch that ranks share. Values only;
`core/balance/shares.py` says whose they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedMicroBatch:
    """One of a rank's work. index: among all of the step; home: the rank whose sum its gradient
    belongs to."""

    index: int
    home: int
