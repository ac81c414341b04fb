"""LMResiliency's in-memory checkpoints, alone in a world of one: no replica. Its memory ends with
the trainer; a planned end flushes it to the node's folder, a kill finds what was flushed before,
by default every 100 saves."""

from __future__ import annotations

from pathlib import Path

from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

from benchmarks.peers.workload import Workload


class Contender:
    def __init__(self, workload: Workload, room: Path) -> None:
        self._work = workload
        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(
                interval=1,
                disk_folder=str(room),
                run_id=f"peers-{room.name}",
                pin_memory=False,  # there is no device
            )
        )

    def save(self, step: int) -> None:
        self._manager.save(self._work.state(), step)

    def wait(self) -> None:
        self._manager.maybe_wait()

    def restore(self) -> bool:
        found = self._manager.load()
        if found is None:
            return False
        self._work.load(found[0])
        return True

    def skipped(self) -> int:
        return 0

    def close(self) -> None:
        self._manager.flush_for_restart()
        self._manager.close()


class Pair:
    """Two ranks, each with the other's replica."""

    def __init__(self, workload: Workload, room: Path) -> None:
        self._work = workload
        config = InMemoryCkptConfig(
            interval=1, disk_folder=str(room), run_id=f"pair-{room.name}", pin_memory=False
        )
        self._manager = InMemoryCheckpointManager(config)

    def copy(self, step: int) -> None:
        self._manager.save(self._work.state(), step)
        assert self._manager.finalize_replication(), "the two sides' steps differ"
