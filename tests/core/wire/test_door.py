"""The door: whoever comes finds a place, and a crowd costs only the crowd."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.door import Door

sources = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 9), sources | st.none()), max_size=60))
def test_all_who_come_are_let_in_and_there_are_never_more_than_places(
    places: int, visits: list[tuple[int, str | None]]
) -> None:
    door: Door[int] = Door(places)
    inside: dict[int, str] = {}
    for number, (back, source) in enumerate(visits):
        if source is None:
            gone = number - back
            door.leave(gone)
            inside.pop(gone, None)
            continue
        full = len(inside) == places
        leaver = door.enter(number, source)
        assert (leaver is not None) is full
        if leaver is not None:
            crowds = Counter([*inside.values(), source])
            crowd = inside.pop(leaver)
            assert all(crowds[each] <= crowds[crowd] for each in inside.values())
            assert not any(guest < leaver and each == crowd for guest, each in inside.items())
        inside[number] = source
        assert len(door) == len(inside) <= places


def test_a_crowd_from_one_place_does_not_put_out_who_comes_from_another() -> None:
    door: Door[str] = Door(4)
    door.enter("neighbour", "10.0.0.7")
    for number in range(100):
        assert door.enter(f"stranger {number}", "10.6.6.6") != "neighbour"


def test_who_comes_from_where_the_crowd_does_puts_out_the_first_of_it() -> None:
    door: Door[int] = Door(3)
    for number in range(3):
        door.enter(number, "127.0.0.1")
    assert [door.enter(number, "127.0.0.1") for number in range(3, 6)] == [0, 1, 2]


def test_no_places_are_refused() -> None:
    with pytest.raises(ValueError, match="places: expected at least 1, found 0"):
        Door(0)
