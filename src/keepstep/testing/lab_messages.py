"""What is said to a lab from another terminal, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep.core.wire.conversations import Conversation
from keepstep.model.bounds import Count, Rank, Sentence, Text
from keepstep.model.messages.keeper_rank import NotUnderstood


@dataclass(frozen=True, slots=True)
class ListNodes:
    """Which nodes are there?"""

    KIND: ClassVar[str] = "list"


@dataclass(frozen=True, slots=True)
class KillNode:
    """Lose that node: its processes, its memory, its link."""

    KIND: ClassVar[str] = "kill"
    node: Rank


@dataclass(frozen=True, slots=True)
class LabNode:
    """One node; without an address it is lost."""

    node: Rank
    address: Text | None
    processes: Count


@dataclass(frozen=True, slots=True)
class LabNodes:
    """All nodes of the lab."""

    KIND: ClassVar[str] = "lab"
    nodes: tuple[LabNode, ...]


@dataclass(frozen=True, slots=True)
class NodeKilled:
    """It is lost."""

    KIND: ClassVar[str] = "killed"
    why: Sentence


@dataclass(frozen=True, slots=True)
class LabRefused:
    """It is not done."""

    KIND: ClassVar[str] = "refused"
    why: Sentence


ToLab = ListNodes | KillNode | NotUnderstood
FromLab = LabNodes | NodeKilled | LabRefused | NotUnderstood
LAB_WITH_ASKER = Conversation(ToLab, FromLab)
ASKER_WITH_LAB = Conversation(FromLab, ToLab)
