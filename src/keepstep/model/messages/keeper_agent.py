"""What an agent and the keeper of its node say to each other, over a unix socket, beside what a
rank says and hears too (`keeper_rank.py`: Listen, BeginMesh, AreYouThere, CountTraffic;
VoteRefused)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep.model.bounds import Count, Rank, Sentence
from keepstep.model.messages.keeper_rank import (
    AreYouThere,
    BeginMesh,
    CannotListen,
    CountTraffic,
    Listen,
    Listening,
    NotUnderstood,
    StillHere,
    TrafficCounted,
    VoteRefused,
)

# -- an agent to its keeper


@dataclass(frozen=True, slots=True)
class AgentHere:
    """This connection is the agent's."""

    KIND: ClassVar[str] = "agent"
    pid: Rank


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over on this node: write the last checkpoint; then, when it ended well, remove the
    memory and leave, else answer `MemoryKept`."""

    KIND: ClassVar[str] = "end"
    ok: bool
    why: Sentence


@dataclass(frozen=True, slots=True)
class RemoveMemory:
    """A person wants the memory gone, however the job ended: write the last checkpoint, remove the
    memory, leave."""

    KIND: ClassVar[str] = "remove"
    why: Sentence


# -- a keeper to its agent


@dataclass(frozen=True, slots=True)
class MeshKnown:
    """The keeper knows this mesh: what ranks say from now on is about it."""

    KIND: ClassVar[str] = "mesh-known"
    mesh_version: Count


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Another node's keeper has been missing for too long."""

    KIND: ClassVar[str] = "peer-dead"
    mesh_version: Count
    node: Rank
    why: Sentence


@dataclass(frozen=True, slots=True)
class MemoryKept:
    """The job is over and failed: its last checkpoint is written where it has a store, and its
    memory stays for the grace time."""

    KIND: ClassVar[str] = "kept"
    why: Sentence


@dataclass(frozen=True, slots=True)
class StillWriting:
    """The job is over and failed, and its last checkpoint is being written: `MemoryKept` comes
    behind it. `why`: what the keeper does meanwhile, and from where the job would go on."""

    KIND: ClassVar[str] = "writing"
    why: Sentence


FromAgent = (
    AgentHere
    | JobEnded
    | RemoveMemory
    | Listen
    | BeginMesh
    | AreYouThere
    | CountTraffic
    | NotUnderstood
)
ToAgent = (
    MeshKnown
    | PeerDead
    | MemoryKept
    | StillWriting
    | VoteRefused
    | Listening
    | CannotListen
    | StillHere
    | TrafficCounted
    | NotUnderstood
)
