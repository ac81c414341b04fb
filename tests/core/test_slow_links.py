"""Copies that take several steps: capturing goes on all the same."""

from __future__ import annotations

from keepstep.core.resume.commit import Commit, RankFacts
from keepstep.core.resume.cut import Holding
from keepstep.core.resume.slots import Take, choose
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import SlotState, SlotView, Stamp

EMPTY = SlotView(SlotState.EMPTY, Stamp(-1, 0))


def test_on_a_slow_link_a_killed_process_still_loses_one_step() -> None:
    """Step 2 is on its way to the holders for long; with four slots every later step is captured
    all the same."""
    leader = Commit(2, 1)
    slots = [
        SlotView(SlotState.SEALED, Stamp(1, 1)),
        SlotView(SlotState.SEALED, Stamp(2, 1)),
        EMPTY,
        EMPTY,
    ]
    for step in range(3, 20):
        own = Holding(
            frozenset(v.stamp for v in slots if v.state is SlotState.SEALED), None, step - 1
        )
        leader.report([RankFacts(r, own, frozenset({Stamp(1, 1)})) for r in range(2)], Horizon(1))
        word = leader.horizon
        assert word.committed == Stamp(1, 1) and (step == 3 or word.target == Stamp(2, 1))
        taken = choose(slots, word.floor, word.is_hopeless)
        assert isinstance(taken, Take), taken
        slots[taken.slot] = SlotView(SlotState.SEALED, Stamp(step, 1))
        assert {Stamp(1, 1), Stamp(2, 1), Stamp(step, 1)} <= {v.stamp for v in slots}
