"""RankIdentity: whether there are other nodes, and which snapshots are this job's."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep.runtime.rank.world import RankIdentity

MINE = RankIdentity(job="j", uid=1000, rank=1, world_size=4, local_world_size=2)


@given(st.integers(1, 64), st.data())
def test_there_are_other_nodes_when_not_all_ranks_are_here(ranks: int, data: st.DataObject) -> None:
    here = data.draw(st.integers(1, ranks))
    who = replace(MINE, world_size=ranks, local_world_size=here)
    assert who.has_many_nodes == (here != ranks)


def test_snapshots_are_known_by_job_and_user_and_by_nothing_else() -> None:
    same = replace(MINE, rank=3, world_size=8)
    others = [replace(MINE, job="k"), replace(MINE, uid=1001)]
    assert same.job_hash == MINE.job_hash
    assert len({MINE.job_hash, *(other.job_hash for other in others)}) == 3
