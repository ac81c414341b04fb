"""`keepstep lab` and the drill's words about nodes: what is understood, and a sentence for what
cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app
from keepstep.testing.lab import Lab


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return result.stderr.replace("\n", " ")


def test_without_a_commands_name_run_is_meant() -> None:
    for words in (
        ["lab", "--nodes", "2", "--rate", "fast", "--", "train.py"],
        ["lab", "run", "--rate", "fast", "train.py", "--nodes", "9"],
    ):
        assert (
            "rate: expected a number and kbit, mbit or gbit, such as 1gbit, found 'fast'"
            in refused(*words)
        )
    assert "kill" in CliRunner().invoke(app, ["lab", "--help"]).stdout


def test_only_a_living_lab_can_lose_a_node() -> None:
    assert "expected a lab 999 that listens" in refused("lab", "kill", "999", "0")


def test_labs_are_listed(tmp_path: Path) -> None:
    with Lab(1, tmp_path, namespaces=False) as lab:
        answer = json.loads(CliRunner().invoke(app, ["lab", "list", "--json"]).stdout)
        assert {"lab": lab.number, "pid": os.getpid(), "nodes": []} in answer["labs"]
    answer = json.loads(CliRunner().invoke(app, ["lab", "list", "--json"]).stdout)
    assert lab.number not in [found["lab"] for found in answer["labs"]]


def test_listing_reaches_no_torch() -> None:
    code = (
        "import sys, keepstep.cli.lab, keepstep.testing.rehearsal; assert not {'torch', 'numpy'} "
        "& set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--nodes", "4", "--fault", "kill-node:node=4,step=2"],
            "expected node= below 4 (--nodes), found 4",
        ),
        (["--fault", "kill-node:node=0,step=2"], "expected more than one node (--nodes), found 1"),
        (
            ["--nodes", "2", "--launcher", "torchrun", "--fault", "kill:step=2"],
            "expected run with --nodes 2, found torchrun",
        ),
        (
            ["--nodes", "2", "--policy", "copies:many", "--fault", "kill:step=2"],
            "expected none, copies:M",
        ),
        (
            ["--random", "3", "--kinds", "kill-node"],
            "expected some of kill, stop, torn, keeper-kill, flip, found 'kill-node'",
        ),
    ],
)
def test_a_drill_that_cannot_be(words: list[str], said: str) -> None:
    assert said in refused("drill", *words)
