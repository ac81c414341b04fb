"""Replicas that share one snapshot: real ranks under DDP, HSDP and FSDP2 keep their part of what is
equal, any of them may be killed, and all end where an undisturbed run ends, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import slot_paths
from keepstep.edge.shm.status_page import read_status
from keepstep.model.snapshot import RankStatus
from keepstep.model.units import KIB, MIB
from tests.processes.script_runs import KEEPSTEP_RUN, ScriptRun

pytestmark = pytest.mark.timeout(900)

BLOCK_BYTES = MEMORY.block_bytes
HELD_STEP = 12
STEPS = 16
HEAD = """
import os
import torch, torch.distributed as dist
from torch import nn
import keepstep

keepstep.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 1024), nn.Dropout(0.1), nn.Linear(1024, 1024))
"""
DDP = """
model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
"""
HSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh)
"""
FSDP_BESIDE_REPLICATED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[2], mesh=mesh)  # the first layer is on every rank

def average():
    for p in model[0].parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
"""
LOOP = """
def first_time():
    try:
        open(os.environ["RESULTS"] + "/astray", "x").close()
    except FileExistsError:
        return False
    return True

optimizer = torch.optim.AdamW(model.parameters(), 0.01)
torch.manual_seed(rank)  # each its own data, and its own dropout
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(int(os.environ.get("TOTAL", STEPS))):
    with step:
        optimizer.zero_grad()
        model(torch.randn(4, 1024)).square().mean().backward()
        if "average" in globals():
            average()
        optimizer.step()
    if int(step) == int(os.environ.get("ASTRAY_STEP", -1)) - 1 and rank == 1:
        with torch.no_grad():
            model.module[2].weight.view(torch.int32)[0, 0] ^= 1
