"""Opening lines: what a training tells a person when it begins.

Comes in: what is protected, and where all have agreed to begin. Goes out: two sentences.
"""

from __future__ import annotations

from keepstep.edge.torch.parts import kind_of
from keepstep.edge.torch.state import Protected
from keepstep.runtime.rank.rank import Rank


def protected_line(job: str, protected: Protected, rank: Rank) -> str:
    """What is protected, in how much memory, and how to start over."""
    parts = [f"{name} ({kind_of(value)})" for name, value in protected.objects.items()]
    parts += [f"{name} (value)" for name in protected.values]
    return (
        f"job {job} is protected: {', '.join(parts)}, random states; {rank.plan}; to start over, "
        "set KEEPSTEP_FRESH=1 (keepstep run --fresh)"
    )


def position_line(rank: Rank) -> str:
    """Where it begins, and why there."""
    resumed = rank.resumed
    if resumed is None or resumed.source == "fresh":
        why = "" if resumed is None else f": {resumed.why}"
        return f"begins at step 0{why}"
    lost = "no completed step" if not rank.lost_steps else f"{rank.lost_steps} completed steps"
    return (
        f"goes on with the run before: resumed step {resumed.step} from {resumed.source}, {lost} "
        f"lost: {resumed.why}"
    )
