"""Agent beat: that a node's agent lives and looks at its ranks, as it says every few seconds.

Values only. `runtime/agent/beat.py` says it, `edge/shm/agent_beat_file.py` keeps it, and
`dashboard/slowness.py` asks how old it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from keepstep.model.decoding import a_record, from_json
from keepstep.model.units import S_NS

EVERY_NS = 5 * S_NS
# After so long without a beat what the agent has told is no news of now.
SILENT_NS = 20 * S_NS
assert 3 * EVERY_NS < SILENT_NS <= 30 * S_NS


@dataclass(frozen=True, slots=True)
class AgentBeat:
    """`at_ns` is CLOCK_MONOTONIC of that `boot` of the machine. `node`: in the newest attempt."""

    at_ns: int
    boot: str
    node: int

    def to_text(self) -> bytes:
        """For a file."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def beat_from_text(text: bytes) -> AgentBeat:
    """The inverse. Raises ValueError on anything else."""
    return a_record(AgentBeat, from_json(text))
