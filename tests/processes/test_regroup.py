"""Ranks that stay in their process when another one is lost, and end in the state of a training in
which nobody was."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, SlotState
from tests.processes.quick_steps import FEW_STEPS
from tests.processes.waiting import until, until_it

pytestmark = pytest.mark.timeout(400)

PATIENCE_S = 120.0
STEPS = 150
PROGRAM = """
import ctypes, hashlib, json, os, socket, stat, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import keepstep

kind, steps, results, with_step = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "with"
hurry, late = results + "/hurry", int(os.environ.get("LATE", -1))
torch.set_num_threads(1)
keepstep.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 31), nn.Tanh(), nn.Dropout(0.2), nn.Linear(31, 1))
if kind in ("fsdp", "hsdp", "fsdp_compiled"):
    mesh = init_device_mesh("cpu", (world,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif kind == "pipeline":
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    model = model[:3] if rank == 0 else model[3:]
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
else:
    finds_unused = kind == "freezing"
    if kind == "compiled_within":
        model = torch.compile(model, backend="eager")
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=finds_unused)
forward = torch.compile(model, backend="eager") if kind.endswith("compiled") else model
some = dist.new_group([0, world - 1])  # groups of part of the ranks are built anew as well
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
torch.manual_seed(7 + rank)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "scaler")
job = keepstep.protect(model=model, optimizer=optimizer, scaler=scaler, seen=[])

def cut():
    # every connection but the store's, as a box between two nodes would
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            sock = socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
            if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
                if sock.getpeername()[1] != int(os.environ["MASTER_PORT"]):
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it listens, or is gone

def evaluate():
    while os.path.exists(results + "/evaluate"):
        time.sleep(0.01)

