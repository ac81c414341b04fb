"""What dumps of torch's flight recorder add to a verdict: who waits where, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.detection.missed_call import missed_call
from tests.core.postmortem.recorded import a_call

REDUCE = "nccl:all_reduce"
OVER, IN = a_call(0, 5, REDUCE, is_over=True), a_call(0, 6, REDUCE)


def document(*calls: dict[str, Any], ranks: str = "") -> dict[str, Any]:
    config = {"0": {"desc": "default_pg", "ranks": ranks}} if ranks else {}
    return {"pg_config": config, "entries": list(calls)}


def test_who_has_not_entered_is_named_with_the_call_and_who_waits() -> None:
    found = missed_call({0: document(OVER, IN), 1: document(OVER), 2: document(OVER, IN)}, range(3))
    assert found.startswith("ranks 0, 2 wait in all_reduce 6, which rank 1 did not enter: ")
    assert "the last of rank 1 is all_reduce 5 at train.py:7" in found


def test_a_rank_that_left_no_dump_is_the_one() -> None:
    found = missed_call({0: document(OVER, IN), 2: document(OVER, IN)}, range(3))
    assert "which rank 1 did not enter" in found and "rank 1 left no dump" in found


def test_of_ranks_of_other_nodes_it_is_said_that_they_are_waited_for_and_no_more() -> None:
    both = {r: document(OVER, IN, ranks="[0, 1, 2, 3]") for r in (0, 1)}
    found = missed_call(both, (0, 1))
    assert found.endswith(
        "ranks 0, 1 wait in all_reduce 6 of group default_pg for ranks of other nodes"
    )
    mine = {0: both[0], 1: document(OVER, ranks="[0, 1, 2, 3]")}
    assert missed_call(mine, (0, 1)).endswith("for rank 1, ranks of other nodes")


def test_two_collectives_at_one_place_are_told() -> None:
    other = a_call(0, 6, "nccl:broadcast")
    found = missed_call({0: document(IN), 1: document(other), 2: document(IN)}, range(3))
    assert found.startswith("by torch's flight recorder, call 6 of group default_pg is all_reduce")
    assert "broadcast on rank 1" in found


@pytest.mark.parametrize("documents", [{}, {0: None, 1: {"entries": 3}}, {0: document(OVER)}])
def test_where_nothing_is_known_nothing_is_said(documents: dict[int, object]) -> None:
    assert missed_call(documents, range(2)) == ""
