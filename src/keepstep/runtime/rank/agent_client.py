"""Agent client: a rank's connection to the agent of its node.

Comes in: a peer is lost; the ranks meet again there. Goes out: that this rank can stay in its
process when a peer is lost, that it cannot after all, that it is among its peers again, that its
training has ended. Without an agent there is no connection, and a lost peer shows only as an error
of the transport.
"""

from __future__ import annotations

from typing import Protocol

from keepstep.model.messages.agent_rank import (
    CannotStay,
    CanStay,
    ConnectionSuspect,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    ToProcess,
    TrainingEnded,
)
from keepstep.ports import Agents, Box


class AgentHearer(Protocol):
    """Who acts on what the agent says."""

    def peer_lost(self, why: str) -> None: ...

    def regroup_at(self, place: RegroupAt) -> None: ...

    def agent_gone(self) -> None: ...


class AgentClient:
    """`connect` comes first. What is said before there is a `hearer` is about lives before."""

    def __init__(self, agents: Agents, rank: int, pid: int) -> None:
        self._agents = agents
        self._rank = rank
        self._pid = pid
        self.hearer: AgentHearer | None = None  # nobody yet
        self._box: Box | None = None

    def connect(self) -> None:
        """Find the agent, if there is one; else this rank trains on without."""
        self._box = self._agents.find(self)
        self._send(RankHere(self._rank, self._pid))

    @property
    def is_connected(self) -> bool:
        return self._box is not None

    def can_stay(self) -> bool:
        """Send it; False when there is no agent to read it."""
        return self._send(CanStay(self._rank))

    def cannot_stay(self) -> None:
        self._send(CannotStay(self._rank))

    def training_ended(self) -> None:
        """Only the process's end is left, in which what was abandoned may still fail."""
        self._send(TrainingEnded(self._rank))

    def regrouped(self) -> None:
        self._send(Regrouped(self._rank))

    def suspect(self, why: str) -> None:
        """The transport failed, and nobody has said why. From any thread."""
        box = self._box
        if box is not None:
            box.poke(ConnectionSuspect(self._rank, why[:1000]))

    def _send(self, message: object) -> bool:
        return self._box is not None and self._box.send(message)

    # -- what the agent says

    def hear(self, box: Box, message: ToProcess) -> None:
        hearer = self.hearer
        if hearer is None:
            return
        match message:
            case PeerLostNotice(why=why):
                hearer.peer_lost(why)
            case RegroupAt():
                hearer.regroup_at(message)
            case _:
                pass  # of other conversations: a process that stands by

    def gone(self, box: Box) -> None:
        self._box = None
        if self.hearer is not None:
            self.hearer.agent_gone()

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            box.close()

    def release(self) -> None:
        """In a forked child: let the parent alone hold the connection."""
        if self._box is not None:
            self._box.release()
