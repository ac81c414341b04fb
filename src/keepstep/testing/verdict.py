"""Verdict: from what a drill saw to what it proves.

Comes in: the faults, the `DrillFacts` of the disturbed run, the hash of the undisturbed one. Goes
out: the report that is printed as JSON. A fault counts as seen only by evidence from outside the
rank that did it: the kernel's word about a process, a journal line of somebody else, bytes in a
slot. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from keepstep.core.economics.journal_kinds import loss_of
from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.survival import out_of_reach
from keepstep.model.events import Event
from keepstep.model.mesh import LEADER
from keepstep.model.topology import Auto, parse_policy, topology
from keepstep.model.units import S_NS
from keepstep.testing.faults import (
    AGENT_KILL,
    BLIND,
    CPU_QUOTA,
    ETCD_RESTART,
    HOT,
    LINK_KINDS,
    LINK_WORDS,
    PART_FAULTS,
    STORE_KINDS,
    Fault,
)
from keepstep.testing.witness import DrillFacts

DAMAGE = ("damaged", "checkpoint-damaged", "restore-failed", "slot-voided")
# what says that numbers of a rank are wrong
WRONG = ("replicas-differ", "gradient-differs", "numbers-judged")
# why copies go slowly over a link that was made so, and who may be named: the node, by what it
# sends or receives, or with another that nobody can tell it from
LINK_CAUSES = {"link-slow": "speed", "link-loss": "loss"}
LINK_SIDES = ("sender", "receiver", "node", "unclear")
LEAST_NAMED_MS = 45_000  # what harms a link for less may be over before anybody can know
NO_SPACE = ("No space left", "ENOSPC")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One restart: the faults that caused it, what it cost.

    `lost_nodes`: those lost since everything was last seen protected; `covered`: whether the policy
    survives that loss.
    """

    causes: tuple[int, ...]
    step: int
    source: str
    lost_steps: int
    took_s: float | None  # from the first cause to the first step done again
    lost_nodes: tuple[int, ...]
    covered: bool
    fetched_bytes: int  # of snapshots, from other nodes


def covers(policy: str, nodes: int, lost: Collection[int]) -> bool:
    """Whether memory survives the loss of these nodes at once, when everything was protected
    before. Raises ConfigError."""
    scheme = parse_policy(policy)
    if not lost or isinstance(scheme, Auto):  # `auto` that has not chosen yet protects nothing
        return not lost
    placement = place(scheme, topology(nodes))
    return not out_of_reach(placement, placement.holders, lost)


def judge(faults: Sequence[Fault], facts: DrillFacts, expected_hash: str | None) -> dict[str, Any]:
    """The report. `proved` says whether everything asked for is true."""
    seen = [_fault_report(n, f, facts) for n, f in enumerate(faults)]
    found = recoveries(faults, facts)
    by_flip = {n for n, f in enumerate(faults) if f.kind == "flip" or f.is_number}
    ordinary = [r for r in found if r.covered and not by_flip.intersection(r.causes)]
    recovered = facts.exit_code == 0 and facts.hash is not None
    bit_equal = recovered and facts.hash == expected_hash
    # what a fault has damaged on purpose is damaged
    half = [] if any(f.kind == "flip" and f.where == "store" for f in faults) else facts.half
    all_seen = all(f["seen"] for f in seen)
    return {
        "proved": bit_equal and all_seen and not facts.left_over and not half,
        "recovered": recovered,
        "bit_equal": bit_equal,
        "lost_steps": [r.lost_steps for r in found],
        # A damaged newest snapshot, or one lost with all who held it, costs what lies between it
        # and the next source, a wrong number the steps until it is found; nothing else more than
        # one step.
        "within_one_step": all(r.lost_steps <= 1 for r in ordinary),
        "software_failures_fetched_bytes": sum(
            r.fetched_bytes for r in ordinary if not r.lost_nodes
        ),
        "faults": seen,
        "hash": facts.hash,
        "expected_hash": expected_hash,
        "restarts": _restarts(facts.events),
        "recovery_s": [r.took_s for r in found],
        "sources": [r.source for r in found],
        "recoveries": [asdict(r) for r in found],
        **facts.counts,
        "left_over": facts.left_over,
        "half_checkpoints": half,
        "job": facts.job,
        "exit_code": facts.exit_code,
    }


def _restarts(events: Sequence[Event]) -> int:
    """How often something was started again. Without an agent, which counts: lives of the rank that
    had most."""
    counted = {e.data["attempt"] for e in events if e.kind == "ranks-restarted"}
    lives = Counter(
        rank
        for rank, _ in {(e.data["rank"], e.data["pid"]) for e in events if e.kind == "rank-joined"}
    )
    return len(counted) or max(lives.values(), default=1) - 1


