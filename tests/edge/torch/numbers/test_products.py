"""Checksums of products: what is right fits, whatever its size; what is off by more than rounding
does not, and its layer is named; and looking changes no bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepstep.edge.torch.numbers.products import Products


class Twice(nn.Module):
    """One layer that is used twice, and inputs of three dimensions."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias)
        self.last = nn.Linear(width, 3, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.first(torch.tanh(self.first(x)))))
        return found


def run(model: nn.Module, x: torch.Tensor, watched: bool = True) -> list[tuple[str, str]]:
    products = Products({"model": model} if watched else {})
    model.zero_grad()
    model(x).square().mean().backward()
    products.end()
    return [(origin.layer, origin.direction) for origin in products.wrong]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 300),
    st.integers(1, 40),
    st.floats(1e-20, 1e12),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_what_is_right_fits(
    seed: int, width: int, rows: int, scale: float, dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(seed)
    model = Twice(width, bias).to(dtype)
    x = (scale * torch.randn(2, rows, width)).to(dtype)
    assert run(model, x) == []


@pytest.mark.parametrize("layer", ["first", "last"])
def test_an_output_that_is_wrong_is_named(layer: str) -> None:
    torch.manual_seed(1)
    model = Twice(16, bias=True)

    def plant(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
        wrong = y.clone()
        wrong[0, 0, 1] += 0.01
        return wrong

    getattr(model, layer).register_forward_hook(plant)
    assert set(run(model, torch.randn(2, 4, 16))) == {(f"model.{layer}", "forward")}


def test_a_weights_gradient_that_is_wrong_is_named() -> None:
    torch.manual_seed(1)
    model = Twice(16, bias=True)
    model.last.weight.register_hook(lambda gradient: gradient + torch.eye(3, 16))
    assert run(model, torch.randn(2, 4, 16)) == [("model.last", "backward")]


def test_looking_changes_no_bit() -> None:
    torch.manual_seed(1)
    model, x = Twice(16, bias=False), torch.randn(2, 4, 16)
    found = []
    for watched in (True, False):
        assert run(model, x, watched) == []
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def test_what_is_not_finite_is_for_others() -> None:
    model = Twice(4, bias=True)
    assert run(model, torch.full((1, 2, 4), float("nan"))) == []


def test_nothing_is_looked_at_behind_its_end() -> None:
    model = Twice(4, bias=True)
    products = Products({"model": model})
    products.end()
    with torch.no_grad():
        model.first.weight.mul_(2)
    model(torch.randn(1, 2, 4)).sum().backward()
    assert products.wrong == [] and not model.first._forward_hooks
