"""Orphans: what an agent that was killed has left: its ranks, which nobody watches.

Before an agent starts ranks it writes down who it is. The one that follows it ends whatever that
one had started: their state lies in memory, and two lives of a rank must not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.edge.shm.text_file import read_text, write_text
from keepstep.model.bounds import Rank, StepNumber
from keepstep.ports import Memory

FILE = "agent.json"


@dataclass(frozen=True, slots=True)
class RankParent:
    """Which process is the parent of this node's ranks, in which attempt."""

    KIND: ClassVar = "rank-parent"
    agent: Rank
    attempt: StepNumber


CODEC: Codec[Any] = Codec([RankParent])


def write_rank_parent(memory: Memory, job_dir: Path, agent_pid: int, attempt: int) -> None:
    """For whoever follows this agent."""
    write_text(memory, job_dir / FILE, CODEC.encode(RankParent(agent_pid, attempt)))


def read_rank_parent(memory: Memory, job_dir: Path) -> RankParent | None:
    """What the agent before has written; None when it had started no rank."""
    text = read_text(memory, job_dir / FILE)
    try:
        return None if text is None else CODEC.decode(text)
    except NotAMessage:  # another release's
        return None
