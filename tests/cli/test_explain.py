"""`keepstep explain`."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest


def tell(machine: Any, job: str) -> None:
    """One run with one recovery, as keeper, agent and ranks write it."""
    keeper, agent, rank = (
        machine.journal(job),
        machine.journal(job, "agent"),
        machine.journal(job, "rank 1"),
    )
    keeper.record("keeper-started", "keeper 7 has /m", pid=7, adopted_slots=0)
    agent.record("job-started", "job demo: 2 ranks")
    keeper.record(
        "resumed",
        "every rank starts afresh: epoch 1 begins",
        step=-1,
        source="fresh",
        lost_steps=0,
        epoch=1,
    )
    agent.record("rank-exited", "rank 1 was killed by SIGKILL (9)", rank=1, pid=5, code=-9)
    agent.record("ranks-restarted", "all 2 ranks run again")
    rank.record(
        "damaged",
        "slot-1: step 25 of rank 1 damaged: block 3; the next source is used",
        rank=1,
        slot=1,
    )
    keeper.record("rank-joined", "rank 1 of 2 holds step 24", rank=1)
    keeper.record(
        "restore-offered",
        "step 24 is the newest state all 2 ranks hold in memory",
        source="memory",
        step=24,
    )
    rank.record("loaded", "loaded and proved in 3.0 ms", step=24, duration_ns=3_000_000)
    keeper.record(
        "resumed", "every rank has proven step 24", step=24, source="memory", lost_steps=1, epoch=2
    )
    rank.record("next-step", "step 25 is done, 11.2 ms after the restore", step=25)


def test_what_happened_and_why(machine: Any) -> None:
    tell(machine, "demo")
    result = machine.run("explain")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(
        row.startswith("Recovery 1: resumed with step 24 from memory in")
        and row.endswith("1 completed step lost")
        for row in rows
    )
    for stage in (
        "fact noticed",
        "action restarted",
        "joined",
        "offered",
        "loaded",
        "resumed",
        "closed next step",
    ):
        assert any(row.startswith(f"{stage} at 0.") for row in rows), stage
    assert any(row.startswith("refused slot-1: step 25 of rank 1 damaged: block 3") for row in rows)
    assert any(row.endswith("agent rank 1 was killed by SIGKILL (9)") for row in rows)
    assert any(row.startswith("in all") and row.endswith("100.0 %") for row in rows)


def test_a_chain_with_every_link_and_a_kind_that_nobody_knows(machine: Any) -> None:
    tell(machine, "demo")
    agent, rank = machine.journal("demo", "agent"), machine.journal("demo", "rank 0")
    agent.record("suspicion", "rank 1 has not moved for 3.0 s", rank=1, stalled_ns=3_000_000_000)
    agent.record("diagnosis", "rank 1 is stopped (state T)", kind="stopped", culprit=1, strength=5)
    agent.record(
        "refused",
        "the ranks do not stay in their process: rank 0 cannot",
        rung="regroup",
        why="rank 0 cannot",
    )
    agent.record("plan", "rank 1 is replaced, the others stay", rung="regroup")
    rank.record("lost-notice", "rank 1 is lost", rank=1)
    agent.record("a-kind-of-tomorrow", "[bold] something new", anything=[1, {"x": None}])
    agent.record("rank-respawned", "the standby process becomes rank 1", rank=1)
    agent.record("suspicion", "rank 0 lost a connection", rank=0)
    machine.journal("demo").record(
        "resumed", "every rank has proven step 25", step=25, source="memory", lost_steps=0, epoch=3
    )
    rank.record("regrouped", "met again", rank=0, attempt=1, duration_ns=200_000_000)
    rank.record("next-step", "step 26 is done", step=26, duration_ns=1000)
    rows = [" ".join(line.split()) for line in machine.run("explain").stdout.splitlines()]
    second = next(
        i
        for i, row in enumerate(rows)
        if row.startswith("Recovery 2: resumed with step 25 from memory in ")
    )
    begins = (
        "suspicion",
        "diagnosis",
        "refused regroup",
        "plan",
        "action told",
        "respawned",
        "resumed",
        "regrouped",
        "closed next step",
    )
    places = [
        next(
            i
            for i, row in enumerate(rows)
            if i > second and row.startswith(begin) and " at 0." in row
        )
        for begin in begins
    ]
    assert places == sorted(places)
    assert any(row.endswith("agent [bold] something new") for row in rows)
    stages = machine.json("explain")["runs"][0]["recoveries"][1]["stages"]
    assert [(s["link"], s["name"]) for s in stages] == [
        *(
            ("suspicion", "suspicion"),
            ("diagnosis", "diagnosis"),
            ("refused", "regroup"),
            ("plan", "plan"),
            ("action", "told"),
        ),
        *(
            ("action", "respawned"),
            ("action", "resumed"),
            ("action", "regrouped"),
            ("closed", "next step"),
        ),
    ]


def test_what_nobody_knows_to_be_lost_is_not_called_nothing(machine: Any) -> None:
    tell(machine, "demo")
    machine.journal("demo").record(
        "resumed",
        "every rank has proven step 4",
        step=4,
        source="store",
        lost_steps=None,
        lost_at_least=3,
        epoch=1000,
    )
    text = " ".join(machine.run("explain").stdout.split())
    assert "Recovery 2: resumed with step 4 from store in" in text
    assert text.count("at least 3 completed steps lost") == 1
    assert "2 recovered, at least 4 completed steps lost" in text
    assert "Productive is at most that: once nobody knew how many completed steps were lost" in text
    [run] = machine.json("explain", "--job", "demo")["runs"]
    assert (run["lost_steps"], run["lost_at_least"]) == (None, 4)
    assert [(r["lost_steps"], r["lost_at_least"]) for r in run["recoveries"]] == [(1, 1), (None, 3)]
    assert run["account"]["unknown_losses"] == 1


def test_the_document_keeps_its_shape(machine: Any) -> None:
    tell(machine, "demo")
    document = machine.json("explain", "--job", "demo")
    assert set(document) == {"job", "journal", "runs", "unread_lines"}
    assert (document["job"], document["unread_lines"]) == ("demo", 0)
    [run] = document["runs"]
    parts = {"events", "recoveries", "end", "ended_well", "lost_steps", "lost_at_least", "account"}
    assert set(run) == parts
    assert (len(run["events"]), run["end"], run["ended_well"], run["lost_steps"]) == (
        11,
        None,
        None,
        1,
    )
    assert set(run["events"][0]) == {"wall_ns", "mono_ns", "who", "kind", "why", "data", "boot"}
    [recovery] = run["recoveries"]
    assert set(recovery) == {
        "outcome",
        "step",
        "source",
        "lost_steps",
        "took_ns",
        "stages",
        "refused",
        "setbacks",
        "evidence",
        "lost_at_least",
    }
    assert [s["name"] for s in recovery["stages"]] == [
        "noticed",
        "restarted",
        "joined",
        "offered",
        "loaded",
        "resumed",
        "next step",
    ]
    assert set(recovery["stages"][0]) == {"link", "name", "event", "took_ns", "who"}
    assert recovery["took_ns"] == sum(s["took_ns"] for s in recovery["stages"])
    spent = run["account"]
    parts = ("productive", "stalled", "redone", "detecting", "recovering", "starting", "idle")
    assert set(spent) == {
        "wall_ns",
        "goodput_ratio",
        "unknown_losses",
        *(f"{part}_ns" for part in parts),
    }
    assert sum(spent[f"{part}_ns"] for part in parts) == spent["wall_ns"] > 0


def test_the_last_run_unless_all_are_asked_for(machine: Any) -> None:
    for _ in range(3):
        tell(machine, "demo")
    assert len(machine.json("explain")["runs"]) == 1
    assert len(machine.json("explain", "--all")["runs"]) == 3
    assert "run 3 of 3" in machine.run("explain").stdout


def test_the_newest_job_unless_one_is_named(machine: Any) -> None:
    tell(machine, "old")
    tell(machine, "new")
    os.utime(machine.settings_of("old").journal_path, (1, 1))
    assert machine.json("explain")["job"] == "new"
    assert machine.json("explain", "--job", "old")["job"] == "old"


def test_torn_and_foreign_lines_are_passed_over(machine: Any) -> None:
    tell(machine, "demo")
    assert "cannot be read" not in machine.run("explain").stdout
    with open(machine.settings_of("demo").journal_path, "a", encoding="utf-8") as file:
        file.write('{"wall_ns":17,"mono')
    machine.journal("demo").record("closed", "behind the torn one")
    document = machine.json("explain")
    assert len(document["runs"][0]["events"]) == 12 and document["unread_lines"] == 1


def test_a_damaged_line_makes_no_number_certain(machine: Any) -> None:
    """What it told is missing: a recovery, here, and what that has lost."""
    tell(machine, "demo")
    path = machine.settings_of("demo").journal_path
    lines = path.read_bytes().splitlines(keepends=True)
    [at] = [n for n, line in enumerate(lines) if b"every rank has proven step 24" in line]
    lines[at] = lines[at].replace(b'"kind":', b"\xff\x00,,,,", 1)
    path.write_bytes(b"".join(lines))
    assert machine.json("explain")["unread_lines"] == 1
    told = " ".join(machine.run("explain").stdout.split())
    assert "1 line of" in told and "cannot be read: more may have happened" in told


def test_a_journal_that_begins_in_the_middle_does_not_tell_of_no_failure(machine: Any) -> None:
    """It was removed while the job ran: a rank that was started since has made another one."""
    machine.journal("demo", "rank 1").record("restored", "restored step 7 from memory", step=7)
    told = " ".join(machine.run("explain").stdout.split())
    assert "no failure since its journal begins, in the middle of the run" in told


def test_nothing_to_tell(machine: Any) -> None:
    assert machine.json("explain") == {
        "job": None,
        "journal": None,
        "runs": [],
        "unread_lines": 0,
    }
    result = machine.run("explain")
    assert (result.exit_code, result.stdout.strip()) == (
        0,
        f"There is no journal of any job in {machine.settings.state_dir}.",
    )
    machine.rank("demo", 0, [1])
    assert machine.json("explain", "--job", "demo")["runs"] == []


def test_nothing_is_broken_at_80_columns(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tell(machine, "demo")
    text = machine.run("explain").stdout
    assert max(map(len, text.splitlines())) <= 80, text
    assert "…" not in text and "..." not in text
    lines = [line.split() for line in text.splitlines()]
    words = {word for line in lines for word in line}
    for whole in ("SIGKILL", "restarted", "resumed", "productive", "recovering", "100.0"):
        assert whole in words, whole
    for line in lines:  # a time and its unit stand on one line
        for at, word in enumerate(line):
            if re.fullmatch(r"\+?\d+\.\d+", word):
                assert at + 1 < len(line), line


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played")
@pytest.mark.parametrize("what", ["the file", "its directory"])
def test_another_users_journal_is_not_the_jobs_word(what: str, machine: Any) -> None:
    """In a shared state directory another user may have made it first."""
    tell(machine, "demo")
    machine.rank("demo", 1, [24])
    assert "rank 1 was killed" in machine.run("explain").stdout
    before = machine.json("status")["jobs"][0]["account"]
    journal = machine.settings_of("demo").journal_path
    os.chown(journal if what == "the file" else journal.parent, 65534, 65534)
    assert "There is no journal of job demo" in machine.run("explain").stdout
    [job] = machine.json("status")["jobs"]
    assert before is not None and job["account"] is None and job["nodes"] is None
