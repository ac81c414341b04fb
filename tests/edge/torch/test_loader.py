"""A loader goes on with the batches that an undisturbed one would have given, from any place, in
any process, and draws nobody else's random numbers."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from keepstep.edge.torch.batches import not_repeated
from keepstep.edge.torch.foreign_draws import ForeignDraws
from keepstep.edge.torch.loader import Loader, Loaders
from keepstep.edge.torch.random_stream import RandomStream
from keepstep.errors import ConfigError
from keepstep.model.numbers import BatchPlace

ITEMS = 11


def noise() -> list[float]:
    """What an augmentation draws."""
    return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


class Items(Dataset[list[float]]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> list[float]:
        self.read += 1
        return [float(index), *noise()]


class Stream(IterableDataset[list[float]]):
    def __iter__(self) -> Iterator[list[float]]:
        order = list(range(ITEMS))
        random.shuffle(order)
        for index in order:
            yield [float(index), *noise()]


class OwnSampler(Sampler[int]):
    """Draws as it goes, and remembers how often it was gone through."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        for _ in range(ITEMS):
            yield (random.randrange(ITEMS) + self.times) % ITEMS

    def state_dict(self) -> dict[str, int]:
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.times = state["times"]


def seeded(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dealt() -> DistributedSampler[Any]:
    return DistributedSampler(Items(), num_replicas=2, rank=1, seed=3)


class ByEpoch(Items):
    """Another data set in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> list[float]:
        return [float(self.epoch), *super().__getitem__(index)]


KINDS: dict[str, Callable[[], Any]] = {
    "in turn": lambda: DataLoader(Items(), 3),
    "shuffled": lambda: DataLoader(Items(), 3, shuffle=True),
    "last one dropped": lambda: DataLoader(Items(), 3, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Items(), 3, shuffle=True, generator=seeded()),
    "with replacement": lambda: DataLoader(
        Items(), 3, sampler=RandomSampler(Items(), replacement=True, generator=seeded())
    ),
    "a subset": lambda: DataLoader(Items(), 2, sampler=SubsetRandomSampler(range(7))),
    "weighted": lambda: DataLoader(Items(), 2, sampler=WeightedRandomSampler([1.0, 2, 3], 7)),
    "distributed": lambda: DataLoader(Items(), 2, sampler=dealt()),
    "batches in a batch sampler": lambda: DataLoader(
        Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 4, False)
    ),
    "a sampler with state": lambda: DataLoader(Items(), 3, sampler=OwnSampler()),
    "one by one": lambda: DataLoader(Items(), None, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), 3),
    "no DataLoader": Stream,
}
WORKERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Items(), 3, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(
        Items(), 3, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "iterable": lambda: DataLoader(Stream(), 3, num_workers=2),
    "iterable, workers that stay": lambda: DataLoader(
        Stream(), 3, num_workers=2, persistent_workers=True
    ),
    "by epoch, workers that stay": lambda: DataLoader(
        ByEpoch(), 3, num_workers=2, persistent_workers=True
    ),
    "distributed": lambda: DataLoader(Items(), 2, sampler=dealt(), num_workers=1),
}


def loader_of(source: Any, saved: bytes | None = None, seed: int = 5) -> tuple[Loaders, Loader]:
    """A new process's, with what it has restored."""
    torch.manual_seed(seed)
    loaders = Loaders(ForeignDraws())
    loaders.load_state_dict({} if saved is None else pickle.loads(saved))
    loader, is_restored = loaders.add(source, None, 1)
    assert is_restored == (saved is not None)
    return loaders, loader


def plain(batch: Any) -> Any:
    if not isinstance(batch, list):
        return batch
    return [part.tolist() for part in batch] if torch.is_tensor(batch[0]) else batch


def undisturbed(make: Callable[[], Any], batches: int) -> tuple[list[Any], list[bytes]]:
    """What it gives, and its state before each batch and behind the last."""
    loaders, loader = loader_of(make())
    taken, states = [], [pickle.dumps(loaders.state_dict())]
    for _ in range(batches):
        taken.append(plain(next(loader)))
        states.append(pickle.dumps(loaders.state_dict()))
    return taken, states


def check_everywhere(make: Callable[[], Any], places: list[int], batches: int) -> None:
    taken, states = undisturbed(make, batches)
    survivors, stays = loader_of(make())
    for place in places:
        _, anew = loader_of(make(), states[place], seed=99)
        assert [plain(next(anew)) for _ in range(place, batches)] == taken[place:]
        survivors.load_state_dict(pickle.loads(states[place]))
        ahead = min(batches, place + 2)
        assert [plain(next(stays)) for _ in range(place, ahead)] == taken[place:ahead]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_every_place(kind: str) -> None:
    check_everywhere(KINDS[kind], list(range(14)), 13)


@pytest.mark.parametrize("kind", WORKERS)
def test_it_goes_on_where_workers_load(kind: str) -> None:
    check_everywhere(WORKERS[kind], [5, 2, 4], 7)


@pytest.mark.parametrize("kind", ["shuffled", "iterable"])
def test_epochs_differ(kind: str) -> None:
    taken, _ = undisturbed(KINDS[kind], 8)
    assert taken[:4] != taken[4:]
    ids = [[int(i) for batch in taken[at : at + 4] for i in batch[0]] for at in (0, 4)]
    assert sorted(ids[0]) == sorted(ids[1]) == list(range(ITEMS))


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    jumps=st.lists(st.integers(0, 13), max_size=6),
    extra=st.integers(0, 5),
)
def test_any_number_of_rollbacks_changes_nothing(kind: str, jumps: list[int], extra: int) -> None:
    taken, states = undisturbed(KINDS[kind], 13 + extra)
    loaders, loader = loader_of(KINDS[kind]())
    for place in jumps:
        loaders.load_state_dict(pickle.loads(states[place]))
        for expected in taken[place : place + extra]:
            assert plain(next(loader)) == expected
    loaders.load_state_dict(pickle.loads(states[7]))
    assert [plain(next(loader)) for _ in range(6)] == taken[7:13]


