"""Capture from a GPU: a side stream into page-locked slots, the device waiting instead of the
trainer. Skipped without CUDA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.cuda_pages import CudaPages
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.restore import apply, open_snapshot, prove
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

KINDS = [{"foreach": True}, {"fused": True}, {"capturable": True}]


def training(**optimizer: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Linear(2048, 512)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), **optimizer)


def train_one(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()


def bytes_of(protected: Protected) -> list[bytes]:
    return [
        item.local.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for item in protected.gather().items
        if item.spec.nbytes
    ]


def seal(copy: TensorCopy, slot: Slot) -> None:
    layout = copy.state.layout
    slot.seal(
        slot.write_table(copy.state.payload_bytes, json.dumps(layout.to_json()).encode()),
        layout.hash(),
        0.0,
        wall_ns=1,
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_captured_is_the_boundary_s_state_though_the_update_follows_at_once(
    kind: dict[str, bool], tmp_path: Path
) -> None:
    model, optimizer = training(**kind)
    train_one(model, optimizer)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    state = protected.gather()
    expected = bytes_of(protected)
    slot = Slot.create(MEMORY, tmp_path / "slot", state.payload_bytes, 1 << 20)
    locks = PageLocks(CudaPages(torch.device("cuda", torch.cuda.current_device())))
    assert locks.lock(slot) is None
    slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    copy = TensorCopy(protected.gather(), slot, locks=locks)
    copy.copy_moving()
    handle = optimizer.register_step_pre_hook(lambda *_: copy.fence())
    for _ in range(3):
        if not copy.done.is_set():
            run_acts(copy.copy_still())
        train_one(model, optimizer)
    handle.remove()
    assert copy.moved == []
    seal(copy, slot)
    header, layout = slot.verify()
    apply(protected, open_snapshot(protected, slot, header, layout))
    assert prove(protected, slot, header, layout) == []
    assert bytes_of(protected) == expected
    slot.close()


def test_a_parameter_that_moves_under_the_copy_is_named(tmp_path: Path) -> None:
    model, optimizer = training()
    train_one(model, optimizer)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    state = protected.gather()
    slot = Slot.create(MEMORY, tmp_path / "slot", state.payload_bytes, 1 << 20)
    slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    copy = TensorCopy(state, slot)
    copy.copy_moving()
    with torch.no_grad():
        model[0].weight.add_(1)
    run_acts(copy.copy_still())
    assert copy.moved == ["model.0.weight"]
