"""Which parts of more logs than can be read are: all are heard, and the bound holds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.postmortem.portions import LogPortion, LogSize, portions_of

SIZES = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=30)


def logs_of(sizes: list[tuple[int, bool]]) -> list[LogSize]:
    return [LogSize(str(i), size, stream) for i, (size, stream) in enumerate(sizes)]


def spans(portions: tuple[LogPortion, ...], name: str) -> list[tuple[int, int]]:
    return sorted((p.begin, p.end) for p in portions if p.name == name)


@given(SIZES, st.integers(100, 200_000))
def test_the_bound_holds_over_all_files_together(sizes: list[tuple[int, bool]], most: int) -> None:
    for portions in portions_of(logs_of(sizes), most):
        assert sum(p.end - p.begin for p in portions) <= most
        assert all(0 <= p.begin <= p.end for p in portions)


@given(SIZES, st.integers(100, 200_000))
def test_no_byte_is_read_twice_and_the_ends_come_first(
    sizes: list[tuple[int, bool]], most: int
) -> None:
    rounds = portions_of(logs_of(sizes), most)
    for log in logs_of(sizes):
        if log.is_stream:
            continue
        parts = sorted(span for portions in rounds for span in spans(portions, log.name))
        assert all(a[1] <= b[0] for a, b in pairwise(parts))
        first = spans(rounds[0], log.name)
        assert first[0][0] == 0 and first[-1][1] == log.size


def test_what_fits_is_read_whole() -> None:
    logs = [LogSize("a", 100), LogSize("b", 0), LogSize("c.gz", 50, True)]
    (portions,) = portions_of(logs, 1000)
    assert [(p.begin, p.end) for p in portions] == [(0, 100), (0, 0), (0, 900)]


def test_small_logs_are_read_whole_beside_a_huge_one() -> None:
    logs = [LogSize("huge", 10**12), *(LogSize(str(i), 1000) for i in range(9))]
    rounds = portions_of(logs, 10**6)
    read = {log.name: sum(e - b for r in rounds for b, e in spans(r, log.name)) for log in logs}
    assert {read[str(i)] for i in range(9)} == {1000}
    assert read["huge"] > 700_000


def test_a_stream_is_read_from_its_beginning_alone() -> None:
    rounds = portions_of([LogSize("a.gz", 5000, True), LogSize("b", 5000)], 1000)
    assert all(begin == 0 for portions in rounds for begin, _ in spans(portions, "a.gz"))
