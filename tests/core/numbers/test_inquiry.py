"""What is done about wrong numbers: every inquiry ends, and nothing wrong is ever counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.inquiry import (
    COOLING_RUNS,
    SKIPS,
    SPOILT_RUNS,
    CountIt,
    Leave,
    LetBe,
    NoWayBack,
    Rules,
    RunIt,
    SkipIt,
    Stop,
    next_act,
)
from keepstep.model.numbers import Culprit, Sight, Sign, StepRun, Way
from keepstep.model.snapshot import Stamp

STEP = 7
BEFORE = Stamp(STEP - 2, 1)
SWAP = Rules(can_swap=True)


def seen(rank: int, role: int, is_wrong: bool, sign: Sign = Sign.GRADIENT, **more: object) -> Sight:
    gave = {"gave": float("nan"), "gave_bad_at": 0} if is_wrong else {"gave": 1.0}
    told = {"signs": (sign,), "first_step": STEP, "holds": (BEFORE,), "batches": 1}
    return Sight(rank, role, **{**told, **gave, **more})  # type: ignore[arg-type]


def device(way: Way, bad: int | None, world: int = 2) -> StepRun:
    """A run in which that device computes wrong."""
    if bad is None:
        return StepRun(way, tuple(seen(r, r, False, signs=()) for r in range(world)))
    shift = 1 if way is Way.SWAPPED else 0
    return StepRun(way, tuple(seen(r, (r + shift) % world, r == bad) for r in range(world)))


def role(way: Way, bad: int, world: int = 2, **more: object) -> StepRun:
    """A run in which that rank's state and batch give what is wrong."""
    shift = 1 if way is Way.SWAPPED else 0
    places = [(r, (r + shift) % world) for r in range(world)]
    return StepRun(way, tuple(seen(r, p, p == bad, **more) for r, p in places))


def inquire(errs: int | None, rules: Rules = SWAP, bad: int = 1) -> tuple[list[Way], object]:
    """What is done about a device that computes wrong in its first `errs` runs of a step (None: in
    all), and what the last act is."""
    runs = [device(Way.FIRST, bad)]
    while isinstance(act := next_act(STEP, runs, rules), RunIt):
        is_wrong = errs is None or len(runs) < errs
        runs.append(device(act.way, bad if is_wrong else None))
        assert len(runs) < 10 * COOLING_RUNS, "an inquiry without an end"
    return [run.way for run in runs], act


def test_a_device_that_errs_once_costs_one_run() -> None:
    ways, act = inquire(1)
    assert ways == [Way.FIRST, Way.AGAIN]
    assert isinstance(act, CountIt) and act.verdict.rank == 1


@given(st.integers(1, COOLING_RUNS))
def test_a_device_that_comes_right_again_trains_on(errs: int) -> None:
    ways, act = inquire(errs)
    assert isinstance(act, CountIt)
    assert (act.verdict.culprit, act.verdict.rank) == (Culprit.HARDWARE, 1)
    assert len(ways) <= errs + 2


def test_a_device_that_never_does_leaves() -> None:
    ways, act = inquire(None)
    assert isinstance(act, Leave)
    assert (act.verdict.culprit, act.verdict.rank) == (Culprit.HARDWARE, 1)
    assert ways.count(Way.AGAIN) == COOLING_RUNS and ways.count(Way.SWAPPED) == 1


def test_pauses_grow_and_have_an_end() -> None:
    runs = [device(Way.FIRST, 1), device(Way.AGAIN, 1), device(Way.SWAPPED, 1)]
    pauses = []
    for _ in range(COOLING_RUNS - 1):
        act = next_act(STEP, runs, SWAP)
        assert isinstance(act, RunIt)
        pauses.append(act.pause_ns)
        runs.append(device(Way.AGAIN, 1))
    assert pauses == sorted(pauses) and pauses[0] < pauses[-1] == pauses[-2]


@pytest.mark.parametrize("way", [Way.AGAIN, Way.SWAPPED])
def test_what_comes_again_with_the_data_is_skipped(way: Way) -> None:
    runs = [role(w, 0) for w in Way if list(Way).index(w) <= list(Way).index(way)]
    act = next_act(STEP, runs, SWAP)
    if way is Way.AGAIN:
        assert isinstance(act, RunIt) and act.way is Way.SWAPPED
    else:
        assert isinstance(act, SkipIt)
        assert (act.verdict.culprit, act.verdict.rank) == (Culprit.DATA, 0)


def test_a_bad_batch_needs_no_other_rank() -> None:
    bad = {"bad_batch": ("batch 1",)}
    act = next_act(STEP, [role(w, 0, **bad) for w in (Way.FIRST, Way.AGAIN)], SWAP)
    assert isinstance(act, SkipIt) and act.verdict.culprit is Culprit.DATA


@pytest.mark.parametrize(
    ("rules", "more", "says"),
    [
        (Rules(may_skip=False), {}, "come again"),
        (Rules(can_skip=False), {}, "job.loader()"),
        (Rules(), {"skips": SKIPS}, "no single batch"),
    ],
)
def test_what_cannot_be_skipped_stops(rules: Rules, more: dict[str, int], says: str) -> None:
    act = next_act(STEP, [role(w, 0, **more) for w in (Way.FIRST, Way.AGAIN)], rules)
    assert isinstance(act, Stop) and says in act.why


