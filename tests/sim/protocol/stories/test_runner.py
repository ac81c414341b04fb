"""A story that does not come out as it expects fails, and says at which line."""

from __future__ import annotations

import pytest

from keepstep.sim.protocol.stories.reader import read_story
from keepstep.sim.protocol.stories.runner import tell

STORY = """A rank is killed.

plan
  nodes = 2
  steps = 8

what happens
  at 4s: kill rank 1

expected
  ends well
  lost steps 0
  every rank goes on from memory
"""


def told(before: str = "", after: str = "") -> str | None:
    [case] = read_story(STORY.replace(before, after) if before else STORY)
    return tell(case).wrong


def test_it_comes_out_as_it_expects() -> None:
    assert told() is None


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("lost steps 0", "lost steps 1", 12),
        ("lost steps 0", "is over within 1s", 12),
        ("lost steps 0", "at most 1 attempt", 12),
        ("lost steps 0", "resumed is recorded once", 12),
        ("lost steps 0", "node-lost on machine 0 is recorded at least once", 12),
        ("lost steps 0", "all begin afresh never", 12),
        ("ends well", "ends with exit code 1", 11),
        ("at 4s: kill rank 1", "when rank 0 has completed step 70: kill rank 1", 8),
        ("at 4s: kill rank 1", "at 4s: kill rank 7", 8),
        ("at 4s", "at 4000s", 8),
    ],
)
def test_it_fails_at_the_line_that_is_not_so(before: str, after: str, line: int) -> None:
    wrong = told(before, after)
    assert wrong is not None
    assert f"line {line}" in wrong


def test_a_violation_of_the_job_fails_it() -> None:
    wrong = told("at 4s: kill rank 1", "at 4s: expect that step 7 is committed")
    assert wrong is not None
    assert wrong.startswith("story: ")
