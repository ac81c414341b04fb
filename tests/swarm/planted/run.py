"""One run of a seed, as the planted bugs are hunted with it."""

from __future__ import annotations

from dataclasses import replace

from keepstep.sim.protocol.job.plan import small
from keepstep.sim.protocol.swarm import run


def run_without_store(seed: int) -> str | None:
    """What was violated; None when nothing was."""
    return run(seed, replace(small(seed), store=False)).wrong
