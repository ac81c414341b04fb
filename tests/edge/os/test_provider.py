"""Provider: what the command that asks for another node is told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keepstep.config import from_environ
from keepstep.edge.os.provider import CommandProvider, environ_of
from keepstep.model.device import UNTESTED_NCCL
from keepstep.model.lost import LostNode

LOST = LostNode("gpt", 2, "10.0.0.3", "it says nothing")


def told(provider: CommandProvider) -> str:
    said: list[str] = []
    is_over = threading.Event()
    provider.replace(LOST, lambda why: (said.append(why), is_over.set())[0])
    assert is_over.wait(30)
    return said[0]


def test_the_command_is_told_what_was_lost(tmp_path: Path) -> None:
    where = tmp_path / "told"
    command = f"echo $KEEPSTEP_LOST_JOB $KEEPSTEP_LOST_NODE $KEEPSTEP_LOST_HOST > {where}; exit 3"
    assert "exited with 3" in told(CommandProvider(command))
    assert where.read_text().split() == ["gpt", "2", "10.0.0.3"]


def test_what_is_this_node_s_is_not_handed_on_and_the_user_s_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`sbatch` gives the agent that it starts elsewhere all that it has itself."""
    monkeypatch.setenv("KEEPSTEP_SUPERVISOR", "123")
    monkeypatch.setenv("KEEPSTEP_REDUNDANCY", "copies:2")
    monkeypatch.setenv(UNTESTED_NCCL, "1")
    found = environ_of(LOST)
    assert found[UNTESTED_NCCL] == "1", "a switch that the user has set"
    assert "KEEPSTEP_SUPERVISOR" not in found and found["KEEPSTEP_REDUNDANCY"] == "copies:2"
    assert from_environ(found).redundancy == "copies:2", "an agent there understands all of it"


def test_keepstep_itself_may_be_what_the_command_calls() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "help", "KS1001"],
        env={**environ_of(LOST), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
