"""`keepstep status`."""

from __future__ import annotations

from typing import Any


def test_a_machine_without_jobs(machine: Any) -> None:
    assert machine.json("status") == {"jobs": []}
    result = machine.run("status")
    assert (result.exit_code, result.stdout.strip()) == (0, f"No job holds memory in {machine.settings.arena_dir}.")


def test_what_is_protected(machine: Any) -> None:
    machine.rank("demo", 0, [6, 7, 8], world_size=2)
    machine.rank("demo", 1, [7, 8, 9], world_size=2)
    machine.journal("demo").record("persisted", "step 4", step=4)
    text = machine.run("status").stdout
    assert "demo  training  2 ranks live" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("a killed process step 8 ") and row.endswith("every rank holds it in memory") for row in rows)
    assert any(row.startswith("a damaged snapshot step 7 ") for row in rows)
    assert any(row.startswith("a lost machine step 4 ") for row in rows)
    assert any(row.startswith("0 100 forward 8 step 8 ") for row in rows)


def test_the_document_keeps_its_shape(machine: Any) -> None:
    machine.rank("demo", 0, [7, 8])
    [job] = machine.json("status", "--job", "demo")["jobs"]
    assert set(job) == {
        *("job", "state", "why", "job_dir", "journal", "keeper_alive", "world_size", "horizon", "horizon_age_ns", "checkpoint"),
        *("protection", "ranks", "slots", "held", "nodes"),
    }
    assert (job["held"], job["nodes"]) == ([], None)
    assert set(job["protection"][0]) == {"against", "step", "age_ns", "why", "is_known"}
    assert (job["job"], job["state"], job["horizon"], job["checkpoint"]) == ("demo", "training", {"step": 8, "epoch": 1}, None)
    assert [(p["against"], p["step"]) for p in job["protection"]] == [
        ("a killed process", 8),
        ("a damaged snapshot", 7),
        ("a lost machine", None),
    ]
    assert set(job["ranks"][0]) == {
        *("rank", "alive", "pid", "incarnation", "epoch", "phase", "step", "completed_step", "newest_step", "newest_age_ns"),
        *("captured_steps", "skipped_steps", "torn_steps", "stall_ns_last", "stall_ns_total", "step_ns_last", "copy_bytes_per_s"),
        *("seal_ns_last", "payload_bytes", "loss", "silent_ns"),
    }
    assert set(job["slots"][0]) == {
        *("rank", "slot", "path", "state", "step", "epoch", "incarnation", "payload_bytes", "blocks", "sealed_wall_ns", "age_ns", "loss"),
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


def test_an_unknown_job_is_named_with_its_neighbours(machine: Any) -> None:
    machine.rank("demo", 0, [1])
    result = machine.run("status", "--job", "deno")
    assert result.exit_code == 2
    assert result.stderr == "error: --job: expected one of 1 known jobs (demo), found 'deno'; did you mean 'demo'?\n"


def test_watching_is_not_a_document(machine: Any) -> None:
    for words in (("--json",), ()):  # a test's output is no terminal either
        result = machine.run("status", "--watch", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--watch" in result.stderr
