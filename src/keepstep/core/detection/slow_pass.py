"""Slow pass: which pass of a step's body takes longer, the forward or the backward one.

Comes in: blocks of a rank that is slow in what its body does, and those that they are compared
with. Goes out: the pass that has grown, where one alone explains it. What of the body is neither
(a loss, a module that is not protected) is in none of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.detection.drift import median
from keepstep.model.step_work import BodyPass, WorkBlock

EXPLAINS = 0.7  # of what the body takes more


def slow_pass(now: Sequence[WorkBlock], before: Sequence[WorkBlock], excess_ns: float) -> BodyPass:
    """excess_ns: of the body, a step."""
    forward_ns = _middle(now, "forward_ns") - _middle(before, "forward_ns")
    backward_ns = _middle(now, "backward_ns") - _middle(before, "backward_ns")
    if forward_ns >= EXPLAINS * max(excess_ns, forward_ns + backward_ns) > 0:
        return "forward"
    if backward_ns >= EXPLAINS * max(excess_ns, forward_ns + backward_ns) > 0:
        return "backward"
    return ""


def _middle(blocks: Sequence[WorkBlock], of: str) -> float:
    """A step."""
    return median([getattr(block, of) / block.steps for block in blocks])
