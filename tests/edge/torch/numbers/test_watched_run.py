"""A watched run: it finds where a value was first not finite, and changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.edge.torch.numbers.watched_run import BEHIND, WatchedRun
from keepstep.model.numbers import SKETCH_SUMS, RangeCount


class Planted(torch.autograd.Function):
    """The identity, but for one value of what comes out, or of what goes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: str) -> torch.Tensor:
        ctx.way = way
        y = x.clone()
        if way == "forward":
            y[0, 0] = math.nan
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back = gradients[0].clone()
        if ctx.way == "backward":
            back[0, 0] = math.nan
        return back, None


class Faulty(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Planted.apply(x, self.way)
        return made


class Logs(nn.Module):
    """A function of its own between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.log(torch.relu(self.first(x)) * 0))
        return made


def network(at: int, way: str) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]
    layers.insert(at, Faulty(way))
    return nn.Sequential(*layers)


def watched(model: nn.Module, batch: torch.Tensor | None = None) -> WatchedRun:
    torch.manual_seed(2)
    run = WatchedRun({"model": model})
    model(torch.randn(3, 4) if batch is None else batch).square().mean().backward()
    run.end()
    return run


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_the_module_whose_output_is_bad_is_named(at: int) -> None:
    origin = watched(network(at, "forward")).origin
    assert origin is not None
    assert (origin.layer, origin.operation, origin.direction) == (
        f"model.{at}",
        "Faulty",
        "forward",
    )


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_module_whose_gradient_is_bad_is_named(at: int) -> None:
    origin = watched(network(at, "backward")).origin
    assert origin is not None
    assert (origin.layer, origin.operation) == (f"model.{at}", "Faulty")
    assert origin.direction == "backward"


def test_a_function_between_modules_is_named_by_its_operation() -> None:
    origin = watched(Logs()).origin
    assert origin is not None
    assert (origin.layer, origin.operation) == ("model", "Logs, log")


def test_a_loss_behind_the_model_is_named() -> None:
    model = network(0, "nowhere")
    run = WatchedRun({"model": model})
    (model(torch.randn(3, 4)).sum() * 0).sqrt().backward()
    run.end()
    assert run.origin is not None and run.origin.layer == BEHIND


def test_a_gradient_that_a_parameter_is_given_is_named() -> None:
    model = network(0, "nowhere")
    model[3].weight.register_hook(lambda g: g * math.nan)
    origin = watched(model).origin
    assert origin is not None
    assert origin.layer == "model.3" and "model.3.weight" in origin.operation


def test_a_bad_input_is_nobodys_fault_in_the_model() -> None:
    batch = torch.randn(3, 4)
    batch[1, 2] = math.inf
    run = watched(network(0, "nowhere"), batch)
    assert run.origin is None or run.origin.direction == "backward"
    assert run.bad_inputs == ["input [0][0] of model"]


def test_nothing_is_found_where_all_is_finite() -> None:
    run = watched(network(0, "nowhere"))
    assert run.origin is None and not run.bad_inputs and not run.gave_bad
    assert run.norm is not None and run.norm > 0


def test_looking_changes_no_bit() -> None:
    gradients = []
    for look in (True, False):
        model = network(2, "nowhere")
        if look:
            watched(model)
        else:
            torch.manual_seed(2)
            model(torch.randn(3, 4)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_the_digest_is_of_every_bit() -> None:
    def digest(flip: bool) -> str:
        model = network(0, "nowhere")
        if flip:

            def flipped(gradient: torch.Tensor) -> torch.Tensor:
                made = gradient.clone()
                made.view(torch.int32)[0, 1] ^= 1
                return made

            model[1].weight.register_hook(flipped)
        return watched(model).digest

    assert digest(False) == digest(False)
    assert digest(True) != digest(False)


def test_runs_are_as_far_apart_as_their_gradients() -> None:
    """Sums with random signs: what is moved by a thousandth lies about a thousandth apart."""

    def run(factor: float) -> WatchedRun:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        state = torch.get_rng_state()
        run = WatchedRun({"model": model})
        given = torch.ones(2, 40)
        given[0] *= factor
        (model(given) ** 2).mean().backward()
        run.end()
        assert torch.equal(torch.get_rng_state(), state)
        return run

    one, same, near = run(1.0), run(1.0), run(1.001)
    assert one.sketch == same.sketch and len(one.sketch) == SKETCH_SUMS
    apart = math.dist(one.sketch, near.sketch) / math.hypot(*one.sketch)
    assert 1e-4 < apart < 1e-2


def digest_of(act: str, factor: float = 1.0) -> str:
    """Of two passes, of which the second one's gradients are `factor` times as large; `act`: what
    happens before the first, or between both."""
    torch.manual_seed(2)
    model = network(0, "nowhere")
    run = WatchedRun({"model": model})
    if act == "a sum before":
        run.gives()
    model(torch.randn(3, 4)).square().mean().backward()
    if act == "a sum between":
        run.gives()
    if act == "an update between":
        run.updates()
    (model(torch.randn(3, 4)).square().mean() * factor).backward()
    run.end()
    return run.digest


def test_the_digest_is_of_what_depends_on_no_peer() -> None:
    """Else ranks that have changed places would differ in bits where sums are made in their
    order."""
    assert digest_of("nothing") and digest_of("nothing") != digest_of("nothing", 2.0)
    assert digest_of("a sum between") == digest_of("nothing")  # of what is there, in an overlap
    assert digest_of("a sum before") == ""  # it may be in all that follows
    assert digest_of("an update between") == digest_of("an update between", 2.0)
    assert digest_of("an update between") not in ("", digest_of("nothing"))


def test_nothing_is_looked_at_behind_its_end() -> None:
    model = network(0, "nowhere")
    run = watched(model)
    before = run.digest
    model(torch.randn(3, 4)).sum().backward()
    assert run.digest == before


class Gives(nn.Module):
    """What it is told to, in a type of few bits; what follows computes with wider ones."""

    def __init__(self, values: list[float], dtype: torch.dtype) -> None:
        super().__init__()
        self.values = torch.tensor(values).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values


NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def narrow(*layers: nn.Module, x: float = 1.0) -> RangeCount | None:
    run = WatchedRun({"model": nn.ModuleList(layers)})
    for layer in layers:
        layer(torch.tensor([x]))
    run.end()
    return run.narrow


@pytest.mark.parametrize("dtype", NARROW)
def test_values_that_their_type_has_no_place_for_are_counted(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    right = [0.0, kind.tiny, -1.0, kind.max / 2]
    name = str(dtype).removeprefix("torch.")
    found = narrow(Gives(right, dtype), Gives([*right, kind.max, -kind.max, math.nan], dtype))
    assert found == RangeCount("model.1", name, 7, 3, 0)
    small = [kind.tiny / 2, -kind.tiny / 2, kind.smallest_normal / 4]
    found = narrow(Gives([*right, *small], dtype), Gives([*small, *small, 1.0], dtype))
    assert found == RangeCount("model.1", name, 7, 0, 6)
    assert narrow(Gives([*right, *small], dtype)) is None  # a few are in any softmax
    assert narrow(Gives(right, dtype)) is None


def test_what_comes_in_bad_says_nothing_of_a_range() -> None:
    assert narrow(Gives([math.inf, 1.0], torch.float16), x=math.nan) is None
    assert narrow(Gives([math.inf, 1e30], torch.float32)) is None  # others look for that


@pytest.mark.parametrize("dtype", NARROW)
def test_a_layer_that_overflows_is_the_origin_and_its_range_is_told(dtype: torch.dtype) -> None:
    run = WatchedRun({"model": (layer := Gives([math.nan, 1.0], dtype))})
    layer(torch.ones(1))
    run.end()
    assert run.origin is not None and run.origin.layer == "model"
    assert run.narrow is not None and run.narrow.over == 1


@pytest.mark.parametrize(
    ("scale", "x", "over", "under"), [(6e4, 100.0, 16, 0), (1e-6, 1.0, 0, 16), (1.0, 1.0, 0, 0)]
)
def test_gradients_that_their_type_has_no_place_for_are_counted(
    scale: float, x: float, over: int, under: int
) -> None:
    """What arrives has one: float16 multiplies it by what came in."""
    model = nn.Linear(4, 4, bias=False).half()
    nn.init.constant_(model.weight, 0.5 / x)
    run = WatchedRun({"model": model})
    (model(torch.full((1, 4), x, dtype=torch.float16)).float() * scale).sum().backward()
    run.end()
    found = run.narrow
    if over or under:
        assert found is not None and found.layer == "the backward pass of model"
        assert (found.values, found.over, found.under) == (16, over, under)
        assert "the backward pass of model gave as float16" in str(found)
    else:
        assert found is None
