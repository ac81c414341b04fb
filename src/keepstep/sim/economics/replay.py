"""Replay: the failures of a real job, as its journal tells them, so that other policies can meet
the same ones.

Comes in: the events of one job's journals. Goes out: the failures on a clock that begins with the
first step and stands still while nobody meant to train (between two launches), and what was
measured beside them: step, detection, recovery, steps done again.

What a journal tells of a failure is its scope, as far as it goes: a node that was missed was lost
with its memory, everything else left the memory where it was. Where time went is
`core/economics/goodput.py`'s to say, with all that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keepstep.core.economics.goodput import Account, Ledger
from keepstep.core.economics.journal_kinds import number
from keepstep.errors import ConfigError
from keepstep.model.cluster import Cluster, FailureKind, Scope
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.sim.economics.montecarlo import DrawnFailure

RANK = FailureKind("a rank of the journal", Scope.RANK, 0.0)
NODE = FailureKind("a node of the journal", Scope.NODE, 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """`seconds`: of the job, without what lay before its first step and between launches.
    `detection_s`, `recovery_s`: of a failure, in the mean. `redone_steps`: completed steps that
    were done again."""

    failures: tuple[DrawnFailure, ...]
    seconds: float
    nodes: int
    ranks: int
    iteration_s: float
    detection_s: float
    recovery_s: float
    redone_steps: int
    effective_ratio: float

    def cluster(self, like: Cluster) -> Cluster:
        """The machines of `like`, with this job's size and what was measured of it."""
        measured = replace(
            like,
            nodes=self.nodes,
            gpus_per_node=-(-self.ranks // self.nodes),
            state_bytes=like.node_bytes * self.nodes,
            iteration_s=self.iteration_s,
            failures=(),
            nodes_per_rack=0,
        )
        return replace(
            measured,
            detection_s=self.detection_s,
            restart_s=self.recovery_s,
            in_process_restart_s=self.recovery_s,
        )


def replay(events: Iterable[Event]) -> Replay:
    """Of events in any order. Raises ConfigError when they tell of no finished step."""
    ledger = Ledger()
    found: list[DrawnFailure] = []
    lost_nodes: list[tuple[int, int]] = []
    nodes, ranks, known = 1, 1, 0
    ordered = sorted(events, key=lambda e: ledger.axis.place(e.wall_ns, e.mono_ns, e.boot))
    for event in ordered:
        at_ns = ledger.axis.place(event.wall_ns, event.mono_ns, event.boot)
        if event.kind == "attempt-formed":
            nodes, ranks = len(event.data["hosts"]), number(event.data.get("world_size")) or ranks
        elif event.kind == "rank-joined":
            ranks = max(ranks, (number(event.data.get("rank")) or 0) + 1)
        elif event.kind == "node-lost":
            lost_nodes.append((at_ns, number(event.data.get("node")) or 0))
        ledger.add(event)
        over = ledger.recovered()
        for incident in over[known:]:
            gone = next(
                (n for when_ns, n in lost_nodes if incident.began_ns <= when_ns <= at_ns), None
            )
            began_s = max(
                0.0, _spent_s(ledger.account(now_ns=at_ns)) - (at_ns - incident.began_ns) / S_NS
            )
            found.append(DrawnFailure(began_s, RANK if gone is None else NODE, gone or 0))
        known = len(over)
    if not ledger.step_ns:
        raise ConfigError(
            f"--replay: expected the journal of a job that trained, found {len(ordered)} "
            "events and no finished step"
        )
    return _told(ledger, found, nodes, ranks)


def _told(ledger: Ledger, failures: Sequence[DrawnFailure], nodes: int, ranks: int) -> Replay:
    account, count = ledger.account(), max(1, len(failures))
    seconds = _spent_s(account)
    return Replay(
        failures=tuple(sorted(failures, key=lambda f: f.at_s)),
        seconds=seconds,
        nodes=nodes,
        ranks=ranks,
        iteration_s=ledger.step_ns / S_NS,
        detection_s=account.detecting_ns / count / S_NS,
        recovery_s=account.recovering_ns / count / S_NS,
        redone_steps=sum(incident.lost_steps for incident in ledger.recovered()),
        effective_ratio=account.productive_ns / S_NS / seconds,
    )


def _spent_s(account: Account) -> float:
    """What counts as the job's time: training, and being kept from it."""
    return (account.wall_ns - account.idle_ns - account.starting_ns) / S_NS
