"""Ranks of a pipeline of two stages, two ranks each: who is slow is named beside its own stage, and
no stage for having more to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from keepstep.core.detection.across_nodes import AcrossNodes
from keepstep.core.detection.slow_words import SlowOver
from keepstep.core.detection.stragglers import BLOCK_STEPS, Stragglers
from keepstep.model.node_steps import NodeSteps, node_steps_from_text, node_steps_to_text
from keepstep.model.step_work import GroupEntries, Section, Slow, Timing, WorkBlock
from keepstep.model.units import MS_NS
from tests.core.slow_steps import USUAL_NS, Steps

STAGES = (0, 0, 1, 1)  # by rank
WORLD, STAGE_GROUP, PIPE_GROUP = 1, 10, 20
MESSAGES = 8 * BLOCK_STEPS
HEAVIER = 1.6
Blocks = dict[int, WorkBlock]


def slowed(block: WorkBlock, factor: float) -> WorkBlock:
    return block._replace(
        own_ns=tuple(int(factor * ns) for ns in block.own_ns),
        cpu_ns=tuple(int(factor * ns) for ns in block.cpu_ns),
    )


def entered(block: WorkBlock, rank: int, sums: tuple[int, int]) -> WorkBlock:
    """sums: in each stage's own group, a step."""
    own = sums[STAGES[rank]] * BLOCK_STEPS
    groups = (
        GroupEntries(WORLD, BLOCK_STEPS),
        GroupEntries(STAGE_GROUP + STAGES[rank], own),
        GroupEntries(PIPE_GROUP + rank % 2, 0, MESSAGES),
    )
    return block._replace(collectives=BLOCK_STEPS + own + MESSAGES, groups=groups)


def in_one_counter(block: WorkBlock) -> WorkBlock:
    return block._replace(groups=(GroupEntries(WORLD, block.collectives),))


def pipeline(
    steps: int,
    sums: tuple[int, int],
    slow: int | None = None,
    onset: int = 0,
    until: int = 1 << 30,
    counted: Callable[[WorkBlock], WorkBlock] = lambda block: block,
) -> Iterator[tuple[int, Blocks]]:
    """The second stage has `HEAVIER` work; rank `slow` needs half as much again from `onset` on."""
    run = Steps(4, 3, slow=slow, factor=1.5, onset=onset, until=until)
    for end, blocks in run.blocks(steps):
        yield (
            end,
            {
                rank: counted(entered(slowed(block, HEAVIER if STAGES[rank] else 1.0), rank, sums))
                for rank, block in blocks.items()
            },
        )


def told(run: Iterator[tuple[int, Blocks]]) -> list[Slow | SlowOver]:
    judge = Stragglers()
    return [one for end, blocks in run for one in judge.add(blocks, end)]


ALIKE, UNLIKE = (24, 24), (24, 16)  # the stages' sums
each_kind = pytest.mark.parametrize("sums", [ALIKE, UNLIKE])
each_rank = pytest.mark.parametrize("slow", range(4))


@each_kind
def test_stages_that_differ_name_nobody(sums: tuple[int, int]) -> None:
    assert told(pipeline(900, sums)) == []


@each_kind
@each_rank
def test_who_is_slow_from_the_beginning_is_named_beside_its_stage(
    sums: tuple[int, int], slow: int
) -> None:
    [one] = told(pipeline(600, sums, slow))
    assert isinstance(one, Slow) and one.is_standing and one.is_stage
    assert (one.rank, one.section, one.cause) == (slow, Section.COMPUTE, "compute")
    stage_ns = USUAL_NS[Section.COMPUTE] * (HEAVIER if STAGES[slow] else 1.0)
    assert abs(one.peers_ns - stage_ns) < 2 * MS_NS, "what its stage needs, not the other"
    assert abs(one.own_ns - 1.5 * stage_ns) < 3 * MS_NS


@each_kind
@each_rank
def test_it_is_over_when_it_is_as_fast_as_its_stage(sums: tuple[int, int], slow: int) -> None:
    first, second = told(pipeline(800, sums, slow, until=400))
    assert isinstance(first, Slow) and isinstance(second, SlowOver)
    assert (first.rank, second.rank) == (slow, slow) and abs(second.until_step - 400) < 40


@each_kind
@each_rank
def test_who_becomes_slow_is_told_with_what_its_stage_needs(
    sums: tuple[int, int], slow: int
) -> None:
    [one] = told(pipeline(450, sums, slow, onset=300))
    assert isinstance(one, Slow) and not one.is_standing and one.is_stage
    stage_ns = USUAL_NS[Section.COMPUTE] * (HEAVIER if STAGES[slow] else 1.0)
    assert one.rank == slow and abs(one.peers_ns - stage_ns) < 2 * MS_NS


def test_one_counter_would_accuse_a_stage_and_not_see_who_is_slow() -> None:
    """What the groups are counted for."""
    accused = told(pipeline(600, ALIKE, counted=in_one_counter))
    assert {one.rank for one in accused} == {2, 3}
    unseen = told(pipeline(600, ALIKE, 0, counted=in_one_counter))
    assert 0 not in {one.rank for one in unseen}


@each_kind
def test_over_nodes_stages_are_read_alike(sums: tuple[int, int]) -> None:
    """Two nodes, each with one rank of each stage, and their words as texts."""
    across = AcrossNodes(4, BLOCK_STEPS, 2)
    for end, blocks in pipeline(600, sums, slow=1):
        for node in range(2):
            mine = {rank: blocks[rank] for rank in (node, node + 2)}
            steps = NodeSteps(0, 4, Timing.HOST, {end + 1: mine})
            across.hear(node, node_steps_from_text(node_steps_to_text(steps)), 0)
        across.judge(0)
    [named] = across.word(0, 0).slow
    assert named.slow.rank == 1 and named.slow.is_standing
