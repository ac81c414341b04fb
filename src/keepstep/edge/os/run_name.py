"""Run name: what all lives of this process's rank have in common, until somebody starts the job
anew; launch name: until anybody starts it again.

Comes in: the environment. Goes out: a name that a restarted rank has again. Under `keepstep run` it
is the supervisor's, under torchrun the launcher's process; any other process is a run of its own.
Only under Slurm the two differ: a requeue, perhaps on another node, is a launch of the same run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from keepstep.edge.os.process_stat import process_stat
from keepstep.model.launch import RUN


def run_name(environ: Mapping[str, str]) -> str:
    """The run that this process belongs to."""
    if RUN not in environ and "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return launch_name(environ)


def launch_name(environ: Mapping[str, str]) -> str:
    """The launch that this process belongs to."""
    if RUN in environ:
        return environ[RUN]
    return _life_of(os.getppid() if "TORCHELASTIC_RUN_ID" in environ else os.getpid())


def _life_of(pid: int) -> str:
    """Of a process that lives."""
    stat = process_stat(pid)
    assert stat is not None, f"no process {pid}"
    return f"process-{pid}-{stat.began}"
