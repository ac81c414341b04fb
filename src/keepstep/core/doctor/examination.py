"""Examination: every check, put to the facts of one machine.

Comes in: facts. Goes out: what each check found. A machine is fit when nothing will break; what may
hurt, and what could not be read, does not make it unfit.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.doctor import (
    clock,
    gpus,
    limits,
    memory,
    network,
    places,
    processes,
    software,
    wanted,
)
from keepstep.core.doctor.defect import Defect, DoctorCheck, Grade
from keepstep.model.machine_facts import MachineFacts

CHECKS: tuple[DoctorCheck, ...] = (
    *places.CHECKS,
    *memory.CHECKS,
    *limits.CHECKS,
    *processes.CHECKS,
    *clock.CHECKS,
    *network.CHECKS,
    *gpus.CHECKS,
    *software.CHECKS,
    *wanted.CHECKS,
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found; nothing: what it looks at is in order."""

    check: str
    defects: tuple[Defect, ...]


@dataclass(frozen=True, slots=True)
class Examination:
    """What every check found, in the order of `CHECKS`."""

    results: tuple[CheckResult, ...]

    @property
    def is_fit(self) -> bool:
        """Whether nothing that was found will break a job."""
        return not self.of_grade(Grade.BROKEN)

    def of_grade(self, grade: Grade) -> list[tuple[str, Defect]]:
        """(check, defect) of that grade."""
        return [
            (result.check, defect)
            for result in self.results
            for defect in result.defects
            if defect.grade is grade
        ]


def examine(facts: MachineFacts) -> Examination:
    """Put every check to the facts."""
    return Examination(
        tuple(CheckResult(check.name, tuple(check.judge(facts))) for check in CHECKS)
    )
