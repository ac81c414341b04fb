"""`keepstep doctor`: what it prints, its exit codes, and how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import keepstep.cli.doctor
from keepstep.cli.main import app
from keepstep.core.doctor.examination import CHECKS, examine
from keepstep.model.machine_facts import LeftMemory, MachineFacts
from tests.cli.conftest import Machine
from tests.core.doctor.sane_machine import with_facts

LONGEST_S = 1.0  # of processor time: other processes on the machine can only make it longer
TRIES = 5


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def show(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> MachineFacts:
    """Let the command find this machine."""
    facts = with_facts(changes)
    monkeypatch.setattr(keepstep.cli.doctor, "read_machine", lambda *asked: facts)
    return facts


def test_a_sane_machine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {})
    result = run()
    assert result.exit_code == 0
    told = f"This machine is fit: {len(CHECKS)} checks, 0 broken, 0 warnings, 0 not known\n"
    assert result.stdout == told


def test_a_defect_is_one_line_with_reason_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {"memory.overcommit": 2, "software.torch": None, "processes.load": None})
    result = run()
    assert result.exit_code == 1
    first, second, last = result.stdout.splitlines()
    assert first.startswith("broken   torch: PyTorch is not installed in this Python; ")
    assert "; keepstep protects PyTorch trainings" in first and ". Fix: pip install" in first
    assert second.startswith("warning  overcommit: ")
    assert last == (
        f"This machine is not fit: {len(CHECKS)} checks, 1 broken, 1 warning, 1 not known"
    )


def test_warnings_leave_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {"memory.overcommit": 2})
    assert run().exit_code == 0


def test_verbose_lists_every_check_and_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {"processes.load": None})
    lines = run("-v").stdout.splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert lines[0] == "unknown  load: the machine's load"
    assert "ok       torch" in lines


def test_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = show(monkeypatch, {"memory.overcommit": 2, "processes.load": None})
    document = json.loads(run("--json").stdout)
    assert set(document) == {"fit", "checks", "defects", "unknown"}
    assert document["fit"] is True
    assert list(document["checks"]) == [result.check for result in examine(facts).results]
    assert set(document["checks"].values()) == {"ok", "warning", "unknown"}
    (defect,) = document["defects"]
    assert set(defect) == {"check", "severity", "found", "why", "fix"}
    assert (defect["check"], defect["severity"]) == ("overcommit", "warning")
    assert document["unknown"] == [{"check": "load", "found": "the machine's load"}]


def test_what_is_asked_for_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def read(*words: Any) -> MachineFacts:
        asked.append(words)
        return with_facts({})

    monkeypatch.setattr(keepstep.cli.doctor, "read_machine", read)
    assert run("--nnodes", "4", "--store", "/x", "--wait", "3").exit_code == 0
    host, _, nodes, store, _ = asked[0]
    assert (host.wait_s, nodes, store) == (3.0, 4, "/x")


def test_memory_of_dead_jobs_is_found(machine: Machine) -> None:
    machine.slot("dead", 0, 0, 5)
    machine.rank("alive", 0, [3])
    arena_dir = machine.settings.arena_dir
    (left,) = keepstep.cli.doctor.find_left(arena_dir)
    assert isinstance(left, LeftMemory) and left.job == "dead" and left.bytes > 0
    document = json.loads(machine.run("doctor", "--json").stdout)
    named = [each["found"] for each in document["defects"]]
    assert any("dead job dead holds" in found for found in named)


def test_the_real_command_answers_within_a_second_and_without_torch() -> None:
    code = (
        "import sys, time\n"
        "from keepstep.cli.main import app\n"
        "try:\n    app(['doctor', '--json'])\n"
        "finally:\n"
        "    heavy = [m for m in ('torch', 'numpy') if m in sys.modules]\n"
        "    print(time.process_time(), heavy, file=sys.stderr)\n"
    )
    took_s: list[float] = []
    while len(took_s) < TRIES and min(took_s, default=LONGEST_S) >= LONGEST_S:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        took, _, heavy = done.stderr.splitlines()[-1].partition(" ")
        took_s.append(float(took))
        document = json.loads(done.stdout)
        assert heavy == "[]"
        assert done.returncode == (0 if document["fit"] else 1)
        assert set(document["checks"]) == {check.name for check in CHECKS}
    assert min(took_s) < LONGEST_S, took_s
