"""The partition of copies into idle spans, against what GEMINI (SOSP 2023, section 5) asks of
it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.pacing.schedule import MOST_STEPS, Chunk, Cost, Plan, Reserve, chunk_size, plan
from keepstep.model.units import MIB, MS_NS, S_NS

costs = st.builds(Cost, st.integers(0, 50 * MS_NS), st.integers(1_000, 10**10))
reserves = st.tuples(st.integers(1, 8), st.integers(1, 1 << 20)).map(
    lambda found: Reserve(found[0] * found[1], found[0])
)
all_spans = st.lists(st.integers(0, S_NS), max_size=8)


def sensible(nbytes: int, reserve: Reserve) -> int:
    """So few bytes that a plan has at most some hundred chunks."""
    return min(nbytes, 200 * reserve.chunk_bytes)


@given(
    all_spans,
    st.integers(0, 3),
    st.integers(0, 10**8),
    reserves,
    costs,
    st.floats(0.01, 1.0),
    st.integers(1, 10_000),
)
def test_every_plan(
    spans: list[int], copies: int, nbytes: int, reserve: Reserve, cost: Cost, mu: float, least: int
) -> None:
    nbytes = sensible(nbytes, reserve)
    found = plan(spans, copies, nbytes, reserve, cost, mu, least)
    for copy in range(copies):
        offset = 0
        for chunk in (c for c in found.chunks if c.copy == copy):
            assert chunk.offset_bytes == offset and 0 < chunk.nbytes <= reserve.chunk_bytes
            offset += chunk.nbytes
        assert offset == nbytes
    assert sum(c.nbytes for c in found.chunks) == copies * nbytes
    assert all(
        (a.copy, a.offset_bytes) < (b.copy, b.offset_bytes) and a.span <= b.span
        for a, b in pairwise(found.chunks)
    )
    used = Counter(dict.fromkeys(range(len(found.budget_ns)), 0))
    for chunk in found.chunks:
        assert chunk.at_ns == used[chunk.span]
        used[chunk.span] += cost.of(chunk.nbytes)
    assert found.used_ns == tuple(used[span] for span in range(len(found.budget_ns)))
    for span, (budget, spent) in enumerate(
        zip(found.budget_ns[:-1], found.used_ns[:-1], strict=True)
    ):
        assert spent <= budget <= spans[span]
    assert found.overflow_ns == max(0, found.used_ns[-1] - found.budget_ns[-1])
    assert (found.spread_steps == 1) == (found.overflow_ns == 0)


@given(all_spans, st.integers(1, 2), st.integers(1, 10**8), reserves, costs, st.floats(0.01, 1.0))
def test_no_span_is_left_while_a_whole_chunk_would_fit(
    spans: list[int], copies: int, nbytes: int, reserve: Reserve, cost: Cost, mu: float
) -> None:
    found = plan(spans, copies, sensible(nbytes, reserve), reserve, cost, mu)
    last = found.chunks[-1].span
    for budget, spent in list(zip(found.budget_ns, found.used_ns, strict=True))[:last]:
        assert budget - spent <= cost.alpha_ns or cost.fitting(budget - spent) == 0


@given(all_spans, st.integers(1, 10**8), reserves, costs, st.floats(0.01, 1.0))
def test_steps_to_fit_is_the_least(
    spans: list[int], nbytes: int, reserve: Reserve, cost: Cost, mu: float
) -> None:
    nbytes = sensible(nbytes, reserve)
    found = plan(spans, 1, nbytes, reserve, cost, mu)
    if found.spread_steps is None:
        assert plan(spans * MOST_STEPS, 1, nbytes, reserve, cost, mu).overflow_ns > 0
    else:
        assert plan(spans * found.spread_steps, 1, nbytes, reserve, cost, mu).overflow_ns == 0
        if found.spread_steps > 1:
            assert (
                plan(spans * (found.spread_steps - 1), 1, nbytes, reserve, cost, mu).overflow_ns > 0
            )


@given(costs, st.integers(0, 10 * S_NS))
def test_what_fits_costs_no_more_and_a_byte_more_does(cost: Cost, budget_ns: int) -> None:
    nbytes = cost.fitting(budget_ns)
    assert nbytes == 0 or cost.of(nbytes) <= budget_ns
    assert cost.of(nbytes + 1) > budget_ns


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(0.001, 1.0))
def test_amortising_keeps_to_what_is_tolerated(
    overflow_ns: int, step_ns: int, ratio: float
) -> None:
    found = Plan((), (), (), overflow_ns, None, "")
    every = found.every_steps(step_ns, ratio)
    bound_ns = max(1, int(ratio * step_ns))
    assert found.added_ns(every) <= bound_ns
    assert every == 1 or found.added_ns(every - 1) > bound_ns


SMALL = Reserve(1_000_000, 4)
BYTE_PER_NS = 1_000_000  # a unit of size a unit of time


def sizes(found: Plan) -> list[list[float]]:
    """Of the chunks of each span, in units."""
    return [
        [round(c.nbytes / 1e6, 2) for c in found.chunks if c.span == span]
        for span in range(len(found.budget_ns))
    ]


def test_three_equal_spans() -> None:
    found = plan([S_NS] * 3, 1, 2_400_000, SMALL, Cost(S_NS // 100, BYTE_PER_NS), 0.9)
    assert sizes(found) == [[0.25, 0.25, 0.25, 0.11], [0.25, 0.25, 0.25, 0.11], [0.25, 0.25, 0.18]]
    assert (found.overflow_ns, found.spread_steps) == (0, 1)


def test_a_span_with_less_than_the_start_up_time_left_is_left_and_the_rest_overflows() -> None:
    found = plan(
        [round(0.55 / 0.9 * S_NS), S_NS, S_NS],
        1,
        2_400_000,
        SMALL,
        Cost(S_NS // 5, BYTE_PER_NS),
        0.9,
    )
    assert [len(chunks) for chunks in sizes(found)] == [1, 2, 7]
    assert found.overflow_ns == pytest.approx(2.15 * S_NS, abs=2)
    assert "2.15 s too much" in found.why


PAPER = Cost(100_000, 6_250_000_000)
RESERVE = Reserve(128 * MIB, 4)


@pytest.mark.parametrize(
    ("mu", "chunks", "spans"), [(1.0, 288, 20), (0.9, 298, 22), (0.7, 302, 28), (0.5, 307, 39)]
)
def test_the_largest_model_of_the_paper(mu: float, chunks: int, spans: int) -> None:
    found = plan([80 * MS_NS] * 125, 1, 9_400_000_000, RESERVE, PAPER, mu)
    assert (len(found.chunks), len({c.span for c in found.chunks})) == (chunks, spans)
    assert sum(found.used_ns) / S_NS == pytest.approx(1.53, abs=0.01) and found.overflow_ns == 0


def test_three_replicas_are_two_copies() -> None:
    found = plan([80 * MS_NS] * 125, 2, 9_400_000_000, RESERVE, PAPER, 1.0)
    assert sum(c.nbytes for c in found.chunks) == 18_800_000_000 and {
        c.copy for c in found.chunks
    } == {0, 1}


@pytest.mark.parametrize(("every", "added_s"), [(1, 0.634), (2, 0.317), (4, 0.158)])
def test_overflow_and_what_every_jth_step_makes_of_it(every: int, added_s: float) -> None:
    found = plan([50 * MS_NS] * 20, 1, 9_400_000_000, RESERVE, PAPER, 0.9)
    assert found.added_ns(every) / S_NS == pytest.approx(added_s, abs=0.001)
    assert found.every_steps(10 * S_NS) == 7 and found.spread_steps == 2


def test_nothing_to_send_and_nowhere_to_send_it() -> None:
    cost = Cost(1000, 1_000_000)
    assert (
        plan([S_NS], 0, 5000, SMALL, cost, 0.9).chunks
        == plan([S_NS], 1, 0, SMALL, cost, 0.9).chunks
        == ()
    )
    nowhere = plan([], 1, 5000, SMALL, cost, 0.9)
    assert nowhere.chunks == (Chunk(0, 0, 0, 5000, 0),)
    assert (nowhere.overflow_ns, nowhere.spread_steps) == (cost.of(5000), None)


def test_a_tail_too_small_waits_unless_it_is_the_last() -> None:
    cost = Cost(0, 1_000_000_000)
    assert chunk_size(500, 4000, 4000, cost, least_bytes=600) == 0
    assert chunk_size(500, 400, 4000, cost, least_bytes=600) == 400
    assert chunk_size(None, 9000, 4000, cost, least_bytes=600) == 4000
