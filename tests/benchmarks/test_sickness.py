"""What the benchmark of sick parts makes of its drills, and that its faults are ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as when it is started

from benchmarks.sickness import CANNOT, CASES, row, told
from keepstep.testing.faults import parse


def report(seen: bool, evidence: str = "", bit_equal: bool = True) -> dict[str, Any]:
    fault = {"seen": seen, "evidence": evidence}
    return {"faults": [fault], "bit_equal": bit_equal, "restarts": 0}


def test_each_case_is_a_fault_that_the_drill_knows() -> None:
    for kind, case in CASES.items():
        fault = parse(case.fault.format(rank=1))
        assert fault.kind == kind and fault.step < case.steps


def test_what_cannot_be_injected_counts_for_nothing() -> None:
    trials = [(0, report(True, "it is hot")), (1, report(False)), (CANNOT, report(False, "no"))]
    found = row("hot", trials)
    assert (found["trials"], found["named"], found["bit_equal"]) == (2, 1, 2)
    assert "named in 1 of 2" in told(found) and "it is hot" in told(found)
    assert told(row("hot", trials[2:])) == "hot: cannot be injected here: no"
