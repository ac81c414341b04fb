"""A slow link has a price: by how much later a step is protected, beside what a swap costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.balance.link_remedy import LEAST_STEPS, StepBytes, link_remedy
from keepstep.core.detection.links import LONG, LinkSide, SlowLink
from keepstep.core.economics.swap_price import SwapPrice
from keepstep.model.units import MIB, MS_NS, S_NS

SLOW = SlowLink(
    side=LinkSide.SENDER,
    nodes=(2,),
    ratio=4.0,
    cells=((2, 0), (2, 1)),
    cause="speed",
    why="node 2 sends slowly",
    fix="look at it",
    slowest=(2, 1),
    bytes_per_s=50.0 * MIB,
    usual_bytes_per_s=200.0 * MIB,
)
MEASURED = SwapPrice(9 * S_NS, "measured: 1 restart of this run")


def test_the_price_of_a_step_and_of_a_swap_are_in_the_sentence() -> None:
    found = link_remedy(SLOW, 100 * MIB, MEASURED)  # 2 s where they took half a second
    assert found.left_ns == 1500 * MS_NS
    assert "for each step 100.0 MiB cross it in 2.00 s, before in 500.0 ms" in found.why
    assert "protected 1.50 s later" in found.why and found.why.startswith("nothing is changed")
    assert "node 2 costs about 9.00 s once (measured: 1 restart of this run)" in found.why
    assert "as much as that of 6 lost nodes" in found.why
    assert found.why.endswith("cheapest by hand: look at it")
    assert "60.00 s once (assumed" in link_remedy(SLOW, 100 * MIB).why


@pytest.mark.parametrize("side", [LinkSide.LINK, LinkSide.SWITCH, LinkSide.UNCLEAR])
def test_where_nobody_knows_that_it_is_one_node_none_is_to_be_swapped(side: LinkSide) -> None:
    found = link_remedy(replace(SLOW, side=side, nodes=(1, 2)), 100 * MIB, MEASURED)
    assert found.left_ns == 1500 * MS_NS and "no swap for a spare" in found.why


def test_what_is_not_known_has_no_price_and_that_is_said() -> None:
    found = link_remedy(SLOW, 0.0)
    assert found.left_ns == 0 and "not known" in found.why and "look at it" in found.why


def test_bytes_of_a_step_are_those_between_steps_that_are_protected() -> None:
    seen = StepBytes()
    assert seen.of_a_step((0, 1)) == 0
    seen.add((0, 1), 10**9, 5)  # what crossed before the first step that is known
    seen.add((0, 1), 30, 6)
    assert seen.of_a_step((0, 1)) == 0, "too few"
    seen.add((0, 1), 60, 5 + LEAST_STEPS)
    assert seen.of_a_step((0, 1)) == pytest.approx(90 / LEAST_STEPS)
    assert seen.of_a_step((1, 0)) == 0
    seen.add((0, 1), 1, 2)
    assert seen.of_a_step((0, 1)) == 0, "steps are done again"
    for step in range(3, 3 + 5 * LONG):
        seen.add((0, 1), 7, step)
    assert seen.of_a_step((0, 1)) == 7
