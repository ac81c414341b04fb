"""Partial sums: what ranks give to a step's sum where not all wait for the slowest. Values only;
`core/balance/partial.py` says whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Late = Literal["drop", "add"]
LATE = ("drop", "add")


class Given(IntEnum):
    """What a rank has given to a step's sum. OLDER: the gradient that was late in the step
    before."""

    NOTHING = 0
    FRESH = 1
    OLDER = 2


@dataclass(frozen=True, slots=True)
class PartialRule:
    """When a sum is closed: `need` ranks have given a gradient of the step, and `wait_ns` have
    passed since. late: what becomes of a gradient that comes later."""

    ranks: int
    need: int
    wait_ns: int
    late: Late

    def sat_out(self) -> Given:
        """What who sits out gives."""
        return Given.OLDER if self.late == "add" else Given.NOTHING


@dataclass(frozen=True, slots=True)
class PartialTurn:
    """One step's. late: who was, in the step before, and sits out this one."""

    rule: PartialRule
    late: frozenset[int]

    def computes(self, rank: int) -> bool:
        """Whether it has a gradient to compute."""
        return rank not in self.late
