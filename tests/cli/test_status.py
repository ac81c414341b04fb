"""`keepstep status`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

CURSOR_SHOWN = b"\x1b[?25h"


def test_a_machine_without_jobs(machine: Any) -> None:
    assert machine.json("status") == {"jobs": []}
    result = machine.run("status")
    assert (result.exit_code, result.stdout.strip()) == (
        0,
        f"No job has memory in {machine.settings.arena_dir}.",
    )


def test_what_is_protected(machine: Any) -> None:
    machine.rank("demo", 0, [6, 7, 8], world_size=2)
    machine.rank("demo", 1, [7, 8, 9], world_size=2)
    machine.journal("demo").record("persisted", "step 4", step=4)
    text = machine.run("status").stdout
    assert "demo  training  2 ranks alive" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(
        row.startswith("a killed process step 8 ") and row.endswith("every rank holds it in memory")
        for row in rows
    )
    assert any(row.startswith("a damaged snapshot step 7 ") for row in rows)
    assert any(row.startswith("a lost machine step 4 ") for row in rows)
    assert any(row.startswith("0 100 forward 8 step 8 ") for row in rows)


def test_nothing_empty_is_drawn_where_no_rank_is_left(machine: Any) -> None:
    machine.slot("demo", 0, 0, 7)
    for words in (["status"], ["status", "-v"]):
        text = machine.run(*words).stdout
        assert "a killed process" in text and "newest snapshot" not in text
        assert "captured" not in text and "waited" not in text


def test_of_many_ranks_those_that_are_gone_or_behind_are_shown(machine: Any) -> None:
    for rank in range(50):
        machine.rank("many", rank, [5, 7 if rank == 41 else 8], world_size=50)
    machine.pages[47].close()
    lines = machine.run("status").stdout.splitlines()
    assert any(line.startswith("32 of 50 ranks") for line in lines)
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows if "forward" in row] == [*map(str, range(30)), "41", "47"]
    assert next(row for row in rows if row[:1] == ["47"])[2] == "gone"
    assert len(machine.json("status", "--job", "many")["jobs"][0]["ranks"]) == 50


def test_the_document_keeps_its_shape(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    [job] = machine.json("status", "--job", "demo")["jobs"]
    assert set(job) == {
        *(
            "job",
            "state",
            "why",
            "job_dir",
            "journal",
            "keeper_alive",
            "keeper_silent_ns",
            "world_size",
            "horizon",
            "horizon_age_ns",
            "period_steps",
            "checkpoint",
        ),
        *("protection", "ranks", "slots", "held", "nodes", "incident", "account", "slow"),
        *("parts", "links", "doubts"),
    }
    assert (job["held"], job["nodes"], job["incident"], job["account"]) == ([], None, None, None)
    assert set(job["protection"][0]) == {"against", "step", "age_ns", "why", "is_known"}
    assert (job["job"], job["state"], job["horizon"], job["checkpoint"]) == (
        "demo",
        "training",
        {"step": 8, "epoch": 1},
        None,
    )
    assert [(p["against"], p["step"]) for p in job["protection"]] == [
        ("a killed process", 8),
        ("a damaged snapshot", 7),
        ("a lost machine", None),
    ]
    assert set(job["ranks"][0]) == {
        *(
            "rank",
            "alive",
            "pid",
            "incarnation",
            "epoch",
            "phase",
            "step",
            "completed_step",
            "newest_step",
            "newest_age_ns",
        ),
        *(
            "captured_steps",
            "skipped_steps",
            "kept_bytes",
            "torn_steps",
            "stall_ns_last",
            "stall_ns_total",
            "step_ns_last",
            "copy_bytes_per_s",
        ),
        *("seal_ns_last", "payload_bytes", "loss", "silent_ns"),
    }
    assert set(job["slots"][0]) == {
        *(
            "rank",
            "slot",
            "path",
            "state",
            "step",
            "epoch",
            "incarnation",
            "payload_bytes",
            "blocks",
            "sealed_wall_ns",
            "age_ns",
            "loss",
            "kept_bytes",
        ),
        *("why", "kind"),
    }


def test_all_jobs_with_memory_are_shown_and_the_last_one_that_had_some(machine: Any) -> None:
    machine.rank("one", 0, [1])
    machine.rank("two", 0, [2])
    assert {j["job"] for j in machine.json("status")["jobs"]} == {"one", "two"}
    assert [j["job"] for j in machine.json("status", "--job", "one")["jobs"]] == ["one"]


def test_a_job_that_is_over(machine: Any) -> None:
    journal = machine.journal("demo")
    journal.record("persisted", "step 4", step=4)
    journal.record("job-over", "all 2 ranks ended well", ok=True)
    text = machine.run("status").stdout
    assert "demo  ended  all 2 ranks ended well" in text and "newest checkpoint: step 4" in text
    assert machine.json("status") == {"jobs": []}
    assert machine.json("status", "--job", "demo")["jobs"][0]["state"] == "ended"


def test_an_option_that_says_nothing_of_places_refuses_no_look(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.rank("demo", 0, [1])
    monkeypatch.setenv("KEEPSTEP_SLOTS", "99")
    monkeypatch.setenv("KEEPSTEP_JOB", "")
    assert machine.run("status", "--job", "demo").exit_code == 0


def test_who_names_the_job_without_the_option_hears_of_it(machine: Any) -> None:
    machine.rank("demo", 0, [1])
    result = machine.run("status", "demo")
    assert result.exit_code == 2 and "a job is named with --job" in result.stderr


def test_the_short_spelling_of_help_is_understood(machine: Any) -> None:
    assert "Usage" in machine.run("status", "-h").stdout


def test_an_unknown_job_is_named_with_its_neighbours(machine: Any) -> None:
    machine.rank("demo", 0, [1])
    result = machine.run("status", "--job", "deno")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "error: --job: expected one of 1 known jobs (demo), found 'deno'; did you mean 'demo'? "
        "[KS1303]\n"
    )


def test_a_failure_that_is_not_over_and_where_the_time_went(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    machine.journal("demo").record(
        "resumed", "every rank starts afresh", step=-1, source="fresh", lost_steps=0, epoch=1
    )
    machine.journal("demo", "agent").record(
        "rank-exited", "rank 1 was killed by SIGKILL (9)", rank=1, code=-9
    )
    [job] = machine.json("status")["jobs"]
    assert [s["name"] for s in job["incident"]["stages"]] == ["noticed"]
    assert job["account"]["recovering_ns"] > 0  # until now: a rank lives
    rows = [" ".join(line.split()) for line in machine.run("status").stdout.splitlines()]
    assert any(row.startswith("Recovering since ") for row in rows)
    assert any(
        row.startswith("fact noticed") and row.endswith("rank 1 was killed by SIGKILL (9)")
        for row in rows
    )
    assert any(row.startswith("recovering ") for row in rows)


def watching(*words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "keepstep.cli.main",
        "status",
        "--watch",
        "--interval",
        "0.1",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watching_in_a_pipe_tells_what_changes_until_it_is_interrupted(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    agent = machine.journal("demo", "agent")
    agent.record("job-started", "job demo")
    with watching("--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["jobs"][0]["incident"] is None
        agent.record("resumed", "afresh", step=-1, source="fresh", lost_steps=0, epoch=1)
        agent.record("rank-exited", "rank 1 was killed", rank=1, code=-9)
        seen = next(
            found for line in process.stdout if (found := json.loads(line)["jobs"][0]["incident"])
        )
        assert seen["outcome"] == "pending"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert all(json.loads(line)["jobs"] for line in rest.splitlines())


def test_watching_for_people(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    with watching() as process:
        assert process.stdout is not None
        seen = [next(line for line in process.stdout if "training" in line) for _ in range(2)]
        assert all("1 rank alive" in line for line in seen)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 0


def test_an_interval_that_cannot_be(machine: Any) -> None:
    for text in ("0", "inf", "nan"):
        assert machine.run("status", "--watch", "--interval", text).exit_code == 2


def test_watching_on_a_terminal(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "keepstep.cli.main", "status", "--watch", "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=writer, stderr=writer, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(writer)
        screen = b""
        while screen.count(b"1 rank alive") < 2:
            screen += os.read(reader, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while more := os.read(reader, 4096):
                screen += more
    os.close(reader)
    assert process.returncode == 0 and b"Traceback" not in screen
    assert screen.count(CURSOR_SHOWN) == 1  # the terminal is given back as it was


def test_nothing_is_broken_at_80_columns(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number, no heading, with figures as long as they get."""
    monkeypatch.setenv("COLUMNS", "80")
    about = {"step_ns_last": 222_600_000, "stall_ns_last": 123_400_000, "captured_steps": 123_456}
    machine.rank("demo", 0, [99_997, 99_998, 99_999], world_size=1, stall_ns_total=635_800_000,
                 seal_ns_last=120_600_000, skipped_steps=12, loss=3.14159,
                 **about)  # fmt: skip
    brief, whole = (machine.run("status", *more).stdout for more in ((), ("-v",)))
    for text in (brief, whole):
        assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in whole.splitlines()]
    assert ["rank", "captured", "skipped", "torn", "state"] in rows
    assert "222.6 ms" in whole and "123.4 ms" in whole and "635.8 ms" in whole
    assert any(row[:4] == ["0", "123456", "12", "0"] for row in rows)
    said = " ".join(brief.split())
    assert "The last step took 222.6 ms on the slowest rank, 123.4 ms (55.4%) of it waiting" in said
    assert "123456 snapshots, 12 skipped, 0 torn." in said
    assert "slot 0" in whole and "slot 0" not in brief


def test_a_damaged_slot_is_shown_without_being_asked_for(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    machine.journal("demo")
    path = sorted(machine.settings_of("demo").job_dir.glob("rank-00000/slot*"))[0]
    with open(path, "r+b") as file:
        file.write(b"x" * 64)
    assert "damaged" in machine.run("status").stdout
