"""Link remedy: what a slow link costs, what it would cost to be rid of it, and what is done.

Comes in: which link is slow and how fast it is now and was before, and how many bytes cross it for
each step that is protected. Goes out: the price of a step, and a sentence that compares.

Copies travel beside the training, which waits for none of them. So a slow link costs time only when
a node is lost: what was done since the last protected step is done again, and that step is older by
as much as its copies take longer. A spare in the node's place costs all ranks a restart, at once;
it pays after as many losses as make up for it. So nothing is done but told, and preflight, which
stops the job, is left to a person.

Invariant: what is not known has no price, and that is said.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

from keepstep.core.detection.links import LONG, Direction, LinkSide, SlowLink
from keepstep.core.economics.swap_price import ASSUMED, SwapPrice
from keepstep.model.units import S_NS, counted, human_bytes, human_ns

LEAST_STEPS = 3
OF_A_NODE = (LinkSide.SENDER, LinkSide.RECEIVER, LinkSide.NODE)


class StepBytes:
    """Of each direction, what has crossed it for each step of late."""

    def __init__(self) -> None:
        self._seen: dict[Direction, deque[tuple[int, int]]] = {}

    def add(self, cell: Direction, nbytes: int, committed_step: int) -> None:
        """So many more, by the time that this step was the last that is protected."""
        seen = self._seen.setdefault(cell, deque(maxlen=LONG + 1))
        if seen and committed_step < seen[-1][0]:
            seen.clear()  # steps are done again
        seen.append((committed_step, nbytes))

    def of_a_step(self, cell: Direction) -> float:
        """0: not known."""
        seen = self._seen.get(cell, deque())
        steps = seen[-1][0] - seen[0][0] if seen else 0
        return sum(nbytes for _, nbytes in list(seen)[1:]) / steps if steps >= LEAST_STEPS else 0.0


@dataclass(frozen=True, slots=True)
class LinkRemedy:
    """left_ns: by how much later a step is protected; 0: not known. why: with what it costs."""

    left_ns: int
    why: str


def link_remedy(slow: SlowLink, step_bytes: float, swap: SwapPrice = ASSUMED) -> LinkRemedy:
    """step_bytes: what crosses the slowest direction of it for each step, 0: not known. swap: what
    a spare in the place of a node costs."""
    fix = f"cheapest by hand: {slow.fix}"
    if step_bytes <= 0 or slow.bytes_per_s <= 0 or slow.usual_bytes_per_s <= 0:
        why = "nothing is changed: what that costs a step is not known, copies are not regular"
        return LinkRemedy(0, f"{why}; {fix}")
    took_ns = step_bytes * S_NS / slow.usual_bytes_per_s
    takes_ns = step_bytes * S_NS / slow.bytes_per_s
    left_ns = max(0, int(takes_ns - took_ns))
    why = (
        f"nothing is changed: for each step {human_bytes(round(step_bytes))} cross it in "
        f"{human_ns(int(takes_ns))}, before in {human_ns(int(took_ns))}; training does not wait "
        f"for that, but a step is protected {human_ns(left_ns)} later, which the loss of a node "
        f"costs more"
    )
    return LinkRemedy(left_ns, f"{why}; {_instead(slow, left_ns, swap)}; {fix}")


def _instead(slow: SlowLink, left_ns: int, swap: SwapPrice) -> str:
    if slow.side not in OF_A_NODE:
        return "no swap for a spare: nobody knows that it is one node"
    losses = ceil(swap.ns / max(1, left_ns))
    return (
        f"a spare in the place of node {slow.nodes[0]} costs about {human_ns(swap.ns)} once "
        f"({swap.source}), as much as that of {counted(losses, 'lost node')}"
    )
