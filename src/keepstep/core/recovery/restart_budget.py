"""RestartBudget: how many restarts each cause of failure may still cost.

Comes in: one failure after the other, and the newest completed step at each. Goes out: how much of
its cause's budget is used, with the numbers, and whether that was too much. Failures of one cause
in a row count: whoever has done `refill_steps` new steps since the last one has earned a whole
budget again. Where steps are not told nothing is ever earned. Does not count what all causes cost
together.

Invariant: one cause never uses another's budget, and in a row no cause is granted more than its
limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.model.failure import Budget, Cause


@dataclass(frozen=True, slots=True)
class Spent:
    """`count` failures of that cause in a row, this one among them; `limit` are borne. `why`: the
    same in words, empty without a limit."""

    count: int
    limit: int | None
    why: str

    @property
    def is_too_much(self) -> bool:
        return self.limit is not None and self.count > self.limit


@dataclass
class RestartBudget:
    budget: Budget
    _counts: dict[Cause, int] = field(default_factory=dict)
    # the newest completed step when it last happened
    _steps: dict[Cause, int] = field(default_factory=dict)

    def spend(self, cause: Cause, completed_step: int | None) -> Spent:
        """One more failure of this cause."""
        last = self._steps.get(cause)
        new_steps = 0 if completed_step is None or last is None else max(0, completed_step - last)
        if new_steps >= self.budget.refill_steps:
            self._counts[cause] = 0
        if completed_step is not None:
            self._steps[cause] = max(completed_step, -1 if last is None else last)
        self._counts[cause] = count = self._counts.get(cause, 0) + 1
        limit = self.budget.limits.get(cause)
        since = (
            f", {new_steps} new steps since the last"
            if last is not None and completed_step is not None
            else ""
        )
        return Spent(
            count, limit, "" if limit is None else f"{cause.value} {count} of {limit}{since}"
        )
