"""Measured: how long things took in a real job, from its record.

Goes out: the pace of a simulated one. Pure; fits nothing: every duration is a sample of what was
measured, none is chosen by what comes of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import quantiles
from typing import Any

from benchmarks.prediction.pace import Aftermath, Pace
from benchmarks.prediction.record import Record
from keepstep.errors import ConfigError
from keepstep.model.events import Event
from keepstep.model.units import MS_NS, S_NS

QUANTILES = 20


def _sample(values: Iterable[float], least: int = 1) -> tuple[int, ...]:
    """Few enough to be looked at, each as likely as any other."""
    found = sorted(max(least, int(v)) for v in values)
    return (
        tuple(found)
        if len(found) <= QUANTILES
        else tuple(int(q) for q in quantiles(found, n=QUANTILES + 1, method="inclusive"))
    )


def pace_of(record: Record, events: Sequence[Event]) -> Pace:
    # By rank, process and resumption: when it entered a phase of a step. A step that is done again
    # is another one.
    at: dict[tuple[int, int, int], dict[tuple[str, int], int]] = defaultdict(dict)
    stall_ns: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    capture_ns: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    resumed = [e.mono_ns for e in events if e.kind == "resumed"]
    for line in record.phases:
        whose = (line.rank, line.pid, bisect_right(resumed, line.mono_ns))
        at[whose][line.phase, line.step] = line.mono_ns
        if line.phase == "step":
            stall_ns[whose][line.step] = line.stall_ns
        elif line.phase == "backward" and line.captured_step == line.step - 1:
            capture_ns[whose][line.captured_step] = line.capture_ns
    parts: dict[str, list[float]] = defaultdict(list)
    # when each rank entered its backward pass and left it
    entered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for whose, begun in at.items():
        for (phase, step), begun_ns in begun.items():
            if phase == "step" and ("backward", step) in begun:
                parts["forward"].append(begun["backward", step] - begun_ns)
                if ("update", step) in begun:
                    entered[whose[2], step].append((begun["backward", step], begun["update", step]))
            following_ns = begun.get(("step", step + 1))
            if phase != "update" or following_ns is None:
                continue
            stalled_ns = stall_ns[whose][step + 1]
            parts["update"].append(following_ns - stalled_ns - begun_ns)
            parts["stall"].append(stalled_ns)
            if ("capture", step) in begun and ("seal", step) in begun:
                parts["capture"].append(begun["capture", step] - following_ns)
                parts["copy"].append(begun["seal", step] - begun["capture", step])
                if step in capture_ns[whose]:
                    parts["seal"].append(
                        begun["capture", step] + capture_ns[whose][step] - begun["seal", step]
                    )
    # how long the drill's job sleeps after its collectives
    rest_ns = int(record.shape["step_ms"] * MS_NS / 3)
    world = record.shape["nodes"] * record.shape["nproc"]
    parts["collective"] = [
        min(u for _, u in e) - max(b for b, _ in e) - rest_ns
        for e in entered.values()
        if len(e) == world
    ]
    if not all(
        parts[name]
        for name in ("forward", "collective", "update", "stall", "capture", "copy", "seal")
    ):
        raise ConfigError(
            f"expected the record of a job that trained, found {len(record.phases)} phases "
            f"and no step that all {world} ranks did"
        )
    samples = {
        f"{name}_ns": _sample(values, -S_NS if name == "capture" else 1)
        for name, values in parts.items()
    }
    did_ns = [(n["mono_ns"], record.faults[n["fault"]]) for n in record.notes if n["what"] == "did"]
    return Pace(
        **samples,
        rest_ns=(rest_ns,),
        bytes_per_s=_rates(record),
        persist_every_steps=record.shape["persist_every"],
        failures=aftermath_of(did_ns, events),
    )


def aftermath_of(did: Sequence[tuple[int, dict[str, Any]]], events: Sequence[Event]) -> Aftermath:
    """Of these faults, from events that followed them."""

    def until(
        kinds: Sequence[str],
        answer: str,
        fits: Callable[[Event, dict[str, Any]], bool] = lambda e, f: True,
    ) -> tuple[int, ...]:
        took = []
        for at_ns, fault in did:
            if fault["kind"] in kinds:
                took += [
                    e.mono_ns - at_ns
                    for e in events
                    if e.kind == answer and e.mono_ns > at_ns and fits(e, fault)
                ][:1]
        return _sample(took)

    joined = {e.data["pid"]: e.mono_ns for e in reversed(events) if e.kind == "rank-joined"}
    starts = [
        joined[pid] - e.mono_ns
        for e in events
        if e.kind == "ranks-restarted"
        for pid in e.data["pids"]
        if pid in joined
    ]
    return Aftermath(
        notice_ns=until(
            ("kill", "torn", "flip"), "rank-exited", lambda e, f: bool(e.data["rank"] == f["rank"])
        ),
        rank_start_ns=_sample(s for s in starts if s > 0),
        keeper_start_ns=until(("keeper-kill",), "keeper-started"),
        agent_start_ns=until(("agent-kill",), "agent-restarted"),
        replace_ns=until(("kill-node",), "job-started"),
    )


def _rates(record: Record) -> tuple[int, ...]:
    """Of copies: a node's snapshots, and how long it took from the last one's seal, or the commit
    before, until all was committed."""
    if record.shape["nodes"] == 1:
        return ()
    epochs = sorted(
        (e.mono_ns, e.data["epoch"])
        for journal in record.journals
        for e in journal
        if e.kind == "resumed"
    )
    sealed: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in record.phases:
        if line.phase == "seal":
            number = bisect_right(epochs, (line.mono_ns, 1 << 62)) - 1
            sealed[epochs[number][1], line.step].append(line.mono_ns)
    whole_ns = {
        stamp: max(at)
        for stamp, at in sealed.items()
        if len(at) == record.shape["nodes"] * record.shape["nproc"]
    }
    # What a failure keeps from being committed says nothing about links, but that it had not been
    # committed until then.
    disturbed = [n["mono_ns"] for n in record.notes]
    disturbed += [
        n["mono_ns"] + int((record.faults[n["fault"]]["for_ms"] or 0) * MS_NS) for n in record.notes
    ]
    disturbed += [
        e.mono_ns for journal in record.journals for e in journal if e.kind == "keeper-started"
    ]
    disturbed.sort()
    took, cut_off, before_ns = [], [], 0
    # one generation after the other: it waits for the one before
    for epoch, step, at_ns in record.committed:
        since_ns = max(before_ns, whole_ns.get((epoch, step), at_ns))
        if since_ns < at_ns and bisect_right(disturbed, since_ns) == bisect_right(disturbed, at_ns):
            took.append(at_ns - since_ns)
        before_ns = at_ns
    for resumed_ns, epoch in epochs:  # what its first fault cut off
        number = bisect_right(disturbed, resumed_ns)
        fault_ns = disturbed[number] if number < len(disturbed) else 0
        step, at_ns = max(
            ((s, ns) for e, s, ns in record.committed if e == epoch and ns < fault_ns),
            default=(-1, 0),
        )
        following_ns = min(
            (ns for (e, s), ns in whole_ns.items() if e == epoch and s > step), default=fault_ns
        )
        if max(at_ns, following_ns) < fault_ns:
            cut_off.append(fault_ns - max(at_ns, following_ns))
    nbytes = record.shape["nproc"] * payload_bytes(record)
    return tuple(nbytes * S_NS // max(MS_NS, ns) for ns in spread(took, cut_off))


def spread(took: Sequence[int], cut_off: Sequence[int]) -> tuple[int, ...]:
    """Quantiles of durations of which some were cut off, and would have been longer (Kaplan and
    Meier, 1958): to leave these out would favour the short ones."""
    found: list[int] = []
    at_risk, left = len(took) + len(cut_off), 1.0
    for duration, is_cut in sorted([*((d, False) for d in took), *((d, True) for d in cut_off)]):
        ended = 0.0 if is_cut else left / at_risk
        left, at_risk = left - ended, at_risk - 1
        while took and len(found) < QUANTILES and 1 - left >= (len(found) + 0.5) / QUANTILES - 1e-9:
            found.append(duration)
    return (*found, *[max((*took, *cut_off))] * (QUANTILES - len(found))) if took else ()


def payload_bytes(record: Record) -> int:
    return max((line.payload_bytes for line in record.phases), default=0)