def _fault_report(number: int, fault: Fault, facts: DrillFacts) -> dict[str, Any]:
    notes = [n for n in facts.notes if n["fault"] == number]
    injected = any(n["what"] == "did" for n in notes)
    at = next((n for n in notes if n["what"] == "about to"), None)
    evidence = _evidence(number, fault, facts, notes) if injected else []
    why_not = facts.cannot.get(number) or "its moment never came"
    return {
        "kind": fault.kind,
        "rank": None if fault.nodes else fault.rank,
        "nodes": list(fault.nodes),
        "step": at["step"] if at else fault.step,
        "phase": at["phase"] if at else fault.phase,
        "asked": str(fault),
        "injected": injected,
        "seen": injected and all(evidence),
        "evidence": "; ".join(filter(None, evidence)) if injected else why_not,
    }


def _evidence(
    number: int, fault: Fault, facts: DrillFacts, notes: list[dict[str, Any]]
) -> list[str]:
    """One sentence for everything that has to be there; an empty one where it is not."""
    told = {key: value for note in notes for key, value in note.items()}
    since_ns = int(notes[0]["mono_ns"])
    after = [e for e in facts.events if e.mono_ns > since_ns]
    sighted = facts.sightings.get(number, [])

    def saw(words: str) -> str:
        return next((s for s in sighted if words in s), "")

    if fault.kind in LINK_KINDS:
        return [saw(LINK_WORDS[fault.kind]), *_named_link(fault, facts.events, since_ns)]
    if fault.kind == ETCD_RESTART:
        return [saw("was away for")]
    if fault.kind in STORE_KINDS:
        ended_ns = max(int(n["mono_ns"]) for n in notes)
        written = (e for e in after if e.kind == "persisted" and e.mono_ns > ended_ns)
        return [saw("met with it"), saw("meanwhile"), _say(written)]
    if fault.kind == "kill-node":
        return [saw("are gone"), saw("the memory"), _say(e for e in after if e.kind == "resumed")]
    if fault.kind == "keeper-kill":
        return [
            saw("is gone"),
            _say(
                e
                for e in after
                if e.kind == "keeper-started" and e.data.get("pid") != told["keeper_pid"]
            ),
        ]
    if fault.kind == AGENT_KILL:
        return [saw("is gone"), _say(e for e in after if e.kind == "agent-restarted")]
    if fault.kind == "full" and fault.where == "store":
        # Whoever wrote it says how much was free; an onlooker may come too late, when room has been
        # made.
        return [
            _say(
                e for e in after if e.kind == "persist-failed" and any(w in e.why for w in NO_SPACE)
            )
        ]
    if fault.is_number or fault.is_slowness or fault.kind in PART_FAULTS:
        return [_told_of(fault, told["step"], after)]
    death = [
        saw("is gone"),
        "killed by the drill"
        if fault.from_outside
        else _told_dead(int(told["pid"]), after, facts.log),
    ]
    if fault.kind == "full":
        return [saw("0 bytes free"), _say(e for e in after if e.kind == "resumed")]
    if fault.kind == "stop":
        return [saw("stopped (state T)"), saw("is gone")]
    if fault.kind == "torn":
        return [*death, saw("no seal")]
    if fault.kind == "flip":
        return [
            *death,
            *(
                _say(e for e in after if e.kind in DAMAGE and path in e.why)
                for path in told["paths"]
            ),
        ]
    return death


def _tells_of(fault: Fault, event: Event) -> bool:
    """Whether a node's agent says that of its machine's parts."""
    if fault.kind == BLIND:
        return event.kind == "probes-lost"
    kind = "gpu" if fault.kind == HOT else "disk"
    return event.kind == "part-sick" and str(event.data.get("part")).startswith(kind)


def _told_of(fault: Fault, step: int, after: Sequence[Event]) -> str:
    """Who names the rank, or the part, of what happened to no process and no memory."""
    if fault.is_number:
        return _told_wrong(fault, step, after)
    if fault.kind in PART_FAULTS:
        return _say(e for e in after if _tells_of(fault, e))
    named = (e for e in after if e.kind == "slow-rank" and e.data.get("rank") == fault.rank)
    # who is kept from the processor by its quota may also be named for a neighbour, which is wrong
    is_quota = fault.kind == CPU_QUOTA
    return _say(e for e in named if not is_quota or e.data.get("cause") == "quota")


def _named_link(fault: Fault, events: Sequence[Event], since_ns: int) -> list[str]:
    """Whether the node's link is named, and for what was done to it. Asked only where somebody can
    know: the links were known when it began, and it lasted."""
    cause = LINK_CAUSES.get(fault.kind)
    if cause is None:
        return []
    if not _are_links_known([event for event in events if event.mono_ns <= since_ns]):
        return ["nobody is asked to name it: how fast links are was not known when it began"]
    if (fault.for_ms or 0) < LEAST_NAMED_MS:
        return [f"nobody is asked to name it: that takes {LEAST_NAMED_MS / 1000:.0f} s"]
    return [
        _say(
            event
            for event in events
            if event.mono_ns > since_ns
            and event.kind == "slow-link"
            and event.data.get("cause") == cause
            and event.data.get("side") in LINK_SIDES
            and set(fault.nodes) & set(event.data.get("nodes", ()))
        )
    ]


