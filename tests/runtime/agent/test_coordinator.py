"""Coordinator: one agent leads at a time, and the attempts that nobody in them can end are ended by
exactly one verdict; while all is well nobody is disturbed."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.recovery.leader_lease import Lease, OrderGranted
from keepstep.model.attempts import Arrival, Verdict
from keepstep.model.units import S_NS
from keepstep.runtime.agent.coordinator import SILENT_NS, Coordinator, Presence
from keepstep.runtime.agent.meeting_record import CALLED_OFF, MeetingRecord
from tests.runtime.agent.test_meeting_record import Meeting
from tests.runtime.fakes import FakeJournal, FakeKV

LEASE_S = 10.0
NODES = 3


class Agents:
    """Agents of one job, where they meet."""

    def __init__(self, places: list[int]) -> None:
        """places: of each agent in attempt 0; -1 for a spare."""
        self.meeting = Meeting()
        self.journals = [FakeJournal() for _ in places]
        self.presences = [Presence(0, at, f"agent {n}") for n, at in enumerate(places)]
        self.silent: list[int] = []
        self.agents = [self._agent(number) for number in range(len(places))]

    def _agent(self, number: int) -> Coordinator:
        time = self.meeting.time
        return Coordinator(
            time,
            time,
            self.journals[number],
            self.record(),
            f"life-{number}",
            LEASE_S,
            NODES,
            lambda: self.presences[number],
            lambda: self.silent.append(number),
        )

    def record(self) -> MeetingRecord:
        return MeetingRecord(FakeKV(self.meeting.time, self.meeting.table))

    def ask(self, coroutine: Coroutine[Any, None, Any]) -> Any:
        return self.meeting.ask(coroutine)

    def seat(self, place: int, is_ready: bool = True) -> None:
        arrival = Arrival(f"token {place}", f"host{place}", 7, 1, 2, NODES, node=place)
        self.ask(self.record().take_seat(0, place, arrival))
        if is_ready:
            self.ask(self.record().mark(0, "ready", place))

    def pass_s(self, seconds: float) -> None:
        self.meeting.time.pass_ns(int(seconds * S_NS))

    @property
    def verdict(self) -> Verdict | None:
        found: Verdict | None = self.ask(self.record().verdict(0))
        return found

    def leaders(self) -> list[int]:
        """Who led, in the order of the terms."""
        told = [
            (event.data["term"], number)
            for number, journal in enumerate(self.journals)
            for event in journal.of("coordinator")
            if event.data["leads"]
        ]
        return [number for _, number in sorted(told)]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 60)), max_size=5))
def test_each_term_has_one_leader_whoever_dies_when(deaths: list[tuple[int, float]]) -> None:
    agents = Agents([0, 1, 2])
    for place in range(NODES):
        agents.seat(place)
    alive = {0, 1, 2}
    for number, after_s in deaths:
        agents.pass_s(after_s)
        agents.agents[number].close()
        alive.discard(number)
    agents.pass_s(10 * LEASE_S)
    terms = [
        event.data["term"]
        for journal in agents.journals
        for event in journal.of("coordinator")
        if event.data["leads"]
    ]
    assert len(set(terms)) == len(terms)
    if alive:
        assert agents.leaders()[-1] in alive, "somebody who lives has taken over"
    assert agents.verdict is None, "all ranks train, and nobody disturbs them"


def test_a_node_that_came_and_does_not_answer_ends_the_attempt() -> None:
    agents = Agents([0, 1])
    for place in range(NODES):
        agents.seat(place, is_ready=place != 2)
    agents.pass_s(LEASE_S / 2)
    assert agents.verdict is None
    agents.pass_s(2 * LEASE_S)
    assert agents.verdict is not None and agents.verdict.outcome == "again"
    assert "node 2 on host2 came and then did not answer" in agents.verdict.why
    assert sum(len(journal.of("attempt-wanted")) for journal in agents.journals) == 1
    assert agents.ask(agents.record().marks(0, "ready", [2])) == [CALLED_OFF], "nobody waits on"


def test_no_verdict_is_said_by_who_stood_still_after_its_lease_was_renewed() -> None:
    """Another agent has taken over in the very moment between the renewal and the verdict."""
    agents = Agents([0])
    for place in range(NODES):
        agents.seat(place, is_ready=place != 2)
    table = agents.meeting.table
    order, record = agents.agents[0]._order, agents.agents[0]._record

    async def late(attempt: int, granted: OrderGranted) -> None:
        usurper = Lease(granted.term + 1, "another life", "agent 9")
        assert await record.swap_lease(agents.agents[0]._leadership.lease, usurper) == usurper
        await order(attempt, granted)

    agents.agents[0]._order = late  # type: ignore[method-assign]
    agents.pass_s(3 * LEASE_S)
    assert agents.verdict is None and "0/verdict" not in table.values
    assert agents.journals[0].of("attempt-wanted") == []
    assert "another one leads" in agents.journals[0].of("order-refused")[0].why
    assert agents.ask(agents.record().marks(0, "ready", [2])) == [None], "nothing is called off"


def test_an_attempt_that_is_not_full_is_waited_for() -> None:
    agents = Agents([0])
    agents.seat(0)
    agents.pass_s(20 * LEASE_S)
    assert agents.verdict is None


def test_an_attempt_of_which_nobody_is_there_is_ended_by_a_newcomer() -> None:
    agents = Agents([-1])
    for place in range(NODES):
        agents.seat(place)
    agents.pass_s(10 * LEASE_S)
    assert agents.verdict is not None and "is there any more" in agents.verdict.why


@pytest.mark.parametrize("answers", [True, False])
def test_who_should_say_that_its_ranks_ended_well_is_called(answers: bool) -> None:
    agents = Agents([0, 1, 2] if answers else [0, 1])
    for place in range(NODES):
        agents.seat(place)
    for place in (0, 1):
        agents.ask(agents.record().mark(0, "well", place))
    agents.pass_s(6 * LEASE_S)
    if answers:
        assert agents.verdict is None, "its ranks only take longer"
    else:
        assert agents.verdict is not None and "node 2 on host2" in agents.verdict.why


def test_an_attempt_with_its_verdict_is_called_off_for_those_who_wait() -> None:
    agents = Agents([0])
    agents.seat(0)
    agents.ask(agents.record().say(0, Verdict("again", "a rank failed")))
    agents.pass_s(2 * LEASE_S)
    assert agents.ask(agents.record().marks(0, "ready", [1])) == [CALLED_OFF]
    assert agents.journals[0].of("attempt-wanted") == []


def test_who_cannot_read_what_is_there_takes_no_part_any_more() -> None:
    agents = Agents([0])
    agents.meeting.table.values["coordinator"] = "another release's"
    agents.pass_s(2 * LEASE_S)
    assert agents.journals[0].kinds == ["coordinator-left"]


def test_a_kv_that_answers_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Agents([0, 1])
    town.pass_s(2 * SILENT_NS / S_NS)
    assert town.silent == []
    monkeypatch.setattr(FakeKV, "read", lambda self, keys, then: None)
    town.pass_s(SILENT_NS / S_NS - 1)
    assert town.silent == []
    town.pass_s(LEASE_S + 1)
    assert sorted(town.silent) == [0, 1]


def test_who_has_left_is_not_told_of_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Agents([0, 1])
    town.pass_s(LEASE_S)
    monkeypatch.setattr(FakeKV, "read", lambda self, keys, then: None)
    town.pass_s(LEASE_S)
    town.agents[0].close()
    town.pass_s(2 * SILENT_NS / S_NS)
    assert town.silent == [1]
