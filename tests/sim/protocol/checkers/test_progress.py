"""The checker of progress excuses the first snapshot that a process tears, and no other."""

from __future__ import annotations

import pytest

from keepstep.model.units import S_NS
from keepstep.sim.protocol.job.live_state import SimState
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.swarm import run

PLAN = RunPlan(
    nodes=2, ranks_per_node=2, steps=20, act_ns=S_NS // 20, changes=1.0, limit_ns=300 * S_NS
)


def test_each_process_may_tear_one_snapshot() -> None:
    outcome = run(1, PLAN)
    assert outcome.wrong is None
    assert any("torn: " in line for line in outcome.trace)


def test_who_tears_again_and_again_holds_the_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimState, "copy_eagerly", lambda self, names: None)
    outcome = run(1, PLAN)
    assert outcome.wrong is not None and outcome.wrong.startswith("the cut moves")


SLOW = RunPlan(
    nodes=1,
    ranks_per_node=4,
    policy="none",
    steps=60,
    step_ns=S_NS // 10,
    act_ns=S_NS // 25,
    slow=4,  # of one rank: a capture of it takes several steps
    limit_ns=300 * S_NS,
)


@pytest.mark.parametrize("seed", range(3))
def test_where_captures_take_several_steps_the_cut_moves_all_the_same(seed: int) -> None:
    assert run(seed, SLOW).wrong is None


def test_ranks_that_capture_by_their_own_clocks_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.runtime.rank.capture.is_due", lambda step, period_steps: True)
    found = [run(seed, SLOW).wrong for seed in range(3)]
    assert any(wrong is not None and wrong.startswith("the cut moves") for wrong in found)
