"""Selection: which checks are worth the time that there is.

Comes in: checks, what they have brought before, how many seconds there are. Goes out: those to run,
in the catalogue's order, and why each other one is left out.

The yield of a check is the chance that it finds something, for each second that it takes. The
chance is estimated from its past runs, one success and one failure added (Laplace's rule of
succession), so that a check which never ran is worth a try, and one that never found anything comes
last without ever being given up. Best yield first, as long as there is time (SuperBench, USENIX
ATC 2024, chooses a subset by the risk of an incident, from a model of the fleet; here only what
this machine's own history tells).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.preflight.catalogue import PreflightCheck
from keepstep.model.messages.preflight import CheckRecord

S_MS = 1000


@dataclass(frozen=True, slots=True)
class Chosen:
    """`skipped`: the names of the others, each with its reason."""

    checks: tuple[PreflightCheck, ...]
    skipped: dict[str, str]


def choose(
    checks: Sequence[PreflightCheck], past: Mapping[str, CheckRecord], within_s: float | None
) -> Chosen:
    """Those that are worth it. None: there is time for all."""
    if within_s is None:
        return Chosen(tuple(checks), {})
    left_s = within_s
    taken: set[str] = set()
    skipped: dict[str, str] = {}
    for check in sorted(checks, key=lambda check: -yield_per_s(check, past.get(check.name))):
        record = past.get(check.name)
        takes_s = expected_s(check, record)
        if takes_s <= left_s:
            left_s -= takes_s
            taken.add(check.name)
        else:
            known = record or CheckRecord()
            skipped[check.name] = (
                f"takes about {takes_s:.1f} s and {left_s:.1f} s were left; it found something in "
                f"{known.found} of {known.runs} runs"
            )
    return Chosen(tuple(check for check in checks if check.name in taken), skipped)


def yield_per_s(check: PreflightCheck, record: CheckRecord | None) -> float:
    """The chance that it finds something, for each second."""
    known = record or CheckRecord()
    return (known.found + 1) / (known.runs + 2) / max(0.001, expected_s(check, record))


def expected_s(check: PreflightCheck, record: CheckRecord | None) -> float:
    """What it took on average; where it never ran, what it takes elsewhere."""
    if record is None or record.runs == 0:
        return check.expects_s
    return record.took_ms / S_MS / record.runs
