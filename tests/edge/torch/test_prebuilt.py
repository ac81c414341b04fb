"""Prebuilt: the same bits whoever builds, nobody's generators moved, and handed out once."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from keepstep.edge.torch import prebuilt as module
from keepstep.edge.torch.prebuilt import build_ahead, prebuilt
from keepstep.errors import ConfigError

MODELS = """
import random
import numpy
import torch

calls = 0

def make():
    global calls
    calls += 1
    return torch.nn.Linear(3, 3), torch.randn(2), random.random(), numpy.random.rand()

def another():
    return torch.nn.Linear(3, 3)

def fails():
    raise RuntimeError("no room")

number = 3
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "prebuilt_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "_waiting", {})
    yield
    sys.modules.pop("prebuilt_models", None)


def bits(built: tuple[torch.nn.Linear, torch.Tensor, float, float]) -> list[object]:
    linear, drawn, *numbers = built
    return [linear.weight.tolist(), linear.bias.tolist(), drawn.tolist(), *numbers]


def unheard(target: str, error: BaseException) -> None:
    raise AssertionError(target) from error


def test_it_is_the_same_whoever_builds_it_and_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    now = bits(prebuilt("prebuilt_models:make"))
    torch.manual_seed(2)
    random.seed(2)
    numpy.random.seed(2)
    build_ahead(["prebuilt_models:make"], unheard)
    torch.manual_seed(3)
    assert bits(prebuilt("prebuilt_models:make")) == now
    other = prebuilt("prebuilt_models:another").weight.tolist()
    assert other != now[0], "another name, another seed"


@pytest.mark.parametrize("is_ahead", [True, False])
def test_the_programs_generators_stay_as_they_were(is_ahead: bool) -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    undisturbed = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
    if is_ahead:
        build_ahead(["prebuilt_models:make"], unheard)
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    prebuilt("prebuilt_models:make")
    assert [torch.rand(3).tolist(), random.random(), numpy.random.rand()] == undisturbed


def test_what_was_built_ahead_is_handed_out_once() -> None:
    build_ahead(["prebuilt_models:make"], unheard)
    models = sys.modules["prebuilt_models"]
    first = prebuilt("prebuilt_models:make")
    assert models.calls == 1
    assert prebuilt("prebuilt_models:make")[0] is not first[0] and models.calls == 2


def test_what_cannot_be_built_ahead_is_the_programs_to_build() -> None:
    heard: list[tuple[str, str]] = []
    targets = ["prebuilt_models:fails", "prebuilt_models:nothing", "prebuilt_models:another"]
    build_ahead(targets, lambda target, error: heard.append((target, type(error).__name__)))
    assert heard == [
        ("prebuilt_models:fails", "RuntimeError"),
        ("prebuilt_models:nothing", "ConfigError"),
    ]
    with pytest.raises(RuntimeError, match="no room"):
        prebuilt("prebuilt_models:fails")


def test_generators_are_put_back_when_it_fails() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        prebuilt("prebuilt_models:fails")
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("prebuilt_models", "expected 'module:function', found 'prebuilt_models'"),
        (":make", "expected 'module:function'"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("prebuilt_models:nothing", "has no attribute 'nothing'"),
        ("prebuilt_models:number", "found 3"),
    ],
)
def test_what_is_no_function_is_refused_by_name(target: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        prebuilt(target)
