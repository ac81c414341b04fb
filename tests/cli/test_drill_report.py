"""What a drill prints: every fact of the report, and none that is not in it."""

from __future__ import annotations

import io
from typing import Any

from keepstep.cli import drill_report, drill_soak
from keepstep.dashboard.screen import Screen
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.testing.witness import DrillFacts

FAULT: dict[str, Any] = {
    "kind": "kill",
    "rank": 1,
    "nodes": [],
    "step": 20,
    "phase": "seal",
    "asked": "kill:rank=1,step=20,phase=seal",
    "injected": True,
    "seen": True,
    "evidence": "process 7 is gone [ok]",
}
NODE_FAULT = {**FAULT, "kind": "kill-node", "rank": None, "nodes": [1, 2], "injected": False}
RECOVERY: dict[str, Any] = {
    "step": 18,
    "source": "memory",
    "lost_nodes": [1, 2],
    "covered": False,
    "fetched_bytes": 2048,
}
REPORT: dict[str, Any] = {
    "faults": [FAULT],
    "recovered": True,
    "bit_equal": False,
    "within_one_step": True,
    "hash": "abc",
    "expected_hash": "def",
    "restarts": 4,
    "max_lost_steps": 1,
    "recovery_s_median": 1.25,
    "captured_steps": 41,
    "skipped_steps": 2,
    "torn_steps": 3,
    "recoveries": [],
    "policy": "copies:2",
    "left_over": [],
    "half_checkpoints": [],
}


def shown(facts: DrillFacts, **changes: Any) -> str:
    file = io.StringIO()
    drill_report.show(Screen(width=160, file=file), facts, {**REPORT, **changes})
    return file.getvalue()


def event(at_s: int, kind: str, why: str) -> Event:
    return Event(0, at_s * S_NS, "keeper", kind, why, {})


def test_faults_and_totals() -> None:
    text = shown(DrillFacts("job"), faults=[FAULT, NODE_FAULT])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["kill", "rank 1", "20", "seal", "yes", "process 7 is gone [ok]"] in rows
    assert ["kill-node", "node 1, 2", "20", "seal", "yes", "process 7 is gone [ok]"] in rows
    assert "recovered: yes" in text and "same final state: no" in text
    assert "4 restarts" in text and "median 1.25 s" in text and "41 snapshots, 2 skipped" in text


def test_what_was_not_seen_and_what_was_left() -> None:
    fault = {**FAULT, "seen": False}
    text = shown(
        DrillFacts("job"), faults=[fault, {**fault, "injected": False}], left_over=["slot-0"]
    )
    assert "not injected" in text and "│ no " in text and "left behind: slot-0" in text


def test_half_a_checkpoint_is_told() -> None:
    text = shown(DrillFacts("job"), half_checkpoints=["/store/step-1: block [0]: another"])
    assert "half a checkpoint is taken for one: /store/step-1: block [0]: another" in text


def test_only_recoveries_that_moved_something_are_told() -> None:
    quiet = {**RECOVERY, "lost_nodes": [], "fetched_bytes": 0}
    text = shown(DrillFacts("job"), recoveries=[quiet, RECOVERY])
    lines = [line for line in text.splitlines() if "resumed with step" in line]
    assert len(lines) == 1 and "node 1, 2" in lines[0]
    assert "more than copies:2 survives" in lines[0] and "2.0 KiB from other nodes" in lines[0]


def test_a_timeline_is_in_order_and_ends() -> None:
    facts = DrillFacts("job")
    facts.events += [event(3, "resumed", "later"), event(1, "damaged", "[first]")]
    facts.events += [event(2, "unheard-of", "never told")]
    facts.notes += [{"fault": 0, "what": "did", "mono_ns": 2 * S_NS}]
    text = shown(facts)
    told = [text.index(words) for words in ("[first]", "fault 0: did", "later")]
    assert told == sorted(told) and "never told" not in text
    facts.events += [event(4 + n, "torn", "again") for n in range(drill_report.MAX_LINES)]
    assert "3 more lines" in shown(facts)


def test_a_soak_shows_its_tally() -> None:
    times = {"median": 1.5, "p99": 2.5}
    turns = {"turns": 3, "trained_s": times, "protected_s": None}
    soak = {
        "turns": {"kill": turns},
        "all_turns": {**turns, "turns": 7},
        "injected": 9,
        "lasted_s": 60,
        "faults_per_minute": 9,
        "recovered": 8,
        "injected_by_kind": {"kill": 9},
        "lost_steps": {"0": 6, "1": 1},
        "lost_steps_beyond_policy": {},
        "sources": {"memory": 7},
    }
    file = io.StringIO()
    report = {**REPORT, "soak": soak, "failure": "it [never] came", "faults": [NODE_FAULT]}
    drill_soak.show(Screen(width=160, file=file), report)
    text = file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["kill", "3", "1.5", "2.5", "", ""] in rows and [
        "all",
        "7",
        "1.5",
        "2.5",
        "",
        "",
    ] in rows
    assert "9 faults in 60 s" in text and "0: 6, 1: 1" in text and "it [never] came" in text
    assert f"not injected: {NODE_FAULT['asked']}" in text
