"""Mesh state: what each word of another keeper comes to, and what this node tells."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.node_safety import spell_out
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.edge.shm.slot import ranks_in
from keepstep.model.horizon import Horizon
from keepstep.model.links import LinkCount, LinkRow, LinkSample
from keepstep.model.messages.keeper_rank import VoteRefused
from keepstep.model.messages.peers import (
    AllEnded,
    CopyAccepted,
    CopyAcked,
    CopyDeclined,
    CopyOffer,
    FetchRanges,
    HorizonWord,
    InventoryReport,
    LinkReport,
    MeshMessage,
    NodeRange,
    NodeReport,
    RankGone,
    RanksEnded,
    RanksReport,
    SafetyWord,
    SnapshotUnproven,
    VoteWord,
)
from keepstep.model.restore_sources import HeldSnapshot
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB, MS_NS, PAGE_BYTES, S_NS
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.mesh_state import (
    SAFETY_PAUSES,
    KnownSafety,
    MeshState,
    ReplicationHost,
)
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
    flip,
)

EPOCH = 1
STAMP = Stamp(5, EPOCH)
PAYLOAD = random.Random(8).randbytes(2 * BLOCK_BYTES)
RETURN_NS = 3 * S_NS


class State:
    """Of node 1 of three, whose rank has one holder."""

    def __init__(self, node: int = 1, nodes: int = 3, redundancy: str = "copies:2") -> None:
        self.room = ReplicationRoom(node, nodes, redundancy=redundancy)
        self.fake = FakeReplicationHost()
        self.fake.pages[node] = a_page(node, {0: STAMP})
        host: ReplicationHost = self.fake
        memory, job_dir = self.room.memory, self.room.job_dir
        self.page = HorizonPage(memory, job_dir)
        self.slot = self.room.seal(node, STAMP, PAYLOAD)
        self.state = MeshState(
            self.room.world,
            self.room.settings,
            self.room.links,
            self.room.held,
            self.page,
            KnownSafety(memory, job_dir),
            JOB_HASH,
            host,
        )

    def open(self) -> State:
        self.room.held.is_proven = True
        self.state.open()
        return self

    def train(self, epoch: int = EPOCH) -> State:
        self.open()
        self.state.resumed(epoch, None)
        return self

    def horizon(self, sender: int = 0, **about: Any) -> None:
        known: dict[str, Any] = {
            "mesh_version": VERSION,
            "epoch": EPOCH,
            "policy": "copies:2",
            "why": "",
            "committed": None,
            "target": None,
            "inherited": None,
            "alive": (),
            "decided_step": -1,
        }
        self.state.receive(sender, HorizonWord(**{**known, **about}))

    @property
    def holder(self) -> int:
        """Of this node's rank."""
        (node,) = {node for node, _ in self.room.sent(CopyOffer)}
        return node

    def offered_copy(self, rank: int) -> CopyOffer:
        """Of that node's rank, which has as much as ours."""
        return an_offer(self.slot, rank=rank, stamp=STAMP)


class Killed(Exception):
    """The keeper ends in the middle of what it does."""


def killed(node: int, message: MeshMessage) -> bool:
    """At whatever it sends next."""
    raise Killed


maybe = st.none() | st.builds(Stamp, st.integers(0, 6), st.just(EPOCH))


@given(st.lists(st.tuples(st.sampled_from([EPOCH, EPOCH, 0, 2]), maybe, maybe), max_size=8))
def test_the_horizon_is_the_newest_that_was_said_of_this_epoch(
    said: list[tuple[int, Stamp | None, Stamp | None]],
) -> None:
    state = State().train()
    floors = [Stamp(-1, 0)]
    for epoch, committed, target in said:
        state.horizon(epoch=epoch, committed=committed, target=target)
        floors.append(state.state.horizon.floor or Stamp(-1, 0))
        assert state.page.last() == state.state.horizon
    ours = [committed for epoch, committed, _ in said if epoch == EPOCH and committed]
    assert floors == sorted(floors)
    assert floors[-1] == max(ours, default=Stamp(-1, 0))


ROW = RanksReport((1,), (), None, -1, ())
IMPOSSIBLE = [
    (2, AllEnded(VERSION)),
    (2, VoteWord(VERSION, VoteRefused("no"))),
    (2, VoteWord(VERSION, RankGone(1))),
    (2, NodeReport(VERSION, EPOCH, None, None, None, 1, 1, "", (ROW,))),
    (1, LinkReport(VERSION, (LinkRow(1, LinkSample(1, 1)),))),
    (1, LinkReport(VERSION, (LinkRow(99, LinkSample(1, 1)),))),
]