job.close()
""".replace("STEPS", str(STEPS))
ENDS_WITH = "model.state_dict(), optimizer.state_dict()"


class Shared:
    """A run at its held step, and what its ranks keep."""

    def __init__(self, run: ScriptRun) -> None:
        self.job_dir = job_dir_of(run.arena, "j")
        self.ranks = range(run.ranks)

    def page(self, rank: int) -> RankStatus:
        found = read_status(MEMORY, self.job_dir, rank)
        assert found is not None
        return found

    def slot_bytes(self, rank: int) -> list[int]:
        """In memory."""
        return [MEMORY.size(path) for path in slot_paths(MEMORY, self.job_dir, rank)]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[ScriptRun]]:
    made: list[ScriptRun] = []
    yield made
    for run in made:
        run.stop()


def begin(
    runs: list[ScriptRun], room: Path, script: str, ranks: int, held: int, **environ: str
) -> ScriptRun:
    chosen = {"KEEPSTEP_SHARE_REPLICAS": "node", **environ}
    runs.append(ScriptRun(room, script, ENDS_WITH, ranks, held, KEEPSTEP_RUN, chosen))
    return runs[-1]


def restored_steps(run: ScriptRun) -> list[int]:
    return [event.data["step"] for event in run.events("restored")]


# state bytes of the model and its two moments, and how many replicas keep them between them
WHOLE_BYTES = 3 * 4 * 2 * (1024 * 1024 + 1024)


@pytest.mark.parametrize(
    ("script", "ranks", "shard_bytes", "replicas"),
    [
        (HEAD + DDP + LOOP, 2, WHOLE_BYTES, 2),
        (HEAD + DDP + LOOP, 4, WHOLE_BYTES, 4),
        (HEAD + HSDP + LOOP, 4, WHOLE_BYTES // 2, 2),
    ],
    ids=["ddp-2", "ddp-4", "hsdp-2x2"],
)
def test_reft_1_2_3_each_keeps_its_part_and_any_may_be_killed(
    tmp_path: Path,
    runs: list[ScriptRun],
    script: str,
    ranks: int,
    shard_bytes: int,
    replicas: int,
) -> None:
    alone = begin(runs, tmp_path / "alone", script, ranks, -1, KEEPSTEP_SHARE_REPLICAS="off")
    undisturbed = alone.end()
    assert not alone.events("shared")
    for killed in (0, ranks - 1) if ranks == 2 else (ranks - 1,):
        run = begin(runs, tmp_path / f"killed-{killed}", script, ranks, HELD_STEP)
        run.hold()
        shared = Shared(run)
        for rank in shared.ranks:
            page = shared.page(rank)
            own = page.payload_bytes - shard_bytes // BLOCK_BYTES * BLOCK_BYTES
            assert abs(page.kept_bytes - own - shard_bytes / replicas) <= 2 * BLOCK_BYTES
            lacks = page.payload_bytes - page.kept_bytes
            for in_memory in shared.slot_bytes(rank)[:2]:
                assert in_memory <= page.payload_bytes - lacks + 256 * KIB
        assert len(run.events("shared")) == ranks // replicas
        run.kill(killed)
        assert run.end() == undisturbed
        assert restored_steps(run) and set(restored_steps(run)) == {HELD_STEP - 1}


def test_host_memory_is_halved_for_two_replicas(tmp_path: Path, runs: list[ScriptRun]) -> None:
    found = {}
    for how in ("off", "node"):
        script = HEAD.replace("1024)", "1024, bias=False)") + DDP + LOOP
        run = begin(runs, tmp_path / how, script, 2, HELD_STEP, KEEPSTEP_SHARE_REPLICAS=how)
        run.hold()
        shared = Shared(run)
        found[how] = sum(sum(shared.slot_bytes(rank)) for rank in shared.ranks)
        run.end()
    assert 0.5 <= found["node"] / found["off"] <= 0.5 + 4 * BLOCK_BYTES / found["off"]
    assert found["off"] > 80 * MIB


def test_replicated_parts_beside_shards(tmp_path: Path, runs: list[ScriptRun]) -> None:
    wide = HEAD.replace("nn.Linear(1024, 1024), nn", "nn.Linear(1024, 2048), nn")
    wide = wide.replace("nn.Linear(1024, 1024))", "nn.Linear(2048, 1024))")
    script = wide + FSDP_BESIDE_REPLICATED + LOOP
    undisturbed = begin(
        runs, tmp_path / "alone", script, 2, -1, KEEPSTEP_SHARE_REPLICAS="off"
    ).end()
    run = begin(runs, tmp_path / "killed", script, 2, HELD_STEP)
    run.hold()
    for rank in range(2):
        page = Shared(run).page(rank)
        lacks = page.payload_bytes - page.kept_bytes
        replicated = 3 * 4 * (1024 * 2048 + 2048)
        assert replicated // 6 <= lacks <= replicated // 2, "about half of what both have"
    run.kill(1)
    assert run.end() == undisturbed
    assert set(restored_steps(run)) == {HELD_STEP - 1}


def test_a_weight_that_differs_by_a_bit_is_told_by_name_and_nothing_is_lost(
    tmp_path: Path, runs: list[ScriptRun]
) -> None:
    """Where nobody is to compare them, the replicas go on apart, as they would without us; each
    comes back as it was."""
    script = HEAD + DDP + LOOP
    astray = {"ASTRAY_STEP": "7", "KEEPSTEP_DIGEST_EVERY_STEPS": "0"}
    alone = begin(runs, tmp_path / "alone", script, 2, -1, KEEPSTEP_SHARE_REPLICAS="off", **astray)
    undisturbed = alone.end()
    assert undisturbed[0] != undisturbed[1]
    run = begin(runs, tmp_path / "astray", script, 2, HELD_STEP, **astray)
    run.hold()
    told = [event.why for event in run.events("not-shared")]
    named = [why for why in told if "rank 1 differs from rank 0 in blocks of" in why]
    assert named and "model.2.weight" in named[0], told
    run.kill(1)
    assert run.end() == undisturbed
    assert set(restored_steps(run)) == {HELD_STEP - 1}


def test_a_weight_that_differed_once_is_told_and_undone(
    tmp_path: Path, runs: list[ScriptRun]
) -> None:
    script = HEAD + DDP + LOOP.replace("rank == 1:", "rank == 1 and first_time():")
    undisturbed = begin(runs, tmp_path / "alone", script, 2, -1).end()
    run = begin(
        runs, tmp_path / "astray", script, 2, -1, ASTRAY_STEP="7", KEEPSTEP_ON_DIFFERENCE="rollback"
    )
    assert run.end() == undisturbed
    [differ] = run.events("replicas-differ")
    # which tensors is told where the other one's slot is still there: tests/runtime/rank
    assert "the replicas on ranks 0, 1 differ" in differ.why
    assert set(restored_steps(run)) == {5}, "it changed before step 6 was captured"


def test_what_is_shared_goes_to_the_store_whole(tmp_path: Path, runs: list[ScriptRun]) -> None:
    """And comes back from there, to ranks that share again."""
    script = HEAD + DDP + LOOP
    off = {"KEEPSTEP_SHARE_REPLICAS": "off"}
    undisturbed = begin(runs, tmp_path / "alone", script, 2, -1, **off).end()
    store = {"KEEPSTEP_STORE": str(tmp_path / "store")}
    run = begin(runs, tmp_path / "stored", script, 2, -1, TOTAL=str(HELD_STEP), **store)
    run.end()
    assert run.events("shared") and run.events("persisted")
    run.environ["TOTAL"] = str(STEPS)
    run.start()
    assert run.end() == undisturbed
    assert set(restored_steps(run)) == {HELD_STEP - 1}


def test_all_killed_and_another_number_of_replicas_is_refused_not_guessed(
    tmp_path: Path, runs: list[ScriptRun]
) -> None:
    run = begin(runs, tmp_path / "four", HEAD + DDP + LOOP, 4, HELD_STEP)
    run.hold()
    run.process.kill()
    run.process.wait(60)
    for rank in Shared(run).ranks:
        run.kill(rank)
    for rank in Shared(run).ranks:
        page = Shared(run).page(rank)
        assert page.kept_bytes < page.payload_bytes
    run.ranks = 2
    run.start()
    assert run.process.wait(120) != 0
    assert "4" in run.told()
