"""Verdict: what is said without a look at a byte, and which saves are suspicious."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.comparison.verdict import advance, are_equal, by_kinds, summary
from keepstep.model.comparison import (
    VALUE,
    Difference,
    Likeness,
    TensorBox,
    TensorFinding,
    TensorKind,
)

FLOATS = TensorKind("float32", (4, 3))
COUNT = TensorKind("int64", ())
PICKLED = TensorKind(VALUE, (100,))


def finding(kind: TensorKind, is_equal: bool, name: str = "w") -> TensorFinding:
    verdict = Likeness.EQUAL if is_equal else Likeness.DIFFERENT
    return TensorFinding(name, verdict, kind, kind)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (FLOATS, FLOATS, Likeness.EQUAL),
        (FLOATS, None, Likeness.ONLY_A),
        (None, FLOATS, Likeness.ONLY_B),
        (FLOATS, TensorKind("float32", (3, 4)), Likeness.SHAPE),
        (FLOATS, TensorKind("bfloat16", (4, 3)), Likeness.DTYPE),
        (FLOATS, PICKLED, Likeness.DTYPE),
        (PICKLED, TensorKind(VALUE, (99,)), Likeness.DIFFERENT),
    ],
)
def test_what_the_kinds_say(a: TensorKind | None, b: TensorKind | None, verdict: Likeness) -> None:
    one, other = ({} if kind is None else {"w": kind} for kind in (a, b))
    [found] = by_kinds(one, other)
    assert (found.verdict, found.a, found.b) == (verdict, a, b)
    assert are_equal([found]) is (verdict is Likeness.EQUAL)


def test_a_summary_counts_and_names_the_first_that_differs() -> None:
    findings = [
        finding(FLOATS, True, "a"),
        finding(FLOATS, False, "b"),
        finding(FLOATS, False, "c"),
        TensorFinding("d", Likeness.ONLY_B, None, COUNT),
    ]
    told = "Different: 1 of 4 equal, 2 different, 1 only in B. The first that differs: b."
    assert summary(findings) == told
    assert summary(findings[:1]).startswith("Equal: all 1")


@pytest.mark.parametrize(
    ("findings", "warning"),
    [
        ([finding(FLOATS, True), finding(PICKLED, True)], "identical bytes"),
        ([finding(FLOATS, True), finding(PICKLED, False)], "identical tensors"),
        ([finding(FLOATS, True), finding(COUNT, False)], "identical weights"),
        ([finding(FLOATS, True), finding(FLOATS, False)], ""),
        ([finding(PICKLED, False)], ""),
        ([TensorFinding("w", Likeness.ONLY_B, None, FLOATS)], ""),
    ],
)
def test_a_save_that_wrote_what_was_there_is_told(
    findings: list[TensorFinding], warning: str
) -> None:
    found = advance("A", "B", 9, 19, findings)
    assert warning in found.warning and bool(warning) is bool(found.warning)
    assert advance("A", "B", 9, 9, findings).warning == "", "no step lies between"


def test_unchanged_tensors_are_named_and_values_are_not() -> None:
    findings = [
        finding(FLOATS, True, "frozen"),
        finding(FLOATS, False, "w"),
        finding(PICKLED, True, "name"),
    ]
    found = advance("A", "B", 9, 19, findings)
    assert (found.unchanged, found.tensors) == (("frozen",), 2)


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=3))
def test_an_overlap_is_what_lies_in_both(dims: list[tuple[int, int, int, int]]) -> None:
    one, other = (
        TensorBox(tuple(d[i] for d in dims), tuple(d[i + 1] for d in dims)) for i in (0, 2)
    )
    common = one.overlap(other)
    assert common == other.overlap(one)
    counts = [len(set(range(d[0], d[0] + d[1])) & set(range(d[2], d[2] + d[3]))) for d in dims]
    assert (common.shape if common else None) == (tuple(counts) if all(counts) else None)


def test_drift_is_relative_to_the_first() -> None:
    assert Difference(3, 1, 0, 1.0, 4.0, 5.0, 2.0).drift == 0.5
    assert Difference(3, 1, 0, 1.0, 0.0, 5.0, 5.0).drift == float("inf")
    assert Difference(3, 1).drift is None
