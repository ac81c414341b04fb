"""Begun run: which run of the job a rank's memory belongs to, where the run was asked to start
over; and which launch of it was the last to train here.

Two small files beside the rank's slots. Whoever is restarted within that run finds its own run
there, and goes on from its own progress. Whoever does not find its own launch cannot know what the
job has done elsewhere since.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.slot import rank_dir
from keepstep.edge.shm.text_file import read_text, write_text
from keepstep.ports import Memory

LAUNCH = "launch"


def has_begun(memory: Memory, job_dir: Path, rank: int, run: str) -> bool:
    """Whether the rank has begun this run."""
    return read_text(memory, _path(job_dir, rank)) == run.encode()


def note_begun(memory: Memory, job_dir: Path, rank: int, run: str) -> None:
    """The rank begins it now. Where not even that fits into the memory, a restart starts over once
    more."""
    write_text(memory, _path(job_dir, rank), run.encode())


def is_of(memory: Memory, job_dir: Path, rank: int, launch: str) -> bool:
    """Whether this launch was the last to train on what the rank's memory holds."""
    return read_text(memory, rank_dir(job_dir, rank) / LAUNCH) == launch.encode()


def note_launch(memory: Memory, job_dir: Path, rank: int, launch: str) -> None:
    """It trains on it now. Where that does not fit into the memory, a restart asks the store."""
    write_text(memory, rank_dir(job_dir, rank) / LAUNCH, launch.encode())


def _path(job_dir: Path, rank: int) -> Path:
    return rank_dir(job_dir, rank) / "run"
