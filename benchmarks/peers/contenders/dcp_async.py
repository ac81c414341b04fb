"""torch.distributed.checkpoint.async_save, its thread and default staging: each save waits for the
one before, and a folder counts once its `.metadata` is there. Two are kept."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._work, self._room = workload, room
        self._pending: Future[Any] | None = None

    def _folders(self) -> list[Path]:
        return sorted(self._room.glob("step-*"))

    def save(self, step: int) -> None:
        self.wait()
        for old in self._folders()[:-1]:
            shutil.rmtree(old)
        folder = self._room / f"step-{step:09}"
        shutil.rmtree(folder, ignore_errors=True)  # left half by one that was killed
        self._pending = dcp.async_save(self._work.state(), checkpoint_id=str(folder))

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def restore(self) -> bool:
        whole = [folder for folder in self._folders() if (folder / ".metadata").exists()]
        if not whole:
            return False
        state = self._work.state()
        dcp.load(state, checkpoint_id=str(whole[-1]))
        self._work.load(state)
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self.wait()
        dist.destroy_process_group()
