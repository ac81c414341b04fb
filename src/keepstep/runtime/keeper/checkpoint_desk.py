"""Checkpoint desk: where ranks of this node ask for checkpoints, and the leader of a mesh for acts.

Comes in: requests, and words of other nodes about them. Goes out: the same to `Checkpointing` where
this keeper leads, else to the keeper that does; the answers, to the ranks that asked.

Invariant: every request of a rank here is answered once, also when the leader dies over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from keepstep.core.resume.cut import Holding
from keepstep.model.checkpoint import Timeline
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.messages.peers import (
    ActAnswer,
    ActOrdered,
    CheckpointAnswer,
    CheckpointAsked,
    CheckpointBody,
)
from keepstep.model.messages.persister import ActName
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.ports import Box, Clock
from keepstep.runtime.keeper.checkpointing import Checkpointing, SnapshotParts

# how long a node that follows waits at the end until the leader says that the last checkpoint is
# written
LAST_ANSWER_NS = 60 * S_NS
Send = Callable[[int, CheckpointBody], None]


class CheckpointNodes(Protocol):
    """The nodes of a mesh: `runtime/replication/mesh_state.py`."""

    @property
    def mesh(self) -> Mesh:
        """Which they are."""

    @property
    def parts(self) -> SnapshotParts | None:
        """What ranks of other nodes keep for those here."""

    def send_checkpoint(self, node: int, body: CheckpointBody) -> None:
        """A word about writing a checkpoint."""


class DistantAsker:
    """A rank of another node, as `Checkpointing` sees it."""

    def __init__(self, send: Send, node: int) -> None:
        self._send, self._node = send, node

    def send(self, done: CheckpointDone, /) -> bool:
        """What became of it."""
        self._send(self._node, CheckpointAnswer(done.ticket, done.ok, done.step, done.why))
        return True


@dataclass
class _Passed:
    """A request that was passed on to the leader. `box`: None when nobody waits for it here."""

    box: Box | None
    ticket: int

    def answer(self, ok: bool, step: int | None, why: str) -> None:
        if self.box is not None:
            self.box.send(CheckpointDone(self.ticket, ok, step, why))


class CheckpointDesk:
    """One keeper's."""

    def __init__(self, checkpointing: Checkpointing, clock: Clock, has_store: bool) -> None:
        self._checkpointing, self._clock, self._has_store = checkpointing, clock, has_store
        self._nodes: CheckpointNodes | None = None  # None: a job of one node
        self._tickets = itertools.count(1)
        self._passed: dict[int, _Passed] = {}  # by the number that it has among nodes
        self._leader_gone = ""  # why, while the leading keeper cannot be asked
        self._last_want_ns = 0

    @property
    def pending(self) -> bool:
        """Whether this keeper has anything to write."""
        return self._checkpointing.pending

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for at the end."""
        waited_ns = self._clock.monotonic_ns() - self._last_want_ns
        return not self.pending and not (self._passed and waited_ns < LAST_ANSWER_NS)

    # -- requests of this node

    @property
    def stored_step(self) -> int | None:
        """The newest that is known to be in the store: to the keeper that leads."""
        return self._checkpointing.stored_step

    def want_newest(self, why: str) -> None:
        """The keeper's own request: the newest step, in the store."""
        self.ask(None, None, why, 0)
        self._last_want_ns = self._clock.monotonic_ns()

    def ask(
        self, box: Box | None, step: int | None, why: str, ticket: int, steps_follow: bool = False
    ) -> None:
        """Want `step` (None: the newest) in the store; `box` hears the outcome with its ticket.
        `steps_follow`: as in `WantCheckpoint`."""
        nodes = self._nodes
        if nodes is None or nodes.mesh.leads or not self._has_store:
            self._checkpointing.ask(box, step, why, ticket, steps_follow)
            return
        passed = _Passed(box, ticket)
        if self._leader_gone:
            passed.answer(False, None, self._leader_gone)
            return
        number = next(self._tickets)
        self._passed[number] = passed
        nodes.send_checkpoint(LEADER, CheckpointAsked(number, step, why, steps_follow))

    def forget(self, box: Box) -> None:
        """The asker is gone; what it asked for is still done."""
        self._checkpointing.forget(box)
        for passed in self._passed.values():
            if passed.box is box:
                passed.box = None

    def hurry(self) -> None:
        """See `Checkpointing`."""
        self._checkpointing.hurry()

    def advance(self, holdings: Sequence[Holding], world_size: int | None, anybody: bool) -> None:
        """See `Checkpointing`."""
        self._checkpointing.advance(holdings, world_size, anybody)

    def goes_on(self, timeline: Timeline, from_store: bool) -> None:
        """See `Checkpointing`."""
        self._checkpointing.goes_on(timeline, from_store)

    def doubt(self, first: int) -> None:
        """See `Checkpointing`."""
        self._checkpointing.doubt(first)

    # -- other nodes

    def join_mesh(self, nodes: CheckpointNodes) -> None:
        """A mesh of these nodes begins. What was asked before is answered in it."""
        self._nodes = nodes
        self._leader_gone = ""
        self._checkpointing.join_mesh(nodes.mesh, self._order, nodes.parts)

    def _order(self, node: int, act: ActName, stamp: Stamp, attempt: int, is_urgent: bool) -> None:
        self._send(node, ActOrdered(act, stamp, attempt, is_urgent))

    def _send(self, node: int, body: CheckpointBody) -> None:
        if self._nodes is not None:
            self._nodes.send_checkpoint(node, body)

    def leader_is_back(self) -> None:
        """It can be asked again."""
        self._leader_gone = ""

    def node_gone(self, node: int, why: str) -> None:
        """What was asked of that node's keeper will not be answered."""
        self._checkpointing.node_gone(node, why)
        if node == LEADER:
            self._leader_gone = f"the leading keeper is gone: {why}"
            passed, self._passed = self._passed, {}
            for one in passed.values():
                one.answer(False, None, self._leader_gone)

    def receive(self, node: int, body: CheckpointBody) -> None:
        """A word of another node's keeper, or of this one as the leader."""
        match body:
            case CheckpointAsked(ticket, step, why, steps_follow):
                asker = DistantAsker(self._send, node)
                self._checkpointing.ask(asker, step, why, ticket, steps_follow)
            case CheckpointAnswer(ticket, ok, step, why):
                passed = self._passed.pop(ticket, None)
                if passed is not None:
                    passed.answer(ok, step, why)
            case ActOrdered():
                self._carry_out(node, body)
            case ActAnswer(act, attempt, ok, why, hung):
                self._checkpointing.answered(node, act, attempt, ok, why, hung)

    def _carry_out(self, node: int, order: ActOrdered) -> None:
        def answer(ok: bool, why: str, hung: bool) -> None:
            self._send(node, ActAnswer(order.act, order.attempt, ok, why, hung))

        self._checkpointing.carry_out(
            order.act, order.stamp, order.attempt, answer, order.is_urgent
        )
