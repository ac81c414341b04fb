"""The lines between an agent and its ranks: who can stay, what is heard of whom, and orders that
count once."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.core.wire.conversations import AGENT_WITH_PROCESS, PROCESS_WITH_AGENT
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.model.launch import Place
from keepstep.model.messages.agent_rank import (
    BecomeRank,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    StandbyReady,
)
from keepstep.runtime.agent.rank_server import RankLines
from keepstep.runtime.rank.agent_client import SOCKET, AgentLine, MeetAgain

PLACE = Place(3, 0, 1, 0, 2, "127.0.0.1", 7777)


def pair() -> tuple[Mailbox, Mailbox]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Mailbox(ends[0], AGENT_WITH_PROCESS), Mailbox(ends[1], PROCESS_WITH_AGENT)


def test_an_order_is_for_one_meeting_and_a_newer_loss_overtakes_it() -> None:
    agent, rank = pair()
    told: list[str] = []
    line = AgentLine(rank, 1, told.append)
    assert agent.recv(20) == RankHere(1, os.getpid())
    agent.send(PeerLostNotice("rank 0 is gone"))
    agent.send(RegroupAt(1, "h", 5))
    assert line.order(20) == MeetAgain(1, "h", 5) and told == ["rank 0 is gone"]
    assert line.order(0) is None, "it has been followed"
    agent.send(RegroupAt(2, "h", 5))
    agent.send(PeerLostNotice("rank 2 is gone"))
    agent.send(RegroupAt(3, "h", 6))
    while len(told) < 2:
        threading.Event().wait(0.01)
    assert line.order(20) == MeetAgain(3, "h", 6)
    agent.close()
    assert line.order(20) is None, "an agent that has ended orders nothing, and nobody waits for it"


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[RankLines]:
    with selectors.DefaultSelector() as selector:
        found = RankLines(tmp_path / "agent.sock", selector)
        yield found
        found.close()


def connect(lines: RankLines, rank: int) -> tuple[AgentLine, int]:
    """A rank of this very process, which is its process for the agent too."""
    line = AgentLine.find({SOCKET: str(lines.path)}, rank, lambda why: None)
    assert line is not None
    lines.accept()
    heard = lines.hear(os.getpid())
    assert heard == RankHere(rank, os.getpid())
    return line, os.getpid()


def test_who_can_stay(lines: RankLines) -> None:
    line, pid = connect(lines, 0)
    assert not lines.are_able([pid]) and not lines.are_able([])
    assert line.say_able() and lines.hear(pid)
    assert lines.are_able([pid]) and lines.can_stay(pid)
    lines.joining([pid + 1])
    assert lines.are_able([pid, pid + 1]) and not lines.can_stay(pid + 1), (
        "it is to be able, and is not yet"
    )
    line.say_unable()
    lines.hear(pid)
    assert not lines.are_able([pid])
    lines.forget(pid + 1)
    assert not lines.are_able([pid + 1])


def test_words_to_the_ranks(lines: RankLines) -> None:
    line, pid = connect(lines, 0)
    lines.lost([pid, pid + 1], "rank 1 is gone")
    lines.regroup([pid], PLACE)
    assert line.order(20) == MeetAgain(3, "127.0.0.1", 7777)
    line.say_regrouped()
    lines.hear(pid)
    assert lines.regrouped == {0}


def test_who_has_ended_well_is_known_after_its_death(lines: RankLines) -> None:
    line, pid = connect(lines, 0)
    assert not lines.has_ended(pid)
    line.say_ended()
    line.close()
    assert lines.has_ended(pid), "what it had said is heard though its line is gone"
    lines.forget(pid)
    assert not lines.has_ended(pid), "another process may have its number"


def test_without_an_agent_there_is_no_line(tmp_path: Path) -> None:
    assert AgentLine.find({}, 0, lambda why: None) is None
    assert AgentLine.find({SOCKET: str(tmp_path / "nobody")}, 0, lambda why: None) is None


def test_the_process_that_stands_by_becomes_a_rank_once(lines: RankLines) -> None:
    assert lines.become(("python", "x.py"), {"RANK": "1"}) is None
    box = Mailbox.connect(lines.path, 5, PROCESS_WITH_AGENT)
    box.send(StandbyReady(os.getpid()))
    lines.accept()
    lines.hear(os.getpid())
    assert lines.become(("python", "x.py"), {"RANK": "1"}) == os.getpid()
    assert box.recv(20) == BecomeRank(("python", "x.py"), {"RANK": "1"})
    assert lines.become(("python", "x.py"), {"RANK": "1"}) is None
    box.close()