@pytest.mark.parametrize(("sender", "message"), IMPOSSIBLE)
def test_what_that_node_cannot_mean_is_refused_and_nothing_comes_of_it(
    sender: int, message: Any
) -> None:
    state = State().train()
    state.state.receive(sender, message)
    assert [call[0] for call in state.fake.calls] == ["refuse"]


def test_the_horizon_is_heard_of_who_leads_only() -> None:
    state = State().train()
    state.horizon(sender=2, committed=STAMP)
    assert state.state.horizon == Horizon(EPOCH)
    assert len(state.fake.of("refuse")) == 1


def test_words_of_the_vote_and_of_the_end_go_to_the_keeper() -> None:
    state = State().open()
    refusal = VoteRefused("no")
    state.state.receive(0, VoteWord(VERSION, refusal))
    state.state.receive(0, AllEnded(VERSION))
    assert state.fake.calls == [("receive_vote", 0, refusal), ("all_nodes_ended",)]
    state.state.to_leader(RankGone(1))
    state.state.ranks_ended()
    assert state.room.net.sent[-2:] == [
        (0, VoteWord(VERSION, RankGone(1))),
        (0, RanksEnded(VERSION)),
    ]


def test_a_report_is_made_when_its_facts_have_changed() -> None:
    state = State().train()
    state.horizon(target=STAMP)
    state.state.report()
    reports = state.room.said(NodeReport)
    before = len(reports)
    assert reports[-1].epoch == EPOCH
    assert (reports[-1].ranks[0].sealed, reports[-1].ranks[0].protected) == ((STAMP,), ())
    state.state.tick()
    state.state.tick()
    assert len(state.room.said(NodeReport)) == before
    state.fake.pages[1] = a_page(1, {0: STAMP, 1: Stamp(6, EPOCH)})
    state.state.tick()
    assert state.room.said(NodeReport)[before].ranks[0].sealed == (STAMP, Stamp(6, EPOCH))
    state.state.link_is_open(0)
    # another leader, perhaps, who has to learn what the last one has announced
    assert len(state.room.said(NodeReport)) == before + 2
    assert state.room.said(NodeReport)[-1].target == STAMP
    assert state.fake.of("leader_is_back") == [()]


def test_what_the_holders_have_proven_is_reported_once_all_was_heard() -> None:
    state = State().train()
    state.horizon(target=STAMP)
    before = len(state.room.said(NodeReport))
    state.state.receive(state.holder, CopyAcked(VERSION, 1, STAMP))
    assert len(state.room.said(NodeReport)) == before
    state.state.report_news()
    state.state.report_news()
    reports = state.room.said(NodeReport)
    assert len(reports) == before + 1
    assert reports[-1].ranks[0].protected == (STAMP,)


def test_a_node_without_memory_is_reported_as_what_hinders() -> None:
    state = State().train()
    state.horizon(target=STAMP)
    state.state.receive(state.holder, CopyDeclined(VERSION, 1, STAMP, "full"))
    state.state.report_news()
    assert state.room.said(NodeReport)[-1].hindered != ""
    assert state.room.said(NodeReport)[-1].policy == "copies:2"
    state.horizon(target=STAMP, policy="none")
    state.state.report()
    last = state.room.said(NodeReport)[-1]
    assert (last.policy, last.hindered) == ("none", "")


def test_what_does_not_prove_where_it_was_fetched_is_looked_at_here() -> None:
    state = State().train()
    state.state.receive(2, SnapshotUnproven(VERSION, 2, STAMP))
    assert state.fake.of("scrub_soon") == [()]


def test_others_hear_at_once_of_what_is_given_up_here() -> None:
    """It would be offered in the next vote of this mesh, too."""
    state = State().open()
    slot = state.room.held.copies.take(2, 0, len(PAYLOAD), 64)
    fill(slot, 2, STAMP, PAYLOAD)
    state.state.held_is_proven()
    state.room.settle()
    flip(state.room.memory, slot.path, PAGE_BYTES)
    state.state.damaged_at_rest(slot.path, "a bit")
    state.room.settle()
    told = [{held.rank for held in word.snapshots} for word in state.room.said(InventoryReport)]
    assert [2 in ranks for ranks in told[-2:]] == [True, False]


def test_offers_wait_until_what_rests_here_is_proven() -> None:
    state = State()
    state.state.open()
    offer = state.offered_copy(2)
    state.state.receive(2, offer)
    state.room.settle()
    assert state.room.said(CopyAccepted) == []
    assert state.room.said(InventoryReport) == []
    state.room.held.is_proven = True
    state.state.held_is_proven()
    state.room.settle()
    assert state.room.sent(CopyAccepted) == [(2, CopyAccepted(VERSION, 2, STAMP))]
    assert len(state.room.said(InventoryReport)) == 1
    state.state.held_is_proven()
    state.room.settle()
    assert len(state.room.said(CopyAccepted)) == 1


