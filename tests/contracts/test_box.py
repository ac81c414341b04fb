"""What a `Box` does between two processes of a node: messages whole and in order, an end as an end,
and nonsense answered."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.model.messages.keeper_rank import (
    Goodbye,
    JoinVote,
    NotUnderstood,
    PageChanged,
    Released,
    TrainingPermitted,
)
from keepstep.model.snapshot import Stamp
from keepstep.ports import Box
from tests.contracts.simulated import SimBoxes


class Boxes(Protocol):
    """A connection between a rank and its keeper, and what each has heard."""

    rank: Box
    keeper: Box
    by_rank: list[Any]
    by_keeper: list[Any]  # "gone", in the place of a message, when nobody is at the other end
    refused: list[str]  # why, of what the keeper refused

    def inject(self, packet: bytes) -> None:
        """The rank sends something that may be anything."""

    def settle(self) -> None:
        """Whatever was sent is heard."""

    def close(self) -> None: ...


class Ear:
    def __init__(self, heard: list[Any]) -> None:
        self._heard = heard

    def hear(self, box: Box, message: Any, /) -> None:
        self._heard.append(message)

    def gone(self, box: Box, /) -> None:
        self._heard.append("gone")
        box.close()


class UnixBoxes:
    def __init__(self) -> None:
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.by_rank: list[Any] = []
        self.by_keeper: list[Any] = []
        self.refused: list[str] = []
        self._rank = Mailbox(self._ends[0], RANK_WITH_KEEPER)
        self._keeper = Mailbox(
            self._ends[1], KEEPER_WITH_NODE, lambda who, why: self.refused.append(why)
        )
        self.rank: Box = self._rank
        self.keeper: Box = self._keeper

    def inject(self, packet: bytes) -> None:
        self._ends[0].send(packet)

    def settle(self) -> None:
        for box, heard in ((self._keeper, self.by_keeper), (self._rank, self.by_rank)):
            while box.fileno() >= 0 and _is_readable(box):
                box.hear(Ear(heard))

    def close(self) -> None:
        for end in self._ends:
            end.close()


def _is_readable(box: Mailbox) -> bool:
    import select

    return bool(select.select([box], [], [], 0)[0])


KINDS: dict[str, Callable[[], Boxes]] = {"unix": UnixBoxes, "simulated": SimBoxes}


@pytest.fixture(params=KINDS)
def boxes(request: pytest.FixtureRequest) -> Iterator[Boxes]:
    made = KINDS[request.param]()
    yield made
    made.close()


def test_messages_arrive_whole_and_in_order_both_ways(boxes: Boxes) -> None:
    to_keeper = [
        JoinVote(1, 2, 3, (Stamp(4, 5), Stamp(5, 5))),
        PageChanged(1),
        Goodbye(1, False, "ü" * 1000),
    ]
    assert all(boxes.rank.send(message) for message in to_keeper)
    go = TrainingPermitted(7, 1, "memory", Stamp(3, 1), 0, "why")
    assert boxes.keeper.send(go) and boxes.keeper.send(Released())
    boxes.settle()
    assert boxes.by_keeper == to_keeper
    assert boxes.by_rank == [go, Released()]


def test_the_other_end_has_a_process(boxes: Boxes) -> None:
    assert boxes.rank.pid > 0 and boxes.keeper.pid > 0


def test_a_poke_arrives_as_well(boxes: Boxes) -> None:
    boxes.rank.poke(PageChanged(1))
    boxes.settle()
    assert boxes.by_keeper == [PageChanged(1)]


def test_an_end_is_heard_once_behind_what_was_said(boxes: Boxes) -> None:
    boxes.rank.send(Goodbye(0, True, "ended well"))
    boxes.rank.close()
    boxes.settle()
    assert boxes.by_keeper == [Goodbye(0, True, "ended well"), "gone"]
    assert boxes.keeper.send(Released()) is False
    boxes.settle()
    assert boxes.by_rank == [], "who hangs up hears nothing any more"


def test_another_conversations_message_is_not_sent(boxes: Boxes) -> None:
    with pytest.raises(NotAMessage):
        boxes.rank.send(Released())
    with pytest.raises(NotAMessage):
        boxes.keeper.poke(PageChanged(1))


def test_what_is_no_message_is_counted_and_answered_and_the_connection_stays(boxes: Boxes) -> None:
    boxes.inject(b'{"kind":"sing"}')
    boxes.inject(b'{"kind":"changed","rank":-1}')
    boxes.rank.send(PageChanged(1))
    boxes.settle()
    assert boxes.by_keeper == [PageChanged(1)] and len(boxes.refused) == 2
    boxes.settle()
    assert [type(message) for message in boxes.by_rank] == [NotUnderstood] * 2
    assert boxes.keeper.send(Released())
    boxes.settle()
    assert boxes.by_rank[-1] == Released()


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes(kind: str) -> None:
    boxes = KINDS[kind]()

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.binary(min_size=1, max_size=300))
    def check(packet: bytes) -> None:
        before = len(boxes.refused)
        boxes.inject(packet)
        boxes.settle()
        boxes.settle()
        assert len(boxes.refused) == before + 1 and isinstance(boxes.by_rank[-1], NotUnderstood)
        assert boxes.rank.send(PageChanged(1))
        boxes.settle()
        assert boxes.by_keeper[-1] == PageChanged(1)

    check()
    boxes.close()
