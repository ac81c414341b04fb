"""Stragglers: who is slow is named in time, with section and cause; clean noise names nobody; and
where nothing can be told nothing is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.detection.drift import LEARNT_BLOCKS, MOST_NOISE, Drift, DriftPoint
from keepstep.core.detection.slow_doubts import Doubt
from keepstep.core.detection.slow_now import SlowNow
from keepstep.core.detection.slow_words import SlowOver
from keepstep.core.detection.stragglers import BLOCK_STEPS, Stragglers, common_timing, judge_of
from keepstep.model.events import Event
from keepstep.model.step_work import JUDGED, PASSES, Section, Slow, Timing, WorkBlock
from keepstep.model.units import MS_NS
from tests.core.slow_steps import SHARES, USUAL_NS, Steps, told_of

ONSET = 300
SEEDS = st.integers(0, 1 << 20)
FEW = settings(max_examples=15, deadline=None)
NOISES = st.sampled_from([0.01, 0.03, 0.1])


def first_named(run: Steps, steps: int) -> tuple[int, Slow]:
    told = told_of(run, steps)
    assert told, "nobody was named"
    end, slow = told[0]
    assert isinstance(slow, Slow)
    assert end >= run.onset, f"named before anybody was slow: {slow.why}"
    return end, slow


@FEW
@given(
    SEEDS,
    st.sampled_from([2, 4]),
    NOISES,
    st.sampled_from([(1.0, 1.0), (0.25, 1.0), (0.1, 2.0)]),
    st.booleans(),
    st.sampled_from([0.0, 0.005]),
    st.sampled_from([0.0, 0.08]),
)
def test_clean_steps_of_whatever_length_name_nobody(
    seed: int,
    ranks: int,
    noise: float,
    lengths: tuple[float, float],
    tells: bool,
    rare: float,
    spread: float,
) -> None:
    run = Steps(ranks, seed, noise, lengths, tells, rare, spread)
    assert [slow.why for _, slow in told_of(run, 3000)] == []


@FEW
@given(SEEDS, st.sampled_from([2, 3, 4]), NOISES, st.booleans(), st.sampled_from([0.0, 0.005]))
def test_half_as_much_again_is_named_within_50_steps(
    seed: int, ranks: int, noise: float, varies: bool, rare: float
) -> None:
    lengths = (0.25, 1.0) if varies else (1.0, 1.0)
    run = Steps(
        ranks, seed, noise, lengths, varies, rare, slow=seed % ranks, factor=1.5, onset=ONSET
    )
    end, slow = first_named(run, ONSET + 100)
    assert end < ONSET + (50 if noise < 0.1 else 100)
    assert (slow.rank, slow.section, slow.cause) == (seed % ranks, Section.COMPUTE, "compute")
    assert abs(slow.since_step - ONSET) <= 5 * BLOCK_STEPS and slow.has_peers
    assert not slow.is_stage
    assert 0.5 <= slow.lost_ns / ((end + 1 - ONSET) * slow.excess_ns) <= 1.5
    assert f"rank {slow.rank} is slow since step {slow.since_step}" in slow.why


@FEW
@given(SEEDS, st.sampled_from([2, 4]), NOISES, st.booleans())
def test_a_tenth_more_is_named_within_500_steps(
    seed: int, ranks: int, noise: float, varies: bool
) -> None:
    lengths = (0.25, 1.0) if varies else (1.0, 1.0)
    noise = min(noise, 0.05)
    run = Steps(ranks, seed, noise, lengths, varies, slow=seed % ranks, factor=1.1, onset=ONSET)
    end, slow = first_named(run, ONSET + 500)
    assert (slow.rank, slow.section) == (seed % ranks, Section.COMPUTE)
    assert end < ONSET + 500 and 0.06 <= slow.excess_ratio <= 0.16


@pytest.mark.parametrize(
    ("section", "factor", "cause"),
    [
        (Section.DATA, 20.0, "data"),
        (Section.UPDATE, 4.0, "compute"),
        (Section.HOOK, 6.0, "compute"),
    ],
)
def test_the_section_that_takes_longer_is_named(
    section: Section, factor: float, cause: str
) -> None:
    run = Steps(4, 1, slow=2, factor=factor, section=section)
    _, slow = first_named(run, 400)
    assert (slow.rank, slow.section, slow.cause) == (2, section, cause)


@pytest.mark.parametrize(
    ("uses", "cause"),
    [
        ((1.0, 0.0, 0.0), "compute"),
        ((0.0, 1.0, 1.0), "quota"),
        ((0.0, 1.0, 0.0), "neighbour"),
        ((0.0, 0.0, 0.0), "blocked"),
    ],
)
def test_what_grew_with_it_is_the_cause(uses: tuple[float, float, float], cause: str) -> None:
    _, slow = first_named(Steps(4, 3, slow=1, factor=1.5, uses=uses), 400)
    assert (slow.rank, slow.cause) == (1, cause)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("factor", "computed", "crowded"), [(1.5, 0.25, 0.0), (2.0, 0.08, 0.5), (3.0, 0.08, 0.0)]
)
def test_who_shares_its_processor_computes_longer_and_that_is_its_neighbour_s(
    factor: float, computed: float, crowded: float, ranks: int
) -> None:
    """The other one has its caches as well."""
    for throttled, cause in ((0.0, "neighbour"), (1 - computed, "quota")):
        uses = (computed, 1 - computed, throttled)
        run = Steps(ranks, 3, slow=1, factor=factor, uses=uses, crowded=crowded)
        told = [one for _, one in told_of(run, 700)]
        assert [(one.rank, getattr(one, "cause", "over")) for one in told] == [(1, cause)]
        [slow] = told
        assert isinstance(slow, Slow) and slow.section is Section.COMPUTE and slow.has_peers
        assert slow.excess_ns > 0.7 * (factor - 1) * USUAL_NS[Section.COMPUTE]


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_computes_longer_on_a_crowded_machine_waits_longer_and_that_is_its_own(
    ranks: int,
) -> None:
    run = Steps(ranks, 3, slow=1, factor=1.5, crowded=1.0)
    _, slow = first_named(run, 400)
    assert (slow.rank, slow.cause) == (1, "compute")


def test_who_has_a_neighbour_and_more_to_do_is_told_for_both() -> None:
    run = Steps(2, 3, slow=1, factor=2.2, uses=(0.4, 0.6, 0.0))
    told = [one for _, one in told_of(run, 900)]
    assert [one.cause for one in told if isinstance(one, Slow)] == ["neighbour", "compute"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_neighbour_from_the_beginning_on_is_no_work(ranks: int) -> None:
    run = Steps(ranks, 3, slow=1, factor=2.0, uses=(0.3, 0.7, 0.0), onset=0)
    [(_, slow)] = told_of(run, 600)
    assert isinstance(slow, Slow) and (slow.rank, slow.cause) == (1, "neighbour")
    assert slow.is_standing


@pytest.mark.parametrize(("factor", "steps"), [(1.2, 40), (1.13, 70)])
@pytest.mark.parametrize("seed", range(5))
def test_what_passes_before_it_has_cost_much_is_not_told(
    factor: float, steps: int, seed: int
) -> None:
    """A processor is slower for a few seconds now and then."""
    short = Steps(2, seed, slow=1, factor=factor, onset=ONSET, until=ONSET + steps)
    judge = Stragglers()
    assert [told for end, blocks in short.blocks(600) for told in judge.add(blocks, end)] == []
    _, lasting = first_named(Steps(2, seed, slow=1, factor=factor, onset=ONSET), 600)
    assert lasting.rank == 1


def test_memory_pressure_is_a_cause() -> None:
    judge = Stragglers()
    found: list[Slow | SlowOver] = []
    for end, blocks in Steps(2, 5, slow=0, factor=1.6, uses=(0.0, 0.5, 0.0)).blocks(400):
        stalled = 60 * MS_NS if end >= ONSET else 0
        found += judge.add({r: b._replace(memory_stall_ns=stalled) for r, b in blocks.items()}, end)
    assert [(s.rank, s.cause) for s in found if isinstance(s, Slow)] == [(0, "memory")]


@FEW
@given(SEEDS, st.sampled_from([2, 4]))
def test_it_is_told_when_it_is_over_and_when_it_comes_again(seed: int, ranks: int) -> None:
    run = Steps(ranks, seed, slow=1, factor=1.5, onset=ONSET, until=500)
    judge = Stragglers()
    told = [what for _, what in told_of(run, 700, judge)]
    assert [type(what) for what in told] == [Slow, SlowOver] and judge.slow == {}
    assert isinstance(told[1], SlowOver) and abs(told[1].until_step - 500) <= 10 * BLOCK_STEPS
    again = replace(run, seed=seed + 1, onset=0, until=1 << 30)
    assert [slow.rank for _, slow in told_of(again, 100, judge)] == [1]


@FEW
@given(SEEDS)
def test_of_two_ranks_nobody_is_slow_when_the_other_has_become_faster(seed: int) -> None:
    run = Steps(2, seed, slow=1, factor=0.6, uses=(1.0, 0.0, 0.0))
    assert [slow.why for _, slow in told_of(run, 900)] == []


@FEW
@given(SEEDS, st.sampled_from([1, 2, 4]))
def test_all_alike_slower_is_the_programs_own(seed: int, ranks: int) -> None:
    assert told_of(Steps(ranks, seed, factor=1.5, all_slow=True), 900) == []


@pytest.mark.parametrize(
    ("uses", "cause"), [((0.0, 1.0, 1.0), "quota"), ((0.0, 1.0, 0.0), "neighbour")]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_alike_slower_is_told_where_the_kernel_says_why(
    ranks: int, uses: tuple[float, float, float], cause: str
) -> None:
    told = told_of(Steps(ranks, 2, factor=1.5, all_slow=True, uses=uses), 500)
    named = [slow for _, slow in told if isinstance(slow, Slow)]
    assert {slow.rank for slow in named} == set(range(ranks))
    assert all(slow.cause == cause and not slow.has_peers for slow in named)


def test_one_of_two_that_is_hindered_is_measured_by_its_peer() -> None:
    """Its own past would tell of it, too, and of whatever hinders both for a while."""
    told = told_of(Steps(2, 4, slow=1, factor=1.6, uses=(0.0, 1.0, 0.0)), 500)
    assert [(slow.rank, slow.has_peers) for _, slow in told if isinstance(slow, Slow)] == [
        (1, True)
    ]


ASLEEP_NS = {Section.DATA: MS_NS // 5, Section.COMPUTE: 3 * MS_NS, Section.UPDATE: MS_NS // 3}


def told_of_sleepers(run: Steps, sleep_ns: Sequence[int]) -> list[str]:
    """What is said of ranks that also sleep in each step's body, each for so long."""
    judge, told = Stragglers(), []
    for end, blocks in run.blocks(ONSET + 600):
        for rank, block in blocks.items():
            own_ns = list(block.own_ns)
            own_ns[Section.COMPUTE] += sleep_ns[rank] * BLOCK_STEPS
            blocks[rank] = block._replace(own_ns=tuple(own_ns))
        told += [one.why for one in judge.add(blocks, end)]
    return told


