"""Ranks of several nodes, from their pages to the journals of their agents: who is slow is told
once, on its own node; and whose steps nobody hears of is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.core.detection.stragglers import BLOCK_STEPS
from keepstep.model.step_work import WorkBlock
from keepstep.ports import KV
from keepstep.runtime.agent.slow_ranks import TICK_NS
from keepstep.runtime.agent.steps_board import StepsBoard
from tests.core.slow_steps import Steps
from tests.runtime.agent.slow_node import Node
from tests.runtime.fakes import FakeKV, FakeTime, Table

STEP_NS = 50_000_000  # as the records of these ranks say
LOOK_STEPS = TICK_NS // STEP_NS


class Nodes:
    """Of so many ranks each, whose agents meet in one KV."""

    def __init__(self, home: Path, nodes: int, each: int = 1) -> None:
        self.time, self.table = FakeTime(), Table()
        self.kvs: dict[int, KV | None] = {
            node: FakeKV(self.time, self.table) for node in range(nodes)
        }
        self.each = each
        self.nodes = [
            Node(home / str(node), each, nodes * each, node * each, self.board(node, nodes))
            for node in range(nodes)
        ]
        self.trained = 0

    def board(self, node: int, nodes: int) -> StepsBoard:
        return StepsBoard(lambda: self.kvs[node], 0, node, nodes)

    def train(
        self,
        run: Steps,
        steps: int,
        epoch: int = 1,
        at: Callable[[int], None] = lambda step: None,
    ) -> None:
        blocks = list(run.blocks(steps))
        ways: list[Iterator[int]] = [
            node.steps(iter(blocks), self.trained, epoch) for node in self.nodes
        ]
        for step in range(steps):
            at(step)
            for way in ways:
                assert next(way) == step
            if step % LOOK_STEPS == LOOK_STEPS - 1:
                self.look()
        self.trained += steps

    def look(self) -> None:
        for node in self.nodes:
            node.look()
        for _ in range(4):
            self.time.pass_ns()

    def told(self, node: int) -> list[str]:
        return self.nodes[node].journal.kinds


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def test_a_rank_that_is_alone_on_its_node_is_compared_with_those_of_others(home: Path) -> None:
    nodes = Nodes(home, 3)
    nodes.train(Steps(3, 1, slow=1, factor=1.5, onset=900), 1400)
    assert [nodes.told(node) for node in range(3)] == [[], ["slow-rank"], []]
    [event] = nodes.nodes[1].journal.events
    assert event.data["rank"] == 1 and event.data["section"] == "compute"
    assert 880 <= event.data["since_step"] <= 930 and event.data["told_step"] <= 1100
    assert "its peers" in event.data["detail"] and "all others wait" in event.data["detail"]
    assert event.data["remedy"] == "observe" and "has one node" in event.data["detail"]


def test_it_is_told_once_when_that_is_over(home: Path) -> None:
    nodes = Nodes(home, 2)
    nodes.train(Steps(2, 1, slow=1, factor=1.5, onset=900, until=1400), 2000)
    assert [nodes.told(0), nodes.told(1)] == [[], ["slow-rank", "slow-over"]]
    assert "it was slow for" in nodes.nodes[1].journal.events[1].why


def test_a_rank_is_learnt_once_the_leader_has_compared_enough(home: Path) -> None:
    """The node itself has seen more blocks by then: the leader's are of 20 steps here."""
    nodes = Nodes(home, 2)
    nodes.train(Steps(2, 1), 400)
    assert [node.journal.learning.kinds for node in nodes.nodes] == [["slow-unknown"]] * 2
    nodes.train(Steps(2, 1), 300)
    both = ["slow-unknown", "slow-known"]
    assert [node.journal.learning.kinds for node in nodes.nodes] == [both] * 2


def test_clean_steps_of_two_nodes_are_not_told_of(home: Path) -> None:
    nodes = Nodes(home, 2)
    nodes.train(Steps(2, 1), 3000)
    assert [nodes.told(0), nodes.told(1)] == [[], []]


def test_a_rank_that_its_own_agent_has_named_is_not_told_again(home: Path) -> None:
    """Compared with its peers on the node it is named sooner, and by the leader later on."""
    nodes = Nodes(home, 2, each=2)
    nodes.train(Steps(4, 1, slow=3, factor=1.5, onset=900, until=1500), 2200)
    assert [nodes.told(0), nodes.told(1)] == [[], ["slow-rank", "slow-over"]]


def test_a_node_that_is_slow_as_a_whole_is_told_by_each_of_its_ranks(home: Path) -> None:
    nodes = Nodes(home, 3, each=2)

    class SlowNode(Steps):
        def blocks(self, steps: int) -> Iterator[tuple[int, dict[int, WorkBlock]]]:
            slow = Steps(6, 1, factor=1.5, all_slow=True, onset=900).blocks(steps)
            for (end, usual), (_, more) in zip(super().blocks(steps), slow, strict=True):
                yield end, {**usual, 4: more[4], 5: more[5]}

    nodes.train(SlowNode(6, 1), 1500)
    assert [nodes.told(node) for node in range(3)] == [[], [], ["slow-rank"] * 2]
    assert {event.data["rank"] for event in nodes.nodes[2].journal.events} == {4, 5}
    assert not nodes.nodes[2].executor.run(), "fixed work there has no measure"


