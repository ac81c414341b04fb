"""Rendezvous: how the agents of all nodes come together for one attempt after the other.

Comes in: that this node's ranks wait or are dead and its keeper listens (`join`), and what is to be
said about the present attempt. Goes out, to the `RendezvousHearer`: that an attempt is formed and
its ranks may start; its verdict; that the nodes have no place to meet any more. Of one node here;
of several in `multi_node.py`.

Invariant: for one attempt `formed` comes before `ended`, and that before `formed` of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from keepstep.errors import KeeperError, MeetingError
from keepstep.model.attempts import Verdict
from keepstep.model.failure import Failure
from keepstep.model.launch import Launch, RankAssignment
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import Listening
from keepstep.ports import Timer
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.tasks import Answer
from keepstep.runtime.agent.world import AgentWorld


@dataclass(frozen=True, slots=True)
class Formed:
    """All nodes are there. `mesh` is for the keeper; None when there is one node. `keep`: ranks
    that can stay in their process do, and there are such. `failures`: what the nodes have told of
    the attempt before."""

    place: RankAssignment
    mesh: Mesh | None
    keep: bool = False
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """This node's ranks wait for the next attempt or are dead, its keeper listens there. `leave`:
    as a spare, if another one comes in its place. `failure`: what the other nodes are to know of
    the attempt before. `stays`: some of its ranks can stay in their process."""

    keeper: Listening | None
    leave: bool = False
    failure: Failure | None = None
    stays: bool = False

    @property
    def listening(self) -> Listening:
        """Where its keeper listens. Raises KeeperError when nobody has asked it to."""
        if self.keeper is None:
            raise KeeperError("this node's keeper does not listen to the keepers of other nodes")
        return self.keeper


class RendezvousHearer(Protocol):
    """Who acts on it: the agent."""

    def formed(self, formed: Formed) -> None: ...

    def ended(self, verdict: Verdict) -> None:
        """The verdict about the attempt this node took part in, or about the job."""

    def meeting_lost(self, why: str, is_refused: bool = False) -> None:
        """There is no place to meet any more, or none for this node as it is. This is the last
        call."""


class Rendezvous(Protocol):
    def follow(self, attempt: int) -> None:
        """Another agent was here, and its ranks, in that attempt, are dead: before the first
        `join`."""

    def join(self, request: JoinRequest) -> None:
        """Take part in the next attempt."""

    def board(self, attempt: int) -> EvidenceBoard | None:
        """Where the nodes of that attempt show each other what they see; None when there are no
        others."""

    def say(self, attempt: int, verdict: Verdict) -> None: ...

    def ended_well(self, attempt: int, why: str) -> None:
        """This node's ranks have."""

    def close(self, last: Verdict | None, within_ns: int) -> Answer[None]:
        """Nothing is told any more; `last` is for the others. The answer comes when it is said and,
        if they meet here, the others have heard it, or the time is over."""


class SingleNode:
    """One node: nobody to wait for."""

    def __init__(self, world: AgentWorld, launch: Launch, hearer: RendezvousHearer) -> None:
        self._world = world
        self._launch = launch
        self._hearer = hearer
        self._attempt = 0
        self._forming: Timer | None = None
        self._keep = False
        self._wait_ns = 0

    def follow(self, attempt: int) -> None:
        self._attempt = attempt + 1

    def join(self, request: JoinRequest) -> None:
        host = self._launch.master_addr
        try:
            port = self._world.meeting_places.open(host, self._launch.master_port)
        except MeetingError as error:
            lost = str(error)
            self._world.timers.after(0, lambda: self._hearer.meeting_lost(lost))
            return
        place = RankAssignment(
            attempt=self._attempt,
            node=0,
            nodes=1,
            first_rank=0,
            world_size=self._launch.ranks,
            master_addr=host,
            master_port=port,
        )
        self._attempt += 1
        formed = Formed(place, None, self._keep and request.stays)
        self._forming = self._world.timers.after(self._wait_ns, lambda: self._hearer.formed(formed))

    def board(self, attempt: int) -> EvidenceBoard | None:
        return None

    def say(self, attempt: int, verdict: Verdict) -> None:
        self._keep, self._wait_ns = verdict.keep, verdict.wait_ns

    def ended_well(self, attempt: int, why: str) -> None:
        self._world.timers.after(0, lambda: self._hearer.ended(Verdict("done", why)))

    def close(self, last: Verdict | None, within_ns: int) -> Answer[None]:
        if self._forming is not None:
            self._forming.cancel()
        self._world.meeting_places.close()
        closed: Answer[None] = Answer()
        closed.give(None)
        return closed
