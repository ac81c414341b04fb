"""Owner: a target is protected exactly when all its holders have proven it, and what is not proven
is offered until it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.checksum import checksum
from keepstep.core.redundancy.protection import assignments
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.restore_sources import GroupMember, RestoreSource
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import NoRedundancy, parse_policy
from keepstep.model.wire import Part
from keepstep.runtime.replication.encode import SnapshotSizes
from keepstep.runtime.replication.owner import ASK_AGAIN_NS, Owner
from tests.runtime.replication.room import BLOCK_BYTES, ReplicationRoom, flip

NODES = 4
OLD = Stamp(4, 1)
TARGET = Stamp(5, 1)
NEXT = Stamp(6, 1)
PAYLOAD = random.Random(2).randbytes(3 * BLOCK_BYTES)
UNEVEN_BYTES = len(PAYLOAD) + 300  # of another member: pieces are no blocks of the table


class Owning:
    """Node 0 of four with one rank, and what lies there of it."""

    def __init__(self, policy: str = "copies:3") -> None:
        self.room = ReplicationRoom(nodes=NODES)
        self.room.join()
        self.slots = {
            stamp: self.room.seal(0, stamp, PAYLOAD, index)
            for index, stamp in enumerate([OLD, TARGET, NEXT])
        }
        self.news = 0
        self.damage = 0
        self.owner = Owner(
            self.room.world, self.room.links, self.room.held.own, self._news, self._damage
        )
        self.assignments = assignments(parse_policy(policy), self.room.mesh)
        self.holders = self.assignments[0].holders
        self.owner.follow(self.assignments)

    def _news(self) -> None:
        self.news += 1

    def _damage(self) -> None:
        self.damage += 1

    def offers(self, stamp: Stamp = TARGET) -> list[int]:
        """To whom, in order."""
        return [node for node, offer in self.room.sent(CopyOffer) if offer.stamp == stamp]

    def blocks(self, stamp: Stamp) -> int:
        return sum(block.span.stamp == stamp for block in self.room.net.blocks)

    def protect_fully(self, stamp: Stamp = TARGET) -> None:
        self.owner.protect(stamp, OLD)
        for node in self.holders:
            self.owner.acked(node, 0, stamp)
        assert stamp in self.owner.protected[0]

    @property
    def is_protected(self) -> bool:
        return TARGET in self.owner.protected.get(0, ())


words = st.tuples(
    st.sampled_from(["ack", "ack", "ack", "accept", "nack"]),
    st.integers(0, NODES - 1),
    st.sampled_from([*[0] * 9, 1]),
    st.sampled_from([*[TARGET] * 9, OLD, Stamp(5, 0)]),
)


@given(st.lists(words, max_size=10))
def test_a_target_is_protected_exactly_when_every_holder_has_proven_it(
    said: list[tuple[str, int, int, Stamp]],
) -> None:
    owning = Owning()
    owning.owner.protect(TARGET, OLD)
    proven: set[int] = set()
    is_protected = False
    for what, node, rank, stamp in said:
        is_about_it = (rank, stamp) == (0, TARGET)
        match what:
            case "ack":
                owning.owner.acked(node, rank, stamp)
                if is_about_it and not is_protected:
                    proven |= {node} & set(owning.holders)
            case "accept":
                owning.owner.accepted(node, rank, stamp)
                if is_about_it:
                    proven = set() if is_protected else proven - {node}
                    is_protected = False
            case "nack":
                owning.owner.unavailable(node, rank, stamp, "it was lost")
                if is_about_it:
                    # what was proven by all is begun anew with all
                    proven = set() if is_protected else proven - {node}
                    is_protected = False
        is_protected |= proven == set(owning.holders)
        assert owning.is_protected == is_protected


def test_holders_are_offered_the_target_once_and_nobody_else_is() -> None:
    owning = Owning()
    assert len(owning.holders) == 2
    owning.owner.protect(TARGET, OLD)
    owning.owner.protect(TARGET, OLD)
    assert sorted(owning.offers()) == sorted(owning.holders)
    assert {offer.floor for offer in owning.room.said(CopyOffer)} == {OLD}


@given(st.integers(0, 2))
def test_of_what_is_no_target_any_more_nothing_is_sent(taken: int) -> None:
    owning = Owning()
    owning.owner.protect(TARGET, OLD)
    owning.room.net.takes = taken
    for node in owning.holders:
        owning.owner.accepted(node, 0, TARGET)
    owning.owner.protect(NEXT, TARGET)
    owning.room.net.takes = 100
    for node in owning.holders:
        owning.owner.writable(node)
        owning.owner.accepted(node, 0, TARGET)
        owning.owner.acked(node, 0, TARGET)
    assert owning.blocks(TARGET) == taken
    assert not owning.is_protected
    assert owning.owner.protected.get(0, ()) == ()


def test_who_is_back_is_offered_what_it_has_not_proven() -> None:
    owning = Owning()
    first, second = owning.holders
    owning.owner.protect(TARGET, OLD)
    owning.owner.acked(first, 0, TARGET)
    before = owning.offers()
    owning.owner.link_is_open(first)
    owning.owner.link_is_open(second)
    assert owning.offers() == [*before, second]


def test_who_is_back_in_a_stripe_group_hears_all_sizes_again() -> None:
    """Without them its own rank sends nothing, whatever it had acknowledged before."""
    owning = Owning("parity:4")
    owning.owner.protect(TARGET, OLD)
    first = owning.holders[0]
    owning.owner.acked(first, 0, TARGET)
    before = owning.offers()
    owning.owner.link_is_open(first)
    assert owning.offers() == [*before, first]


def test_who_is_back_hears_the_size_of_what_all_hold_already() -> None:
    """Its group would wait for ever for what its own rank does not send."""
    owning = Owning("parity:4")
    owning.protect_fully()
    before = owning.offers()
    back = owning.holders[0]
    owning.owner.link_is_open(back)
    assert back in owning.offers()[len(before) :]
    assert owning.is_protected, "what they have proven counts until one says otherwise"
    for node in owning.holders:
        owning.owner.acked(node, 0, TARGET)
    assert owning.is_protected


@pytest.mark.parametrize("busy", ["compares an older one", "has no target yet", "cannot read it"])
def test_who_is_back_hears_that_size_as_soon_as_it_can_be_said(busy: str) -> None:
    owning = Owning("parity:4")
    owning.protect_fully(OLD)
    owning.protect_fully()
    before = owning.offers()
    match busy:
        case "compares an older one":
            owning.owner.compare()
        case "has no target yet":
            owning.owner.protect(None, OLD)  # a new epoch: its leader has not said yet
        case _:
            owning.slots[TARGET].lock(exclusive=True)  # its rank is looking at it this moment
    owning.owner.link_is_open(owning.holders[0])
    owning.slots[TARGET].unlock()
    owning.owner.protect(TARGET, OLD)
    offered = owning.offers()
    assert sorted(offered) == sorted([*before, *owning.holders])
    assert owning.is_protected
    for node in owning.holders:
        owning.owner.acked(node, 0, TARGET)
    owning.owner.tick()
    assert owning.offers() == offered, "once"


def test_who_is_back_with_a_copy_is_not_bothered() -> None:
    owning = Owning()
    owning.protect_fully()
    before = owning.offers()
    owning.owner.link_is_open(owning.holders[0])
    assert owning.offers() == before


def test_who_gives_no_sign_is_asked_again_if_it_is_there() -> None:
    owning = Owning()
    first, second = owning.holders
    owning.owner.protect(TARGET, OLD)
    before = owning.offers()
    owning.room.time.pass_ns(ASK_AGAIN_NS)
    owning.owner.tick()
    assert owning.offers() == before
    owning.room.time.pass_ns(1)
    owning.room.net.away = {second}
    owning.owner.tick()
    owning.owner.tick()
    assert owning.offers() == [*before, first]


def test_who_is_being_sent_something_is_not_asked_again() -> None:
    owning = Owning()
    owning.owner.protect(TARGET, OLD)
    before = owning.offers()
    owning.owner.accepted(owning.holders[0], 0, TARGET)
    owning.room.time.pass_ns(2 * ASK_AGAIN_NS)
    owning.owner.tick()
    assert owning.offers() == before
    for block in owning.room.net.blocks:
        block.done(None)
    owning.room.time.pass_ns(2 * ASK_AGAIN_NS)
    owning.owner.tick()
    assert sorted(owning.offers()) == sorted([*before, *owning.holders])


def test_a_slot_in_its_ranks_hands_is_offered_when_it_lets_go() -> None:
    owning = Owning()
    rank_map = Slot(owning.room.memory, owning.slots[TARGET].path)
    assert rank_map.lock(exclusive=True)
    owning.owner.protect(TARGET, OLD)
    assert owning.offers() == []
    rank_map.unlock()
    owning.owner.tick()
    assert sorted(owning.offers()) == sorted(owning.holders)


def test_while_it_is_offered_its_rank_cannot_overwrite_it() -> None:
    owning = Owning()
    rank_map = Slot(owning.room.memory, owning.slots[TARGET].path)
    owning.owner.protect(TARGET, OLD)
    assert not rank_map.lock(exclusive=True)
    for node in owning.holders:
        owning.owner.acked(node, 0, TARGET)
    assert rank_map.lock(exclusive=True)


@pytest.mark.parametrize("end", [Owner.end, lambda owner: owner.follow({})], ids=["mesh", "policy"])
def test_what_was_on_its_way_before_counts_no_more(end: object) -> None:
    assert callable(end)
    owning = Owning()
    owning.owner.protect(TARGET, OLD)
    end(owning.owner)
    for node in owning.holders:
        owning.owner.acked(node, 0, TARGET)
    assert not owning.is_protected
    assert Slot(owning.room.memory, owning.slots[TARGET].path).lock(exclusive=True)


def test_without_holders_it_is_protected_at_once() -> None:
    owning = Owning("none")
    owning.owner.protect(TARGET, OLD)
    assert owning.is_protected
    assert owning.room.net.sent == []


def test_a_damaged_header_is_told_once_and_not_copied() -> None:
    owning = Owning()
    path = slot_path(owning.room.job_dir, 0, 1)
    file = owning.room.files.find(str(path))
    assert file is not None
    owning.owner.protect(TARGET, OLD)
    file.data[100] ^= 1
    owning.owner.tick()
    owning.owner.tick()
    assert owning.damage == 1
    assert owning.room.journal.kinds.count("damaged") == 1
    assert not owning.owner.wanted(owning.holders[0], 0, TARGET, ())


def damaged_member(others_bytes: int) -> Owning:
    """Whose pieces are wanted, and whose first block is damaged."""
    owning = Owning("parity:4")
    file = owning.room.files.find(str(owning.slots[TARGET].path))
    assert file is not None
    file.data[4096 + 7] ^= 1
    for rank in (1, 2, 3):
        owning.owner.announced(rank, TARGET, SnapshotSizes(others_bytes, 16, BLOCK_BYTES))
    owning.owner.protect(TARGET, OLD)
    for node in owning.holders:
        owning.owner.accepted(node, 0, TARGET)
    owning.room.settle()
    return owning


def test_a_member_that_does_not_prove_is_not_encoded() -> None:
    owning = damaged_member(UNEVEN_BYTES)
    assert owning.room.net.blocks == []
    assert owning.damage == 1


def test_a_damaged_piece_that_is_a_block_of_the_table_goes_with_the_tables_checksum() -> None:
    """So its holder finds out, as with a copy: nothing is read twice here."""
    owning = damaged_member(len(PAYLOAD))
    pieces = [b for b in owning.room.net.blocks if b.span.part is Part.PAYLOAD]
    assert {block.span.offset for block in pieces} == {0, 512, 1024}
    wrong = [block.span.offset for block in pieces if checksum(block.data) != block.checksum]
    assert wrong == [0]


def test_the_sizes_that_were_announced_before_the_own_offer_count() -> None:
    owning = Owning("parity:4")
    for rank in (1, 2, 3):
        owning.owner.announced(rank, TARGET, SnapshotSizes(UNEVEN_BYTES, 16, BLOCK_BYTES))
        owning.owner.announced(rank, NEXT, SnapshotSizes(1, 1, BLOCK_BYTES))
    owning.owner.protect(TARGET, OLD)
    owning.owner.accepted(1, 0, TARGET)
    assert owning.room.net.blocks == []
    owning.room.settle()
    assert {block.node for block in owning.room.net.blocks} == {1}


def test_the_first_who_has_no_memory_is_named() -> None:
    owning = Owning()
    owning.owner.declined(1, 0, "full")
    told = owning.owner.hindered
    owning.owner.declined(2, 0, "full")
    assert told and owning.owner.hindered == told
    assert owning.news == 1


def test_who_has_no_memory_for_what_it_is_not_to_hold_hinders_nobody() -> None:
    owning = Owning()
    owning.owner.declined(owning.holders[0], 0, "full")
    assert owning.owner.hindered
    owning.owner.follow(assignments(NoRedundancy(), owning.room.mesh))
    assert owning.owner.hindered == "", "another policy begins anew"
    owning.owner.declined(owning.holders[0], 0, "full")
    assert owning.owner.hindered == ""


def test_comparing_offers_what_is_committed_again() -> None:
    owning = Owning()
    owning.protect_fully(OLD)
    before, news = owning.offers(OLD), owning.news
    owning.owner.compare()
    assert sorted(owning.offers(OLD)) == sorted([*before, *owning.holders])
    for node in owning.holders:
        owning.owner.acked(node, 0, OLD)
    assert owning.owner.protected[0].count(OLD) == 1
    assert owning.news == news  # nothing has changed


def test_while_it_is_compared_it_counts_until_a_holder_takes_it_anew() -> None:
    owning = Owning()
    owning.protect_fully(OLD)
    owning.owner.compare()
    owning.owner.acked(owning.holders[0], 0, OLD)
    assert OLD in owning.owner.protected[0]
    owning.owner.accepted(owning.holders[1], 0, OLD)
    assert OLD not in owning.owner.protected[0]
    owning.owner.acked(owning.holders[1], 0, OLD)
    assert OLD in owning.owner.protected[0]


@pytest.mark.parametrize("when", ["before it is offered", "while it is"])
def test_what_is_damaged_while_it_is_compared_can_still_be_had_from_its_holders(when: str) -> None:
    owning = Owning()
    owning.protect_fully(OLD)
    if when == "while it is":
        owning.owner.compare()
    flip(owning.room.memory, owning.slots[OLD].path, 40)
    if when != "while it is":
        owning.owner.compare()
    owning.owner.tick()
    assert owning.owner.source_of(0, OLD) == RestoreSource(0, copies=owning.holders)


@pytest.mark.parametrize("policy", ["copies:3", "parity:4"])
def test_what_is_compared_does_not_hold_up_the_target(policy: str) -> None:
    """A stripe group that has gone on to the target never asks for the older one."""
    owning = Owning(policy)
    owning.protect_fully(OLD)
    owning.slots[TARGET].lock(exclusive=True)  # its rank is looking at it this moment
    owning.owner.protect(TARGET, OLD)
    owning.owner.compare()
    owning.slots[TARGET].unlock()
    owning.owner.tick()
    assert sorted(owning.offers()) == sorted(owning.holders)
    for node in owning.holders:
        owning.owner.acked(node, 0, TARGET)
    assert owning.is_protected and OLD in owning.owner.protected[0]


def test_what_is_protected_can_be_had_from_its_holders() -> None:
    copies = Owning()
    assert copies.owner.source_of(0, TARGET) is None
    copies.protect_fully()
    assert copies.owner.source_of(0, TARGET) == RestoreSource(0, copies=copies.holders)
    assert copies.owner.source_of(0, OLD) is None
    coded = Owning("parity:4")
    coded.protect_fully()
    group = coded.assignments[0].stripe_group
    others = tuple(GroupMember(rank, rank) for rank in group if rank != 0)
    assert coded.owner.source_of(0, TARGET) == RestoreSource(0, (), group, 1, others)


def test_what_is_still_on_its_way_is_not_sent_once_more() -> None:
    """A job goes back to one stamp again and again, over a line that is slower than that: each time
    all of it was put behind what had not crossed yet, and the rank never had its slot again."""
    owning = Owning()
    owning.owner.protect(TARGET, OLD)
    for node in owning.holders:
        owning.owner.accepted(node, 0, TARGET)
    sent = list(owning.room.net.blocks)
    assert len(sent) == len(owning.holders)
    before = owning.offers()
    for _ in range(3):
        owning.owner.protect(None, OLD)  # a new epoch: its leader has not said yet
        owning.owner.protect(TARGET, OLD)
    sent[0].done(None)
    owning.owner.tick()
    assert owning.offers() == before
    sent[1].done("the other side does not want it")
    rank_map = Slot(owning.room.memory, owning.slots[TARGET].path)
    assert rank_map.lock(exclusive=True), "nobody reads it any more"
    rank_map.unlock()
    owning.owner.tick()
    assert sorted(owning.offers()) == sorted([*before, *owning.holders])


def test_what_is_still_on_its_way_does_not_hold_up_another_target() -> None:
    owning = Owning()
    owning.owner.protect(TARGET, OLD)
    owning.owner.accepted(owning.holders[0], 0, TARGET)
    owning.owner.protect(NEXT, TARGET)
    assert sorted(owning.offers(NEXT)) == sorted(owning.holders)


def test_what_was_proven_of_an_abandoned_computation_counts_no_more() -> None:
    """All go back to before it, in the same mesh, and every holder voids it. Were it reported on,
    it would be committed in the new epoch, and what all went back to would be overwritten."""
    owning = Owning()
    owning.protect_fully(OLD)
    owning.protect_fully(TARGET)
    owning.owner.protect(NEXT, TARGET)
    owning.owner.forget_newer(OLD)
    assert owning.owner.protected[0] == (OLD,)
    before = owning.offers(NEXT)
    for node in owning.holders:  # it proved that before it heard
        owning.owner.acked(node, 0, NEXT)
    owning.owner.tick()
    assert owning.owner.protected[0] == (OLD,) and owning.offers(NEXT) == before


def test_what_is_of_the_new_epoch_stays_when_the_old_one_is_forgotten() -> None:
    owning = Owning()
    owning.protect_fully(TARGET)
    owning.owner.forget_newer(OLD, before_epoch=TARGET.epoch)
    assert owning.is_protected
    owning.owner.forget_newer(None, before_epoch=TARGET.epoch + 1)
    assert not owning.is_protected