@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_nobody_elses_numbers(kind: str) -> None:
    loaders, loader = loader_of(KINDS[kind]())
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    expected = noise() + noise()
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    found = noise()
    for _ in range(6):
        next(loader)
    loaders.load_state_dict(pickle.loads(pickle.dumps(loaders.state_dict())))
    next(loader)
    assert found + noise() == expected


def test_no_data_is_read_on_the_way_to_the_place() -> None:
    _, states = undisturbed(KINDS["shuffled"], 3)
    items = Items()
    _, loader = loader_of(DataLoader(items, 3, shuffle=True), states[3])
    next(loader)
    assert items.read == 2  # of eleven, the last batch


def test_an_epoch_ends_for_loops_and_not_for_next() -> None:
    _, loader = loader_of(DataLoader(Items(), 4))
    assert [len(list(loader)) for _ in loader.epochs(3)] == [3, 3, 3]
    assert loader.epoch == 3 and loader.batch == 0
    assert [int(plain(next(loader))[0][0]) for _ in range(4)] == [0, 4, 8, 0]
    assert len(list(loader)) == 2  # what is left of that epoch
    assert list(loader.epochs(5)) == []


def test_a_restore_at_the_end_of_an_epoch_begins_the_next_one() -> None:
    _, states = undisturbed(KINDS["in turn"], 4)
    _, loader = loader_of(KINDS["in turn"](), states[4])
    epochs = [(epoch, len(list(loader))) for epoch in loader.epochs(2)]
    assert epochs == [(0, 0), (1, 4)]


