"""DLRover's Flash Checkpoint into memory, `StorageType.MEMORY`. The shared memory belongs to the
agent; the saver that an agent starts stands here alone, in a companion, and is told when the
trainer is restarted what `dlrover-run` tells it. What `dlrover-run` itself takes is not in the
figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.workload import Workload


def _environment(room: Path) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = f"peers-{room.name}"  # names sockets and shared memory
    os.environ["ROLE_NAME"] = "dlrover-trainer"  # the trainer starts no saver of its own


def companion(room: Path) -> Iterator[None]:
    """The agent's saver. Goes on each time before the trainer is started again."""
    _environment(room)
    from dlrover.python.common.multi_process import SOCKET_TMP_DIR
    from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

    AsyncCheckpointSaver.start_async_saving_ckpt()
    try:
        while True:
            yield
            AsyncCheckpointSaver.reset()
    finally:
        saver = AsyncCheckpointSaver.get_ckpt_saver()
        if saver is not None:
            saver.close()  # its shared memory goes with it
        shutil.rmtree(Path(SOCKET_TMP_DIR) / os.environ["TORCHELASTIC_RUN_ID"], ignore_errors=True)


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        _environment(room)
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._memory = StorageType.MEMORY
        self._work, self._skipped = workload, 0
        (room / "disk").mkdir(exist_ok=True)
        self._checkpointer = DdpCheckpointer(str(room / "disk"))

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, self._work.state(), storage_type=self._memory)
        engine = self._checkpointer._engine
        self._skipped += engine._cached_step != step

    def wait(self) -> None:
        pass  # the copy is made within the call

    def restore(self) -> bool:
        state = self._checkpointer.load_checkpoint()
        if not state:
            return False
        self._work.load(state)
        return True

    def skipped(self) -> int:
        return self._skipped

    def close(self) -> None:
        pass  # the companion keeps the memory
