"""Unfenced: an optimizer whose updates may come without hooks is copied at the boundary, and a
person is told of it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.edge.torch import unfenced
from keepstep.edge.torch.state import Protected


def protected(**given: Any) -> tuple[Protected, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **given)
    return Protected.of({"model": model, "optimizer": optimizer}, lazy=True), optimizer


def lazy(found: Protected) -> set[str]:
    return {item.spec.name for item in found.gather().items if item.lazy}


def test_an_eager_optimizer_has_its_fence() -> None:
    found, _ = protected()
    assert found.gather().remark == "" and lazy(found) == {"model.weight", "model.bias"}


def test_a_capturable_one_is_copied_at_the_boundary_and_told_once() -> None:
    found, _ = protected(capturable=True)
    remark = found.gather().remark
    assert remark.startswith("what these optimizers update is copied at the step's boundary")
    assert "optimizer: it is capturable" in remark
    assert found.gather().remark == "" and lazy(found) == set()


def test_a_compiled_step_is_seen() -> None:
    found, optimizer = protected()
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    assert "optimizer: its step is compiled" in found.gather().remark


def test_a_step_inside_a_graph_s_capture_is_seen_by_its_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, optimizer = protected()
    assert lazy(found)
    found.updates(optimizer)
    assert lazy(found), "an update like any other"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(unfenced, "_is_capturing", lambda: True)
    found.updates(optimizer)
    assert unfenced.GRAPH in found.gather().remark and lazy(found) == set()


def test_only_the_one_without_a_fence_is() -> None:
    one, two = (torch.nn.Linear(2, 2) for _ in range(2))
    found = Protected.of(
        {
            "one": one,
            "two": two,
            "first": torch.optim.SGD(one.parameters(), 0.1),
            "second": torch.optim.AdamW(two.parameters(), capturable=True),
        },
        lazy=True,
    )
    assert lazy(found) == {"one.weight", "one.bias"}
