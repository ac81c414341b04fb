"""Measured plan: things take as long as they took, and only what was not measured does not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prediction.measured_plan import Course, MeasuredPlan, MeasuredTempo
from benchmarks.prediction.pace import Aftermath, Pace
from keepstep.model.snapshot import Phase

DURATIONS = st.lists(st.integers(1, 10**9), min_size=1, max_size=5).map(tuple)
PACES = st.builds(
    Pace,
    forward_ns=DURATIONS,
    collective_ns=DURATIONS,
    rest_ns=DURATIONS,
    update_ns=DURATIONS,
    stall_ns=DURATIONS,
    capture_ns=st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=5).map(tuple),
    copy_ns=DURATIONS,
    seal_ns=DURATIONS,
)
SOMETIMES = st.just(()) | DURATIONS
AFTERMATHS = st.builds(Aftermath, notice_ns=SOMETIMES, rank_start_ns=SOMETIMES)
SEEDS = st.integers(0, 1000)


@given(PACES, SEEDS)
def test_each_part_of_a_step_and_of_its_capture_takes_what_was_measured(
    pace: Pace, seed: int
) -> None:
    tempo = MeasuredTempo(pace, 7, Random(seed))
    assert tempo.before_collective_ns() in pace.forward_ns
    assert tempo.collective_ns() in pace.collective_ns
    assert tempo.before_update_ns() in pace.rest_ns
    assert tempo.after_update_ns() in pace.update_ns
    tempo.body_over()
    begins_ns = tempo.background_act_ns()
    stall_ns = tempo.boundary_ns()
    assert stall_ns in pace.stall_ns
    assert begins_ns in {max(0, stall_ns + capture_ns) for capture_ns in pace.capture_ns}
    tempo.announced(Phase.CAPTURE)
    assert tempo.background_act_ns() in pace.copy_ns
    assert tempo.background_act_ns() == 0, "the copy's other acts take no more"
    tempo.announced(Phase.SEAL)
    assert tempo.background_act_ns() in pace.seal_ns
    assert tempo.trainer_act_ns() == 0
    tempo.announced(Phase.RESTORE)
    assert [tempo.trainer_act_ns(), tempo.trainer_act_ns()] == [7, 0]


@given(PACES, AFTERMATHS, AFTERMATHS, SEEDS)
def test_what_follows_a_failure_takes_as_long_as_after_this_one_or_any_or_as_planned(
    pace: Pace, after_any: Aftermath, after_this: Aftermath, seed: int
) -> None:
    pace = replace(pace, failures=after_any)
    plan = MeasuredPlan(pace=pace, load_ns=1, notice_ns=50, course=Course(after_this))
    found = plan.takes_ns("notice_ns", Random(seed))
    measured = after_this.notice_ns or after_any.notice_ns
    assert found in (measured or range(1, 51))
    assert plan.takes_ns("persister_start_ns", Random(seed)) >= plan.start_ns // 2


@given(PACES)
def test_the_lives_of_a_rank_have_chances_of_their_own(pace: Pace) -> None:
    pace = replace(pace, forward_ns=tuple(range(1, 100_000)))
    plan = MeasuredPlan(pace=pace, load_ns=1)
    lives = [plan.new_tempo(0, Random(4)) for _ in range(2)]
    first, second = ([life.before_collective_ns() for _ in range(5)] for life in lives)
    assert first != second
