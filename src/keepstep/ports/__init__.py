"""Ports: what the runtime asks of the world, as Protocols of few methods.

`edge/` has the world itself; `sim/` has one of virtual time, in which the same ranks, agents,
keepers and persisters run unchanged. What both must keep is tested once, for both, in
`tests/contracts/`. Slots and pages are formats laid over a `Memory`, the same in both.

Who runs an object written against these ports calls it from one loop at a time, and brings all
answers (`then`, `hear`, `gone`, timers) from that loop. No answer comes before the call that asked
for it has returned.
"""

from __future__ import annotations

from keepstep.ports.agent import (
    KV,
    MeetingPlaces,
    NodeProvider,
    OpenKV,
    PartProber,
    Probes,
    RankProcesses,
)
from keepstep.ports.boxes import (
    Agents,
    Box,
    BoxServer,
    Hearer,
    KeeperDoor,
    Keepers,
    MessageCodec,
    ServeBoxes,
)
from keepstep.ports.keeper import (
    Checkpoints,
    ChildConnection,
    Links,
    OpenLinks,
    Persisters,
    Receiver,
)
from keepstep.ports.machine import Acts, Clock, Executor, Journal, Memory, Region, Timer, Timers
from keepstep.ports.persister import (
    CheckpointDraft,
    CheckpointFormat,
    CheckpointStore,
    StoredCheckpoint,
)
from keepstep.ports.rank import DeviceMarks, Gathered, Groups, LiveState, StateCopy, StepNumbers

__all__ = [
    "KV",
    "Acts",
    "Agents",
    "Box",
    "BoxServer",
    "CheckpointDraft",
    "CheckpointFormat",
    "CheckpointStore",
    "Checkpoints",
    "ChildConnection",
    "Clock",
    "DeviceMarks",
    "Executor",
    "Gathered",
    "Groups",
    "Hearer",
    "Journal",
    "KeeperDoor",
    "Keepers",
    "Links",
    "LiveState",
    "MeetingPlaces",
    "Memory",
    "MessageCodec",
    "NodeProvider",
    "OpenKV",
    "OpenLinks",
    "PartProber",
    "Persisters",
    "Probes",
    "RankProcesses",
    "Receiver",
    "Region",
    "ServeBoxes",
    "StateCopy",
    "StepNumbers",
    "StoredCheckpoint",
    "Timer",
    "Timers",
]
