"""Node safety file: what is read is what was written, whoever made the text of its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety, write_node_safety

KNOWN = {"policy": "copies:2", "nodes": [{"node": 0, "host": "a"}], "any_nodes": 1}


@pytest.mark.parametrize("text", [None, json.dumps(KNOWN["nodes"])])
def test_what_is_read_is_what_was_written(tmp_path: Path, text: str | None) -> None:
    assert read_node_safety(MEMORY, tmp_path) is None
    write_node_safety(MEMORY, tmp_path, {**KNOWN, "any_nodes": 2}, text)
    write_node_safety(MEMORY, tmp_path, KNOWN, text)
    assert read_node_safety(MEMORY, tmp_path) == KNOWN
