"""Text file: a small file of a job directory, written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from keepstep.errors import MemoryBudgetError
from keepstep.ports import Memory

T = TypeVar("T")


def write_text(memory: Memory, path: Path, text: bytes) -> bool:
    """Replace what was there; False when not even that fits into the memory. Of no bytes there is
    no file."""
    fresh = path.with_name(path.name + ".new")
    try:
        region = memory.create(fresh, len(text))
    except (MemoryBudgetError, OSError):  # full, or the directory is being removed: the job is over
        return False
    region.view[:] = text
    region.close()
    try:
        memory.rename(fresh, path)
    except OSError:
        return False
    return True


def read_text(memory: Memory, path: Path) -> bytes | None:
    """None when there is none."""
    try:
        region = memory.open(path)
    except (OSError, ValueError):
        return None
    try:
        return bytes(region.view)
    finally:
        region.close()


def read_as(memory: Memory, path: Path, parse: Callable[[bytes], T]) -> T | None:
    """What `parse` makes of it; None when there is none, or nothing that it knows (ValueError)."""
    text = read_text(memory, path)
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None
