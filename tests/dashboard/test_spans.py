"""An incident as spans: one tree, within its time, with the same ids each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.dashboard.spans import IncidentSpan, incidents_of
from keepstep.dashboard.timeline import runs_of
from keepstep.model.units import MS_NS, S_NS
from tests.dashboard.test_timeline import BOOT_NS, begins, comes_back, ends, killed


def incidents(*kills_ms: int, ok: bool = True) -> list[list[IncidentSpan]]:
    events = begins()
    for ms in kills_ms:
        events += [*killed(ms), *comes_back(ms + 100)]
    events += ends(1_000_000, ok)
    return list(incidents_of("j", runs_of(events)))


def test_a_recovery_is_a_root_and_a_span_for_each_link() -> None:
    [spans] = incidents(5000)
    root, *links = spans
    assert root.name == "keepstep recovery" and root.parent_id == 0 and root.ok is True
    assert {"restarted", "joined", "offered", "loaded"} <= {link.name for link in links}
    assert root.attributes["keepstep.lost_steps"] == 1
    assert root.attributes["keepstep.source"] == "memory"
    assert root.attributes["keepstep.why"] == "rank 1 was killed"
    assert root.began_ns == BOOT_NS + 5000 * MS_NS
    assert S_NS < root.ended_ns - root.began_ns < 2 * S_NS


@given(st.lists(st.integers(10, 200), min_size=1, max_size=5, unique=True))
def test_spans_are_one_tree_each_and_lie_within_it(kills: list[int]) -> None:
    found = incidents(*(second * 4000 for second in sorted(kills)))
    assert len(found) == len(kills)
    assert len({spans[0].trace_id for spans in found}) == len(kills)
    for root, *links in found:
        assert {link.parent_id for link in links} == {root.span_id}
        assert {link.trace_id for link in links} == {root.trace_id}
        assert len({root.span_id, *(link.span_id for link in links)}) == len(links) + 1
        assert all(root.began_ns <= s.began_ns <= s.ended_ns <= root.ended_ns for s in links)
        assert 0 < root.trace_id < 1 << 128 and 0 < root.span_id < 1 << 64


def test_asked_again_it_is_the_same() -> None:
    assert incidents(5000) == incidents(5000)


def test_what_is_not_over_is_no_span_yet() -> None:
    assert list(incidents_of("j", runs_of([*begins(), *killed(5000)]))) == []


def test_a_job_that_ends_by_a_failure_is_an_error() -> None:
    events = [*begins(), *killed(5000), *ends(9000, ok=False)]
    [[root, *_]] = list(incidents_of("j", runs_of(events)))
    assert root.ok is False and root.attributes["keepstep.outcome"] == "ended"