def test_the_inventory_names_what_others_can_be_given_in_a_job_of_this_size() -> None:
    state = State()
    room = state.room
    fill(room.held.copies.take(2, 0, 100, 64), 2, Stamp(4, 1), b"c" * 100)
    fill(room.held.copies.take(0, 0, 100, 64), 0, Stamp(3, 1), b"c" * 100, world_size=4)
    room.seal(0, STAMP, PAYLOAD)
    room.seal(2, STAMP, PAYLOAD).void()
    state.open()
    (report,) = room.said(InventoryReport, 0)
    assert report.snapshots == (HeldSnapshot(0, STAMP), HeldSnapshot(2, Stamp(4, 1)))


def test_a_holder_is_given_its_part_and_who_restores_what_it_asks_for() -> None:
    state = State().train()
    state.horizon(target=STAMP)
    holder = state.holder
    first = BlockRange(Part.PAYLOAD, 0, BLOCK_BYTES)
    state.state.receive(holder, CopyAccepted(VERSION, 1, STAMP))
    small = len(state.room.net.blocks)
    assert {block.span.part for block in state.room.net.blocks} == {Part.META}
    for node in (holder, 2 - holder):
        state.state.receive(node, FetchRanges(VERSION, 1, STAMP, (first,)))
    given_to = [(block.node, block.data) for block in state.room.net.blocks[small:]]
    assert given_to == [(holder, PAYLOAD[:BLOCK_BYTES]), (2 - holder, PAYLOAD[:BLOCK_BYTES])]


def test_what_only_an_older_placement_needed_is_given_up_once_something_is_committed() -> None:
    state = State().train()
    room = state.room
    fill(room.held.copies.take(0, 0, 100, 64), 0, STAMP, b"c" * 100)
    fill(room.held.copies.take(2, 0, 100, 64), 2, STAMP, b"c" * 100)
    room.seal(0, STAMP, PAYLOAD)
    state.horizon(target=STAMP)
    kept = 2 - state.holder  # whose rank is held here: nodes 0 to 2 hold in a ring
    assert ranks_in(room.memory, room.job_dir) == [0, 1]
    assert len(room.held.copies.sealed()) == 2
    state.horizon(committed=STAMP)
    assert ranks_in(room.memory, room.job_dir) == [1]
    assert [rank for rank, _ in room.held.copies.sealed()] == [kept]


@pytest.mark.parametrize(
    ("node", "is_loss", "is_back", "is_lost"),
    [(0, True, False, True), (0, True, True, False), (0, False, False, False)],
)
def test_a_node_is_lost_when_nobody_comes_back_in_time(
    node: int, is_loss: bool, is_back: bool, is_lost: bool
) -> None:
    state = State().open()
    before = len(state.room.net.connected)
    state.state.link_is_dead(node, "gone", is_loss)
    assert len(state.room.net.connected) == before + is_loss
    state.room.time.pass_ns(RETURN_NS)
    state.state.report_missing(RETURN_NS)
    assert state.fake.of("peer_is_dead") == []
    if is_back:
        state.state.link_is_open(node)
    state.room.time.pass_ns(1)
    state.state.report_missing(RETURN_NS)
    state.state.report_missing(RETURN_NS)
    told = state.fake.of("peer_is_dead")
    assert told == ([(state.room.mesh, node, "gone")] if is_lost else [])


def test_the_end_of_a_link_that_nobody_needs_says_nothing() -> None:
    state = State(node=1, nodes=6).open()
    (stranger, *_) = [n for n in range(6) if n != 1 and not state.room.links.needs(n)]
    state.state.link_is_dead(stranger, "gone", True)
    state.room.time.pass_ns(2 * RETURN_NS)
    state.state.report_missing(RETURN_NS)
    assert state.fake.of("peer_is_dead") == []
    assert state.fake.of("link_is_gone") == [(stranger, "gone")]


def test_who_leads_is_linked_with_all_and_others_with_it_and_their_partners() -> None:
    near = {}
    for node in (0, 5):
        state = State(node=node, nodes=6).open()
        near[node] = {n for n, _, _ in state.room.net.connected}
    assert near[0] == {1, 2, 3, 4, 5}
    assert near[5] == {0, 4}


def test_a_policy_that_is_impossible_here_is_a_reason_not_to_train() -> None:
    assert State(nodes=2, redundancy="copies:3").state.refusal != ""
    assert State().state.refusal == ""


def test_ranks_that_train_already_go_on_in_their_epoch_with_what_was_known() -> None:
    state = State()
    known = Horizon(4, Stamp(3, 4))
    state.page.write(known)
    state.fake.pages[1] = a_page(1, {0: Stamp(3, 4)}, epoch=4)
    state.open()
    state.state.trains()
    assert state.state.horizon == known
    assert state.room.said(NodeReport)[-1].epoch == 4


