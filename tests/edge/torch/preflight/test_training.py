"""A mini-training that is the same every time, and the smallest thing that makes it another."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from keepstep.edge.torch.preflight import training
from keepstep.edge.torch.preflight.device_link import device_count, differing

gelu = torch.nn.functional.gelu


@pytest.fixture(autouse=True)
def as_before() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def test_it_learns_and_repeats_itself() -> None:
    trained = training.train(6, 2)
    assert trained.digests[0] == trained.digests[1] and trained.first_difference is None
    assert len(trained.step_ns) == 10
    assert 0 < trained.last_loss < training.train(1, 1).last_loss
    assert training.train(6, 1).digests == trained.digests[:1]


def test_its_adamw_is_torchs_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier preflights noted of this machine still holds."""
    ours = training.train(6, 1)
    monkeypatch.setattr(
        training, "MiniAdamW", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    assert training.train(6, 1).digests == ours.digests
    monkeypatch.setattr(
        training, "MiniAdamW", lambda model: torch.optim.AdamW(model.parameters(), lr=1.01e-3)
    )
    assert training.train(6, 1).digests != ours.digests


def test_it_imports_nothing_that_takes_as_long_as_its_steps() -> None:
    program = (
        "import sys\n"
        "from keepstep.edge.torch.preflight import training\n"
        "training.train(2, 1)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch\n"
        "torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])\n"
        "assert 'torch._dynamo' in sys.modules, 'MiniAdamW is no longer worth having'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_state_of_the_generator_changes_nothing() -> None:
    torch.manual_seed(1)
    one = training.train(3, 1)
    torch.manual_seed(2)
    assert training.train(3, 1).digests == one.digests


def test_one_bit_in_one_activation_is_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = training.train(4, 1)
    calls = 0

    def flips_once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = gelu(x)
        if calls == 3:
            with torch.no_grad():
                y.view(torch.int32)[0, 0, 0] ^= 1 << 20
        return y

    monkeypatch.setattr(training.F, "gelu", flips_once)
    broken = training.train(4, 2)
    assert broken.digests[0] != sound.digests[0] and broken.digests[1] == sound.digests[0]
    assert broken.first_difference is not None and broken.first_difference[0] == 1


def test_nan_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def nan_once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gelu(x) * (float("nan") if calls == 5 else 1.0)

    monkeypatch.setattr(training.F, "gelu", nan_once)
    assert training.train(4, 2).first_difference is not None


def test_products_of_a_device_are_compared_like_those_of_cores() -> None:
    one = torch.tensor([1.0, float("nan"), float("inf")])
    other = one.clone()
    assert differing(one, other) == 0
    other[0] = float("nan")
    assert differing(one, other) == 1
    assert device_count() == torch.cuda.device_count() * torch.cuda.is_available()
