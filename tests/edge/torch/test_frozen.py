"""Parameters that no optimizer moves: not copied again while they stay as they were, and never
other bytes than the boundary's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import frozen
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.frozen import FEWEST_BYTES, FrozenInSlots
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.edge.torch.views import overlay
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, MIB

SIDE = 200
assert SIDE * SIDE * 4 > FEWEST_BYTES


class Training:
    """A frozen base under a head that learns, and two slots that take turns."""

    def __init__(self, home: Path) -> None:
        torch.manual_seed(0)
        self.base = torch.nn.Linear(SIDE, SIDE)
        self.base.requires_grad_(False)
        self.head = torch.nn.Linear(SIDE, 4)
        self.optimizer = torch.optim.SGD(self.head.parameters(), 0.1)
        model = torch.nn.Sequential(self.base, self.head)
        self.protected = Protected.of({"model": model, "optimizer": self.optimizer}, lazy=True)
        self.live = TorchState(self.protected, 0, 1, resolve(None, {}, "j"))
        nbytes = self.protected.gather().payload_bytes + MIB
        self.slots = [Slot.create(MEMORY, home / f"slot-{i}", nbytes, 64 * KIB) for i in range(2)]
        self.number = 0

    def begin(self) -> TensorCopy:
        """The boundary of a step, in the slot whose turn it is."""
        self.slot = self.slots[self.number % 2]
        self.number += 1
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(self.number, 1))
        copy = self.live.copy(self.live.gather(), self.slot)
        copy.copy_moving()
        assert isinstance(copy, TensorCopy)
        return copy

    def end(self, copy: TensorCopy) -> list[str]:
        """In the background: what moved; else it is sealed, and is the boundary's."""
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        if not copy.moved:
            text = json.dumps(copy.state.layout.to_json()).encode()
            header = self.slot.write_table(copy.state.payload_bytes, text, copy.sums)
            self.slot.seal(header, copy.state.layout.hash(), 0.0, wall_ns=1)
            self.slot.verify()
        return list(copy.moved)

    def step(self) -> list[str]:
        self.optimizer.zero_grad()
        loss = self.head(self.base(torch.ones(3, SIDE))).square().mean()
        loss.backward()
        self.optimizer.step()
        return self.end(self.begin())

    def kept(self, copy: TensorCopy, name: str) -> torch.Tensor:
        [segment] = [s for s in copy.state.layout.segments if s.spec.name == name]
        return overlay(self.slot, segment).clone()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    with closing(made.slots[0]), closing(made.slots[1]):
        yield made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of frozen tensors each boundary has copied."""
    found: list[int] = []
    whole = TensorCopy._write

    def counted(self: TensorCopy, share: Any) -> None:
        if share is self.state.copies[0].frozen:
            found.append(share.nbytes)
        whole(self, share)

    monkeypatch.setattr(TensorCopy, "_write", counted)
    return found


def test_each_slot_gets_them_once(training: Training, written: list[int]) -> None:
    for _ in range(6):
        assert training.step() == []
    assert written == [SIDE * SIDE * 4] * 2


def test_what_is_changed_in_the_step_is_copied_at_the_boundary(
    training: Training, written: list[int]
) -> None:
    for _ in range(2):
        training.step()
    with torch.no_grad():
        training.base.weight[3, 7] = 9
    copy = training.begin()
    assert len(written) == 3 and training.end(copy) == []
    assert training.kept(copy, "model.0.weight")[3, 7] == 9


def write_past_the_counter(training: Training) -> None:
    training.base.weight.data.numpy()[3, 7] = 9


def write(training: Training) -> None:
    with torch.no_grad():
        training.base.weight[3, 7] = 9


@pytest.mark.parametrize("change", [write, write_past_the_counter])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_nobody_can_date_is_torn_and_copied_from_then_on(
    training: Training, written: list[int], change: Callable[[Training], None], when: str
) -> None:
    """Before the boundary, past its counter; or behind it, before it has been looked at."""
    if when == "before" and change is write:
        pytest.skip("its counter tells: it is copied")
    for _ in range(2):
        training.step()
    if when == "before":
        change(training)
    copy = training.begin()
    if when == "after":
        change(training)
    assert training.end(copy) == ["model.0.weight"]
    training.live.copy_eagerly(["model.0.weight"])  # as the session does it
    count = len(written)
    assert training.step() == [] and training.step() == []
    assert len(written) == count, "it is an eager one now"
    copy = training.begin()
    assert training.kept(copy, "model.0.weight")[3, 7] == 9


def test_memory_that_the_program_has_let_go_of_is_the_boundary_s_still(
    training: Training, written: list[int]
) -> None:
    """As a momentum encoder does it: `parameter.data = ...`, with new memory."""
    for _ in range(2):
        training.step()
    copy = training.begin()
    before = training.base.weight.detach().clone()
    training.base.weight.data = torch.full((SIDE, SIDE), 9.0)
    assert training.end(copy) == []
    assert torch.equal(training.kept(copy, "model.0.weight"), before)
    copy = training.begin()
    assert training.end(copy) == []
    assert torch.equal(training.kept(copy, "model.0.weight"), training.base.weight)


def test_a_byte_that_has_changed_in_the_slot_is_not_sealed(training: Training) -> None:
    for _ in range(2):
        training.step()
    [segment] = [
        s for s in training.live.gather().layout.segments if s.spec.name == "model.0.weight"
    ]
    training.slots[0].payload[segment.offset + 11] ^= 1
    assert training.step() == ["model.0.weight"]


def test_without_the_comparison_wrong_bytes_would_be_sealed(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above could not fail."""
    monkeypatch.setattr("keepstep.edge.torch.capture.differing", lambda slot, plan: [])
    for _ in range(2):
        training.step()
    write_past_the_counter(training)
    copy = training.begin()
    assert training.end(copy) == []
    assert training.kept(copy, "model.0.weight")[3, 7] != 9


def test_one_that_learns_again_is_an_optimizers(training: Training, written: list[int]) -> None:
    for _ in range(2):
        training.step()
    training.base.requires_grad_(True)
    training.optimizer.add_param_group({"params": list(training.base.parameters())})
    for _ in range(3):
        assert training.step() == []
    assert len(written) == 2


def test_small_ones_are_copied(training: Training) -> None:
    names = {item.spec.name for item in training.live.gather().items if item.frozen}
    assert names == {"model.0.weight"}, "and not its bias"


def test_a_slot_of_which_some_is_to_lie_elsewhere_holds_none(
    training: Training, written: list[int]
) -> None:
    for _ in range(2):
        training.step()
    slot = training.slots[0]
    slot.begin(bytes(16), 0, 1, 1, Stamp(9, 1))
    training.live.copy(training.live.gather(), slot, frozenset({0})).copy_moving()
    training.number = 0
    assert training.step() == [] and len(written) == 4


def test_who_is_not_asked_knows_of_no_slot(training: Training) -> None:
    plan = training.live.gather().copies[0]
    known = FrozenInSlots()
    assert not known.are_in(training.slots[0], plan)
    known.copied(training.slots[0], plan)
    assert known.are_in(training.slots[0], plan) and not known.are_in(training.slots[1], plan)
    known.forget(training.slots[0])
    assert not known.are_in(training.slots[0], plan)
    assert frozen.differing(training.slots[1], plan) == ["model.0.weight"]
