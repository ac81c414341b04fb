"""Orphans: an agent's list of its ranks is read by the next one as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keepstep.runtime.agent.orphans import FILE, RankList, read_ranks, write_ranks

from keepstep.edge.shm.memory import MEMORY

PIDS = st.sets(st.integers(1, 4_000_000), max_size=200)


@given(st.integers(1, 4_000_000), st.integers(-1, 10_000), st.lists(PIDS, min_size=1, max_size=3))
def test_the_newest_list_is_found(
    tmp_path_factory: pytest.TempPathFactory, agent: int, attempt: int, lists: list[set[int]]
) -> None:
    job_dir = tmp_path_factory.mktemp("j")
    for pids in lists:
        write_ranks(MEMORY, job_dir, agent, attempt, pids)
    assert read_ranks(MEMORY, job_dir) == RankList(agent, attempt, tuple(sorted(lists[-1])))


def test_none_was_left(tmp_path: Path) -> None:
    assert read_ranks(MEMORY, tmp_path) is None


def test_another_releases_list_is_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[1, 2, 3]")
    assert read_ranks(MEMORY, tmp_path) is None
