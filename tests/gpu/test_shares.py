"""Shares of what is on a real device: its digests are the host's, what others keep never crosses
the bus, and two ranks that share one snapshot restore it after one was killed. Skipped without
CUDA. Slots have to lie in tmpfs: run with `--basetemp` below /dev/shm."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.share_runs import SHARING, ended, figures, told
from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.copy_stream import copy_stream
from keepstep.edge.torch.device_copy import DeviceCopy
from keepstep.edge.torch.digests import digest_of, keys_of
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

JOB = bytes(range(16))
WIDTH = 2048  # 16 MiB a layer


class Training:
    """With what does not fit into words, and counters of steps on the host."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        ).cuda()
        odd = torch.randn(3_000_001, device="cuda").to(torch.bfloat16)
        self.odd = torch.nn.Parameter(odd[1:])
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.odd], fused=False)
        things = {"model": self.model, "odd": self.odd, "optimizer": self.optimizer}
        self.protected = Protected.of(things, lazy=True)
        self.live = TorchState(self.protected, 0, 2, resolve(None, {}, "j"))
        self.optimizer.register_step_pre_hook(self._before_update)
        self.copy: TensorCopy | None = None
        self.step()

    def _before_update(self, optimizer: object, *_: object) -> None:
        if self.copy is not None:
            self.copy.fence(optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(64, WIDTH, device="cuda")).square().mean()
        (loss + self.odd.float().square().mean()).backward()
        self.optimizer.step()

    def slot(self, path: Path) -> Slot:
        made = Slot.create(MEMORY, path, self.protected.gather().payload_bytes + MIB, MIB)
        assert self.live.pin(made) is None
        return made

    def captured(
        self, slot: Slot, lacking: frozenset[int], shared: frozenset[int], updates: bool
    ) -> TensorCopy:
        slot.begin(JOB, 0, 2, 1, Stamp(0, 1))
        copy = self.live.copy(self.protected.gather(), slot, lacking, shared)
        assert isinstance(copy, TensorCopy)
        self.copy = copy
        stream = copy_stream(torch.device("cuda", torch.cuda.current_device()))
        with torch.cuda.stream(stream._stream):  # what is ordered there comes late
            torch.cuda._sleep(100_000_000)
        copy.copy_moving()
        if updates:
            self.step()  # before the capture thread has begun
        slot.shed(lacking)
        run_acts(copy.copy_still())
        self.copy = None
        layout = copy.state.layout
        slot.write_table(
            copy.state.payload_bytes,
            json.dumps(layout.to_json()).encode(),
            copy.sums,
        )
        return copy


def test_what_the_device_digests_is_what_the_slot_would_have(tmp_path: Path) -> None:
    training = Training()
    still = training.live.still_blocks(training.protected.gather(), MEMORY.block_bytes)
    count = len(still)
    assert count > 20
    lacking = frozenset(sorted(still)[: count // 2])
    keys = keys_of(JOB, MEMORY.block_bytes // 4)
    with (
        closing(training.slot(tmp_path / "a")) as whole,
        closing(training.slot(tmp_path / "b")) as part,
    ):
        copy = training.captured(whole, frozenset(), frozenset(), updates=False)
        whole_bytes = copy.device_bytes
        payload = bytes(whole.payload[: copy.state.payload_bytes])
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        copy = training.captured(part, lacking, still, updates=True)
        size = MEMORY.block_bytes
        for block in still:
            at = slice(block * size, (block + 1) * size)
            assert copy.digests[block] == digest_of(payload[at], keys), block
            if block not in lacking:
                assert part.payload[at] == payload[at]
        left = copy.device_bytes
        assert left <= whole_bytes - len(lacking) * size + MIB
        assert training.live.pin(part) is None, "what it lacks is not locked any more"
        # 16 MiB of keys, 128 of products, 32 to pack; the rest is the step's
        assert torch.cuda.memory_allocated() - before < 256 * MIB
        assert MEMORY.size(part.path) < MEMORY.size(whole.path) - (len(lacking) - 1) * size


def test_without_the_fence_of_an_update_the_digests_would_be_of_another_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail."""
    monkeypatch.setattr(DeviceCopy, "lead", lambda self, optimizer: True)
    training = Training()
    still = training.live.still_blocks(training.protected.gather(), MEMORY.block_bytes)
    with closing(training.slot(tmp_path / "a")) as slot:
        first = training.captured(slot, frozenset(), still, updates=False)
        second = training.captured(slot, frozenset(), still, updates=True)
        assert first.digests != second.digests


def test_two_ranks_share_one_snapshot_and_one_of_them_is_killed(tmp_path: Path) -> None:
    calm = ended(SHARING, tmp_path, "calm", KEEPSTEP_SHARE_REPLICAS="off")
    assert calm.returncode == 0, calm.stderr[-4000:]
    killed = ended(SHARING, tmp_path, "killed", KEEPSTEP_SHARE_REPLICAS="node", DIES_AT="14")
    assert killed.returncode == 0, killed.stderr[-4000:]
    journals = [path.read_text() for path in tmp_path.rglob("journal.jsonl")]
    assert any("from here on each keeps 1/2 of that" in text for text in journals), journals
    assert len(told(calm, "hash")) == 2 and told(killed, "hash") == told(calm, "hash")
    alone, shared = figures(calm), figures(killed)
    for rank in (0, 1):
        whole, part = alone[rank], shared[rank]
        size = MEMORY.block_bytes
        assert whole["left"] > 10 * size, whole
        assert part["left"] <= whole["left"] / 2 + 2 * size, (whole, part)
        assert part["kept"] <= whole["kept"] / 2 + 2 * size, (whole, part)
        room = part["payload"] / 2 + 3 * size  # of a slot; slack and table are in it
        assert part["memory"] <= part["slots"] * room, part
