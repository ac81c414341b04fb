"""Numbers that go wrong in real ranks: found, named, and undone: the end state is that of a run in
which nothing went wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.os.journal import read_journal
from keepstep.model.events import Event
from tests.processes.test_drill import drill, prove

pytestmark = pytest.mark.timeout(180)

STEPS = 30
JOB: dict[str, Any] = {"launcher": "run", "steps": STEPS}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the undisturbed runs are paid for once."""
    return tmp_path_factory.mktemp("numbers")


def told(work: Path, report: dict[str, Any], kind: str) -> list[Event]:
    """What the journals of that drill say."""
    journals = (work / report["job"]).rglob("journal.jsonl")
    return [event for path in journals for event in read_journal(path) if event.kind == kind]


@pytest.mark.parametrize(
    ("site", "bit", "tensor"),
    [("weight", 0, "model."), ("optimizer", 1, "optimizer."), ("reduced", 30, "")],
)
def test_of_three_ranks_the_wrong_one_is_named_and_all_go_back(
    work: Path, site: str, bit: int, tensor: str
) -> None:
    fault = f"bitflip:site={site},rank=1,step=12,bit={bit}"
    report = prove_number(work, fault, nproc=3, launcher="run")
    [event] = told(work, report, "replicas-differ")
    assert event.data["ranks"] == [1] and event.data["certain"] and event.data["step"] == 12
    assert "rank 1 differs from the 2 other replicas in " in event.why and tensor in event.why
    assert report["sources"] == ["memory"] and report["lost_steps"][0] <= 3


def test_of_two_ranks_nobody_can_say_which_and_both_go_back(work: Path) -> None:
    report = prove_number(
        work, "bitflip:site=weight,rank=0,step=12,bit=3", nproc=2, launcher="torchrun"
    )
    [event] = told(work, report, "replicas-differ")
    assert event.data["ranks"] == [0, 1] and not event.data["certain"]


def test_on_several_nodes_what_differs_is_never_committed(work: Path) -> None:
    report = prove_number(
        work,
        "bitflip:site=weight,rank=2,step=12,bit=20",
        nproc=1,
        launcher="run",
        more=("--nodes", "3", "--policy", "copies:2", "--loopback"),
    )
    [condemned] = told(work, report, "condemned")
    assert condemned.data == {"step": 12, "ranks": [2]}


def test_what_is_only_told_stays_in_the_state(work: Path) -> None:
    fault = "bitflip:site=weight,rank=1,step=12,bit=20"
    _, report = drill(
        work, fault, nproc=3, launcher="run", steps=STEPS, more=("--on-difference", "tell")
    )
    [event] = told(work, report, "replicas-differ")
    assert event.data["condemned"] is False and event.data["ranks"] == [1]
    assert report["recovered"] and not report["bit_equal"] and not report["lost_steps"]


def test_where_a_person_is_to_decide_the_job_ends_and_keeps_its_memory(work: Path) -> None:
    fault = "bitflip:site=weight,rank=1,step=12,bit=20"
    _, report = drill(
        work, fault, nproc=3, launcher="run", steps=STEPS, more=("--on-difference", "stop")
    )
    assert not report["recovered"] and report["restarts"] == 0
    assert told(work, report, "replicas-differ") and told(work, report, "memory-kept")


def test_nobody_compares_where_it_is_turned_off(work: Path) -> None:
    fault = "bitflip:site=weight,rank=1,step=12,bit=20"
    _, report = drill(
        work, fault, nproc=2, launcher="run", steps=STEPS, more=("--digest-every-steps", "0")
    )
    assert not told(work, report, "replicas-differ") and not report["bit_equal"]


def prove_number(work: Path, *faults: str, **how: Any) -> dict[str, Any]:
    return prove(work, *faults, steps=STEPS, **how)


@pytest.mark.parametrize(("site", "bit"), [("grad", 22), ("activation", 31)])
def test_a_wrong_local_gradient_is_found_by_a_buddy_before_anything_is_updated(
    work: Path, site: str, bit: int
) -> None:
    """Replicas do not see it: all of them would get the same wrong sum."""
    fault = f"bitflip:site={site},rank=1,step=13,bit={bit}"
    report = prove_number(work, fault, nproc=3, launcher="run", more=("--buddy-every-steps", "1"))
    found = told(work, report, "gradient-differs")
    assert [event.data["rank"] for event in found] == [1]
    assert not told(work, report, "replicas-differ") and report["sources"] == ["memory"]


def test_of_a_batch_that_is_wrong_nobody_can_tell(work: Path) -> None:
    """Both compute from the same one."""
    fault = "bitflip:site=batch,rank=1,step=13,bit=22"
    _, report = drill(work, fault, nproc=3, more=("--buddy-every-steps", "1"), **JOB)
    assert report["recovered"] and not report["bit_equal"]
    assert not told(work, report, "gradient-differs") and not told(work, report, "not-repeatable")


@pytest.mark.soak
@pytest.mark.parametrize(("site", "bit"), [("weight", 3), ("optimizer", 28)])
def test_memory_that_one_rank_alone_has_is_put_right_by_making_its_update_again(
    work: Path, site: str, bit: int
) -> None:
    """In a step that is looked at."""
    fault = f"bitflip:site={site},rank=0,step=16,bit={bit}"
    again = ("--replay-update-bytes", str(1 << 30))
    report = prove_number(work, fault, nproc=1, launcher="run", more=again)
    [judged] = assert_undone(work, report, 16)
    assert (judged.data["culprit"], judged.data["lasting"]) == ("hardware", "transient")
    _, report = drill(work, fault, nproc=1, launcher="run", steps=STEPS)
    assert not report["bit_equal"], "nobody else sees it"


def assert_undone(work: Path, report: dict[str, Any], first: int) -> list[Event]:
    """Each step that was wrong, `first` being the first, was run again in the ranks' own processes;
    the verdicts."""
    assert report["restarts"] == 0 and set(report["sources"]) == {"memory"}
    restored = [event.data["step"] for event in told(work, report, "restored")]
    judged = sorted(told(work, report, "numbers-judged"), key=lambda e: int(e.data["step"]))
    assert min(restored) < first == judged[0].data["step"]
    return judged


@pytest.mark.soak
def test_a_number_that_is_none_is_undone(work: Path) -> None:
    """In steps that are looked at: every 8th is, here as by default."""
    faults = ("nan:site=weight,rank=1,step=8", "nan:site=grad,rank=0,step=24")
    report = prove_number(work, *faults, nproc=2, launcher="run")
    judged = assert_undone(work, report, 8)
    found = [(event.data["culprit"], event.data["rank"]) for event in judged]
    assert found == [("model", 1), ("hardware", 0)]


@pytest.mark.soak
def test_a_gradient_that_no_optimizer_can_square_is_undone(work: Path) -> None:
    fault = "spike:site=grad,rank=1,step=16,factor=1e30"
    report = prove_number(work, fault, nproc=2, launcher="run")
    [judged] = assert_undone(work, report, 16)
    assert (judged.data["culprit"], judged.data["lasting"]) == ("hardware", "transient")
    [error] = told(work, report, "soft-error")
    assert error.data["device"] == f"device 1 of {os.uname().nodename}"
