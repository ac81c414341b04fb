"""Partial sums: nobody waits for who is late, nobody falls behind by more than a step, and the
record of it says the same once more."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.balance.partial import PartialTurns, begin_line, parse_record, sum_line
from keepstep.model.partial import Given, Late, PartialRule

N, F, OLD = Given.NOTHING, Given.FRESH, Given.OLDER
RULES = st.builds(
    lambda ranks, missing, late: PartialRule(ranks, max(1, ranks - missing), 0, late),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from(["drop", "add"]),
)


def drawn(draw: random.Random, turns: PartialTurns) -> tuple[Given, ...]:
    """What a step may come to: as many late ones as the rule allows, or fewer."""
    rule = turns.rule
    able = [rank for rank in range(rule.ranks) if turns.turn.computes(rank)]
    late = draw.sample(able, draw.randint(0, max(0, len(able) - rule.need)))
    return tuple(
        rule.sat_out() if rank in turns.late else N if rank in late else F
        for rank in range(rule.ranks)
    )


@given(RULES, st.integers(0, 2**32))
def test_enough_can_always_come_and_nobody_is_late_twice_in_a_row(
    rule: PartialRule, seed: int
) -> None:
    draw, turns, before = random.Random(seed), PartialTurns(rule), frozenset[int]()
    for _ in range(30):
        able = sum(turns.turn.computes(rank) for rank in range(rule.ranks))
        assert able >= rule.need, "else the sum would never be closed"
        late = turns.over(drawn(draw, turns))
        assert not late & before
        before = late


@given(RULES, st.integers(0, 2**32))
def test_the_record_played_back_is_the_last_computation(rule: PartialRule, seed: int) -> None:
    """Whatever was done again: the dumb way keeps what each step came to, in a list."""
    draw, lines, done = random.Random(seed), list[str](), list[tuple[Given, ...]]()
    for _ in range(3):  # from a state, each time
        begin = draw.randint(0, len(done))
        del done[begin:]
        lines.append(begin_line(begin, rule))
        turns = PartialTurns(rule)
        for step in range(begin, begin + draw.randint(1, 12)):
            parts = drawn(draw, turns)
            turns.over(parts)
            done.append(parts)
            if any(part is not F for part in parts):
                lines.append(sum_line(step, parts))
    record = parse_record([*lines, '{"step": 3, "giv'], rule)
    played = PartialTurns(rule)
    for step, parts in enumerate(done):
        if step in record.begins:
            played.late = frozenset()
        assert record.of_step(step) == parts
        played.over(record.of_step(step))


@pytest.mark.parametrize(
    ("late", "before", "parts"),
    [
        ("drop", {3}, (F, F, F, OLD)),  # its gradient was dropped
        ("add", {3}, (F, F, F, N)),  # it has come, for it computes nothing
        ("add", {3}, (F, F, F, F)),
        ("add", set(), (F, F, F, OLD)),  # it was not late
        ("drop", set(), (F, F, N, N)),  # too few
        ("drop", set(), (F, F, F)),
    ],
)
def test_what_cannot_be_is_refused(late: Late, before: set[int], parts: Sequence[Given]) -> None:
    turns = PartialTurns(PartialRule(4, 3, 0, late))
    turns.late = frozenset(before)
    with pytest.raises(ValueError, match="expected 4 ranks, at least 3"):
        turns.over(parts)
    assert turns.late == before


def test_a_record_of_another_rule_is_refused() -> None:
    rule = PartialRule(4, 3, 0, "drop")
    lines = [begin_line(0, rule), sum_line(2, (F, F, F, N)), sum_line(3, (F, F, F, N))]
    assert parse_record(lines, rule).of_step(2) == (F, F, F, N)
    for other in (PartialRule(4, 2, 0, "drop"), PartialRule(4, 3, 0, "add")):
        with pytest.raises(ValueError, match=r"line 1: expected the record of 4 ranks, need="):
            parse_record(lines, other)
    for odd in ("nothing\n", "[]\n", '{"step": 1, "given": "19"}\n', "7\n"):
        with pytest.raises(ValueError, match="line 2 is not of a record"):
            parse_record([lines[0], odd], rule)
    with pytest.raises(ValueError, match="none begun"):
        parse_record([], rule)
