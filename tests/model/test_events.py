"""Events: a line each, and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.events import Event, event_from_line

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
events = st.builds(
    Event,
    st.integers(0, 1 << 62),
    st.integers(0, 1 << 62),
    st.text(),
    st.text(),
    st.text(),
    st.dictionaries(st.text(max_size=8), scalars),
)


@given(events)
def test_an_event_is_one_line_and_comes_back(event: Event) -> None:
    line = event.to_line()
    assert line.count("\n") == 1 and line.endswith("\n")
    assert event_from_line(line) == event


def test_what_json_does_not_know_becomes_words() -> None:
    line = Event(
        1, 2, "rank 0", "skipped", "why", {"path": ValueError("no"), "loss": math.nan}
    ).to_line()
    data = event_from_line(line).data
    assert data["path"] == "no" and math.isnan(data["loss"])


@given(events, st.data())
def test_a_torn_line_is_no_event(event: Event, draw: st.DataObject) -> None:
    line = event.to_line()
    with pytest.raises(ValueError, match="not an event"):
        event_from_line(line[: draw.draw(st.integers(0, len(line) - 2))])


@pytest.mark.parametrize("line", ["", "[]", "{}", "3", '{"wall_ns": 1}', '{"surprise": 1}'])
def test_a_foreign_line_is_no_event(line: str) -> None:
    with pytest.raises(ValueError, match="not an event"):
        event_from_line(line)
