"""Slow words: what is said of a rank that is slow, or is so no longer.

Comes in: numbers that were found. Goes out: sentences with them. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep.model.step_work import PASSES, Section, Slow, SlowCause
from keepstep.model.units import human_ns

ACTIONS: dict[SlowCause, str] = {
    "compute": "compare its clocks and temperature with its peers', or leave its node for a spare",
    "data": "more loader workers, or a look at the storage it reads from",
    "quota": "raise the processor quota of its cgroup",
    "memory": "give its node memory, or start less there",
    "neighbour": "move what else runs on its processors, or pin the rank to others",
    "blocked": "look at its stacks (py-spy): it waits for a disk, a lock or a process of its own",
}
MEANINGS: dict[SlowCause, str] = {
    "compute": "it uses the processor for all of it: more work than its peers, or a slower one",
    "data": "its batches come late",
    "quota": "its cgroup's quota of processor time is used up",
    "memory": "processes there wait for memory",
    "neighbour": "it is ready to run while others have the processor",
    "blocked": "it neither computes nor waits for a processor or its peers",
}
# Of the same, in a line.
ACTS: dict[SlowCause, str] = {
    "compute": "check clocks and heat",
    "data": "add loader workers",
    "quota": "raise the quota",
    "memory": "give it memory",
    "neighbour": "move them or pin it",
    "blocked": "look at its stacks",
}
CAUSES: dict[SlowCause, str] = {
    "compute": "it computes longer",
    "data": "its batches are late",
    "quota": "its CPU quota is used up",
    "memory": "it waits for memory",
    "neighbour": "others use its processor",
    "blocked": "it waits for no peer",
}
STAGE_ACT = "give it fewer layers"
SECTION_WORDS = {
    Section.DATA: "data",
    Section.COMPUTE: "step's body (all but data and update)",
    Section.UPDATE: "update",
    Section.HOOK: "time in keepstep",
    Section.FORWARD: "forward pass",
    Section.BACKWARD: "backward pass",
}


@dataclass(frozen=True, slots=True)
class SlowOver:
    """It is as fast as before."""

    rank: int
    since_step: int
    until_step: int
    why: str


def over(slow: Slow, until_step: int) -> SlowOver:
    """The last step in which it was slow."""
    why = (
        f"rank {slow.rank} is no longer slow: since step {until_step + 1} its "
        f"{SECTION_WORDS[slow.section]} takes what it took before; it was slow for "
        f"{until_step + 1 - slow.since_step} steps"
    )
    return SlowOver(slow.rank, slow.since_step, until_step, why)


def in_a_line(slow: Slow, done: str) -> str:
    """The news. done: about it; empty: nothing, so what a person can do."""
    section = slow.section.name.lower()
    if slow.section in PASSES:
        section = f"{section} pass"
    act = STAGE_ACT if slow.is_stage and slow.cause == "compute" else ACTS[slow.cause]
    return (
        f"rank {slow.rank} is slow: {section} +{human_ns(slow.excess_ns)} a step "
        f"({100 * slow.excess_ratio:.0f} %), {CAUSES[slow.cause]}; {done or f'observed: {act}'}"
    )


def with_words(slow: Slow) -> Slow:
    """With the sentence that its numbers make."""
    share = f"{100 * slow.excess_ratio:.0f} % of a step"
    against = "its peers" if slow.has_peers else "before"
    since = "from the beginning" if slow.is_standing else f"since step {slow.since_step}"
    if not slow.has_peers:
        more = f" ({share} more)"
    elif slow.is_standing:
        more = f" ({share} more, for which all others wait)"
    else:  # it may have been faster or slower than they are
        more = (
            f", and all in all {human_ns(slow.excess_ns)} more than before ({share}, for which "
            "all others wait)"
        )
    why = (
        f"rank {slow.rank} is slow {since}: its {SECTION_WORDS[slow.section]} takes "
        f"{human_ns(slow.own_ns)} a step, {against} {human_ns(slow.peers_ns)}{more}: "
        f"{MEANINGS[slow.cause]}"
    )
    return replace(slow, why=why)
