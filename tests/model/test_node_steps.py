"""Node steps: what nodes tell each other is read as it was written, within bounds, or not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from keepstep.model.node_steps import (
    MOST_BLOCKS,
    MOST_NAMED,
    NamedSlow,
    NodeSteps,
    SlowWord,
    node_steps_from_text,
    node_steps_to_text,
    slow_word_from_text,
    slow_word_to_text,
)
from keepstep.model.step_work import MOST_GROUPS, GroupEntries, Section, Slow, Timing, WorkBlock

BLOCK = WorkBlock(
    *(5, (1, 2, 3, 4, 5, 2, 1), (6, 7, 8, 9, 10, 4, 3), 11, (12, 13, 14, 15, 16, 8, 5)),
    *(17, 18, 19, 20, 21, (22,) * 7),
)
IN_GROUPS = BLOCK._replace(groups=(GroupEntries(1 << 47, 24), GroupEntries(5, 0, 8)))
STEPS = NodeSteps(3, 7, Timing.DEVICE, {40: {2: BLOCK, 3: IN_GROUPS}, 45: {2: BLOCK, 3: BLOCK}})
SLOW = Slow(3, Section.COMPUTE, "compute", 400, 60, 40, 20, 0.45, True, False, "")
WORD = SlowWord(2, 7, 20, 440, 4, (1, 3), {2: 0.3}, (NamedSlow(SLOW, 9, 16),))


def test_both_are_read_as_they_were_written() -> None:
    assert node_steps_from_text(node_steps_to_text(STEPS)) == STEPS
    assert slow_word_from_text(slow_word_to_text(WORD)) == WORD


def test_a_sentence_does_not_travel_its_numbers_do() -> None:
    told = replace(WORD, slow=(NamedSlow(replace(SLOW, why="\x1b[2J")),))
    text = slow_word_to_text(told)
    assert "\\u001b" not in text and slow_word_from_text(text).slow[0].slow == SLOW


def test_what_is_told_is_bounded_to_the_newest_and_the_slowest() -> None:
    many = replace(STEPS, blocks={end: {0: BLOCK} for end in range(5, 500, 5)})
    assert sorted(node_steps_from_text(node_steps_to_text(many)).blocks)[0] == 500 - 5 * MOST_BLOCKS
    slow = tuple(
        NamedSlow(replace(SLOW, rank=rank, excess_ratio=rank / 100))
        for rank in range(MOST_NAMED + 9)
    )
    read = slow_word_from_text(slow_word_to_text(replace(WORD, slow=slow)))
    assert min(one.slow.rank for one in read.slow) == 9 and len(read.slow) == MOST_NAMED


def test_a_clock_that_went_back_took_no_time() -> None:
    back = replace(STEPS, blocks={5: {0: BLOCK._replace(delay_ns=(0, -9, 0, 0, 0, 0, 0))}})
    assert node_steps_from_text(node_steps_to_text(back)).blocks[5][0].delay_ns == (0,) * 7


def _changed(text: str, **values: Any) -> str:
    return json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    "values",
    [
        {"post": -1},
        {"epoch": "7"},
        {"timing": 4},
        {"more": 1},
        {"blocks": [[5, [[0, *[1] * 34]]]]},
        {"blocks": [[5, [[0, 0, *[1] * 34]]]]},
        {"blocks": [[5, [[0, 5, *[-1] * 34]]]]},
        {"blocks": [[5, [[0, 5, *[1] * 33]]]]},
        {"blocks": [[5, [[0, 5, *[1] * 36]]]]},
        {"blocks": [[5, [[0, 5, *[1] * (34 + 3 * (MOST_GROUPS + 1))]]]]},
        {"blocks": [[5, []]] * (MOST_BLOCKS + 1)},
        {"blocks": [[5, [[n, 5, *[1] * 34] for n in range(65)]]]},
    ],
)
def test_a_node_that_says_anything_else_is_not_read(values: dict[str, Any]) -> None:
    assert node_steps_from_text(
        _changed(node_steps_to_text(STEPS), blocks=[[5, [[0, 5, *[1] * 34]]]])
    )
    with pytest.raises(ValueError):
        node_steps_from_text(_changed(node_steps_to_text(STEPS), **values))


SLOW_JSON = json.loads(slow_word_to_text(WORD))["slow"][0]


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 0},
        {"judged": -2},
        {"silent": [-1]},
        {"noises": [[0, "nan"]]},
        {"noises": [[0, 10**400]]},
        {"slow": [[{**SLOW_JSON[0], "why": "look here"}, 0, 0]]},
        {"slow": [[{**SLOW_JSON[0], "cause": "else"}, 0, 0]]},
        {"slow": [[{**SLOW_JSON[0], "rank": -1}, 0, 0]]},
        {"slow": [[{**SLOW_JSON[0], "excess_ratio": 1e12}, 0, 0]]},
        {"slow": [[SLOW_JSON[0], 0]]},
    ],
)
def test_a_leader_that_says_anything_else_is_not_read(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        slow_word_from_text(_changed(slow_word_to_text(WORD), **values))


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", "x" * 300_000])
def test_other_texts_are_not_read(text: str) -> None:
    with pytest.raises(ValueError):
        node_steps_from_text(text)
    with pytest.raises(ValueError):
        slow_word_from_text(text)
