"""Agent beat file: when a node's agent last said that it looks at its ranks, as a file of the job
directory. Who reads it asks how old it is (`model/agent_beat.py`)."""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.text_file import read_as, write_text
from keepstep.model.agent_beat import AgentBeat, beat_from_text
from keepstep.ports import Memory

FILE = "agent.json"


def write_beat(memory: Memory, job_dir: Path, beat: AgentBeat) -> bool:
    """False when not even that fits into the memory."""
    return write_text(memory, job_dir / FILE, beat.to_text())


def read_beat(memory: Memory, job_dir: Path) -> AgentBeat | None:
    """None when there is none, or what is there is none."""
    return read_as(memory, job_dir / FILE, beat_from_text)
