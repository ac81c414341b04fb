"""Orbax's `CheckpointManager`, asynchronous, two kept. It knows arrays of JAX and numpy, so the
tensors go in as numpy views of the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import torch

from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        self._work = workload
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(room / "orbax", options=options)

    def _arrays(self) -> dict[str, Any]:
        # A number alone is no array for it: moments have a step of no dimension.
        found = (tensor.detach().reshape(-1).numpy() for tensor in self._work.tensors())
        return {f"tensor-{number}": array for number, array in enumerate(found)}

    def save(self, step: int) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(self._arrays()))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self) -> bool:
        step = self._manager.latest_step()
        if step is None:
            return False
        arrays = self._arrays()
        found = self._manager.restore(step, args=ocp.args.StandardRestore(arrays))
        for name, array in arrays.items():
            torch.from_numpy(array).copy_(torch.from_numpy(found[name]))
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
