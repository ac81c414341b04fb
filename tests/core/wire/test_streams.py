"""How many streams a link has: more while they bring more, never beyond what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.streams import (
    AGAIN_FIRST_NS,
    AGAIN_MAX_NS,
    SETTLE_NS,
    STRETCH_BLOCKS,
    STRETCH_NS,
    StreamCount,
    StreamLimits,
)
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.model.wire import MAX_STREAMS

BLOCK = 4 * MIB
GB = 10**9


class Link:
    """Blocks land on it one after the other, at a rate that follows from the streams in use."""

    def __init__(self, count: StreamCount, rate: Callable[[int], float]) -> None:
        self.count = count
        self.rate = rate
        self.now_ns = S_NS
        self.grew: list[tuple[int, int]] = []  # when, to how many

    def carry(self, seconds: float, has_more: bool = True) -> None:
        until_ns = self.now_ns + round(seconds * S_NS)
        while self.now_ns < until_ns:
            self.now_ns += max(1, round(BLOCK * S_NS / self.rate(self.count.in_use)))
            if self.count.landed(self.now_ns, BLOCK, has_more):
                self.grew.append((self.now_ns, self.count.in_use))


def test_one_is_enough_where_more_bring_nothing() -> None:
    """As on loopback with two cores. Once in a while it is tried again."""
    link = Link(StreamCount(StreamLimits()), lambda streams: GB)
    link.carry(5)
    assert link.count.in_use == 1 and [to for _, to in link.grew] == [2]
    link.carry(300)
    assert 2 <= len(link.grew) <= 4, "it waits longer each time"


@pytest.mark.parametrize("cores", [2, 4, 8])
def test_as_many_are_used_as_there_are_cores_to_move_them(cores: int) -> None:
    link = Link(StreamCount(StreamLimits()), lambda streams: 2 * GB * min(streams, cores))
    link.carry(10)
    assert link.count.in_use == cores


def test_a_link_that_becomes_better_is_found_out() -> None:
    best = 1
    link = Link(StreamCount(StreamLimits()), lambda streams: GB * min(streams, best))
    link.carry(5)
    assert link.count.in_use == 1
    best = 8
    link.carry(AGAIN_FIRST_NS / S_NS + 10)
    assert link.count.in_use == 8


def test_waits_between_trials_grow_and_end_somewhere() -> None:
    link = Link(StreamCount(StreamLimits(most=2)), lambda streams: GB)
    link.carry(5000)
    gaps = [
        after - before for (before, _), (after, _) in zip(link.grew, link.grew[1:], strict=False)
    ]
    assert gaps == sorted(gaps) and len(gaps) > 5
    assert AGAIN_MAX_NS <= gaps[-1] < AGAIN_MAX_NS + 10 * S_NS


def test_a_link_with_little_to_send_keeps_its_streams() -> None:
    """Blocks that nobody waits behind need no more of them."""
    link = Link(StreamCount(StreamLimits()), lambda streams: GB * streams)
    for _ in range(100):
        link.carry(0.8 * STRETCH_NS / S_NS)
        link.carry(0.1, has_more=False)
    assert link.count.in_use == 1 and not link.grew


def test_what_the_gate_holds_back_says_nothing_of_the_streams() -> None:
    link = Link(StreamCount(StreamLimits()), lambda streams: GB * streams)
    for _ in range(100):
        link.carry(0.8 * STRETCH_NS / S_NS)
        link.count.held_back()
    assert link.count.in_use == 1 and not link.grew


def test_what_lands_before_a_new_stream_is_there_does_not_count() -> None:
    count = StreamCount(StreamLimits(most=2))
    link = Link(count, lambda streams: GB)
    while not link.grew:
        link.carry(0.01)
    grown_ns = link.now_ns
    link.rate = lambda streams: GB if link.now_ns < grown_ns + SETTLE_NS - MS_NS else 2 * GB
    link.carry(3)
    assert count.in_use == 2


def test_a_stretch_is_not_judged_before_it_has_its_blocks() -> None:
    """Nor is a link's first one: what a single block took tells nothing."""
    count = StreamCount(StreamLimits())
    grew = [count.landed((1 + n) * STRETCH_NS, BLOCK, True) for n in range(STRETCH_BLOCKS + 1)]
    assert grew == [False] * STRETCH_BLOCKS + [True]


def test_each_pair_of_addresses_has_one_whatever_was_asked_for() -> None:
    count = StreamCount(StreamLimits.of(1))
    count.at_least(3)
    assert count.in_use == 3
    count.at_least(2)
    assert count.in_use == 3
    count.at_least(100)
    assert count.in_use == MAX_STREAMS


def test_a_number_that_was_asked_for_stays() -> None:
    link = Link(StreamCount(StreamLimits.of(3)), lambda streams: GB * streams)
    link.carry(100)
    assert link.count.in_use == 3 and not link.grew


@given(
    first=st.integers(1, MAX_STREAMS),
    more=st.integers(0, MAX_STREAMS),
    landings=st.lists(
        st.tuples(st.integers(0, S_NS), st.integers(1, 64 * MIB), st.booleans()), max_size=200
    ),
)
def test_never_fewer_than_at_first_and_never_more_than_are_allowed(
    first: int, more: int, landings: list[tuple[int, int, bool]]
) -> None:
    limits = StreamLimits(first, min(MAX_STREAMS, first + more))
    count = StreamCount(limits)
    now_ns = 0
    for after_ns, nbytes, has_more in landings:
        now_ns += after_ns
        before = count.in_use
        grew = count.landed(now_ns, nbytes, has_more)
        assert grew == (count.in_use > before)
        assert limits.first <= count.in_use <= limits.most


def test_a_stretch_is_long_enough_to_tell_twice_as_much_from_noise() -> None:
    assert STRETCH_BLOCKS >= 8 and STRETCH_NS >= 100 * MS_NS
