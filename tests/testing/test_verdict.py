"""Verdict: what counts as seen, what counts as proved. Each fault's evidence is taken away piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.cli.drill import exit_code
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.testing.faults import Fault, parse
from keepstep.testing.verdict import judge
from keepstep.testing.witness import Facts


def event(at_s: float, kind: str, why: str = "", who: str = "keeper", **data: Any) -> Event:
    return Event(0, int(at_s * S_NS), who, kind, why, data)


def told(fault: int, what: str, at_s: float, **data: Any) -> dict[str, Any]:
    return {"fault": fault, "what": what, "mono_ns": int(at_s * S_NS), **data}


def facts(**changes: Any) -> Facts:
    """A job of one rank that was killed at 10 s in step 20 and ended well."""
    values: dict[str, Any] = {
        "job": "drill",
        "exit_code": 0,
        "digests": {0: "abc"},
        "notes": [told(0, "about to", 10, pid=7, phase="seal", step=20), told(0, "did", 10)],
        "sightings": {0: ["process 7 is gone"]},
        "events": [
            event(1, "rank-joined", incarnation=1),
            event(2, "resumed", step=-1, source="fresh", lost_steps=0),
            event(10.1, "rank-exited", "rank 0 was killed", "agent", pid=7, code=-9),
            event(12, "rank-joined", incarnation=2),
            event(12.5, "resumed", "every rank has proven", step=18, source="memory", lost_steps=1),
            event(13, "next-step"),
        ],
    }
    return Facts(**{**values, **changes})


def verdict(fault: Fault, found: Facts) -> dict[str, Any]:
    return judge([fault], found, facts().hash)


def test_a_proved_drill() -> None:
    report = verdict(parse("kill:step=20,phase=seal"), facts())
    assert report["proved"] and report["recovered"] and report["bit_equal"] and report["within_one_step"]
    assert (report["lost_steps"], report["restarts"], report["recovery_s"], report["sources"]) == ([1], 1, [3.0], ["memory"])
    (fault,) = report["faults"]
    assert fault["injected"] and fault["seen"] and "process 7 is gone; agent: rank 0 was killed" in fault["evidence"]
    assert exit_code(report) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": {0: "other"}},
        {"digests": {}},
        {"exit_code": 1},
        {"exit_code": None},
        {"left_over": ["/dev/shm/keepstep-drill"]},
        {"sightings": {}},
        {"events": [e for e in facts().events if e.kind != "rank-exited"]},
        {"events": [event(10.1, "rank-exited", "ended", "agent", pid=7, code=1)]},
        {"events": [event(10.1, "rank-exited", "another", "agent", pid=8, code=-9)]},
        {"events": [event(9.9, "rank-exited", "too early", "agent", pid=7, code=-9)]},
    ],
)
def test_nothing_less_is_proved(changes: dict[str, Any]) -> None:
    report = verdict(parse("kill:step=20,phase=seal"), facts(**changes))
    assert not report["proved"]
    assert exit_code(report) == 1


def test_a_fault_that_was_not_done_has_its_own_exit_code() -> None:
    never = verdict(parse("kill:step=20"), facts(notes=[]))
    assert not never["proved"] and never["faults"][0]["evidence"] == "its moment never came"
    refused = verdict(parse("full:step=20"), Facts("drill", cannot={0: "mount: not permitted"}))
    assert refused["faults"][0] | {"injected": False, "seen": False, "evidence": "mount: not permitted"} == refused["faults"][0]
    assert exit_code(never) == exit_code(refused) == 3


KILLED = facts().events[2]
DAMAGED = event(11, "damaged", "/arena/slot-1: damaged")
ADOPTED = event(11, "keeper-started", "adopted", pid=6)
NO_SPACE = event(11, "persist-failed", "No space left on device")
RESUMED = event(12, "resumed", "from memory", step=19, source="memory", lost_steps=0)

COMPLETE: dict[str, tuple[list[str], list[Event], dict[str, Any]]] = {
    "stop:step=20": (["process 7 is stopped (state T)", "process 7 is gone"], [], {}),
    "torn:step=20": (["process 7 is gone", "slot-1 was left with a payload and no seal"], [KILLED], {}),
    "flip:step=20": (["process 7 is gone"], [KILLED, DAMAGED], {"paths": ["/arena/slot-1"]}),
    "keeper-kill:step=20": (["keeper process 5 is gone"], [ADOPTED], {"keeper_pid": 5}),
    "full:step=20": (["store has 0 bytes free"], [NO_SPACE], {}),
    "full:step=20,where=arena": (["arena has 0 bytes free"], [RESUMED], {}),
}


@pytest.mark.parametrize("spec", COMPLETE)
def test_each_kind_needs_all_its_evidence(spec: str) -> None:
    sightings, events, said = COMPLETE[spec]
    notes = [told(0, "about to", 10, pid=7, phase="forward", step=20), told(0, "did", 10, **said)]
    fault = parse(spec)

    def is_seen(sightings: list[str], events: list[Event]) -> bool:
        return bool(verdict(fault, facts(notes=notes, sightings={0: sightings}, events=events))["faults"][0]["seen"])

    assert is_seen(sightings, events)
    for missing in sightings:
        assert not is_seen([s for s in sightings if s != missing], events), missing
    for gone in events:
        assert not is_seen(sightings, [e for e in events if e is not gone]), gone


def test_only_a_flip_may_cost_more_than_one_step() -> None:
    lost = [*facts().events[:4], event(12.5, "resumed", "from an older slot", step=17, source="memory", lost_steps=2)]
    assert not verdict(parse("kill:step=20"), facts(events=lost))["within_one_step"]
    notes = [facts().notes[0], told(0, "did", 10, paths=[])]
    assert verdict(parse("flip:step=20"), facts(events=lost, notes=notes))["within_one_step"]
