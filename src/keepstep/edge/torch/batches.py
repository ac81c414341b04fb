"""Batches: the batches of one epoch of a DataLoader, from any place in it.

Three ways to find the place again, the cheapest that is exact:

    a map-style DataLoader      its samplers are drawn from and the indices dropped; no data is read
    a StatefulDataLoader        it knows its place itself
    whatever else is iterable   begun anew, and its batches dropped

Invariant: a batch follows from the seed of its epoch and its number in it. Nothing here draws from
the program's own random numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.edge.torch.random_stream import RandomStream, mixed, sow
from keepstep.edge.torch.sampler_state import SamplerState, has_own_attributes
from keepstep.errors import ConfigError


class Batches(Protocol):
    """What `Loader` takes batches from."""

    def begin(self, epoch: int, seed: int, skipped: int) -> Iterator[Any]:
        """The epoch's batches behind the first `skipped` ones."""

    def end(self) -> None:
        """The epoch has ended."""

    def state_dict(self) -> dict[str, Any]:
        """What besides epoch, seed and number of batches decides what comes."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def batches_of(source: Any) -> Batches:
    """Raises ConfigError when `source` can be gone through only once."""
    if _takes_indices(source):
        return IndexedBatches(source)
    if _is_stateful(source):
        return StatefulBatches(source)
    if not hasattr(source, "__iter__") or hasattr(source, "__next__"):
        raise ConfigError(
            f"job.loader() expected a DataLoader, found {type(source).__name__}, which cannot be "
            "begun anew: pass what you made the iterator from"
        )
    return DroppedBatches(source)


def not_repeated(source: Any) -> str:
    """What of the batches a restart does not give as they were, in words; empty: nothing."""
    if _takes_indices(source) or not _is_stateful(source) or not getattr(source, "num_workers", 0):
        return ""
    return (
        f"{type(source).__name__} keeps its own place, and not the random numbers of its workers: "
        "what they draw after a restart is other than it would have been. Draw from a generator "
        "that is in the data set's own state, or use torch's DataLoader"
    )


def _takes_indices(source: Any) -> bool:
    """Whether what it loads follows from its samplers alone. Whoever loads in a way of its own
    (Accelerate) is asked for batches, not for its samplers."""
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return False
    is_torchdata = type(source).__module__.startswith("torchdata.")
    is_plain = type(source).__iter__ is DataLoader.__iter__
    return is_plain or (is_torchdata and not _is_stateful(source.dataset))


def _is_stateful(part: Any) -> bool:
    part = getattr(part, "base_dataloader", part)  # Accelerate's has the methods, and no state
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


# -- what decides the order besides a seed


class BatchOrder:
    """The samplers of a loader, and generators that the program gave it."""

    def __init__(self, source: Any) -> None:
        samplers = list(_samplers(source))
        self._parts = _once([source, *samplers, getattr(source, "dataset", None)])
        drawn_from = _once(getattr(part, "generator", None) for part in self._parts)
        self._generators = [g for g in drawn_from if isinstance(g, torch.Generator)]
        self._stateful = [s for s in _once(samplers) if _is_stateful(s)]
        self._own = [SamplerState(s) for s in _once(samplers) if has_own_attributes(s)]
        self._begun_with = self._look()

    def _look(self) -> dict[str, Any]:
        return {
            "generators": [bytes(g.get_state().tolist()) for g in self._generators],
            "samplers": [copy.deepcopy(s.state_dict()) for s in self._stateful],
            "attributes": [own.look() for own in self._own],
        }

    def begin(self, epoch: int, is_first_time: bool) -> None:
        """Before an epoch is gone through, for the first time or once more."""
        if is_first_time:
            self._begun_with = self._look()
        else:
            self._put_back()
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def end(self) -> None:
        self._begun_with = self._look()

    def _put_back(self) -> None:
        begun_with = self._begun_with
        for generator, raw in zip(self._generators, begun_with["generators"], strict=False):
            generator.set_state(torch.tensor(list(raw), dtype=torch.uint8))
        for sampler, state in zip(self._stateful, begun_with["samplers"], strict=False):
            sampler.load_state_dict(copy.deepcopy(state))
        for own, changed in zip(self._own, begun_with.get("attributes", ()), strict=False):
            own.put_back(changed)

    def state_dict(self) -> dict[str, Any]:
        """As it was when the epoch began: samplers read ahead, so where they are now says
        nothing."""
        return self._begun_with

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begun_with = state


def _samplers(part: Any) -> Iterator[Any]:
    """Those of a loader, and those inside them."""
    for name in ("batch_sampler", "sampler"):
        inner = getattr(part, name, None)
        if inner is not None and inner is not part:
            yield inner
            yield from _samplers(inner)


def _once(parts: Any) -> list[Any]:
    return list({id(part): part for part in parts if part is not None}.values())


class _Ordered:
    """Batches that follow from an order; `begin` is called once an epoch, and once more after each
    restore."""

    def __init__(self, source: Any) -> None:
        self._order = BatchOrder(source)
        self._is_restored = False

    def _begin_order(self, epoch: int) -> None:
        self._order.begin(epoch, is_first_time=not self._is_restored)
        self._is_restored = False

    def end(self) -> None:
        self._order.end()

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state)
        self._is_restored = True


# -- a map-style DataLoader


class SownIndex:
    """A batch's indices on their way to a worker. Where they arrive, the worker's generators are
    seeded for that batch, so what it draws does not depend on the batches before."""

    def __init__(self, seed: int, index: Any) -> None:
        self.seed = seed
        self.index = index

    def __reduce__(self) -> tuple[Any, tuple[int, Any]]:
        return _arrived, (self.seed, self.index)


def _arrived(seed: int, index: Any) -> Any:
    sow(seed)
    return index


class PlacedIndices:
    """A DataLoader's own sampler, or batch sampler, from any place."""

    def __init__(self, sampler: Any, is_for_workers: bool) -> None:
        self._sampler = sampler
        self._is_for_workers = is_for_workers
        self.seed = 0
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(self.seed, self.skipped)

    def _indices(self, seed: int, skipped: int) -> Iterator[Any]:
        stream = RandomStream(mixed(seed, "order"))
        with stream:
            indices = iter(self._sampler)
            for _ in itertools.islice(indices, skipped):
                pass
        for number in itertools.count(skipped):
            with stream:
                try:
                    index = next(indices)
                except StopIteration:
                    return
            yield SownIndex(mixed(seed, number), index) if self._is_for_workers else index


