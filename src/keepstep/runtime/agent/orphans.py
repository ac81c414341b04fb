"""Orphans: what an agent that was killed has left: its ranks, which nobody watches.

Each agent writes down which processes its ranks are. The one that follows it ends them: their state
lies in memory, and two lives of a rank must not be.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.edge.shm.text_file import read_text, write_text
from keepstep.model.bounds import Length, Rank, StepNumber
from keepstep.ports import Memory

FILE = "ranks.json"


@dataclass(frozen=True, slots=True)
class RankList:
    """Which processes the ranks of this node are, in which attempt, and whose."""

    KIND: ClassVar = "ranks"
    agent: Rank
    attempt: StepNumber
    pids: Annotated[tuple[Rank, ...], Length(100_000)]


CODEC: Codec[Any] = Codec([RankList])


def write_ranks(
    memory: Memory, job_dir: Path, agent_pid: int, attempt: int, pids: Collection[int]
) -> None:
    """For whoever follows this agent."""
    listed = RankList(agent_pid, attempt, tuple(sorted(pids)))
    write_text(memory, job_dir / FILE, CODEC.encode(listed))


def read_ranks(memory: Memory, job_dir: Path) -> RankList | None:
    """What the agent before has written; None when there was none."""
    text = read_text(memory, job_dir / FILE)
    try:
        return None if text is None else CODEC.decode(text)
    except NotAMessage:  # another release's
        return None
