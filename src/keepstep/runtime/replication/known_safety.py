"""Known safety: what the leader told last about which nodes may be lost, as a file of this node's.

Comes in: the leader's words. Goes out: the file that `keepstep status` reads. It outlives the mesh
in which it was told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keepstep.core.redundancy.node_safety import node_lines, spell_out
from keepstep.edge.shm.node_safety_file import write_node_safety
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import NodeRange, SafetyWord
from keepstep.ports import Memory


class KnownSafety:
    """What the leader told last about which nodes may be lost, of whichever mesh, as a file."""

    def __init__(self, memory: Memory, job_dir: Path) -> None:
        self._memory, self._job_dir = memory, job_dir
        self._known: dict[str, Any] | None = None
        # the lines of all nodes: of which mesh, who was apart, and the same as text
        self._told: tuple[int, tuple[NodeRange, ...]] | None = None
        self._nodes: list[dict[str, Any]] = []
        self._nodes_text = ""

    def receive(self, word: SafetyWord, mesh: Mesh) -> None:
        """The leader of that mesh says so."""
        told = mesh.version, word.apart
        if told != self._told:
            self._told = told
            self._nodes = node_lines(word, mesh)
            self._nodes_text = json.dumps(self._nodes)
        self._known = spell_out(word, mesh, self._known, self._nodes)
        write_node_safety(self._memory, self._job_dir, self._known, self._nodes_text)