@FEW
@given(SEEDS, st.sampled_from([2, 4]))
def test_a_quarter_more_of_what_a_rank_computes_is_little_of_a_step_that_sleeps(
    seed: int, ranks: int
) -> None:
    run = Steps(ranks, seed, slow=0, factor=1.25, usual=ASLEEP_NS, onset=ONSET)
    assert told_of_sleepers(run, [22 * MS_NS] * ranks) == []


@FEW
@given(SEEDS)
def test_who_takes_longer_and_is_still_faster_than_its_peer_holds_nobody_up(seed: int) -> None:
    run = Steps(2, seed, slow=1, factor=1.8, usual=ASLEEP_NS, onset=ONSET)
    assert told_of_sleepers(run, [26 * MS_NS, 22 * MS_NS]) == []
    [told, *_] = told_of_sleepers(run, [22 * MS_NS, 22 * MS_NS])
    assert "rank 1 is slow" in told and "ms more than before" in told


@FEW
@given(SEEDS)
def test_too_noisy_is_unknown(seed: int) -> None:
    run = Steps(2, seed, noise=0.9, slow=1, factor=1.5)
    judge = Stragglers()
    assert told_of(run, 1000, judge) == []
    assert list(judge.doubts()) == ["noise"]
    assert "cannot be told" in judge.doubts()["noise"]
    assert "job.report(tokens=...)" in judge.doubts()["noise"]


