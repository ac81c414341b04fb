"""Device release: whatever is lost, answered, late or answered twice, and in whatever order, a
device counts as free only after it was seen to be, and the end always comes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.deadlines import derive
from keepstep.core.recovery.device_release import (
    ABORT_WITHIN_NS,
    LOOK_WITHIN_NS,
    LOOKS,
    OVERHEAD_NS,
    AbortAll,
    DeviceRelease,
    LookAtDevice,
    ReleaseStage,
)
from keepstep.model.device import DeviceAnswer
from keepstep.model.units import S_NS

WELL = DeviceAnswer()
LATE = DeviceAnswer(is_late=True)
STICKY = DeviceAnswer(error="CUDA error: an illegal memory access was encountered")


def answer(release: DeviceRelease, act: Any, said: Any = None, now_ns: int = 0) -> Any:
    if isinstance(act, AbortAll):
        return release.aborted(act.loss, said or (), now_ns)
    return release.looked(act.loss, said or WELL, now_ns)


def test_everything_is_aborted_before_the_device_is_looked_at_twice() -> None:
    release = DeviceRelease()
    abort = release.lost(0)
    assert isinstance(abort, AbortAll)
    first = answer(release, abort)
    assert first == LookAtDevice(1, 1)
    second = answer(release, first)
    assert second == LookAtDevice(1, 2) and not release.is_over
    assert answer(release, second, now_ns=3 * S_NS) is None
    assert release.stage is ReleaseStage.FREE
    assert release.why == "the device is free 3.00 s after the loss"
    release.built()
    assert release.stage is ReleaseStage.HELD


@pytest.mark.parametrize(
    ("answers", "stage", "said"),
    [
        ([["group tp: it did not end within 15 s"]], ReleaseStage.CANNOT, "could not be aborted"),
        ([None, LATE], ReleaseStage.CANNOT, "still at work after every communicator was aborted"),
        ([None, WELL, LATE], ReleaseStage.CANNOT, "look 2 of 2"),
        ([None, STICKY, STICKY], ReleaseStage.CANNOT, "its context is broken: CUDA error: an ill"),
        ([None, WELL, STICKY], ReleaseStage.CANNOT, "its context is broken"),
        ([None, STICKY, WELL], ReleaseStage.FREE, "an error that has passed: CUDA error: an ille"),
    ],
    ids=["abort fails", "hangs", "hangs later", "sticky", "breaks late", "an error of the past"],
)
def test_what_says_that_a_process_cannot_stay(answers: Any, stage: Any, said: str) -> None:
    release = DeviceRelease()
    act: Any = release.lost(0)
    for each in answers:
        act = answer(release, act, each)
    assert release.stage is stage and said in release.why
    assert act is None


def test_a_second_loss_begins_it_anew_and_answers_about_the_first_count_for_nothing() -> None:
    release = DeviceRelease()
    first = release.lost(0)
    again = release.lost(1)
    assert isinstance(first, AbortAll) and isinstance(again, AbortAll) and again.loss == 2
    assert release.aborted(first.loss, ["of the first"], 2) is None
    assert release.stage is ReleaseStage.ABORTING
    assert answer(release, again) == LookAtDevice(2, 1)


WHAT = st.lists(
    st.tuples(
        st.sampled_from(["lost", "aborted", "abort fails", "well", "late", "error", "old", "time"]),
        st.integers(0, 20 * S_NS),
    ),
    max_size=40,
)


@given(WHAT)
def test_free_only_after_an_abort_and_a_look_that_went_well_since_the_last_loss(
    story: list[tuple[str, int]],
) -> None:
    release, now_ns, act = DeviceRelease(), 0, None
    last_abort_well = last_look_well = False
    for what, passes_ns in story:
        now_ns += passes_ns
        before = release.stage
        if what == "lost":
            act = release.lost(now_ns)
            last_abort_well = last_look_well = False
            assert before is ReleaseStage.CANNOT or isinstance(act, AbortAll)
        elif what == "time":
            release.late(now_ns)
        elif what == "old":
            release.aborted(-1, (), now_ns)
            release.looked(-1, WELL, now_ns)
            assert release.stage is before
        elif isinstance(act, AbortAll) and what in ("aborted", "abort fails"):
            last_abort_well = what == "aborted"
            act = release.aborted(act.loss, () if last_abort_well else ("it hangs",), now_ns)
        elif isinstance(act, LookAtDevice) and what in ("well", "late", "error"):
            said = {"well": WELL, "late": LATE, "error": STICKY}[what]
            last_look_well = said.is_well
            act = release.looked(act.loss, said, now_ns)
        if release.stage is ReleaseStage.FREE:
            assert last_abort_well and last_look_well
        if before is ReleaseStage.CANNOT:
            assert release.stage is ReleaseStage.CANNOT, "there is no way back"
        assert (release.due_ns is not None) == (
            release.stage in (ReleaseStage.ABORTING, ReleaseStage.LOOKING)
        )
        assert release.is_over == bool(release.why) or release.stage is ReleaseStage.HELD


@given(st.lists(st.booleans(), max_size=4))
def test_the_end_comes_however_many_acts_answer(answers: list[bool]) -> None:
    """Who orders nothing is asked for nothing: the time alone ends it."""
    release, now_ns = DeviceRelease(), 0
    act: Any = release.lost(now_ns)
    for answers_it in answers:
        if act is not None and answers_it:
            act = answer(release, act, now_ns=now_ns)
    now_ns += ABORT_WITHIN_NS + LOOKS * LOOK_WITHIN_NS + OVERHEAD_NS
    release.late(now_ns)
    assert release.is_over


def test_it_is_over_before_a_process_that_is_silent_is_given_up() -> None:
    assert (
        derive().regroup_ns > ABORT_WITHIN_NS + LOOKS * LOOK_WITHIN_NS + (1 + LOOKS) * OVERHEAD_NS
    )
