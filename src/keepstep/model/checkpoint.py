"""Checkpoint attempt: one try at writing one checkpoint, as all that take part in it know it.

Values only. The names of an attempt's files carry its number, so what an earlier try left is never
taken for a part of this one (`edge/store/parts.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class CheckpointAttempt:
    """`number`: no other try, whoever leads it, has it. `ranks`: how many each node has, node by
    node."""

    job: str
    stamp: Stamp
    number: int
    ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The ranks of all nodes."""
        return sum(self.ranks)

    def ranks_of(self, node: int) -> range:
        """The ranks that live on that node."""
        first = sum(self.ranks[:node])
        return range(first, first + self.ranks[node])

    def survey_name(self, node: int) -> str:
        """The file in which a node says what its ranks have."""
        return f"survey-{node:05d}-{self.number}.json"

    def part_name(self, node: int) -> str:
        """The file in which a node says what it has written."""
        return f"part-{node:05d}-{self.number}.json"

    def data_name(self, rank: int) -> str:
        """The file with what a rank writes."""
        return f"__{rank}_{self.number}.distcp"

    def owns(self, name: str) -> bool:
        """Whether a file of the step's directory is this attempt's."""
        return re.search(rf"[-_]{self.number}\.(json|distcp)$", name) is not None
