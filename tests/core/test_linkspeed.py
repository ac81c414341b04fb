"""What a chunk costs on a link, from how its socket's queue drained."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.interleave import Cost
from keepstep.core.linkspeed import FIRST_BYTES_PER_S, LinkSpeed
from keepstep.model.units import MS_NS, S_NS


def test_before_anything_is_known() -> None:
    speed = LinkSpeed()
    assert not speed.is_known and speed.cost(700) == Cost(700, FIRST_BYTES_PER_S)


@given(st.integers(10**6, 10**10), st.lists(st.integers(MS_NS, 50 * MS_NS), min_size=1, max_size=30))
def test_a_steady_link_is_known_as_it_is(bytes_per_s: int, waits_ns: list[int]) -> None:
    speed = LinkSpeed()
    for wait_ns in waits_ns:
        speed.drained(bytes_per_s * wait_ns // S_NS, wait_ns, emptied=False)
    assert abs(speed.bytes_per_s - bytes_per_s) <= 0.002 * bytes_per_s


@given(st.integers(10**6, 10**10), st.integers(1, 12))
def test_samples_that_met_other_traffic_count_for_nothing_unless_nearly_all_did(bytes_per_s: int, met: int) -> None:
    speed = LinkSpeed()
    for number in range(16):
        speed.drained(bytes_per_s // (200 if number < met else 100), 10 * MS_NS, emptied=False)
    assert abs(speed.bytes_per_s - bytes_per_s) <= 0.001 * bytes_per_s + 100


def test_what_drained_before_anybody_looked_tells_only_of_a_faster_link() -> None:
    speed = LinkSpeed()
    speed.drained(1_000_000, 100 * MS_NS, emptied=True)
    assert not speed.is_known
    speed.drained(1_000_000, 2 * MS_NS, emptied=True)
    assert speed.bytes_per_s == 500_000_000
    speed.drained(50, MS_NS // 10, emptied=True)
    speed.drained(-5, 10 * MS_NS, emptied=False)
    assert speed.bytes_per_s == 500_000_000
