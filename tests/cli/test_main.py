"""The command as a whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import keepstep
from keepstep.cli.main import app

COMMANDS = (
    "run",
    "status",
    "inspect",
    "compare",
    "explain",
    "clean",
    "demo",
    "drill",
    "lab",
    "audit",
    "doctor",
    "preflight",
)


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f" {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0 and f"keepstep {name}" in result.stdout


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"keepstep {keepstep.__version__}\n")


def test_the_command_line_reaches_no_torch() -> None:
    code = (
        "import json, sys, keepstep.cli.main; print(json.dumps([m for m in sys.modules if m in "
        "('torch', 'numpy')]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert json.loads(run.stdout) == []


def test_an_error_of_ours_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_ARENA", "/nowhere")
    result = CliRunner().invoke(app, ["status"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "error: unknown environment variable 'KEEPSTEP_ARENA'; did you mean 'KEEPSTEP_ARENA_DIR'?"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["statu"], "status"),
        (["run", "--nproc-per-nod", "2", "train.py"], "--nproc-per-node"),
        (["run", "--redundancie", "copies:2", "train.py"], "--redundancy"),
        (["explain", "--jbo", "x"], "--job"),
    ],
)
def test_a_typo_names_the_nearest(typed: list[str], meant: str) -> None:
    result = CliRunner().invoke(app, typed, env={"COLUMNS": "80"})
    assert result.exit_code == 2 and meant in result.output
    assert result.stderr.startswith("error: ") and result.output.count("\n") == 1


@pytest.mark.parametrize(
    "typed",
    [["compare"], ["--versio"], ["drill", "--steps", "x"], ["lab", "run", "--nods", "2"]],
)
def test_a_command_line_that_is_not_understood_is_one_line(typed: list[str]) -> None:
    result = CliRunner().invoke(app, typed, env={"COLUMNS": "80"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    command = " ".join(["keepstep", *typed[: 1 + (typed[0] == "lab")]]).partition(" --")[0]
    assert f"`{command} --help`" in result.stderr.replace("root", "keepstep")


def test_nothing_said_is_answered_by_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "Usage: " in result.output and "error" not in result.stderr


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete "), ("zsh", "#compdef keepstep")])
def test_a_shell_can_learn_the_commands(
    shell: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # typer asks the process above which shell it is: that of a test is none
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    told = CliRunner().invoke(app, ["--show-completion", shell], prog_name="keepstep")
    assert told.exit_code == 0 and word in told.stdout


def test_a_shell_completes_the_name_of_a_command() -> None:
    asked = {"_KEEPSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "keepstep sta", "COMP_CWORD": "1"}
    told = CliRunner().invoke(app, [], env=asked, prog_name="keepstep")
    assert told.stdout.split() == ["status"]
