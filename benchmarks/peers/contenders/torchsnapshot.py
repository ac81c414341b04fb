"""torchsnapshot's `Snapshot.async_take`: each save waits for the one before, and a folder counts
once its `.snapshot_metadata` is there. Two are kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torchsnapshot

from benchmarks.peers.step_folders import StepFolders
from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())  # it asks for the thread's own
        self._work, self._folders = workload, StepFolders(room, ".snapshot_metadata")
        self._pending: Any = None

    def _app_state(self) -> dict[str, Any]:
        return {"model": self._work.model, "optimizer": self._work.optimizer}

    def save(self, step: int) -> None:
        self.wait()
        folder = self._folders.make_room(step)
        self._pending = torchsnapshot.Snapshot.async_take(str(folder), self._app_state())

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def restore(self) -> bool:
        newest = self._folders.newest()
        if newest is None:
            return False
        torchsnapshot.Snapshot(str(newest)).restore(self._app_state())
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self.wait()
