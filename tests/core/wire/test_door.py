"""The door: whoever comes finds a place, and a crowd costs only the crowd."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.door import KEPT, Door

MESH = frozenset({"10.0.0.7"})
sources = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])


@given(
    st.integers(1, KEPT + 4),
    st.lists(st.tuples(st.integers(0, 9), sources | st.none()), max_size=60),
    st.frozensets(sources),
)
def test_all_who_come_are_let_in_and_there_are_never_more_than_places(
    places: int, visits: list[tuple[int, str | None]], neighbours: frozenset[str]
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
        leaver = door.enter(number, source, neighbours)
        assert (leaver is not None) is full
        if leaver is not None:
            crowds = Counter([*inside.values(), source])
            kept = {each for each in neighbours if crowds[each] <= KEPT}
            crowd = inside.pop(leaver)
            others = {guest: each for guest, each in inside.items() if each not in kept}
            if crowd in kept:
                assert not others, "a neighbour goes where nobody else can"
                others = inside
            assert all(crowds[each] <= crowds[crowd] for each in others.values())
            assert not any(guest < leaver and each == crowd for guest, each in others.items())
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


def test_strangers_from_everywhere_do_not_put_out_who_is_of_the_mesh() -> None:
    """Each from an address of its own: no crowd is larger than the neighbour's."""
    door: Door[str] = Door(64)
    for number in range(KEPT):
        door.enter(f"neighbour {number}", "10.0.0.7", MESH)
    for number in range(1000):
        leaver = door.enter(f"stranger {number}", f"10.6.{number // 200}.{number % 200}", MESH)
        assert leaver is None or leaver.startswith("stranger")
    assert len(door) == 64


def test_a_crowd_on_a_neighbours_machine_puts_nobody_else_out() -> None:
    """Nor who comes from an interface of another neighbour's that nobody has been told of."""
    door: Door[str] = Door(64)
    for number in range(64):
        door.enter(f"crowd {number}", "10.0.0.7", MESH)
    door.enter("neighbour", "10.1.0.8", MESH)
    for number in range(64, 200):
        leaver = door.enter(f"crowd {number}", "10.0.0.7", MESH)
        assert leaver is not None and leaver.startswith("crowd")


def test_no_places_are_refused() -> None:
    with pytest.raises(ValueError, match="places: expected at least 1, found 0"):
        Door(0)
