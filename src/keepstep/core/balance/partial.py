"""Partial sums: whose gradients the mean of a step is made of, where not all wait for the slowest.

Comes in: what each rank has given to each step's sum. Goes out: who computes the next step, and who
owes the gradient that came too late. The sum of a step is closed when so many ranks have given a
gradient of that step (`need`); who comes later was *late*:

    drop    its gradient is dropped: backup workers (Chen et al., Revisiting Distributed Synchronous
            SGD, 2016), for `need` = ranks - backups
    add     it is added in the next step: partial all-reduce (eager-SGD; Li et al., PPoPP 2020)

and it *sits out* the next step, for the others have been computing that one meanwhile. The next sum
is not closed before all who were late have come to it. So nobody is ever more than one step behind,
and a rank at half speed gives every second gradient and holds nobody up.

Invariant: what has been given, step by step from where all went on, says everything else. So the
record of it, played back, is the same computation, whatever time anybody takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.model.decoding import an_object, from_json
from keepstep.model.partial import Given, PartialRule, PartialTurn


class PartialTurns:
    """Whose turn it is, as each rank knows it."""

    def __init__(self, rule: PartialRule) -> None:
        self.rule = rule
        self.late: frozenset[int] = frozenset()  # in the step before

    @property
    def turn(self) -> PartialTurn:
        """Of the step that begins."""
        return PartialTurn(self.rule, self.late)

    def over(self, given: Sequence[Given]) -> frozenset[int]:
        """What all have given to the step, by rank. Who was late. Raises as `check` does."""
        self.check(given)
        behind = {rank for rank, part in enumerate(given) if part is Given.NOTHING}
        self.late = frozenset(behind - self.late)
        return self.late

    def check(self, given: Sequence[Given]) -> None:
        """Raises ValueError for what cannot be given to this step."""
        sat_out = self.rule.sat_out()
        odd = [
            rank
            for rank, part in enumerate(given)
            if (part is not sat_out if rank in self.late else part is Given.OLDER)
        ]
        fresh = sum(part is Given.FRESH for part in given)
        if odd or len(given) != self.rule.ranks or fresh < self.rule.need:
            raise ValueError(
                f"expected {self.rule.ranks} ranks, at least {self.rule.need} with a gradient of "
                f"the step, and {sorted(self.late)} sitting out; found {told(given)!r}"
            )


def told(given: Iterable[Given]) -> str:
    """As the record has it: a digit a rank."""
    return "".join(str(int(part)) for part in given)


# -- the record: a line where training goes on from a state, and one for each sum that lacks a rank


def begin_line(step: int, rule: PartialRule) -> str:
    """step: the first one."""
    known = {"begin": step, "ranks": rule.ranks, "need": rule.need, "late": rule.late}
    return json.dumps(known) + "\n"


def sum_line(step: int, given: Sequence[Given]) -> str:
    return json.dumps({"step": step, "given": told(given)}) + "\n"


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """A computation's sums. given: of the steps that lacked somebody; begins: the steps in front of
    which nobody was late, whoever had been."""

    rule: PartialRule
    given: Mapping[int, tuple[Given, ...]]
    begins: frozenset[int]

    def of_step(self, step: int) -> tuple[Given, ...]:
        return self.given.get(step, (Given.FRESH,) * self.rule.ranks)


def parse_record(lines: Iterable[str], rule: PartialRule) -> PartialRecord:
    """What was given in the computation that counts: of steps that were done again, the last time.
    A last line that was cut off as its writer died is no line.

    Raises ValueError for a record of another rule, and for what is no record."""
    given: dict[int, tuple[Given, ...]] = {}
    begins: set[int] = set()
    wanted = (rule.ranks, rule.need, rule.late)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            found = an_object(from_json(line))
            if "begin" in found:
                from_step = int(found["begin"])
                has = (found["ranks"], found["need"], found["late"])
                given = {step: parts for step, parts in given.items() if step < from_step}
                begins = {step for step in begins if step < from_step} | {from_step}
            else:
                has = wanted
                parts = tuple(Given(int(digit)) for digit in found["given"])
                given[int(found["step"])] = parts
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not of a record of partial sums: {error}") from None
        if has != wanted:
            raise ValueError(
                f"line {number}: expected the record of {rule.ranks} ranks, need={rule.need}, "
                f"late={rule.late!r}, found one of {has[0]}, need={has[1]}, late={has[2]!r}"
            )
    if not begins:
        raise ValueError("expected a record of partial sums, found none begun")
    return PartialRecord(rule, given, frozenset(begins))
