"""What a chunk costs on a link, from how its socket's queue drained."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.pacing.bandwidth import FIRST_BYTES_PER_S, LinkSpeed
from keepstep.core.pacing.schedule import Cost
from keepstep.model.units import MS_NS, S_NS


def test_before_anything_is_known() -> None:
    speed = LinkSpeed()
    assert not speed.is_known and speed.cost(700) == Cost(700, FIRST_BYTES_PER_S)


@given(
    st.integers(10**6, 10**10),
    st.lists(st.integers(10 * MS_NS, 50 * MS_NS), min_size=1, max_size=30),
)
def test_a_steady_link_is_known_as_it_is(bytes_per_s: int, waits_ns: list[int]) -> None:
    speed = LinkSpeed()
    for wait_ns in waits_ns:
        speed.drained(bytes_per_s * wait_ns // S_NS, wait_ns, emptied=False)
    assert abs(speed.bytes_per_s - bytes_per_s) <= 0.002 * bytes_per_s


@given(
    st.integers(10**6, 10**10),
    st.integers(0, 10),
    st.integers(0, 4),
    st.floats(0.1, 1),
    st.floats(1, 10),
    st.randoms(),
)
def test_samples_that_were_disturbed_count_for_nothing(
    bytes_per_s: int, slower: int, faster: int, less: float, more: float, order: random.Random
) -> None:
    """Up to two thirds that were made smaller, up to a quarter that were made larger."""
    rates = (
        [less * bytes_per_s] * slower + [more * bytes_per_s] * faster + [float(bytes_per_s)] * 15
    )
    rates = rates[:15]
    order.shuffle(rates)
    speed = LinkSpeed()
    for rate in rates:
        speed.drained(round(rate / 100), 10 * MS_NS, emptied=False)
    assert abs(speed.bytes_per_s - bytes_per_s) <= 100


def test_what_drained_before_anybody_looked_tells_how_fast_the_link_is_at_least() -> None:
    speed = LinkSpeed()
    speed.drained(1_000_000, 100 * MS_NS, emptied=True)
    assert speed.bytes_per_s == 10_000_000  # no longer what is assumed of a link that nobody knows
    for _ in range(5):
        speed.drained(1_000_000, 2 * MS_NS, emptied=True)
    assert speed.bytes_per_s == 500_000_000
    for _ in range(100):
        speed.drained(5000, 10 * MS_NS, emptied=True)
    assert speed.bytes_per_s == 500_000_000


def test_what_a_shaper_lets_through_at_once_is_a_small_part_of_a_sample() -> None:
    """25 MB/s, and 128 KiB more at the beginning of every 60 ms."""
    speed = LinkSpeed()
    for _ in range(20):
        for tick in range(60):
            speed.drained(25_000 + (131_072 if tick == 0 else 0), MS_NS, emptied=tick % 3 == 2)
    assert 25_000_000 <= speed.bytes_per_s < 1.15 * 25_000_000


@given(st.integers(1, 40), st.integers(3, 15), st.integers(0, 10 * MS_NS))
def test_acknowledgements_that_come_in_clumps_are_not_taken_for_another_speed(
    looks_a_ms: int, clump_ms: int, began_ns: int
) -> None:
    """6 MB/s; a queue that never empties is looked at so often, and shrinks by whole clumps."""
    speed, look_ns, acknowledged = LinkSpeed(), MS_NS // looks_a_ms, 0
    for look in range(600 * looks_a_ms):
        clumps = (began_ns + look * look_ns) // (clump_ms * MS_NS)
        speed.drained((clumps - acknowledged) * clump_ms * 6000, look_ns, emptied=False)
        acknowledged = clumps
    assert abs(speed.bytes_per_s - 6_000_000) <= 0.12 * 6_000_000
