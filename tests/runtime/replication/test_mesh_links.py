"""Mesh links: linked with those who are needed and nobody else, and a link that nobody needs any
more says nothing by its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.messages import decode, encode
from keepstep.model.messages.peers import (
    AllEnded,
    CopyAcked,
    FetchRanges,
    MeshMessage,
    RanksEnded,
    SeveralMessages,
    SnapshotMessage,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.mesh_links import GATHERED, SHORT_RANGES, MeshLinks
from keepstep.runtime.replication.peer_inbox import FromPeer, LinkOver
from tests.runtime.replication.room import VERSION, ReplicationRoom, a_mesh

NODES = 5
nodes = st.sets(st.integers(0, NODES - 1))


@given(st.integers(0, NODES - 1), nodes, nodes)
def test_only_those_who_are_needed_are_linked_with(
    here: int, needed: set[int], sources: set[int]
) -> None:
    room = ReplicationRoom(here, NODES)
    room.links.open(needed)
    room.links.link_with(sources, to_restore=True)
    assert room.net.identity == (here, room.mesh.secret.encode())
    assert {node for node, _, _ in room.net.connected} == (needed | sources) - {here}
    for node, address, incarnation in room.net.connected:
        member = room.mesh.members[node]
        assert (address, incarnation) == ((member.host, member.port), member.incarnation)


@given(nodes, nodes)
def test_sources_are_needed_until_all_is_restored(needed: set[int], sources: set[int]) -> None:
    room = ReplicationRoom(0, NODES)
    room.links.open(needed)
    room.links.link_with(sources, to_restore=True)
    assert {n for n in range(NODES) if room.links.needs(n)} == needed | sources
    room.links.restored()
    assert {n for n in range(NODES) if room.links.needs(n)} == needed


@given(nodes, st.integers(0, NODES - 1))
def test_this_node_is_always_linked_with_itself(away: set[int], here: int) -> None:
    room = ReplicationRoom(here, NODES)
    room.join()
    room.net.away = away
    assert room.links.linked() == set(range(NODES)) - away | {here}


def test_every_node_gets_what_is_for_all_once_and_this_one_by_its_inbox() -> None:
    room = ReplicationRoom(1, 3)
    room.join()
    word = AllEnded(VERSION)
    room.links.to_all(word)
    assert room.net.sent == [(0, word), (2, word)]
    assert room.inbox.take() == [FromPeer(1, word)]


def test_who_leads_hears_itself_and_the_others_have_to_reach_it() -> None:
    for here in (0, 1):
        room = ReplicationRoom(here, 2)
        room.join()
        room.net.away = {0}
        assert room.links.to_leader(RanksEnded(VERSION)) == (here == 0)
        assert room.net.sent == []


def test_what_was_asked_of_the_loop_is_not_done_in_another_mesh() -> None:
    room = ReplicationRoom()
    room.join()
    called: list[str] = []
    room.links.call_in_loop(lambda: called.append("before"))
    room.settle()
    room.links.call_in_loop(lambda: called.append("too late"))
    MeshLinks(room.inbox, a_mesh(version=VERSION + 1)).open(())
    room.settle()
    assert called == ["before"]


def test_the_end_of_a_link_of_another_mesh_is_not_heard() -> None:
    room = ReplicationRoom()
    room.join()
    room.inbox.dead(1, "gone", True)
    MeshLinks(room.inbox, a_mesh(version=VERSION + 1)).open(())
    room.inbox.dead(2, "gone", True)
    assert room.inbox.take() == [LinkOver(2, "gone", True, VERSION + 1)]


def acked(rank: int) -> CopyAcked:
    return CopyAcked(VERSION, rank, Stamp(3, 1))


def fetch(rank: int, count: int) -> FetchRanges:
    ranges = tuple(BlockRange(Part.PAYLOAD, at, 1) for at in range(count))
    return FetchRanges(VERSION, rank, Stamp(3, 1), ranges)


@given(st.lists(st.integers(0, 3), max_size=3 * GATHERED))
def test_what_is_gathered_comes_in_order_and_in_few_messages(to: list[int]) -> None:
    room = ReplicationRoom(0, NODES)
    room.join()
    with room.links.gathering(), room.links.gathering():
        for rank, node in enumerate(to):
            room.links.say(node, acked(rank))
        assert room.net.sent == []
    heard: dict[int, list[SnapshotMessage]] = {}
    messages = [*room.net.sent, *((e.node, e.message) for e in room.inbox.take())]
    for node, message in messages:
        heard.setdefault(node, []).extend(parts(message))
    assert heard == {
        node: [acked(rank) for rank, other in enumerate(to) if other == node] for node in set(to)
    }
    assert len(messages) <= len(set(to)) + len(to) // GATHERED
    room.links.say(1, acked(7))
    assert room.net.sent[-1] == (1, acked(7))


def parts(message: MeshMessage) -> tuple[SnapshotMessage, ...]:
    found = message.messages if isinstance(message, SeveralMessages) else (message,)
    return found  # type: ignore[return-value]


def test_what_is_said_alone_is_not_wrapped_and_what_is_long_does_not_wait() -> None:
    room = ReplicationRoom(0, NODES)
    room.join()
    with room.links.gathering():
        room.links.say(1, fetch(1, SHORT_RANGES + 1))
        assert room.net.sent == [(1, fetch(1, SHORT_RANGES + 1))]
        room.links.say(2, fetch(2, SHORT_RANGES))
    assert room.net.sent[1:] == [(2, fetch(2, SHORT_RANGES))]


def test_the_most_that_is_gathered_fits_into_a_message() -> None:
    far = 1 << 50
    ranges = tuple(BlockRange(Part.PAYLOAD, far + at, 1 << 22) for at in range(SHORT_RANGES))
    longest = FetchRanges(VERSION, 10**6, Stamp(10**9, 100), ranges)
    many = SeveralMessages(VERSION, (longest,) * GATHERED)
    assert decode(encode(many)) == many
