"""`keepstep run` with real processes: what dies is noticed and restarted, and nothing is left
behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import Event
from keepstep.model.units import MS_NS
from tests.processes import waiting
from tests.processes.quick_steps import FEW_STEPS

COMMAND = "from keepstep.cli.main import app; app()"
PATIENCE_S = 60.0
TORCHS_OWN = "torchinductor_"  # where its compiler keeps what it has made; begun on import


@dataclass
class Running:
    """A `keepstep run` under way."""

    process: subprocess.Popen[str]
    journal_path: Path
    arena_dir: Path

    def events(self, kind: str) -> list[Event]:
        return [e for e in read_journal(self.journal_path) if e.kind == kind]

    def wait_for(self, kind: str) -> Event:
        return until(lambda: next(iter(self.events(kind)), None), f"the event {kind}")

    def ended_refused(self) -> tuple[int, str]:
        """(exit code, output) of one that was not to begin, beside one that goes on."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def ended(self) -> tuple[int, str]:
        """(exit code, output), once it has left; by then the keeper has removed everything, or does
        so after the grace time of a job that failed."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        if self.process.returncode == 0:
            assert list(self.arena_dir.iterdir()) == []
        until(lambda: not list(self.arena_dir.iterdir()), "the end of the grace time")
        return self.process.returncode, output


def until(look: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    return waiting.until(look, what, within_s)


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ks-test-") as arena:

        def begin(script: str, *options: str, args: tuple[str, ...] = ()) -> Running:
            path = tmp_path / "train.py"
            path.write_text(script)
            own = (
                "--job",
                "t",
                "--arena-dir",
                arena,
                "--state-dir",
                str(tmp_path / "s"),
                "--grace-s",
                "1",
            )
            words = [sys.executable, "-c", COMMAND, "run", *own, *options, str(path), *args]
            environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
            (tmp_path / "tmp").mkdir(exist_ok=True)
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env=environ,
            )
            running.append(Running(process, tmp_path / "s" / "t" / "journal.jsonl", Path(arena)))
            return running[-1]

        yield begin
        for run in running:
            run.process.kill()
            run.process.communicate()
            until(
                lambda run=run: not list(run.arena_dir.iterdir()),
                "the keeper's end after its grace time",
            )


ALL_REDUCE = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
life, rank = int(os.environ["KEEPSTEP_ATTEMPT"]), dist.get_rank()
total = torch.full((), float(rank + 1))
dist.all_reduce(total)
assert total.item() == 3
if life < int(sys.argv[1]) and rank == life % 2:
    print("killed at", time.monotonic_ns(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
dist.destroy_process_group()
"""


def free_port() -> str:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


@pytest.mark.parametrize("port", ["free", "fixed"])
def test_killed_ranks_are_noticed_at_once_and_all_restarted(
    start: Start, port: str, tmp_path: Path
) -> None:
    options = ["--master-port", free_port()] if port == "fixed" else []
    run = start(ALL_REDUCE, "--nproc-per-node", "2", *options, args=("5",))
    code, output = run.ended()
    assert code == 0, output
    left = [p.name for p in (tmp_path / "tmp").iterdir() if not p.name.startswith(TORCHS_OWN)]
    assert not left, "error files nobody asked for"
    assert [e.data["attempt"] for e in run.events("ranks-restarted")] == [1, 2, 3, 4, 5]
    killed_ns = [
        int(line.split()[-1]) for line in output.splitlines() if line.startswith("killed at")
    ]
    noticed_ns = [e.mono_ns for e in run.events("rank-exited") if e.data["code"] == -9]
    latencies_ms = [(n - k) / MS_NS for k, n in zip(killed_ns, noticed_ns, strict=True)]
    # The kernel needs some milliseconds to take such a process apart; torchrun's monitor interval
    # is 100 ms at best.
    assert sorted(latencies_ms)[2] < 100, latencies_ms
    assert "5 restarts" in run.events("job-ended")[0].why


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
import os, time
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("a mistake in the program")
    time.sleep(100)
