"""Paced: ranks whose steps have phases and take as long as a real job's did (`pace.py`), and tell
of each phase as it begins.

What is added to `trainer.py`: a step is forward, collectives, the rest of the backward pass,
update; a rank that has what its peers gave ends its step, and captures it, also when it hears
meanwhile that one of them is lost, as `Peers.is_genuine` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.model.messages.keeper_rank import StateOffered, ToRank
from keepstep.model.snapshot import Phase, Stamp
from keepstep.model.units import MS_NS
from keepstep.sim.protocol.pace import Pace
from keepstep.sim.protocol.trainer import Gang, Members, Rank

if TYPE_CHECKING:
    from keepstep.sim.protocol.job import Job

LOOK_NS = 10 * MS_NS


class PacedGang(Gang):
    def __init__(self, job: Job, attempt: int, pace: Pace) -> None:
        super().__init__(job, attempt)
        self._pace = pace

    def _lasts_ns(self) -> int:
        return self._random.choice(self._pace.collective_ns)

    def _over(self, members: Members, step: int, mixed: bytes) -> None:
        """Not before all reach each other: collectives use the same links as copies do."""
        machines = {member.site.machine.number for member, _, _ in members.values()}
        network = self._job.network
        if all(network.carries(a, b) for a in machines for b in machines if a != b):
            super()._over(members, step, mixed)
        elif all(member.is_in(self) for member, _, _ in members.values()):
            self._job.world.after(LOOK_NS, None, self._over, members, step, mixed)


class PacedRank(Rank):
    _finishes = False  # its step, with what the peers gave
    _is_told = False  # meanwhile, that one of them is lost
    _told_order: Gang | None = None
    _stall_ns = 0  # of this boundary

    @property
    def _pace(self) -> Pace:
        pace = self.job.plan.pace
        assert pace is not None
        return pace

    def _announce(self, phase: Phase, step: int) -> None:
        self.job.on_phase(self.rank, phase, step)

    def _later(self, sample: tuple[int, ...], call: Callable[..., None], *args: Any) -> None:
        self.process.after(self._random.choice(sample), call, *args)

    # -- a step

    def _next_step(self) -> None:
        if self._is_told:
            order, self._is_told, self._told_order = self._told_order, False, None
            self.hear_lost()
            if order is not None:
                self.regroup(order)
            return
        if self.step + 1 >= self.job.plan.steps:
            super()._next_step()
        else:
            stall_ns, self._stall_ns = self._stall_ns or self._random.choice(self._pace.stall_ns), 0
            self.process.after(stall_ns, self._begin_step, self._gang)

    def _begin_step(self, gang: Gang) -> None:
        if self.is_in(gang):
            self._page.publish(phase=Phase.STEP, step=self.step + 1)
            self._announce(Phase.STEP, self.step + 1)
            self._announce(Phase.FORWARD, self.step + 1)
            self._later(self._pace.forward_ns, self._backward, gang)

    def _backward(self, gang: Gang) -> None:
        if self.is_in(gang):
            self._announce(Phase.BACKWARD, self.step + 1)
            gang.enter(self, self.step + 1, self._state)

    def stepped(self, gang: Gang, step: int, mixed: bytes, rank: int) -> None:
        if self.is_in(gang):
            self._finishes = True
            self._later(self._pace.rest_ns, self._update, gang, step, mixed, rank)

    def _update(self, gang: Gang, step: int, mixed: bytes, rank: int) -> None:
        self._announce(Phase.UPDATE, step)
        self._later(self._pace.update_ns, self._complete, gang, step, mixed, rank)

    def _complete(self, gang: Gang, step: int, mixed: bytes, rank: int) -> None:
        every = self._pace.persist_every_steps
        if every and (step + 1) % every == 0 and self.site.settings.store is not None:
            self._announce(Phase.PERSIST, self.step)
            self._persist(self.step, "asked for by job.persist()", _nobody)
        self._finishes = False
        super().stepped(gang, step, mixed, rank)

    # -- a capture

    def _act(self, act: Callable[..., None], *args: Any) -> None:
        if act == self._copy_half:
            self._stall_ns = self._random.choice(self._pace.stall_ns)
            self.process.after(
                max(1, self._stall_ns + self._random.choice(self._pace.capture_ns)), act, *args
            )
        elif act == self._copy_rest:
            self._later(self._pace.copy_ns, act, *args)
        else:
            self._later(self._pace.seal_ns, act, *args)

    def _copy_half(self, index: int, stamp: Stamp, state: bytes) -> None:
        self._announce(Phase.CAPTURE, stamp.step)
        super()._copy_half(index, stamp, state)

    def _copy_rest(self, index: int, stamp: Stamp, state: bytes) -> None:
        super()._copy_rest(index, stamp, state)
        self._announce(Phase.SEAL, stamp.step)

    # -- another rank is lost

    def hear_lost(self) -> None:
        if self._finishes:
            self._is_told, self._told_order = True, None
        else:
            super().hear_lost()

    def regroup(self, gang: Gang) -> None:
        if self._is_told:
            self._told_order = gang
        else:
            super().regroup(gang)

    def _hear(self, message: ToRank) -> None:
        if isinstance(message, StateOffered) and self._join is not None:
            self._announce(Phase.RESTORE, message.step)
        super()._hear(message)


def _nobody(ok: bool, why: str) -> None:
    """Whose answer nobody waits for."""
