"""Identity: who this rank is, from whoever knows, and never a guess."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.runtime.rank.identity import count_here, identity_of, place_in_world


class Group:
    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._ranks


def nobody(mine: Any) -> list[Any]:
    raise AssertionError("nobody was to be asked")


@given(st.integers(1, 64), st.data())
def test_a_process_group_knows_and_the_launcher_says_how_many_are_here(
    ranks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    here = data.draw(st.integers(1, ranks))
    environ = {"RANK": "9", "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": str(here)}
    found = identity_of("j", Path("/"), environ, Group(rank, ranks), nobody)
    assert (found.rank, found.world_size, found.local_world_size) == (rank, ranks, here)
    assert found.has_many_nodes == (here < ranks) and found.uid == os.getuid()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_which_ranks_are_neighbours_is_said_by_the_launcher(name: str) -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", name: "1"}
    assert identity_of("j", Path("/"), environ, None, nobody).node_ranks == range(4, 8)
    del environ[name]
    assert not identity_of("j", Path("/"), environ, None, nobody).node_ranks
    alone = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert identity_of("j", Path("/"), alone, None, nobody).node_ranks == range(8)


def test_where_nobody_says_how_many_are_here_all_ranks_are_asked(tmp_path: Path) -> None:
    def gather(mine: Any) -> list[Any]:
        return [mine, ("another boot", 1, 2), mine]

    found = identity_of("j", tmp_path, {}, Group(0, 3), gather)
    assert found.local_world_size == 2 and found.has_many_nodes


def test_a_rank_alone_asks_nobody() -> None:
    found = identity_of("j", Path("/nowhere"), {}, Group(0, 1), nobody)
    assert (found.rank, found.world_size, found.local_world_size) == (0, 1, 1)
    assert identity_of("j", Path("/nowhere"), {}, None, nobody) == found


def test_a_missing_arena_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found nothing at"):
        count_here(tmp_path / "none", nobody)


def test_without_a_process_group_the_launcher_has_told_the_rank() -> None:
    assert place_in_world({}) == (0, 1)
    assert place_in_world({"RANK": "2", "WORLD_SIZE": "3"}) == (2, 3)


def test_tasks_of_slurm_are_not_taken_for_ranks() -> None:
    """They may have nothing to do with each other; and two nodes that think they are alone would
    each resume where they like."""
    with pytest.raises(
        ConfigError,
        match=r"Slurm step of 8 tasks expected .*init_process_group\(\) before it, "
        "or RANK and WORLD_SIZE",
    ):
        place_in_world({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"})
    assert place_in_world({"SLURM_STEP_NUM_TASKS": "8", "RANK": "0", "WORLD_SIZE": "1"}) == (0, 1)
    # the batch script itself: no step
    assert place_in_world({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == (0, 1)