main()
"""


@pytest.mark.everyday
def test_a_broken_program_stops_with_torchs_summary(start: Start) -> None:
    run = start(RECORDED, "--nproc-per-node", "2")
    code, output = run.ended()
    assert code == 70, "the code is at fault, not a machine"
    assert len(run.events("ranks-restarted")) == 1, "twice in the same way before protect"
    assert "gave up: rank 1 exited with code 1 (ValueError: a mistake in the program)" in output
    root = output[output.index("Root Cause (first observed failure)") :]
    assert (
        "rank      : 1 (local_rank: 1)" in root
        and 'raise ValueError("a mistake in the program")' in root
    )
    assert run.events("job-ended")[0].data == {"ok": False, "exit_code": 70}


def test_a_torn_error_file_costs_only_its_message(start: Start) -> None:
    script = (
        "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": "
        "')\nraise SystemExit(7)"
    )
    code, output = start(script, "--max-restarts", "0").ended()
    assert code == 1 and "rank 0 exited with code 7 " in output and "exitcode  : 7" in output


@pytest.mark.everyday
def test_a_second_one_of_the_same_name_is_refused_while_the_first_lives(
    start: Start, tmp_path: Path
) -> None:
    script = (
        "import os, time\nopen(f'began-{os.getpid()}', 'w').close()\n"
        "while not os.path.exists('go-on'):\n    time.sleep(0.01)"
    )
    first = start(script, "--nproc-per-node", "2")
    until(lambda: len(list(tmp_path.glob("began-*"))) == 2, "both ranks")
    code, output = start(script, "--nproc-per-node", "2").ended_refused()
    assert code == 2 and "job t" in output and "--job" in output
    assert len(list(tmp_path.glob("began-*"))) == 2, "it started no rank"
    (tmp_path / "go-on").touch()
    assert first.ended()[0] == 0


@pytest.mark.everyday
def test_what_a_rank_sees(start: Start, tmp_path: Path) -> None:
    script = (
        "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], "
        "open(os.environ['RANK'], 'w'))"
    )
    own = ("--slots", "3", "--no-lazy")
    code, output = start(
        script, "--nproc-per-node", "2", *own, args=("--nnodes", "7", "--", "-x")
    ).ended()
    assert code == 0, output
    for rank in ("0", "1"):
        argv, environ = json.loads((tmp_path / rank).read_text())
        assert argv == ["--nnodes", "7", "--", "-x"]
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "ROLE_RANK": rank,
        }
        expected |= {
            "TORCHELASTIC_RUN_ID": "t",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        expected |= {
            "KEEPSTEP_JOB": "t",
            "KEEPSTEP_SLOTS": "3",
            "KEEPSTEP_LAZY": "0",
            "KEEPSTEP_ATTEMPT": "0",
        }
        assert {name: environ[name] for name in expected} == expected
        assert environ["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


def test_logs_go_where_torchrun_puts_them(start: Start, tmp_path: Path) -> None:
    code, output = start(
        "print('hello')", "--log-dir", str(tmp_path / "logs"), "-t", "3", "--nproc-per-node", "2"
    ).ended()
    assert code == 0
    assert "[rank0]:hello" in output and "[rank1]:hello" in output
    assert sorted(
        p.read_text() for p in (tmp_path / "logs").glob("t_*/attempt_0/*/stdout.log")
    ) == ["hello\n", "hello\n"]


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
"""
INTERRUPTED = """
import time
try:
    print("ready", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print("tidied up", flush=True)
"""


@pytest.mark.everyday
def test_an_interrupt_reaches_the_ranks(start: Start) -> None:
    run = start(INTERRUPTED)
    assert run.process.stdout and until(
        lambda: "ready" in run.process.stdout.readline(), "the rank"
    )
    run.process.send_signal(signal.SIGINT)
    code, output = run.ended()
    assert code == 130 and "tidied up" in output
    assert run.events("job-over")[0].why.startswith("interrupted by SIGINT (2)")


