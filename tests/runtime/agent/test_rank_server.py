"""RankServer: who can stay, what is heard of whom, and orders to the process that stands by, which
count once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.launch import RankAssignment
from keepstep.model.messages.agent_rank import (
    BecomeRank,
    CannotStay,
    CanStay,
    ConnectionSuspect,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    StandbyReady,
    TrainingEnded,
)
from keepstep.runtime.agent.rank_server import RankServer
from tests.runtime.fakes import FakeBox, FakeServer

PLACE = RankAssignment(3, 0, 1, 0, 2, "127.0.0.1", 7777)


class Hearer:
    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.wants_standby = True

    def rank_has_state(self) -> None:
        self.heard.append("state")

    def rank_regrouped(self) -> None:
        self.heard.append("regrouped")

    def rank_cannot_stay(self, rank: int) -> None:
        self.heard.append(("cannot stay", rank))

    def rank_suspects(self, rank: int, why: str) -> None:
        self.heard.append((rank, why))

    def standby_ready(self, pid: int, unbuilt: str) -> bool:
        return self.wants_standby


class Room:
    def __init__(self) -> None:
        self.hearer = Hearer()
        self.servers: list[FakeServer] = []
        self.server = RankServer(Path("/agent.sock"), self._serve, self.hearer)
        self.server.open()

    def _serve(self, path: Path, hearer: Any) -> FakeServer:
        self.servers.append(FakeServer(path, hearer))
        return self.servers[-1]

    def connect(self, pid: int, *messages: Any) -> FakeBox:
        box = FakeBox(pid, self.servers[0].hearer)
        for message in messages:
            box.says(message)
        return box


@pytest.fixture
def room() -> Room:
    return Room()


WORDS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["can", "cannot", "forget", "joining", "end"])),
    max_size=30,
)


@given(WORDS)
def test_all_can_stay_when_each_has_said_so_or_has_just_been_started(
    words: list[tuple[int, str]],
) -> None:
    room = Room()
    boxes = {pid: room.connect(pid) for pid in (1, 2, 3)}
    can: set[int] = set()
    joining: set[int] = set()
    for pid, word in words:
        if word == "can":
            boxes[pid].says(CanStay(pid))
            can.add(pid)
        elif word == "joining":
            room.server.joining([pid])
            joining.add(pid)
        elif word == "end":
            boxes[pid].says(TrainingEnded(pid))
        else:
            if word == "cannot":
                boxes[pid].says(CannotStay(pid))
            else:
                room.server.forget(pid)
                boxes[pid] = room.connect(pid)
            can.discard(pid)
            joining.discard(pid)
    for pids in ([1], [1, 2], [1, 2, 3]):
        assert room.server.can_all_stay(pids) == (set(pids) <= can | joining)
        assert all(room.server.can_stay(pid) == (pid in can) for pid in pids)
    assert not room.server.can_all_stay([])


def test_what_ranks_say_reaches_the_agent(room: Room) -> None:
    room.connect(7, RankHere(1, 7), Regrouped(1), ConnectionSuspect(1, "closed"))
    assert room.hearer.heard == ["state", "regrouped", (1, "closed")]
    assert room.server.regrouped == {1}


def test_words_to_the_ranks_reach_those_that_are_there(room: Room) -> None:
    box = room.connect(7, RankHere(0, 7))
    room.server.peer_lost([7, 8], "rank 1 is gone" * 200)
    room.server.regroup([7, 8], PLACE)
    assert box.poked == [PeerLostNotice(("rank 1 is gone" * 200)[:1000])]
    assert box.sent == [RegroupAt(3, "127.0.0.1", 7777)]
    box.dies()
    room.server.regroup([7], PLACE)
    assert len(box.sent) == 1


def test_who_has_ended_well_is_known_after_its_death(room: Room) -> None:
    box = room.connect(7, RankHere(0, 7))
    assert not room.server.has_ended_training(7)
    box.rest.append(TrainingEnded(0))
    assert room.server.has_ended_training(7), "what it had said is heard first"
    room.server.forget(7)
    assert not room.server.has_ended_training(7), "another process may have its number"


def test_the_process_that_stands_by_becomes_a_rank_once(room: Room) -> None:
    assert room.server.become(("python", "x.py"), {"RANK": "1"}) is None
    box = room.connect(9, StandbyReady(9))
    assert room.server.standby == 9
    assert room.server.become(("python", "x.py"), {"RANK": "1"}) == 9
    assert box.sent == [BecomeRank(("python", "x.py"), {"RANK": "1"})]
    assert room.server.become(("python", "x.py"), {"RANK": "1"}) is None


def test_a_standby_that_is_gone_or_another_agents_is_none(room: Room) -> None:
    room.connect(9, StandbyReady(9)).dies()
    assert room.server.standby is None
    room.hearer.wants_standby = False
    other = room.connect(10, StandbyReady(10))
    assert room.server.standby is None and not other.is_open


def test_the_end_hangs_up_on_everybody(room: Room) -> None:
    box = room.connect(7, RankHere(0, 7))
    room.server.close()
    assert not box.is_open and not room.servers[0].is_open
