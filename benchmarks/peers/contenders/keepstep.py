"""keepstep without its launcher: `protect`, and the boundary between two steps. The keeper outlives
the trainer, and the next `protect` finds it."""

from __future__ import annotations

from pathlib import Path

import keepstep
from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        self._job = keepstep.protect(
            {
                "job": f"peers-{room.name}",
                "state_dir": str(room / "state"),
                "arena_dir": str(room),
                "grace_s": 60.0,
                "scrub_every_s": 0.0,
            },
            model=workload.model,
            optimizer=workload.optimizer,
        )
        self._found = self._job.step >= 0
        self._job.step_begin()

    def save(self, step: int) -> None:
        self._job.step_end()
        self._job.step_begin()

    def wait(self) -> None:
        assert self._job._drain(self._job._rank.drain, 60.0), "not sealed within 60 s"

    def restore(self) -> bool:
        return self._found  # `protect` has done it

    def skipped(self) -> int:
        page = self._job._rank._page.read()
        return 0 if page is None else page.skipped_steps

    def close(self) -> None:
        self.wait()
        self._job.close(ok=False)