def test_a_second_interrupt_is_not_argued_with(start: Start) -> None:
    run = start(STUBBORN)
    assert run.process.stdout and until(
        lambda: "ready" in run.process.stdout.readline(), "the rank"
    )
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(PATIENCE_S) == 130
    assert time.monotonic() - began < 4, "less than the time the ranks are given"


TRAINING = """
import os, signal, sys, time, torch, keepstep
weights = torch.zeros(1000)
job = keepstep.protect(weights=weights)
for step in job.steps(int(sys.argv[1])):
    weights += 1
    time.sleep(0.005)
    if step == 20:
        print("ready", flush=True)
    if step == 30 and os.environ["KEEPSTEP_ATTEMPT"] == "0" and "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
assert weights.eq(int(sys.argv[1])).all()
"""
FOR_EVER = ("1000000",)


@pytest.mark.everyday
def test_a_killed_rank_resumes_from_memory(start: Start) -> None:
    run = start(TRAINING, args=("40", "killed"))
    code, output = run.ended()
    assert code == 0, output
    last = run.events("resumed")[-1]
    assert (last.data["source"], last.data["lost_steps"] <= FEW_STEPS) == ("memory", True), last.why


FAILING = """
import os, sys, time, torch, keepstep
weights = torch.zeros(1000)
job = keepstep.protect(weights=weights)
for step in job.steps(40):
    weights += 1
    time.sleep(0.005)
    if step == 20 and "broken" in sys.argv:
        raise ValueError("no")
assert weights.eq(40).all()
"""


@pytest.mark.everyday
def test_a_failing_end_keeps_the_memory_and_the_next_run_goes_on(start: Start) -> None:
    failed = start(FAILING, "--grace-s", "60", "--max-restarts", "0", args=("broken",))
    output, _ = failed.process.communicate(timeout=PATIENCE_S)
    assert failed.process.returncode == 1, output
    assert "the memory is kept for 60 s" in output and "clean --job t --force" in output
    assert failed.events("keeper-ended") == []
    mended = start(FAILING, "--grace-s", "60")
    code, output = mended.ended()
    assert code == 0, output
    last = mended.events("resumed")[-1].data
    assert last["source"] == "memory" and last["step"] > 10


@pytest.mark.everyday
def test_memory_of_another_world_size_ends_the_job_with_one_sentence(start: Start) -> None:
    """And that memory is untouched: with the old number of ranks the job goes on."""
    kept = ("--grace-s", "60", "--max-restarts", "0")
    first = start(FAILING, "--nproc-per-node", "2", *kept, args=("broken",))
    first.process.communicate(timeout=PATIENCE_S)
    larger = start(FAILING, "--nproc-per-node", "3", "--grace-s", "60")
    code, output = larger.ended_refused()
    [why] = [event.why for event in larger.events("restore-refused")]
    assert code == 2 and output.count(why) == 1
    assert larger.events("ranks-restarted") == []
    again = start(FAILING, "--nproc-per-node", "2", *kept)
    assert again.ended()[0] == 0
    assert again.events("resumed")[-1].data["source"] == "memory"


def test_a_fresh_start_is_one_and_what_is_killed_in_it_goes_on(start: Start) -> None:
    failed = start(FAILING, "--grace-s", "60", "--max-restarts", "0", args=("broken",))
    failed.process.communicate(timeout=PATIENCE_S)
    assert failed.process.returncode == 1
    afresh = start(TRAINING, "--grace-s", "60", "--fresh", args=("40", "killed"))
    code, output = afresh.ended()
    assert code == 0, output
    first, then = [e.data for e in afresh.events("resumed")][-2:]
    assert (first["source"], first["step"]) == ("fresh", -1)
    assert then["source"] == "memory" and then["step"] > 20


