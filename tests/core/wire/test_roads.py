"""Which addresses a stream takes: its own pair first, in the end every pair there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.roads import road, width

MINE = ("a0", "a1")
THEIRS = (("b0", 1), ("b1", 2))


def test_streams_take_interfaces_in_turn_and_the_first_goes_with_the_first() -> None:
    found = [road(MINE, THEIRS, stream, 0) for stream in range(4)]
    assert [(each.source, each.target[0]) for each in found] == [
        ("a0", "b0"),
        ("a1", "b1"),
        ("a0", "b0"),
        ("a1", "b1"),
    ]


def test_with_one_interface_here_those_there_are_taken_in_turn() -> None:
    found = [road(MINE[:1], THEIRS, stream, 0) for stream in range(3)]
    assert [(each.source, each.target[0]) for each in found] == [
        ("a0", "b0"),
        ("a0", "b1"),
        ("a0", "b0"),
    ]


def test_what_cannot_be_dialled_goes_over_the_other_pair_then_across() -> None:
    found = [road(MINE, THEIRS, 1, attempt) for attempt in range(5)]
    assert [(each.source, each.target[0]) for each in found] == [
        ("a1", "b1"),
        ("a0", "b0"),
        ("a0", "b1"),
        ("a1", "b0"),
        ("a1", "b1"),
    ]


def test_between_two_addresses_there_is_one_road() -> None:
    assert road(MINE[:1], THEIRS[:1], 5, 7).is_only
    assert not road(MINE, THEIRS, 0, 0).is_only


@given(mine=st.integers(1, 16), theirs=st.integers(1, 16), stream=st.integers(0, 15))
def test_every_pair_is_tried_once_before_any_is_tried_again(
    mine: int, theirs: int, stream: int
) -> None:
    here = [f"a{n}" for n in range(mine)]
    there = [(f"b{n}", n) for n in range(theirs)]
    tried = [road(here, there, stream, attempt) for attempt in range(mine * theirs)]
    assert {(each.source, each.target) for each in tried} == {(a, b) for a in here for b in there}
    assert road(here, there, stream, mine * theirs) == tried[0]


@given(mine=st.integers(1, 16), theirs=st.integers(1, 16))
def test_as_many_streams_as_roads_use_every_interface(mine: int, theirs: int) -> None:
    here = [f"a{n}" for n in range(mine)]
    there = [(f"b{n}", n) for n in range(theirs)]
    found = [road(here, there, stream, 0) for stream in range(width(mine, theirs))]
    assert {each.source for each in found} == set(here)
    assert {each.target for each in found} == set(there)
