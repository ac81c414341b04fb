"""Record: what a drill tells of a real job, drawn into what the simulation needs to do the same.

Comes in: the job's shape, the faults and when each was done, a stopwatch's lines (every phase of every rank), when what was committed, and
the journals of all nodes. Goes out: the strikes of the schedule, the pace, the plan of a simulated job, and how the real one recovered.
Pure; fits nothing: every duration is a sample of what was measured, none is chosen by what comes of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple

from keepstep.errors import ConfigError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase
from keepstep.model.topology import Copies, parse_policy
from keepstep.model.units import GIB, MS_NS, S_NS
from keepstep.sim.protocol.network import Wires
from keepstep.sim.protocol.pace import Aftermath, Pace
from keepstep.sim.protocol.plan import Plan
from keepstep.sim.protocol.schedule import Strike

BY_THE_CAPTURE = (Phase.CAPTURE, Phase.SEAL)  # who strikes there holds the capture up
QUANTILES = 20
PERSIST_ACTS = 3
TOLD: tuple[str, ...] = (
    "resumed",
    "fetched",
    "rank-exited",
    "ranks-restarted",
    "rank-joined",
    "keeper-started",
    "agent-restarted",
    "job-started",
)
TOLD += ("persist-started", "persisted", "loaded", "policy")
READ = ("step", "source", "lost_steps", "epoch", "rank", "pid", "pids", "duration_ns", "policy")


class Begun(NamedTuple):
    """A line of the stopwatch: a phase began. Of `step` and `backward` also what the page said: `capture_ns` is that of `captured_step`."""

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
    """`shape`: nodes, nproc, policy, store, persist_every, link_dead_s, grace_s, step_ms. `faults`: as a drill's plan has them. `notes`:
    what became of each. `committed`: epoch, step, time. `journals`: each node's."""

    shape: dict[str, Any]
    faults: Sequence[dict[str, Any]]
    notes: Sequence[dict[str, Any]]
    phases: Sequence[Begun]
    committed: Sequence[Sequence[int]]
    journals: Sequence[Sequence[Event]]

    def to_json(self) -> dict[str, Any]:
        """Only what is read here: of an event [time, kind, data], of a note [time, fault, what]."""
        return {
            **{"shape": self.shape, "faults": list(self.faults), "committed": [list(c) for c in self.committed]},
            "notes": [[n["mono_ns"], n["fault"], n["what"]] for n in self.notes],
            "phases": [list(begun) for begun in self.phases],
            "journals": [[[e.mono_ns, e.kind, _read(e.data)] for e in journal if e.kind in TOLD] for journal in self.journals],
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Record:
        journals = [[Event(at_ns, at_ns, "", kind, "", data) for at_ns, kind, data in journal] for journal in told["journals"]]
        notes = [{"mono_ns": at_ns, "fault": fault, "what": what} for at_ns, fault, what in told["notes"]]
        return cls(told["shape"], told["faults"], notes, [Begun(*begun) for begun in told["phases"]], told["committed"], journals)


def _read(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key in READ}


@dataclass(frozen=True, slots=True)
class Resumption:
    """All ranks go on. `strikes`: how many there had been by then. `source`: own memory, copies, parity, store, fresh."""

    strikes: int
    step: int
    source: str
    lost_steps: int


@dataclass(frozen=True)
class Drawn:
    """`settled`: all resumed once more after the last strike. `seen`: without the first start. `policy`: what `auto` has become."""

    plan: Plan
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
    policy = next((e.data["policy"] for e in reversed(events) if e.kind == "policy"), record.shape["policy"])
    done, left_out = _done(record, resumed[0].mono_ns if resumed else 0)
    whens = [at_ns for at_ns, _ in done]
    seen = []
    for before, event in pairwise(resumed):
        fetched = any(e.kind == "fetched" and before.mono_ns < e.mono_ns < event.mono_ns for e in events)
        source = source_of(policy, event.data["source"], fetched)
        seen.append(Resumption(bisect_right(whens, event.mono_ns), event.data["step"], source, event.data["lost_steps"]))
    pace = _pace(record, events)
    settled = bool(whens) and bool(resumed) and resumed[-1].mono_ns > whens[-1]
    return Drawn(_plan(record, events, pace), _strikes(record, done, events), settled, tuple(seen), policy, left_out)


# -- the schedule


def _done(record: Record, first_ns: int) -> tuple[list[tuple[int, dict[str, Any]]], tuple[str, ...]]:
    """(when, fault) of all that were done after all had begun, as they came; what was not."""
    found, left_out = [], []
    for number, fault in enumerate(record.faults):
        notes = {n["what"]: n for n in record.notes if n["fault"] == number}
        if "did" not in notes or notes["did"]["mono_ns"] < first_ns:
            left_out.append(f"{fault['kind']} at step {fault['step']}")
            continue
        # A lab takes a node from the network before it ends its processes: the first of it counts.
        at_ns = notes["about to" if fault["nodes"] else "did"]["mono_ns"]
        for_ns = int((fault["for_ms"] or 0) * MS_NS)
        if "ended" in notes:
            for_ns = notes["ended"]["mono_ns"] - at_ns
        found.append((at_ns, {**fault, "for_ns": for_ns}))
    return sorted(found, key=lambda f: f[0]), tuple(left_out)


def _strikes(record: Record, done: Sequence[tuple[int, dict[str, Any]]], events: Sequence[Event]) -> tuple[Strike, ...]:
    resumed = [e for e in events if e.kind == "resumed"]
    by_rank: dict[int, list[Begun]] = defaultdict(list)
    for line in record.phases:
        by_rank[line.rank].append(line)
    strikes, before_ns = [], 0
    for number, (at_ns, fault) in enumerate(done):
        until_ns = done[number + 1][0] if number + 1 < len(done) else events[-1].mono_ns + 1
        aftermath = _aftermath([(at_ns, fault)], [e for e in events if at_ns < e.mono_ns < until_ns])
        rank = fault["nodes"][0] * record.shape["nproc"] if fault["nodes"] else fault["rank"]
        newest = max((e for e in resumed if e.mono_ns < at_ns), key=lambda e: e.mono_ns)
        last = max((p for p in by_rank[rank] if p.mono_ns <= at_ns), key=lambda p: p.mono_ns, default=None)
        has_resumed = newest.mono_ns > before_ns
        what = (fault["kind"], rank, tuple(fault["nodes"]), has_resumed)
        if last is None or last.mono_ns < max(before_ns, newest.mono_ns):
            strikes.append(Strike(*what, None, None, at_ns - max(before_ns, newest.mono_ns), fault["for_ns"], at_ns - before_ns, aftermath))
        else:
            phase = Phase[last.phase.upper()]
            held_up = phase in BY_THE_CAPTURE and (fault["kind"] == "torn" or fault["phase"] == last.phase)
            step = None if phase is Phase.RESTORE else last.step - newest.data["step"]
            strikes.append(
                Strike(*what, phase, step, 0 if held_up else at_ns - last.mono_ns, fault["for_ns"], at_ns - before_ns, aftermath)
            )
        before_ns = at_ns
    return tuple(strikes)


# -- how long things took


def _sample(values: Iterable[float], least: int = 1) -> tuple[int, ...]:
    """Few enough to be looked at, each as likely as any other."""
    found = sorted(max(least, int(v)) for v in values)
    return tuple(found) if len(found) <= QUANTILES else tuple(int(q) for q in quantiles(found, n=QUANTILES + 1, method="inclusive"))


def _pace(record: Record, events: Sequence[Event]) -> Pace:
    # By rank, process and resumption: when it entered a phase of a step. A step that is done again is another one.
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
    entered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # when each rank entered its backward pass and left it
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
                    parts["seal"].append(begun["capture", step] + capture_ns[whose][step] - begun["seal", step])
    rest_ns = int(record.shape["step_ms"] * MS_NS / 3)  # how long the drill's job sleeps after its collectives
    world = record.shape["nodes"] * record.shape["nproc"]
    parts["collective"] = [min(u for _, u in e) - max(b for b, _ in e) - rest_ns for e in entered.values() if len(e) == world]
    if not all(parts[name] for name in ("forward", "collective", "update", "stall", "capture", "copy", "seal")):
        raise ConfigError(
            f"expected the record of a job that trained, found {len(record.phases)} phases and no step that all {world} ranks did"
        )
    samples = {f"{name}_ns": _sample(values, -S_NS if name == "capture" else 1) for name, values in parts.items()}
    did_ns = [(n["mono_ns"], record.faults[n["fault"]]) for n in record.notes if n["what"] == "did"]
    return Pace(
        **samples,
        rest_ns=(rest_ns,),
        bytes_per_s=_rates(record),
        persist_every_steps=record.shape["persist_every"],
        failures=_aftermath(did_ns, events),
    )


def _aftermath(did: Sequence[tuple[int, dict[str, Any]]], events: Sequence[Event]) -> Aftermath:
    """Of these faults, from events that followed them."""

    def until(kinds: Sequence[str], answer: str, fits: Callable[[Event, dict[str, Any]], bool] = lambda e, f: True) -> tuple[int, ...]:
        took = []
        for at_ns, fault in did:
            if fault["kind"] in kinds:
                took += [e.mono_ns - at_ns for e in events if e.kind == answer and e.mono_ns > at_ns and fits(e, fault)][:1]
        return _sample(took)

    joined = {e.data["pid"]: e.mono_ns for e in reversed(events) if e.kind == "rank-joined"}
    starts = [joined[pid] - e.mono_ns for e in events if e.kind == "ranks-restarted" for pid in e.data["pids"] if pid in joined]
    return Aftermath(
        notice_ns=until(("kill", "torn", "flip"), "rank-exited", lambda e, f: bool(e.data["rank"] == f["rank"])),
        rank_start_ns=_sample(s for s in starts if s > 0),
        keeper_start_ns=until(("keeper-kill",), "keeper-started"),
        agent_start_ns=until(("agent-kill",), "agent-restarted"),
        replace_ns=until(("kill-node",), "job-started"),
    )


def _rates(record: Record) -> tuple[int, ...]:
    """Of copies: a node's snapshots, and how long it took from the last one's seal, or the commit before, until all was committed."""
    if record.shape["nodes"] == 1:
        return ()
    epochs = sorted((e.mono_ns, e.data["epoch"]) for journal in record.journals for e in journal if e.kind == "resumed")
    sealed: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in record.phases:
        if line.phase == "seal":
            number = bisect_right(epochs, (line.mono_ns, 1 << 62)) - 1
            sealed[epochs[number][1], line.step].append(line.mono_ns)
    whole_ns = {stamp: max(at) for stamp, at in sealed.items() if len(at) == record.shape["nodes"] * record.shape["nproc"]}
    # What a failure keeps from being committed says nothing about links, but that it had not been committed until then.
    disturbed = [n["mono_ns"] for n in record.notes]
    disturbed += [n["mono_ns"] + int((record.faults[n["fault"]]["for_ms"] or 0) * MS_NS) for n in record.notes]
    disturbed += [e.mono_ns for journal in record.journals for e in journal if e.kind == "keeper-started"]
    disturbed.sort()
    took, cut_off, before_ns = [], [], 0
    for epoch, step, at_ns in record.committed:  # one generation after the other: it waits for the one before
        since_ns = max(before_ns, whole_ns.get((epoch, step), at_ns))
        if since_ns < at_ns and bisect_right(disturbed, since_ns) == bisect_right(disturbed, at_ns):
            took.append(at_ns - since_ns)
        before_ns = at_ns
    for resumed_ns, epoch in epochs:  # what its first fault cut off
        number = bisect_right(disturbed, resumed_ns)
        fault_ns = disturbed[number] if number < len(disturbed) else 0
        step, at_ns = max(((s, ns) for e, s, ns in record.committed if e == epoch and ns < fault_ns), default=(-1, 0))
        following_ns = min((ns for (e, s), ns in whole_ns.items() if e == epoch and s > step), default=fault_ns)
        if max(at_ns, following_ns) < fault_ns:
            cut_off.append(fault_ns - max(at_ns, following_ns))
    nbytes = record.shape["nproc"] * _payload_bytes(record)
    return tuple(nbytes * S_NS // max(MS_NS, ns) for ns in spread(took, cut_off))


def spread(took: Sequence[int], cut_off: Sequence[int]) -> tuple[int, ...]:
    """Quantiles of durations of which some were cut off, and would have been longer (Kaplan and Meier, 1958): to leave these out would
    favour the short ones."""
    found: list[int] = []
    at_risk, left = len(took) + len(cut_off), 1.0
    for duration, is_cut in sorted([*((d, False) for d in took), *((d, True) for d in cut_off)]):
        ended = 0.0 if is_cut else left / at_risk
        left, at_risk = left - ended, at_risk - 1
        while took and len(found) < QUANTILES and 1 - left >= (len(found) + 0.5) / QUANTILES - 1e-9:
            found.append(duration)
    return (*found, *[max((*took, *cut_off))] * (QUANTILES - len(found))) if took else ()


def _step_ns(pace: Pace) -> int:
    return int(sum(median(part) for part in (pace.forward_ns, pace.collective_ns, pace.rest_ns, pace.update_ns, pace.stall_ns)))


def _payload_bytes(record: Record) -> int:
    return max((line.payload_bytes for line in record.phases), default=0)


def _plan(record: Record, events: Sequence[Event], pace: Pace) -> Plan:
    shape = record.shape
    began = {e.data["step"]: e.mono_ns for e in events if e.kind == "persist-started"}
    persisted = [e.mono_ns - began[e.data["step"]] for e in events if e.kind == "persisted" and e.data["step"] in began]
    loaded = [e.data["duration_ns"] for e in events if e.kind == "loaded"]
    return Plan(
        nodes=shape["nodes"],
        ranks_per_node=shape["nproc"],
        steps=1 << 31,
        nbytes=_payload_bytes(record),
        policy=shape["policy"],
        store=shape["store"],
        persist_every_steps=0,
        grace_s=shape["grace_s"],
        link_dead_s=shape["link_dead_s"],
        tears=False,
        checks=False,
        budget_bytes=4 * GIB,
        wires=Wires(checks=False, halves=0.0, dials_wait=True, measured_bytes_per_s=pace.bytes_per_s, holds_ns=_step_ns(pace)),
        load_ns=max(2, 2 * int(median(loaded))) if loaded else 2 * MS_NS,
        store_act_ns=max(2, 2 * int(median(persisted)) // PERSIST_ACTS) if persisted else 200 * MS_NS,
        pace=pace,
    )
