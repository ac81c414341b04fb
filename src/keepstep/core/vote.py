"""Vote: from which state does everybody resume?

Comes in: each rank's holdings as it joins, what the store has, whether loading worked. Goes out: one offer to all ranks, then
permission to go, each with its reason. Every rank loads, proves and forgets anything newer *before* anyone may go, so two
computations of one step never mix. A source that fails on one rank is given up by all, and the next is offered. A rank that
dies meanwhile starts the vote again when it is back.

Order of sources: the newest stamp that all ranks hold in memory; then checkpoints, newest first; then a fresh start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepstep.core.cut import common
from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank brings: proven stamps, and why others it has are unusable."""

    rank: int
    world_size: int
    holds: frozenset[Stamp]
    foreign_world: int | None = None  # its slots are of a job of that size


@dataclass(frozen=True, slots=True)
class Offer:
    """Everybody loads this. `source` is memory, store or fresh; `step` is -1 for fresh."""

    round: int
    source: str
    stamp: Stamp
    why: str


@dataclass(frozen=True, slots=True)
class ListStore:
    """Ask the store which checkpoints it has."""


@dataclass(frozen=True, slots=True)
class Go:
    """Everybody has proven the same state: train on, in this epoch."""

    epoch: int
    offer: Offer


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nobody may go on: a person must decide."""

    why: str


Action = Offer | ListStore | Go | Refuse


@dataclass
class Vote:
    """One job's vote, over and over. `epoch` is the newest seen anywhere."""

    world_size: int
    has_store: bool
    epoch: int = 0
    round: int = 0
    offer: Offer | None = None
    ballots: dict[int, Ballot] = field(default_factory=dict)
    loaded: set[int] = field(default_factory=set)
    failed: list[tuple[str, Stamp, str]] = field(default_factory=list)
    checkpoints: Sequence[int] | None = None

    def joined(self, ballot: Ballot) -> list[Action]:
        """A rank asks where to resume."""
        if ballot.world_size != self.world_size:
            return [Refuse(f"rank {ballot.rank} says the world has {ballot.world_size} ranks, the job has {self.world_size}")]
        self.ballots[ballot.rank] = ballot
        self.epoch = max([self.epoch, *(s.epoch for s in ballot.holds)])
        self._reset()
        return self._decide()

    def left(self, rank: int) -> None:
        """A rank is gone; a vote under way begins again when it is back."""
        if self.ballots.pop(rank, None):
            self._reset()

    def listed(self, steps: Sequence[int]) -> list[Action]:
        """The store's checkpoints."""
        self.checkpoints = sorted(steps, reverse=True)
        return self._decide()

    def unlistable(self, why: str) -> list[Action]:
        """The store does not answer. Nobody may start afresh over checkpoints that nobody could look at."""
        return [Refuse(f"{self._why_not_memory()}, and the store cannot be read: {why}")]

    def has_loaded(self, rank: int, round_: int) -> list[Action]:
        """A rank has loaded and proven the offer, and forgotten what is newer."""
        if self.offer is None or round_ != self.offer.round:
            return []
        self.loaded.add(rank)
        if len(self.loaded) < self.world_size:
            return []
        self.epoch += 1
        done, self.failed, self.checkpoints = self.offer, [], None
        self.ballots.clear()
        self._reset()
        return [Go(self.epoch, done)]

    def has_failed(self, rank: int, round_: int, why: str) -> list[Action]:
        """A rank could not load the offer: nobody keeps it."""
        if self.offer is None or round_ != self.offer.round:
            return []
        self.failed.append((self.offer.source, self.offer.stamp, f"rank {rank}: {why}"))
        self._reset()
        return self._decide()

    def waiting_for(self) -> list[int]:
        """Ranks that have not joined."""
        return [r for r in range(self.world_size) if r not in self.ballots]

    def _reset(self) -> None:
        self.offer, self.loaded = None, set()

    def _decide(self) -> list[Action]:
        if self.waiting_for():
            return []
        bad = {(source, stamp) for source, stamp, _ in self.failed}
        after = f" after {self.failed[-1][2]}" if self.failed else ""
        shared = [s for s in common([b.holds for b in self.ballots.values()]) if ("memory", s) not in bad]
        if shared:
            best = max(shared)
            return self._make("memory", best, f"{best} is the newest state all {self.world_size} ranks hold in memory{after}")
        if self.has_store and self.checkpoints is None:
            return [ListStore()]
        why_not_memory = self._why_not_memory()
        for step in self.checkpoints or ():
            stamp = Stamp(step, 0)
            if ("store", stamp) not in bad:
                return self._make("store", stamp, f"{why_not_memory}; the newest usable checkpoint is of {stamp}{after}")
        foreign = sorted({b.foreign_world for b in self.ballots.values() if b.foreign_world is not None})
        if foreign:
            return [
                Refuse(
                    f"memory holds this job's state for {foreign[0]} ranks and the job has {self.world_size} now; "
                    "no checkpoint can bridge that. "
                    f"Run with {foreign[0]} ranks, give a store, or drop the state with `keepstep clean`"
                )
            ]
        store = "no checkpoint in the store" if self.has_store else "no store"
        return self._make("fresh", Stamp(-1, 0), f"{why_not_memory}, {store}: a fresh start{after}")

    def _why_not_memory(self) -> str:
        if any(b.foreign_world is not None for b in self.ballots.values()):
            return f"memory holds snapshots of another world size than {self.world_size}"
        empty = sorted(r for r, b in self.ballots.items() if not b.holds)
        if len(empty) == self.world_size:
            return "memory holds nothing"
        if empty:
            return f"memory of rank {empty[0]} holds nothing ({len(empty)} of {self.world_size} ranks)"
        return "no step in memory is usable on every rank"

    def _make(self, source: str, stamp: Stamp, why: str) -> list[Action]:
        self.round += 1
        self.offer, self.loaded = Offer(self.round, source, stamp, why), set()
        return [self.offer]
