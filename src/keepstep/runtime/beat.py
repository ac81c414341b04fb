"""Beat: says every few seconds that an agent looks at its ranks, or a keeper at what came.

Comes in: that it has looked. Goes out: the beat file. Invariant: nobody but the loop that looks
calls it, so a process that is stopped, dead or stuck says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keepstep.edge.shm.beat_files import write_beat
from keepstep.model.beats import EVERY_NS, AgentBeat, KeeperBeat
from keepstep.ports import Clock, Memory


class Beat:
    """Of one process."""

    def __init__(
        self,
        clock: Clock,
        memory: Memory,
        job_dir: Path,
        made: Callable[[int, str], AgentBeat | KeeperBeat],
    ) -> None:
        """made: of the moment and the machine's boot."""
        self._clock, self._memory, self._job_dir = clock, memory, job_dir
        self._made = made
        self._due_ns = 0

    @property
    def is_due(self) -> bool:
        """Whether `tick` would say something."""
        return self._clock.monotonic_ns() >= self._due_ns

    def tick(self) -> None:
        """It has looked, or is about to."""
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + EVERY_NS
            write_beat(self._memory, self._job_dir, self._made(now_ns, self._clock.boot()))