def test_ranks_outlive_their_agent(start: Start) -> None:
    run = start(TRAINING, args=("400",))
    run.wait_for("slots-made")
    run.process.kill()
    assert run.wait_for("keeper-ended").data["ok"]
    assert [e.data["ok"] for e in run.events("rank-bye")] == [True]


def test_the_same_command_again_ends_ranks_that_train_on_and_goes_on_from_memory(
    start: Start,
) -> None:
    """Else they would train on beside the new ones, and capture nothing any more."""
    run = start(TRAINING, "--standby", "0", args=FOR_EVER)

    def done() -> int:
        status = read_status(MEMORY, job_dir_of(run.arena_dir, "t"), 0)
        return -1 if status is None else status.completed_step

    until(lambda: done() > 20, "step 20")
    run.process.kill()
    run.process.wait()
    before = done()
    until(lambda: done() > before + 20, "steps without an agent")
    again = start(TRAINING, "--standby", "0", args=FOR_EVER)
    last = until(lambda: next(iter(again.events("resumed")[1:]), None), "the next life")
    assert last.data["source"] == "memory" and last.data["lost_steps"] <= FEW_STEPS, last.why
    assert last.data["step"] > before
    assert len(again.events("left-ranks-ended")[0].data["ended"]) == 1
    again.process.send_signal(signal.SIGTERM)
    assert again.ended()[0] == 143


@pytest.mark.everyday
def test_a_job_whose_directory_somebody_removes_says_so_and_trains_on(start: Start) -> None:
    run = start(TRAINING, "--nproc-per-node", "2", args=("3000",))
    until(
        lambda: (
            (status := read_status(MEMORY, job_dir_of(run.arena_dir, "t"), 1)) is not None
            and status.completed_step > 600
        ),
        "step 600, when the agent has seen it",
    )
    shutil.rmtree(job_dir_of(run.arena_dir, "t"))
    told = run.wait_for("memory-removed")
    assert "somebody has removed" in told.why
    code, output = run.ended()
    assert code == 0 and output.count("somebody has removed") == 1, output
    assert run.events("ranks-restarted") == []


@pytest.mark.everyday
def test_a_killed_agent_is_followed_by_another_one(start: Start) -> None:
    run = start(TRAINING, "--standby", "0", args=FOR_EVER)
    until(
        lambda: (
            (status := read_status(MEMORY, job_dir_of(run.arena_dir, "t"), 0)) is not None
            and status.completed_step > 20
        ),
        "step 20",
    )
    agent = run.events("job-started")[-1].data["pid"]
    assert agent != run.process.pid
    os.kill(agent, signal.SIGKILL)
    last = until(lambda: next(iter(run.events("resumed")[1:]), None), "the next life")
    assert last.data["source"] == "memory", last.why
    assert last.data["lost_steps"] <= FEW_STEPS and last.data["step"] >= 21 - FEW_STEPS, last.why
    assert (
        len(run.events("agent-restarted")) == 1
        and len(run.events("agent-restarted")[0].data["ended"]) == 1
    )
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 143


def test_an_agent_that_stays_stopped_is_followed_by_another_one(start: Start) -> None:
    run = start(TRAINING, "--standby", "0", args=FOR_EVER)
    run.wait_for("slots-made")
    os.kill(run.events("job-started")[-1].data["pid"], signal.SIGSTOP)
    until(lambda: run.events("agent-restarted"), "another agent", 4 * PATIENCE_S)
    last = until(lambda: next(iter(run.events("resumed")[1:]), None), "the next life")
    assert last.data["source"] == "memory", last.why
    run.process.send_signal(signal.SIGTERM)
    code, output = run.ended()
    stopped = run.events("job-started")[0].data["pid"]
    assert code == 143 and f"agent {stopped} has stood still" in output, output


