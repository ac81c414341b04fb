"""torch.distributed.checkpoint.async_save, its thread and default staging: each save waits for the
one before, and a folder counts once its `.metadata` is there. Two are kept."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.peers.step_folders import StepFolders
from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._work, self._folders = workload, StepFolders(room, ".metadata")
        self._pending: Future[Any] | None = None

    def save(self, step: int) -> None:
        self.wait()
        folder = self._folders.make_room(step)
        self._pending = dcp.async_save(self._work.state(), checkpoint_id=str(folder))

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def restore(self) -> bool:
        newest = self._folders.newest()
        if newest is None:
            return False
        state = self._work.state()
        dcp.load(state, checkpoint_id=str(newest))
        self._work.load(state)
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self.wait()
        dist.destroy_process_group()
