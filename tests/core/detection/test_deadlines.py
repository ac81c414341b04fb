"""Deadlines: whatever is set, either every limit stands in its order or the error names the two
that do not."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.deadlines import (
    PROMISE_NS,
    RELATIONS,
    Deadlines,
    check,
    derive,
    relations,
    table,
)
from keepstep.errors import ConfigError
from keepstep.model.units import S_NS

seconds = st.floats(4, 1e6)
links = st.none() | st.floats(2, 1e5)


def test_by_default_everything_is_in_order() -> None:
    check(derive())
    check(derive(link_dead_s=10.0))
    assert derive().learns and derive().link_dead_ns == 0
    assert derive() == Deadlines(), "what is derived from nothing is what the table says"


def test_a_stopped_rank_is_named_in_time() -> None:
    limits = derive()
    assert limits.stopped_ns + 2 * limits.tick_ns + limits.stacks_ns <= PROMISE_NS == 10 * S_NS


def test_what_the_docs_promise_of_the_limits_is_so() -> None:
    """`docs/detection.md`: an evaluation of that length is left alone."""
    promised_s = {"late": 10, "asleep": 120, "busy": 600, "grace_asleep": 600, "grace_busy": 1800}
    limits = derive()
    assert {name: getattr(limits, f"{name}_ns") / S_NS for name in promised_s} == promised_s


@given(seconds)
def test_on_one_node_any_limit_can_be_set(hang_after_s: float) -> None:
    limits = derive(hang_after_s)
    check(limits)
    assert limits.asleep_ns == limits.busy_ns == int(hang_after_s * S_NS) and not limits.learns
    assert limits.stopped_ns < limits.late_ns < limits.asleep_ns <= limits.grace_asleep_ns
    times = [value for name, value in asdict(limits).items() if name.endswith("_ns")]
    assert {type(value) for value in times} == {int}, "whole nanoseconds"


@given(st.none() | seconds, links)
def test_in_order_or_refused_by_name(hang_after_s: float | None, link_dead_s: float | None) -> None:
    try:
        check(derive(hang_after_s, link_dead_s))
    except ConfigError as error:
        assert hang_after_s is not None and link_dead_s is not None
        assert hang_after_s < link_dead_s + 2 and "expected link_dead + look" in str(error)


def test_a_hang_must_be_told_from_a_link_that_comes_back() -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected link_dead \+ look \(11 s\) below asleep \(8 s\): a link that comes back",
    ):
        derive(8, link_dead_s=10)
    assert derive(8).asleep_ns == 8 * S_NS, "one node has no links"


@pytest.mark.parametrize("hang_after_s", [0, 3.9, -1, float("nan")])
def test_too_short_to_tell_anything(hang_after_s: float) -> None:
    with pytest.raises(ConfigError, match="hang_after_s: expected at least 4 seconds, found"):
        derive(hang_after_s)


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: f"{r[0]} before {r[1]}")
def test_every_relation_is_held(relation: tuple[str, str, str]) -> None:
    shorter, longer = relation[0].split("+")[0], relation[1]
    limit_ns = PROMISE_NS if longer == "promise_ns" else getattr(derive(link_dead_s=10), longer)
    with pytest.raises(ConfigError, match="deadlines: expected .* below"):
        check(replace(derive(link_dead_s=10), **{shorter: limit_ns + 1}))


def test_every_limit_is_shown_and_stands_in_a_relation() -> None:
    names = {f.name for f in fields(Deadlines)} - {"learns"} | {"promise_ns"}
    assert {name + "_ns" for name, _, _ in table(derive(link_dead_s=10))} == names
    related = {
        name for shorter, longer, _ in RELATIONS for name in f"{shorter}+{longer}".split("+")
    }
    assert names <= related
    assert all(low <= high for _, low, _, high, _ in relations(derive(30, 10)))