def test_a_rollback_within_a_for_loop_takes_it_back() -> None:
    loaders, loader = loader_of(KINDS["in turn"]())
    state, firsts = b"", []
    for number, batch in enumerate(loader):
        firsts.append(int(plain(batch)[0][0]))
        if number == 0:
            state = pickle.dumps(loaders.state_dict())
        if number == 2:
            loaders.load_state_dict(pickle.loads(state))
    assert firsts == [0, 3, 6, 3, 6, 9]


def test_a_sampler_hears_which_epoch_it_is() -> None:
    sampler = dealt()
    _, states = undisturbed(lambda: DataLoader(Items(), 2, sampler=dealt()), 4)
    _, loader = loader_of(DataLoader(Items(), 2, sampler=sampler), states[4])
    next(loader)
    assert sampler.epoch == 1


def test_other_numbers_of_ranks_go_on_after_as_many_items() -> None:
    _, states = undisturbed(KINDS["one by one"], 6)
    loaders = Loaders(ForeignDraws())
    loaders.load_state_dict(pickle.loads(states[6]))
    loader, _ = loaders.add(KINDS["one by one"](), None, 2)
    assert (loader.epoch, loader.batch) == (0, 3)


@pytest.mark.parametrize(("size", "batch", "again"), [(4, 5, 0), (8, 2, 4), (3, 6, 2), (2, 10, 0)])
def test_batches_of_another_size_go_on_after_as_many_items(
    size: int, batch: int, again: int
) -> None:
    """They went on after as many batches, and items were never seen."""
    items = list(range(60))
    _, states = undisturbed(lambda: DataLoader(items, 2), 10)
    _, loader = loader_of(DataLoader(items, size), states[10])
    assert (loader.epoch, loader.batch) == (0, batch)
    assert next(loader)[0] == 20 - again, "none is left out"
    assert bool(loader.remark) == (size != 2)
    assert (f"{again} of them come once more" in loader.remark) == bool(again)


def test_a_place_of_before_sizes_were_kept_is_that_of_as_many_batches() -> None:
    _, states = undisturbed(lambda: DataLoader(list(range(60)), 2), 10)
    saved = pickle.loads(states[10])
    del saved["0"]["batch_size"]
    _, loader = loader_of(DataLoader(list(range(60)), 4), pickle.dumps(saved))
    assert loader.batch == 10 and not loader.remark


def test_an_iterator_is_refused_because_it_cannot_begin_anew() -> None:
    with pytest.raises(ConfigError, match="cannot be begun anew"):
        loader_of(iter(DataLoader(Items())))


