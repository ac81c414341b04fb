"""Soft errors: which devices compute wrong now and then, more often than others do?

Comes in: how often each device was found to compute wrong for a while, and over how many steps.
Goes out: the devices whose rate cannot be the fleet's. A single bit that flips is a matter of
chance (a particle, a margin); a device that does it again and again is ageing, and is told before
it computes wrong for good.

The test is exact: were all devices alike, each error would have struck any of them in proportion to
its steps, so that a device's share of all errors is binomial. Judged at 0.001 over all devices
(Bonferroni), and never by fewer than three errors of one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

LEAST_ERRORS = 3
LEVEL = 0.001  # false alarms, of a fleet of healthy devices


@dataclass(frozen=True, slots=True)
class SoftError:
    """A device has computed that step wrong, and right at last."""

    device: str
    step: int


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """`errors`: that passed, each counted once however long it lasted. `steps`: it has computed."""

    errors: int
    steps: int


@dataclass(frozen=True, slots=True)
class Ageing:
    """A device that errs more often than chance allows. `by_chance`: that a device like the others
    has so many."""

    device: str
    errors: int
    expected: float
    by_chance: float
    why: str


def records_of(
    errors: Iterable[SoftError], present: Collection[str], step: int
) -> dict[str, DeviceRecord]:
    """What is known of each device in step `step`. `errors`: of the whole job, told any number of
    times each. `present`: those that compute now.

    When a device came is not known: one that is here counts as if it had been from the start, and
    one that is gone as if it had gone with its last error. Either makes a device that is here seem
    to err less often than it does.
    """
    found: dict[str, set[int]] = {device: set() for device in present}
    for error in errors:
        found.setdefault(error.device, set()).add(error.step)
    return {
        device: DeviceRecord(len(steps), 1 + (step if device in present else max(steps)))
        for device, steps in found.items()
    }


def ageing(records: Mapping[str, DeviceRecord]) -> list[Ageing]:
    """The devices to be told of, by name. A device alone has none to be compared with: there three
    errors of its own are told."""
    all_errors = sum(record.errors for record in records.values())
    all_steps = sum(record.steps for record in records.values())
    found = []
    for device, record in sorted(records.items()):
        if record.errors < LEAST_ERRORS or not record.steps:
            continue
        share = record.steps / all_steps
        by_chance = _at_least(record.errors, all_errors, share) if len(records) > 1 else 0.0
        if by_chance * len(records) >= LEVEL and len(records) > 1:
            continue
        why = (
            f"{device} has computed wrong for a while {record.errors} times in {record.steps} "
            f"steps, of {all_errors} times on {len(records)} devices"
        )
        if len(records) > 1:
            why += f"; by chance it would be {share * all_errors:.2g} (p = {by_chance:.1g})"
        why += ": it is ageing, replace it before it lasts"
        found.append(Ageing(device, record.errors, share * all_errors, by_chance, why))
    return found


def _at_least(count: int, trials: int, share: float) -> float:
    """The probability of `count` or more of `trials`, each with probability `share`."""
    terms = (
        math.comb(trials, k) * share**k * (1 - share) ** (trials - k)
        for k in range(count, trials + 1)
    )
    return min(1.0, math.fsum(terms))