def test_a_whole_node_is_not_swapped_while_nobody_knows_what_its_processors_do(
    home: Path,
) -> None:
    nodes = Nodes(home, 2)
    nodes.nodes[1].why_no_swap = ""
    nodes.train(Steps(2, 1, slow=1, factor=2.0, onset=900), 3500)
    assert nodes.nodes[1].swaps == []
    detail = nodes.nodes[1].journal.events[0].data["detail"]
    assert "fixed work is not compared between nodes" in detail


def test_a_node_that_waits_for_its_disk_is_swapped_once_that_costs_enough(home: Path) -> None:
    nodes = Nodes(home, 2)
    nodes.nodes[1].why_no_swap = ""
    run = Steps(2, 1, slow=1, factor=2.0, onset=900, uses=(0.0, 0.0, 0.0))
    nodes.train(run, 3500)
    [event] = nodes.nodes[1].journal.events
    assert event.data["cause"] == "blocked" and nodes.nodes[1].swaps


def test_shared_micro_batches_of_other_nodes_are_in_the_price(home: Path) -> None:
    nodes = Nodes(home, 2)
    for node in nodes.nodes:
        node.micro_batches = 7
    nodes.train(Steps(2, 1, slow=1, factor=2.0, onset=900), 1400)
    [event] = nodes.nodes[1].journal.events
    assert event.data["remedy"] == "rebalance" and "of 14 for it" in event.data["detail"]


def test_a_node_that_is_not_heard_is_unknown_on_both_sides(home: Path) -> None:
    """Never well: the leader names it, and it says so itself."""
    nodes = Nodes(home, 3)

    def cut(step: int) -> None:
        if step == 300:
            nodes.kvs[2] = None
        if step == 1700:
            nodes.kvs[2] = FakeKV(nodes.time, nodes.table)

    nodes.train(Steps(3, 1), 1600, at=cut)
    leader, alone = nodes.nodes[0].journal.events, nodes.nodes[2].journal.events
    assert [event.data["doubt"] for event in leader] == ["nodes"] and "node 2 are" in leader[0].why
    assert [event.data["doubt"] for event in alone] == ["alone"]
    assert nodes.told(1) == []
    nodes.kvs[2] = FakeKV(nodes.time, nodes.table)
    nodes.train(Steps(3, 2), 400)
    assert nodes.told(0) == nodes.told(2) == ["slow-unknown", "slow-known"]


def test_without_a_leader_all_others_are_unknown(home: Path) -> None:
    nodes = Nodes(home, 2, each=2)
    nodes.kvs[0] = None
    nodes.train(Steps(4, 1), 1000)
    assert nodes.told(1) == ["slow-unknown"]
    [event] = nodes.nodes[1].journal.events
    assert event.data["doubt"] == "nodes" and "node 0 has not said" in event.why


def test_what_was_slow_is_no_longer_judged_once_nobody_hears_of_it(home: Path) -> None:
    nodes = Nodes(home, 2)
    nodes.train(Steps(2, 1, slow=1, factor=1.5, onset=900), 1400)
    nodes.kvs[0] = FakeKV(nodes.time, Table())
    nodes.train(Steps(2, 1, slow=1, factor=1.5, onset=0), 2000)
    assert sorted(nodes.told(1)) == ["slow-over", "slow-rank", "slow-unknown"]
    [over] = [e for e in nodes.nodes[1].journal.events if e.kind == "slow-over"]
    assert "is no longer judged" in over.why


def test_a_restore_begins_anew(home: Path) -> None:
    nodes = Nodes(home, 2)
    nodes.train(Steps(2, 1, slow=1, factor=1.5, onset=900), 1400)
    nodes.train(Steps(2, 2), 1000, epoch=2)
    assert [nodes.told(0), nodes.told(1)] == [[], ["slow-rank", "slow-over"]]
    assert "restored state" in nodes.nodes[1].journal.events[1].why


def test_texts_that_are_none_of_this_release_count_for_nothing(home: Path) -> None:
    nodes = Nodes(home, 2)

    def spoil(step: int) -> None:
        nodes.table.values["0/slow"] = "?"
        nodes.table.values["0/steps/1"] = "?"

    nodes.train(Steps(2, 1), 1000, at=spoil)
    assert nodes.told(1) == ["slow-unknown"]


def test_steps_that_vary_too_much_among_nodes_are_told_of(home: Path) -> None:
    nodes = Nodes(home, 2)
    nodes.train(Steps(2, 1, noise=1.3), 2000)
    assert nodes.told(1) == ["slow-unknown"]
    assert nodes.nodes[1].journal.events[0].data["doubt"] == "noise"


def test_what_each_tells_is_small(home: Path) -> None:
    nodes = Nodes(home, 2, each=8)
    nodes.train(Steps(16, 1), 600)
    assert set(nodes.table.values) == {"0/slow", "0/steps/1"}
    assert len(nodes.table.values["0/steps/1"]) < 8 * 4 * 300
    assert BLOCK_STEPS * STEP_NS < 10**9, "blocks are longer than those of one node"
