"""Leftovers of a given-up body: the step that is done again is computed as in a process that has
just begun."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from keepstep.edge.torch.leftovers import drop_leftovers


def test_a_scaler_unscales_the_gradients_of_the_step_that_is_done_again() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * weight).sum()).backward()
    scaler.unscale_(optimizer)  # and the body is given up
    drop_leftovers()
    optimizer.zero_grad()
    scaler.scale((weight * weight).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.full((3,), 0.8))


def test_one_that_is_switched_off_has_none() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    drop_leftovers()
    assert not scaler.is_enabled()


def test_an_accelerator_counts_the_batches_of_an_update_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class GradientState:
        sync_gradients = False

        def _set_sync_gradients(self, value: bool) -> None:
            self.sync_gradients = value

    class Accelerator:
        def __init__(self) -> None:
            self.step = 5
            self.gradient_state = GradientState()

    accelerate = ModuleType("accelerate.accelerator")
    accelerate.Accelerator = Accelerator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", accelerate)
    accelerator = Accelerator()
    drop_leftovers()
    assert (accelerator.step, accelerator.gradient_state.sync_gradients) == (0, True)
