"""Rebalancing: when the micro-batches of a step are shared in another way, and why.

Comes in: every `LOOK_STEPS` steps, of each rank, what one micro-batch has taken it. Goes out: other
shares, each with a sentence and its price. What counts is the median of the last three looks, so
that one that was disturbed moves nothing; and a change must make the slowest rank's part shorter by
`LEAST_GAIN`. Splitting by measured rate is what FALCON (ATC 2025), Malleus and AntDT do first.

Each rank holds one of these and decides alone. Invariant: with the same looks all have the same
shares; whatever is looked at is part of the state and restored with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.core.balance.shares import LEAST_SHARE, best_shares, equal_shares, step_ns
from keepstep.model.units import human_ns

LOOK_STEPS = 8
LOOKS = 3
LEAST_GAIN = 0.08
NAMED = 4  # ranks in a sentence


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """before_ns, after_ns: of the slowest rank's micro-batches, a step; even_ns: if all were as
    fast as the fastest, with equal shares."""

    shares: tuple[int, ...]
    before: tuple[int, ...]
    costs_ns: tuple[int, ...]
    before_ns: int
    after_ns: int
    even_ns: int
    why: str


class Rebalancing:
    """Of `total` micro-batches a step among so many ranks."""

    def __init__(self, total: int, ranks: int) -> None:
        self._total = total
        self._equal = equal_shares(total, ranks)
        self.shares = self._equal
        self._looks: list[tuple[int, ...]] = []

    @property
    def total(self) -> int:
        return self._total

    @property
    def can_change(self) -> bool:
        """Whether there are enough of them."""
        return len(self._equal) > 1 and self._total >= LEAST_SHARE * len(self._equal)

    def look(self, costs_ns: Sequence[int], step: int) -> Rebalanced | None:
        """costs_ns: of one micro-batch, by rank; 0 or less: not known. step: the one that is about
        to begin. What has changed."""
        if not self.can_change or len(costs_ns) != len(self.shares) or min(costs_ns) <= 0:
            return None
        self._looks = [*self._looks, tuple(costs_ns)][-LOOKS:]
        if len(self._looks) < LOOKS:
            return None
        costs = tuple(sorted(by_rank)[LOOKS // 2] for by_rank in zip(*self._looks, strict=True))
        found = best_shares(self._total, costs)
        before_ns, after_ns = step_ns(self.shares, costs), step_ns(found, costs)
        if after_ns > (1 - LEAST_GAIN) * before_ns:
            return None
        before, self.shares = self.shares, found
        even_ns = step_ns(self._equal, [min(costs)] * len(costs))
        why = _sentence(found, before, costs, before_ns, after_ns, even_ns, step)
        return Rebalanced(found, before, costs, before_ns, after_ns, even_ns, why)

    def begin_anew(self) -> None:
        """With equal shares."""
        self.shares, self._looks = self._equal, []

    def state_dict(self) -> dict[str, Any]:
        return {"shares": list(self.shares), "looks": [list(look) for look in self._looks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Whether it is of as many micro-batches and ranks; else nothing is taken from it."""
        shares = tuple(int(share) for share in state["shares"])
        if sum(shares) != self._total or len(shares) != len(self._equal):
            self.begin_anew()
            return False
        self.shares = shares
        self._looks = [tuple(int(cost) for cost in look) for look in state["looks"]]
        return True


def _sentence(
    shares: Sequence[int],
    before: Sequence[int],
    costs: Sequence[int],
    before_ns: int,
    after_ns: int,
    even_ns: int,
    step: int,
) -> str:
    usual = sorted(costs)[len(costs) // 2 if len(costs) % 2 else len(costs) // 2 - 1]
    changed = [rank for rank in range(len(shares)) if shares[rank] != before[rank]]
    changed.sort(key=lambda rank: -abs(costs[rank] - usual))
    told = ", ".join(
        f"rank {rank} computes {shares[rank]} instead of {before[rank]} ({human_ns(costs[rank])} "
        "each)"
        for rank in changed[:NAMED]
    )
    more = f", and {len(changed) - NAMED} others" if len(changed) > NAMED else ""
    return (
        f"from step {step} on the {sum(shares)} micro-batches of a step are shared by speed: "
        f"{told}{more}; one usually takes {human_ns(usual)}. They take {human_ns(after_ns)} a step "
        f"instead of {human_ns(before_ns)}, and would {human_ns(even_ns)} if all were as fast as "
        f"the fastest ({100 * (after_ns / even_ns - 1):.0f} % more). The global batch is the same"
    )
