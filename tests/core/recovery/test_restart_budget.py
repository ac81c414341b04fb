"""RestartBudget: one cause never uses another's budget, a row of failures is as long as its limit,
and new steps earn a whole one again."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.core.recovery.restart_budget import RestartBudget
from keepstep.errors import ConfigError
from keepstep.model.failure import DEFAULT_BUDGET, Budget, Cause, parse_budget

causes = st.sampled_from(list(DEFAULT_BUDGET.limits))
stories = st.lists(st.tuples(causes, st.one_of(st.none(), st.integers(-1, 40))), max_size=50)
limits = st.fixed_dictionaries(
    {cause: st.one_of(st.none(), st.integers(0, 4)) for cause in DEFAULT_BUDGET.limits}
)


@given(stories, limits, st.integers(1, 20))
def test_a_cause_is_counted_as_if_it_were_alone(
    story: list[tuple[Cause, int | None]], limits: dict[Cause, int | None], refill: int
) -> None:
    together = RestartBudget(Budget(limits, refill))
    alone = {cause: RestartBudget(Budget(limits, refill)) for cause in limits}
    for cause, step in story:
        assert together.spend(cause, step) == alone[cause].spend(cause, step)


@given(stories, limits, st.integers(1, 20))
@example([(Cause.CRASH, -1), (Cause.CRASH, 9)], dict.fromkeys(DEFAULT_BUDGET.limits), 10)
def test_a_row_ends_with_new_steps_and_with_nothing_else(
    story: list[tuple[Cause, int | None]], limits: dict[Cause, int | None], refill: int
) -> None:
    """Counted anew, from the story: back from each failure to the last one before which `refill`
    new steps were done."""
    budget = RestartBudget(Budget(limits, refill))
    for at, (cause, step) in enumerate(story):
        spent = budget.spend(cause, step)
        steps = [s for c, s in story[: at + 1] if c is cause]
        row = 0
        for i, s in enumerate(steps):
            told = [t for t in steps[:i] if t is not None]
            row = 1 if s is not None and told and s - max(told) >= refill else row + 1
        limit = limits[cause]
        assert spent.count == row
        assert spent.is_too_much == (limit is not None and row > limit)


@given(stories, limits, st.integers(1, 20))
def test_who_is_granted_more_never_gives_up_earlier(
    story: list[tuple[Cause, int | None]], limits: dict[Cause, int | None], refill: int
) -> None:
    more = {cause: None if limit is None else limit + 1 for cause, limit in limits.items()}
    strict, mild = RestartBudget(Budget(limits, refill)), RestartBudget(Budget(more, refill))
    for cause, step in story:
        assert strict.spend(cause, step).is_too_much or not mild.spend(cause, step).is_too_much


def test_the_numbers_are_told() -> None:
    budget = RestartBudget(parse_budget("crash=2,refill=10"))
    said = [budget.spend(Cause.CRASH, step).why for step in (5, 9, 30)]
    assert said == [
        "crash 1 of 2",
        "crash 2 of 2, 4 new steps since the last",
        "crash 1 of 2, 21 new steps since the last",
    ]
    assert budget.spend(Cause.KILLED, 30).why == ""


@given(limits, st.integers(1, 1000))
def test_a_budget_is_read_as_it_is_written(limits: dict[Cause, int | None], refill: int) -> None:
    budget = Budget(limits, refill)
    assert parse_budget(budget.to_text()) == budget


def test_what_is_not_named_stays() -> None:
    assert parse_budget("") == DEFAULT_BUDGET
    assert parse_budget("hang=unlimited").limits == {**DEFAULT_BUDGET.limits, Cause.HANG: None}


@pytest.mark.parametrize(
    "text",
    [
        "crash",
        "crash=-1",
        "unknown=3",
        "refill=0",
        "refill=unlimited",
        "crash=3;hang=3",
        "crash=many",
    ],
)
def test_what_cannot_be_is_said(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match="budget: expected a cause .crash, hang, oom, device, state, node, killed. with a "
        "number or unlimited",
    ):
        parse_budget(text)
