"""Parts file: what a node's agent last told of the parts of its machine, as a file of the job
directory that `keepstep status` and metrics read. Who reads it asks how old it is
(`core/parts/judgement.py`, `as_of`)."""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.text_file import read_as, write_text
from keepstep.model.parts import PartsReport, report_from_text
from keepstep.ports import Memory

FILE = "parts.json"


def write_parts(memory: Memory, job_dir: Path, report: PartsReport) -> bool:
    """False when not even that fits into the memory."""
    return write_text(memory, job_dir / FILE, report.to_text())


def read_parts(memory: Memory, job_dir: Path) -> PartsReport | None:
    """None when there is none, or what is there is none."""
    return read_as(memory, job_dir / FILE, report_from_text)
