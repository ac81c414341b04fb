"""The slot chooser: what it may take, what it never takes, and what it says. Its life with others
is in test_cut.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.model.snapshot import SlotState, SlotView, Stamp

stamps = st.builds(Stamp, st.integers(0, 6), st.integers(1, 2))
views = st.builds(
    SlotView,
    st.sampled_from([SlotState.EMPTY, SlotState.SEALED, SlotState.SEALED, SlotState.WRITING]),
    stamps,
    st.booleans(),
)
slot_lists = st.lists(views, min_size=2, max_size=5)
horizons = st.none() | stamps
stamp_sets = st.frozensets(stamps)


def sealed(step: int, pinned: bool = False) -> SlotView:
    return SlotView(SlotState.SEALED, Stamp(step, 1), pinned)


EMPTY = SlotView(SlotState.EMPTY, Stamp(-1, 0))


@given(slot_lists, horizons, stamp_sets)
def test_it_takes_only_what_is_empty_older_than_the_horizon_or_hopeless(
    slots: list[SlotView], horizon: Stamp | None, hopeless: frozenset[Stamp]
) -> None:
    decision = choose(slots, horizon, hopeless.__contains__)
    if isinstance(decision, Skip):
        return
    view = slots[decision.slot]
    assert view.state is not SlotState.WRITING and not view.pinned
    if view.state is SlotState.SEALED:
        assert view.stamp != horizon
        assert view.stamp in hopeless or (horizon is not None and view.stamp < horizon)


@given(slot_lists, horizons, stamp_sets)
def test_nothing_that_holds_a_step_is_taken_while_a_slot_is_empty_nor_a_newer_one_than_need_be(
    slots: list[SlotView], horizon: Stamp | None, hopeless: frozenset[Stamp]
) -> None:
    decision = choose(slots, horizon, hopeless.__contains__)
    if isinstance(decision, Skip):
        return
    taken = slots[decision.slot]
    free = [v for v in slots if not v.pinned]
    if any(view.state is SlotState.EMPTY for view in free):
        assert taken.state is SlotState.EMPTY
    older = [v.stamp.step for v in free if horizon is not None and v.stamp < horizon]
    if taken.state is SlotState.SEALED:
        assert all(taken.stamp.step <= step for step in older)


@given(slot_lists, horizons, stamp_sets)
def test_it_skips_only_when_nothing_can_be_taken(
    slots: list[SlotView], horizon: Stamp | None, hopeless: frozenset[Stamp]
) -> None:
    decision = choose(slots, horizon, hopeless.__contains__)
    if isinstance(decision, Skip) and all(v.state is not SlotState.WRITING for v in slots):
        for view in slots:
            takeable = view.state is SlotState.EMPTY or (
                view.stamp != horizon and view.stamp in hopeless
            )
            assert view.pinned or not (takeable or (horizon is not None and view.stamp < horizon))


@given(slot_lists, horizons, stamp_sets)
def test_one_capture_at_a_time(
    slots: list[SlotView], horizon: Stamp | None, hopeless: frozenset[Stamp]
) -> None:
    decision = choose(
        [*slots, SlotView(SlotState.WRITING, Stamp(6, 1))], horizon, hopeless.__contains__
    )
    assert isinstance(decision, Skip) and "not sealed yet" in decision.why


def nothing(stamp: Stamp) -> bool:
    return False


def test_empty_slots_come_first_then_the_oldest() -> None:
    for oldest in (0, 1, 2):
        taken = choose([sealed(oldest), EMPTY, sealed(5)], Stamp(5, 1), nothing)
        assert isinstance(taken, Take) and taken.slot == 1
    assert choose([sealed(3), EMPTY, sealed(5)], Stamp(5, 1), nothing) == Take(
        1, "slot 1: it is empty"
    )
    assert choose([sealed(4), sealed(3), sealed(5)], Stamp(5, 1), nothing) == Take(
        1, "slot 1: step 3 is older than the horizon, step 5"
    )


def test_a_hopeless_newer_step_makes_room() -> None:
    assert choose([sealed(5), sealed(6)], Stamp(5, 1), nothing) == Skip(
        "step 5 is the newest step every rank holds, and the other 1 slots wait for peers or "
        "a reader (0 pinned)",
        is_full=True,
    )
    decision = choose([sealed(5), sealed(6)], Stamp(5, 1), Stamp(6, 1).__eq__)
    assert decision == Take(1, "slot 1: step 6 will never be held by every rank")


def test_the_horizon_stays_even_when_called_hopeless() -> None:
    assert isinstance(choose([sealed(5), sealed(5)], Stamp(5, 1), lambda stamp: True), Skip)


def test_a_pinned_slot_is_left_to_its_reader() -> None:
    decision = choose([sealed(3, pinned=True), sealed(5)], Stamp(5, 1), nothing)
    assert isinstance(decision, Skip) and "(1 pinned)" in decision.why


def test_before_the_first_cut_it_says_so() -> None:
    decision = choose([sealed(0), sealed(1)], None, nothing)
    assert decision == Skip(
        "no step is held by every rank yet, and all 2 slots may still become one (0 pinned)"
    )


def test_the_only_slot_is_taken_once_what_it_holds_rests_elsewhere() -> None:
    for released in (Stamp(5, 1), Stamp(6, 1), Stamp(5, 2)):
        assert choose([sealed(5)], None, nothing, released) == Take(
            0, "slot 0: step 5 is committed and rests on other nodes"
        )
    for released in (None, Stamp(4, 1)):
        assert choose([sealed(5)], None, nothing, released) == Skip(
            "step 5 in the only slot is not committed yet, with copies on other nodes"
        )
