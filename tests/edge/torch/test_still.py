"""Still: what may be left to a replica is what an optimizer owns, in host memory, and nothing else;
what is left is hashed, and not copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm import copy_table
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB

BLOCK_BYTES = 4096


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


MEMORY = SmallBlocks()


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is whole windows."""
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", BLOCK_BYTES)


class Training:
    """Linear layers with a buffer between them."""

    def __init__(self, lazy: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        stateful = {"model": self.model, "optimizer": self.optimizer}
        self.protected = Protected.of(stateful, lazy=lazy)
        self.live = TorchState(self.protected, 0, 2, resolve(None, {}, "j"))
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()

    def snapshot(self, path: Path, lacking: frozenset[int]) -> tuple[Slot, tuple[int, ...], int]:
        """Its slot, its table, and how many bytes were copied."""
        gathered = self.protected.gather()
        slot = Slot.create(MEMORY, path, gathered.payload_bytes, 64 * KIB)
        slot.begin(bytes(16), 0, 2, 1, Stamp(0, 1))
        slot.shed(lacking)
        copy = self.live.copy(gathered, slot, lacking)
        copy.copy_moving()
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        copy.passed()
        assert not copy.moved
        header = slot.write_table(gathered.payload_bytes, b"{}", copy.sums)
        return slot, tuple(slot.table(header)), copy.copied_bytes  # type: ignore[attr-defined]


def test_a_block_with_a_buffer_or_a_random_state_is_never_still() -> None:
    training = Training()
    gathered = training.protected.gather()
    still = training.live.still_blocks(gathered, BLOCK_BYTES)
    assert still
    owned = {"weight", "bias", "exp_avg", "exp_avg_sq", "step"}
    for segment in gathered.layout.segments:
        blocks = range(segment.offset // BLOCK_BYTES, (segment.end - 1) // BLOCK_BYTES + 1)
        is_owned = segment.spec.name.rpartition(".")[2] in owned
        assert is_owned or still.isdisjoint(blocks), segment.spec.name
    last = gathered.payload_bytes // BLOCK_BYTES
    assert all((block + 1) * BLOCK_BYTES <= gathered.layout.objects_offset for block in still)
    assert last not in still


def test_nothing_is_still_where_all_is_copied_at_the_boundary() -> None:
    training = Training(lazy=False)
    assert training.live.still_blocks(training.protected.gather(), BLOCK_BYTES) == frozenset()


def test_what_is_torn_once_is_not_still_any_more() -> None:
    training = Training()
    before = training.live.still_blocks(training.protected.gather(), BLOCK_BYTES)
    training.live.copy_eagerly(["model.0.weight"])
    after = training.live.still_blocks(training.protected.gather(), BLOCK_BYTES)
    assert after < before


def test_it_is_worked_out_once() -> None:
    training = Training()
    first = training.live.still_blocks(training.protected.gather(), BLOCK_BYTES)
    training.step()
    again = training.live.still_blocks(training.protected.gather(), BLOCK_BYTES)
    assert again is first or again == first
    training.step()
    assert training.live.still_blocks(training.protected.gather(), BLOCK_BYTES) is again


@pytest.mark.parametrize("every", [1, 2, 3])
def test_reft_2_what_is_left_to_others_is_not_copied(tmp_path: Path, every: int) -> None:
    training = Training()
    gathered = training.protected.gather()
    still = training.live.still_blocks(gathered, BLOCK_BYTES)
    lacking = frozenset(block for block in still if block % every == 0)
    whole, table, all_bytes = training.snapshot(tmp_path / "slot-0", frozenset())
    part, same_table, fewer_bytes = training.snapshot(tmp_path / "slot-1", lacking)
    for block in still:
        assert table[block] == same_table[block], "hashed where it lies, as it would be in the slot"
    assert fewer_bytes <= all_bytes - len(lacking) * (BLOCK_BYTES - 64)
    for block in lacking:
        assert not any(part.payload[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
    whole.close()
    part.close()
