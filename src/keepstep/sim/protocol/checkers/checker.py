"""Checker: one property of a run, which ends with its first violation."""

from __future__ import annotations

from typing import ClassVar

from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.observer import Observer


class Checker(Observer):
    """`atlas` hears of everything before it does."""

    NAME: ClassVar[str]

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        self.job = job
        self.atlas = atlas

    def violated(self, what: str) -> None:
        self.job.violate(self.NAME, what)
