"""Injector: once over all lives, at its moment, and told before it is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import FileJournal
from keepstep.model.snapshot import Phase
from keepstep.testing import injector as injector_module
from keepstep.testing.faults import Fault, parse, to_plan
from keepstep.testing.injector import Begun, FaultPlan, Injector, attempted, fill, is_attached, note


def plan(tmp_path: Path, *faults: Fault) -> FaultPlan:
    """A plan whose faults all fail to be done: nobody is killed, and what was tried is in the
    file."""
    return FaultPlan(
        faults,
        0,
        tmp_path / "attempts.jsonl",
        tmp_path / "no-job",
        (tmp_path / "journal.jsonl",),
        None,
    )


def told(tmp_path: Path) -> list[tuple[int, str]]:
    path = tmp_path / "attempts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(said["fault"], said["what"]) for said in map(json.loads, lines)]


def test_a_fault_waits_for_its_rank_phase_and_step(tmp_path: Path) -> None:
    asked = plan(tmp_path, Fault("keeper-kill", 1, 20, "update"))
    other, mine = Injector(asked, 0), Injector(asked, 1)
    for injector, phase, step in (
        (other, Phase.UPDATE, 20),
        (mine, Phase.UPDATE, 19),
        (mine, Phase.FORWARD, 20),
        (mine, Phase.SEAL, 21),
    ):
        injector(phase, step)
    assert told(tmp_path) == []
    mine(Phase.UPDATE, 22)  # step 20 had no such phase for it: the first later one
    assert told(tmp_path) == [(0, "about to"), (0, "cannot")]


def test_no_life_does_a_fault_again(tmp_path: Path) -> None:
    asked = plan(tmp_path, Fault("flip", 0, 5, "forward", "arena"))
    first = Injector(asked, 0)
    for _ in range(2):
        first(Phase.FORWARD, 5)
    Injector(asked, 0)(Phase.FORWARD, 5)
    assert told(tmp_path) == [(0, "about to"), (0, "cannot")]
    assert attempted(tmp_path / "attempts.jsonl") == {0}


def test_a_restore_belongs_to_the_fault_before_it(tmp_path: Path) -> None:
    asked = plan(tmp_path, Fault("kill", 1, 20), Fault("keeper-kill", 0, 20, "restore"))
    Injector(asked, 0)(Phase.RESTORE, -1)
    assert told(tmp_path) == []
    note(asked.attempts, 0, "did")
    Injector(asked, 0)(Phase.RESTORE, 18)
    assert told(tmp_path)[1:] == [(1, "about to"), (1, "cannot")]


def test_a_fault_that_was_cut_short_is_done_by_the_next_life(tmp_path: Path) -> None:
    asked = plan(tmp_path, Fault("keeper-kill", 0, 5))
    note(asked.attempts, 0, "about to")  # and another fault's kill came first
    Injector(asked, 0)(Phase.FORWARD, 6)
    assert told(tmp_path) == [(0, "about to"), (0, "about to"), (0, "cannot")]


def test_torn_waits_for_the_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ends.append((pid, number)))
    injector = Injector(plan(tmp_path, Fault("torn", 0, 5, "backward")), 0)
    for phase, step in (
        (Phase.SEAL, 4),
        (Phase.FORWARD, 5),
        (Phase.BACKWARD, 5),
        (Phase.UPDATE, 5),
        (Phase.CAPTURE, 5),
    ):
        injector(phase, step)
    assert ends == []
    injector(Phase.SEAL, 5)
    assert ends == [(os.getpid(), 9)] and told(tmp_path) == [(0, "about to"), (0, "did")]


def test_a_fault_from_outside_is_not_done_inside(tmp_path: Path) -> None:
    injector = Injector(plan(tmp_path, Fault("kill", 0, 5, "forward", after_ms=3.0)), 0)
    injector(Phase.FORWARD, 5)
    assert told(tmp_path) == []


def test_the_first_rank_of_a_node_asks_for_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector_module, "LOSS_PATIENCE_S", 0.0)
    asked = replace(plan(tmp_path, parse("kill-node:node=1+2,step=5,phase=seal")), node=1)
    for node, local_rank in ((0, 0), (1, 1), (2, 0)):
        Injector(replace(asked, node=node), 0, local_rank)(Phase.SEAL, 5)
    assert told(tmp_path) == []
    Injector(asked, 3, 0)(Phase.SEAL, 6)
    assert told(tmp_path) == [(0, "asks")]
    assert attempted(asked.attempts) == set()  # asked is not done
    note(asked.attempts, 0, "did")
    Injector(asked, 3, 0)(Phase.SEAL, 7)
    assert told(tmp_path) == [(0, "asks"), (0, "did")]


def test_what_is_seen_only_from_outside_is_not_asked_for(tmp_path: Path) -> None:
    asked = replace(plan(tmp_path, parse("kill-node:node=0,step=5,phase=protect")), node=0)
    for phase in Phase:
        Injector(asked, 0, 0)(phase, 9)
    assert told(tmp_path) == []


def test_a_plan_is_read_where_the_rank_lives(tmp_path: Path) -> None:
    fault = parse("kill-node:node=1+2,step=5")
    raw = {
        "faults": to_plan([fault]),
        "seed": 1,
        "job": "drill-1",
        "attempts": "/a",
        "store": None,
        "journals": ["/j1", "/j2"],
    }
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    environ = {"KEEPSTEP_ARENA_DIR": "/dev/shm/lab/node-2"}
    found = FaultPlan.read(tmp_path / "plan.json", environ)
    assert found == FaultPlan(
        (fault,),
        1,
        Path("/a"),
        job_dir_of(Path("/dev/shm/lab/node-2"), "drill-1"),
        (Path("/j1"), Path("/j2")),
        None,
    )
    assert FaultPlan.read(tmp_path / "plan.json", {**environ, "GROUP_RANK": "2"}).node == 2


def test_a_checkpoint_that_is_begun_is_seen_in_any_journal(tmp_path: Path) -> None:
    paths = [tmp_path / "node-0.jsonl", tmp_path / "node-1.jsonl"]
    journals = [FileJournal(path, "keeper") for path in paths]
    journals[0].record("persist-started", "", step=4)
    before, same, newer = (Begun(paths, step) for step in (5, 4, 3))
    journals[1].record("sealed", "", step=9)
    assert [begun.look() for begun in (before, same, newer)] == [False, True, True]
    journals[1].record("persist-started", "", step=2)  # asked for before, begun since
    assert before.look() and before.look()
    for journal in journals:
        journal.close()


def test_a_checkpoint_is_asked_for_when_the_keeper_that_lives_knows_the_rank(
    tmp_path: Path,
) -> None:
    """However fast steps are: whoever asks while the next keeper starts would not be heard."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path, "keeper")
    assert not is_attached([path], 1)
    found = []
    for kind, data in (
        ("keeper-started", {"pid": dead.pid}),
        ("rank-joined", {"rank": 1}),
        ("keeper-started", {"pid": os.getpid()}),
        ("rank-attached", {"rank": 0}),
        ("rank-attached", {"rank": 1}),
    ):
        journal.record(kind, "", **data)
        found.append(is_attached([tmp_path / "none", path], 1))
    journal.close()
    assert found == [False, False, False, False, True]


def test_a_large_filesystem_is_never_filled(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    if stats.f_bavail * stats.f_frsize < 1 << 30:
        pytest.skip("needs a temporary directory with more than 1 GiB free")
    with pytest.raises(OSError, match="expected a small filesystem"):
        fill(tmp_path)
    assert list(tmp_path.iterdir()) == []
