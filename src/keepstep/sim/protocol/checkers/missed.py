"""Who is lost is missed: when a machine is gone in the midst of training, and nothing else goes
wrong, the agents end the attempt soon, whether or not another machine comes in its place.

Soon: twice as long as a link may be away, and a little more. Judged where another machine comes
later than that, or never.

Not verified: machines that are lost before all train, or while something else is amiss.
"""

from __future__ import annotations

from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.progress import AT_ONCE, lasts_ns
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program

MORE_NS = 2 * S_NS


class TheLostAreMissed(Checker):
    NAME = "the lost are missed"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        plan = job.plan
        self._lasts_ns = lasts_ns(plan)
        self._soon_ns = round(2 * plan.link_dead_s * S_NS) + MORE_NS
        comes_later = plan.replace_ns > self._soon_ns or not plan.replaces
        # Without the host of the KV nothing can be said before that is noticed.
        self._is_judged = job.has_many_agents and comes_later and not plan.hosts
        self._amiss_until_ns = 0
        self._strikes = 0
        self._verdicts = 0
        self._trains = False
        self._is_called_off = False  # the attempt; some of its ranks may still end a step

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        self._is_called_off = False

    def stepped(self, program: Program, step: int) -> None:
        self._trains = not self._is_called_off

    def written(self, key: str, value: str) -> None:
        if key.endswith("/verdict"):
            self._verdicts += 1
            self._trains, self._is_called_off = False, True

    def struck(self, what: str) -> None:
        now_ns = self.job.world.now_ns
        self._strikes += 1
        is_alone = now_ns > self._amiss_until_ns
        self._amiss_until_ns = now_ns + (0 if what.startswith(AT_ONCE) else self._lasts_ns)
        if self._is_judged and self._trains and is_alone and self._is_missing():
            known = self._strikes, self._verdicts
            self.job.world.after(self._soon_ns, None, self._look, known, what)

    def _is_missing(self) -> bool:
        """And somebody is left to miss it."""
        alive = {self.job.nodes[number].machine.alive for number in self.atlas.machines}
        return alive == {True, False}

    def _look(self, known: tuple[int, int], what: str) -> None:
        if known == (self._strikes, self._verdicts) and not self.atlas.is_over:
            self.violated(f"{self._soon_ns / S_NS:.0f} s after {what} the attempt goes on")