def body(step):
    optimizer.zero_grad()
    if kind == "freezing":
        model.module[0].requires_grad_(step < 5)
    if kind == "pipeline":
        losses = []
        torch.manual_seed(int(step))
        batch = (torch.randn(8, 16),) if rank == 0 else ()
        schedule.step(*batch, target=torch.ones(8, 1), losses=losses)
        loss = sum(losses, torch.zeros(()))
    else:
        loss = forward(torch.randn(8, 16)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    if rank == 1 and os.path.exists(results + "/cut"):
        os.remove(results + "/cut")
        cut()
    if rank == 1 and os.path.exists(results + "/raise"):
        os.remove(results + "/raise")
        raise RuntimeError("a fault of its own")
    told = loss.detach().clone()
    dist.all_reduce(told)
    if rank in (0, world - 1):
        dist.broadcast(told, 0, group=some)
    parts = [None] * world
    dist.all_gather_object(parts, (rank, int(step)))
    assert parts == [(r, step) for r in range(world)], parts
    if rank == 0 and step == late:
        while not os.path.exists(hurry):
            time.sleep(0.01)
    if rank == 1 and step == steps - 1:
        evaluate()  # it has all that its peers give, and has not ended the step
    scaler.step(optimizer)
    scaler.update()
    job.state["seen"].append((int(step), float(told)))
    if not os.path.exists(hurry):
        # whatever is to happen happens before the end, and the process that stands by gets its time
        time.sleep(0.2)

for step in job.steps(steps):
    if with_step:
        with step:
            body(step)
    else:
        body(step)
    if rank == 1 and os.path.exists(results + "/leave"):
        os.remove(results + "/leave")
        sys.exit(0)

if rank == 0:
    evaluate()

def local(t):
    return t.to_local() if isinstance(t, DTensor) else t

tensors = [local(t) for t in model.state_dict().values()]
tensors += [local(t) for s in optimizer.state.values() for t in s.values()]
tensors += [torch.get_rng_state()]
raw = b"".join(ctypes.string_at(t.contiguous().data_ptr(), t.nbytes) for t in tensors)
digest = hashlib.sha256(raw)
digest.update(json.dumps(job.state["seen"]).encode())
with open(f"{results}/rank-{rank}", "w") as file:
    json.dump({"digest": digest.hexdigest(), "pid": os.getpid()}, file)
os._exit(0) if job.close() is None else None
"""


class Running:
    """`keepstep run` of the program on one node. Its steps are slow until it is to hurry; rank 0
    does not begin its update in step `late` before that."""

    def __init__(
        self, room: Path, kind: str, ranks: int, mode: str, *options: str, late: int = -1
    ) -> None:
        self.room, self.ranks = room, ranks
        self.results, self.arena = room / "results", room / "arena"
        for directory in (self.results, self.arena):
            directory.mkdir(parents=True)
        (room / "train.py").write_text(PROGRAM)
        command = [
            sys.executable,
            "-m",
            "keepstep.cli.main",
            "run",
            "--job",
            "j",
            "--nproc-per-node",
            str(ranks),
        ]
        command += ["--arena-dir", str(self.arena), "--state-dir", str(room / "state"), *options]
        command += [str(room / "train.py"), kind, str(STEPS), str(self.results), mode]
        self.log = room / "log"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "LATE": str(late)}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def events(self, kind: str) -> list[Event]:
        return [
            e for e in read_journal(self.room / "state" / "j" / "journal.jsonl") if e.kind == kind
        ]

    def until(self, look: Any) -> None:
        until_it(self.process, look, lambda: self.log.read_text()[-3000:], PATIENCE_S)

    def pid(self, rank: int) -> int:
        status = read_status(MEMORY, job_dir_of(self.arena, "j"), rank)
        assert status is not None
        return status.pid

    def train_until(self, step: int) -> None:
        def all_there() -> bool:
            pages = [
                read_status(MEMORY, job_dir_of(self.arena, "j"), rank) for rank in range(self.ranks)
            ]
            return all(page is not None and page.completed_step >= step for page in pages)

        self.until(all_there)

    def lose(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), signum)

    def end(self) -> list[dict[str, Any]]:
        (self.results / "hurry").touch()
        code = self.process.wait(PATIENCE_S)
        assert code == 0, self.log.read_text()[-3000:]
        assert list(self.arena.iterdir()) == []
        return [
            json.loads((self.results / f"rank-{rank}").read_text()) for rank in range(self.ranks)
        ]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    runs: list[Running] = []

    def start(kind: str, ranks: int, mode: str = "with", *options: str, late: int = -1) -> Running:
        runs.append(Running(tmp_path / str(len(runs)), kind, ranks, mode, *options, late=late))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The digest of each rank's state at the end of a training in which nobody is lost."""

    @cache
    def digests(kind: str, ranks: int) -> list[str]:
        run = Running(tmp_path_factory.mktemp(kind), kind, ranks, "with", "--standby", "0")
        try:
            return [found["digest"] for found in run.end()]
        finally:
            run.stop()

    return digests


@pytest.mark.parametrize(
    ("kind", "ranks", "standby"),
    [
        pytest.param("ddp", 2, 0, marks=pytest.mark.everyday),
        ("ddp", 4, 1),
        ("fsdp", 2, 1),
        ("fsdp", 4, 0),
        ("hsdp", 4, 0),
    ],
)
def test_the_others_stay_in_their_process_and_the_end_is_the_same(
    started: Any, undisturbed: Any, kind: str, ranks: int, standby: int
) -> None:
    run = started(kind, ranks, "with", "--standby", str(standby))
    run.train_until(5)
    run.until(lambda: len(run.events("standby-ready")) == standby)
    staying = [run.pid(rank) for rank in range(ranks)]
    run.lose(1)
    run.until(lambda: len(run.events("recovered")) == 1)
    run.until(lambda: len(run.events("next-step")) == ranks)
    run.lose(0)  # nothing is special about it; no process stands by yet
    run.until(lambda: len(run.events("recovered")) == 2)
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed(kind, ranks)
    assert [f["pid"] == before for f, before in zip(found, staying, strict=True)] == [
        False,
        False,
        *[True] * (ranks - 2),
    ]
    assert len(run.events("recovered")) == 2 and run.events("refused") == []
    told = [line.partition("keepstep agent: ")[2] for line in run.log.read_text().splitlines()]
    told = [line for line in told if "was killed by" in line or "train on after" in line]
    assert [line.partition(" was")[0] for line in told[::2]] == ["rank 1", "rank 0"], told
    assert all(line.startswith("all ranks of this node train on") for line in told[1::2]), told
    assert len(run.events("lost-notice")) == 2 * (ranks - 1) == len(run.events("regrouped"))
    assert [e.data["rank"] for e in run.events("rank-respawned")] == [1] * standby
    assert {e.data["code"] for e in run.events("rank-exited")} == {-9, 0}, "nobody else has failed"
    assert all(
        e.data["lost_steps"] <= FEW_STEPS and e.data["source"] == "memory"
        for e in run.events("resumed")[1:]
    )


def test_who_ends_by_an_exception_is_lost_like_a_killed_one(started: Any, undisturbed: Any) -> None:
    run = started("ddp", 2, "with", "--standby", "0")
    run.train_until(5)
    staying = run.pid(0)
    (run.results / "raise").touch()
    run.until(lambda: len(run.events("recovered")) == 1)
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed("ddp", 2)
    assert found[0]["pid"] == staying and run.events("refused") == []
    assert {e.data["code"] for e in run.events("rank-exited")} == {1, 0}


@pytest.mark.everyday
def test_who_leaves_early_with_a_good_end_is_named_and_all_go_on(
    started: Any, undisturbed: Any
) -> None:
    run = started("ddp", 2, "with", "--standby", "0")
    run.train_until(5)
    (run.results / "leave").touch()
    run.until(lambda: run.events("anew"))
    assert "rank 1 ended with code 0, and rank 0 still waits" in run.events("anew")[0].why
    assert [f["digest"] for f in run.end()] == undisturbed("ddp", 2)
    assert {e.data["culprit"] for e in run.events("diagnosis")} == {1}
    assert "KS3000" not in run.log.read_text(), "rank 0 had no error of its own"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        *itertools.product(["freezing", "pipeline", "scaler"], [0, 1]),
        pytest.param("compiled", 1, marks=pytest.mark.everyday),
        pytest.param("compiled_within", 0, marks=pytest.mark.everyday),
        ("fsdp_compiled", 0),
    ],
)
def test_what_the_objects_have_learnt_since_they_were_made_is_as_in_the_newcomer(
    started: Any, undisturbed: Any, kind: str, lost: int
) -> None:
    """A layer that was frozen midway; a pipeline whose stages have met; gradients that were
    unscaled in a body that was given up; a compiled model, whose code calls the groups."""
    run = started(kind, 2, "with", "--standby", "0")
    run.train_until(8)
    staying = run.pid(1 - lost)
    run.lose(lost)
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed(kind, 2)
    assert found[1 - lost]["pid"] == staying and run.events("refused") == []