def test_nobody_who_tells_tokens_is_advised_to_tell_them() -> None:
    judge = Stragglers()
    told_of(Steps(2, 1, noise=0.9, tells_tokens=True), 1000, judge)
    assert "see what else uses its processors" in judge.doubts()["noise"]
    assert "job.report" not in judge.doubts()["noise"]


def test_quiet_steps_leave_no_doubt() -> None:
    judge = Stragglers()
    told_of(Steps(2, 1), 500, judge)
    assert judge.doubts() == {}


def test_on_a_device_it_is_said_that_only_data_loading_is_judged() -> None:
    """Not when something varies, but from the first block on."""
    judge = judge_of(Timing.UNSEEN)
    told_of(Steps(2, 1, slow=1, factor=3.0, onset=0), BLOCK_STEPS, judge)
    [(doubt, why)] = judge.doubts().items()
    assert doubt == "device" and "on a device only data loading is judged" in why
    judge.forget(0)
    assert "rank 1 is alone on its node" in judge.doubts()["device"]


def test_on_a_device_data_that_varies_too_much_is_unknown() -> None:
    judge = judge_of(Timing.UNSEEN)
    usual = {section: 10 * MS_NS for section in Section if section is not Section.APART}
    told_of(Steps(2, 1, noise=1.5, usual=usual), 500, judge)
    assert set(judge.doubts()) == {"device", "noise"}


