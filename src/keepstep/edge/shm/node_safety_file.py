"""Node safety file: what the leading keeper told last about which nodes may be lost, as a file of
the job directory that `keepstep status` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keepstep.ports import Memory

FILE = "nodes.json"


def write_node_safety(memory: Memory, job_dir: Path, known: dict[str, Any]) -> None:
    """Whole or not at all. Raises MemoryBudgetError when it does not fit."""
    text, fresh = json.dumps(known).encode(), job_dir / (FILE + ".new")
    region = memory.create(fresh, len(text))
    region.view[:] = text
    region.close()
    memory.rename(fresh, job_dir / FILE)


def read_node_safety(memory: Memory, job_dir: Path) -> dict[str, Any] | None:
    """None when there is none: a job of one node, or one that has not begun."""
    try:
        region = memory.open(job_dir / FILE)
        try:
            found = json.loads(bytes(region.view))
        finally:
            region.close()
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
