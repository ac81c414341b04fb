"""Defect: what a check finds, and how bad that is.

Every judgement is a function of the facts alone. It yields defects, or a `silence` where a fact
that it needs could not be read, or nothing: what it looks at is in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from keepstep.model.machine_facts import MachineFacts


class Grade(Enum):
    """How bad it is: something will break; something may; nobody knows."""

    BROKEN = "broken"
    WARNING = "warning"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Defect:
    """What was found, why it matters and what to do: a clause each, without a full stop. What is
    UNKNOWN has neither reason nor remedy."""

    grade: Grade
    found: str
    why: str = ""
    fix: str = ""


Judgement = Callable[[MachineFacts], Iterator[Defect]]


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One question to the machine. `name`: stable, for scripts."""

    name: str
    judge: Judgement


def broken(found: str, why: str, fix: str) -> Defect:
    """Something that keepstep or training needs will fail."""
    return Defect(Grade.BROKEN, found, why, fix)


def warning(found: str, why: str, fix: str) -> Defect:
    """It works, and may hurt."""
    return Defect(Grade.WARNING, found, why, fix)


def silence(found: str) -> Defect:
    """The fact could not be read: `found` says which."""
    return Defect(Grade.UNKNOWN, found)
