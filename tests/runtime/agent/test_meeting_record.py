"""MeetingRecord: a seat, a mark and a verdict are the same for all who read them, for ever."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.leader_lease import Lease
from keepstep.errors import KeepstepError, MeetingError
from keepstep.model.attempts import VACANT, Arrival, Opening, Verdict
from keepstep.model.failure import Cause, Failure
from keepstep.runtime.agent.meeting_record import CALLED_OFF, YES, MeetingRecord
from keepstep.runtime.agent.tasks import Task
from tests.runtime.fakes import FakeKV, FakeTime, Table

T = TypeVar("T")

ARRIVAL = Arrival("token", "host", 7, 1, 2, 3)


class Meeting:
    def __init__(self) -> None:
        self.time = FakeTime()
        self.table = Table()

    def record(self) -> MeetingRecord:
        return MeetingRecord(FakeKV(self.time, self.table))

    def begin(self, coroutine: Coroutine[Any, None, T]) -> list[T]:
        """What it has brought by now, or will. Raises what it raises."""
        found: list[T] = []
        Task(coroutine, found.append, _raise)
        self.time.pass_ns()
        return found

    def ask(self, coroutine: Coroutine[Any, None, T]) -> T:
        [found] = self.begin(coroutine)
        return found


def _raise(error: KeepstepError) -> None:
    raise error


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


@given(st.lists(st.tuples(st.integers(0, 2), st.text("abc", min_size=1, max_size=2)), min_size=1))
def test_the_first_arrival_has_the_seat_whoever_asks(asked: list[tuple[int, str]]) -> None:
    meeting = Meeting()
    first: dict[int, str] = {}
    for place, name in asked:
        first.setdefault(place, name)
        found = meeting.ask(meeting.record().take_seat(1, place, replace(ARRIVAL, token=name)))
        assert found.token == first[place]
    seats = meeting.ask(meeting.record().seats(1, 3))
    assert {p: s.token for p, s in enumerate(seats) if s is not None} == first
    assert meeting.ask(meeting.record().seats(2, 3)) == [None] * 3, "another attempt's"


FAILURE = Failure(Cause.CRASH, 3, "host", "0", step=8, error="ValueError", completed_step=7)
VERDICTS = st.builds(
    Verdict,
    outcome=st.sampled_from(["again", "stop", "done"]),
    why=st.text(max_size=20),
    code=st.integers(0, 255),
    signum=st.integers(0, 64),
    keep=st.booleans(),
    failure=st.none() | st.just(FAILURE),
    vacant=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@given(st.lists(VERDICTS, min_size=1, max_size=4))
def test_the_first_verdict_counts_and_arrives_as_it_was_said(verdicts: list[Verdict]) -> None:
    meeting = Meeting()
    waiting = meeting.begin(meeting.record().wait_for_verdict(1))
    assert meeting.ask(meeting.record().verdict(1)) is None and waiting == []
    for verdict in verdicts:
        assert meeting.ask(meeting.record().say(1, verdict)) == verdicts[0]
    assert meeting.ask(meeting.record().verdict(1)) == verdicts[0] and waiting == [verdicts[0]]


def test_what_all_attempts_have_in_common_is_the_first_proposal(meeting: Meeting) -> None:
    first = Opening("secret", 5)
    assert meeting.ask(meeting.record().open(first)) == first
    assert meeting.ask(meeting.record().open(Opening("another", 6))) == first


def test_closed_seats_are_vacant_and_the_attempt_is_full(meeting: Meeting) -> None:
    meeting.ask(meeting.record().take_seat(1, 1, ARRIVAL))
    full = meeting.begin(meeting.record().wait_for_marks(1, "full"))
    meeting.ask(meeting.record().close_seats(1, 3))
    assert meeting.ask(meeting.record().seats(1, 3)) == [VACANT, ARRIVAL, VACANT]
    assert full == [[YES]]


def test_marks_that_do_not_come_in_time(meeting: Meeting) -> None:
    found = meeting.begin(meeting.record().wait_for_marks(1, "ready", [0, 1], within_ns=10))
    meeting.ask(meeting.record().mark(1, "ready", 0))
    meeting.time.pass_ns(10)
    assert found == [None]
    assert meeting.ask(meeting.record().marks(1, "ready", [0, 1])) == [YES, None]


def test_an_attempt_that_is_called_off_keeps_nobody_waiting(meeting: Meeting) -> None:
    meeting.ask(meeting.record().mark(1, "ready", 0))
    waiting = meeting.begin(meeting.record().wait_for_marks(1, "ready", [0, 1]))
    meeting.ask(meeting.record().call_off(1, 2))
    assert waiting == [[YES, CALLED_OFF]]


def test_failures_are_told_to_all(meeting: Meeting) -> None:
    meeting.ask(meeting.record().tell_failure(1, 2, FAILURE))
    assert meeting.ask(meeting.record().failures(1, 3)) == (FAILURE,)


def test_a_lease_is_swapped_against_what_was_read(meeting: Meeting) -> None:
    first, second = Lease(1, "a", "node 0"), Lease(2, "b", "node 1")
    assert meeting.ask(meeting.record().look(0)).lease is None
    assert meeting.ask(meeting.record().swap_lease(None, first)) == first
    assert meeting.ask(meeting.record().swap_lease(None, second)) == first
    assert meeting.ask(meeting.record().swap_lease(first, second)) == second
    assert meeting.ask(meeting.record().look(0)).lease == second


@pytest.mark.parametrize("text", ["no json", '{"kind":"arrival"}', '{"kind":"lease"}'])
def test_another_releases_words_are_an_error(meeting: Meeting, text: str) -> None:
    meeting.table.values["1/verdict"] = text
    with pytest.raises(MeetingError, match="where the nodes meet"):
        meeting.ask(meeting.record().verdict(1))


def test_a_word_of_another_kind_is_an_error(meeting: Meeting) -> None:
    meeting.ask(meeting.record().take_seat(1, 0, ARRIVAL))
    meeting.table.values["1/verdict"] = meeting.table.values["1/seat/0"]
    with pytest.raises(MeetingError, match="expected Verdict, found Arrival"):
        meeting.ask(meeting.record().verdict(1))
