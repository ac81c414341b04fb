"""History: what earlier preflights of this node have brought, as one small record.

Comes in: a history and the readings of a preflight. Goes out: the next history. Invariant: it does
not grow with the number of runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.core.preflight.catalogue import BY_CHECK, TRAINING
from keepstep.model.messages.preflight import (
    CheckOutcome,
    CheckReading,
    CheckRecord,
    FleetTrait,
    PreflightHistory,
)

LOSS = "loss"  # the trait of a mini-training that is kept
MOST_KINDS = 100
ANSWERS = (CheckOutcome.OK, CheckOutcome.BAD)
NO_HISTORY = PreflightHistory({}, {})


def remember(
    history: PreflightHistory, readings: Iterable[CheckReading], found: frozenset[str]
) -> PreflightHistory:
    """After a preflight. found: the checks that named a defect anywhere. A loss is kept only where
    nothing was found in it: the first one of its kind stays."""
    checks = dict(history.checks)
    losses = dict(history.losses)
    for reading in readings:
        if reading.check not in BY_CHECK or reading.outcome not in ANSWERS:
            continue
        before = checks.get(reading.check, CheckRecord())
        checks[reading.check] = CheckRecord(
            before.runs + 1,
            before.found + (reading.check in found),
            before.took_ms + reading.took_ms,
        )
        if reading.check == TRAINING and TRAINING not in found:
            for trait in losses_of(reading):
                losses.setdefault(trait.kind, trait.value)
    while len(losses) > MOST_KINDS:
        losses.pop(next(iter(losses)))
    return PreflightHistory(checks, losses)


def losses_of(reading: CheckReading) -> list[FleetTrait]:
    """Digests of a mini-training, with the kind of machine and software that they belong to."""
    return [trait for trait in reading.traits if trait.name == LOSS]


def changed_losses(history: PreflightHistory, reading: CheckReading) -> list[FleetTrait]:
    """Those that the same kind of machine and software has given otherwise before."""
    return [
        trait
        for trait in losses_of(reading)
        if history.losses.get(trait.kind, trait.value) != trait.value
    ]
