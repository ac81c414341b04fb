"""Node safety file: what the leading keeper told last about which nodes may be lost, as a file of
the job directory that `keepstep status` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keepstep.edge.shm.text_file import read_as, write_text
from keepstep.model.decoding import from_json
from keepstep.ports import Memory

FILE = "nodes.json"


def write_node_safety(
    memory: Memory, job_dir: Path, known: dict[str, Any], nodes_text: str | None = None
) -> bool:
    """Whole or not at all; False when not even that fits into the memory. `nodes_text`: its nodes
    as JSON, where that was made before: in a large job they are nearly all of the file."""
    return write_text(memory, job_dir / FILE, _text_of(known, nodes_text))


def _text_of(known: dict[str, Any], nodes_text: str | None) -> bytes:
    if nodes_text is None:
        return json.dumps(known).encode()
    rest = json.dumps({name: said for name, said in known.items() if name != "nodes"})
    return f'{{"nodes": {nodes_text}, {rest[1:]}'.encode()


def read_node_safety(memory: Memory, job_dir: Path) -> dict[str, Any] | None:
    """None when there is none: a job of one node, or one that has not begun."""
    found = read_as(memory, job_dir / FILE, from_json)
    return found if isinstance(found, dict) else None
