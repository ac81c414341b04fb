"""Agents: how a rank finds the agent of its node, over the socket that its environment names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from keepstep.core.wire.codec import Codec
from keepstep.edge.net import boxes
from keepstep.edge.os.loop import Loop
from keepstep.model.launch import AGENT_SOCKET
from keepstep.model.messages.agent_rank import FromProcess, ToProcess
from keepstep.ports import Box, Hearer

HEARS: Codec[Any] = Codec(get_args(ToProcess))
SAYS: Codec[Any] = Codec(get_args(FromProcess))


class NodeAgents:
    """See `ports.Agents`."""

    def __init__(self, loop: Loop, environ: Mapping[str, str], tell: boxes.Tell) -> None:
        self._loop = loop
        self._path = environ.get(AGENT_SOCKET)
        self._tell = tell

    def find(self, hearer: Hearer) -> Box | None:
        if not self._path:
            return None
        try:
            return boxes.connect(self._loop, Path(self._path), HEARS, SAYS, hearer, self._tell)
        except OSError:  # the agent has died: its ranks train on without one
            return None
