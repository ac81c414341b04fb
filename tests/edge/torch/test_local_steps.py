"""Local steps: parameters become the mean over ranks, in whatever types they are, or stay as they
are; forward and backward passes ask nobody for anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from keepstep.edge.torch import local_steps
from keepstep.edge.torch.local_steps import average, without_reduction

RANKS = 3


def parameters(rank: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    kinds = [((2, 3), torch.float32), ((5,), torch.float64), ((), torch.float32)]
    found: list[torch.Tensor] = [
        nn.Parameter(torch.randn(size, dtype=kind, generator=made)) for size, kind in kinds
    ]
    return [*found, nn.Parameter(torch.full((4,), float(rank)), requires_grad=False)]


class Peers:
    """What an all-reduce adds: ranks 1 and 2 have given theirs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        patch.setattr(local_steps.dist, "all_reduce", self.all_reduce)

    def all_reduce(self, flat: torch.Tensor) -> None:
        self.calls += 1
        for rank in range(1, RANKS):
            alike = [p for p in parameters(rank) if p.requires_grad and p.dtype == flat.dtype]
            flat += torch.cat([p.detach().reshape(-1) for p in alike])


def test_parameters_are_the_mean_and_what_learns_nothing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, mine = Peers(monkeypatch), parameters(0)
    versions = [p._version for p in mine]
    average(mine, RANKS, lambda: None)
    every = [parameters(rank) for rank in range(RANKS)]
    for number, found in enumerate(mine[:3]):
        assert torch.equal(found, sum(one[number] for one in every) / RANKS)
    assert torch.equal(mine[3], torch.zeros(4))
    assert peers.calls == 2, "one for each type"
    changed = [before != p._version for before, p in zip(versions, mine, strict=True)]
    assert changed == [True] * 3 + [False], "what captures goes by versions"


def test_what_a_lost_peer_leaves_reaches_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    Peers(monkeypatch)
    mine = parameters(0)

    def lost() -> None:
        raise RuntimeError("a peer is lost")

    with pytest.raises(RuntimeError, match="a peer is lost"):
        average(mine, RANKS, lost)
    assert all(torch.equal(a, b) for a, b in zip(mine, parameters(0), strict=True))


def test_no_pass_asks_anybody() -> None:
    class Model(nn.Module):
        require_forward_param_sync = True
        is_local = False

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.is_local = True
            yield
            self.is_local = False

    model = Model()
    with without_reduction([model]):
        assert model.is_local and not model.require_forward_param_sync
    assert not model.is_local
