"""`keepstep diagnose`: what failed runs say, and what hostile files do not do to it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from keepstep.cli.log_reading import read_verdict
from keepstep.cli.main import app
from keepstep.cli.progress_bar import bytes_bar
from keepstep.core.postmortem.sightings import SURVIVED_STEPS, Sightings
from keepstep.core.postmortem.table import parse_table
from keepstep.core.postmortem.verdict import LogVerdict
from keepstep.edge.os.log_files import MAX_HITS
from keepstep.edge.os.own_tables import pattern_text
from tests.core.postmortem.failed_runs import Run, held_out, tuned

CLASSES_RIGHT = 0.95
RANKS_RIGHT = 0.90


def laid_out(files: dict[str, bytes], at: Path) -> Path:
    for name, data in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(data)
    return at


def verdict_of(files: dict[str, bytes], at: Path) -> LogVerdict:
    verdict, *_ = read_verdict(laid_out(files, at))
    assert verdict is not None
    return verdict


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, words)])


@pytest.mark.parametrize(
    ("runs", "kinds"), [(tuned(), 30), (held_out(), 30)], ids=["tuned", "held out"]
)
def test_causes_and_culprits(runs: list[Run], kinds: int, tmp_path: Path) -> None:
    assert len(runs) == 4 * kinds
    found = [(r, verdict_of(r.files, tmp_path / str(i))) for i, r in enumerate(runs)]
    wrong = [f"{r.name}: {v.cause.name}" for r, v in found if v.cause.name != r.kind]
    blamed = [f"{r.name}: {v.rank}, not {r.rank}" for r, v in found if v.rank != r.rank]
    assert len(wrong) <= (1 - CLASSES_RIGHT) * len(runs), wrong
    assert len(blamed) <= (1 - RANKS_RIGHT) * len(runs), blamed


OOM = b"[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
STEPS = b"".join(b"step %d loss 1.0\n" % i for i in range(20))
CRASH = b"""[rank0]:   File "/work/train.py", line 7, in step\n[rank0]: KeyError: 'x'\n"""
PEER = b"RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:4711\n"


def test_a_cause_is_shown_and_exits_0(tmp_path: Path) -> None:
    laid_out({"rank0.log": STEPS + PEER, "rank1.log": STEPS + OOM}, tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "gpu-memory" in result.stdout and "rank 1" in result.stdout
    assert "rank1.log:21" in result.stdout and "lower memory" in result.stdout


def test_the_document_keeps_its_shape(tmp_path: Path) -> None:
    laid_out({"rank0.log": STEPS + PEER, "rank1.log": STEPS + OOM}, tmp_path)
    document = json.loads(run(tmp_path, "--json").stdout)
    assert set(document) == {
        *("class", "means", "rank", "host", "ranks", "attempt", "why", "action", "advice"),
        *("first", "collective", "evidence", "put_aside", "files", "unread", "left_out"),
    }
    assert (document["class"], document["rank"], document["files"]) == ("gpu-memory", 1, 2)
    first = document["first"]
    assert (first["file"], first["line"], first["role"]) == ("rank1.log", 21, "root")
    assert document["put_aside"] == {"cascades": 1, "teardowns": 0, "survived": 0}


def test_what_nobody_can_know_exits_1_with_the_first_suspicious_lines(tmp_path: Path) -> None:
    laid_out({f"rank{r}.log": STEPS + PEER for r in range(3)}, tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert result.stdout.startswith("unknown") and "Connection closed by peer" in result.stdout


def test_what_cannot_be_read_exits_2(tmp_path: Path) -> None:
    assert run(tmp_path).exit_code == 2  # empty


def test_one_file_is_enough(tmp_path: Path) -> None:
    laid_out({"job.out": STEPS + OOM}, tmp_path)
    assert run(tmp_path / "job.out").exit_code == 0


def test_a_collective_that_was_missed_is_named(tmp_path: Path) -> None:
    waits = (
        "[rank%d]:[E314 09:26:53.1 P.cpp:685] [Rank %d] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=1)\n"
    )
    files = {f"rank{r}.log": STEPS + (waits % (r, r)).encode() for r in (0, 1, 3)}
    laid_out({**files, "rank2.log": STEPS}, tmp_path)
    document = json.loads(run(tmp_path, "--json").stdout)
    assert (document["class"], document["rank"]) == ("hang", 2)
    collective = document["collective"]
    assert (collective["seq"], collective["op"], collective["missing"]) == (77, "ALLREDUCE", [2])


def test_of_two_ranks_the_silent_one_is_not_to_blame_for_its_silence(tmp_path: Path) -> None:
    """With one witness alone, who lost whom cannot be told."""
    files = {f"rank{rank}.log": STEPS + PEER for rank in (0, 2)} | {"rank1.log": STEPS}
    three = verdict_of(files, tmp_path / "three")
    assert (three.cause.name, three.rank) == ("lost-rank", 1)
    del files["rank2.log"]
    assert verdict_of(files, tmp_path / "two").rank != 1


def test_an_error_that_was_survived_is_no_cause(tmp_path: Path) -> None:
    verdict = verdict_of({"rank0.log": STEPS + CRASH, "rank1.log": OOM + STEPS}, tmp_path)
    assert (verdict.cause.name, verdict.rank, verdict.survived) == ("code", 0, 1)


@pytest.mark.parametrize(("steps", "survived"), [(SURVIVED_STEPS - 1, 0), (SURVIVED_STEPS, 1)])
def test_who_makes_a_few_steps_more_has_survived_nothing(
    tmp_path: Path, steps: int, survived: int
) -> None:
    after = b"".join(b"step %d loss 1.0\n" % step for step in range(steps))
    verdict = verdict_of({"rank0.log": STEPS + PEER, "rank1.log": STEPS + OOM + after}, tmp_path)
    assert verdict.survived == survived


def test_an_error_without_a_traceback_is_a_figure(tmp_path: Path) -> None:
    files = {"rank0.log": STEPS + b"ReconstructionError: 0.31\nPredictionError: 0.02\n"}
    assert not verdict_of(files, tmp_path).is_known


def test_who_is_killed_because_another_failed_is_not_the_cause(tmp_path: Path) -> None:
    srun = b"srun: error: n2: tasks 4-7: Killed\nsrun: error: n1: task 0: Exited with exit code 1\n"
    verdict = verdict_of({"rank0.log": STEPS + CRASH, "slurm-1.out": srun}, tmp_path)
    assert (verdict.cause.name, verdict.rank) == ("code", 0)


ENDED_ITSELF = """\
Failures:
[1]:
  time      : 2026-11-26_20:07:10
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 21936)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_20:07:10
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : %d (pid: 21937)
"""


@pytest.mark.parametrize("code", [2, 3, 77])
def test_a_program_that_ends_itself_is_named_where_nothing_else_is(
    tmp_path: Path, code: int
) -> None:
    ended = (ENDED_ITSELF % code).encode()
    found = verdict_of({"launcher.log": ended}, tmp_path / "alone")
    assert (found.cause.name, found.rank) == ("own-exit", 1)
    found = verdict_of({"launcher.log": ended, "0.log": STEPS + OOM}, tmp_path / "with more")
    assert (found.cause.name, found.rank) == ("gpu-memory", 1)


SECOND_NODE = """\
  host      : hgx-1
  rank      : %d (local_rank: %d)
  exitcode  : 1 (pid: %d)
