"""Opening lines: what a training says of where it begins."""

from __future__ import annotations

import pytest

from keepstep.edge.torch.opening_lines import position_line
from keepstep.model.loss import loss_words
from keepstep.model.messages.keeper_rank import StateOffered


@pytest.mark.parametrize(
    ("steps", "at_least", "words"),
    [
        (1, 1, "1 completed step lost"),
        (3, 3, "3 completed steps lost"),
        (None, 0, "an unknown number of completed steps lost, perhaps none"),
        (None, 7, "at least 7 completed steps lost"),
    ],
)
def test_what_is_lost_is_told(steps: int | None, at_least: int, words: str) -> None:
    loss = loss_words(steps, at_least)
    assert loss == words
    stored = StateOffered(1, "store", 4, 0, "memory holds nothing")
    assert position_line(stored, loss) == (
        f"goes on with the run before: resumed step 4 from store, {words}: memory holds nothing"
    )
    afresh = StateOffered(1, "fresh", -1, 0, "memory holds nothing")
    assert position_line(afresh, loss) == f"begins at step 0: memory holds nothing; {words}"


def test_a_first_start_and_a_whole_return_lose_nothing() -> None:
    afresh = StateOffered(1, "fresh", -1, 0, "no store")
    assert position_line(afresh, "") == "begins at step 0: no store"
    kept = StateOffered(1, "memory", 4, 1, "held")
    assert "from memory, no completed step lost: held" in position_line(kept, "")
