"""NVIDIA's resiliency extension: local checkpoints, asynchronous through a forked process.

Its basic state dict takes CUDA tensors only, so the state is wrapped by a subclass that stays on
the CPU. Of torch.cuda it asks two things on this road, whatever the tensors are: to synchronize,
for which there is nothing here, and the current device, which is the CPU. Where there is no device,
its copy to the host copies nothing: the fork is what keeps the state apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)
from torch.utils._pytree import tree_map

from benchmarks.peers.workload import Workload


class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]
    def __init__(self, state_dict: dict[str, Any]) -> None:
        # It takes tensors out of the containers, and an optimizer's are its live ones.
        self.state_dict = tree_map(lambda leaf: leaf, state_dict)
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def without_device() -> None:
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        without_device()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._work = workload
        self._manager = LocalCheckpointManager(room)
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, step: int) -> None:
        self.wait()
        request = self._manager.save(OnCpu(self._work.state()), step, is_async=True)
        self._queue.schedule_async_request(request)

    def wait(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def restore(self) -> bool:
        if self._manager.find_latest() == -1:
            return False
        state, _ = self._manager.load()
        self._work.load(state.state_dict)
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self.wait()
        self._queue.close()


class Pair:
    """Two ranks, one clique: each writes both states, into folders in memory."""

    def __init__(self, workload: Workload, room: Path) -> None:
        without_device()
        self._work = workload
        clique = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._manager = LocalCheckpointManager(room, repl_strategy=clique)

    def copy(self, step: int) -> None:
        self._manager.save(OnCpu(self._work.state()), step)
