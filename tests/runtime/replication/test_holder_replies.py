"""Holder replies: each goes to the node of the snapshot's rank, and names mesh and snapshot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.messages.peers import (
    CopyAccepted,
    CopyAcked,
    CopyDeclined,
    CopyOffer,
    CopyUnavailable,
    FetchRanges,
    SnapshotMessage,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.holder_replies import HolderReplies
from tests.runtime.replication.room import VERSION, ReplicationRoom

STAMP = Stamp(5, 2)
RANGES = (BlockRange(Part.TABLE, 0, 8), BlockRange(Part.PAYLOAD, 512, 100))
Reply = Callable[[HolderReplies, CopyOffer], None]
REPLIES: list[tuple[Reply, type[SnapshotMessage]]] = [
    (lambda replies, offer: replies.accept(offer), CopyAccepted),
    (lambda replies, offer: replies.acknowledge(offer), CopyAcked),
    (lambda replies, offer: replies.refuse(offer, "why"), CopyUnavailable),
    (lambda replies, offer: replies.decline(offer, "why"), CopyDeclined),
    (lambda replies, offer: replies.fetch(offer, RANGES), FetchRanges),
    (
        lambda replies, offer: replies.damaged_at_rest(offer.rank, offer.stamp, "why"),
        CopyUnavailable,
    ),
]


def offer(rank: int) -> CopyOffer:
    return CopyOffer(VERSION, rank, STAMP, 1, 4096, 1, 4096, 1, (), 0, None)


@pytest.mark.parametrize(("reply", "kind"), REPLIES)
@given(ranks=st.lists(st.integers(1, 4), min_size=2, max_size=5), data=st.data())
def test_a_reply_goes_to_the_node_of_the_rank(
    reply: Reply, kind: type[SnapshotMessage], ranks: list[int], data: st.DataObject
) -> None:
    first_ranks = ranks[0]
    rank = data.draw(st.integers(first_ranks, sum(ranks) - 1))
    home = next(n for n in range(len(ranks)) if rank < sum(ranks[: n + 1]))
    room = ReplicationRoom(ranks=tuple(ranks))
    room.join()
    replies = HolderReplies(room.links)
    assert replies.owner_of(offer(rank)) == home
    reply(replies, offer(rank))
    [(node, message)] = room.net.sent
    assert (node, type(message)) == (home, kind)
    assert isinstance(message, kind)
    assert (message.mesh_version, message.rank, message.stamp) == (VERSION, rank, STAMP)


def test_what_is_asked_for_is_named() -> None:
    room = ReplicationRoom(ranks=(1, 1))
    room.join()
    HolderReplies(room.links).fetch(offer(1), RANGES)
    assert room.net.sent == [(1, FetchRanges(VERSION, 1, STAMP, RANGES))]


def test_a_reply_to_this_node_itself_comes_by_the_inbox() -> None:
    room = ReplicationRoom(ranks=(2, 1))
    room.join()
    heard: list[object] = []
    room.on_message = lambda node, message: heard.append((node, message))
    HolderReplies(room.links).acknowledge(offer(1))
    room.settle()
    assert heard == [(0, CopyAcked(VERSION, 1, STAMP))]
    assert not room.net.sent


def test_of_a_rank_that_this_world_has_not_nobody_is_told() -> None:
    """What rests here may be of a larger world before."""
    room = ReplicationRoom(ranks=(1, 1))
    room.join()
    HolderReplies(room.links).damaged_at_rest(4, STAMP, "why")
    assert room.net.sent == []
