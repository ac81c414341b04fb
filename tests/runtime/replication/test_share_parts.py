"""Share parts: what ranks of other nodes keep for those here is brought one after the other, and
goes when all train on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.slot import Slot, ranks_in, slot_path
from keepstep.edge.shm.whole import SHARED
from keepstep.model.horizon import Horizon
from keepstep.model.messages.peers import FetchRanges
from keepstep.model.restore_sources import RestoreSource, SharedSources
from keepstep.model.shares import Share, ShareClass, rank_runs
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES, S_NS
from keepstep.runtime.replication.owner import Owner
from keepstep.runtime.replication.recovery import SnapshotRecovery
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from keepstep.runtime.replication.share_parts import LOOK_NS, ShareParts
from tests.runtime.replication.room import BLOCK_BYTES, JOB_HASH, ReplicationRoom, fill, payload_of

NODES = 4
STAMP = Stamp(5, 1)


class Bringing:
    """Node `here` of four with so many ranks each; the snapshots of ranks 0 to 3 lie elsewhere."""

    def __init__(self, here: int = 0, ranks: int = 1) -> None:
        self.room = room = ReplicationRoom(here, NODES, ranks)
        room.links.open(())
        elsewhere = room.job_dir.with_name("elsewhere")
        chance = random.Random(6)
        self.payloads = [chance.randbytes(3 * BLOCK_BYTES + 10) for _ in range(NODES)]
        self.slots = [
            room.seal(rank, STAMP, payload, root=elsewhere)
            for rank, payload in enumerate(self.payloads)
        ]
        server = SnapshotServer(room.links, room.held, lambda: None)
        owner = Owner(room.world, room.links, room.held.own, lambda: None, lambda: None)
        self.recovery = SnapshotRecovery(
            *(room.world, room.links, room.job_dir, JOB_HASH),
            *(server, RepairSums(room.world, room.links, server), owner),
        )
        self.page = HorizonPage(room.memory, room.job_dir)
        has_copy = room.held.has_copy
        of = room.mesh, self.recovery, has_copy, self.page, True
        self.parts = ShareParts(room.world, room.job_dir, *of)
        self.ended: list[str | None] = []

    def bring(self, *sources: RestoreSource) -> None:
        self.parts.bring([SharedSources(sources)], STAMP, self.ended.append)
        self.room.settle()

    def asked(self) -> list[tuple[int, int]]:
        """(rank, node), once each."""
        told = [(message.rank, node) for node, message in self.room.sent(FetchRanges)]
        return list(dict.fromkeys(told))

    def answer(self) -> None:
        """All who are asked give what they have."""
        seen = 0
        while seen < len(self.room.net.sent):
            node, message = self.room.net.sent[seen]
            seen += 1
            if isinstance(message, FetchRanges):
                for wanted in message.ranges:
                    self.room.give(node, self.slots[message.rank], wanted)
            self.room.settle()

    def brought(self) -> dict[int, bytes]:
        memory, root = self.room.memory, self.room.job_dir / SHARED
        return {
            rank: payload_of(Slot(memory, slot_path(root, rank, 0)))
            for rank in ranks_in(memory, root)
        }


def of(rank: int, *nodes: int) -> RestoreSource:
    return RestoreSource(rank, nodes or (rank,))


def test_the_others_parts_are_brought_one_after_the_other() -> None:
    bringing = Bringing()
    bringing.bring(of(0), of(1), of(3))
    assert bringing.asked() == [(1, 1)] and bringing.parts.is_bringing
    bringing.answer()
    assert bringing.asked() == [(1, 1), (3, 3)]
    assert bringing.ended == [None] and not bringing.parts.is_bringing
    assert bringing.brought() == {rank: bringing.payloads[rank] for rank in (1, 3)}
    bringing.parts.resumed()
    assert bringing.brought() == {}


def test_a_copy_that_rests_here_is_found_where_it_is() -> None:
    bringing = Bringing()
    bringing.bring(of(0), of(1, 1, 0))
    assert bringing.ended == [None] and bringing.asked() == []


def test_who_shares_nothing_with_them_brings_nothing() -> None:
    bringing = Bringing(here=2)
    bringing.bring(of(0), of(1))
    assert bringing.ended == [None] and bringing.asked() == []


def test_what_cannot_be_had_is_told_with_whose_part_it_is_and_ends_it() -> None:
    bringing = Bringing()
    bringing.bring(of(0), of(1), of(3))
    bringing.recovery.unavailable(1, 1, STAMP, "it is gone")
    assert bringing.ended == ["rank 1 keeps a part of it, and node 1: it is gone"]
    assert not bringing.parts.is_bringing and bringing.asked() == [(1, 1)]


def test_another_offer_stops_what_was_on_its_way() -> None:
    bringing = Bringing()
    bringing.bring(of(0), of(1))
    bringing.bring(of(0), of(3))
    bringing.answer()
    assert bringing.ended == ["all resume", None]
    assert bringing.brought() == {3: bringing.payloads[3]}


@given(st.sets(st.integers(0, NODES - 1), min_size=2), st.integers(0, NODES - 1))
def test_all_who_share_are_linked_with_all_who_give(ranks: set[int], here: int) -> None:
    bringing = Bringing(here)
    bringing.bring(*(of(rank) for rank in sorted(ranks)))
    expected = ranks - {here} if here in ranks else set()
    assert {node for node, _, _ in bringing.room.net.connected} == expected


@pytest.mark.parametrize(("ranks", "is_so"), [([0], True), ([1, 1], True), ([0, 1], False)])
def test_ranks_of_one_node_need_nothing(ranks: list[int], is_so: bool) -> None:
    assert Bringing().parts.are_on_one(ranks) == is_so


# -- to write a checkpoint

CLASS = ShareClass(rank_runs([0, 1, 3]), 5, 6)


class Storing(Bringing):
    """The rank here lacks what ranks 1 and 3 keep."""

    def __init__(
        self, committed: Stamp | None = STAMP, is_known: bool = True, ranks: int = 1
    ) -> None:
        super().__init__(ranks=ranks)
        self.lacks(0)
        self.page.write(Horizon(1, committed))
        if is_known:
            self.page.write_classes(1, [CLASS], range(1))

    def lacks(self, rank: int, share: Share | None = None) -> None:
        """A rank here has left a block to others, unless it tells that it has all."""
        memory, payload = self.room.memory, self.payloads[rank]
        own = Slot.create(memory, slot_path(self.room.job_dir, rank, 0), len(payload), PAGE_BYTES)
        own.begin(JOB_HASH, rank, NODES, 0, STAMP)
        if share is None or share.ranks:
            own.shed(frozenset({1}))
        fill(own, rank, STAMP, payload, NODES, share=share)

    def store(self, attempt: int = 7) -> None:
        self.parts.bring_to_store(STAMP, attempt, self.ended.append)
        self.room.settle()


def test_a_checkpoints_parts_are_brought_from_the_members_own_nodes_and_given_back() -> None:
    storing = Storing()
    storing.store()
    storing.answer()
    assert storing.asked() == [(1, 1), (3, 3)] and storing.ended == [None]
    assert storing.brought() == {rank: storing.payloads[rank] for rank in (1, 3)}
    storing.parts.give_back(6)
    assert storing.brought(), "another attempt's end is nothing to this one"
    storing.parts.give_back(7)
    assert storing.brought() == {}


def test_nothing_is_brought_before_it_is_committed() -> None:
    storing = Storing(committed=Stamp(4, 1))
    storing.store()
    storing.room.time.pass_ns(10 * S_NS)
    assert storing.asked() == [] and storing.ended == []
    storing.page.write(Horizon(1, Stamp(6, 1)))
    storing.room.time.pass_ns(S_NS)
    storing.answer()
    assert storing.ended == [None]


def test_what_will_never_be_committed_is_given_up() -> None:
    storing = Storing(committed=Stamp(4, 1))
    storing.store()
    storing.page.write(Horizon(1, Stamp(4, 1), decided_step=9))
    storing.room.time.pass_ns(S_NS)
    assert storing.ended == [f"{STAMP} will never be committed"]


def test_who_does_not_know_with_whom_it_shares_says_so() -> None:
    storing = Storing(is_known=False)
    storing.store()
    assert storing.ended == ["nobody has told with whom rank 0 shares it"]


def test_who_has_resumed_from_it_knows_with_whom_it_shares() -> None:
    """A node that was not there before, where no step follows: nobody tells it of classes."""
    storing = Storing(is_known=False)
    storing.bring(of(0), of(1), of(3))
    storing.answer()
    storing.parts.resumed()
    storing.store()
    storing.answer()
    assert storing.ended == [None, None] and set(storing.brought()) == {1, 3}


@pytest.mark.parametrize(
    ("own", "other", "why"),
    [
        (Share(5, 2), Share(5, 2), None),
        (Share(5, 2), Share(5, 0), None),
        (Share(5, 2), Share(6, 2), "nobody has told with whom rank 0 shares it"),
        (Share(5, 3), Share(5, 3), "nobody has told with whom rank 0 shares it"),
    ],
)
def test_what_ranks_here_alone_share_needs_nobodys_word(
    own: Share, other: Share, why: str | None
) -> None:
    """An offer names those of several nodes."""
    storing = Storing(is_known=False, ranks=2)
    storing.lacks(0, own)
    storing.lacks(1, other)
    storing.store()
    assert storing.ended == [why] and storing.asked() == []


def test_a_source_that_cannot_be_reached_is_waited_for_and_then_given_up() -> None:
    """Slots of all nodes stand still meanwhile."""
    storing = Storing()
    storing.store()
    storing.recovery.link_is_dead(1, "it is silent")
    assert storing.ended == []
    storing.room.time.pass_ns(LOOK_NS)
    assert storing.ended == ["the node of rank 1 cannot be reached"]


def test_what_all_resume_from_comes_before_a_checkpoint() -> None:
    storing = Storing()
    storing.store()
    storing.bring(of(0), of(1))
    assert storing.ended == ["all resume"]
    storing.store()
    assert storing.ended == ["all resume", "what all resume from is here for that"]
    storing.answer()
    assert storing.ended[2:] == [None] and set(storing.brought()) == {1}
    storing.parts.resumed()
    assert storing.brought() == {}


def test_who_gives_an_attempt_up_hears_no_more_of_it() -> None:
    storing = Storing()
    storing.store()
    storing.parts.give_back(7)
    storing.answer()
    assert storing.ended == [] and storing.brought() == {} and not storing.parts.is_bringing
