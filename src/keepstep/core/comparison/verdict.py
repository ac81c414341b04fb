"""Verdict: what two states of a training have in common, in one sentence, and whether a save wrote
what was saved before.

Comes in: what each state has under which name; later, what was found for each. Goes out: what can
be said without a look at a byte, a summary, and a warning about states of two steps between which
nothing moved. Never reads a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.model.comparison import Likeness, TensorFinding, TensorKind

_WORDS = {
    Likeness.DIFFERENT: "different",
    Likeness.ONLY_A: "only in A",
    Likeness.ONLY_B: "only in B",
    Likeness.SHAPE: "of another shape",
    Likeness.DTYPE: "of another dtype",
    Likeness.APART: "other parts of one tensor",
}


def by_kinds(a: Mapping[str, TensorKind], b: Mapping[str, TensorKind]) -> list[TensorFinding]:
    """One finding for each name, sorted. EQUAL is said of what only its bytes can tell apart: the
    caller compares them."""
    return [_by_kind(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys())]


def _by_kind(name: str, a: TensorKind | None, b: TensorKind | None) -> TensorFinding:
    if b is None:
        verdict = Likeness.ONLY_A
    elif a is None:
        verdict = Likeness.ONLY_B
    elif a.is_value and b.is_value and a.shape != b.shape:
        verdict = Likeness.DIFFERENT
    elif a.dtype != b.dtype:
        verdict = Likeness.DTYPE
    else:
        verdict = Likeness.EQUAL if a.shape == b.shape else Likeness.SHAPE
    return TensorFinding(name, verdict, a, b)


def are_equal(findings: Sequence[TensorFinding]) -> bool:
    return all(finding.verdict is Likeness.EQUAL for finding in findings)


def summary(findings: Sequence[TensorFinding]) -> str:
    """One sentence about all of them."""
    if not findings:
        return "Nothing to compare: both are empty."
    count = Counter(finding.verdict for finding in findings)
    if are_equal(findings):
        return f"Equal: all {len(findings)} tensors and values have the same bytes."
    told = [f"{count[verdict]} {words}" for verdict, words in _WORDS.items() if count[verdict]]
    first = next((f.name for f in findings if f.verdict is Likeness.DIFFERENT), None)
    named = f" The first that differs: {first}." if first else ""
    return f"Different: {count[Likeness.EQUAL]} of {len(findings)} equal, {', '.join(told)}.{named}"


@dataclass(frozen=True, slots=True)
class Advance:
    """What moved from one saved state to the next. `unchanged`: the tensors with the same bytes, by
    name; `warning`: empty when weights moved, or no step lies between."""

    before: str
    after: str
    from_step: int
    to_step: int
    tensors: int
    unchanged: tuple[str, ...]
    warning: str


def advance(
    before: str, after: str, from_step: int, to_step: int, findings: Sequence[TensorFinding]
) -> Advance:
    """Judge the findings for two states of one training, the older one first."""
    tensors = [f for f in findings if not (f.a or f.b or _NO_KIND).is_value]
    unchanged = tuple(f.name for f in tensors if f.verdict is Likeness.EQUAL)
    weights = [f for f in tensors if f.a is not None and f.a.is_weight]
    warning = ""
    if from_step != to_step:
        between = f"step {from_step} and step {to_step}"
        if are_equal(findings):
            warning = f"{between} have identical bytes: was the newer one saved from old memory?"
        elif tensors and len(unchanged) == len(tensors):
            warning = (
                f"{between} have identical tensors, all {len(tensors)}: was the newer one saved "
                "from old memory?"
            )
        elif weights and all(f.verdict is Likeness.EQUAL for f in weights):
            warning = f"{between} have identical weights: none of {len(weights)} moved"
    return Advance(before, after, from_step, to_step, len(tensors), unchanged, warning)


_NO_KIND = TensorKind("", ())
