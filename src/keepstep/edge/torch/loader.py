"""Loader: batches of a DataLoader, with a place that is part of the protected state.

Comes in: a DataLoader, and the state of an earlier life. Goes out: batches. The place is how many
batches the program has taken, not how many have been read ahead. After a restore, in a new process
or in one that stayed, the iterator is made anew from the restored place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from keepstep.edge.torch.batches import batches_of
from keepstep.edge.torch.foreign_draws import ForeignDraws
from keepstep.edge.torch.random_stream import mixed
from keepstep.errors import ConfigError
from keepstep.model.numbers import BatchPlace


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch that the present step has taken."""

    place: BatchPlace
    value: Any


class Loader:
    """Made by `job.loader`. `next(data)` goes on from epoch to epoch; `for batch in data` ends
    with the epoch."""

    def __init__(
        self,
        source: Any,
        name: str,
        seed: int,
        world_size: int,
        draws: ForeignDraws,
        on_take: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        """on_take: hears that a batch is being taken, and that this is over. Raises ConfigError
        when `source` cannot be begun anew."""
        self._source = source
        self.name = name
        self._batches = batches_of(source)
        self._batch_size = batch_size_of(source)
        self.remark = ""  # how the restored place differs from the one that was saved
        self._world_size = world_size
        self._draws = draws
        self._on_take = on_take
        self._seed = seed
        self._epoch = 0
        self._taken = 0
        self._iterator: Iterator[Any] | None = None
        self._skipped: set[tuple[int, int]] = set()  # (epoch, batch) that nobody is to train on
        self._given: deque[Any] = deque()  # in place of the next ones
        self.taken_now: list[TakenBatch] = []

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
        """The epochs that are left, from the one the restored place lies in.

        Args:
            total_epochs: how many there are in all.

        Yields:
            The number of each; the first one of a training is 0.
        """
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
        self._on_take(True)
        try:
            return self._taken_from_source()
        finally:
            self._on_take(False)

    def _taken_from_source(self) -> Any:
        if self._given:
            return self._given.popleft()
        with self._draws.ours:
            if self._iterator is None:
                seed = mixed(self._seed, self._epoch)
                self._iterator = self._batches.begin(self._epoch, seed, self._taken)
            while (self._epoch, self._taken) in self._skipped:
                next(self._iterator)
                self._taken += 1
            batch = next(self._iterator)
        place = BatchPlace(self.name, self._epoch, self._taken)
        self.taken_now.append(TakenBatch(place, batch))
        self._taken += 1
        return batch

    def give(self, batches: Sequence[Any]) -> None:
        """The next ones are these, and whatever its place is."""
        self._given = deque(batches)

    def skip(self, epoch: int, number: int) -> None:
        """From now on nobody is given that batch, whatever is restored."""
        self._skipped.add((epoch, number))

    def _end_epoch(self) -> None:
        self._batches.end()
        self._epoch += 1
        self._taken = 0
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        with self._draws.ours:
            state: dict[str, Any] = {
                "seed": self._seed,
                "epoch": self._epoch,
                "taken": self._taken,
                "world_size": self._world_size,
                "batch_size": self._batch_size,
                "batches": self._batches.state_dict(),
            }
        if self._skipped:
            state["skipped"] = sorted(self._skipped)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self._epoch = state["epoch"]
        # As many items of the epoch, where the ranks share them and there are more or fewer ranks,
        # or batches of another size.
        before, now = state.get("batch_size"), self._batch_size
        if before is None or now is None:
            before = now = 1
        items = state["taken"] * state["world_size"] * before
        self._taken, again = divmod(items, self._world_size * now)
        self.remark = "" if before == now else _resized(self.name, before, now, again)
        self._given.clear()
        # A state of before the skipping knows nothing of it.
        if (state["world_size"], before) == (self._world_size, now):
            self._skipped.update((epoch, number) for epoch, number in state.get("skipped", ()))
        self._iterator = None
        self._batches.load_state_dict(state["batches"])


def batch_size_of(source: Any) -> int | None:
    """Items in a batch; None where nobody says."""
    for part in (source, getattr(source, "batch_sampler", None)):
        size = getattr(part, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _resized(name: str, before: int, now: int, again: int) -> str:
    seen_again = f"; {again} of them come once more" if again else ""
    return (
        f"loader {name!r} had batches of {before} and has batches of {now} now: it goes on behind "
        f"as many items of its epoch{seen_again}"
    )


class HasPlace(Protocol):
    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing is kept."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loaders:
    """All loaders of a job, by name. What was restored before a loader is made waits for it."""

    def __init__(self, draws: ForeignDraws) -> None:
        self.draws = draws
        self.on_take: Callable[[bool], None] = lambda begins: None
        self._beside: dict[str, HasPlace] = {}
        self._made: dict[str, Loader] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, source: Any, name: str | None, world_size: int) -> tuple[Loader, bool]:
        """The loader, and whether its place was restored. `name`: None for its number."""
        name = str(len(self._made)) if name is None else name
        if name in self._made or name in self._beside:
            raise ConfigError(f"job.loader(): the name {name!r} is taken; give this one another")
        seed = mixed(torch.initial_seed(), name)
        loader = Loader(
            source, name, seed, world_size, self.draws, lambda begins: self.on_take(begins)
        )
        is_restored = name in self._waiting
        if is_restored:
            loader.load_state_dict(self._waiting.pop(name))
        self._made[name] = loader
        return loader, is_restored

    def add_beside(self, name: str, part: HasPlace) -> None:
        """What else is part of the state from now on; what was restored for it waits already."""
        self._beside[name] = part
        if name in self._waiting:
            part.load_state_dict(self._waiting.pop(name))

    def forget_taken(self) -> None:
        """A step begins."""
        for loader in self._made.values():
            loader.taken_now = []

    def taken(self) -> list[TakenBatch]:
        """All batches that the present step has taken."""
        return [batch for loader in self._made.values() for batch in loader.taken_now]

    def skip(self, places: Sequence[BatchPlace]) -> None:
        """Nobody is given these from now on."""
        for place in places:
            self._made[place.loader].skip(place.epoch, place.number)

    def give(self, batches: Sequence[tuple[str, Any]]) -> None:
        """The next batches of each loader, by its name."""
        for name, loader in self._made.items():
            loader.give([value for owner, value in batches if owner == name])

    @property
    def unclaimed(self) -> list[str]:
        """Names of loaders whose place was restored, and which the program has not made."""
        return sorted(self._waiting)

    def state_dict(self) -> dict[str, Any]:
        made = {name: loader.state_dict() for name, loader in self._made.items()}
        beside = {name: state for name, one in self._beside.items() if (state := one.state_dict())}
        return {**self._waiting, **made, **beside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = dict(state)
        for name, one in self._beside.items():
            one.load_state_dict(self._waiting.pop(name, {}))
        for name, loader in self._made.items():
            if name in self._waiting:
                loader.load_state_dict(self._waiting.pop(name))