def test_an_empty_epoch_is_an_error_not_an_endless_loop() -> None:
    _, loader = loader_of(DataLoader(Items(), 20, drop_last=True))
    with pytest.raises(ConfigError, match="no batches"):
        next(loader)


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.integers(0, 14), max_size=5),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_batches_that_are_left_out_stay_out_whatever_is_restored(
    left_out: set[int], jumps: list[int]
) -> None:
    """What comes is what would have come without them, and from the same seeds."""
    make = lambda: DataLoader(Items(), batch_size=2, shuffle=True)  # noqa: E731
    everything, _ = undisturbed(make, 30)
    per_epoch = (ITEMS + 1) // 2
    wanted = [b for number, b in enumerate(everything) if number not in left_out][:20]
    loaders, loader = loader_of(make())
    at_first = pickle.dumps(loaders.state_dict())
    loaders.skip([BatchPlace(loader.name, n // per_epoch, n % per_epoch) for n in left_out])
    states = [at_first]  # knows of nothing that is left out
    found: list[Any] = []
    for jump in [*jumps, 0]:
        while len(found) < 20:
            found.append(plain(next(loader)))
            states.append(pickle.dumps(loaders.state_dict()))
            if jump and len(found) == jump + 5:
                break
        if jump < len(found) and jump:
            loaders.load_state_dict(pickle.loads(states[jump]))
            del found[jump:], states[jump + 1 :]
    assert found == wanted[: len(found)] and len(found) == 20
    _, again = loader_of(make(), pickle.dumps(loaders.state_dict()))
    assert plain(next(again)) == plain(next(loader))  # it is in the state


def test_batches_that_are_given_come_before_all_others_and_move_no_place() -> None:
    loaders, loader = loader_of(DataLoader(Items(), batch_size=2))
    first = plain(next(loader))
    loaders.forget_taken()
    loaders.give([("0", "other's"), ("unknown", "nobody's")])
    assert next(loader) == "other's"
    assert loaders.taken() == [] and loader.batch == 1
    state = pickle.dumps(loaders.state_dict())
    loaders.give([("0", "other's")])
    loaders.load_state_dict(pickle.loads(state))
    assert plain(next(loader)) != first and next(loader) != "other's"


def test_names_are_taken_once_and_find_their_place() -> None:
    torch.manual_seed(5)
    loaders = Loaders(ForeignDraws())
    loaders.add(Stream(), "train", 1)[0].__next__()
    loaders.add(Stream(), None, 1)
    with pytest.raises(ConfigError, match="'train' is taken"):
        loaders.add(Stream(), "train", 1)
    again = Loaders(ForeignDraws())
    again.load_state_dict(copy.deepcopy(loaders.state_dict()))
    assert again.unclaimed == ["1", "train"]
    assert again.add(Stream(), "train", 1)[0].batch == 1
    assert again.unclaimed == ["1"]
    assert again.state_dict().keys() == loaders.state_dict().keys()


# -- what keeps its own place


class OwnPlace:
    """As a loader that keeps its own place does: reads ahead, and knows what it has given."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        while self.given < 5:
            self.given += 1
            yield self.given * 10
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state.get("given", 0)


def test_what_keeps_its_own_place_is_asked() -> None:
    check_everywhere(OwnPlace, list(range(12)), 11)


def test_workers_that_stay_are_the_programs_own_to_have() -> None:
    source = DataLoader(ByEpoch(), 3, num_workers=1, persistent_workers=True)
    _, loader = loader_of(source)
    next(loader)
    assert source.persistent_workers and source._iterator is None


def test_what_is_not_repeated_is_said() -> None:
    torchdatas = OwnPlace()
    assert not_repeated(torchdatas) == "" == not_repeated(DataLoader(Items(), 3, num_workers=2))
    torchdatas.num_workers = 2  # type: ignore[attr-defined]
    assert "the random numbers of its workers" in not_repeated(torchdatas)


class StatefulStream(Stream):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[list[float]]:
        for index in range(self.given, ITEMS):
            self.given = index + 1
            yield [float(index)]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.fixture
def torchdata() -> ModuleType:
    return pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [Items, StatefulStream])
def test_torchdatas_loader(torchdata: ModuleType, data: type[Any], workers: int) -> None:
    def make() -> Any:
        shuffled = {"shuffle": True} if data is Items else {}
        return torchdata.StatefulDataLoader(data(), 3, num_workers=workers, **shuffled)

    places = list(range(9)) if workers == 0 else [5, 2, 4]
    check_everywhere(make, places, 9)


# -- random streams


def test_a_stream_goes_on_where_it_was_left() -> None:
    whole, parts = RandomStream(7), RandomStream(7)
    with whole:
        expected = noise() + noise()
    found: list[float] = []
    for _ in range(2):
        random.random()
        with parts:
            found += noise()
    assert found == expected
    with RandomStream(8):
        assert noise() != expected[:3]


def test_a_stream_does_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    stream, before = RandomStream(7), torch.get_rng_state()
    with stream:
        first = random.random()
    stream.restart(7)
    with stream:
        assert random.random() == first
    assert torch.equal(before, torch.get_rng_state())


# -- loaders that nobody keeps the place of


@pytest.fixture
def draws() -> Iterator[ForeignDraws]:
    watch = ForeignDraws()
    watch.begin()
    yield watch
    watch.end()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_outlives_the_step_is_seen(draws: ForeignDraws, workers: int) -> None:
    iterator = iter(DataLoader(Items(), 3, num_workers=workers))
    assert not draws.any_since([])
    next(iterator)
    assert draws.any_since([])
    assert not draws.any_since([])  # nothing since
    del iterator


def test_what_is_gone_through_within_a_step_is_not(draws: ForeignDraws) -> None:
    for _ in DataLoader(Items(), 3):
        pass
    for _ in itertools.islice(DataLoader(Items(), 3), 2):
        pass
    assert not draws.any_since([])


def test_our_own_are_not(draws: ForeignDraws) -> None:
    loaders = Loaders(draws)
    loader, _ = loaders.add(DataLoader(Items(), 3), None, 1)
    next(loader)
    assert not draws.any_since([])


def test_a_loader_whose_own_state_is_protected_is_not(draws: ForeignDraws) -> None:
    class Protected:
        _iterator = iter(DataLoader(Items(), 3))

    next(Protected._iterator)
    assert not draws.any_since([Protected()])


def test_nothing_is_left_behind_at_the_end() -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__
    watch = ForeignDraws()
    watch.begin()
    watch.begin()
    assert _BaseDataLoaderIter.__next__ is not original
    watch.end()
    watch.end()
    assert _BaseDataLoaderIter.__next__ is original


class Place:
    """What else has a place in the data."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {} if self.at is None else {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state.get("at")


def test_what_has_a_place_beside_is_kept_and_restored_whenever_it_comes() -> None:
    first = Loaders(ForeignDraws())
    first.add_beside("place", Place(7))
    state = first.state_dict()
    assert state == {"place": {"at": 7}}
    early, late, later = Loaders(ForeignDraws()), Place(), Place()
    early.load_state_dict(state)
    assert early.unclaimed == ["place"]
    early.add_beside("place", late)
    assert late.at == 7 and early.unclaimed == []
    early.load_state_dict({})
    assert late.at is None and early.state_dict() == {}
    with pytest.raises(ConfigError, match="taken"):
        early.add([1], "place", 1)
    ready = Loaders(ForeignDraws())
    ready.add_beside("place", later)
    ready.load_state_dict(state)
    assert later.at == 7


class Shuffles(Sampler[int]):
    """Of an ordinary program: an order from a state of its own, another one in each epoch."""

    def __init__(self, how: str) -> None:
        self.how, self.epoch = how, 0
        self.data = Items()
        self.order = list(range(ITEMS))
        self.torch_s, self.python_s = seeded(), random.Random(5)
        self.numpy_s = numpy.random.default_rng(6)

    def __iter__(self) -> Iterator[int]:
        if self.how == "torch":
            yield from torch.randperm(ITEMS, generator=self.torch_s).tolist()
        elif self.how == "python":
            yield from self.python_s.sample(range(ITEMS), ITEMS)
        elif self.how == "numpy":
            yield from self.numpy_s.permutation(ITEMS).tolist()
        elif self.how == "counter":
            self.epoch += 1
            yield from random.Random(self.epoch).sample(range(ITEMS), ITEMS)
        else:
            self.python_s.shuffle(self.order)
            yield from self.order


@pytest.mark.parametrize("how", ["torch", "python", "numpy", "counter", "in place"])
def test_a_sampler_goes_on_from_a_state_of_its_own(how: str) -> None:
    check_everywhere(lambda: DataLoader(Items(), 3, sampler=Shuffles(how)), list(range(14)), 13)


def test_only_what_a_sampler_changes_is_kept() -> None:
    loaders, loader = loader_of(DataLoader(Items(), 3, sampler=Shuffles("counter")))
    [begun] = loaders.state_dict().values()
    assert begun["batches"]["attributes"] == [{}]
    for _ in range(5):
        next(loader)
    [later] = loaders.state_dict().values()
    assert later["batches"]["attributes"] == [{"epoch": 1}]
