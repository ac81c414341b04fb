"""Timelines: what a job went back behind does not count, what it computed again does."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.checkpoint import CheckpointName, Timeline
from keepstep.model.timeline import history, is_overtaken


@dataclass(frozen=True)
class Stored:
    name: CheckpointName
    timeline: Timeline | None


def stored(step: int, epoch: int, since: int, attempt: int = 1) -> Stored:
    return Stored(CheckpointName(step, epoch, attempt), Timeline(epoch, since))


def counting(*found: Stored) -> list[tuple[int, int]]:
    return [(each.name.step, each.name.epoch) for each in history(found)[0]]


def test_higher_steps_that_the_job_went_back_behind_do_not_count() -> None:
    assert counting(stored(5, 1, -1), stored(10, 1, -1), stored(6, 2, 5)) == [(6, 2), (5, 1)]


def test_a_step_that_was_computed_again_counts_in_place_of_the_first() -> None:
    assert counting(stored(10, 1, -1), stored(10, 2, 7)) == [(10, 2)]


def test_the_state_from_which_all_go_on_still_counts() -> None:
    assert counting(stored(10, 1, -1), stored(12, 2, 10)) == [(12, 2), (10, 1)]


def test_of_two_attempts_at_one_state_the_later_counts() -> None:
    found, others = history([stored(5, 1, -1, attempt=8), stored(5, 1, -1, attempt=9)])
    assert [each.name.attempt for each in found] == [9]
    assert list(others) == [CheckpointName(5, 1, 8)]


def test_what_an_earlier_version_wrote_counts_until_somebody_goes_back_behind_it() -> None:
    old = [Stored(CheckpointName(step), None) for step in (5, 10)]
    assert counting(*old) == [(10, 0), (5, 0)]
    assert counting(*old, stored(11, 1, 10)) == [(11, 1), (10, 0), (5, 0)]
    assert counting(*old, stored(6, 1, 5)) == [(6, 1), (5, 0)]


def test_who_writes_in_an_epoch_that_is_over_is_overtaken() -> None:
    assert is_overtaken(1, [stored(3, 2, 2)]) and not is_overtaken(2, [stored(3, 2, 2)])
    assert not is_overtaken(0, [Stored(CheckpointName(3), None)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_what_counts_is_what_one_undisturbed_run_would_have_written(
    epochs: list[tuple[int, int]],
) -> None:
    """Each epoch goes on from a step that the run had, and computes some more."""
    run: dict[int, int] = {}  # by step: the epoch that computed it last
    found: list[Stored] = []
    at = -1
    for epoch, (back, forth) in enumerate(epochs, start=1):
        since = max(-1, at - back)
        run = {step: e for step, e in run.items() if step <= since}
        at = since + 1 + forth
        for step in range(since + 1, at + 1):
            run[step] = epoch
            found.append(stored(step, epoch, since))
    assert counting(*found) == sorted(run.items(), reverse=True)
