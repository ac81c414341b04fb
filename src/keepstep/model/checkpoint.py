"""Checkpoint: one try at writing one, as all that take part in it know it; and what a store has.

Values only. Each attempt has a directory of its own in the store, and the names of its files carry
its number, so what another try left, or still writes, is never taken for a part of this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keepstep.model.bounds import Count, StepNumber
from keepstep.model.snapshot import Stamp

_DIRECTORY = re.compile(r"step-(\d{12})(?:-(\d{6,18})-(\d{1,19}))?", re.ASCII)


class CheckpointName(NamedTuple):
    """Which checkpoint of a store: of two of one step the higher one counts. What was written
    before attempts had names of their own has neither epoch nor attempt."""

    step: int
    epoch: int = 0
    attempt: int = 0

    @property
    def directory(self) -> str:
        """Its name below the store."""
        own = f"-{self.epoch:06d}-{self.attempt}" if self.epoch or self.attempt else ""
        return f"step-{self.step:012d}{own}"

    def is_older(self, than: CheckpointName) -> bool:
        """Whether it was begun before that one, whatever the steps."""
        return (self.epoch, self.attempt) < (than.epoch, than.attempt)


def checkpoint_named(directory: str) -> CheckpointName | None:
    """Whose name below the store that is; None: nobody's, like any other way to write the same
    numbers."""
    match = _DIRECTORY.fullmatch(directory)
    name = match and CheckpointName(*(int(part or 0) for part in match.groups()))
    return name if name and name.directory == directory else None


class Unfinished(NamedTuple):
    """`names`: attempts that were not published, the oldest steps first. `unseen`: of each that
    could not be looked at, why: it may be published."""

    names: Sequence[CheckpointName]
    unseen: Sequence[str] = ()


class Timeline(NamedTuple):
    """An epoch, and the step from which it goes on: -1 when from none."""

    epoch: Count
    step: StepNumber


@dataclass(frozen=True, slots=True)
class CheckpointAttempt:
    """`number`: no other try, whoever leads it, has it. `ranks`: how many each node has, node by
    node. `timeline`: in which it is made, as its leader knows; None: not known."""

    job: str
    stamp: Stamp
    number: int
    ranks: tuple[int, ...]
    timeline: Timeline | None = field(default=None, compare=False)

    @property
    def name(self) -> CheckpointName:
        """Of what it makes."""
        return CheckpointName(self.stamp.step, self.stamp.epoch, self.number)

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


@dataclass(frozen=True, slots=True)
class StoreRefusal:
    """Why the store has not told what it has. `is_final`: asked again, it says the same."""

    why: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class StoreListing:
    """What a store has that was read, by step.

    usable: whole ones, newest first. damaged: published, and not as they were; `unfinished`: never
    published; `unreachable`: the store did not say what they are; each with what is wrong. epoch:
    the newest of which anything tells. epochs: of the usable ones.
    """

    usable: Sequence[int]
    damaged: Mapping[int, str] = field(default_factory=dict)
    unfinished: Mapping[int, str] = field(default_factory=dict)
    unreachable: Mapping[int, str] = field(default_factory=dict)
    epoch: int = 0
    epochs: Mapping[int, int] = field(default_factory=dict)