"""


@pytest.mark.parametrize(("local", "rank"), [(3, 11), (1, 9)])
def test_a_number_within_a_node_is_the_rank_that_the_launcher_tells(
    tmp_path: Path, local: int, rank: int
) -> None:
    """Also where it sums up other ranks of that node alone: they follow each other."""
    said = CRASH.replace(b"[rank0]", b"[default%d]" % local)
    log = said + b"[0]:\n" + (SECOND_NODE % (11, 3, 77)).encode()
    found = verdict_of({"node1.log": log}, tmp_path)
    assert (found.cause.name, found.rank) == ("code", rank)


def test_of_several_nodes_a_number_is_that_of_its_own_file(tmp_path: Path) -> None:
    said = CRASH.replace(b"[rank0]", b"[default3]")
    files = {
        "a.log": b"[0]:\n" + (SECOND_NODE % (3, 3, 76)).replace("hgx-1", "hgx-0").encode(),
        "b.log": said + b"[0]:\n" + (SECOND_NODE % (11, 3, 77)).encode(),
    }
    assert verdict_of(files, tmp_path / "own").rank == 11
    apart = {**files, "b.log": said, "c.log": files["b.log"].removeprefix(said)}
    assert verdict_of(apart, tmp_path / "other").rank is None


def test_an_abort_is_a_crash_where_nothing_else_is_told(tmp_path: Path) -> None:
    ended = (ENDED_ITSELF % -6).encode()
    found = verdict_of({"launcher.log": ended}, tmp_path / "alone")
    assert (found.cause.name, found.rank) == ("crash", 1)
    timeouts = b"".join(
        b"[rank%d]:[E ProcessGroupNCCL.cpp:607] [Rank %d] Watchdog caught collective operation "
        b"timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1) ran\n"
        % (rank, rank)
        for rank in range(2)
    )
    cancelled = b"slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-26T20:07:11 ***\n"
    found = verdict_of({"launcher.log": timeouts + ended + cancelled}, tmp_path / "watchdogs")
    assert (found.cause.name, found.rank) == ("hang", None)


@pytest.mark.parametrize("code", [1, 143])
def test_an_exit_code_that_anything_ends_with_names_nothing(tmp_path: Path, code: int) -> None:
    found = verdict_of({"launcher.log": (ENDED_ITSELF % code).encode()}, tmp_path)
    assert not found.is_known


@pytest.mark.parametrize(("hour", "kind"), [("09", "gpu-lost"), ("03", "code")])
def test_what_the_kernel_told_hours_before_is_of_no_use(
    hour: str, kind: str, tmp_path: Path
) -> None:
    xid = f"Mar 14 {hour}:00:00 node1 kernel: [9.123456] NVRM: Xid (PCI:0000:18:00): 79, pid=1\n"
    files = {"rank0.log": b"2026-03-14 09:10:00 ERROR train: failed\n" + CRASH}
    assert verdict_of({**files, "kern.log": xid.encode()}, tmp_path).cause.name == kind


INTRODUCED = (
    "%s:%d:71 [0] NCCL INFO comm 0x55aa rank %d nranks 2 cudaDev 0 nvmlDev 0 busId 18000 - Init\n"
)


@pytest.mark.parametrize("bus", ["18", "3b"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_fell_off_the_bus_is_that_of_the_rank_on_its_host(
    tmp_path: Path, rank: int, bus: str
) -> None:
    """Also where nobody has told which device it is: there is one rank on that host."""
    log = "".join(INTRODUCED % (f"node{n}", 4711 + n, n) for n in range(2))
    xid = f"Mar 14 09:00:00 node{rank} kernel: [9.123456] NVRM: Xid (PCI:0000:{bus}:00): 79, lost\n"
    verdict = verdict_of({"job.out": log.encode() + STEPS, "kern.log": xid.encode()}, tmp_path)
    assert (verdict.cause.name, verdict.rank) == ("gpu-lost", rank)


def test_the_last_attempt_is_what_ended_the_job(tmp_path: Path) -> None:
    files = {
        "none_x/attempt_0/1/stderr.log": OOM,
        "none_x/attempt_1/0/stderr.log": CRASH,
        "none_x/attempt_1/1/stderr.log": PEER,
    }
    verdict = verdict_of(files, tmp_path)
    assert (verdict.cause.name, verdict.rank, verdict.attempt) == ("code", 0, 1)


def test_what_a_log_says_does_nothing_to_the_screen(tmp_path: Path) -> None:
    laid_out(
        {"rank1.log": b"[rank1]: RuntimeError: CUDA out of memory \x1b]0;evil\x07[red]\n"}, tmp_path
    )
    result = run(tmp_path)
    assert "\x1b" not in result.stdout and "\x07" not in result.stdout
    assert "[red]" in result.stdout


def test_hostile_files_cost_bounded_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line an error of another kind: the lines that are looked at are counted, not timed."""
    draw = random.Random(7)
    looked_at: list[int] = []
    see = Sightings.see
    monkeypatch.setattr(
        Sightings, "see", lambda self, e: (looked_at.append(len(e.text)), see(self, e))
    )
    words = ["CUDA out of memory", "exitcode  : -9 (pid: 1)", "nranks ", "rank " * 500, "[" * 3000]
    lines = [
        f"[rank{draw.randrange(9)}]: RuntimeError{i}: {draw.choice(words)} {draw.randbytes(8)!r}"
        for i in range(60_000)
    ]
    laid_out({"rank0.log": "\n".join(lines).encode(), "junk": draw.randbytes(3_000_000)}, tmp_path)
    verdict, *_ = read_verdict(tmp_path)
    assert verdict is not None
    needles = len(parse_table(pattern_text()).needles()) + 10
    chunks = 2 + sum(f.stat().st_size for f in tmp_path.iterdir()) // (4 << 20)
    assert len(looked_at) <= 2 * MAX_HITS * needles * chunks
    assert len(looked_at) < len(lines) / 4
    assert max(looked_at) <= 4096


def test_a_person_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []
    monkeypatch.setattr(
        "keepstep.cli.log_reading.bytes_bar", lambda: bars.append(bytes_bar()) or bars[-1]
    )
    read_verdict(laid_out({"rank0.log": b"step 1\n" * 100, "rank1.log": b"x\n"}, tmp_path))
    [[task]] = [bar.tasks for bar in bars]
    assert task.completed == task.total == 702


def test_a_place_where_nothing_is_is_an_error_in_one_line(tmp_path: Path) -> None:
    found = run(tmp_path / "nowhere")
    assert found.exit_code == 2 and "found nothing at" in found.output and "KS1312" in found.output
