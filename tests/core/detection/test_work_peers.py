"""Work peers: ranks that do the same are found by what they enter, and a pipeline's stages are not
taken for such."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from keepstep.core.detection.work_peers import peers_of
from keepstep.model.step_work import GroupEntries, Section, WorkBlock

Entered = Mapping[int, tuple[int, int]]  # by group, collectives and messages
WORLD = 1
NONE = (0,) * len(Section)


def block(entered: Entered) -> WorkBlock:
    total = sum(map(sum, entered.values()))
    groups = tuple(GroupEntries(group, *counts) for group, counts in entered.items())
    return WorkBlock(5, NONE, NONE, 0, NONE, total, 0, groups=groups)


def peers(by_rank: Mapping[int, Entered]) -> set[frozenset[int]]:
    found = peers_of({rank: [block(entered)] * 3 for rank, entered in by_rank.items()})
    assert all(rank in some for rank, some in found.items())
    return set(found.values())


def sets(*some: set[int]) -> set[frozenset[int]]:
    return set(map(frozenset, some))


def grid(pipes: int, alike: int, unlike: int = 0) -> dict[int, dict[int, tuple[int, int]]]:
    """Two ranks of each of two stages: sums of 24 in each stage, or `unlike` more in the second;
    `pipes` messages to the other stage, and `alike` sums over all."""
    found = {}
    for rank in range(4):
        stage = rank // 2
        found[rank] = {10 + stage: (24 + stage * unlike, 0), 20 + rank % 2: (0, pipes)}
        if alike:
            found[rank][WORLD] = alike, 0
    return found


@pytest.mark.parametrize("alike", [0, 1, 100])
@pytest.mark.parametrize(("pipes", "unlike"), [(8, 0), (8, 6), (0, 6)])
def test_of_a_pipeline_each_stage_has_its_own_peers(pipes: int, alike: int, unlike: int) -> None:
    assert peers(grid(pipes, alike, unlike)) == sets({0, 1}, {2, 3})


def test_where_nothing_tells_stages_apart_all_that_are_in_one_group_are_peers() -> None:
    assert peers(grid(0, 1)) == sets({0, 1, 2, 3})


def test_messages_in_the_group_of_all_say_nothing_of_the_others() -> None:
    """As a program has it that calls `send` without a group."""
    entered = {rank: {WORLD: (1, 8), 10 + rank // 2: (24, 0)} for rank in range(4)}
    assert peers(entered) == sets({0, 1}, {2, 3})


def test_a_pipeline_alone_has_no_peers() -> None:
    assert peers({rank: {WORLD: (1, 0), 2: (0, 8)} for rank in range(2)}) == set()
    assert peers({rank: {WORLD: (1, 8)} for rank in range(2)}) == set()
    two_of_four = {rank: {WORLD: (1, 0), 2 + rank // 2: (0, 8)} for rank in range(4)}
    assert peers(two_of_four) == set()


def test_a_stage_that_sees_none_of_its_peers_here_is_not_compared_with_another() -> None:
    """Of a node with one rank of each stage: the data-parallel groups reach to other nodes."""
    here = {rank: {WORLD: (1, 0), 10 + rank: (24, 0), 20: (0, 8)} for rank in range(2)}
    assert peers(here) == set()


def test_shards_and_replicas_are_all_peers() -> None:
    """Sharded in a node, replicated over nodes: of the node all are, of the job those of a node."""
    entered = {rank: {10 + rank // 4: (48, 0), 20 + rank % 4: (24, 0)} for rank in range(8)}
    assert peers({rank: entered[rank] for rank in range(4)}) == sets({0, 1, 2, 3})
    assert peers(entered) == sets({0, 1, 2, 3}, {4, 5, 6, 7})


def test_who_enters_more_or_elsewhere_is_no_peer() -> None:
    entered: dict[int, Entered] = {rank: {WORLD: (24, 0)} for rank in range(4)}
    assert peers(entered) == sets({0, 1, 2, 3})
    assert peers({**entered, 3: {WORLD: (25, 0)}}) == sets({0, 1, 2})
    assert peers({**entered, 3: {WORLD: (24, 0), 9: (1, 0)}}) == sets({0, 1, 2})


def test_without_groups_nobody_has_peers() -> None:
    assert peers({0: {}, 1: {}}) == set()
    beyond = {rank: [block({})._replace(collectives=24)] for rank in range(2)}
    assert peers_of(beyond) == {}
