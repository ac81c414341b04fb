"""A lost node, as the platform that is to replace it hears of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostNode:
    job: str
    node: int
    host: str
    why: str
