"""Stopwatch: a rank's hand that notes when each phase began, for whoever wants to know how long
things take (`benchmarks/prediction/`).

Comes in: the phases the job and keepstep announce. Goes out: a line each, before anything else
hears of the phase, in a file that outlives the rank: so a killed rank's last line says where in its
step it was. Costs a write a phase, some ten microseconds.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.model.snapshot import Phase, SlotState


class Stopwatch:
    """A phase listener, before all others in `session.phase_listeners`."""

    def __init__(self, path: Path, job_dir: Path, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._page_path, self._rank, self._pid = status_path(job_dir, rank), rank, os.getpid()
        self._page: StatusPage | None = None

    def __call__(self, phase: Phase, step: int) -> None:
        now_ns = time.monotonic_ns()
        told: dict[str, str | int] = {
            "rank": self._rank,
            "pid": self._pid,
            "phase": phase.name.lower(),
            "step": step,
            "mono_ns": now_ns,
        }
        if phase in (Phase.STEP, Phase.BACKWARD):
            told |= self._last_step()
        os.write(self._fd, (json.dumps(told) + "\n").encode())

    def _last_step(self) -> dict[str, int]:
        """What the page says: of the boundary before this step, and of the newest capture."""
        self._page = self._page or StatusPage(MEMORY, self._page_path)
        status = self._page.read()
        if status is None:
            return {}
        captured = max(
            (view.stamp.step for view in status.slots if view.state is SlotState.SEALED), default=-1
        )
        told = {
            "stall_ns": status.stall_ns_last,
            "payload_bytes": status.payload_bytes,
            "captured_step": captured,
        }
        return told | {"capture_ns": status.copy_ns_last + status.seal_ns_last}
