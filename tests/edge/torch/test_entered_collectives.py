"""Entered collectives: of groups that are torch's own torch counts them, and nobody guesses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.edge.torch import process_groups
from keepstep.edge.torch.process_groups import entered_collectives


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_groups_none_was_entered() -> None:
    assert entered_collectives() == 0


def test_each_collective_counts_whoever_enters_it(group: None) -> None:
    second = dist.new_group([0])
    before = entered_collectives()
    assert before is not None
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0, group=second)
    assert entered_collectives() == before + 2
    model = DistributedDataParallel(torch.nn.Linear(3, 3))  # in C++
    before = entered_collectives()
    output = model(torch.ones(2, 3))
    assert entered_collectives() == before, "no buffers are sent around"
    output.sum().backward()
    assert before is not None and entered_collectives() == before + 1


def test_where_some_group_does_not_count_nobody_knows(
    group: None,
) -> None:
    dist.new_group([0], backend="fake")
    assert entered_collectives() is None


def test_too_many_groups_are_not_asked(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "MOST_ASKED", 1)
    assert entered_collectives() is not None
    dist.new_group([0])
    assert entered_collectives() is None