def test_who_takes_over_before_an_epoch_had_a_word_inherits_as_at_its_beginning() -> None:
    """The keeper before died as it permitted the ranks: what was committed stays till the next."""
    for held, expected in (({0: STAMP, 1: Stamp(6, 1)}, STAMP), ({0: Stamp(6, 1)}, None)):
        state = State()
        state.page.write(Horizon(EPOCH, STAMP))
        state.fake.pages[1] = a_page(1, held, epoch=2)
        state.open()
        state.state.trains()
        assert state.state.horizon == Horizon(2, inherited=expected) == state.page.last()


def test_a_new_epoch_inherits_what_was_committed_if_all_ranks_have_it() -> None:
    for held, expected in (({0: STAMP}, STAMP), ({0: Stamp(6, 1)}, None)):
        state = State()
        state.page.write(Horizon(EPOCH, STAMP))
        state.fake.pages[1] = a_page(1, held)
        state.open()
        state.state.resumed(2, Stamp(6, 1))
        assert state.state.horizon == Horizon(2, inherited=expected)


def test_who_dies_as_it_says_what_is_committed_has_told_its_own_page() -> None:
    state = State(0, 2, redundancy="none").train()
    row = RanksReport((1,), (STAMP,), None, STAMP.step, (STAMP,))
    state.state.receive(
        1, NodeReport(VERSION, EPOCH, None, None, None, 1, 1, "", (row,), policy="none")
    )
    state.room.settle()
    (own,) = (word for word in state.room.to_self if isinstance(word, NodeReport))
    state.state.receive(0, own)
    state.room.net.send = killed
    with pytest.raises(Killed):
        state.state.report_news()
    assert state.page.last().committed == STAMP


def test_the_newest_word_about_nodes_stands_in_the_file_whatever_was_said_before() -> None:
    room = ReplicationRoom()
    safety = KnownSafety(room.memory, room.job_dir)
    for version, apart in ((1, ()), (1, (NodeRange(2, 2),)), (2, (NodeRange(2, 2),)), (2, ())):
        mesh = a_mesh(nodes=2 + version, version=version)
        word = SafetyWord(version, "copies:2", "", 5, True, apart, (), (), (), 1, "one may be lost")
        safety.receive(word, mesh)
        assert read_node_safety(room.memory, room.job_dir) == spell_out(word, mesh)


def test_a_full_memory_costs_the_file_about_nodes_and_not_the_keeper() -> None:
    """Any process of the machine may have filled it."""
    room = ReplicationRoom()
    safety = KnownSafety(room.memory, room.job_dir)
    word = SafetyWord(1, "copies:2", "", 5, True, (), (), (), (), 1, "one may be lost")
    mesh = a_mesh(nodes=3, version=1)
    room.files.eaten_bytes = room.files.budget_bytes
    safety.receive(word, mesh)
    assert read_node_safety(room.memory, room.job_dir) is None
    room.files.eaten_bytes = 0
    safety.receive(word, mesh)
    assert read_node_safety(room.memory, room.job_dir) == spell_out(word, mesh)


@pytest.mark.parametrize("took_ms", [0, 1, 100])
def test_the_leader_does_not_spend_its_time_on_which_nodes_may_be_lost(
    monkeypatch: pytest.MonkeyPatch, took_ms: int
) -> None:
    state = State(node=0).train()
    asked: list[int] = []

    def safety(_: set[int]) -> None:
        asked.append(state.room.time.now_ns)
        state.room.time.now_ns += took_ms * MS_NS

    monkeypatch.setattr(state.state._leader, "safety", safety)
    began_ns = state.room.time.now_ns
    ticks = 0
    while state.room.time.now_ns - began_ns < 30 * S_NS:
        state.state.tick()
        state.room.time.now_ns += 200 * MS_NS
        ticks += 1
    spent_ns = len(asked) * took_ms * MS_NS
    assert spent_ns <= 30 * S_NS / SAFETY_PAUSES + took_ms * MS_NS
    assert len(asked) >= 5
    assert took_ms > 1 or len(asked) == ticks, "a small job hears at once"


def test_what_the_copies_took_is_reported_to_who_leads() -> None:
    state = State().train()
    counted = state.room.net.counted
    for look in range(3):
        counted[2, 1] = LinkCount(look * MIB, look * 60 * MS_NS, look * MIB, 0, 0)
        state.room.time.pass_ns(2 * S_NS)
        state.state.tick()
    found = [report.rows for report in state.room.said(LinkReport, 0)]
    row = LinkRow(2, LinkSample(MIB, 60 * MS_NS, MIB))
    assert found == [(row,), (row,)]
