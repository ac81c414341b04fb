"""Partial sums over gloo, ranks as threads of one process: what comes out is the mean of those who
came, in the order of ranks, bit for bit, on all ranks; and a lost peer ends every wait."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from keepstep.core.balance.partial import PartialTurns
from keepstep.edge.torch.groups import TorchGroup
from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.micro_batches import Gradients
from keepstep.edge.torch.partial_sums import PartialSums
from keepstep.edge.torch.sum_door import SumDoor
from keepstep.errors import KeepstepError
from keepstep.model.partial import Given, Late, PartialRule

WITHIN = timedelta(seconds=60)
RANKS = 4
SIZES = ((3, 5), (7,), (1,), (2,))  # fewer numbers of float64 than ranks
N, F, OLD = Given.NOTHING, Given.FRESH, Given.OLDER
FOREVER_NS = 600 * 10**9


class Rank:
    """One rank: its parameters, and what it computes."""

    def __init__(self, rank: int, rule: PartialRule, store: dist.Store) -> None:
        self.rank, self.members = rank, Membership()
        self.parameters = [
            torch.nn.Parameter(torch.zeros(size, dtype=torch.float64 if size == (1,) else None))
            for size in SIZES
        ]
        self.turns = PartialTurns(rule)
        self.group = TorchGroup(store, rank, rule.ranks, WITHIN, "g", self.members)
        gradients = Gradients(self.parameters)
        self.sums = PartialSums(self.group, self.members, gradients, rank, rule.ranks)

    def compute(self, step: int) -> None:
        for parameter, gradient in zip(self.parameters, gradients_of(self.rank, step), strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def step(self, step: int, known: Sequence[Given] | None = None) -> tuple[Given, ...] | None:
        if self.turns.turn.computes(self.rank):
            self.compute(step)
        given = self.sums.sum((5, step), self.turns.turn, known)
        if given is not None:
            self.turns.over(given)
        return given

    @property
    def found(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self.parameters]


def gradients_of(rank: int, step: int) -> list[torch.Tensor | None]:
    """The last one nobody has, the first of them not everybody."""
    made = torch.Generator().manual_seed(100 * step + rank)
    kinds = (torch.float64 if size == (1,) else torch.float32 for size in SIZES)
    found: list[torch.Tensor | None] = [
        torch.randn(size, generator=made, dtype=kind)
        for size, kind in zip(SIZES, kinds, strict=True)
    ]
    return [None if rank == 1 else found[0], *found[1:3], None]


def mean_of(given: Sequence[Given], step: int) -> list[torch.Tensor | None]:
    """The dumb way."""
    parts = [
        gradients_of(rank, step - (part is OLD)) for rank, part in enumerate(given) if part is not N
    ]
    means: list[torch.Tensor | None] = []
    for number, size in enumerate(SIZES):
        there = [part[number] for part in parts]
        if all(one is None for one in there):
            means.append(None)
            continue
        kind = torch.float64 if size == (1,) else torch.float32
        total = torch.zeros(size, dtype=kind)
        for at, one in enumerate(there):
            one = torch.zeros(size, dtype=kind) if one is None else one
            total = one.clone() if at == 0 else total + one
        means.append(total / len(parts))
    return means


def same(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(RANKS) as found:
        yield found


def ranks_of(
    pool: ThreadPoolExecutor, need: int, late: Late = "drop", wait_ns: int = 0, ranks: int = RANKS
) -> list[Rank]:
    store, rule = dist.HashStore(), PartialRule(ranks, need, wait_ns, late)
    return list(pool.map(lambda rank: Rank(rank, rule, store), range(ranks)))


def run(
    pool: ThreadPoolExecutor, ranks: Sequence[Rank], step: int, late: Sequence[int] = ()
) -> tuple[Given, ...]:
    """Those who are late come when all others are done."""
    others = [rank for rank in ranks if rank.rank not in late]
    told = list(pool.map(lambda rank: rank.step(step), others))
    told += list(pool.map(lambda rank: rank.step(step), [ranks[number] for number in late]))
    assert len(set(told)) == 1 and told[0] is not None
    wanted = mean_of(told[0], step)
    assert all(same(rank.found, wanted) for rank in ranks)
    entered = {rank.members.entered for rank in ranks}
    assert entered == {0}, "who is late is not behind in what all enter"
    return told[0]


@pytest.mark.parametrize("wait_ns", [0, FOREVER_NS])
def test_where_all_have_to_come_it_is_the_mean_of_all(
    pool: ThreadPoolExecutor, wait_ns: int
) -> None:
    """Nobody waits for anything when all are there."""
    ranks = ranks_of(pool, RANKS, wait_ns=wait_ns)
    for step in range(5):
        assert run(pool, ranks, step) == (F, F, F, F)


def test_those_who_are_not_needed_are_waited_for_as_long_as_is_wished(
    pool: ThreadPoolExecutor,
) -> None:
    ranks = ranks_of(pool, 1, wait_ns=FOREVER_NS)
    assert run(pool, ranks, 0) == (F, F, F, F)


@pytest.mark.parametrize("late", [0, 3])
def test_a_late_gradient_is_dropped_and_its_rank_sits_out_the_next_step(
    pool: ThreadPoolExecutor, late: int
) -> None:
    """Rank 0, too: nobody's presence is needed."""
    ranks = ranks_of(pool, RANKS - 1)
    for step in range(0, 8, 2):
        parts = run(pool, ranks, step, [late])
        assert [rank for rank, part in enumerate(parts) if part is N] == [late]
        assert not ranks[0].turns.turn.computes(late)
        assert run(pool, ranks, step + 1) == parts


