"""`keepstep clean`: what is dead goes, what lives stays."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from keepstep.config import ending_dir_of, job_dir_of, user_dir
from keepstep.config.values import is_job_name
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER
from keepstep.edge.os.journal import read_journal
from keepstep.edge.os.processes import ensure_keeper
from keepstep.model.messages.keeper_agent import JobEnded


def names(machine: Any) -> list[str]:
    """The jobs that have memory."""
    return [path.name for path in user_dir(machine.settings.arena_dir).iterdir()]


def test_nothing_to_remove(machine: Any) -> None:
    assert machine.run("clean").exit_code == 0
    assert machine.json("clean", "--yes") == {"leftovers": []}


def test_a_job_that_is_called_as_another_ones_remains_were_is_not_removed_with_it(
    machine: Any,
) -> None:
    machine.rank("train", 0, [1]).close()
    machine.rank("train.ending-4711", 0, [1]).close()
    machine.pages.clear()
    document = machine.json("clean", "--job", "train", "--yes")
    assert [found["job"] for found in document["leftovers"]] == ["train"]
    assert names(machine) == ["train.ending-4711"]
    assert not is_job_name(ending_dir_of(Path("/memory/train"), 4711).name)


def test_the_dead_are_removed_and_the_living_are_not(machine: Any) -> None:
    machine.rank("dead", 0, [1, 2]).close()
    machine.pages.clear()
    machine.rank("alive", 0, [1])
    ending = job_dir_of(machine.settings.arena_dir, "gone~ending-4711")
    ending.mkdir(mode=0o700)
    document = machine.json("clean", "--all", "--yes")
    assert [(found["job"], found["removed"]) for found in document["leftovers"]] == [
        ("alive", False),
        ("dead", True),
        ("gone", True),
    ]
    assert names(machine) == ["alive"]
    assert set(document["leftovers"][0]) == {
        "job",
        "path",
        "bytes",
        "held_bytes",
        "keeper_alive",
        "ranks_alive",
        "removed",
    }
    assert document["leftovers"][0]["ranks_alive"] == [[0, 100]]


def test_it_asks_first(machine: Any) -> None:
    machine.rank("dead", 0, [1]).close()
    machine.pages.clear()
    job_dir = machine.settings_of("dead").job_dir
    result = machine.run("clean", answer="n\n")
    assert "Remove dead?" in result.output and "no process" in result.output and job_dir.exists()
    assert machine.json("clean")["leftovers"][0]["removed"] is False  # a script cannot be asked
    assert job_dir.exists()
    result = machine.run("clean", answer="y\n")
    assert f"Removed {job_dir}" in result.output and not job_dir.exists()


def test_what_was_held_for_other_nodes_is_counted_and_goes_too(machine: Any) -> None:
    machine.rank("dead", 0, [1]).close()
    machine.pages.clear()
    machine.slot("dead", 3, 0, 1, shelf="held")
    machine.slot("dead", 0, 0, 1, shelf="parity")
    [found] = machine.json("clean")["leftovers"]
    assert 0 < found["held_bytes"] < found["bytes"]
    assert machine.run("clean", "--yes").exit_code == 0
    assert list(machine.settings.arena_dir.iterdir()) == []


def test_only_the_named_job_goes(machine: Any) -> None:
    for job in ("one", "two"):
        machine.rank(job, 0, [1]).close()
    machine.pages.clear()
    assert machine.run("clean", "--job", "one", "--yes").exit_code == 0
    assert names(machine) == ["two"]
    result = machine.run("clean", "--job", "three", "--yes")
    assert result.exit_code == 2 and "found 'three'" in result.stderr


def test_a_living_rank_is_refused_by_name_even_with_force(machine: Any) -> None:
    machine.rank("demo", 0, [1])
    for words in ((), ("--force",)):
        result = machine.run("clean", "--job", "demo", "--yes", *words)
        assert result.exit_code == 2 and "rank 0 (process 100)" in result.stderr
        assert machine.settings_of("demo").job_dir.exists()


def test_a_held_lock_is_a_living_keeper(machine: Any) -> None:
    machine.rank("demo", 0, [1]).close()
    machine.pages.clear()
    fd = os.open(machine.settings_of("demo").job_dir / "keeper.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    result = machine.run("clean", "--job", "demo", "--yes")
    assert result.exit_code == 2 and "--force ends it" in result.stderr
    # it holds the lock and does not answer
    result = machine.run("clean", "--job", "demo", "--yes", "--force")
    assert result.exit_code == 2 and "expected the keeper to answer" in result.stderr
    assert machine.settings_of("demo").job_dir.exists()
    os.close(fd)
    assert machine.run("clean", "--job", "demo", "--yes").exit_code == 0
    assert not machine.settings_of("demo").job_dir.exists()


def test_force_ends_a_real_keeper(machine: Any, monkeypatch: Any) -> None:
    settings = machine.settings_of("demo")
    box = ensure_keeper(settings, AGENT_WITH_KEEPER)
    try:
        refused = machine.run("clean", "--job", "demo", "--yes")
        assert refused.exit_code == 2 and settings.job_dir.exists()
        result = machine.run("clean", "--job", "demo", "--yes", "--force")
        assert result.exit_code == 0, result.output
        assert not settings.job_dir.exists()
        assert [e.why for e in read_journal(settings.journal_path) if e.kind == "job-over"] == [
            "keepstep clean --force"
        ]
    finally:
        box.send(JobEnded(False, "the test is over"))
        box.close()


def test_force_is_for_one_job(machine: Any) -> None:
    assert machine.run("clean", "--force", "--yes").exit_code == 2
    assert machine.run("clean", "--all", "--job", "demo").exit_code == 2
