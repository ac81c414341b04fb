"""What an agent and the keeper of its node say to each other, over a unix socket, beside what a
rank says too (`keeper_rank.py`: Listen, BeginMesh, CountTraffic)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep.model.bounds import Count, Rank, Sentence
from keepstep.model.messages.keeper_rank import (
    BeginMesh,
    CannotListen,
    CountTraffic,
    Listen,
    Listening,
    NotUnderstood,
    TrafficCounted,
)

# -- an agent to its keeper


@dataclass(frozen=True, slots=True)
class AgentHere:
    """This connection is the agent's."""

    KIND: ClassVar = "agent"
    pid: Rank


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over on this node: write the last checkpoint, remove the memory, leave."""

    KIND: ClassVar = "end"
    ok: bool
    why: Sentence


# -- a keeper to its agent


@dataclass(frozen=True, slots=True)
class MeshKnown:
    """The keeper knows this mesh: what ranks say from now on is about it."""

    KIND: ClassVar = "mesh-known"
    mesh_version: Count


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Another node's keeper has been missing for too long."""

    KIND: ClassVar = "peer-dead"
    mesh_version: Count
    node: Rank
    why: Sentence


@dataclass(frozen=True, slots=True)
class MemoryKept:
    """The job's memory is not removed yet, though the job is over."""

    KIND: ClassVar = "kept"
    why: Sentence


FromAgent = AgentHere | JobEnded | Listen | BeginMesh | CountTraffic | NotUnderstood
ToAgent = (
    MeshKnown | PeerDead | MemoryKept | Listening | CannotListen | TrafficCounted | NotUnderstood
)
