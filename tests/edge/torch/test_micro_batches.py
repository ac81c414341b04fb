"""Whoever computes a micro-batch, its home's sum of gradients is the same, bit for bit."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepstep.core.balance.shares import LEAST_SHARE, equal_shares, work_of
from keepstep.edge.torch import micro_batches
from keepstep.edge.torch.micro_batches import (
    DeviceSpans,
    Gradients,
    HostSpans,
    MicroBatch,
    MicroBatchRun,
    MovingBuffers,
    reducing,
)
from keepstep.errors import ConfigError

SEED = 11


class Reducing(nn.Sequential):
    """A model that knows `no_sync`, and in which passes it was."""

    synced: list[bool]

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.synced, self.is_local = [], False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.synced.append(not self.is_local)
        found: torch.Tensor = super().forward(given)
        return found


def model() -> Reducing:
    torch.manual_seed(3)
    made = Reducing(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 1))
    made.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return made


class Wire:
    """What `isend` gives, `recv` finds: ranks run one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self._boxes: dict[tuple[int, int], deque[torch.Tensor]] = {}
        patch.setattr(micro_batches.dist, "isend", self.isend)
        patch.setattr(micro_batches.dist, "recv", self.recv)

    def isend(self, tensor: torch.Tensor, to: int) -> Any:
        self._boxes.setdefault((self.rank, to), deque()).append(tensor.clone())
        return self

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._boxes[source, self.rank].popleft())

    def wait(self) -> None: ...

    @property
    def is_empty(self) -> bool:
        return not any(self._boxes.values())


def run(
    wire: Wire, shares: tuple[int, ...], in_order: bool = True, seed: int = SEED
) -> list[list[torch.Tensor | None]]:
    """Each rank's gradients in front of the reduction. Takers run before who gives."""
    work = work_of(shares)
    homes = equal_shares(sum(shares), len(shares))
    found: dict[int, list[torch.Tensor | None]] = {}
    for rank in sorted(range(len(shares)), key=lambda r: homes[r] - shares[r]):
        wire.rank = rank
        live = model()
        torch.manual_seed(100 + rank)  # of its own
        before = torch.get_rng_state()
        mine = MicroBatchRun(
            [live],
            Gradients(list(live.parameters())),
            HostSpans(),
            MovingBuffers([live]),
            rank,
            in_order,
        )
        for micro in mine.run(5, work, len(shares) / sum(shares), seed):
            given = torch.arange(8.0).reshape(2, 4) * 0.1 + micro
            (live(given).square().mean() * micro.weight).backward()
        assert live.synced == [False] * (shares[rank] - 1) + [True]
        assert not in_order or torch.equal(torch.get_rng_state(), before)
        found[rank] = [p.grad for p in live.parameters()]
    assert wire.is_empty
    return [found[rank] for rank in range(len(shares))]


def equal(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@given(st.lists(st.integers(LEAST_SHARE, 7), min_size=2, max_size=4).map(tuple))
def test_whatever_the_shares_are_each_rank_gives_the_same_bits(shares: tuple[int, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wire = Wire(patch)
        undisturbed = run(wire, equal_shares(sum(shares), len(shares)))
        for mine, usual in zip(run(wire, shares), undisturbed, strict=True):
            assert equal(mine, usual)


def test_the_sum_over_ranks_is_that_of_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    even, moved = run(wire, (4, 4)), run(wire, (2, 6))
    for ranks in (even, moved):
        live = model()
        live.eval()
        assert len(ranks) == 2
    summed = [
        [None if a is None or b is None else a + b for a, b in zip(*ranks, strict=True)]
        for ranks in (even, moved)
    ]
    assert equal(*summed) and summed[0][-1] is not None


def test_random_numbers_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    assert not equal(run(wire, (3, 3))[0], run(wire, (3, 3), seed=12)[0])


def test_out_of_order_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Wire):
        def isend(self, tensor: torch.Tensor, to: int) -> Any:
            raise AssertionError("sent")

    found = run(Silent(monkeypatch), (2, 6), in_order=False)
    assert all(rank[-1] is not None for rank in found)


def test_a_body_that_is_left_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.rank = 1
    live = model()
    kept = [torch.full_like(p, 2.0) for p in live.parameters()]
    for parameter, gradient in zip(live.parameters(), kept, strict=True):
        parameter.grad = gradient
    before = torch.get_rng_state()
    gradients = Gradients(list(live.parameters()))
    mine = MicroBatchRun([live], gradients, HostSpans(), MovingBuffers(()), 1, True)
    bodies = mine.run(0, work_of((2, 6)), 0.25, SEED)
    next(bodies)  # one that it has taken over
    assert all(p.grad is None for p in live.parameters()) and live.is_local
    bodies.close()
    assert all(p.grad is g for p, g in zip(live.parameters(), kept, strict=True))
    assert not live.is_local and torch.equal(torch.get_rng_state(), before)


def test_gradients_of_several_types_are_packed_and_added() -> None:
    first = nn.ParameterList(
        [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2, dtype=torch.float64))]
    )
    second = copy.deepcopy(first)
    for number, parameter in enumerate(first):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    packed = [tensor.clone() for tensor in Gradients(list(first)).flat()]
    blank = Gradients(list(second)).blank()
    assert [(t.dtype, t.shape) for t in blank] == [(t.dtype, t.shape) for t in packed]
    adding = Gradients(list(second))
    adding.add(packed)
    adding.add(packed)
    for one, two in zip(first, second, strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.equal(two.grad, one.grad + one.grad)


def test_sparse_gradients_are_refused_by_name() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"expected dense gradients, found a torch.sparse_coo"):
        Gradients(list(layer.parameters())).flat()


def test_buffers_that_a_forward_pass_changes_are_noticed() -> None:
    norm, still = nn.BatchNorm1d(2), nn.Linear(2, 2)
    for module, moves in ((norm, True), (still, False)):
        watch = MovingBuffers([module])
        watch.begin()
        module(torch.randn(4, 2))
        watch.end()
        assert watch.moved is moves


def test_host_spans_give_the_median_once() -> None:
    spans = HostSpans()
    assert spans.take_ns() == 0
    for _ in range(3):
        spans.begin()
        spans.end()
    assert spans.take_ns() > 0 and spans.take_ns() == 0


class FakeEvent:
    """Of a device whose clock is how many events there were."""

    at = 0
    over_until = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.at += 1
        self.when = FakeEvent.at

    def query(self) -> bool:
        return self.when <= FakeEvent.over_until

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query()
        return float(later.when - self.when)


def test_device_spans_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.at = FakeEvent.over_until = 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    spans = DeviceSpans()
    for _ in range(2):
        spans.begin()
        spans.end()
    assert spans.take_ns() == 0, "nothing is over"
    FakeEvent.over_until = 2
    assert spans.take_ns() == 1_000_000
    FakeEvent.over_until = 4
    assert spans.take_ns() == 1_000_000 and spans.take_ns() == 0


def test_a_micro_batch_is_a_number() -> None:
    micro = MicroBatch.of(7, 0.25)
    assert micro == 7 and micro.weight == 0.25 and type(copy.copy(micro)) is int


def test_models_that_do_not_reduce_are_named() -> None:
    plain, reduces = nn.Linear(1, 1), model()
    assert reducing([plain, reduces, 3], None, 1) == [reduces]
    assert reducing([plain], reduces, 1) == [reduces]
    with pytest.raises(ConfigError, match="expected a DistributedDataParallel model"):
        reducing([reduces], plain, 1)
