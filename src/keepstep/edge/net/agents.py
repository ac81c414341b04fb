"""Agents: how a rank finds the agent of its node, over the socket that its environment names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from keepstep.edge.net import boxes
from keepstep.edge.os.loop import Loop
from keepstep.model.launch import AGENT_SOCKET
from keepstep.ports import Box, Hearer, MessageCodec


class NodeAgents:
    """See `ports.Agents`. `codec`: of a process's part in what it and an agent say."""

    def __init__(
        self, loop: Loop, environ: Mapping[str, str], codec: MessageCodec, tell: boxes.Tell
    ) -> None:
        self._loop = loop
        self._path = environ.get(AGENT_SOCKET)
        self._codec = codec
        self._tell = tell

    def find(self, hearer: Hearer) -> Box | None:
        if not self._path:
            return None
        path = Path(self._path)
        try:
            return boxes.connect(self._loop, path, self._codec, hearer, self._tell)
        except OSError:  # the agent has died: its ranks train on without one
            return None
