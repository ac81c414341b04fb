"""Plain numbers: what an update is made with is looked at, and what may be infinite is not told."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from keepstep.edge.torch.numbers.plain_numbers import bad_numbers


def parts() -> dict[str, Any]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], 0.1)
    one, other = LinearLR(optimizer), StepLR(optimizer, 5)
    return {
        "optimizer": optimizer,
        "schedule": SequentialLR(optimizer, [one, other], [3]),
        "plateau": ReduceLROnPlateau(optimizer),
        "scaler": torch.amp.GradScaler("cpu"),
    }


def test_nothing_is_told_of_what_is_as_torch_makes_it() -> None:
    """The best loss so far is infinite."""
    found = parts()
    assert found["plateau"].best == math.inf
    assert bad_numbers(found) == {}


def test_each_number_that_an_update_is_made_with_is_told() -> None:
    found = parts()
    found["optimizer"].param_groups[0]["lr"] = math.nan
    found["optimizer"].param_groups[0]["betas"] = (0.9, math.inf)
    found["schedule"]._schedulers[1].base_lrs[0] = math.nan
    found["plateau"].best = math.nan
    found["scaler"].scale(torch.ones(1))
    found["scaler"]._scale.fill_(math.inf)
    assert bad_numbers(found) == {
        "optimizer.param_groups.0.lr": True,
        "optimizer.param_groups.0.betas.1": False,
        "schedule._schedulers.1.base_lrs.0": True,
        "plateau.best": True,
        "scaler.scale": False,
    }


def test_a_learning_rate_that_is_a_tensor_is_told_too() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], rate, foreach=False)
    rate.fill_(math.nan)
    optimizer.param_groups[0]["lr"] = rate
    assert bad_numbers({"o": optimizer}) == {"o.param_groups.0.lr": True}
