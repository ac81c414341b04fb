"""Copies are looked at whatever is copied and however: behind the trainer's back or at the
boundary, parameters that an optimizer moves and others, complex ones, and plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.frozen import FEWEST_BYTES
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.model.numbers import NotFinite
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, MIB

SIDE = 160
assert SIDE * SIDE * 4 > FEWEST_BYTES


class Model(nn.Module):
    """A large frozen layer, a complex weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.spectrum = nn.Parameter(torch.ones(SIDE, dtype=torch.complex64))
        self.head = nn.Linear(SIDE, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((self.base(rows) * self.spectrum).abs())
        return out


class Training:
    def __init__(self, home: Path, lazy: bool) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.average = torch.optim.swa_utils.AveragedModel(self.model.head)
        learning = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, 0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        parts = {
            "model": self.model,
            "average": self.average,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }
        self.note = torch.zeros(2)
        self.protected = Protected.of({**parts, "note": self.note}, lazy=lazy)
        self.live = TorchState(self.protected, 0, 1, resolve(None, {}, "j"))
        self.model(torch.randn(2, SIDE)).sum().backward()
        self.optimizer.step()
        self.number = 0
        known = self.protected.known_bad
        assert known is not None and not known.learn(self.protected.gather().items)
        nbytes = self.protected.gather().payload_bytes + MIB
        self.slot = Slot.create(MEMORY, home / "slot", nbytes, 64 * KIB)

    def captured(self) -> NotFinite:
        """What a snapshot says of the state as it is."""
        self.number += 1
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(self.number, 1))
        copy = self.live.copy(self.live.gather(), self.slot)
        copy.copy_moving()
        assert isinstance(copy, TensorCopy)
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        return copy.not_finite()


@pytest.fixture(params=[True, False], ids=["lazy", "at the boundary"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path, request.param)
    yield made
    made.slot.close()


def _bad(tensor: object) -> None:
    assert isinstance(tensor, torch.Tensor)
    with torch.no_grad():
        tensor.view(-1)[-1] = math.nan


PLANTS: dict[str, Callable[[Training], object]] = {
    "model.head.weight": lambda t: _bad(t.model.head.weight),
    "model.spectrum": lambda t: _bad(t.model.spectrum),
    "model.base.weight": lambda t: _bad(t.model.base.weight),
    "model.base.bias": lambda t: _bad(t.model.base.bias),
    "average.module.weight": lambda t: _bad(t.average.module.weight),
    "optimizer.state.1.exp_avg": lambda t: _bad(t.optimizer.state[t.model.head.weight]["exp_avg"]),
    "optimizer.state.0.exp_avg_sq": lambda t: _bad(
        t.optimizer.state[t.model.spectrum]["exp_avg_sq"]
    ),
    "optimizer.state.2.step": lambda t: _bad(t.optimizer.state[t.model.head.bias]["step"]),
    "optimizer.param_groups.0.lr": lambda t: t.optimizer.param_groups[0].update(lr=math.nan),
    "schedule.base_lrs.0": lambda t: t.schedule.base_lrs.__setitem__(0, math.nan),
}


@pytest.mark.parametrize("name", PLANTS)
def test_nan_anywhere_is_found_and_named(training: Training, name: str) -> None:
    assert not training.captured()
    PLANTS[name](training)
    assert training.captured() == NotFinite((name,), may_be_meant=False)


def test_buffers_and_a_programs_own_tensors_are_the_programs(training: Training) -> None:
    _bad(training.model.mean)
    _bad(training.note)
    assert not training.captured()


def test_what_is_frozen_is_found_again_in_a_slot_that_has_it_already(tmp_path: Path) -> None:
    training = Training(tmp_path, lazy=True)
    with closing(training.slot):
        _bad(training.model.base.weight)
        for _ in range(2):
            assert training.captured().names == ("model.base.weight",)
