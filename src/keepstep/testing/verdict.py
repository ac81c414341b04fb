"""Verdict: from what a drill saw to what it proves.

Comes in: the faults, the `Facts` of the disturbed run, the hash of the undisturbed one. Goes out: the report that is printed as JSON.
A fault counts as seen only by evidence from outside the rank that did it: the kernel's word about a process, a journal line of
somebody else, bytes in a slot. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.testing.faults import Fault
from keepstep.testing.witness import Facts

DAMAGE = ("damaged", "checkpoint-damaged", "restore-failed", "slot-voided")
NO_SPACE = ("No space left", "ENOSPC")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One restart: the faults that caused it, what it cost."""

    causes: tuple[int, ...]
    step: int
    source: str
    lost_steps: int
    took_s: float | None  # from the first cause to the first step done again


def judge(faults: Sequence[Fault], facts: Facts, expected_hash: str | None) -> dict[str, Any]:
    """The report. `proved` says whether everything asked for is true."""
    seen = [_fault_report(n, f, facts) for n, f in enumerate(faults)]
    found = recoveries(faults, facts)
    by_flip = {n for n, f in enumerate(faults) if f.kind == "flip"}
    recovered = facts.exit_code == 0 and facts.hash is not None
    bit_equal = recovered and facts.hash == expected_hash
    return {
        "proved": bit_equal and all(f["seen"] for f in seen) and not facts.left_over,
        "recovered": recovered,
        "bit_equal": bit_equal,
        "lost_steps": [r.lost_steps for r in found],
        # A damaged newest snapshot costs what lies between it and the next source; nothing else may cost more than one step.
        "within_one_step": all(r.lost_steps <= 1 for r in found if not by_flip.intersection(r.causes)),
        "faults": seen,
        "hash": facts.hash,
        "expected_hash": expected_hash,
        "restarts": max((e.data["incarnation"] - 1 for e in facts.events if e.kind == "rank-joined"), default=0),
        "recovery_s": [r.took_s for r in found],
        "sources": [r.source for r in found],
        **facts.counts,
        "left_over": facts.left_over,
        "job": facts.job,
        "exit_code": facts.exit_code,
    }


def _fault_report(number: int, fault: Fault, facts: Facts) -> dict[str, Any]:
    notes = [n for n in facts.notes if n["fault"] == number]
    injected = any(n["what"] == "did" for n in notes)
    at = next((n for n in notes if n["what"] == "about to"), None)
    evidence = _evidence(number, fault, facts, notes) if injected else []
    why_not = facts.cannot.get(number) or "its moment never came"
    return {
        "kind": fault.kind,
        "rank": fault.rank,
        "step": at["step"] if at else fault.step,
        "phase": at["phase"] if at else fault.phase,
        "asked": str(fault),
        "injected": injected,
        "seen": injected and all(evidence),
        "evidence": "; ".join(filter(None, evidence)) if injected else why_not,
    }


def _evidence(number: int, fault: Fault, facts: Facts, notes: list[dict[str, Any]]) -> list[str]:
    """One sentence for everything that has to be there; an empty one where it is not."""
    told = {key: value for note in notes for key, value in note.items()}
    since_ns = int(notes[0]["mono_ns"])
    after = [e for e in facts.events if e.mono_ns > since_ns]
    sighted = facts.sightings.get(number, [])

    def saw(words: str) -> str:
        return next((s for s in sighted if words in s), "")

    if fault.kind == "keeper-kill":
        return [saw("is gone"), _say(e for e in after if e.kind == "keeper-started" and e.data.get("pid") != told["keeper_pid"])]
    if fault.kind == "full" and fault.where == "store":
        return [saw("0 bytes free"), _say(e for e in after if e.kind == "persist-failed" and any(w in e.why for w in NO_SPACE))]
    death = [saw("is gone"), "killed by the drill" if fault.from_outside else _told_dead(int(told["pid"]), after, facts.log)]
    if fault.kind == "full":
        return [saw("0 bytes free"), _say(e for e in after if e.kind == "resumed")]
    if fault.kind == "stop":
        return [saw("stopped (state T)"), saw("is gone")]
    if fault.kind == "torn":
        return [*death, saw("no seal")]
    if fault.kind == "flip":
        return [*death, *(_say(e for e in after if e.kind in DAMAGE and path in e.why) for path in told["paths"])]
    return death


def _told_dead(pid: int, after: Sequence[Event], log: str) -> str:
    """Who says that the process ended by a signal: the agent, torchrun, or the keeper that lost it."""
    agent = _say(e for e in after if e.kind == "rank-exited" and e.data.get("pid") == pid and e.data["code"] == -9)
    torchrun = f"torchrun: process {pid} ended with exit code -9" if "(exitcode: -9) local_rank: " in log and f"(pid: {pid})" in log else ""
    return agent or torchrun or _say(e for e in after if e.kind == "rank-left" and e.data.get("pid") == pid and not e.data["expected"])


def _say(events: Any) -> str:
    event = next(iter(events), None)
    return f"{event.who}: {event.why}" if event else ""


def recoveries(faults: Sequence[Fault], facts: Facts) -> list[Recovery]:
    """Every time all ranks resumed after the first start."""
    began = {n["fault"]: int(n["mono_ns"]) for n in reversed(facts.notes) if n["what"] == "about to"}
    resumed = [e for e in facts.events if e.kind == "resumed"]
    found = []
    for before, event in pairwise(resumed):
        causes = sorted(n for n, at_ns in began.items() if faults[n].ends_a_rank and before.mono_ns < at_ns < event.mono_ns)
        done_ns = next((e.mono_ns for e in facts.events if e.kind == "next-step" and e.mono_ns > event.mono_ns), None)
        took_s = None if done_ns is None or not causes else round((done_ns - began[causes[0]]) / S_NS, 3)
        found.append(Recovery(tuple(causes), event.data["step"], event.data["source"], event.data["lost_steps"], took_s))
    return found
