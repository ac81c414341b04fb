"""Run name: a restart within a run has it again, another start has another."""

from __future__ import annotations

import os
import subprocess
import sys

from keepstep.edge.os.run_name import run_name

ASK = "import os; from keepstep.edge.os.run_name import run_name; print(run_name(os.environ))"


def of_a_child(**environ: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def test_a_process_alone_is_a_run_of_its_own() -> None:
    assert run_name({}) == run_name({})
    assert of_a_child() != of_a_child()


def test_a_launcher_s_restart_is_the_same_run() -> None:
    assert of_a_child(TORCHELASTIC_RUN_ID="none") == of_a_child(TORCHELASTIC_RUN_ID="none")
    assert of_a_child(KEEPSTEP_RUN="a") == of_a_child(KEEPSTEP_RUN="a") == "a\n"
    step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
    assert of_a_child(**step) == of_a_child(**step)
    assert run_name(step) != run_name({**step, "SLURM_STEP_ID": "1"})
