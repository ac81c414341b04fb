"""Predict: the bytes an optimizer will add with its first step, told before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.edge.torch.parts import parameters_of
from keepstep.edge.torch.predict import coming_bytes

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.1)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [
        v
        for p in parameters_of(optimizer)
        for v in optimizer.state[p].values()
        if isinstance(v, torch.Tensor)
    ]
    return sum(t.numel() * t.element_size() for t in tensors)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)).to(dtype)
    made[1].bias.requires_grad_(False)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_is_what_the_first_step_brings(kind: str, dtype: torch.dtype) -> None:
    net = model(dtype)
    optimizer = KINDS[kind](net.parameters())
    predicted = coming_bytes(optimizer)
    net(torch.randn(3, 40, dtype=dtype)).sum().backward()
    before = [p.clone() for p in net.parameters()], torch.get_rng_state()
    assert predicted == coming_bytes(optimizer), "gradients that are there change nothing"
    assert not optimizer.state and all(
        torch.equal(p, b) for p, b in zip(net.parameters(), before[0], strict=True)
    )
    assert torch.equal(torch.get_rng_state(), before[1])
    optimizer.step()
    assert predicted == held_bytes(optimizer)


def test_nothing_comes_when_it_is_there() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    assert coming_bytes(optimizer) == 0


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_that_needs_a_closure_or_real_numbers_cannot_be_told(kind: Any) -> None:
    assert coming_bytes(kind(model().parameters())) is None


def test_hooks_of_the_live_optimizer_do_not_run() -> None:
    """The session's own fence is one of them."""
    net, ran = model(), []
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    assert coming_bytes(optimizer) is not None
    assert ran == []
