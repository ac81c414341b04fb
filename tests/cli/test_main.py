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
    "drill",
    "lab",
    "audit",
    "doctor",
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
