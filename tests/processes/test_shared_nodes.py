"""Replicas that share one snapshot, on each of two nodes or over both: what a rank keeps for others
rests on the other node, too, and a machine that is lost with its memory costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import ranks_in, slot_paths
from keepstep.edge.shm.status_page import read_status
from keepstep.model.units import KIB
from tests.processes.test_run_nodes import PATIENCE_S, Begin, Node, until
from tests.processes.test_run_nodes import machines as machines

pytestmark = pytest.mark.timeout(900)

RANKS = 2  # of a node
BLOCK_BYTES = MEMORY.block_bytes
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
HELD = {"copies:2": "held", "parity:2": "parity"}
# of the model and its two moments
STATE_BYTES = 3 * 4 * (2 * 1024 * 2048 + 2048 + 1024)
HELD_STEP = 14
PROGRAM = """
import hashlib, os, pathlib, time
import torch
from torch import nn
import keepstep
from keepstep.config import job_dir_of
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY

torch.set_num_threads(1)
keepstep.init_process_group()
rank, out = torch.distributed.get_rank(), pathlib.Path(os.environ["OUT"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.Dropout(0.1), nn.Linear(2048, 1024))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
torch.manual_seed(rank)
job = keepstep.protect(model=model, optimizer=optimizer)
holds = (out / "holds").exists()

def committed():
    job_dir = job_dir_of(pathlib.Path(os.environ["KEEPSTEP_ARENA_DIR"]), os.environ["KEEPSTEP_JOB"])
    found = HorizonPage(MEMORY, job_dir, make=False).last().committed
    return -1 if found is None else found.step

for step in job.steps(20):
    with step:
        optimizer.zero_grad()
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
    # so all slots are of the last two steps
    while holds and committed() < int(step) - 1 and not (out / "go-on").exists():
        time.sleep(0.02)
    if int(step) == HELD_STEP and holds:
        (out / f"held-{rank}").touch()
        while not (out / "go-on").exists():
            time.sleep(0.05)
digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
for state in optimizer.state_dict()["state"].values():
    digest.update(state["exp_avg"].numpy().tobytes())
(out / f"digest-{rank}").write_text(digest.hexdigest())
job.close()
""".replace("HELD_STEP", str(HELD_STEP))


def in_memory(node: Node, part: str = "") -> list[int]:
    """What each slot of its own ranks takes, or of what it holds for others."""
    root = job_dir_of(node.arena_dir, "t") / part
    ranks = ranks_in(MEMORY, root)
    return [MEMORY.size(path) for rank in ranks for path in slot_paths(MEMORY, root, rank)]


def ended(node: Node) -> tuple[int, str]:
    """As `Node.ended`, for ranks that are restored meanwhile."""
    output, _ = node.agent.communicate(timeout=3 * PATIENCE_S)
    return node.agent.returncode, output


def undisturbed(room: Path, ranks: int = 2 * RANKS) -> list[str]:
    """What ranks end with that share nothing and of which none is lost, all on one node."""
    (room / "alone.py").write_text(PROGRAM)
    arena = {"KEEPSTEP_JOB": "alone", "KEEPSTEP_STATE_DIR": str(room / "state-alone")}
    subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(ranks), str(room / "alone.py")],
        env={**os.environ, "OUT": str(room), "KEEPSTEP_SHARE_REPLICAS": "off", **arena},
        timeout=PATIENCE_S,
        check=True,
    )
    return [(room / f"digest-{rank}").read_text() for rank in range(ranks)]


@pytest.mark.parametrize("policy", ["copies:2", "parity:2"])
def test_a_lost_node_of_ranks_that_share_comes_back_from_the_other(
    machines: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = undisturbed(tmp_path)
    job = machines('exec "$PYTHON" "$PROGRAM"', program=PROGRAM)
    (job.room / "out" / "holds").touch()
    own = ("--redundancy", policy, "--share-replicas", "node")
    nodes = [job.start(*own, nproc=RANKS) for _ in range(2)]
    ranks = range(2 * RANKS)
    until(lambda: all(job.out(f"held-{rank}") is not None for rank in ranks), "the held step")
    for node in nodes:
        assert len(node.events("shared")) == 1
        pages = [read_status(MEMORY, job_dir_of(node.arena_dir, "t"), rank) for rank in ranks]
        seen = [page for page in pages if page is not None]
        assert len(seen) == RANKS
        for page in seen:
            shared = STATE_BYTES // BLOCK_BYTES * BLOCK_BYTES
            own_bytes = page.payload_bytes - shared
            assert abs(page.kept_bytes - own_bytes - shared / RANKS) <= 2 * BLOCK_BYTES
        most = max(page.kept_bytes for page in seen) + 256 * KIB
        assert max(in_memory(node)) <= most
        held = in_memory(node, HELD[policy])
        # a parity's row is whole blocks, and headers and tables lie behind it
        assert len(held) == 2 * RANKS and max(held) <= most + BLOCK_BYTES
        print(policy, "kept a slot", in_memory(node), "held", held, "whole", page.payload_bytes)
    lost = nodes[1]
    lost.lose()
    replacement = job.start(*own, nproc=RANKS)
    job.allow("go-on")
    for node in (nodes[0], replacement):
        code, output = ended(node)
        assert code == 0, output
    assert [job.out(f"digest-{rank}") for rank in ranks] == expected
    # whichever of them leads then
    told = [event for node in (nodes[0], replacement) for event in node.events("resumed")]
    [resumed] = [event for event in told if event.data["source"] == "memory"]
    assert resumed.data["step"] >= HELD_STEP - 1, resumed.why
    fetched = [event.data["nbytes"] for event in replacement.events("fetched")]
    assert len(fetched) == RANKS and max(fetched) <= most


def shared_bytes(whole_bytes: int, kept_bytes: int) -> None:
    """Each of two keeps half of what is common, within a block, and all that is its own."""
    shared = STATE_BYTES // BLOCK_BYTES * BLOCK_BYTES
    assert abs(kept_bytes - (whole_bytes - shared) - shared / 2) <= 2 * BLOCK_BYTES


@pytest.mark.parametrize("policy", ["copies:2", "parity:2"])
def test_ranks_of_two_nodes_keep_one_snapshot_and_a_lost_node_comes_back(
    machines: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = undisturbed(tmp_path, ranks=2)
    job = machines('exec "$PYTHON" "$PROGRAM"', program=PROGRAM)
    (job.room / "out" / "holds").touch()
    own = ("--redundancy", policy, "--share-replicas", "job", "--store", str(tmp_path / "store"))
    nodes = [job.start(*own, nproc=1) for _ in range(2)]
    until(lambda: all(job.out(f"held-{rank}") is not None for rank in range(2)), "the held step")
    assert sum(len(node.events("shared")) for node in nodes) == 1
    most = 0
    for node in nodes:
        pages = [read_status(MEMORY, job_dir_of(node.arena_dir, "t"), rank) for rank in range(2)]
        [page] = [page for page in pages if page is not None]
        shared_bytes(page.payload_bytes, page.kept_bytes)
        most = page.kept_bytes + 256 * KIB
        assert max(in_memory(node)) <= most
        held = in_memory(node, HELD[policy])
        assert len(held) == 2 and max(held) <= most + BLOCK_BYTES
        print(policy, "kept a slot", in_memory(node), "held", held, "whole", page.payload_bytes)
    nodes[1].lose()
    replacement = job.start(*own, nproc=1)
    job.allow("go-on")
    for node in (nodes[0], replacement):
        code, output = ended(node)
        assert code == 0, output
    assert [job.out(f"digest-{rank}") for rank in range(2)] == expected
    told = [event for node in (nodes[0], replacement) for event in node.events("resumed")]
    [resumed] = [event for event in told if event.data["source"] == "memory"]
    assert resumed.data["step"] >= HELD_STEP - 1, resumed.why
    # its own part, and the other one's; with copies that one has the other part already
    step = resumed.data["step"]
    fetched = [e.data["nbytes"] for e in replacement.events("fetched") if e.data["step"] == step]
    assert len(fetched) == 2 and max(fetched) <= most
    stayed = [event for event in nodes[0].events("fetched") if event.data["step"] == step]
    assert len(stayed) == (0 if policy == "copies:2" else 1)
    # each node wrote its part of the last step, and had what it lacks of it brought first
    stored = [event for node in (nodes[0], replacement) for event in node.events("persisted")]
    assert stored[-1].data["step"] == 19, [event.why for event in stored]
