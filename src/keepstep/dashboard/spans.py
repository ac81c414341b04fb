"""Spans: an incident as a tree of spans, as tracing has it: one for the recovery, one for each link
of its chain.

Comes in: the runs of a job. Goes out: spans, with times of the wall clock. Sends nothing.

Invariant: the same incident has the same ids whenever it is asked for, so that sending it twice
makes no second trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.dashboard.timeline import JobRun, RecoveryChain

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class IncidentSpan:
    """`trace_id`: 128 bits, of the incident; `span_id`: 64 bits; `parent_id`: 0 for the first.
    `ok`: whether the job went on; None: not told of a link."""

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Value]
    ok: bool | None = None


def incidents_of(job: str, runs: Sequence[JobRun]) -> Iterator[list[IncidentSpan]]:
    """One list for each incident that is over: its root first."""
    for number, run in enumerate(runs, 1):
        for recovery in run.recoveries:
            if recovery.outcome != "pending" and recovery.stages:
                yield list(_spans(job, number, recovery))


def _spans(job: str, number: int, recovery: RecoveryChain) -> Iterator[IncidentSpan]:
    stages = recovery.stages
    first = stages[0].event
    began_ns = first.wall_ns
    trace_id = _bits(128, job, str(began_ns), first.kind)
    root_id = _bits(64, job, str(began_ns), "root")
    attributes: dict[str, Value] = {
        "keepstep.job": job,
        "keepstep.run": number,
        "keepstep.outcome": recovery.outcome,
        "keepstep.why": first.why,
    }
    for name, value in (
        ("step", recovery.step),
        ("source", recovery.source),
        ("lost_steps", recovery.lost_steps),
        ("lost_at_least", recovery.lost_at_least if recovery.lost_steps is None else None),
    ):
        if value is not None:
            attributes[f"keepstep.{name}"] = value
    ended_ns = began_ns + max(recovery.took_ns, sum(stage.took_ns for stage in stages))
    is_ok = recovery.outcome == "resumed"
    yield IncidentSpan(
        trace_id, root_id, 0, "keepstep recovery", began_ns, ended_ns, attributes, is_ok
    )
    at_ns = began_ns
    for place, stage in enumerate(stages):
        until_ns = at_ns + stage.took_ns
        told: dict[str, Value] = {
            "keepstep.link": stage.link,
            "keepstep.kind": stage.event.kind,
            "keepstep.who": ", ".join(stage.who),
            "keepstep.why": stage.event.why,
        }
        span_id = _bits(64, job, str(began_ns), str(place))
        yield IncidentSpan(trace_id, span_id, root_id, stage.name, at_ns, until_ns, told)
        at_ns = until_ns


def _bits(count: int, *words: str) -> int:
    """Never 0, which tracing takes for no id."""
    digest = hashlib.sha256("\0".join(words).encode()).digest()
    return int.from_bytes(digest[: count // 8], "big") or 1
