"""Number faults: exactly the number that was drawn becomes wrong, once, where it was asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepstep.model.snapshot import Phase
from keepstep.testing.faults import SITES, Fault, parse
from keepstep.testing.injector import FaultPlan
from keepstep.testing.lines import Lines
from keepstep.testing.number_faults import NumberFaults, flip, make_wrong


@given(st.integers(0, 31), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_one_bit_of_one_element_is_turned(bit: int, place: int, seed: int) -> None:
    tensor = torch.randn(8, generator=torch.Generator().manual_seed(seed))
    before, version = tensor.clone(), tensor._version
    flip(tensor, place, bit)
    changed = (tensor.view(torch.int32) ^ before.view(torch.int32)).tolist()
    assert [n for n, one in enumerate(changed) if one] == [place]
    assert changed[place] & 0xFFFFFFFF == 1 << bit
    assert tensor._version == version, "memory does not tell"
    flip(tensor, place, bit)
    assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 4).t()[:, :2], torch.ones(4, dtype=torch.float64)]
)
def test_what_cannot_be_turned_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected 4-byte numbers in one piece on the CPU, found"):
        flip(tensor, 0, 3)


def test_not_a_number_and_a_spike() -> None:
    tensor = torch.ones(6)
    make_wrong(tensor, parse("nan:step=1"), random.Random(1))
    assert int(tensor.isnan().sum()) == 1
    tensor = torch.ones(6)
    make_wrong(tensor, parse("spike:step=1,factor=50"), random.Random(1))
    assert tensor.tolist() == [50.0] * 6


class Trained:
    """Some steps with these faults, beside the same steps without."""

    def __init__(self, home: Path, *faults: Fault) -> None:
        attempts = home / "attempts.jsonl"
        attempts.touch()
        self.attempts = attempts
        plan = FaultPlan(faults, 5, attempts, home, (), None)
        self.numbers = NumberFaults(plan, rank=0)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.numbers.attach(self.model, self.optimizer)

    def step(self, step: int) -> bytes:
        """The state behind it."""
        self.numbers(Phase.STEP, step)
        batch = self.numbers.batch(torch.full((3, 4), 0.5))
        self.optimizer.zero_grad()
        self.model(batch).square().sum().backward()
        self.optimizer.step()
        tensors = [*self.model.parameters()]
        for parameter in self.model.parameters():
            tensors += self.optimizer.state[parameter].values()
        return b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)

    @property
    def did(self) -> list[dict[str, Any]]:
        return [line for line in Lines(self.attempts).new() if line["what"] == "did"]


@pytest.mark.parametrize("site", SITES["bitflip"])
def test_each_site_is_hit_in_its_step_and_only_then(tmp_path: Path, site: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    wrong = Trained(tmp_path / "a", Fault("bitflip", 0, 2, site=site, bit=25))
    right = Trained(tmp_path / "b", Fault("bitflip", 1, 2, site=site, bit=25))  # another rank's
    for step in range(2):
        assert wrong.step(step) == right.step(step)
    assert wrong.step(2) != right.step(2)
    [did] = wrong.did
    assert did["step"] == 2 and "bit 25 of element" in did["wrong"], json.dumps(did)
    wrong.step(3)
    assert len(wrong.did) == 1 and right.did == []


def test_it_happens_again_as_often_as_is_asked_for_and_not_in_the_next_life(
    tmp_path: Path,
) -> None:
    fault = Fault("bitflip", 0, 1, site="weight", bit=3, times=3)
    first = Trained(tmp_path, fault)
    for step in range(3):
        first.step(step)
    assert [line["step"] for line in first.did] == [1, 2]
    next_life = Trained(tmp_path, fault)
    for step in range(1, 6):
        next_life.step(step)
    assert [line["step"] for line in next_life.did] == [1, 2, 1]
