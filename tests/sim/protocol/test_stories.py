"""Every story in `stories/` is told, with all checkers, and comes out as it expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.sim.protocol.stories.reader import StoryCase, read_story
from keepstep.sim.protocol.stories.runner import tell

STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))
CASES = [
    pytest.param(case, id=f"{path.stem} {case.name}".strip())
    for path in STORIES
    for case in read_story(path.read_text())
]


@pytest.mark.parametrize("case", CASES)
def test_a_story_comes_out_as_it_expects(case: StoryCase) -> None:
    outcome = tell(case)
    assert outcome.wrong is None, "\n".join([*outcome.trace[-60:], outcome.wrong])


def test_a_story_is_a_run() -> None:
    case = read_story((Path(__file__).parent / "stories" / "orphan.txt").read_text())[0]
    assert tell(case).digest == tell(case).digest
