"""No action without a verdict, and every verdict and question answered.

A round is followed by another one only after its verdict; a rank is killed by its agent only in a
round that has one, or is about to have one by that agent's word; who asks where to resume, or for a
checkpoint, hears of it before all is over, unless it dies.

And nobody gives up, but where something else took the machine's memory, the store was not there to
be looked at, or ranks in the middle of the job were offered a fresh start.

Not verified: that a verdict is right; how long an answer takes, beyond the end of the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.model.mesh import Mesh
from keepstep.model.rounds import verdict_from_text
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.agents import Agent
from keepstep.sim.protocol.trainer import Rank
from keepstep.sim.protocol.job.observer import Checker

if TYPE_CHECKING:
    from keepstep.sim.protocol.job.job import Job


class Verdicts(Checker):
    name = "verdicts"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._again: set[int] = set()
        self._final: str | None = None
        self._formed: set[int] = set()
        self._asking: dict[int, Rank] = {}

    def written(self, key: str, value: str) -> None:
        number, _, what = key.partition("/")
        if what != "verdict":
            return
        verdict = verdict_from_text(value)
        if self._final is not None:
            self.violated(
                f"round {number} has the verdict {verdict.kind}, and the job had {self._final}"
            )
        if verdict.kind == "again":
            self._again.add(int(number))
        else:
            self._final = verdict.kind

    def formed(self, agent: Agent, number: int, mesh: Mesh) -> None:
        if number and number - 1 not in self._again:
            self.violated(f"round {number} is formed, and the one before has no verdict")
        self._formed.add(number)

    def joined(self, rank: Rank) -> None:
        self._asking[rank.rank] = rank

    def went(self, rank: Rank, source: str, stamp: Stamp, epoch: int) -> None:
        if self._asking.pop(rank.rank, None) is not rank:
            self.violated(f"rank {rank.rank} may go on, and did not ask")

    def over(self) -> None:
        waiting = [r for r, rank in sorted(self._asking.items()) if rank.process.alive]
        if waiting:
            self.violated(f"all is over, and ranks {waiting} have not heard where to resume")
        if self._final is None:
            self.violated("all is over, and no verdict says so")
        if self.job.hangs and not any(
            "killed at send vote" in line for line in self.job.world.deaths
        ):
            self.violated(
                "nobody got on for long, and no keeper died while it spoke of the vote "
                '(docs/protocol.md, "What is not verified")'
            )
        excuses = ("takes a machine's memory", "the store does not answer")
        if (
            self._final == "stop"
            and not self.job.refusals
            and not any(e in fault for e in excuses for fault in self.job.faults)
        ):
            self.violated("the job gave up")