STOPS_THE_KEEPER = """
import json, os, signal
path = os.path.join(os.environ["KEEPSTEP_STATE_DIR"], "t", "journal.jsonl")
[keeper] = [e["data"]["pid"] for e in map(json.loads, open(path)) if e["kind"] == "keeper-started"]
os.kill(keeper, signal.SIGSTOP)
"""


def test_nobody_follows_an_agent_that_is_killed_when_the_job_is_over(start: Start) -> None:
    run = start(STOPS_THE_KEEPER)
    assert run.wait_for("job-ended").data["ok"]
    # while it waits for its keeper
    os.kill(run.events("job-started")[-1].data["pid"], signal.SIGKILL)
    try:
        assert run.process.wait(PATIENCE_S) == 0
    finally:
        os.kill(run.events("keeper-started")[-1].data["pid"], signal.SIGCONT)
    run.wait_for("keeper-ended")
    assert run.events("agent-restarted") == [] and len(run.events("job-started")) == 1


@pytest.mark.everyday
def test_a_preemption_leaves_the_newest_step_in_the_store(start: Start, tmp_path: Path) -> None:
    run = start(
        TRAINING, "--store", str(tmp_path / "store"), "--persist-every-steps", "0", args=FOR_EVER
    )
    assert run.process.stdout and until(
        lambda: "ready" in run.process.stdout.readline(), "the rank"
    )
    run.process.send_signal(signal.SIGTERM)
    code, output = run.ended()
    assert code == 143, output
    steps = [e.data["step"] for e in run.events("persisted")]
    # It was in step 20: 19 is complete, and may still have been on its way. On a busy machine some
    # before it were skipped.
    assert len(steps) == 1 and steps[0] >= 15, output
    assert run.events("memory-kept")[0].why.startswith("preempted by SIGTERM (15)")
    assert output.count("preempted by SIGTERM (15)") == 1
    closing = output.splitlines()[-1]
    assert f"to go on from step {steps[0]}; step {steps[0]} is in the store;" in closing


def test_without_a_store_sigterm_ends_the_job_at_once(start: Start) -> None:
    run = start(TRAINING, args=FOR_EVER)
    assert run.process.stdout and until(
        lambda: "ready" in run.process.stdout.readline(), "the rank"
    )
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 143


KEEPER_KILLED = """
import json, os, signal, sys, time
path = os.path.join(os.environ["KEEPSTEP_STATE_DIR"], "t", "journal.jsonl")
def events(kind):
    return [e for e in map(json.loads, open(path)) if e["kind"] == kind]
for life in range(2):
    os.kill(events("keeper-started")[-1]["data"]["pid"], signal.SIGKILL)
    while len(events("keeper-restarted")) <= life:
        time.sleep(0.01)
"""


@pytest.mark.everyday
def test_a_killed_keeper_is_replaced_and_the_job_goes_on(start: Start) -> None:
    run = start(KEEPER_KILLED)
    code, output = run.ended()
    assert code == 0, output
    assert len(run.events("keeper-started")) == 3 and len(run.events("keeper-restarted")) == 2
    assert run.events("ranks-restarted") == []


LOCKED = """
import fcntl, os, signal, sys, time
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
if os.environ["KEEPSTEP_ATTEMPT"] == "0":
    if os.fork() == 0:  # a data loader's worker
        time.sleep(100)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_dead_ranks_children_hold_no_lock_of_its(start: Start) -> None:
    run = start(LOCKED)
    code, output = run.ended()
    assert code == 0, output
    assert len(run.events("ranks-restarted")) == 1


LEAVES = """
import threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from keepstep.cli.main import leave

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait() -> None:
    while True:
        try:
            store.wait(["never"], timedelta(milliseconds=20))
        except Exception:
            pass


for _ in range(3):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
print("said")
leave(70)
"""


def test_an_agent_leaves_with_its_code_while_its_threads_wait_in_the_store() -> None:
    """Python's own way out is an abort then, and the steward would take that for a kill."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (70, "said\n"), ended.stderr
