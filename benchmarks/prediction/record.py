"""Record: what a drill tells of a real job: all that is needed to do the same to a simulated one.

Comes in: a drill and what was seen of it: the job's shape, the faults and what became of each, a
stopwatch's lines (every phase of every rank), when what was committed, and the journals of all
nodes. Goes out: the same, through JSON. Made of it: `measured.py` (how long things took),
`drawn.py` (the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from keepstep.model.events import Event
from keepstep.testing.conductor import GRACE_S, LINK_DEAD_S, Drill
from keepstep.testing.faults import Fault, to_plan
from keepstep.testing.witness import DrillFacts

# What is read of journals.
TOLD = (
    "resumed",
    "fetched",
    "policy",
    "rank-exited",
    "ranks-restarted",
    "rank-joined",
    "keeper-started",
    "agent-restarted",
    "job-started",
    "persist-started",
    "persisted",
    "loaded",
)
READ = (
    "step",
    "source",
    "lost_steps",
    "lost_at_least",
    "epoch",
    "rank",
    "pid",
    "pids",
    "duration_ns",
    "policy",
)


class Begun(NamedTuple):
    """A line of the stopwatch: a phase began. Of `step` and `backward` also what the page said:
    `capture_ns` is that of `captured_step`."""

    rank: int
    pid: int
    phase: str
    step: int
    mono_ns: int
    stall_ns: int = 0
    payload_bytes: int = 0
    captured_step: int = -1
    capture_ns: int = 0


@dataclass(frozen=True)
class Record:
    """`shape`: nodes, nproc, policy, store, persist_every, link_dead_s, grace_s, step_ms. `faults`:
    as a drill's plan has them. `notes`: what became of each. `committed`: epoch, step, time.
    `journals`: each node's."""

    shape: dict[str, Any]
    faults: Sequence[dict[str, Any]]
    notes: Sequence[dict[str, Any]]
    phases: Sequence[Begun]
    committed: Sequence[Sequence[int]]
    journals: Sequence[Sequence[Event]]

    def to_json(self) -> dict[str, Any]:
        """Only what is read here: of an event [time, kind, data], of a note [time, fault, what]."""
        return {
            "shape": self.shape,
            "faults": list(self.faults),
            "committed": [list(c) for c in self.committed],
            "notes": [[n["mono_ns"], n["fault"], n["what"]] for n in self.notes],
            "phases": [list(begun) for begun in self.phases],
            "journals": [
                [[e.mono_ns, e.kind, _read(e.data)] for e in journal if e.kind in TOLD]
                for journal in self.journals
            ],
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Record:
        journals = [
            [Event(at_ns, at_ns, "", kind, "", data) for at_ns, kind, data in journal]
            for journal in told["journals"]
        ]
        notes = [
            {"mono_ns": at_ns, "fault": fault, "what": what} for at_ns, fault, what in told["notes"]
        ]
        return cls(
            told["shape"],
            told["faults"],
            notes,
            [Begun(*begun) for begun in told["phases"]],
            told["committed"],
            journals,
        )


def record_of(order: Drill, faults: Sequence[Fault], facts: DrillFacts) -> Record:
    """All of a drill that is needed to do it again."""
    shape = {
        "nodes": order.nodes,
        "nproc": order.nproc,
        "policy": order.policy,
        "step_ms": order.step_ms,
        "store": any(event.kind == "persist-started" for event in facts.events),
        "persist_every": order.persist_every,
        "link_dead_s": LINK_DEAD_S,
        "grace_s": GRACE_S,
    }
    phases = [Begun(**line) for line in facts.phases]
    return Record(shape, to_plan(faults), facts.notes, phases, facts.committed, [facts.events])


def _read(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key in READ}
