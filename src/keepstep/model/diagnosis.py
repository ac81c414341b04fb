"""Diagnoses: what is seen of a rank from outside, and what follows from it.

Values only. `edge/probes/` sees, `core/detection/progress.py` puts together what was seen over
time, `core/detection/diagnosis.py` decides. Durations, never times of day: nodes need not agree
about the clock to compute the same verdict from the same evidence.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from keepstep.model.decoding import a_list, a_record, from_json
from keepstep.model.snapshot import Phase

State = Literal[
    "running", "asleep", "stopped", "frozen", "uninterruptible", "traced", "gone", "unknown"
]


class Strength(IntEnum):
    """How far evidence reaches, the weakest first: a stronger kind is never outvoted by many weaker
    ones."""

    TEXT = 1  # what a program says about itself or others
    STATISTICS = 2  # unlike its peers
    ABSENCE = 4  # a record is missing or behind where the others have one
    FACT = 5  # the operating system says so


class ProcessSample(NamedTuple):
    """One look at a process. `cpu_ns`: all its threads', since it began. `threads` 0: it is
    gone."""

    state: State
    cpu_ns: int
    threads: int
    wchan: str = ""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One look at everything a rank has started, data loaders included: CPU time and bytes moved,
    since each began."""

    cpu_ns: int
    io_bytes: int


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a rank's threads are: `text` for people, `digest` the main thread's frames; `waits`:
    for other ranks, None: unknown."""

    text: str
    digest: str = ""
    waits: bool | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one rank, by its own node.

    collective: number of the last collective it entered; 0 when nobody counts. counted: how many in
        the newest `counted_steps` steps.
    stalled_ns: since it told of anything new. quiet_ns: since it told of anything new, used the
        processor, or moved bytes.
    stopped_ns: for so long seen stopped or frozen, at every look.
    late_ns, asleep_ns, busy_ns: how long its phase may stall before it is suspected, and before it
        is called hung, quiet or not.
    """

    rank: int
    node: int
    phase: Phase
    has_page: bool
    completed_step: int
    step: int
    collective: int
    state: State
    wchan: str
    cpu_ratio: float
    stalled_ns: int
    quiet_ns: int
    stopped_ns: int
    late_ns: int
    asleep_ns: int
    busy_ns: int
    stack: str = ""
    waits: bool | None = None
    counted_steps: int = 0
    counted: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "phase": int(self.phase)}


def evidence_to_text(evidence: list[Evidence]) -> str:
    """What a node posts for the others."""
    return json.dumps([e.to_json() for e in evidence], separators=(",", ":"))


def evidence_from_text(text: str) -> list[Evidence]:
    """The inverse. Raises ValueError on anything else."""
    try:
        return [a_record(Evidence, entry) for entry in a_list(from_json(text))] if text else []
    except ValueError as error:
        raise ValueError(f"not evidence: {text[:80]!r}") from error


ExitKind = Literal[
    "crash", "oom", "device", "no-state", "premature-exit", "preempted", "ended", "unknown"
]
Kind = Literal[ExitKind, "hang", "slow", "stopped", "deadlocked", "unkillable"]

# The culprit will not go on by itself: kill it. `unkillable` too, though it may take more than a
# signal.
DEADLY = frozenset({"hang", "stopped", "deadlocked", "unkillable"})


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What happened, to whom, and how that is known. `culprit` None: nobody in particular, and
    `scope` is then `job`.

    stalled_ns: for how long nothing had gone on when this was found.
    `state` is the culprit's (`stopped`, `frozen`, `asleep`, `spinning`, `uninterruptible`), of an
    exit its signal or code in words.
    """

    kind: Kind
    scope: Literal["rank", "job"]
    culprit: int | None
    node: int | None
    state: str
    strength: Strength
    why: str
    stalled_ns: int = 0

    @property
    def is_deadly(self) -> bool:
        return self.kind in DEADLY
