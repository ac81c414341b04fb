"""Capture from a GPU: copies ordered in one go into page-locked slots, the device waiting instead
of the trainer. The state is large, and the update follows at once: without the fence the copy would
be of two moments. Slots have to lie in tmpfs: run with `--basetemp` below /dev/shm. Skipped without
CUDA."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_stream import CopyStream
from keepstep.edge.torch.device_copy import DeviceCopy
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.model.units import GIB, MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

KINDS: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}, {"capturable": True}]
WIDTH = 4096  # 64 MiB a layer, and twice as much of AdamW's


class Training:
    def __init__(self, home: Path, **optimizer: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 64)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **optimizer)
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, lazy=True)
        self.live = TorchState(self.protected, 0, 1, resolve(None, {}, "j"))
        self.train_one()
        nbytes = self.protected.gather().payload_bytes
        self.slot = Slot.create(MEMORY, home / "slot", nbytes + MIB, MIB)
        assert self.live.pin(self.slot) is None
        self.copy: Any = None
        self.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self.copy is not None:
            self.copy.fence(optimizer)

    def train_one(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """Without random states, which are others at each look."""
        items = self.protected.gather().items
        return [i.local for i in items if i.spec.nbytes and i.local.is_cuda]

    def bytes_of(self) -> list[bytes]:
        """The oracle."""
        return [
            t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for t in self.tensors()
        ]

    def capture(self, meanwhile: Callable[[], None]) -> list[str]:
        """`meanwhile`: what the trainer does before the capture thread has begun. What moved."""
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        self.copy = copy = self.live.copy(self.protected.gather(), self.slot)
        copy.copy_moving()
        meanwhile()
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        self.copy = None
        layout = copy.state.layout
        text = json.dumps(layout.to_json()).encode()
        header = self.slot.write_table(copy.state.payload_bytes, text, copy.sums)
        self.slot.seal(header, layout.hash(), 0.0, wall_ns=1)
        return list(copy.moved)

    def restored(self) -> list[bytes]:
        header, layout = self.slot.verify()
        self.live.load(self.slot, header, layout)
        assert self.live.differing(self.slot, header, layout) == []
        return self.bytes_of()


def is_right(training: Training) -> bool:
    expected = training.bytes_of()
    moved = training.capture(training.train_one)
    return not moved and training.restored() == expected


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_captured_is_the_boundary_s_state_though_the_update_follows_at_once(
    kind: dict[str, bool], tmp_path: Path
) -> None:
    training = Training(tmp_path, **kind)
    for _ in range(3):
        assert is_right(training)
        training.train_one()
    training.slot.close()


def test_what_the_replays_of_a_graph_update_is_the_boundary_s_state(tmp_path: Path) -> None:
    """A replay runs no hook, and follows at once. A restore keeps the addresses that the graph
    knows, so it goes on behind it."""
    training = Training(tmp_path, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.train_one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.train_one()
    for _ in range(4):
        for _ in range(5):
            graph.replay()
        expected = training.bytes_of()
        assert training.capture(graph.replay) == []
        graph.replay()
        assert training.bytes_of() != expected, "it trains"
        assert training.restored() == expected
    training.slot.close()


def test_without_the_fence_of_an_update_it_would_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail. Fused updates move no version counter."""
    monkeypatch.setattr(DeviceCopy, "lead", lambda self, optimizer: True)
    training = Training(tmp_path, fused=True)
    assert not all(is_right(training) for _ in range(5))
    training.slot.close()


def test_without_the_wait_at_the_boundary_it_would_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyStream, "follow", lambda self: None)
    training = Training(tmp_path, fused=True)
    torch.cuda._sleep(1_000_000_000)
    training.train_one()  # is still to come on the device when the boundary is there
    training.capture(lambda: None)
    expected = training.bytes_of()
    assert training.restored() != expected
    training.slot.close()


def test_a_parameter_that_moves_under_the_copy_is_named(tmp_path: Path) -> None:
    training = Training(tmp_path, foreach=True)

    def change() -> None:
        with torch.no_grad():
            training.model[0].weight.add_(1)

    assert training.capture(change) == ["model.0.weight"]
    training.slot.close()


def test_the_trainer_is_not_held_by_a_copy(tmp_path: Path) -> None:
    """What it is told to wait for is on the device."""
    training = Training(tmp_path, fused=True)
    torch.cuda.synchronize()
    training.slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    torch.cuda._sleep(1_000_000_000)
    copy = training.live.copy(training.protected.gather(), training.slot)
    copy.copy_moving()
    assert copy.fence(training.optimizer)
    assert not torch.cuda.current_stream().query(), "the host has not waited"
    run_acts(copy.copy_still())
    assert copy.waited_ns() is not None
    training.slot.close()


def test_a_number_that_the_trainer_asks_for_does_not_wait_for_the_whole_copy(
    tmp_path: Path,
) -> None:
    """As `loss.item()` does. Copies take turns, so it gets the bus between two of them."""
    model = torch.nn.Linear(1, GIB // 4, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # what it updates does not move before
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    live = TorchState(protected, 0, 1, resolve(None, {}, "j"))
    slot = Slot.create(MEMORY, tmp_path / "slot", GIB + MIB, MIB)
    assert live.pin(slot) is None
    number = torch.ones(1, device="cuda")
    number.item()
    slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    copy = live.copy(protected.gather(), slot)
    torch.cuda.synchronize()
    began = time.perf_counter()
    copy.copy_moving()
    asked = time.perf_counter()
    number.item()
    waited_s = time.perf_counter() - asked
    torch.cuda.synchronize()
    assert waited_s < 0.25 * (time.perf_counter() - began)
    run_acts(copy.copy_still())
    slot.close()


def test_a_restore_keeps_every_address_and_takes_no_second_copy(tmp_path: Path) -> None:
    training = Training(tmp_path, fused=True)
    expected = training.bytes_of()
    training.capture(lambda: None)
    training.train_one()
    addresses = [tensor.data_ptr() for tensor in training.tensors()]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    header, layout = training.slot.verify()
    training.live.load(training.slot, header, layout)
    assert training.live.differing(training.slot, header, layout) == []
    assert torch.cuda.max_memory_allocated() < 1.05 * before
    assert [tensor.data_ptr() for tensor in training.tensors()] == addresses
    assert training.bytes_of() == expected
    training.slot.close()
