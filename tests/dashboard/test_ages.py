"""Ages, dates and counts, in words."""

from __future__ import annotations

import pytest

from keepstep.dashboard import ages
from keepstep.model.units import MS_NS, S_NS


@pytest.mark.parametrize(
    ("age_ns", "words"),
    [
        (None, "-"),
        (0, "0.0 s"),
        (400 * MS_NS, "0.4 s"),
        (12 * S_NS, "12 s"),
        (180 * S_NS, "3 min"),
        (9000 * S_NS, "2.5 h"),
        (345_600 * S_NS, "4 days"),
    ],
)
def test_an_age_has_the_precision_that_matters(age_ns: int | None, words: str) -> None:
    assert ages.human_age(age_ns) == words


def test_what_is_counted_has_its_plural() -> None:
    assert [ages.count(number, "step") for number in (0, 1, 2)] == [
        "0 steps",
        "1 step",
        "2 steps",
    ]
