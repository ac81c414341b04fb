"""Opening lines: what a training tells a person when it begins.

Comes in: what is protected, and where all have agreed to begin. Goes out: a
sentence each.
"""

from __future__ import annotations

from keepstep.edge.torch.parts import kind_of
from keepstep.edge.torch.state import Protected
from keepstep.model.messages.keeper_rank import StateOffered


def protected_line(job: str, protected: Protected, memory: str) -> str:
    """What is protected, in how much memory (in words), and how to name it and start over."""
    parts = [f"{name} ({kind_of(value)})" for name, value in protected.objects.items()]
    parts += [f"{name} (value)" for name in protected.values]
    return (
        f"job {job} (KEEPSTEP_JOB or --job names another) is protected: {', '.join(parts)}, "
        f"random states; {memory}; to start over, set KEEPSTEP_FRESH=1 (keepstep run --fresh)"
    )


def position_line(resumed: StateOffered | None, loss: str) -> str:
    """Where it begins, and why there. `loss`: the completed steps that are to be done again, in
    words; empty for none."""
    if resumed is None or resumed.source == "fresh":
        why = "" if resumed is None else f": {resumed.why}"
        return f"begins at step 0{why}{f'; {loss}' if loss else ''}"
    return (
        f"goes on with the run before: resumed step {resumed.step} from {resumed.source}, "
        f"{loss or 'no completed step lost'}: {resumed.why}"
    )


def unserved_line(metrics_port: int | None, has_agent: bool) -> str:
    """Of metrics that were asked for where nobody serves them; empty when that is not so."""
    if metrics_port is None or has_agent:
        return ""
    return (
        f"metrics_port {metrics_port} does nothing here: an agent serves metrics, and this process "
        "has none. Start it with `keepstep run`"
    )
