"""Run name: what all lives of this process's rank have in common, until somebody starts the job
anew.

Comes in: the environment. Goes out: a name that a restarted rank has again. Under `keepstep run` it
is the supervisor's, under Slurm that of the job's step, which a requeue keeps, under torchrun the
launcher's process; any other process is a run of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from keepstep.model.launch import RUN


def run_name(environ: Mapping[str, str]) -> str:
    """The run that this process belongs to."""
    if RUN in environ:
        return environ[RUN]
    if "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return _life_of(os.getppid() if "TORCHELASTIC_RUN_ID" in environ else os.getpid())


def _life_of(pid: int) -> str:
    """Of a process; the kernel gives its number to others later, but with another start."""
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process-{pid}-{started}"