def _are_links_known(before: Sequence[Event]) -> bool:
    """Whether the leader had told that it knows them, and of no doubt that was not over."""
    doubts: set[object] = set()
    is_told = False
    for event in sorted(before, key=lambda e: e.mono_ns):
        if event.kind == "mesh" and event.data.get("node") == LEADER:
            doubts, is_told = set(), False
        elif event.kind == "link-unknown":
            doubts.add(event.data.get("doubt"))
        elif event.kind == "link-known":
            doubts.discard(event.data.get("doubt"))
            is_told = True
    return is_told and not doubts


def _told_wrong(fault: Fault, step: int, after: Sequence[Event]) -> str:
    """Who says that a number was wrong: in that step or the next, of that rank. Whether it was
    undone, the end state tells."""
    return _say(
        event
        for event in after
        if event.kind in WRONG
        and event.data.get("step") in (step, step + 1)
        and fault.rank in event.data.get("ranks", [event.data.get("rank")])
    )


def _told_dead(pid: int, after: Sequence[Event], log: str) -> str:
    """Who says that the process ended by a signal: the agent, torchrun, or the keeper that lost
    it."""
    agent = _say(
        e
        for e in after
        if e.kind == "rank-exited" and e.data.get("pid") == pid and e.data["code"] == -9
    )
    torchrun = (
        f"torchrun: process {pid} ended with exit code -9"
        if "(exitcode: -9) local_rank: " in log and f"(pid: {pid})" in log
        else ""
    )
    return (
        agent
        or torchrun
        or _say(
            e
            for e in after
            if e.kind == "rank-left" and e.data.get("pid") == pid and not e.data["expected"]
        )
    )


def _say(events: Any) -> str:
    event = next(iter(events), None)
    return f"{event.who}: {event.why}" if event else ""


def _lost_steps(facts: DrillFacts, before: Event, event: Event) -> int:
    """Steps that every rank had done and that are done again. The keeper that tells them knows of
    no more than the survivors: a lost node's ranks may have been a step behind, which was seen from
    outside. Epochs count anew when all memory was lost: then a number says too little, and so may
    the keeper's, which is what is certain."""
    done = [
        step for (epoch, _), step in facts.completed.items() if epoch == before.data.get("epoch")
    ]
    epochs = [e.data.get("epoch") for e in facts.events if e.kind == "resumed"]
    if len(done) < max(1, facts.world_size) or epochs.count(before.data.get("epoch")) > 1:
        return loss_of(event)[1]
    return max(0, min(done) - int(event.data["step"]))


def recoveries(faults: Sequence[Fault], facts: DrillFacts) -> list[Recovery]:
    """Every time all ranks resumed after the first start."""
    notes = [n for n in reversed(facts.notes) if n["what"] == "about to"]
    began = {int(n["fault"]): int(n["mono_ns"]) for n in notes}
    lost_at = {
        int(n["mono_ns"]): n["nodes"] for n in notes if faults[n["fault"]].kind == "kill-node"
    }
    resumed = [e for e in facts.events if e.kind == "resumed"]
    found = []
    for before, event in pairwise(resumed):
        # a wrong number ends nobody, or one rank: all go back in either case
        causes = sorted(
            n
            for n, at_ns in began.items()
            if (faults[n].ends_a_rank or faults[n].is_number)
            and before.mono_ns < at_ns < event.mono_ns
        )
        done_ns = next(
            (
                e.mono_ns
                for e in facts.events
                if e.kind == "next-step" and e.mono_ns > event.mono_ns
            ),
            None,
        )
        took_s = (
            None if done_ns is None or not causes else round((done_ns - began[causes[0]]) / S_NS, 3)
        )
        # What was lost before the copies were whole again is lost at once.
        safe_ns = max((ns for ns in facts.protected_ns.values() if ns < event.mono_ns), default=0)
        lost = sorted(
            {
                node
                for ns, nodes in lost_at.items()
                if safe_ns < ns < event.mono_ns
                for node in nodes
            }
        )
        chosen = [
            e.data["policy"]
            for e in facts.events
            if e.kind == "policy" and e.mono_ns < (began[causes[0]] if causes else event.mono_ns)
        ]
        policy = chosen[-1] if chosen else facts.policy
        fetched = [
            e.data["nbytes"]
            for e in facts.events
            if e.kind == "fetched" and before.mono_ns < e.mono_ns < event.mono_ns
        ]
        found.append(
            Recovery(
                *(
                    tuple(causes),
                    event.data["step"],
                    event.data["source"],
                    _lost_steps(facts, before, event),
                    took_s,
                ),
                *(tuple(lost), covers(policy, facts.nodes, lost), sum(fetched)),
            )
        )
    return found
