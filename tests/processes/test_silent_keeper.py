"""A keeper of a real job under torchrun, where no agent watches it: while it is stopped nobody says
that it lives, and when it is killed neither."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.os.journal import read_journal
from tests.processes.script_runs import TORCHRUN
from tests.processes.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]
KEEPSTEP = (sys.executable, "-m", "keepstep.cli.main")
UNKNOWN_WITHIN_S = 30.0


def test_a_stopped_keeper_is_unknown_within_30_s_and_a_killed_one_is_not_alive(
    tmp_path: Path,
) -> None:
    environ = {
        **os.environ,
        "KEEPSTEP_JOB": "silent",
        "KEEPSTEP_ARENA_DIR": str(tmp_path / "arena"),
        "KEEPSTEP_STATE_DIR": str(tmp_path / "state"),
        "KEEPSTEP_GRACE_S": "0",
    }
    (tmp_path / "arena").mkdir()
    launch = [sys.executable, *TORCHRUN, "--nproc-per-node", "1"]
    program = ["-m", "keepstep.testing.uneven_job", "--pin", "--steps", "100000"]
    job = subprocess.Popen([*launch, *program], env=environ)

    def status() -> dict[str, Any]:
        asked = [*KEEPSTEP, "status", "--json"]
        shown = subprocess.run(asked, env=environ, capture_output=True, text=True)
        return next(iter(json.loads(shown.stdout or "{}").get("jobs", [])), {})

    def keeper() -> Any:
        return status().get("keeper_alive", "no job")

    def keeper_pid() -> int:
        events = read_journal(tmp_path / "state" / "silent" / "journal.jsonl")
        return int([e for e in events if e.kind == "keeper-started"][-1].data["pid"])

    try:
        until(lambda: keeper() is True and status()["state"] == "training", "training", 120)
        stopped = keeper_pid()
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: keeper() is None, "ignorance", UNKNOWN_WITHIN_S)
        assert status()["keeper_silent_ns"] > 0
        shown = subprocess.run([*KEEPSTEP, "status"], env=environ, capture_output=True, text=True)
        words = " ".join(shown.stdout.split())
        assert f"Unknown: the keeper: process {stopped} holds its lock and has said" in words
        assert "the keeper is alive" not in words
        os.kill(stopped, signal.SIGCONT)
        until(lambda: keeper() is True, "a keeper that says that it lives", 20)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(stopped, signal.SIGKILL)
        until(lambda: keeper() is False or keeper_pid() != stopped, "its end", UNKNOWN_WITHIN_S)
    finally:
        job.terminate()
        job.wait(60)
