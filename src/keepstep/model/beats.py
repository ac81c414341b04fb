"""Beats: that a process of a node lives and does its part, as it says every few seconds.

Values only. `runtime/beat.py` says it, `edge/shm/beat_files.py` keeps it, and `dashboard/` asks how
old it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from keepstep.model.decoding import a_record, from_json
from keepstep.model.units import S_NS

EVERY_NS = 5 * S_NS
# After so long without a beat what the process has told is no news of now.
SILENT_NS = 20 * S_NS
assert 3 * EVERY_NS < SILENT_NS <= 30 * S_NS


@dataclass(frozen=True, slots=True)
class AgentBeat:
    """An agent looks at its ranks. `at_ns` is CLOCK_MONOTONIC of that `boot` of the machine.
    `node`: in the newest attempt."""

    at_ns: int
    boot: str
    node: int


@dataclass(frozen=True, slots=True)
class KeeperBeat:
    """The keeper, process `pid`, has looked at all that came. `at_ns`, `boot`: as the agent's."""

    at_ns: int
    boot: str
    pid: int


def beat_text(beat: AgentBeat | KeeperBeat) -> bytes:
    """For a file."""
    return json.dumps(asdict(beat), separators=(",", ":")).encode()


def agent_beat_from_text(text: bytes) -> AgentBeat:
    """The inverse. Raises ValueError on anything else."""
    return a_record(AgentBeat, from_json(text))


def keeper_beat_from_text(text: bytes) -> KeeperBeat:
    """The same of a keeper's."""
    return a_record(KeeperBeat, from_json(text))
