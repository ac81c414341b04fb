"""Blocks that come in are reported to the taker in whose memory they were placed, or to nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Part, Span
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.peer_inbox import LinkUp, LoopCall, PeerInbox

NBYTES = 10
SPAN = Span(7, Stamp(1, 1), Part.PAYLOAD, 0, NBYTES)


class Taker:
    """Somebody who takes blocks."""

    def __init__(self) -> None:
        self.memory = bytearray(NBYTES)
        self.came = 0

    def place(self, node: int, span: Span) -> memoryview:
        return memoryview(self.memory)

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        self.came += 1


def an_inbox(after: int = 0) -> PeerInbox:
    world: Any = SimpleNamespace(
        wake=lambda: None,
        clock=SimpleNamespace(wall_ns=lambda: 1),
        open_links=lambda *about: SimpleNamespace(),
    )
    return PeerInbox(cast(KeeperWorld, world), b"job", ("127.0.0.1", 0), 3.0, after)


def write(inbox: PeerInbox, data: bytes) -> None:
    """As the links do with the bytes of a block that comes."""
    place = inbox.place(1, SPAN)
    assert place is not None
    place[:] = data


def test_a_block_goes_to_who_expects_it() -> None:
    inbox = an_inbox()
    taker = Taker()
    inbox.expect(SPAN.rank, SPAN.stamp, taker)
    write(inbox, b"0123456789")
    inbox.block(1, SPAN, 0)
    assert taker.memory == b"0123456789"
    assert taker.came == 1


def test_who_comes_in_the_place_of_another_does_not_take_its_block_for_his() -> None:
    """It was a parity of other bytes, or a copy that was acknowledged and did not have them."""
    inbox = an_inbox()
    one = Taker()
    other = Taker()
    inbox.expect(SPAN.rank, SPAN.stamp, one)
    write(inbox, b"0123456789")
    inbox.expect(SPAN.rank, SPAN.stamp, other)
    inbox.block(1, SPAN, 0)
    assert (one.came, other.came) == (0, 0)
    write(inbox, b"abcdefghij")
    inbox.block(1, SPAN, 0)
    assert (one.came, other.came) == (0, 1)
    assert one.memory == b"0123456789"
    assert other.memory == b"abcdefghij"


def test_a_block_that_nobody_expects_has_no_place() -> None:
    inbox = an_inbox()
    taker = Taker()
    inbox.expect(SPAN.rank, SPAN.stamp, taker)
    inbox.expect_no_more(taker)
    assert inbox.place(1, SPAN) is None
    inbox.block(1, SPAN, 0)
    assert taker.came == 0


@pytest.mark.parametrize(("after", "expected"), [(0, 1), (1, 2), (1 << 60, (1 << 60) + 1)])
def test_a_life_is_newer_than_the_one_before_whatever_the_clock_says(
    after: int, expected: int
) -> None:
    assert an_inbox(after).incarnation == expected


def test_blocks_of_a_node_may_come_side_by_side() -> None:
    """On as many streams: each is reported to whom it was placed with."""
    inbox = an_inbox()
    one, other = Taker(), Taker()
    next_span = SPAN._replace(rank=8)
    inbox.expect(SPAN.rank, SPAN.stamp, one)
    inbox.expect(next_span.rank, next_span.stamp, other)
    assert inbox.place(1, SPAN) is not None and inbox.place(1, next_span) is not None
    inbox.block(1, SPAN, 0)
    inbox.block(1, next_span, 0)
    assert (one.came, other.came) == (1, 1)


def test_what_broke_off_with_a_link_is_forgotten_with_the_next_one() -> None:
    inbox = an_inbox()
    inbox.expect(SPAN.rank, SPAN.stamp, Taker())
    for node in (1, 2):
        assert inbox.place(node, SPAN) is not None
    inbox.up(1)
    assert [node for node, _ in inbox._placed] == [2]


def test_what_is_of_an_older_mesh_is_dropped_and_of_a_newer_one_waits() -> None:
    inbox = an_inbox()
    inbox.join(2)
    older, present, newer = (LoopCall(lambda: None, version) for version in (1, 2, 3))
    up = LinkUp(1)
    for event in (older, newer, present, up):
        inbox.put(event)
    assert inbox.take() == [present, up]
    inbox.join(3)
    assert inbox.take() == [newer]
