"""SingleNode: one node forms its attempts at once, and each is the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import MeetingError
from keepstep.model.attempts import Verdict
from keepstep.model.units import S_NS
from keepstep.runtime.agent.rendezvous import Formed, JoinRequest, SingleNode
from tests.runtime.fakes import AgentRoom


class Agent:
    def __init__(self, room: AgentRoom) -> None:
        self.room = room
        self.heard: list[object] = []
        self.rendezvous = SingleNode(room.world, room.launch, self)

    def formed(self, formed: Formed) -> None:
        self.heard.append(formed)

    def ended(self, verdict: Verdict) -> None:
        self.heard.append(verdict)

    def meeting_lost(self, why: str, is_refused: bool = False) -> None:
        self.heard.append(why)

    def join(self, stays: bool = True) -> Formed:
        self.rendezvous.join(JoinRequest(None, stays=stays))
        self.room.time.pass_ns()
        formed = self.heard[-1]
        assert isinstance(formed, Formed)
        return formed


@given(
    st.none() | st.integers(-1, 5),
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=5),
)
def test_attempts_are_numbered_and_ranks_stay_when_it_was_said(
    tmp_path_factory: pytest.TempPathFactory, follows: int | None, keeps: list[tuple[bool, bool]]
) -> None:
    """Of each attempt: whether ranks may stay, and whether some can."""
    agent = Agent(AgentRoom(tmp_path_factory.mktemp("s")))
    if follows is not None:
        agent.rendezvous.follow(follows)
    first = 0 if follows is None else follows + 1
    places = [agent.join()]
    for keep, stays in keeps:
        agent.rendezvous.say(places[-1].place.attempt, Verdict("again", "why", keep=keep))
        places.append(agent.join(stays))
    assert [formed.place.attempt for formed in places] == [first + n for n in range(len(places))]
    assert [formed.keep for formed in places] == [False, *map(all, keeps)]
    assert all((f.place.world_size, f.mesh) == (2, None) for f in places)
    ports = [formed.place.master_port for formed in places]
    assert len(set(ports)) == len(ports), "each attempt's ranks meet in a place of their own"


def test_nothing_is_heard_before_the_call_has_returned(tmp_path: Path) -> None:
    agent = Agent(AgentRoom(tmp_path))
    agent.rendezvous.join(JoinRequest(None))
    assert agent.heard == []
    agent.rendezvous.ended_well(0, "all ended well")
    agent.room.time.pass_ns()
    assert agent.heard[1:] == [Verdict("done", "all ended well")]


def test_the_next_attempt_waits_as_long_as_was_said_and_the_one_after_it_does_not(
    tmp_path: Path,
) -> None:
    agent = Agent(AgentRoom(tmp_path))
    first = agent.join().place
    agent.rendezvous.say(first.attempt, Verdict("again", "in vain", wait_ns=2 * S_NS))
    agent.rendezvous.join(JoinRequest(None))
    agent.room.time.pass_ns(2 * S_NS - 1)
    assert len(agent.heard) == 1
    agent.room.time.pass_ns(1)
    assert len(agent.heard) == 2
    agent.rendezvous.say(first.attempt + 1, Verdict("again", "why"))
    assert agent.join().place.attempt == first.attempt + 2


def test_who_closes_while_an_attempt_waits_hears_of_none(tmp_path: Path) -> None:
    agent = Agent(AgentRoom(tmp_path))
    agent.rendezvous.say(agent.join().place.attempt, Verdict("again", "in vain", wait_ns=S_NS))
    agent.rendezvous.join(JoinRequest(None))
    agent.rendezvous.close(None, 10)
    agent.room.time.pass_ns(2 * S_NS)
    assert len(agent.heard) == 1


def test_a_place_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    room = AgentRoom(tmp_path)
    room.places.error = MeetingError("the port is taken")
    agent = Agent(room)
    agent.rendezvous.join(JoinRequest(None))
    room.time.pass_ns()
    assert agent.heard == ["the port is taken [KS3200]"]


def test_there_is_nobody_to_say_goodbye_to(tmp_path: Path) -> None:
    agent = Agent(AgentRoom(tmp_path))
    closed: list[bool] = []
    agent.rendezvous.close(None, 10).when_given(lambda: closed.append(True))
    assert closed == [True] and agent.room.places.is_closed and agent.rendezvous.board(0) is None
