"""Begun run: which run of the job a rank's memory belongs to, where the run was asked to start
over.

A small file beside the rank's slots. Whoever is restarted within that run finds its own run there,
and goes on from its own progress.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.slot import rank_dir
from keepstep.edge.shm.text_file import read_text, write_text
from keepstep.ports import Memory


def has_begun(memory: Memory, job_dir: Path, rank: int, run: str) -> bool:
    """Whether the rank has begun this run."""
    return read_text(memory, _path(job_dir, rank)) == run.encode()


def note_begun(memory: Memory, job_dir: Path, rank: int, run: str) -> None:
    """The rank begins it now. Where not even that fits into the memory, a restart starts over once
    more."""
    write_text(memory, _path(job_dir, rank), run.encode())


def _path(job_dir: Path, rank: int) -> Path:
    return rank_dir(job_dir, rank) / "run"