def test_who_is_alone_on_its_node_has_nobody_to_be_compared_with() -> None:
    judge = Stragglers()
    told_of(Steps(1, 1, slow=0, factor=2.0), 500, judge)
    [(doubt, why)] = judge.doubts().items()
    assert doubt == "alone" and "rank 0 is alone" in why and "quota" in why


def test_what_a_rank_waits_for_its_peers_is_not_slow() -> None:
    judge = Stragglers()
    for end, blocks in Steps(2, 7).blocks(900):
        late = {0: blocks[0]._replace(wait_ns=10**9 if end > ONSET else 0), 1: blocks[1]}
        assert judge.add(late, end) == []


def slowed(block: WorkBlock, factor: float) -> WorkBlock:
    return block._replace(
        own_ns=tuple(int(factor * ns) for ns in block.own_ns),
        cpu_ns=tuple(int(factor * ns) for ns in block.cpu_ns),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_slow_from_the_beginning_is_told_where_all_do_the_same(ranks: int) -> None:
    judge = Stragglers()
    found: list[Any] = []
    for end, blocks in Steps(ranks, 3).blocks(600):
        found += judge.add({**blocks, 1: slowed(blocks[1], 1.5)}, end)
    assert [(slow.rank, slow.is_standing) for slow in found] == [(1, True)]
    assert "from the beginning" in found[0].why and judge.slow.keys() == {1}


def test_stages_of_a_pipeline_differ_and_nobody_is_slow() -> None:
    judge = Stragglers()
    for end, blocks in Steps(2, 3).blocks(900):
        heavier = slowed(blocks[1], 1.5)._replace(collectives=7 * BLOCK_STEPS)
        assert judge.add({0: blocks[0], 1: heavier}, end) == []


def test_a_heavier_stage_that_becomes_slow_is_named_all_the_same() -> None:
    judge = Stragglers()
    found: list[Any] = []
    for end, blocks in Steps(2, 3, slow=1, factor=1.5).blocks(400):
        heavier = slowed(blocks[1], 1.5)._replace(collectives=7 * BLOCK_STEPS)
        found += judge.add({0: blocks[0], 1: heavier}, end)
    assert [slow.rank for slow in found] == [1]


def test_two_slow_ranks_of_four_are_both_named() -> None:
    judge = Stragglers()
    found: list[Any] = []
    for end, blocks in Steps(4, 9).blocks(700):
        now = {
            **blocks,
            **({0: slowed(blocks[0], 1.5)} if end > 300 else {}),
            **({3: slowed(blocks[3], 1.4)} if end > 450 else {}),
        }
        found += judge.add(now, end)
    assert [slow.rank for slow in found] == [0, 3]


def test_what_is_shorter_than_anybody_feels_is_not_told() -> None:
    usual = {section: ns // 1000 for section, ns in USUAL_NS.items()}
    assert told_of(Steps(2, 1, slow=1, factor=1.5, usual=usual), 900) == []


def test_on_a_device_only_data_is_judged() -> None:
    only_data = lambda: judge_of(Timing.UNSEEN)  # noqa: E731
    assert told_of(Steps(2, 1, slow=1, factor=1.5), 900, only_data()) == []
    late = Steps(2, 1, slow=1, factor=20.0, section=Section.DATA)
    [(_, slow)] = told_of(late, 400, only_data())
    assert isinstance(slow, Slow) and (slow.rank, slow.section) == (1, Section.DATA)


def test_who_is_forgotten_is_learnt_anew() -> None:
    judge = Stragglers()
    told_of(Steps(2, 1, slow=1, factor=1.5), 400, judge)
    assert judge.slow.keys() == {1}
    judge.forget(1)
    assert judge.slow == {}


@given(st.lists(st.floats(-1, 1), min_size=LEARNT_BLOCKS, max_size=200))
def test_nothing_rises_before_a_reference_or_without_excess(ratios: list[float]) -> None:
    channel = Drift(0.06)
    for number, ratio in enumerate(ratios):
        if channel.add(DriftPoint(ratio, 0.0), number):
            assert channel.reference is not None and channel.reference.noise <= MOST_NOISE
            assert number >= LEARNT_BLOCKS


def event(kind: str, **data: Any) -> Event:
    return Event(0, 0, "agent", kind, "so it was", data)


def test_who_is_slow_now_is_what_the_journal_told_last() -> None:
    begins, slow = event("job-started"), event("slow-rank", rank=3, excess_ratio=0.5)
    assert SlowNow([begins, slow]).excess_ratios() == {3: 0.5}
    assert SlowNow([begins, slow, event("slow-over", rank=3)]).by_rank() == {}
    assert SlowNow([slow, begins]).by_rank() == {}
    odd = [event("slow-rank", rank="3"), event("slow-rank", rank=2, excess_ratio="much")]
    assert SlowNow(odd).excess_ratios() == {2: 0.0}


def test_what_fixed_work_said_counts_for_the_spell_it_was_said_in() -> None:
    slow, over = event("slow-rank", rank=3), event("slow-over", rank=3)
    said = event("slow-confirmed", rank=3, cause="program")
    assert SlowNow([slow, said]).confirmed() == {3: said}
    assert SlowNow([said, slow]).confirmed() == {}
    assert SlowNow([slow, said, over]).confirmed() == {}
    assert SlowNow([slow, said, slow]).confirmed() == {}, "that is asked anew"
    assert SlowNow([slow, said, event("job-started")]).confirmed() == {}


def test_a_doubt_counts_until_it_is_over() -> None:
    noise, alone = (event("slow-unknown", doubt=doubt) for doubt in ("noise", "alone"))
    over = event("slow-known", doubt="noise")
    assert SlowNow([noise, alone]).doubts() == [noise, alone]
    assert SlowNow([noise, alone, over]).doubts() == [alone]
    assert SlowNow([noise, alone, event("job-started")]).doubts() == []


def shared(end: int, shares: dict[int, int], costs_ms: dict[int, float], seed: int) -> Any:
    """A block of ranks that share micro-batches, each of which takes them so long."""
    noise = Steps(len(shares), seed=seed + end, noise=0.02)
    _, usual = next(noise.blocks(BLOCK_STEPS))
    found = {}
    for rank, block in usual.items():
        scale = shares[rank] * costs_ms[rank] * MS_NS / USUAL_NS[Section.COMPUTE]
        own, cpu = list(block.own_ns), list(block.cpu_ns)
        own[Section.COMPUTE] = int(own[Section.COMPUTE] * scale)
        cpu[Section.COMPUTE] = int(cpu[Section.COMPUTE] * scale)
        micro_batches = shares[rank] * BLOCK_STEPS
        found[rank] = block._replace(
            own_ns=tuple(own), cpu_ns=tuple(cpu), micro_batches=micro_batches
        )
    return found


@pytest.mark.parametrize("tells", [False, True])
def test_who_takes_over_a_slow_ranks_work_is_not_slow_and_that_one_is_still(tells: bool) -> None:
    judge, told = Stragglers(), []
    even, moved = dict.fromkeys(range(4), 7), {0: 8, 1: 8, 2: 4, 3: 8}
    fast = dict.fromkeys(range(4), 6.0)
    slow = {**fast, 2: 12.0}
    for end in range(BLOCK_STEPS - 1, 1500, BLOCK_STEPS):
        is_slow = 300 <= end < 1000
        shares = moved if 330 <= end < 1030 else even
        blocks = shared(end, shares, slow if is_slow else fast, 5)
        if tells:
            blocks = {r: b._replace(tokens=512 * b.micro_batches) for r, b in blocks.items()}
        told += [(end, one) for one in judge.add(blocks, end)]
    assert [(type(one), one.rank) for _, one in told] == [(Slow, 2), (SlowOver, 2)]
    assert 300 <= told[0][0] < 350 and 1000 <= told[1][0] < 1100


def on_device(run: Steps, delay_ns: int = 0) -> Iterator[tuple[int, dict[int, WorkBlock]]]:
    """As devices that take so long, while their trainers only order it; rank `run.slow` is kept
    from the processor besides, where the onset has come."""
    for end, blocks in run.blocks(900):
        found = {}
        for rank, block in blocks.items():
            thread = tuple(MS_NS // 2 for _ in block.own_ns)
            kept = delay_ns if rank == run.slow and end >= run.onset else 0
            delay = tuple(kept if s == Section.COMPUTE else 0 for s in Section)
            found[rank] = block._replace(
                own_ns=thread, cpu_ns=thread, delay_ns=delay, device_ns=block.own_ns
            )
        yield end, found


def told_on_device(run: Steps, delay_ns: int = 0) -> list[Slow]:
    judge = judge_of(Timing.DEVICE)
    told = [one for end, b in on_device(run, delay_ns) for one in judge.add(b, end)]
    return [one for one in told if isinstance(one, Slow)]


@pytest.mark.parametrize("section", [Section.COMPUTE, Section.UPDATE])
def test_a_device_that_takes_longer_is_named_though_its_trainer_does_not(section: Section) -> None:
    run = Steps(2, 1, slow=1, factor=1.5 if section is Section.COMPUTE else 6.0, section=section)
    [slow] = told_on_device(run)
    assert (slow.rank, slow.section, slow.cause) == (1, section, "compute")
    assert 290 <= slow.since_step <= 310
    assert judge_of(Timing.DEVICE).doubts() == {}


def test_a_device_that_waits_for_its_data_is_slow_for_that() -> None:
    [slow] = told_on_device(Steps(2, 1, slow=1, factor=20.0, section=Section.DATA))
    assert (slow.rank, slow.section, slow.cause) == (1, Section.DATA, "data")


def test_a_device_whose_trainer_is_kept_from_the_processor_does_not_compute() -> None:
    [slow] = told_on_device(Steps(2, 1, slow=1, factor=1.5), delay_ns=90 * MS_NS)
    assert (slow.rank, slow.cause) == (1, "neighbour")


def test_devices_that_take_as_long_as_each_other_name_nobody() -> None:
    assert told_on_device(Steps(4, 1)) == []


def test_what_is_not_measured_alike_is_not_compared() -> None:
    assert common_timing([Timing.DEVICE] * 2) is Timing.DEVICE
    assert common_timing([Timing.DEVICE, Timing.HOST]) is Timing.UNSEEN
    assert "device" in judged(judge_of(Timing.UNSEEN)) and judged(judge_of(Timing.HOST)) == {}


def judged(judge: Stragglers) -> dict[Doubt, str]:
    for end, blocks in Steps(2, 1).blocks(300):
        judge.add(blocks, end)
    return judge.doubts()


FORWARD, BACKWARD = Section.FORWARD, Section.BACKWARD


@FEW
@given(SEEDS, st.sampled_from([2, 4]), st.sampled_from([FORWARD, BACKWARD]), st.booleans())
def test_a_pass_that_takes_longer_is_named_by_itself(
    seed: int, ranks: int, section: Section, varies: bool
) -> None:
    """Half of a step more: within 50 steps."""
    lengths = (0.25, 1.0) if varies else (1.0, 1.0)
    factor = 1 + 0.5 / SHARES[section]
    run = Steps(
        ranks, seed, 0.03, lengths, varies, slow=seed % ranks, factor=factor, section=section
    )
    end, slow = first_named(run, ONSET + 100)
    assert (slow.rank, slow.section, slow.cause) == (seed % ranks, section, "compute")
    assert end < ONSET + 50
    assert f"its {section.name.lower()} pass takes" in slow.why


@FEW
@given(SEEDS, st.sampled_from([2, 4]), st.sampled_from([FORWARD, BACKWARD]))
def test_a_tenth_of_a_step_more_in_a_pass_is_named(seed: int, ranks: int, section: Section) -> None:
    factor = 1 + 0.1 / SHARES[section]
    run = Steps(ranks, seed, 0.03, slow=seed % ranks, factor=factor, section=section)
    end, slow = first_named(run, ONSET + 500)
    assert (slow.rank, slow.section) == (seed % ranks, section) and end < ONSET + 500


@FEW
@given(SEEDS, st.sampled_from([2, 4]), st.sampled_from([1.15, 1.5, 3.0]))
def test_a_slower_processor_is_slow_in_the_body_not_in_its_larger_pass(
    seed: int, ranks: int, factor: float
) -> None:
    _, slow = first_named(Steps(ranks, seed, slow=1, factor=factor), ONSET + 500)
    assert (slow.rank, slow.section) == (1, Section.COMPUTE)
    assert "its step's body (all but data and update) takes" in slow.why


def test_a_pass_that_is_a_small_part_of_the_step_alarms_nobody() -> None:
    """It takes half as much again: that is 3 % of a step."""
    usual = {**USUAL_NS, Section.DATA: 160 * MS_NS}
    run = Steps(2, 1, slow=1, factor=1.5, section=FORWARD, usual=usual)
    assert told_of(run, 1500) == []


def test_what_moves_from_one_pass_to_the_other_costs_nothing_and_is_not_told() -> None:
    """As with activations that are computed again from some step on."""
    judge, found = Stragglers(), []
    for end, blocks in Steps(2, 1).blocks(800):
        moved = {**blocks, 1: with_moved_passes(blocks[1])} if end > ONSET else blocks
        found += judge.add(moved, end)
    assert found == []


def with_moved_passes(block: WorkBlock) -> WorkBlock:
    """Half of the forward pass is in the backward pass instead."""

    def moved(times_ns: tuple[int, ...]) -> tuple[int, ...]:
        half = times_ns[FORWARD] // 2
        by_section = dict(enumerate(times_ns))
        by_section[FORWARD] -= half
        by_section[BACKWARD] += half
        return tuple(by_section.values())

    return block._replace(own_ns=moved(block.own_ns), cpu_ns=moved(block.cpu_ns))


def test_where_some_rank_shows_no_passes_the_body_is_named() -> None:
    """As the other one calls what it protects, and it does not."""
    judge, found = Stragglers(), []
    for end, blocks in Steps(2, 3, slow=1, factor=2.0, section=FORWARD).blocks(400):
        unseen = {**blocks, 0: without_passes(blocks[0])}
        found += [(end, one) for one in judge.add(unseen, end)]
    [(_, slow)] = found
    assert isinstance(slow, Slow) and slow.rank == 1
    run = replace(Steps(2, 3, slow=1, factor=1.5), sees_passes=False)
    assert first_named(run, 400)[1].section is Section.COMPUTE


def without_passes(block: WorkBlock) -> WorkBlock:
    def cut(times_ns: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(0 if s in PASSES else ns for s, ns in enumerate(times_ns))

    return block._replace(own_ns=cut(block.own_ns), cpu_ns=cut(block.cpu_ns))


@pytest.mark.parametrize("section", [FORWARD, BACKWARD])
def test_a_device_s_pass_that_takes_longer_is_named(section: Section) -> None:
    factor = 1 + 0.5 / SHARES[section]
    [slow] = told_on_device(Steps(2, 1, slow=1, factor=factor, section=section))
    assert (slow.rank, slow.section, slow.cause) == (1, section, "compute")


@pytest.mark.parametrize("longer", [Section.DATA, Section.UPDATE, FORWARD])
@pytest.mark.parametrize("onset", [0, ONSET])
def test_a_device_that_waits_for_another_unseen_is_not_slow_there(
    longer: Section, onset: int
) -> None:
    """What one takes longer the other one waits, and that counts in its backward pass."""
    judge, found = judge_of(Timing.DEVICE), []
    for end, blocks in on_device(Steps(2, 2)):
        more = 20 * MS_NS * BLOCK_STEPS if end >= onset else 0
        late = {Section.COMPUTE, longer} if longer is FORWARD else {longer}
        longer_ns = {0: late, 1: {Section.COMPUTE, BACKWARD}}
        blocks = {
            rank: block._replace(
                device_ns=tuple(
                    ns + (more if section in longer_ns[rank] else 0)
                    for section, ns in enumerate(block.device_ns)
                )
            )
            for rank, block in blocks.items()
        }
        found += judge.add(blocks, end)
    assert found == []


def unseen_waits(run: Steps) -> Iterator[tuple[int, dict[int, WorkBlock]]]:
    """On devices, with groups of torch's: who is early waits in its body, and nobody sees it."""
    for end, blocks in on_device(run):
        longest = max(sum(b.device_ns[s] for s in JUDGED) for b in blocks.values())
        found = {}
        for rank, block in blocks.items():
            device = list(block.device_ns)
            device[Section.COMPUTE] += longest - sum(device[s] for s in JUDGED)
            found[rank] = block._replace(device_ns=tuple(device))
        yield end, found


@pytest.mark.parametrize("section", [FORWARD, BACKWARD])
def test_of_devices_that_wait_unseen_a_pass_without_waits_tells(section: Section) -> None:
    factor = 1 + 0.5 / SHARES[section]
    judge, found = judge_of(Timing.PASSES), []
    for end, blocks in unseen_waits(Steps(4, 1, slow=2, factor=factor, section=section)):
        found += [one for one in judge.add(blocks, end) if isinstance(one, Slow)]
    [slow] = found
    assert (slow.rank, slow.section, slow.cause) == (2, section, "compute")
    assert "device" in judge.doubts()


@pytest.mark.parametrize("section", [Section.COMPUTE, Section.UPDATE])
def test_of_devices_that_wait_unseen_nobody_is_slow_in_what_may_be_a_wait(section: Section) -> None:
    judge = judge_of(Timing.PASSES)
    run = replace(Steps(4, 1, slow=2, factor=3.0, section=section), sees_passes=False)
    assert [one for end, b in unseen_waits(run) for one in judge.add(b, end)] == []


def test_who_waits_unseen_in_a_pass_is_not_slow_there() -> None:
    """All others wait in their forward pass for the one whose update takes longer: as they do where
    they pass messages there. Of two nobody is judged, of four those who wait are the most."""
    for ranks in (2, 4):
        judge, found = judge_of(Timing.PASSES), []
        for end, blocks in on_device(Steps(ranks, 5)):
            more = 20 * MS_NS * BLOCK_STEPS if end >= ONSET else 0
            for rank, block in blocks.items():
                late = {Section.UPDATE} if rank == 0 else {Section.COMPUTE, FORWARD}
                device = (ns + more * (s in late) for s, ns in enumerate(block.device_ns))
                blocks[rank] = block._replace(device_ns=tuple(device))
            found += judge.add(blocks, end)
        assert found == [], ranks
