"""An even rate: what may go in how much time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.pacing.even_rate import BURST_NS, LEAST_BYTES_PER_S, SPREAD, EvenRate, even_rate
from keepstep.core.pacing.gate import LEAST_WAIT_NS, MOST_WAIT_NS
from keepstep.model.units import MIB, MS_NS, S_NS

questions = st.lists(
    st.tuples(st.integers(0, 50 * MS_NS), st.integers(1, 16 * MIB)), min_size=1, max_size=60
)


@given(questions, st.integers(10**4, 10**11))
def test_no_stretch_of_time_has_more_than_the_rate_and_a_burst(
    asked: list[tuple[int, int]], bytes_per_s: int
) -> None:
    rate, now_ns, granted = EvenRate(), S_NS, []
    for pause_ns, nbytes in asked:
        now_ns += pause_ns
        found = rate.grant(nbytes, bytes_per_s, now_ns)
        assert 0 <= found.nbytes <= nbytes
        assert found.nbytes or LEAST_WAIT_NS <= found.wait_ns <= MOST_WAIT_NS
        granted.append((now_ns, found.nbytes))
    for first in range(len(granted)):
        for last in range(first, len(granted)):
            span_ns = granted[last][0] - granted[first][0] + BURST_NS
            nbytes = sum(nbytes for _, nbytes in granted[first : last + 1])
            # a grant is one byte at least, and each is rounded
            assert nbytes <= span_ns * bytes_per_s / S_NS + (last - first + 1) + bytes_per_s / S_NS


@given(st.integers(1, 10**10), st.integers(20 * MS_NS, 10 * S_NS), st.integers(1, 16 * MIB))
def test_who_asks_again_as_told_sends_all_of_a_steps_copies_in_its_part_of_the_step(
    step_bytes: int, step_ns: int, block_bytes: int
) -> None:
    block_bytes = max(block_bytes, step_bytes // 500)
    rate, began_ns, now_ns, left = EvenRate(), S_NS, S_NS, step_bytes
    while left:
        found = rate.grant(min(left, block_bytes), even_rate(step_bytes, step_ns), now_ns)
        left -= found.nbytes
        now_ns += found.wait_ns
    took_ns = now_ns - began_ns
    assert took_ns <= SPREAD * step_ns + MOST_WAIT_NS
    if even_rate(step_bytes, step_ns) > LEAST_BYTES_PER_S:
        assert took_ns >= SPREAD * step_ns - BURST_NS - MS_NS


def test_without_a_step_there_is_no_rate() -> None:
    assert even_rate(MIB, 0) == 0
    assert even_rate(0, S_NS) == 0
    assert even_rate(500 * MIB, S_NS) == 1000 * MIB
    assert even_rate(MIB, S_NS) == LEAST_BYTES_PER_S
