"""The cut moves: while all train and nothing has gone wrong for a while, what all can go back to is
never many steps old.

Judged where a snapshot is surely whole before the next step ends: steps of a second or more,
captures that take a small part of one, and a network that has room for the copies. Where copies
wait for a network that is idle, it may be older by twice as many steps as they may wait: so much
older is it when it is committed, and with two slots the next one is captured only then. A rank
whose program changes its state in place loses one snapshot in its process's life, and copies that
state at the boundary from then on: the first tear of each is something that has gone wrong, a
second one is no excuse.

Where captures take several steps, on one node, it is as old as the longest of them allows: two of
them, and one more for a capture that has missed its turn (core/resume/cadence.py).

Not verified: how old it is where copies to other nodes, or the store, are slower than steps, or
where each checkpoint of what nodes share brings others' parts over the network; nor after damage,
or when something else has taken a machine's memory.
"""

from __future__ import annotations

from keepstep.core.pacing.gate import LATE_STEPS
from keepstep.core.resume.cut import holding_of
from keepstep.model.events import Event
from keepstep.model.messages.peers import HorizonWord, MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, S_NS
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.inspection import Inspection, restorable
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.world.machine import Machine

MIN_STEP_NS = 1 * S_NS
MIN_BYTES_PER_S = 20 * KIB
ACTS_PER_STEP = 10  # at least so many acts of a capture take no longer than a step
FAULT_NS = 5 * S_NS  # so long what goes wrong lasts, or 2.5 times as long as a node may be away
AT_ONCE = ("killed", "lost")  # how the words for what does not last begin
QUIET_STEPS = 5
MAX_STEPS = 4  # that it may be old where copies do not wait


def lasts_ns(plan: RunPlan) -> int:
    """So long may last what does not go wrong at once."""
    return max(FAULT_NS, round(2.5 * plan.link_dead_s * S_NS))


class TheCutMoves(Checker):
    NAME = "the cut moves"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        plan = job.plan
        self._lasts_ns = lasts_ns(plan)
        # for each checkpoint, over the lines that copies wait for
        brings_parts = bool(plan.replicas and plan.shares_over == "job" and plan.store)
        self._is_quick = (
            plan.step_ns >= MIN_STEP_NS
            and plan.act_ns * plan.slow * ACTS_PER_STEP <= plan.step_ns
            and plan.wires.bytes_per_s >= MIN_BYTES_PER_S
            and not brings_parts
        )
        is_slow_alone = plan.nodes == 1 and not plan.store
        self._is_judged = self._is_quick or is_slow_alone
        self._spans: dict[int, int] = {}  # by rank: the longest capture in this epoch, in steps
        self._most_steps = MAX_STEPS + 2 * plan.interleaves * LATE_STEPS  # that it may be old
        self._quiet_ns = 0  # from then on
        self._quiet_steps = 0
        self._committed = -1  # step, as the leader has said in this epoch
        self._programs: dict[str, Program] = {}  # by their names in the journal
        self._torn: set[Program] = set()  # once: from then on they copy at the boundary

    def struck(self, what: str) -> None:
        lasts_ns = 0 if what.startswith(AT_ONCE) else self._lasts_ns
        self._quiet_ns = max(self._quiet_ns, self.job.world.now_ns + lasts_ns)
        self._quiet_steps = 0
        if "takes a machine's memory" in what:
            self._is_judged = False

    def joined(self, program: Program) -> None:
        self._programs[f"rank {program.who.rank}"] = program

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind == "torn" and (program := self._programs[event.who]) not in self._torn:
            self._torn.add(program)
            self._quiet_steps = 0

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        self._quiet_steps = 0
        self._committed = stamp.step
        self._spans.clear()

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if isinstance(message, HorizonWord) and message.committed is not None:
            self._committed = max(self._committed, message.committed.step)

    def stepped(self, program: Program, step: int) -> None:
        if not self._is_judged or self.atlas.damages or program.who.rank:
            return
        if self.job.world.now_ns > self._quiet_ns:
            self._quiet_steps += 1
        most_steps, quiet_steps = self._most_steps, QUIET_STEPS
        if not self._is_quick:
            span = self._span(program)
            most_steps, quiet_steps = max(most_steps, 3 * span), QUIET_STEPS * span
        if self._quiet_steps < quiet_steps:
            return
        newest = self._newest()
        if step - newest > most_steps:
            self.violated(
                f"step {step} is done, nothing has gone wrong for {self._quiet_steps} steps, and "
                f"all can go back to step {newest}"
            )

    def _span(self, program: Program) -> int:
        """The longest capture of any rank in this epoch, in steps; one under way counts."""
        inspection = Inspection(self.job, program.process.machine)
        for page in inspection.statuses(self.atlas.world_size):
            pending = holding_of(page).pending
            is_under_way = pending is not None and pending.epoch == page.epoch
            now = page.completed_step - pending.step if pending and is_under_way else 1
            known = self._spans.get(page.rank, 1)
            self._spans[page.rank] = max(known, now, page.span_steps)
        return max(self._spans.values(), default=1)

    def _newest(self) -> int:
        if self.atlas.nodes > 1:
            return self._committed
        found = restorable(self.job, self.atlas.world_size)
        return max((stamp.step for stamp in found), default=-1)
