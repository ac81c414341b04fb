"""AcrossNodes: ranks of all nodes are compared, in the same steps, while their nodes tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keepstep.core.detection.across_nodes import SILENT_NS, AcrossNodes, block_steps_across
from keepstep.core.detection.drift import Drift
from keepstep.core.detection.stragglers import BLOCK_STEPS
from keepstep.model.node_steps import NodeSteps
from keepstep.model.step_work import Section, Timing, WorkBlock
from keepstep.model.units import MS_NS, S_NS
from tests.core.slow_steps import Steps

EPOCH = 4
Blocks = dict[int, WorkBlock]


class Leader:
    """Of nodes with so many ranks each, whose blocks end at multiples of their steps."""

    def __init__(self, nodes: int, ranks_each: int = 1) -> None:
        self.nodes, self.each = nodes, ranks_each
        self.across = AcrossNodes(EPOCH, BLOCK_STEPS, nodes)
        self.now_ns = 0
        self.timing = Timing.HOST

    def tell(self, node: int, blocks: dict[int, Blocks], epoch: int = EPOCH) -> None:
        self.across.hear(node, NodeSteps(0, epoch, self.timing, blocks), self.now_ns)

    def part(self, blocks: Blocks, node: int) -> Blocks:
        return {rank: block for rank, block in blocks.items() if rank // self.each == node}

    def train(self, run: Steps, steps: int, mute: range = range(0), who: int = -1) -> list[int]:
        """Node `who` tells nothing while the step is in `mute`. Who was slow, by block."""
        return self.train_on(run.blocks(steps), mute, who)

    def train_on(
        self, run: Iterator[tuple[int, Blocks]], mute: range = range(0), who: int = -1
    ) -> list[int]:
        named = []
        for end, blocks in run:
            self.now_ns += S_NS
            for node in range(self.nodes):
                if node != who or end not in mute:
                    self.tell(node, {end + 1: self.part(blocks, node)})
            self.across.judge(self.now_ns)
            named += [one.slow.rank for one in self.across.word(0, self.now_ns).slow]
        return named


def test_what_compares_them_proves_that_it_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(2)
    assert leader.across.flaw(0) == "", "it has heard of nobody"
    leader.train(Steps(2, 1), 400)
    assert leader.across.flaw(0) == leader.across.flaw(1) == ""
    monkeypatch.setattr(Drift, "rise", lambda self: None)
    assert "does not see a slow one that is planted" in leader.across.flaw(0)


def test_a_node_that_was_silent_is_shown_as_slow_only_when_it_is_known_again() -> None:
    leader = Leader(3)
    for number, block in enumerate(Steps(3, 1).blocks(1000)):
        leader.train_on(iter([block]), mute=range(300, 600), who=1)
        if number % 5 == 0:
            assert leader.across.flaw(number) == "", block[0]


@pytest.mark.parametrize(("nodes", "each"), [(2, 1), (4, 1), (2, 2)])
def test_a_rank_is_named_among_those_of_all_nodes(nodes: int, each: int) -> None:
    leader = Leader(nodes, each)
    named = leader.train(Steps(nodes * each, 1, slow=1, factor=1.5), 500)
    assert set(named) == {1}
    [one] = leader.across.word(0, leader.now_ns).slow
    assert one.slow.section is Section.COMPUTE and 290 <= one.slow.since_step <= 315
    assert leader.across.word(0, leader.now_ns).ranks == nodes * each


def test_a_node_that_is_slow_as_a_whole_is_named() -> None:
    """On it, its ranks have nobody to be compared with who is not as slow."""
    leader = Leader(3, 2)

    def slow_node() -> Iterator[tuple[int, Blocks]]:
        slow = Steps(6, 1, factor=1.4, all_slow=True).blocks(500)
        for (end, usual), (_, more) in zip(Steps(6, 1).blocks(500), slow, strict=True):
            yield end, {**usual, 2: more[2], 3: more[3]}

    assert set(leader.train_on(slow_node())) == {2, 3}


def test_clean_steps_name_nobody() -> None:
    leader = Leader(4)
    assert leader.train(Steps(4, 1), 3000) == []
    assert leader.across.word(0, leader.now_ns).judged_step == 3000


def test_a_silent_node_is_told_of_and_the_others_are_judged_without_it() -> None:
    leader = Leader(3)
    named = leader.train(Steps(3, 1, slow=1, factor=1.5), 700, range(200, 10_000), who=2)
    word = leader.across.word(0, leader.now_ns)
    assert word.silent == (2,) and word.ranks == 2 and set(named) == {1}
    assert word.judged_step == 700


def test_before_it_is_silent_nobody_is_judged_without_it() -> None:
    leader = Leader(2)
    for end in range(5, 5 * (SILENT_NS // S_NS), 5):
        leader.tell(0, {end: {0: next(Steps(1, 1).blocks(5))[1][0]}})
        leader.now_ns += S_NS
        assert leader.across.judge(leader.now_ns) == 0
    assert leader.across.silent(leader.now_ns) == ()


def test_a_slow_rank_whose_node_falls_silent_is_not_named_any_more() -> None:
    leader = Leader(2)
    assert set(leader.train(Steps(2, 1, slow=1, factor=1.5), 500)) == {1}
    for end in range(505, 705, 5):
        leader.now_ns += S_NS
        leader.tell(0, {end: {0: next(Steps(1, 1).blocks(5))[1][0]}})
        leader.across.judge(leader.now_ns)
    word = leader.across.word(0, leader.now_ns)
    assert word.slow == () and word.silent == (1,)


def test_who_comes_back_is_judged_again() -> None:
    leader = Leader(3)
    run = Steps(3, 1, slow=2, factor=1.5, onset=700)
    assert set(leader.train(run, 900, range(100, 400), who=2)) == {2}
    assert leader.across.word(0, leader.now_ns).silent == ()


def test_a_block_that_a_node_has_passed_is_judged_by_nobody() -> None:
    leader = Leader(2)
    _, blocks = next(Steps(2, 1).blocks(5))
    leader.tell(0, {5: {0: blocks[0]}, 10: {0: blocks[0]}})
    assert leader.across.judge(0) == 0
    leader.tell(1, {10: {1: blocks[1]}})
    assert leader.across.judge(0) == 1
    assert leader.across.word(0, 0).judged_step == 10
    leader.tell(1, {5: {1: blocks[1]}, 10: {1: blocks[1]}})
    assert leader.across.judge(0) == 0, "it is over"


def test_what_is_none_of_its_business_is_not_heard() -> None:
    leader = Leader(2)
    _, blocks = next(Steps(2, 1).blocks(5))
    leader.tell(0, {5: {0: blocks[0]}})
    leader.tell(1, {5: {1: blocks[1]}}, epoch=3)
    leader.tell(1, {5: {0: blocks[0]}})  # the other's rank
    leader.tell(1, {7: {1: blocks[1]}})  # no multiple
    leader.tell(1, {5: {1: blocks[1]._replace(steps=3)}})
    leader.tell(2, {5: {1: blocks[1]}})  # there is no such node
    assert leader.across.judge(0) == 0
    leader.tell(1, {5: {1: blocks[1]}})
    assert leader.across.judge(0) == 1


def test_costs_of_micro_batches_go_with_who_is_slow() -> None:
    leader = Leader(2)
    for end, blocks in Steps(2, 1, slow=1, factor=2.0).blocks(500):
        shared = {r: b._replace(micro_batches=4 * BLOCK_STEPS) for r, b in blocks.items()}
        for node in range(2):
            leader.tell(node, {end + 1: leader.part(shared, node)})
        leader.across.judge(0)
    [one] = leader.across.word(0, 0).slow
    assert one.micro_batches == 8 and 9 * MS_NS < one.usual_cost_ns < 11 * MS_NS


def test_blocks_are_as_long_as_judging_many_ranks_may_cost() -> None:
    assert block_steps_across(50 * MS_NS, 8) == 20
    assert block_steps_across(50 * MS_NS, 1000) == 400
    assert block_steps_across(10 * S_NS, 8) == BLOCK_STEPS
