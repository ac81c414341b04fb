"""What is not finite is found where it is: a fake device looks, and the host reads one number a
stretch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm import copy_table
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import capture, copy_plans, device_copy, tree
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import CopyStream
from keepstep.edge.torch.numbers import copied
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import Protected
from keepstep.model.numbers import NotFinite
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from tests.edge.torch.fake_device import FakeDevice

CPU = torch.device("cpu")  # stands for the device
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nbytes in (("PIECE", 4), ("BUCKET", 8), ("SMALL", 1)):
        monkeypatch.setattr(copy_plans, f"{name}_BYTES", nbytes * KIB)
    monkeypatch.setattr(device_copy, "TURN_BYTES", 8 * KIB)
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", KIB)
    monkeypatch.setattr(capture, "begin_host_thread", lambda: None)
    # counters of steps and random states are on the host
    monkeypatch.setattr(
        tree, "by_address", lambda tensor: tensor.numel() == 1 or tensor.dtype is torch.uint8
    )


class Training:
    """Large tensors and small ones, of several types, on a fake device."""

    def __init__(self, home: Path, locked: bool = True) -> None:
        values = [
            torch.ones(3001),
            torch.ones(40),
            torch.ones(3).to(torch.bfloat16),
            torch.ones(50, dtype=torch.int32),
            torch.ones(20).double(),
            torch.ones(5001).to(torch.float16),
            torch.ones(60, 50).t(),  # not as it is kept
        ]
        self.parameters = [torch.nn.Parameter(v, requires_grad=False) for v in values]
        self.optimizer = torch.optim.SGD(self.parameters, 0.1)
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            state["step"], state["average"] = torch.ones(1), torch.ones(700)
        things = {f"p{i}": p for i, p in enumerate(self.parameters)}
        self.protected = Protected.of({**things, "optimizer": self.optimizer}, lazy=True)
        self.known = KnownBad(["optimizer"])
        self.device = FakeDevice(random.Random(0).randrange)
        self.plans = CopyPlans({CPU: CopyStream(CPU, self.device, self.device)})
        self.locks = PageLocks(self.device.pages)
        nbytes = self.protected.gather().payload_bytes
        self.slot = Slot.create(MEMORY, home / "slot", nbytes + 4 * KIB, 64 * KIB)
        there = self.slot.payload_address, self.slot.payload_address + self.slot.capacity
        self.device.pages.hosts.add(there)
        self.slot.before_close(lambda: self.device.pages.hosts.discard(there))
        if locked:
            self.locks.lock(self.slot)

    def found(self, turn: int = 0) -> NotFinite:
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(turn, 1))
        copy = TensorCopy(
            self.protected.gather(),
            self.slot,
            turn=turn,
            locks=self.locks,
            plans=self.plans,
            known_bad=self.known,
        )
        copy.copy_moving()
        run_acts(copy.copy_still())
        return copy.not_finite()


@pytest.fixture(params=[True, False], ids=["locked", "not locked"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path, request.param)
    with closing(made.slot):
        yield made


def test_what_is_finite_is_not_read_by_the_host(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(named: object) -> dict[str, bool]:
        raise AssertionError("the host has read it")

    monkeypatch.setattr(copied, "bad_kinds", asked)
    assert not training.found()
    training.parameters[0][7] = NAN
    with pytest.raises(AssertionError, match="has read"):
        training.found()


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5, 6])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_parameter_is_named_in_each_copy(training: Training, index: int, value: float) -> None:
    parameter = training.parameters[index]
    parameter[(-1,) * parameter.dim()] = value
    for turn in (0, 3):
        assert training.found(turn).names == (f"p{index}",)


def test_what_was_found_once_is_not_found_again_when_it_is_gone(training: Training) -> None:
    training.parameters[0][7] = NAN
    assert training.found(0)
    training.parameters[0][7] = 1
    assert not training.found(0)


@pytest.mark.parametrize("index", range(7))
def test_an_optimizers_state_is_named_in_each_copy(training: Training, index: int) -> None:
    training.optimizer.state[training.parameters[index]]["average"][3] = INF
    for turn in (0, 3):
        [named] = training.found(turn).names
        assert named.startswith("optimizer.") and f".{index}." in named and "average" in named


def test_values_that_are_only_great_are_not_named(training: Training) -> None:
    """Their squares have no place."""
    training.parameters[0][7] = 1e30
    training.parameters[4][7] = 1e300
    assert not training.found()


def test_what_was_so_before_the_first_step_is_no_news(training: Training) -> None:
    training.parameters[1][3] = -INF
    assert training.known.learn(training.protected.gather().items)
    assert not training.found()
    training.parameters[0][3] = NAN
    assert training.found().names == ("p0",)


def test_without_the_looks_it_would_not_be_found(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above could not fail."""
    monkeypatch.setattr(FakeDevice, "look", lambda self, stretch: None)
    training.parameters[0][7] = NAN
    assert not training.found()


def test_nobody_looks_where_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(self: FakeDevice, stretch: object) -> None:
        raise AssertionError("it has looked")

    monkeypatch.setattr(FakeDevice, "look", looked)
    training = Training(tmp_path)
    with closing(training.slot):
        training.known = None  # type: ignore[assignment]
        assert not training.found()