def test_a_late_gradient_is_added_in_the_next_step(pool: ThreadPoolExecutor) -> None:
    ranks = ranks_of(pool, RANKS - 2, "add")
    for step in range(0, 8, 2):
        assert run(pool, ranks, step, [1, 2]) == (F, N, N, F)
        assert run(pool, ranks, step + 1) == (F, OLD, OLD, F)


def test_the_next_sum_waits_for_who_was_late_in_this_one(pool: ThreadPoolExecutor) -> None:
    """So nobody is more than one step behind."""
    ranks = ranks_of(pool, RANKS - 1)
    first = [pool.submit(rank.step, 0) for rank in ranks[:3]]
    assert [one.result(60) for one in first] == [(F, F, F, N)] * 3
    second = [pool.submit(rank.step, 1) for rank in ranks[:3]]
    with pytest.raises(TimeoutError):
        second[0].result(0.3)
    assert ranks[3].step(0) == (F, F, F, N)
    assert ranks[3].step(1) == (F, F, F, N)
    assert [one.result(60) for one in second] == [(F, F, F, N)] * 3


@pytest.mark.parametrize("late", ["drop", "add"])
def test_a_record_played_back_gives_the_same_bits_whoever_is_slow(
    pool: ThreadPoolExecutor, late: Late
) -> None:
    draw, live, played = random.Random(3), ranks_of(pool, 2, late), ranks_of(pool, 2, late)
    for step in range(10):
        able = [rank.rank for rank in live if rank.turns.turn.computes(rank.rank)]
        given = run(pool, live, step, draw.sample(able, draw.randint(0, len(able) - 2)))
        again: list[Future[tuple[Given, ...] | None]] = [
            pool.submit(rank.step, step, given) for rank in draw.sample(played, RANKS)
        ]
        assert all(one.result(60) == given for one in again)
        assert all(same(one.found, other.found) for one, other in zip(live, played, strict=True))


@pytest.mark.parametrize("need", [1, RANKS])
def test_a_lost_peer_ends_every_wait_and_changes_no_gradient(
    pool: ThreadPoolExecutor, need: int
) -> None:
    """Those who wait for the word, and the one who waits before it closes."""
    ranks = ranks_of(pool, need, wait_ns=FOREVER_NS)
    for rank in ranks:
        rank.members.watched = True
    under_way = [pool.submit(rank.step, 0) for rank in ranks[1:]]
    for rank in ranks[1:]:
        while not rank.members._pending:
            pass
        rank.members.lose("rank 0 is gone")
    assert [one.result(60) for one in under_way] == [None] * 3
    assert all(same(rank.found, gradients_of(rank.rank, 0)) for rank in ranks[1:])
    assert all(rank.members.is_worthless for rank in ranks[1:])


def test_a_word_about_another_step_is_not_taken(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(pool, 2, ranks=2)
    place = SumDoor.come
    monkeypatch.setattr(SumDoor, "come", lambda self, *given: min(0, place(self, *given) or 0))
    word = torch.tensor([5, 7, 1, 1])
    ranks[0].group.exchange([], [(word, 1)], 1 << 29 | (5 << 20) << 2)
    with pytest.raises(KeepstepError, match=r"who came to \(5, 0\), found who came to \(5, 7\)"):
        ranks[1].step(0)


def test_the_door_counts_whoever_comes_from_wherever(pool: ThreadPoolExecutor) -> None:
    """Many at once, against what each of them was told."""
    store = dist.HashStore()
    for seed in range(20):
        many = random.Random(seed).sample(range(40), 40)
        doors = [SumDoor(store, f"{seed}") for _ in many]
        places = list(pool.map(SumDoor.come, doors, many, [True] * 40))
        assert sorted(place for place in places if place is not None) == list(range(40))
        door = SumDoor(store, f"{seed}")
        assert door.come(99, False) is None and door.look() == (40, 1)
        assert door.close(lambda: False) == list(range(40))
        assert door.come(100, True) is None, "it is late"


def test_what_all_have_come_to_is_forgotten(pool: ThreadPoolExecutor) -> None:
    ranks = ranks_of(pool, RANKS - 1)
    store = ranks[0].group.store
    before = store.num_keys()
    for step in range(12):
        run(pool, ranks, step, [2] if step % 2 == 0 else [])
    assert store.num_keys() - before <= 2 * (RANKS + 1)
