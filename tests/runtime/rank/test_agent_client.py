"""AgentClient: what a rank says to its agent, and that what is heard reaches who acts on it, once
there is one."""

from __future__ import annotations

import pytest

from keepstep.model.messages.agent_rank import (
    BecomeRank,
    CannotStay,
    CanStay,
    ConnectionSuspect,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    TrainingEnded,
)
from keepstep.runtime.rank.agent_client import AgentClient
from tests.runtime.fakes import FakeAgents


class Hearer:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def peer_lost(self, why: str) -> None:
        self.heard.append(why)

    def regroup_at(self, place: RegroupAt) -> None:
        self.heard.append(place)

    def agent_gone(self) -> None:
        self.heard.append("gone")


@pytest.fixture
def agents() -> FakeAgents:
    return FakeAgents()


def connected(agents: FakeAgents, hearer: Hearer | None = None) -> AgentClient:
    client = AgentClient(agents, rank=3, pid=77)
    client.connect()
    client.hearer = hearer
    return client


def test_what_a_rank_says(agents: FakeAgents) -> None:
    client = connected(agents)
    assert client.can_stay()
    client.cannot_stay()
    client.regrouped()
    client.training_ended()
    assert agents.box.sent == [
        RankHere(3, 77),
        CanStay(3),
        CannotStay(3),
        Regrouped(3),
        TrainingEnded(3),
    ]


def test_an_error_of_the_transport_is_told_without_waiting_and_cut(agents: FakeAgents) -> None:
    connected(agents).suspect("x" * 5000)
    assert agents.box.poked == [ConnectionSuspect(3, "x" * 1000)]


def test_what_is_heard_reaches_the_hearer_in_order(agents: FakeAgents) -> None:
    hearer = Hearer()
    client = connected(agents, hearer)
    place = RegroupAt(2, "h", 5)
    for message in (PeerLostNotice("rank 0"), BecomeRank((), {}), place):
        agents.box.says(message)
    agents.box.dies()
    assert hearer.heard == ["rank 0", place, "gone"] and not client.is_connected


def test_what_comes_before_there_is_a_hearer_is_about_lives_before(agents: FakeAgents) -> None:
    client = connected(agents)
    agents.box.says(PeerLostNotice("rank 0"))
    client.hearer = hearer = Hearer()
    assert hearer.heard == []


def test_without_an_agent_nothing_is_said_and_nobody_fails() -> None:
    agents = FakeAgents(is_there=False)
    client = connected(agents)
    assert not client.is_connected and not client.can_stay()
    client.suspect("closed")
    client.release()
    client.close()
    assert agents.box.sent == [] and agents.box.poked == []


def test_a_forked_child_lets_go_and_an_end_hangs_up(agents: FakeAgents) -> None:
    client = connected(agents)
    client.release()
    assert agents.box.is_released and agents.box.is_open
    client.close()
    assert not agents.box.is_open and not client.can_stay()
