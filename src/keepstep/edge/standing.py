"""Standing: what the leading keeper last told about all nodes, as a file of the job directory that `keepstep status` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "nodes.json"


def write_standing(job_dir: Path, standing: dict[str, Any]) -> None:
    """Whole or not at all."""
    fresh = job_dir / (FILE + ".new")
    fresh.write_text(json.dumps(standing))
    os.replace(fresh, job_dir / FILE)


def read_standing(job_dir: Path) -> dict[str, Any] | None:
    """None when there is none: a job of one node, or one that has not begun."""
    try:
        found = json.loads((job_dir / FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