@pytest.mark.parametrize("sign", [Sign.EXPLOSION, Sign.SPIKE])
@pytest.mark.parametrize(
    "rules",
    [
        Rules(can_swap=True),
        Rules(may_skip=False, can_swap=True),
        Rules(may_skip=False, skips_spikes=True, can_swap=True),
        Rules(skips_spikes=True, can_skip=False, can_swap=True),
    ],
)
def test_what_is_only_great_is_taken_as_it_is_where_it_is_not_to_be_skipped(
    sign: Sign, rules: Rules
) -> None:
    runs = [
        role(w, 0, sign=sign, gave=5.0, gave_bad_at=None)
        for w in (Way.FIRST, Way.AGAIN, Way.SWAPPED)
    ]
    act = next_act(STEP, runs, rules)
    assert isinstance(act, RunIt) and act.way is Way.AGAIN  # a swapped run never counts
    runs.append(role(Way.AGAIN, 0, sign=sign, gave=5.0, gave_bad_at=None))
    assert isinstance(next_act(STEP, runs, rules), CountIt)


@pytest.mark.parametrize("sign", [Sign.EXPLOSION, Sign.SPIKE])
def test_what_is_only_great_is_skipped_where_that_is_asked_for(sign: Sign) -> None:
    runs = [
        role(w, 0, sign=sign, gave=5.0, gave_bad_at=None)
        for w in (Way.FIRST, Way.AGAIN, Way.SWAPPED)
    ]
    assert isinstance(next_act(STEP, runs, Rules(skips_spikes=True, can_swap=True)), SkipIt)


@pytest.mark.parametrize(
    "holds", [(), (Stamp(STEP, 1),), (Stamp(STEP - 1, 1),), (Stamp(STEP - 2, 2), Stamp(STEP, 1))]
)
def test_without_a_snapshot_before_it_that_all_hold_nobody_goes_back(
    holds: tuple[Stamp, ...],
) -> None:
    """A vote would find nothing, and end the job."""
    run = StepRun(Way.FIRST, (seen(0, 0, True), seen(1, 1, True, holds=holds)))
    act = next_act(STEP, [run], SWAP)
    assert isinstance(act, NoWayBack) and "held by every rank" in act.why


def test_where_nobody_is_to_stop_what_comes_again_is_left_out_or_let_be() -> None:
    undoes = Rules(only_undoes=True)
    again = [role(Way.FIRST, 0), role(Way.AGAIN, 0)]
    assert isinstance(next_act(STEP, again, undoes), SkipIt)
    act = next_act(STEP, again, replace(undoes, can_skip=False))
    assert isinstance(act, LetBe) and not act.is_meant
    of_state = [role(w, 0, sign=Sign.STATE, gave_bad_at=None) for w in (Way.FIRST, Way.AGAIN)]
    act = next_act(STEP, of_state, undoes)
    assert isinstance(act, LetBe) and act.is_meant, "its gradients are finite"
    spoilt = [role(Way.FIRST, 0), *of_state[1:]]
    for _ in range(SPOILT_RUNS - 1):  # its first run had made gradients that were not
        act = next_act(STEP, spoilt, undoes)
        assert isinstance(act, RunIt) and act.way is Way.AGAIN
        spoilt.append(of_state[1])
    act = next_act(STEP, spoilt, undoes)
    assert isinstance(act, LetBe) and not act.is_meant, "no program means that"
    unseen = [role(w, 0, sign=Sign.STATE, looked=False, bad_batch=("0",)) for w in Way][:2]
    assert isinstance(next_act(STEP, unseen, undoes), SkipIt), "nobody has seen its gradients"
    swapped = [*of_state, role(Way.SWAPPED, 0, sign=Sign.STATE, gave_bad_at=None)]
    act = next_act(STEP, swapped, undoes)
    assert isinstance(act, RunIt) and act.way is Way.AGAIN, "another's state counts for nobody"


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200),
    st.builds(Rules, st.booleans(), st.booleans(), st.booleans(), st.just(False), st.booleans()),
)
def test_every_inquiry_ends_and_counts_only_what_is_right(
    wrong: list[tuple[bool, bool]], rules: Rules
) -> None:
    """Whichever rank's device errs in whichever run."""
    runs = [device(Way.FIRST, 0)]
    for first, second in [*wrong, *[(True, True)] * (3 * COOLING_RUNS)]:
        act = next_act(STEP, runs, rules)
        if not isinstance(act, RunIt):
            break
        assert act.way is not Way.SWAPPED or rules.can_swap
        ranks = [r for r, is_wrong in enumerate((first, second)) if is_wrong]
        shift = 1 if act.way is Way.SWAPPED else 0
        signs = (Sign.GRADIENT,) if ranks else ()
        runs.append(
            StepRun(
                act.way,
                tuple(seen(r, (r + shift) % 2, r in ranks, signs=signs) for r in range(2)),
            )
        )
    else:
        raise AssertionError("an inquiry without an end")
    if isinstance(act, CountIt):
        assert runs[-1].is_clean and runs[-1].way is Way.AGAIN