class IndexedBatches(_Ordered):
    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = PlacedIndices(getattr(loader, name), loader.num_workers > 0)
        # The program's own is left as it is. Each batch is seeded where it is loaded, so that
        # workers may stay unless their data set is to hear of the epoch.
        self._loader = _copied(loader, may_stay=not hasattr(loader.dataset, "set_epoch"))
        self._loader.__dict__[name] = self._indices

    def begin(self, epoch: int, seed: int, skipped: int) -> Iterator[Any]:
        self._begin_order(epoch)
        self._indices.seed = seed
        self._indices.skipped = skipped
        with RandomStream(seed):
            iterator = iter(self._loader)
        return _sown(iterator, seed, skipped)


def _copied(loader: DataLoader[Any], may_stay: bool) -> DataLoader[Any]:
    """The same loader with an iterator of its own. Without `may_stay` its workers end with the
    epoch: one that stays goes on with the data set and the random numbers of the epoch before,
    which a worker that is started after a restore does not have."""
    made = copy.copy(loader)
    # DataLoader lets nobody exchange its parts: they are written past its `__setattr__`.
    made.__dict__["_iterator"] = None
    made.__dict__["persistent_workers"] = may_stay and loader.persistent_workers
    return made


def _sown(iterator: Iterator[Any], seed: int, first: int) -> Iterator[Any]:
    """Each batch under random numbers of its own, which count where no worker loads it."""
    stream = RandomStream(seed)
    for number in itertools.count(first):
        stream.restart(mixed(seed, number))
        with stream:
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


# -- whatever else is iterable


class DroppedBatches(_Ordered):
    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._source = source
        if isinstance(inner := getattr(source, "base_dataloader", None), DataLoader):
            # Accelerate's, which hands out what the loader inside it loads.
            inner.__dict__["persistent_workers"] = False
        elif isinstance(source, DataLoader):
            self._source = _copied(source, may_stay=False)

    def begin(self, epoch: int, seed: int, skipped: int) -> Iterator[Any]:
        self._begin_order(epoch)
        stream = RandomStream(seed)
        with stream:
            iterator = iter(self._source)
            for _ in itertools.islice(iterator, skipped):
                pass
        return _streamed(iterator, stream)


def _streamed(iterator: Iterator[Any], stream: RandomStream) -> Iterator[Any]:
    while True:
        with stream:
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


# -- what knows its place itself


class StatefulBatches:
    """A loader's workers begin anew after a restore: what they draw at random is not drawn again
    (`not_repeated`)."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._has_begun = False
        self._is_restored = False
        self._state: dict[str, Any] | None = None

    def begin(self, epoch: int, seed: int, skipped: int) -> Iterator[Any]:
        if self._is_restored:
            with RandomStream(seed):
                self._put_back()
        for name in ("sampler", "dataset"):
            part: Any = getattr(self._loader, name, None)
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        with RandomStream(seed):
            iterator = iter(self._loader)
        self._is_restored = False
        self._has_begun = True
        return _sown(iterator, seed, skipped)

    def _put_back(self) -> None:
        self._loader.load_state_dict(copy.deepcopy(self._state) or {})
        # torchdata's makes its iterator here, and a second one when that stood at an epoch's end:
        # the second one must find the random numbers that an undisturbed one finds.
        self._loader.state_dict()

    def end(self) -> None:
        """It knows."""

    def state_dict(self) -> dict[str, Any]:
        if self._has_begun:
            with RandomStream(0):
                return {"loader": self._loader.state_dict()}
        return {"loader": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state["loader"]
        self._is_restored = True
        self._has_begun = False
