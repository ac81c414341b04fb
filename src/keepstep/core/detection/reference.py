"""Reference: is it the processor or the program, of a rank that needs more processor time?

Comes in: for each rank, how much processor time the same fixed work took where that rank runs, try
by try. Goes out: which of the two it is, in a sentence. What else runs there only adds to a try, so
the fastest one counts. Where the kernel counts that cores are slowed down, a slow processor is a
throttled one.

Invariant: with fewer than two ranks' times, or where all run on the same processors, nobody knows,
and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from keepstep.core.detection.drift import median
from keepstep.model.parts import PartHealth
from keepstep.model.step_work import FixedWork

PROCESSOR_SHARE = 0.5  # of what the rank needs more: from there on the processor explains it
PROGRAM_SHARE = 0.2  # below, it does not
LEAST_EXCESS = 0.04  # what two sound cores of one machine may differ by


# "throttled": the processor, and why. "asked": fixed work runs. Empty: nobody asks, what is slow is
# not what it computes.
Confirmed = Literal["", "asked", "processor", "throttled", "program", "unknown"]


class ReferenceVerdict(NamedTuple):
    """`ratio`: of the fixed work there to that of the median of its peers; 0: not known."""

    cause: Confirmed
    ratio: float
    why: str


def confirm(rank: int, excess_ratio: float, found: Mapping[int, FixedWork]) -> ReferenceVerdict:
    """Of a rank whose own section takes `1 + excess_ratio` times what its peers' does."""
    verdict = _verdict(rank, excess_ratio, found)
    return verdict._replace(why=f"rank {rank}: {verdict.why}")


def throttled(rank: int, verdict: ReferenceVerdict, cpu: PartHealth) -> ReferenceVerdict:
    """Of a rank whose processor is slow by that verdict, on a node whose `cpu` is slowed down."""
    why = (
        f"rank {rank}: its processors are throttled: fixed work takes {verdict.ratio:.2f} times as "
        f"long there as on its peers', and {cpu.why}; cheapest: {cpu.fix}"
    )
    return ReferenceVerdict("throttled", verdict.ratio, why)


def _verdict(rank: int, excess_ratio: float, found: Mapping[int, FixedWork]) -> ReferenceVerdict:
    own = found.get(rank)
    peers = [work for other, work in found.items() if other != rank and work.tries_ns]
    if own is None or not own.tries_ns or not peers:
        why = "fixed work could not be measured there and on a peer's processors"
        return ReferenceVerdict("unknown", 0.0, why)
    if all(own.processors == peer.processors for peer in peers):
        why = "all ranks may run on the same processors, which tells nothing of one"
        return ReferenceVerdict("unknown", 0.0, why)
    ratio = min(own.tries_ns) / median(min(peer.tries_ns) for peer in peers)
    excess = max(excess_ratio, LEAST_EXCESS)
    said = f"fixed work takes {ratio:.2f} times as long on its processors as on its peers'"
    if ratio - 1 >= max(PROCESSOR_SHARE * excess, LEAST_EXCESS):
        return ReferenceVerdict("processor", ratio, f"{said}: they are slow, not the program")
    if ratio - 1 <= max(PROGRAM_SHARE * excess, LEAST_EXCESS / 2):
        return ReferenceVerdict("program", ratio, f"{said}: it has more to do than its peers")
    return ReferenceVerdict("unknown", ratio, f"{said}: that explains a part of it")
