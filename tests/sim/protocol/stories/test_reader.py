"""What a story may say, and what is said of a line that says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.model.units import KIB, MS_NS, S_NS
from keepstep.sim.protocol.stories.conditions import CONDITIONS, LOOKS
from keepstep.sim.protocol.stories.expectations import EXPECTATIONS
from keepstep.sim.protocol.stories.happenings import HAPPENINGS
from keepstep.sim.protocol.stories.phrases import Phrases, StoryError
from keepstep.sim.protocol.stories.reader import read_story

STORY = """Why there is this story.

plan
  nodes = 3
  policy = none | copies:2   # both
  wires.bytes_per_s = 10KiB
  stays = no
  step_ns = 1.5s
  seed = 7

vary
  rank = 0 | 1

what happens
  at 4.2s: kill rank {rank}; lose machine 1
  then when rank 0 has completed step 5 for the 2nd time, 300ms later: kill all ranks
  from 2s, when step 3 is committed: kv away for 3s
  then 5s later: kill rank 0

expected
  ends well
"""


def test_a_story_has_a_case_for_each_choice() -> None:
    cases = read_story(STORY)
    assert [case.name for case in cases] == [
        "policy=none rank=0",
        "policy=none rank=1",
        "policy=copies:2 rank=0",
        "policy=copies:2 rank=1",
    ]
    assert [case.rules[0].text for case in cases[:2]] == [
        "at 4.2s: kill rank 0; lose machine 1",
        "at 4.2s: kill rank 1; lose machine 1",
    ]


def test_the_plan_and_the_rules_are_as_it_says() -> None:
    case = read_story(STORY)[2]
    plan = case.plan
    assert case.seed == 7
    assert (plan.nodes, plan.policy, plan.stays, plan.step_ns) == (3, "copies:2", False, 1.5 * S_NS)
    assert plan.wires.bytes_per_s == 10 * KIB
    first, second, third, last = case.rules
    assert (first.after_ns, first.follows, len(first.acts)) == (4_200 * MS_NS, False, 2)
    assert (second.follows, second.nth, second.late_ns) == (True, 2, 300 * MS_NS)
    assert (third.after_ns, third.condition, third.look is None) == (2 * S_NS, None, False)
    assert (last.after_ns, last.follows, last.condition, last.look) == (5 * S_NS, True, None, None)


@pytest.mark.parametrize(
    ("before", "after", "line", "expected"),
    [
        ("kill rank {rank}", "kil rank 1", 15, "kill rank 1"),
        ("rank 0 has completed", "rank 0 completes", 16, "rank 0 has completed step 5"),
        ("ends well", "goes well", 21, "ends well"),
        ("  nodes = 3", "  nodez = 3", 4, "nodes"),
        ("  nodes = 3", "  nodes = three", 4, "number"),
        ("  stays = no", "  stays = maybe", 7, "yes or no"),
        ("bytes_per_s", "bytes", 6, "bytes_per_s"),
        ("from 2s, when", "from 2s when", 17, "when CONDITION"),
        ("then 5s later", "5s later", 18, "then"),
        ("at 4.2s:", "then 4.2s later:", 15, "a rule before"),
        ("\nvary", "\nvarying", 11, "vary"),
        ("  ends well\n", "", 20, "expected"),
        ("Why there is this story.", "", 1, "prose"),
    ],
)
def test_a_line_that_says_nothing_is_named_with_what_was_expected(
    before: str, after: str, line: int, expected: str
) -> None:
    assert STORY.count(before) >= 1
    with pytest.raises(StoryError) as told:
        read_story(STORY.replace(before, after, 1))
    where, _, rest = str(told.value).partition(": expected ")
    wanted, _, found = rest.rpartition(", found ")
    assert where == f"line {line}"
    assert expected in wanted
    assert found


@pytest.mark.parametrize("phrases", [CONDITIONS, LOOKS, HAPPENINGS, EXPECTATIONS])
def test_no_example_is_another_phrases(phrases: Phrases[Any]) -> None:
    for example in phrases.examples:
        matching = [p for p, _ in phrases._phrases if p.fullmatch(example)]
        assert len(matching) == 1, example
