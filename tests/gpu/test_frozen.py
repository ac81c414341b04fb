"""A base that does not learn, on a real device: digested in place of being copied, nobody waits for
that, and nothing but the boundary's bytes is sealed whoever writes to it. Skipped without CUDA.
Slots have to lie in tmpfs: run with `--basetemp` below /dev/shm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.copy_stream import CopyStream, copy_stream
from keepstep.edge.torch.device_copy import DeviceCopy
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.edge.torch.views import overlay
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

WIDTH = 4096  # 64 MiB
BASE = "model.0.weight"
LONG = 400_000_000  # cycles: far longer than anything here takes


class Training:
    """A frozen layer under a head that learns, and one slot."""

    def __init__(self, home: Path) -> None:
        torch.manual_seed(0)
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
        self.base.requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 64, device="cuda")
        self.optimizer = torch.optim.AdamW(self.head.parameters(), fused=True)
        model = torch.nn.Sequential(self.base, self.head)
        self.protected = Protected.of({"model": model, "optimizer": self.optimizer}, lazy=True)
        self.live = TorchState(self.protected, 0, 1, resolve(None, {}, "j"))
        self.optimizer.register_step_pre_hook(self._before_update)
        self.copy: TensorCopy | None = None
        self.step()
        nbytes = self.protected.gather().payload_bytes
        self.slot = Slot.create(MEMORY, home / "slot", nbytes + MIB, MIB)
        assert self.live.pin(self.slot) is None

    def _before_update(self, optimizer: object, *_: object) -> None:
        if self.copy is not None:
            self.copy.fence(optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.head(self.base(torch.randn(64, WIDTH, device="cuda"))).square().mean().backward()
        self.optimizer.step()

    def capture(
        self, meanwhile: Callable[[], object] = lambda: None, delayed: bool = False
    ) -> TensorCopy:
        """`meanwhile`: what the trainer queues before the capture thread has begun; `delayed`: with
        the copies late on the device."""
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        copy = self.live.copy(self.protected.gather(), self.slot)
        assert isinstance(copy, TensorCopy)
        self.copy = copy
        if delayed:
            stream = copy_stream(torch.device("cuda", torch.cuda.current_device()))
            with torch.cuda.stream(stream._stream):
                torch.cuda._sleep(LONG)
        copy.copy_moving()
        meanwhile()
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        self.copy = None
        layout = copy.state.layout
        text = json.dumps(layout.to_json()).encode()
        header = self.slot.write_table(copy.state.payload_bytes, text, copy.sums)
        self.slot.seal(header, layout.hash(), 0.0, wall_ns=1)
        self.slot.verify()
        return copy

    def kept(self) -> torch.Tensor:
        _, layout = self.slot.verify()
        [segment] = [s for s in layout.segments if s.spec.name == BASE]
        return overlay(self.slot, segment).clone()

    def write_past_the_counter(self) -> None:
        self.base.weight.data[3, 7] += 1


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    made.slot.close()


def test_it_leaves_the_device_once_and_is_in_every_snapshot(training: Training) -> None:
    expected = training.base.weight.cpu()
    copies = [training.capture(training.step) for _ in range(4)]
    nbytes = training.base.weight.nbytes
    assert copies[0].device_bytes > nbytes
    assert max(copy.device_bytes for copy in copies[1:]) < nbytes / 4
    assert not any(copy.moved for copy in copies)
    assert torch.equal(training.kept(), expected)


def test_the_device_does_not_wait_for_what_is_compared(training: Training) -> None:
    training.capture()
    begun: list[bool] = []

    def look() -> None:
        reached = torch.cuda.Event()
        reached.record()
        reached.synchronize()
        copy = training.copy
        assert copy is not None and copy._device is not None and copy._device.compares
        begun.append(copy._device._read_back[-1].is_over())

    assert training.capture(look, delayed=True).moved == []
    assert begun == [False], "the trainer's stream was through while the copies had not begun"


def test_what_a_queued_kernel_changes_past_the_counter_is_torn_and_then_copied(
    training: Training,
) -> None:
    training.capture()
    torch.cuda._sleep(LONG)
    training.write_past_the_counter()  # is still to come on the device when the boundary is there
    assert training.capture().moved == [BASE]
    assert training.capture().moved == [], "the next one gets it whole"
    assert torch.equal(training.kept(), training.base.weight.cpu())


def test_digested_before_the_boundary_it_would_not_be(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail."""
    training.capture()
    monkeypatch.setattr(CopyStream, "follow", lambda self: None)
    torch.cuda._sleep(LONG)
    training.write_past_the_counter()
    assert training.capture().moved == []
    torch.cuda.synchronize()
    assert not torch.equal(training.kept(), training.base.weight.cpu())


def test_what_changes_as_it_is_compared_is_torn(training: Training) -> None:
    training.capture()
    assert training.capture(training.write_past_the_counter, delayed=True).moved == [BASE]


def marked_before(training: Training) -> bool:
    """Whether slot and marks are the boundary's, though a write follows at once."""
    expected = training.base.weight.cpu()
    training.capture(training.write_past_the_counter, delayed=True)
    return torch.equal(training.kept(), expected) and bool(training.capture().moved)


def test_what_a_slot_has_is_digested_before_anything_may_change_it(training: Training) -> None:
    assert marked_before(training)


def test_without_the_fence_it_would_not_be(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCopy, "_lead", lambda self, optimizers: None)
    assert not marked_before(training)


def test_what_its_counter_tells_of_is_copied_at_the_boundary(training: Training) -> None:
    training.capture()
    with torch.no_grad():
        training.base.weight[3, 7] = 9
    expected = training.base.weight.cpu()
    assert training.capture(training.write_past_the_counter, delayed=True).moved == []
    assert torch.equal(training.kept(), expected)
