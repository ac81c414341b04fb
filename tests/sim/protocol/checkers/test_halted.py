"""The checker of halts: in a run whose ranks doubt their steps none is taken back by some and
counted by others, and a rank that does is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.model.messages.keeper_rank import HaltOrder
from keepstep.model.units import S_NS
from keepstep.runtime.rank.halting import Halting
from keepstep.sim.protocol.checkers.halted import AHaltEndsAlike
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.swarm import run

PLAN = RunPlan(nodes=2, ranks_per_node=2, steps=20, doubts=0.3, limit_ns=600 * S_NS)


def test_steps_in_doubt_are_taken_back_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[bool | None] = []
    halted = AHaltEndsAlike.halted

    def heard(self: AHaltEndsAlike, program: Program, step: int, is_back: bool | None) -> None:
        ends.append(is_back)
        halted(self, program, step, is_back)

    monkeypatch.setattr(AHaltEndsAlike, "halted", heard)
    outcome = run(1, PLAN)
    assert outcome.wrong is None
    assert ends.count(True) >= PLAN.world_size and ends.count(False) >= PLAN.world_size


def test_a_rank_that_goes_on_alone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = Halting.ordered

    def hears_another(self: Halting, order: HaltOrder, step: int) -> None:
        if self._rank == 1 and order.orders == "go":
            order = replace(order, orders="void")
        ordered(self, order, step)

    monkeypatch.setattr(Halting, "ordered", hears_another)
    wrong = run(1, PLAN).wrong
    assert wrong is not None and wrong.startswith("a halt ends alike"), wrong
