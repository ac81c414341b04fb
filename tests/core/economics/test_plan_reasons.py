"""Plan reasons: every plan is told in a few lines, which carry its own numbers. What they say of
plans that are known: `test_planner.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.economics.plan_reasons import MAX_REFUSED, reasons
from keepstep.core.economics.planner import PolicyPlan, plan
from keepstep.sim.economics.presets import PRESETS

LINES = 16


@st.composite
def plans(draw: st.DrawFn) -> PolicyPlan:
    """Of a cluster that is like one of ours, with other failures and more or less memory."""
    cluster = PRESETS[draw(st.sampled_from(["p4d-16", "p4d-1000"]))]
    factor = draw(st.just(0.0) | st.floats(0.1, 20))
    kinds = (replace(k, per_node_day=factor * k.per_node_day) for k in cluster.failures)
    memory_bytes = cluster.memory_bytes * draw(st.sampled_from([0.01, 0.3, 1.0]))
    return plan(replace(cluster, failures=tuple(kinds), memory_bytes=memory_bytes))


@settings(max_examples=15, deadline=None)
@given(plans())
def test_a_plan_is_told_in_lines_with_its_own_numbers(found: PolicyPlan) -> None:
    told = reasons(found)
    assert len(told) <= LINES and len(set(told)) == len(told)
    assert all(line.endswith(".") and "\n" not in line for line in told)
    chosen = found.chosen
    assert str(chosen.policy) in told[1]
    assert f"{chosen.effective_ratio:.2%}" in told[1] and f"{chosen.value_ratio:.2%}" in told[1]
    assert f"{found.cluster.nodes:,}" in told[0]


@settings(max_examples=15, deadline=None)
@given(plans())
def test_what_is_refused_is_named_with_its_reason_as_far_as_there_is_room(
    found: PolicyPlan,
) -> None:
    told = reasons(found)
    named = [name for name, why in found.refused.items() if any(why in line for line in told)]
    assert len(named) >= min(MAX_REFUSED, len(found.refused))
    tail = told[len(told) - min(MAX_REFUSED, len(found.refused)) :]
    for line, (name, why) in zip(tail, found.refused.items(), strict=False):
        assert name in line and why in line


@pytest.mark.parametrize(
    ("chosen_s", "says"), [(60.0, "60s"), (90.5, "90.5s"), (300.0, "5m"), (7200.0, "2h")]
)
def test_the_interval_is_told_in_a_unit_that_suits_it(chosen_s: float, says: str) -> None:
    found = plan(PRESETS["p4d-16"])
    interval = replace(found.chosen.interval, chosen_s=chosen_s)
    told = reasons(replace(found, chosen=replace(found.chosen, interval=interval)))
    assert any(
        line.startswith((f"Checkpoint every {says} ", f"Checkpoint every {says}:")) for line in told
    )
