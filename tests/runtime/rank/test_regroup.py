"""Regroup: which bodies count when a peer is lost, who is told that this rank can stay, and an
order that is for one meeting."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.deadlines import derive
from keepstep.errors import PeerLost
from keepstep.model.messages.agent_rank import CannotStay, CanStay, RegroupAt, Regrouped
from keepstep.runtime.rank.agent_client import AgentClient
from keepstep.runtime.rank.regroup import ORDER_WITHIN_NS, UNTOLD_WITHIN_NS, Regroup
from tests.runtime.fakes import RankRoom

PLACE = RegroupAt(2, "h", 5)


def made(room: RankRoom, ranks: int = 2) -> Regroup:
    agent = AgentClient(room.agents, 0, 77)
    agent.connect()
    return Regroup(room.world, 0, ranks, agent)


@pytest.fixture
def room(tmp_path: Path) -> RankRoom:
    return RankRoom(tmp_path, ranks=2)


@given(
    entered=st.booleans(),
    ended=st.booleans(),
    worthless=st.booleans(),
    lost=st.sampled_from(["", "told", "untold"]),
)
def test_a_body_counts_when_nobody_is_lost_or_it_had_all_it_needed(
    tmp_path_factory: pytest.TempPathFactory,
    entered: bool,
    ended: bool,
    worthless: bool,
    lost: str,
) -> None:
    room = RankRoom(tmp_path_factory.mktemp("r"), ranks=2)
    regroup = made(room)
    room.groups.is_worthless = worthless
    if lost == "told":
        regroup.peer_lost("rank 1")
    elif lost == "untold":
        room.groups.why_lost = "connection closed"
    assert regroup.counts(entered, ended) == (not lost or (entered and ended and not worthless))


def test_it_says_once_that_it_can_stay_and_not_before_there_is_a_step_to_go_back_to(
    room: RankRoom,
) -> None:
    regroup = made(room)
    for step in range(4):
        regroup.body_entered(step)
        regroup.body_left()
        assert len(room.agents.box.of(CanStay)) == min(step, 1)
    assert room.groups.bodies == 4 and room.groups.expects_notice


@pytest.mark.parametrize("why_not", ["alone", "no agent", "other connections"])
def test_who_cannot_stay_does_not_say_so(tmp_path: Path, why_not: str) -> None:
    room = RankRoom(tmp_path, has_agent=why_not != "no agent")
    room.groups.can_be_rebuilt = why_not != "other connections"
    regroup = made(room, ranks=1 if why_not == "alone" else 2)
    regroup.body_entered(5)
    assert room.agents.box.of(CanStay) == [] and not room.groups.expects_notice


def test_no_optimizer_steps_on_what_a_lost_peer_has_spoilt(room: RankRoom) -> None:
    regroup = made(room)
    regroup.body_entered(3)
    regroup.check_update()
    regroup.peer_lost("rank 1 was killed")
    regroup.check_update()  # this body has what it needs
    room.groups.is_worthless = True
    with pytest.raises(PeerLost, match="rank 1 was killed"):
        regroup.check_update()
    room.groups.is_worthless = False
    regroup.body_left()
    with pytest.raises(PeerLost):
        regroup.check_update()


def test_a_loss_is_news_once_and_ends_every_collective_each_time(room: RankRoom) -> None:
    regroup = made(room)
    assert regroup.peer_lost("rank 1") and regroup.is_lost
    assert not regroup.peer_lost("rank 2")
    assert room.groups.lost == ["rank 1", "rank 2"] and room.journal.kinds == ["lost-notice"]


def test_an_order_is_for_one_meeting_and_a_newer_loss_overtakes_it(room: RankRoom) -> None:
    regroup = made(room)
    heard: list[RegroupAt | str] = []
    regroup.peer_lost("rank 1")
    regroup.regroup_at(PLACE)
    regroup.wait_for_place(heard.append)
    assert heard == [PLACE]
    regroup.wait_for_place(heard.append)
    assert heard == [PLACE], "it has been followed"
    regroup.regroup_at(RegroupAt(3, "h", 6))
    assert heard[1:] == [RegroupAt(3, "h", 6)]
    regroup.regroup_at(PLACE)
    regroup.peer_lost("rank 3")
    regroup.wait_for_place(heard.append)
    assert len(heard) == 2, "what was ordered before the loss is overtaken"


def test_who_is_not_told_where_to_meet_gives_up(room: RankRoom) -> None:
    regroup = made(room)
    heard: list[RegroupAt | str] = []
    regroup.peer_lost("rank 1")
    regroup.wait_for_place(heard.append)
    room.time.pass_ns(ORDER_WITHIN_NS - 1)
    assert heard == []
    room.time.pass_ns(1)
    assert len(heard) == 1 and "did not" in str(heard[0])
    regroup.wait_for_place(heard.append)
    regroup.agent_gone()
    assert len(heard) == 2 and "is gone" in str(heard[1])
    room.agents.box.dies()
    regroup.wait_for_place(heard.append)
    assert len(heard) == 3, "nobody is there to say it"


def test_a_lost_connection_that_nobody_explains_ends_this_process(room: RankRoom) -> None:
    regroup = made(room)
    room.groups.why_lost, room.groups.is_worthless = "connection closed", True
    with pytest.raises(PeerLost, match="connection closed"):
        regroup.check_update()
    heard: list[RegroupAt | str] = []
    assert regroup.is_lost
    regroup.wait_for_place(heard.append)
    room.time.pass_ns(UNTOLD_WITHIN_NS - 1)
    assert heard == []
    room.time.pass_ns(1)
    assert len(heard) == 1 and "connection closed; the agent did not say" in str(heard[0])


def test_a_lost_node_is_noticed_before_a_rank_gives_up_waiting_for_the_word() -> None:
    """Its lease runs out first, and whoever leads has as long again to form the next attempt."""
    assert 2 * derive().lease_ns <= UNTOLD_WITHIN_NS <= ORDER_WITHIN_NS


def test_a_lost_connection_that_is_explained_late_is_a_lost_peer(room: RankRoom) -> None:
    regroup = made(room)
    room.groups.why_lost = "connection closed"
    heard: list[RegroupAt | str] = []
    regroup.wait_for_place(heard.append)
    assert regroup.peer_lost("rank 1") and regroup.awaits_order
    regroup.regroup_at(PLACE)
    assert heard == [PLACE]


def test_among_its_peers_again_it_tells_how_long_it_took(room: RankRoom) -> None:
    regroup = made(room)
    regroup.peer_lost("rank 1")
    room.time.pass_ns(5)
    regroup.rebuilt(2)
    [told] = room.journal.of("regrouped")
    assert told.data == {"rank": 0, "attempt": 2, "duration_ns": 5}
    assert not regroup.is_lost and room.agents.box.of(Regrouped) == [Regrouped(0)]
    regroup.rebuilt(2)
    assert len(room.journal.of("regrouped")) == 1, "a newcomer was never lost"


def test_who_cannot_after_all_says_so(room: RankRoom) -> None:
    made(room).cannot()
    assert room.agents.box.of(CannotStay) == [CannotStay(0)]
