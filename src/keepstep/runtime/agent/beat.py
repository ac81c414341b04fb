"""Beat: says every few seconds that this node's agent looks at its ranks.

Comes in: that the agent looks. Goes out: the beat file. Invariant: nobody else calls it, so an
agent that is stopped, dead or stuck says nothing.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.agent_beat_file import write_beat
from keepstep.model.agent_beat import EVERY_NS, AgentBeat
from keepstep.ports import Clock, Memory


class Beat:
    """Of one agent."""

    def __init__(self, clock: Clock, memory: Memory, job_dir: Path) -> None:
        self._clock, self._memory, self._job_dir = clock, memory, job_dir
        self._due_ns = 0

    def tick(self, node: int) -> None:
        """It has looked, or is about to."""
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + EVERY_NS
            write_beat(self._memory, self._job_dir, AgentBeat(now_ns, self._clock.boot(), node))