def test_two_at_once_and_one_more_while_they_find_together(started: Any, undisturbed: Any) -> None:
    run = started("ddp", 4, "with", "--standby", "0")
    run.train_until(5)
    run.lose(1)
    run.lose(3)
    run.until(lambda: len(run.events("lost-notice")) >= 2)
    run.lose(2)
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed("ddp", 4)


@pytest.mark.everyday
def test_all_at_once_are_one_way_back(started: Any, undisturbed: Any) -> None:
    """Nobody is left who could find its peers again, so nobody is missed when training ends."""
    run = started("ddp", 2, "with", "--standby", "0")
    run.train_until(5)
    for pid in [run.pid(rank) for rank in (0, 1)]:
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: len(run.events("next-step")) == 2)
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed("ddp", 2)
    assert [e.data["attempt"] for e in run.events("ranks-restarted")] in ([1], [2], [1, 2])
    assert {e.data["code"] for e in run.events("rank-exited")} == {-9, 0}


def test_connections_that_break_while_all_live_are_no_step_of_its_own(
    started: Any, undisturbed: Any
) -> None:
    """Nobody says which peer is lost, because none is: no rank trains on with what it has alone."""
    run = started("ddp", 2, "with", "--standby", "0")
    run.train_until(5)
    (run.results / "cut").touch()
    run.until(lambda: run.events("ranks-restarted"))
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed("ddp", 2)
    assert any("gives up its step" in e.why for e in run.events("lost-notice"))


def test_without_an_agent_nobody_trains_on_alone(started: Any) -> None:
    """The rank that is left ends, and its memory stays."""
    run = started("ddp", 2, "with", "--standby", "0")
    run.train_until(5)
    left, lost = run.pid(0), run.pid(1)
    run.process.kill()
    run.process.wait()
    os.kill(lost, signal.SIGKILL)
    until(
        lambda: not psutil.pid_exists(left), "that it does not train without its peer", PATIENCE_S
    )


@pytest.mark.everyday
def test_who_has_what_a_step_needs_finishes_it_and_nobody_rolls_back(
    started: Any, undisturbed: Any
) -> None:
    run = started("ddp", 2, "with", "--standby", "0", late=7)

    def sealed() -> bool:
        page = read_status(MEMORY, job_dir_of(run.arena, "j"), 1)
        return page is not None and any(
            v.state is SlotState.SEALED and v.stamp.step == 7 for v in page.slots
        )

    run.until(sealed)
    # it waits in step 8 for rank 0, which has all gradients of step 7 and has not updated yet
    run.lose(1)
    run.until(lambda: len(run.events("lost-notice")) == 1)
    found = run.end()
    assert [e.data["step"] for e in run.events("resumed")[1:]] == [7]
    assert [f["digest"] for f in found] == undisturbed("ddp", 2)


@pytest.mark.everyday
def test_without_a_body_that_can_be_given_up_all_start_anew(started: Any, undisturbed: Any) -> None:
    run = started("ddp", 2, "without", "--standby", "0")
    run.train_until(5)
    before = run.pid(0)
    run.lose(1)
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed("ddp", 2)
    assert found[0]["pid"] != before and run.events("lost-notice") == [] and run.events("refused")


def test_who_is_past_its_loop_is_not_waited_for(started: Any, undisturbed: Any) -> None:
    """It evaluates, and nobody knows for how long: all start anew at once."""
    run = started("ddp", 2, "with", "--standby", "0")
    evaluate, hurry = run.results / "evaluate", run.results / "hurry"
    evaluate.touch()
    hurry.touch()

    def is_past() -> bool:
        page = read_status(MEMORY, job_dir_of(run.arena, "j"), 0)
        return page is not None and page.phase is Phase.DONE

    run.until(is_past)
    before = run.pid(0)
    run.lose(1)
    run.until(lambda: run.events("ranks-restarted"))
    evaluate.unlink()
    found = run.end()
    assert [f["digest"] for f in found] == undisturbed("ddp", 2)
    assert found[0]["pid"] != before and run.events("lost-notice") == [] and run.events("refused")
