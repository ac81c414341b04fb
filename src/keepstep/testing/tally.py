"""Tally: what a soak adds up to.

Comes in: its turns and recoveries. Goes out: counts, rates and times as plain values, by kind of
fault. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from statistics import median
from typing import Any

from keepstep.model.units import S_NS
from keepstep.testing.faults import Fault
from keepstep.testing.soak import Passed

TWO = "a second during recovery"


def tally(
    faults: Sequence[Fault], passed: Sequence[Passed], lasted_ns: int, report: dict[str, Any]
) -> dict[str, Any]:
    """`report` is the verdict's. A turn of two faults counts under a name of its own."""
    injected = sum(f["injected"] for f in report["faults"])
    turns: dict[str, list[Passed]] = {}
    for turn in passed:
        turns.setdefault(_name(faults, turn.faults), []).append(turn)
    return {
        "lasted_s": round(lasted_ns / S_NS, 1),
        "injected": injected,
        "recovered": sum(len(turn.faults) for turn in passed),
        "faults_per_minute": round(injected / lasted_ns * 60 * S_NS, 1) if lasted_ns else None,
        "injected_by_kind": dict(Counter(r["kind"] for r in report["faults"] if r["injected"])),
        "turns": {name: _row(found) for name, found in sorted(turns.items())},
        "all_turns": _row(passed),
        "lost_steps": _counted(r["lost_steps"] for r in report["recoveries"] if r["covered"]),
        "lost_steps_beyond_policy": _counted(
            r["lost_steps"] for r in report["recoveries"] if not r["covered"]
        ),
        "sources": dict(Counter(report["sources"])),
    }


def _name(faults: Sequence[Fault], numbers: Sequence[int]) -> str:
    return TWO if len(numbers) > 1 else faults[numbers[0]].kind


def _row(turns: Sequence[Passed]) -> dict[str, Any]:
    trained, whole = (
        [t.trained_ns - t.began_ns for t in turns],
        [t.whole_ns - t.began_ns for t in turns],
    )
    return {"turns": len(turns), "trained_s": _times(trained), "protected_s": _times(whole)}


def _times(took_ns: Sequence[int]) -> dict[str, float] | None:
    if not took_ns:
        return None
    p99 = sorted(took_ns)[ceil(0.99 * len(took_ns)) - 1]
    return {"median": round(median(took_ns) / S_NS, 3), "p99": round(p99 / S_NS, 3)}


def _counted(steps: Any) -> dict[str, int]:
    """How often so many steps were lost, the fewest first."""
    return {str(lost): times for lost, times in sorted(Counter(steps).items())}
