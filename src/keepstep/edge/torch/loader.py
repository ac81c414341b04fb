"""Loader: batches of a DataLoader, with a place that is part of the protected state.

Comes in: a DataLoader, and the state of an earlier life. Goes out: batches. The place is how many
batches the program has taken, not how many have been read ahead. After a restore, in a new process
or in one that stayed, the iterator is made anew from the restored place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from keepstep.edge.torch.batches import batches_of
from keepstep.edge.torch.foreign_draws import ForeignDraws
from keepstep.edge.torch.random_stream import mixed
from keepstep.errors import ConfigError


class Loader:
    """Made by `job.loader`. `next(data)` goes on from epoch to epoch; `for batch in data` ends
    with the epoch."""

    def __init__(
        self, source: Any, name: str, seed: int, world_size: int, draws: ForeignDraws
    ) -> None:
        """Raises ConfigError when `source` cannot be begun anew."""
        self._source = source
        self.name = name
        self._batches = batches_of(source)
        self._world_size = world_size
        self._draws = draws
        self._seed = seed
        self._epoch = 0
        self._taken = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is taken from; the first one is 0."""
        return self._epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch have been taken."""
        return self._taken

    def __len__(self) -> int:
        """Batches in an epoch, where the DataLoader knows."""
        return len(self._source)

    def epochs(self, total_epochs: int) -> Iterator[int]:
        """The epochs that are left, from the one the restored place lies in."""
        while self._epoch < total_epochs:
            yield self._epoch

    def __next__(self) -> Any:
        """The next batch, of the next epoch where this one has ended."""
        for _ in range(2):
            try:
                return self._take()
            except StopIteration:
                self._end_epoch()
        raise ConfigError(f"loader {self.name!r} has no batches: an epoch of it is empty")

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of this epoch."""
        while True:
            try:
                batch = self._take()
            except StopIteration:
                self._end_epoch()
                return
            yield batch

    def _take(self) -> Any:
        with self._draws.ours:
            if self._iterator is None:
                seed = mixed(self._seed, self._epoch)
                self._iterator = self._batches.begin(self._epoch, seed, self._taken)
            batch = next(self._iterator)
        self._taken += 1
        return batch

    def _end_epoch(self) -> None:
        self._batches.end()
        self._epoch += 1
        self._taken = 0
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        with self._draws.ours:
            return {
                "seed": self._seed,
                "epoch": self._epoch,
                "taken": self._taken,
                "world_size": self._world_size,
                "batches": self._batches.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self._epoch = state["epoch"]
        # As many items of the epoch, where the ranks share them and there are more or fewer ranks.
        self._taken = state["taken"] * state["world_size"] // self._world_size
        self._iterator = None
        self._batches.load_state_dict(state["batches"])


class Loaders:
    """All loaders of a job, by name. What was restored before a loader is made waits for it."""

    def __init__(self, draws: ForeignDraws) -> None:
        self.draws = draws
        self._made: dict[str, Loader] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, source: Any, name: str | None, world_size: int) -> tuple[Loader, bool]:
        """The loader, and whether its place was restored. `name`: None for its number."""
        name = str(len(self._made)) if name is None else name
        if name in self._made:
            raise ConfigError(f"job.loader(): the name {name!r} is taken; give this one another")
        seed = mixed(torch.initial_seed(), name)
        loader = Loader(source, name, seed, world_size, self.draws)
        is_restored = name in self._waiting
        if is_restored:
            loader.load_state_dict(self._waiting.pop(name))
        self._made[name] = loader
        return loader, is_restored

    @property
    def unclaimed(self) -> list[str]:
        """Names of loaders whose place was restored, and which the program has not made."""
        return sorted(self._waiting)

    def state_dict(self) -> dict[str, Any]:
        made = {name: loader.state_dict() for name, loader in self._made.items()}
        return {**self._waiting, **made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = dict(state)
        for name, loader in self._made.items():
            if name in self._waiting:
                loader.load_state_dict(self._waiting.pop(name))
