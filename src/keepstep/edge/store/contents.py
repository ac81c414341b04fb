"""Contents: what a look at a store has found. Values only.

Comes in: what `store.py` reads. Goes out: each checkpoint under what it turned out to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepstep.edge.store.manifest import Manifest
from keepstep.model.checkpoint import CheckpointName


@dataclass(frozen=True, slots=True)
class Listing:
    """What a store holds: `checkpoints` with an intact manifest and files of the right size, newest
    first, as far as the job has not gone back behind them; and per step why there is none.
    `unreadable`: those of them of which the store did not say what they are. `damaged`: those that
    were published, and are not as they were. `epoch`: the newest of which anything tells."""

    checkpoints: tuple[Manifest, ...]
    broken: Mapping[int, str]
    unreadable: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()
    epoch: int = 0


@dataclass
class Contents:
    """All that lies in a store. `intact` is newest first; of all others what is wrong."""

    intact: list[Manifest] = field(default_factory=list)
    broken: dict[CheckpointName, str] = field(default_factory=dict)
    unreadable: set[CheckpointName] = field(default_factory=set)
    closed: set[CheckpointName] = field(default_factory=set)  # of these, see `is_closed`
    damaged: set[CheckpointName] = field(default_factory=set)
    unfinished: set[CheckpointName] = field(default_factory=set)  # or another job's
    doubted: set[CheckpointName] = field(default_factory=set)  # intact, and damaged all the same
