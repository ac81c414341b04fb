"""Audited: one run of the program, in a process of its own.

    python -m keepstep.testing.audit.audited PLAN SCRIPT [ARGS]

PLAN is JSON: where the run has its memory, at which step it is killed, and at which step it is
looked at and ends. The program's own settings count but for where things are: nothing of an audit
reaches the store, memory or journal of the training.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.config import Config, Settings
from keepstep.config.option import Environ
from keepstep.dashboard.document import as_json
from keepstep.dashboard.slots import read_header
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import slot_paths
from keepstep.model.fingerprint import Fingerprint
from keepstep.model.snapshot import Phase, SlotState
from keepstep.runtime.rank import session
from keepstep.testing.audit.reach import reach

STEP_S = 0.1  # of the run that is killed, at least: a step of no time leaves none for a snapshot


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """`look_at`: the steps before which it is looked at; it ends at the last. One that goes on from
    a step is looked at when it begins, too. `kill_at`: it is killed before that step, or the first
    one behind it when there is a snapshot."""

    work: str
    job: str
    look_at: tuple[int, ...]
    kill_at: int | None = None

    @property
    def report(self) -> Path:
        return Path(self.work) / f"{self.job}.json"


def has_snapshot(job_dir: Path) -> bool:
    """Whether rank 0 has sealed one."""
    headers = (read_header(path) for path in slot_paths(MEMORY, job_dir, 0))
    return any(header.state is SlotState.SEALED for header in headers)


class Looker:
    """A phase listener."""

    def __init__(self, run: AuditedRun) -> None:
        self._run = run
        self._looks: list[Fingerprint] = []
        self._has_begun = False
        self.job_dir: Path | None = None  # once it is known

    def __call__(self, phase: Phase, step: int) -> None:
        if phase is not Phase.STEP:
            return
        if self._run.kill_at is not None and self.job_dir is not None:
            time.sleep(STEP_S)
            if step >= self._run.kill_at and has_snapshot(self.job_dir):
                os.kill(os.getpid(), signal.SIGKILL)
        if step in self._run.look_at or (step > 0 and not self._has_begun):
            self._looks.append(
                Fingerprint(step, reach(sys._getframe(1), list(sys.modules.values())))
            )
        self._has_begun = True
        if step == self._run.look_at[-1]:
            self._run.report.write_text(json.dumps(as_json(self._looks)))
            sys.stdout.flush()
            os._exit(0)


def main(argv: list[str]) -> None:
    run = AuditedRun(**json.loads(argv[1]))
    looker, resolve = Looker(run), session.resolve  # type: ignore[attr-defined]

    def resolve_aside(
        config: Config | Mapping[str, Any] | None, environ: Environ, default_job: str
    ) -> Settings:
        """The program's settings, but for where things are."""
        settings = replace(
            resolve(config, environ, default_job),
            job=run.job,
            arena_dir=Path(run.work),
            state_dir=Path(run.work) / "state",
            store=None,
            secret=None,
            fresh=False,
            adopt=False,
        )
        looker.job_dir = settings.job_dir
        return settings

    session.resolve = resolve_aside  # type: ignore[attr-defined]
    session.phase_listeners.append(looker)
    sys.argv = argv[2:]
    sys.path.insert(0, str(Path(argv[2]).resolve().parent))
    runpy.run_path(argv[2], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv)
