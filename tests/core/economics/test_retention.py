"""Retention: what stays and what goes, as properties before examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.retention import (
    Best,
    CheckpointInfo,
    Decision,
    EveryN,
    Latest,
    Rule,
    parse_rules,
    to_keep,
)
from keepstep.errors import ConfigError

counts = st.integers(1, 5)
rule_lists = st.lists(
    st.one_of(
        st.builds(Latest, counts),
        st.builds(EveryN, st.integers(1, 40)),
        st.builds(
            Best, st.sampled_from(["loss", "eval:loss"]), st.sampled_from(["min", "max"]), counts
        ),
    ),
    min_size=1,
    max_size=4,
)
values = st.one_of(st.floats(0, 10), st.just(math.nan), st.just(math.inf))
metrics = st.dictionaries(st.sampled_from(["loss", "eval:loss"]), values)
stores = st.lists(
    st.builds(CheckpointInfo, st.integers(0, 100), st.booleans(), metrics),
    max_size=12,
    unique_by=lambda c: c.step,
)


def steps(decision: Decision) -> tuple[set[int], set[int]]:
    return set(decision.kept), set(decision.removed)


@given(rule_lists, stores)
def test_every_checkpoint_gets_one_verdict_and_one_sentence(
    rules: list[Rule], store: list[CheckpointInfo]
) -> None:
    decision = to_keep(rules, store)
    kept, removed = steps(decision)
    assert kept | removed == {c.step for c in store} and not kept & removed
    for step, why in {**decision.kept, **decision.removed}.items():
        assert why.startswith(f"step {step} ")


@given(rule_lists, stores)
def test_the_newest_verified_one_and_everything_newer_stay(
    rules: list[Rule], store: list[CheckpointInfo]
) -> None:
    kept, removed = steps(to_keep(rules, store))
    newest = max((c.step for c in store if c.verified), default=-1)
    assert all(c.step in kept for c in store if c.step >= newest)
    assert all(step < newest for step in removed)


@given(rule_lists, stores)
def test_an_unverified_newcomer_costs_no_other_its_place(
    rules: list[Rule], store: list[CheckpointInfo]
) -> None:
    before, _ = steps(to_keep(rules, store))
    after, _ = steps(to_keep(rules, [*store, CheckpointInfo(101, verified=False)]))
    assert after == before | {101}


@given(rule_lists, rule_lists, stores)
def test_rules_are_a_union(
    first: list[Rule], second: list[Rule], store: list[CheckpointInfo]
) -> None:
    together, _ = steps(to_keep([*first, *second], store))
    assert together == steps(to_keep(first, store))[0] | steps(to_keep(second, store))[0]


@given(rule_lists, stores)
def test_deciding_again_removes_nothing_more(
    rules: list[Rule], store: list[CheckpointInfo]
) -> None:
    kept, _ = steps(to_keep(rules, store))
    assert not to_keep(rules, [c for c in store if c.step in kept]).removed


@given(rule_lists)
def test_text_and_rules_say_the_same(rules: list[Rule]) -> None:
    assert parse_rules(", ".join(map(str, rules))) == tuple(rules)


def test_each_rule_keeps_what_it_says() -> None:
    losses = {99: 3.0, 999: 1.0, 1500: math.nan, 1999: 2.0, 2999: 1.0, 3100: 5.0}
    store = [CheckpointInfo(step, True, {"loss": loss}) for step, loss in losses.items()]
    assert Latest(2).chosen(store) == {2999, 3100}
    assert EveryN(1000).chosen(store) == {99, 1500, 2999, 3100}
    assert Best("loss", "min", 1).chosen(store) == {2999}, "of equals the newer"
    assert Best("loss", "max", 2).chosen(store) == {99, 3100}, "NaN is never best"
    assert Best("accuracy", "max", 2).chosen(store) == frozenset()
    decision = to_keep(parse_rules("latest:1,best:loss:min:1"), store)
    assert set(decision.kept) == {2999, 3100}
    assert (
        decision.removed[99]
        == "step 99 goes: latest:1, best:loss:min:1 keep other steps, and the newer step 3100 "
        "has been read back"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "latest",
        "latest:0",
        "latest:-1",
        "latest:two",
        "every:1.5",
        "best:loss:low:1",
        "best::min:1",
        "all",
        "latest:2,",
    ],
)
def test_a_rule_that_cannot_be_says_what_was_expected_and_found(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*, found"):
        parse_rules(text)
