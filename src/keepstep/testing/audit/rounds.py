"""Rounds: the four runs of an audit.

One that is killed; its successor, which finds the killed one's memory and is looked at when it
begins and some steps later; and two undisturbed ones, looked at before the same steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.config import check_socket_path, job_dir_of
from keepstep.core.comparison.omissions import Audit, TwoLooks, audit
from keepstep.edge.os.own_modules import module_words
from keepstep.errors import ConfigError
from keepstep.model.fingerprint import Fingerprint, SeenValue
from keepstep.testing.audit.audited import AuditedRun

LAST_LINES = 8
RESTORED, UNDISTURBED = "restored", ("first", "second")  # jobs: short, for they name sockets
CLEARED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def hold_audit(
    command: Sequence[str], work: Path, kill_at: int, look_at: int, within_s: float
) -> Audit:
    """`command`: the script and its arguments. Raises ConfigError when a run does not come as far
    as it is to."""
    check_socket_path(job_dir_of(work, RESTORED))
    place = str(work)
    _start(command, AuditedRun(place, RESTORED, (look_at,), kill_at), within_s)
    restored = _looks(command, AuditedRun(place, RESTORED, (look_at,)), within_s)
    begun = restored[0].step
    if begun == look_at:
        raise ConfigError(
            f"audit: expected the run that is killed at step {kill_at} to leave a snapshot, found "
            "that its successor begins afresh: try a later step with --kill-at"
        )
    runs = [restored]
    for name in UNDISTURBED:
        runs.append(_looks(command, AuditedRun(place, name, (begun, look_at)), within_s))
    found, first, again = (TwoLooks(*(look.seen for look in looks)) for looks in runs)
    return audit(first, again, found)


def _looks(command: Sequence[str], run: AuditedRun, within_s: float) -> list[Fingerprint]:
    code, said = _start(command, run, within_s)
    if not run.report.exists():
        raise ConfigError(
            f"audit: expected the program to begin step {run.look_at[-1]}, found that it ended "
            f"before, with exit code {code}. For a shorter program give a smaller --kill-at. {said}"
        )
    looks = json.loads(run.report.read_text())
    return [Fingerprint(each["step"], dict(map(_seen, each["seen"].items()))) for each in looks]


def _seen(item: tuple[str, dict[str, Any]]) -> tuple[str, SeenValue]:
    path, said = item
    entries = said["entries"]
    return path, SeenValue(
        said["kind"], said["digest"], None if entries is None else tuple(entries)
    )


def _start(command: Sequence[str], run: AuditedRun, within_s: float) -> tuple[int, str]:
    """Its exit code, and the last that it said."""
    plan = json.dumps(asdict(run))
    kept = {name: value for name, value in os.environ.items() if name not in CLEARED}
    try:
        ended = subprocess.run(
            [sys.executable, *module_words("keepstep.testing.audit.audited", plan, *command)],
            env={**kept, "PYTHONHASHSEED": "0", "KEEPSTEP_LOG": "quiet"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"audit: expected step {run.look_at[-1]} within {within_s:.0f} s, found the program "
            "still on its way: allow more with --within"
        ) from error
    return ended.returncode, "\n".join(ended.stdout.splitlines()[-LAST_LINES:])
