"""Beat files: when a node's agent and its keeper last said that they do their part, as files of the
job directory. Who reads one asks how old it is (`model/beats.py`)."""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.text_file import read_as, write_text
from keepstep.model.beats import (
    AgentBeat,
    KeeperBeat,
    agent_beat_from_text,
    beat_text,
    keeper_beat_from_text,
)
from keepstep.ports import Memory

AGENT_FILE = "agent.json"
KEEPER_FILE = "keeper-beat.json"


def write_beat(memory: Memory, job_dir: Path, beat: AgentBeat | KeeperBeat) -> bool:
    """False when not even that fits into the memory."""
    name = AGENT_FILE if isinstance(beat, AgentBeat) else KEEPER_FILE
    return write_text(memory, job_dir / name, beat_text(beat))


def read_agent_beat(memory: Memory, job_dir: Path) -> AgentBeat | None:
    """None when there is none, or what is there is none."""
    return read_as(memory, job_dir / AGENT_FILE, agent_beat_from_text)


def read_keeper_beat(memory: Memory, job_dir: Path) -> KeeperBeat | None:
    """The same of the keeper."""
    return read_as(memory, job_dir / KEEPER_FILE, keeper_beat_from_text)
