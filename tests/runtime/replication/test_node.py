"""Node: one mesh after the other, and nothing of one is taken for something of another."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.model.messages.keeper_rank import VoteRefused
from keepstep.model.messages.peers import (
    AllEnded,
    CopyAccepted,
    HorizonWord,
    InventoryReport,
    VoteWord,
)
from keepstep.model.restore_sources import HeldSnapshot
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Span
from keepstep.runtime.replication.node import TICK_NS, Node
from keepstep.runtime.replication.receive import meta_ranges_of
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_HASH,
    VERSION,
    FakeReplicationHost,
    ReplicationRoom,
    a_mesh,
    a_page,
    an_offer,
    fill,
)

STAMP = Stamp(5, 1)
PAYLOAD = random.Random(9).randbytes(800)


class Nodes:
    """Node 1 of three, and those who speak to it."""

    def __init__(self) -> None:
        self.room = ReplicationRoom(1)
        self.fake = FakeReplicationHost()
        self.fake.pages[1] = a_page(1, {0: STAMP})

    def start(self) -> Node:
        room = self.room
        return Node(room.world, room.settings, room.inbox, JOB_HASH, self.fake, room.mesh)

    def says(self, message: Any, sender: int = 0) -> None:
        self.room.inbox.message(sender, message)

    def votes(self) -> list[str]:
        """Whose words were heard, by their text."""
        return [body.why for _, body in self.fake.of("receive_vote")]


versions = st.integers(VERSION - 2, VERSION + 3)


@given(st.lists(versions, max_size=6), st.lists(versions, max_size=6))
def test_words_of_an_older_mesh_are_dropped_and_of_a_newer_wait_for_it(
    before: list[int], meanwhile: list[int]
) -> None:
    nodes = Nodes()
    node = nodes.start()
    for said in (before, meanwhile):
        for version in said:
            nodes.says(VoteWord(version, VoteRefused(str(version))))
        node.hear_peers()
        node.hear_peers()
    both = [*before, *meanwhile]
    heard = [str(version) for version in both if version == VERSION]
    assert nodes.votes() == heard
    node.begin(a_mesh(1, version=VERSION + 2))
    node.hear_peers()
    heard += [str(version) for version in both if version == VERSION + 2]
    assert nodes.votes() == heard
    assert node.mesh.version == VERSION + 2


def test_what_rests_here_is_told_once_a_worker_has_proven_it() -> None:
    nodes = Nodes()
    copies = nodes.room.held.copies
    fill(copies.take(2, 0, len(PAYLOAD), 64), 2, STAMP, PAYLOAD)
    damaged = fill(copies.take(0, 0, len(PAYLOAD), 64), 0, STAMP, PAYLOAD)
    damaged.payload[9] ^= 1
    nodes.start()
    assert nodes.room.said(InventoryReport) == []
    nodes.room.settle()
    (report,) = nodes.room.said(InventoryReport, 0)
    assert report.snapshots == (HeldSnapshot(2, STAMP),)
    assert len(nodes.room.journal.of("damaged")) == 1


def test_a_mesh_that_begins_before_that_is_told_it_too() -> None:
    nodes = Nodes()
    node = nodes.start()
    node.begin(a_mesh(1, version=VERSION + 1))
    nodes.room.settle()
    assert [report.mesh_version for report in nodes.room.said(InventoryReport)] == [VERSION + 1]


def test_what_was_on_its_way_in_the_mesh_before_is_given_up() -> None:
    nodes = Nodes()
    room = nodes.room
    node = nodes.start()
    room.settle()
    source = room.seal(2, STAMP, PAYLOAD, root=room.job_dir.with_name("elsewhere"))
    nodes.says(an_offer(source), sender=2)
    node.hear_peers()
    room.settle()
    assert [accepted.rank for accepted in room.said(CopyAccepted, 2)] == [2]
    header = source.header()
    [meta] = meta_ranges_of(header.payload_bytes, header.manifest_bytes, BLOCK_BYTES)
    span = Span(2, STAMP, *meta)
    assert room.inbox.place(2, span) is not None
    node.begin(a_mesh(1, version=VERSION + 1))
    assert room.inbox.place(2, span) is None


def test_what_is_known_to_be_committed_outlives_a_mesh() -> None:
    nodes = Nodes()
    node = nodes.start()
    node.state.resumed(1, None)
    nodes.says(HorizonWord(VERSION, 1, "none", "", STAMP, None, None, (), 5))
    node.hear_peers()
    node.begin(a_mesh(1, version=VERSION + 1))
    node.state.resumed(2, STAMP)
    assert node.state.horizon.inherited == STAMP
    assert HorizonPage(nodes.room.memory, nodes.room.job_dir).last() == node.state.horizon


def test_a_lost_neighbour_is_told_once_and_only_in_its_own_mesh() -> None:
    nodes = Nodes()
    node = nodes.start()
    return_ns = nodes.room.inbox.return_ns
    nodes.room.inbox.dead(0, "gone", True)
    node.begin(a_mesh(1, version=VERSION + 1))
    node.hear_peers()
    nodes.room.time.pass_ns(return_ns + TICK_NS)
    node.tick()
    assert nodes.fake.of("peer_is_dead") == []
    nodes.room.inbox.dead(0, "gone", True)
    node.hear_peers()
    nodes.room.time.pass_ns(return_ns)
    node.tick()
    assert nodes.fake.of("peer_is_dead") == []
    nodes.room.time.pass_ns(1)
    node.tick()
    node.tick()
    assert nodes.fake.of("peer_is_dead") == [(node.mesh, 0, "gone")]


def test_a_neighbour_that_is_back_in_time_is_not_lost() -> None:
    nodes = Nodes()
    node = nodes.start()
    nodes.room.inbox.dead(0, "gone", True)
    nodes.room.inbox.up(0)
    node.hear_peers()
    nodes.room.time.pass_ns(2 * nodes.room.inbox.return_ns)
    node.tick()
    assert nodes.fake.of("peer_is_dead") == []
    assert nodes.fake.of("leader_is_back") == [()]


def test_the_end_of_the_job_is_heard_and_said() -> None:
    nodes = Nodes()
    node = nodes.start()
    nodes.says(AllEnded(VERSION))
    node.hear_peers()
    assert nodes.fake.of("all_nodes_ended") == [()]
    node.close()
    assert nodes.room.net.is_closed
