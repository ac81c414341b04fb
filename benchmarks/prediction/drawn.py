"""Drawn: the schedule of a real job's faults, the plan of a simulated job that is to meet them, and
how the real one recovered.

Comes in: a `Record`. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.prediction.measured import aftermath_of, pace_of, payload_bytes
from benchmarks.prediction.measured_plan import MeasuredPlan
from benchmarks.prediction.pace import Pace
from benchmarks.prediction.record import Begun, Record
from benchmarks.prediction.schedule import Strike
from keepstep.core.economics.journal_kinds import loss_of
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase
from keepstep.model.topology import Copies, parse_policy
from keepstep.model.units import GIB, MS_NS
from keepstep.sim.protocol.wire.network import Wires
from keepstep.testing.faults import STORE_KINDS

BY_THE_CAPTURE = (Phase.CAPTURE, Phase.SEAL)  # who strikes there holds the capture up
# What a simulated checkpoint takes: so many waits, each of half a plan's `store_act_ns` on average.
PERSIST_WAITS = 12


@dataclass(frozen=True, slots=True)
class Resumption:
    """All ranks go on. `strikes`: how many there had been by then. `source`: own memory, copies,
    parity, store, fresh."""

    strikes: int
    step: int
    source: str
    lost_steps: int


@dataclass(frozen=True)
class Drawn:
    """`settled`: all resumed once more after the last strike. `seen`: without the first start.
    `policy`: what `auto` has become."""

    plan: MeasuredPlan
    strikes: tuple[Strike, ...]
    settled: bool
    seen: tuple[Resumption, ...]
    policy: str
    left_out: tuple[str, ...]


def source_of(policy: str, source: str, was_fetched: bool) -> str:
    """In the words of a comparison."""
    if source != "memory":
        return source
    if not was_fetched:
        return "own memory"
    return "copies" if isinstance(parse_policy(policy), Copies) else "parity"


def draw(record: Record) -> Drawn:
    """Raises ConfigError when the record holds no finished step."""
    events = sorted((e for journal in record.journals for e in journal), key=lambda e: e.mono_ns)
    resumed = [e for e in events if e.kind == "resumed"]
    policy = next(
        (e.data["policy"] for e in reversed(events) if e.kind == "policy"), record.shape["policy"]
    )
    done, left_out = _done(record, resumed[0].mono_ns if resumed else 0)
    whens = [at_ns for at_ns, _ in done]
    seen = []
    for before, event in pairwise(resumed):
        fetched = any(
            e.kind == "fetched" and before.mono_ns < e.mono_ns < event.mono_ns for e in events
        )
        source = source_of(policy, event.data["source"], fetched)
        seen.append(
            Resumption(
                bisect_right(whens, event.mono_ns),
                event.data["step"],
                source,
                loss_of(event)[1],
            )
        )
    pace = pace_of(record, events)
    settled = bool(whens) and bool(resumed) and resumed[-1].mono_ns > whens[-1]
    return Drawn(
        _plan(record, events, pace),
        _strikes(record, done, events),
        settled,
        tuple(seen),
        policy,
        left_out,
    )


# -- the schedule


def _done(
    record: Record, first_ns: int
) -> tuple[list[tuple[int, dict[str, Any]]], tuple[str, ...]]:
    """(when, fault) of all that were done after all had begun, as they came; what was not."""
    found, left_out = [], []
    for number, fault in enumerate(record.faults):
        notes = {n["what"]: n for n in record.notes if n["fault"] == number}
        is_rough = fault["kind"] in STORE_KINDS  # costs no step, and is not simulated
        if is_rough or "did" not in notes or notes["did"]["mono_ns"] < first_ns:
            left_out.append(f"{fault['kind']} at step {fault['step']}")
            continue
        # A lab takes a node from the network before it ends its processes: the first of it counts.
        at_ns = notes["about to" if fault["nodes"] else "did"]["mono_ns"]
        for_ns = int((fault["for_ms"] or 0) * MS_NS)
        if "ended" in notes:
            for_ns = notes["ended"]["mono_ns"] - at_ns
        found.append((at_ns, {**fault, "for_ns": for_ns}))
    return sorted(found, key=lambda f: f[0]), tuple(left_out)


def _strikes(
    record: Record, done: Sequence[tuple[int, dict[str, Any]]], events: Sequence[Event]
) -> tuple[Strike, ...]:
    resumed = [e for e in events if e.kind == "resumed"]
    by_rank: dict[int, list[Begun]] = defaultdict(list)
    for line in record.phases:
        by_rank[line.rank].append(line)
    strikes, before_ns = [], 0
    for number, (at_ns, fault) in enumerate(done):
        until_ns = done[number + 1][0] if number + 1 < len(done) else events[-1].mono_ns + 1
        aftermath = aftermath_of(
            [(at_ns, fault)], [e for e in events if at_ns < e.mono_ns < until_ns]
        )
        rank = fault["nodes"][0] * record.shape["nproc"] if fault["nodes"] else fault["rank"]
        newest = max((e for e in resumed if e.mono_ns < at_ns), key=lambda e: e.mono_ns)
        last = max(
            (p for p in by_rank[rank] if p.mono_ns <= at_ns), key=lambda p: p.mono_ns, default=None
        )
        has_resumed = newest.mono_ns > before_ns
        what = (fault["kind"], rank, tuple(fault["nodes"]), has_resumed)
        if last is None or last.mono_ns < max(before_ns, newest.mono_ns):
            strikes.append(
                Strike(
                    *what,
                    None,
                    None,
                    at_ns - max(before_ns, newest.mono_ns),
                    fault["for_ns"],
                    at_ns - before_ns,
                    aftermath,
                )
            )
        else:
            phase = Phase[last.phase.upper()]
            held_up = phase in BY_THE_CAPTURE and (
                fault["kind"] == "torn" or fault["phase"] == last.phase
            )
            step = None if phase is Phase.RESTORE else last.step - newest.data["step"]
            strikes.append(
                Strike(
                    *what,
                    phase,
                    step,
                    0 if held_up else at_ns - last.mono_ns,
                    fault["for_ns"],
                    at_ns - before_ns,
                    aftermath,
                )
            )
        before_ns = at_ns
    return tuple(strikes)


# -- the plan


def _step_ns(pace: Pace) -> int:
    return int(
        sum(
            median(part)
            for part in (
                pace.forward_ns,
                pace.collective_ns,
                pace.rest_ns,
                pace.update_ns,
                pace.stall_ns,
            )
        )
    )


def _plan(record: Record, events: Sequence[Event], pace: Pace) -> MeasuredPlan:
    shape = record.shape
    began = {e.data["step"]: e.mono_ns for e in events if e.kind == "persist-started"}
    persisted = [
        e.mono_ns - began[e.data["step"]]
        for e in events
        if e.kind == "persisted" and e.data["step"] in began
    ]
    loaded = [e.data["duration_ns"] for e in events if e.kind == "loaded"]
    return MeasuredPlan(
        nodes=shape["nodes"],
        ranks_per_node=shape["nproc"],
        steps=1 << 31,
        nbytes=payload_bytes(record),
        policy=shape["policy"],
        store=shape["store"],
        persist_every_steps=0,
        grace_s=shape["grace_s"],
        link_dead_s=shape["link_dead_s"],
        asks_every_steps=pace.persist_every_steps if shape["store"] else 0,
        names_phases=True,
        checks=False,
        lost_pokes=0.0,
        budget_bytes=4 * GIB,
        wires=Wires(
            checks=False,
            halves=0.0,
            dials_wait=True,
            measured_bytes_per_s=pace.bytes_per_s,
            holds_ns=_step_ns(pace),
        ),
        act_ns=1,
        load_ns=int(median(loaded)) if loaded else MS_NS,
        store_act_ns=max(2, 2 * int(median(persisted)) // PERSIST_WAITS)
        if persisted
        else 200 * MS_NS,
        pace=pace,
    )
