"""Record: what a drill tells goes through JSON without losing what is read of it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prediction.record import READ, TOLD, Begun, Record, record_of
from keepstep.model.events import KINDS, Event
from keepstep.testing.conductor import Drill
from keepstep.testing.faults import parse
from keepstep.testing.witness import DrillFacts

NUMBERS = st.integers(0, 1 << 50)
EVENTS = st.builds(
    lambda at_ns, kind, data: Event(at_ns, at_ns, "", kind, "", data),
    NUMBERS,
    st.sampled_from(TOLD),
    st.dictionaries(st.sampled_from(READ), NUMBERS, max_size=3),
)
PHASES = st.builds(
    Begun, NUMBERS, NUMBERS, st.sampled_from(["step", "backward"]), NUMBERS, NUMBERS, NUMBERS
)
RECORDS = st.builds(
    Record,
    st.just({"nodes": 2}),
    st.just([{"kind": "kill"}]),
    st.lists(
        st.fixed_dictionaries({"mono_ns": NUMBERS, "fault": NUMBERS, "what": st.just("did")}),
        max_size=3,
    ),
    st.lists(PHASES, max_size=5),
    st.lists(st.lists(NUMBERS, min_size=3, max_size=3), max_size=3),
    st.lists(st.lists(EVENTS, max_size=5), max_size=2),
)


@given(RECORDS)
def test_it_comes_back_as_it_was(record: Record) -> None:
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_only_what_is_read_is_kept() -> None:
    told = [Event(1, 1, "", "resumed", "", {"step": 4, "pid": 7, "secret": 1})]
    other = [Event(2, 2, "", "mesh", "", {})]
    record = Record({}, [], [], [], [], [[*told, *other]])
    assert record.to_json()["journals"] == [[[1, "resumed", {"step": 4, "pid": 7}]]]


def test_every_kind_that_is_read_is_recorded_by_somebody() -> None:
    assert set(TOLD) <= set(KINDS)


def test_a_drill_tells_its_shape_its_faults_and_what_was_seen() -> None:
    order = Drill(work=Path("/w"), nodes=2, nproc=3, policy="copies:2", persist_every=5)
    facts = DrillFacts("job", 2, "copies:2", 6)
    facts.events.append(Event(1, 1, "keeper", "persist-started", "", {"step": 4}))
    facts.phases.append(Begun(0, 1, "step", 4, 9)._asdict())
    facts.notes.append({"fault": 0, "what": "did", "mono_ns": 3})
    found = record_of(order, [parse("kill:rank=1,step=5")], facts)
    assert (found.shape["nodes"], found.shape["nproc"], found.shape["store"]) == (2, 3, True)
    assert found.faults[0]["kind"] == "kill" and found.phases == [Begun(0, 1, "step", 4, 9)]
    assert found.notes == facts.notes and found.journals == [facts.events]
