"""Values as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.dashboard.document import as_json
from keepstep.model.snapshot import Phase, Stamp


@dataclass(frozen=True)
class Sample:
    """Of every kind."""

    number: float
    inner: dict[int, object]


def test_every_kind_of_value() -> None:
    value = Sample(math.nan, {1: Phase.SEAL, 2: (math.inf, Path("/a"), Stamp(3, 1), None, True)})
    assert as_json(value) == {
        "number": None,
        "inner": {"1": "seal", "2": [None, "/a", {"step": 3, "epoch": 1}, None, True]},
    }


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
)


@given(plain)
def test_it_is_json_and_stays_what_it_is(value: object) -> None:
    once = as_json(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once == as_json(once)
