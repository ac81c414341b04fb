"""Who did not come, by the flight recorder's dumps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.postmortem.collectives import Missed
from keepstep.core.postmortem.recorder import Recorder, RecorderDump, parse_dump, rank_in
from tests.core.postmortem.recorded import a_call, a_dump

REDUCE, GATHER = "nccl:all_reduce", "nccl:all_gather"


def of(*dumps: RecorderDump) -> Recorder:
    found = Recorder()
    for dump in dumps:
        found.take(dump)
    return found


def missed(*dumps: RecorderDump, world: int) -> Missed:
    found = of(*dumps).missed(range(world))
    assert found is not None
    return found


def over(seq: int, group: int = 0) -> dict[str, Any]:
    return a_call(group, seq, REDUCE, is_over=True)


def test_who_entered_fewer_is_named_with_its_last_line() -> None:
    found = missed(
        a_dump(0, over(5), a_call(0, 6, GATHER)),
        a_dump(1, over(5), a_call(0, 6, GATHER)),
        a_dump(2, a_call(0, 5, REDUCE, is_over=True, line=31)),
        world=3,
    )
    assert (found.missing, found.waiting, found.op, found.seq) == ((2,), (0, 1), "all_gather", 6)
    assert "the last of rank 2 is all_reduce 5 at train.py:31" in found.how


def test_who_left_no_dump_is_named() -> None:
    found = missed(a_dump(0, a_call(0, 6, REDUCE)), a_dump(2, a_call(0, 6, REDUCE)), world=3)
    assert found.missing == (1,) and "rank 1 left no dump" in found.how


def test_a_chain_of_groups_leads_to_who_waits_for_nobody() -> None:
    """Ranks 0 and 1 wait for 2 in one group; 2 waits for 3 in another; 3 computes."""
    members: dict[int | str, list[int]] = {1: [0, 1, 2], 2: [2, 3]}
    found = missed(
        a_dump(0, a_call(1, 9, REDUCE), members=members),
        a_dump(1, a_call(1, 9, REDUCE)),
        a_dump(2, over(8, 1), a_call(2, 40, REDUCE)),
        a_dump(3, over(39, 2)),
        world=4,
    )
    assert (found.missing, found.waiting, found.group) == ((3,), (2,), "2")


def test_a_pipeline_whose_stages_count_for_themselves() -> None:
    """The first stage has called more than the last: one counter of all would blame that one."""
    found = missed(
        a_dump(0, *(over(n) for n in range(1, 3)), a_call(1, 12, "nccl:recv 0<-1", is_p2p=True)),
        a_dump(1, *(over(n) for n in range(1, 3)), a_call(1, 3, "nccl:recv 1<-2", is_p2p=True)),
        a_dump(2, *(over(n) for n in range(1, 3))),
        world=3,
    )
    assert found.missing == (2,) and found.waiting == (1,) and found.op == "recv"


def test_ranks_within_a_group_are_told_from_those_of_the_job() -> None:
    members: dict[int | str, list[int]] = {1: [4, 6]}
    found = missed(
        a_dump(4, a_call(1, 2, "nccl:send 0->1", is_p2p=True), members=members),
        a_dump(6, over(1)),
        world=8,
    )
    assert found.missing == (6,)


def test_ranks_that_wait_for_each_other_are_both_there() -> None:
    """Two groups, entered in the other order: each waits for the other."""
    members: dict[int | str, list[int]] = {1: [0, 1], 2: [0, 1]}
    found = missed(
        a_dump(0, a_call(1, 5, REDUCE), members=members), a_dump(1, a_call(2, 5, REDUCE)), world=2
    )
    assert found.missing in {(0,), (1,)}


def test_where_all_have_come_nobody_is_named() -> None:
    found = of(*(a_dump(rank, over(5), a_call(0, 6, REDUCE)) for rank in range(3)))
    assert found.missed(range(3)) is None and found.mismatch() is None
    assert of(a_dump(0, over(5)), a_dump(1, over(5))).missed(range(2)) is None


def test_another_call_in_the_same_place_is_a_mismatch() -> None:
    found = of(
        a_dump(0, a_call(0, 6, GATHER)),
        a_dump(1, a_call(0, 6, REDUCE)),
        a_dump(2, a_call(0, 6, GATHER)),
    ).mismatch()
    assert found == (
        (1,),
        "call 6 of group default_pg is all_gather on rank 0, 2, all_reduce on rank 1",
    )
    of_two = of(a_dump(0, a_call(0, 6, GATHER)), a_dump(1, a_call(0, 6, REDUCE))).mismatch()
    assert of_two is not None and of_two[0] == ()


def test_the_first_dump_of_a_rank_counts() -> None:
    found = of(a_dump(0, a_call(0, 6, REDUCE)), a_dump(1, over(5)), a_dump(1, over(6)))
    told = found.missed(range(2))
    assert told is not None and told.missing == (1,)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {"entries": 3},
        {"entries": [3]},
        {"entries": [{}]},
        {"entries": [{"collective_seq_id": "x"}]},
        {"entries": [{"collective_seq_id": True}]},
        {"entries": [{"collective_seq_id": 1 << 70}]},
    ],
)
def test_what_is_no_dump_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_dump(0, document)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("a/fr_12", 12),
        ("trace_7.json", 7),
        ("dump", None),
        ("3/dump", None),
    ],
)
def test_the_rank_is_at_the_end_of_the_name(name: str, rank: int | None) -> None:
    assert rank_in(name) == rank


@given(
    world=st.integers(2, 6),
    culprit=st.integers(0, 5),
    seq=st.integers(1, 50),
    behind=st.integers(1, 9),
)
def test_one_that_lags_is_named_whatever_the_numbers(
    world: int, culprit: int, seq: int, behind: int
) -> None:
    culprit %= world
    dumps = [
        a_dump(rank, over(max(0, seq - behind)))
        if rank == culprit
        else a_dump(rank, over(seq - 1), a_call(0, seq, REDUCE))
        for rank in range(world)
    ]
    assert missed(*dumps, world=world).missing == (culprit,)
