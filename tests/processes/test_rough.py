"""What is done to a training in one plain process, and the same command again: it ends in the state
of one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.edge.store.store import Store
from keepstep.model.events import Event
from keepstep.model.snapshot import RankStatus, SlotState
from keepstep.model.units import GIB, MIB
from tests.processes.quick_steps import FEW_STEPS
from tests.processes.script_runs import ScriptRun
from tests.processes.test_clocks import ENDS_WITH, HELD_STEP
from tests.processes.test_clocks import PROGRAM as ONE_OR_TWO_RANKS

pytestmark = pytest.mark.timeout(600)

PATIENCE_S = 240.0
STEPS = 40
PROGRAM = """
import hashlib, json, os, sys, time
import torch, keepstep

config, kind, pace_s = json.loads(sys.argv[1]), sys.argv[2], float(sys.argv[3])
torch.manual_seed(1)
torch.set_num_threads(1)
if kind == "many":
    model = torch.nn.ParameterList(torch.randn(3) for _ in range(10_000))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
elif kind == "huge":
    model = torch.nn.ParameterList([torch.zeros(3 << 28)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
else:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.Dropout(0.1),
        torch.nn.Linear(512, 64),
    )
    if kind == "compiled":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

def loss_of():
    if kind == "many":
        return sum(p.square().sum() for p in list(model)[:: 7])
    return model(torch.randn(8, 64)).square().mean()

job = keepstep.protect(config, model=model, optimizer=optimizer)
for step in job.steps(int(sys.argv[4])):
    optimizer.zero_grad()
    if kind == "huge":
        model[0].grad = torch.ones(()).expand(3 << 28)
    else:
        loss_of().backward()
    optimizer.step()
    if os.path.exists(sys.argv[5]):
        torch.ones(1 << 29)
    time.sleep(pace_s)
digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for tensor in model.state_dict().values():
    digest.update(tensor.detach().numpy().data)
print(digest.hexdigest())
"""


class Training:
    """One job: its directories, and the command that is given again and again."""

    def __init__(self, where: Path, kind: str = "plain", **config: Any) -> None:
        self.where, self.kind = where, kind
        self.arena = where / "arena"
        self.greedy = where / "greedy"  # once it is there the program takes 2 GiB of memory
        self.arena.mkdir(parents=True)
        (where / "train.py").write_text(PROGRAM)
        self.config = {
            "job": "j",
            "arena_dir": str(self.arena),
            "state_dir": str(where / "state"),
            "grace_s": 60.0,
            **config,
        }
        self.steps = STEPS

    def start(self, pace_s: float = 0.05, before: Callable[[], None] | None = None) -> Any:
        program = [sys.executable, str(self.where / "train.py"), json.dumps(self.config)]
        self.process = subprocess.Popen(
            [*program, self.kind, str(pace_s), str(self.steps), str(self.greedy)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )
        return self.process

    def page(self) -> RankStatus | None:
        return read_status(MEMORY, job_dir_of(self.arena, "j"), 0)

    def until(self, fact: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not fact():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.process.kill()
                raise AssertionError(self.process.communicate()[1][-3000:])
            time.sleep(0.005)

    def train_until(self, step: int) -> None:
        def reached() -> bool:
            page = self.page()
            return page is not None and page.pid == self.process.pid and page.completed_step >= step

        self.until(reached)

    def hold_a_snapshot(self) -> None:
        """Until there is something to go back to: a large first capture may take many steps."""

        def holds() -> bool:
            page = self.page()
            return page is not None and any(s.state is SlotState.SEALED for s in page.slots)

        self.until(holds)

    def events(self, kind: str) -> list[Event]:
        journal = self.where / "state" / "j" / "journal.jsonl"
        return [e for e in read_journal(journal) if e.kind == kind] if journal.exists() else []

    @property
    def keeper(self) -> int:
        return int(self.events("keeper-started")[-1].data["pid"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> str:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, err[-3000:]
        return out.strip().splitlines()[-1]

    def lost_steps(self, reached: int) -> int:
        """Against the newest restore."""
        return reached - int(self.events("restored")[-1].data["step"])

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, AttributeError):
            self.process.kill()
        if self.events("keeper-started") and not self.events("keeper-ended"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper, signal.SIGKILL)
        shutil.rmtree(self.arena, ignore_errors=True)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(kind: str = "plain", **config: Any) -> Training:
        made.append(Training(tmp_path / str(len(made)), kind, **config))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    @cache
    def digest(kind: str = "plain", steps: int = STEPS) -> str:
        alone = Training(tmp_path_factory.mktemp("alone") / "x", kind)
        alone.steps = steps
        try:
            alone.start(pace_s=0.0)
            return alone.end()
        finally:
            alone.stop()

    return digest


Make = Callable[..., Training]
Digest = Callable[..., str]


@pytest.mark.parametrize("kind", ["many", "compiled"])
def test_a_kill_between_two_steps_costs_few(training: Make, undisturbed: Digest, kind: str) -> None:
    """20,000 tensors; a compiled model."""
    run = training(kind)
    run.start()
    run.train_until(8)
    reached = run.page()
    run.kill()
    assert reached is not None
    run.start(pace_s=0.0)
    assert run.end() == undisturbed(kind)
    assert run.lost_steps(reached.completed_step) <= FEW_STEPS


def test_a_tensor_of_three_gibibytes(tmp_path: Path, undisturbed: Digest) -> None:
    """More than fits into 31 bits, in bytes and in a piece of a checkpoint."""
    arena = Path("/dev/shm") / f"keepstep-huge-{os.getpid()}"
    if MEMORY.free_bytes(Path("/dev/shm")) < 9 * GIB or _available_bytes() < 16 * GIB:
        pytest.skip("expected 16 GiB of free memory, 9 of them in /dev/shm")
    run = Training(tmp_path / "x", "huge", slots=2)
    run.arena, run.steps = arena, 5
    arena.mkdir()
    run.config["arena_dir"] = str(arena)
    try:
        run.start()
        run.hold_a_snapshot()
        run.kill()
        run.start(pace_s=0.0)
        digest = run.end()
        assert run.events("restored")
        alone = Training(tmp_path / "y", "huge", slots=2)
        alone.arena, alone.steps = arena, 5
        alone.config["arena_dir"] = str(arena)
        alone.start(pace_s=0.0)
        assert digest == alone.end()
    finally:
        run.stop()


def _available_bytes() -> int:
    from keepstep.edge.os.machine import available_bytes

    return available_bytes()


@pytest.mark.parametrize("who", ["rank", "keeper", "both"])
def test_who_is_stopped_for_a_while_goes_on(training: Make, undisturbed: Digest, who: str) -> None:
    run = training()
    run.start(pace_s=0.3)  # slow enough to have steps left when the other one goes on
    run.train_until(5)
    pids = {"rank": [run.process.pid], "keeper": [run.keeper]}
    stopped = pids.get(who) or pids["rank"] + pids["keeper"]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    run.train_until(10)
    run.kill()
    run.start(pace_s=0.0)
    assert run.end() == undisturbed()


@pytest.mark.parametrize("ranks", [1, 2], ids=["started again", "keepstep run"])
def test_a_keeper_that_stays_stopped_holds_up_no_recovery(tmp_path: Path, ranks: int) -> None:
    runs = [ScriptRun(tmp_path / "alone", ONE_OR_TWO_RANKS, ENDS_WITH, ranks, -1)]
    try:
        undisturbed = runs[0].end()
        run = ScriptRun(tmp_path / "stopped", ONE_OR_TWO_RANKS, ENDS_WITH, ranks, HELD_STEP)
        runs.append(run)
        run.hold()
        [started] = run.events("keeper-started")
        os.kill(started.data["pid"], signal.SIGSTOP)
        run.kill(ranks - 1)
        assert run.end() == undisturbed
        assert {event.data["pid"] for event in run.events("keeper-stuck")} == {started.data["pid"]}
        assert f"(process {started.data['pid']})" in run.told()
        assert [event.data["source"] for event in run.events("restored")] == ["memory"] * ranks
    finally:
        for each in runs:
            each.stop()
            for event in each.events("keeper-started"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event.data["pid"], signal.SIGKILL)


def test_keeper_and_rank_together(training: Make, undisturbed: Digest) -> None:
    run = training()
    run.start()
    run.train_until(8)
    reached = run.page()
    assert reached is not None
    os.kill(run.keeper, signal.SIGKILL)
    run.kill()
    run.start(pace_s=0.0)
    assert run.end() == undisturbed()
    assert (
        run.lost_steps(reached.completed_step) <= FEW_STEPS
        and len(run.events("keeper-started")) == 2
    )


def test_kills_while_checkpoints_are_written(
    training: Make, undisturbed: Digest, tmp_path: Path
) -> None:
    run = training(store=str(tmp_path / "s"), persist_every_steps=3)
    for life in range(3):
        run.start()
        begun = len(run.events("persist-started"))
        run.until(lambda begun=begun: len(run.events("persist-started")) > begun)
        if life == 1:
            os.kill(run.keeper, signal.SIGKILL)
        run.kill()
    run.start(pace_s=0.0)
    assert run.end() == undisturbed()
    assert Store(tmp_path / "s").list_checkpoints().checkpoints[0].step == STEPS - 1


def test_a_full_disk_costs_checkpoints_and_never_the_training(
    training: Make, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={MIB // 2}", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("expected to be allowed to mount a tmpfs")
    try:
        run = training(store=str(disk / "s"), persist_every_steps=5)
        run.start(pace_s=0.0)
        out, err = run.process.communicate(timeout=PATIENCE_S)
        assert run.process.returncode == 1 and "is not in the store" in err
        assert len(out.strip()) == 64, "the training came to its end"
        assert run.events("persist-failed")
        subprocess.run(["mount", "-o", "remount,size=64M", str(disk)], check=True)
        run.start(pace_s=0.0)
        assert run.end() == out.strip()
        assert [m.step for m in Store(disk / "s").list_checkpoints().checkpoints] == [STEPS - 1]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_the_memory_limit_of_a_cgroup(training: Make, undisturbed: Digest) -> None:
    """The kernel's OOM killer takes the rank; its slots, charged to that cgroup, stay."""
    group = _memory_cgroup(f"keepstep-{os.getpid()}")
    if group is None:
        pytest.skip("expected a memory cgroup that can be written")
    directory, limit, used = group

    def join() -> None:
        (directory / "cgroup.procs").write_text(str(os.getpid()))

    try:
        run = training()
        run.start(before=join)
        run.train_until(8)
        used_bytes = int((directory / used).read_text())
        limit.write_text(str(used_bytes + 200 * MIB))
        run.greedy.touch()
        deadline_s = time.monotonic() + PATIENCE_S
        while run.process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert run.process.returncode == -signal.SIGKILL
        run.greedy.unlink()
        run.start(pace_s=0.0)
        assert run.end() == undisturbed()
        assert run.events("restored")
    finally:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _memory_cgroup(name: str) -> tuple[Path, Path, str] | None:
    """A fresh one, its limit's file, and the name of the file that tells what is used, where that
    is allowed."""
    kinds = [
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ]
    for root, limit, used in kinds:
        directory = Path(root) / name
        try:
            directory.mkdir()
        except OSError:
            continue
        if (directory / limit).exists():
            return directory, directory / limit, used
        directory.rmdir()
    return None
