"""Slow ranks, from the pages their agent reads to its journal: whenever it looks, the same steps of
all ranks are compared, and what belongs to another life is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.core.detection.drift import LEARNT_BLOCKS, Drift
from keepstep.core.detection.stragglers import BLOCK_STEPS
from keepstep.core.economics.swap_price import SwapPrice
from keepstep.core.parts.gpus import Gpus
from keepstep.edge.shm.step_work_page import RECORDS, work_path
from keepstep.model.events import DEBUG
from keepstep.model.parts import GpuReading, PartHealth
from keepstep.model.step_work import FixedWork, Hindrance, Section, Timing, WorkBlock
from keepstep.model.units import MS_NS, S_NS
from keepstep.runtime.agent.slow_ranks import TICK_NS, WARM_STEPS
from keepstep.runtime.agent.step_blocks import _grown
from tests.core.slow_steps import Steps
from tests.runtime.agent.slow_node import RANKS, Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("every", [1, 7, 33])
def test_the_slow_rank_is_told_once_with_its_numbers(node: Node, every: int) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=1.5), 500, every=every)
    [told] = node.journal.events
    data = told.data
    assert told.kind == "slow-rank" and told.why.startswith("rank 1 is slow: compute +")
    assert len(told.why) <= 120 and "rank 1 is slow since step" in data["detail"]
    assert (data["rank"], data["section"], data["cause"]) == (1, "compute", "compute")
    assert 290 <= data["since_step"] <= 310 and data["told_step"] <= 340 + every
    assert 0.3 <= data["excess_ratio"] <= 0.6 and data["own_ns"] > data["peers_ns"]


def test_fixed_work_says_whether_its_processor_is_slow(node: Node) -> None:
    works = {0: FixedWork(frozenset({0}), (100,)), 1: FixedWork(frozenset({1}), (147, 150))}
    node.probes.works = works
    node.train(Steps(RANKS, 1, slow=1, factor=1.5), 500)
    assert node.executor.run()
    told, confirmed = node.journal.events
    assert (told.kind, confirmed.kind) == ("slow-rank", "slow-confirmed")
    assert (confirmed.data["rank"], confirmed.data["cause"]) == (1, "processor")
    assert "fixed work takes 1.47 times as long" in confirmed.why


@pytest.mark.parametrize("tries_ns", [101, 147])
def test_a_slow_processor_is_throttled_once_its_node_is_hot(node: Node, tries_ns: int) -> None:
    """The probe says so later, and not only once. A program with more to do is hot for that."""
    works = {0: FixedWork(frozenset({0}), (100,)), 1: FixedWork(frozenset({1}), (tries_ns,))}
    node.probes.works = works
    node.train(Steps(RANKS, 1, slow=1, factor=1.5), 500)
    assert node.executor.run() and node.journal.kinds == ["slow-rank", "slow-confirmed"]
    hot = "cores were slowed down for their heat 12 times since the last look"
    node.parts = (PartHealth("cpu", "bad", hot, "look at fans", slows=True),)
    node.train(Steps(RANKS, 1, slow=1, factor=1.5, onset=0), 200, first=500)
    told = node.journal.events[2:]
    assert [event.kind for event in told] == ["slow-confirmed"] * (tries_ns == 147)
    if told:
        assert told[0].data == {"rank": 1, "cause": "throttled", "ratio": 1.47}
        assert hot in told[0].why


def test_what_is_over_before_fixed_work_is_done_is_not_confirmed(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=1.5), 400)
    node.slow.forget(1)
    node.executor.run()
    assert node.journal.kinds == ["slow-rank", "slow-over"]


def test_clean_steps_are_not_told_of(node: Node) -> None:
    node.train(Steps(RANKS, 1), 900)
    assert node.journal.events == []


def test_when_it_is_over_that_is_told_too(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=0, factor=1.5, until=450), 700)
    assert node.journal.kinds == ["slow-rank", "slow-over"]
    assert node.journal.events[1].data["rank"] == 0


def test_the_quota_of_its_cgroup_is_the_cause(node: Node) -> None:
    looks = iter(range(1 << 30))

    def counts() -> Hindrance:
        is_throttled = node.looks > 43  # since step 300
        return Hindrance(next(looks) * 200 * MS_NS if is_throttled else 0, None)

    node.probes.hindrance = lambda pid: counts  # type: ignore[method-assign]
    node.slow.begin({0: 1, 1: 2}, 2)
    node.train(Steps(RANKS, 1, slow=1, factor=1.5, uses=(0.0, 1.0, 0.0)), 500)
    assert [(e.data["rank"], e.data["cause"]) for e in node.journal.events] == [(1, "quota")]


def test_what_hinders_a_rank_is_what_has_come_since_and_nothing_where_nobody_counts() -> None:
    assert _grown(Hindrance(100, 40), Hindrance(700, 40), 3) == (200, 0)
    assert _grown(Hindrance(700, 40), Hindrance(100, 49), 3) == (0, 3), "it has moved elsewhere"
    assert _grown(Hindrance(None, 40), Hindrance(700, None), 3) == (0, 0)


def test_a_restore_begins_anew(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=1.5), 400)
    assert node.journal.kinds == ["slow-rank"]
    node.train(Steps(RANKS, 2), 400, first=390, epoch=2)
    assert node.journal.kinds == ["slow-rank", "slow-over"]
    assert "restored state" in node.journal.events[1].why


def test_what_was_slow_in_its_first_steps_alone_is_not_told(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=9.0, onset=0, until=WARM_STEPS), 600)
    assert node.journal.events == []


def test_a_rank_that_ends_is_no_longer_slow(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=1.5), 400)
    node.slow.forget(1)
    assert (
        node.journal.kinds == ["slow-rank", "slow-over"]
        and "has ended" in node.journal.events[1].why
    )
    node.look()
    node.slow.begin({0: 1, 1: 3}, 2)
    assert node.journal.kinds == ["slow-rank", "slow-over"]


def test_while_a_rank_has_no_page_nobody_is_judged_and_that_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    missing = node.pages.pop(1)
    node.train(Steps(RANKS, 1, slow=0, factor=2.0), 7 * 59)
    assert node.journal.events == [], "30 s are not over"
    node.train(Steps(RANKS, 1, slow=0, factor=2.0), 100, first=7 * 59)
    [told] = node.journal.events
    assert told.kind == "slow-unknown" and told.data["doubt"] == "records"
    assert "for 30 s nothing was seen of what rank 1 did" in told.why
    missing.close()
    work_path(tmp_path, 1).unlink()
    node.look()
    node.start(1)
    node.train(Steps(RANKS, 1, slow=0, factor=1.5), 500, first=513)
    assert node.journal.kinds == ["slow-unknown", "slow-known", "slow-rank"]
    node.close()


@pytest.mark.parametrize("completed_step", [None, 500])
def test_who_has_not_done_its_first_step_is_not_doubted(
    node: Node, completed_step: int | None
) -> None:
    """It may compile for as long as it likes, resumed or not."""
    for _ in range(50):
        node.look()
    node.completed_step = completed_step
    for _ in range(500):
        node.look()
    assert node.journal.events == []


def test_steps_of_which_nobody_has_a_record_are_doubted_once(node: Node) -> None:
    for step in range(500):
        node.completed_step = step
        node.look()
    [told] = node.journal.events
    assert told.data["doubt"] == "records" and "ranks 0, 1 did" in told.why


def test_on_a_device_it_is_told_once_that_only_data_is_judged(node: Node) -> None:
    node.timing = Timing.UNSEEN
    for rank in range(RANKS):
        node.start(rank)
    node.train(Steps(RANKS, 1, slow=1, factor=3.0), 400)
    node.train(Steps(RANKS, 2), 400, first=390, epoch=2)
    [told] = node.journal.events
    assert told.kind == "slow-unknown" and told.data["doubt"] == "device"


def test_who_is_alone_on_its_node_is_told_of_once(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1, world_size=2)
    node.train(Steps(1, 1, slow=0, factor=3.0), 400)
    node.train(Steps(1, 2), 400, first=390, epoch=2)
    [told] = node.journal.events
    assert told.kind == "slow-unknown" and told.data["doubt"] == "alone"
    node.slow.begin({0: 1, 1: 2}, 2)
    assert node.journal.kinds == ["slow-unknown", "slow-known"]
    node.close()


def test_a_judge_that_goes_blind_is_told_once_and_that_it_sees_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.slow._canary_every_ns = 5 * S_NS
    node.train(Steps(RANKS, 1), 700)
    assert node.journal.events == [], "it sees, and nobody is slow"
    with monkeypatch.context() as broken:
        broken.setattr(Drift, "rise", lambda self: None)
        node.train(Steps(RANKS, 2, slow=1, factor=1.5, onset=0), 300, first=700)
    [told] = node.journal.events
    assert (told.kind, told.data["doubt"]) == ("slow-unknown", "blind")
    assert "does not see a slow one that is planted" in told.why
    node.train(Steps(RANKS, 3), 300, first=1000)
    assert [e.data.get("doubt") for e in node.journal.of("slow-known")] == ["blind"]


def test_one_that_is_blind_from_the_beginning_is_told_before_anybody_is_judged(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drift, "rise", lambda self: None)
    node.train(Steps(RANKS, 1), 50)
    assert [(e.kind, e.data["doubt"]) for e in node.journal.events] == [("slow-unknown", "blind")]


def test_a_judge_that_has_not_learnt_yet_is_shown_nothing(node: Node) -> None:
    node.slow._canary_every_ns = 1
    node.train(Steps(RANKS, 1), 140)
    assert node.journal.events == []


def test_of_a_job_of_one_rank_nothing_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=1)
    node.train(Steps(1, 1), 400)
    assert node.journal.events == []
    node.close()


def test_while_steps_are_learnt_that_is_told_and_again_after_a_restore(node: Node) -> None:
    """Nobody is named until then, which says nothing of how they are."""
    learning = node.journal.learning
    assert learning.kinds == ["slow-unknown"] and learning.levels == [DEBUG]
    assert "24 blocks of 5 steps or more" in learning.events[0].why
    learnt = LEARNT_BLOCKS * BLOCK_STEPS + WARM_STEPS
    node.train(Steps(RANKS, 1), learnt // BLOCK_STEPS * BLOCK_STEPS, every=1)
    assert learning.kinds == ["slow-unknown"]
    node.train(Steps(RANKS, 1), 3 * BLOCK_STEPS, first=learnt, every=1)
    assert learning.kinds == ["slow-unknown", "slow-known"]
    node.train(Steps(RANKS, 1), 50, first=learnt, epoch=2)
    assert learning.kinds == ["slow-unknown", "slow-known", "slow-unknown"]
    node.slow.begin(node.pids, RANKS)
    assert learning.kinds[3:] == [], "once"
    assert node.journal.kinds == []


def test_who_looks_too_rarely_begins_anew_and_accuses_nobody(node: Node) -> None:
    node.train(Steps(RANKS, 1), 4 * RECORDS, every=RECORDS + 300)
    assert node.journal.events == []


def test_steps_that_vary_too_much_are_told_of_once(node: Node) -> None:
    node.train(Steps(RANKS, 1, noise=0.9), 900)
    assert node.journal.kinds == ["slow-unknown"]
    node.train(Steps(RANKS, 2), 300, first=900, epoch=2)
    assert node.journal.kinds == ["slow-unknown", "slow-known"], "they are judged anew"


def test_it_looks_as_often_as_a_block_takes(node: Node) -> None:
    node.look()
    assert node.slow.tick_ns == TICK_NS, "nothing is known yet"
    node.train(Steps(RANKS, 1), 100)
    assert node.slow.tick_ns == BLOCK_STEPS * 50 * MS_NS


def test_what_is_done_is_told_with_its_price(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=2.0), 500)
    [told] = node.journal.events
    assert told.data["remedy"] == "observe" and told.data["left_ns"] > 0
    assert "What is done: nothing is changed" in told.data["detail"]
    assert "has one node" in told.data["detail"] and told.why.endswith("check clocks and heat")


def test_where_micro_batches_are_shared_that_is_what_is_done(node: Node) -> None:
    node.micro_batches = 7
    node.train(Steps(RANKS, 1, slow=1, factor=2.0), 500)
    [told] = node.journal.events
    assert told.data["remedy"] == "rebalance" and "of 14 for it" in told.data["detail"]
    assert 0 < told.data["left_ns"] < told.data["excess_ns"]


def test_a_node_is_to_be_swapped_once_what_it_costs_is_lost(node: Node) -> None:
    node.why_no_swap = ""
    node.train(Steps(RANKS, 1, slow=1, factor=2.0), 1000)  # 40 ms a step
    assert node.swaps == [] and node.executor.run()
    node.train(Steps(RANKS, 1, slow=1, factor=2.0, onset=0), 1500, first=1000)
    assert node.swaps and "leaves its place to a spare" in node.swaps[0]
    node.why_no_swap = "not now"
    told = len(node.swaps)
    node.train(Steps(RANKS, 1, slow=1, factor=2.0, onset=0), 100, first=2500)
    assert len(node.swaps) == told


def test_a_swap_that_this_run_has_seen_to_be_cheap_comes_sooner(node: Node) -> None:
    node.why_no_swap = ""
    node.swap_price = SwapPrice(5 * S_NS, "measured: 1 restart of this run")
    node.train(Steps(RANKS, 1, slow=1, factor=2.0), 1000)  # 40 ms a step
    assert node.executor.run()
    node.train(Steps(RANKS, 1, slow=1, factor=2.0, onset=0), 20, first=1000)
    assert node.swaps and "about 5.00 s once (measured: 1 restart of this run)" in node.swaps[0]


@pytest.mark.parametrize("tries_ns", [101, 147, None])
def test_no_node_is_swapped_for_a_program_that_has_more_to_do(
    node: Node, tries_ns: int | None
) -> None:
    """Nor while fixed work has not said whether it is that."""
    node.why_no_swap = ""
    if tries_ns is not None:
        works = {0: FixedWork(frozenset({0}), (100,)), 1: FixedWork(frozenset({1}), (tries_ns,))}
        node.probes.works = works
    node.train(Steps(RANKS, 1, slow=1, factor=2.0), 1000)
    if tries_ns is not None:
        assert node.executor.run()
    node.train(Steps(RANKS, 1, slow=1, factor=2.0, onset=0), 1500, first=1000)
    assert bool(node.swaps) == (tries_ns == 147)


def test_what_fixed_work_said_of_a_spell_that_is_over_says_nothing_of_the_next(node: Node) -> None:
    node.train(Steps(RANKS, 1, slow=1, factor=1.5, until=450), 700)
    node.train(Steps(RANKS, 1, slow=1, factor=1.8), 500, first=700)
    assert node.journal.kinds == ["slow-rank", "slow-over", "slow-rank"]
    assert node.executor.run()
    assert node.journal.kinds[3:] == ["slow-confirmed"], "of the second spell alone"


def on_device(run: Steps) -> Steps:
    """Its blocks as those of devices."""

    class OnDevice(Steps):
        def blocks(self, steps: int) -> Iterator[tuple[int, dict[int, WorkBlock]]]:
            for end, blocks in run.blocks(steps):
                yield end, {r: b._replace(device_ns=b.own_ns) for r, b in blocks.items()}

    return OnDevice(run.ranks, run.seed)


def test_a_slow_device_is_named_and_no_fixed_work_runs_on_its_processors(node: Node) -> None:
    node.timing = Timing.DEVICE
    node.why_no_swap = ""
    for rank in range(RANKS):
        node.start(rank)
    node.train(on_device(Steps(RANKS, 1, slow=1, factor=2.0)), 2500)
    [told] = node.journal.events
    assert (told.kind, told.data["rank"], told.data["cause"]) == ("slow-rank", 1, "compute")
    assert "fixed work is not run on devices" in told.data["detail"]
    assert not node.executor.run() and node.swaps == []


HOT = [  # as NVML reads them: 0x40 is a slowdown for heat
    GpuReading("0000:3b:00", "H100", 91, 0, 0x40, 900, 0.99),
    GpuReading("0000:86:00", "H100", 60, 31, 0, 1980, 0.99),
]


def looks_at(readings: Sequence[GpuReading], looks: int = 12) -> tuple[PartHealth, ...]:
    """What is known of GPUs that read so for a while."""
    judge = Gpus()
    return tuple([judge.add(readings, look * 10 * S_NS) for look in range(looks)][-1])


@pytest.mark.parametrize("hot_one", [0, 1])
def test_a_slow_rank_on_a_hot_device_is_throttled_and_its_node_may_be_swapped(
    node: Node, hot_one: int
) -> None:
    """Rank 1 is slow, whose device is the first one; the other's heat explains nothing."""
    node.timing = Timing.DEVICE
    node.why_no_swap = ""
    for rank in range(RANKS):
        node.start(rank)
    node.train(on_device(Steps(RANKS, 1, slow=1, factor=2.0)), 500)
    assert node.journal.kinds == ["slow-rank"]
    node.parts = looks_at(
        HOT if hot_one == 0 else [replace(HOT[1], bus="0000:3b:00"), replace(HOT[0], bus="0000:86")]
    )
    node.train(on_device(Steps(RANKS, 1, slow=1, factor=2.0, onset=0)), 2000, first=500)
    told = node.journal.events[1:]
    assert [event.kind for event in told] == ["slow-confirmed"] * (hot_one == 0)
    assert bool(node.swaps) == (hot_one == 0), "else nobody knows whether the device is slow"
    if told:
        assert told[0].data == {"rank": 1, "cause": "throttled", "ratio": 0.0}
        assert "gpu 0000:3b:00: slowed down by its heat in 12 of 12 looks" in told[0].why
        assert "(it is at 91 C)" in told[0].why


def test_heat_explains_no_rank_that_waits_for_its_data(node: Node) -> None:
    node.timing = Timing.DEVICE
    for rank in range(RANKS):
        node.start(rank)
    node.parts = looks_at(HOT)
    node.train(on_device(Steps(RANKS, 1, slow=1, factor=20.0, section=Section.DATA)), 500)
    assert node.journal.kinds == ["slow-rank"]


def test_ranks_that_measure_themselves_otherwise_are_not_compared(node: Node) -> None:
    node.timing = Timing.DEVICE
    node.start(1)
    node.train(on_device(Steps(RANKS, 1, slow=1, factor=2.0)), 400)
    [told] = node.journal.events
    assert told.kind == "slow-unknown" and told.data["doubt"] == "device"


def test_a_device_that_tells_no_more_is_unknown_while_its_rank_trains(node: Node) -> None:
    node.train(Steps(RANKS, 1), 300)
    for step in range(300, 400):
        node.completed_step = step
        node.look()
    [told] = node.journal.events
    assert told.kind == "slow-unknown" and told.data["doubt"] == "records"
    node.train(Steps(RANKS, 1), 100, first=400)
    assert node.journal.kinds == ["slow-unknown", "slow-known"]
