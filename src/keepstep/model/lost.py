"""A lost node, as the platform that is to replace it hears of it."""

from __future__ import annotations

from dataclasses import dataclass

# as which a command is told of it: its fields, in their order
LOST_VARIABLES = tuple(f"KEEPSTEP_LOST_{field}" for field in ("JOB", "NODE", "HOST", "WHY"))


@dataclass(frozen=True, slots=True)
class LostNode:
    job: str
    node: int
    host: str
    why: str
