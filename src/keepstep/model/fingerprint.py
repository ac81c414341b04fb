"""Fingerprints: what is reachable in a training process at one moment, as hashes by name.

Values only. A path begins with where the search began (a module of the program, a function that is
running) and goes on as Python would write it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SeenValue:
    """One value. `kind`: what a person calls it. `entries`: of a container of plain values, their
    hashes in order; it is judged beside its entries, which have paths of their own below it."""

    kind: str
    digest: str
    entries: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a process had when the step `step` was about to begin."""

    step: int
    seen: dict[str, SeenValue] = field(default_factory=dict)
