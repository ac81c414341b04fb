"""torchsnapshot's `Snapshot.async_take`: each save waits for the one before, and a folder counts
once its `.snapshot_metadata` is there. Two are kept."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import torchsnapshot

from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())  # it asks for the thread's own
        self._work, self._room = workload, room
        self._pending: Any = None

    def _app_state(self) -> dict[str, Any]:
        return {"model": self._work.model, "optimizer": self._work.optimizer}

    def _folders(self) -> list[Path]:
        return sorted(self._room.glob("step-*"))

    def save(self, step: int) -> None:
        self.wait()
        for old in self._folders()[:-1]:
            shutil.rmtree(old)
        folder = self._room / f"step-{step:09}"
        shutil.rmtree(folder, ignore_errors=True)  # left half by one that was killed
        self._pending = torchsnapshot.Snapshot.async_take(str(folder), self._app_state())

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def restore(self) -> bool:
        whole = [f for f in self._folders() if (f / ".snapshot_metadata").exists()]
        if not whole:
            return False
        torchsnapshot.Snapshot(str(whole[-1])).restore(self._app_state())
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self.wait()
