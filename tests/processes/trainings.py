"""A job of `keepstep.testing` under `keepstep run`, as a process that is watched, killed in parts
and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import Event
from keepstep.model.snapshot import RankStatus


class Training:
    """`module`: of `keepstep.testing`, which writes what each rank came to; the job's name, too."""

    def __init__(self, home: Path, module: str, ranks: int, *given: str) -> None:
        self.home, self.results, self._job, self._ranks = home, home / "results", module, ranks
        self.results.mkdir(parents=True)
        (home / "arena").mkdir()
        environ = {
            **os.environ,
            "KEEPSTEP_JOB": module,
            "KEEPSTEP_ARENA_DIR": str(home / "arena"),
            "KEEPSTEP_STATE_DIR": str(home / "state"),
            "KEEPSTEP_GRACE_S": "0",
        }
        run = [sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", str(ranks)]
        job = ["-m", f"keepstep.testing.{module}", str(self.results), *given]
        self.process = subprocess.Popen([*run, *job], env=environ)

    @property
    def state_dir(self) -> Path:
        """Where its journal is."""
        return self.home / "state" / self._job

    def told(self, kind: str) -> list[Event]:
        path = self.state_dir / "journal.jsonl"
        events = read_journal(path) if path.exists() else []
        return [event for event in events if event.kind == kind]

    def ended(self) -> list[dict[str, Any]]:
        """What each rank came to, when all have ended well."""
        assert self.process.wait(200) == 0
        return [
            json.loads((self.results / f"rank-{rank}.json").read_text())
            for rank in range(self._ranks)
        ]

    def status(self, rank: int) -> RankStatus | None:
        return read_status(MEMORY, job_dir_of(self.home / "arena", self._job), rank)

    def kill(self, rank: int) -> None:
        status = self.status(rank)
        assert status is not None
        os.kill(status.pid, signal.SIGKILL)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
