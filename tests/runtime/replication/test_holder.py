"""Holder: offers become copies or parities, and what rests here is asked for again once it is
damaged."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.horizon import Horizon
from keepstep.model.messages.peers import CopyAccepted, CopyAcked, CopyUnavailable
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.encode import SnapshotSizes, contents_of, ranges_for
from keepstep.runtime.replication.holder import Holder
from keepstep.runtime.replication.receive import copy_ranges_of
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_DIR,
    JOB_HASH,
    MANIFEST,
    ReplicationRoom,
    a_memory,
    an_offer,
    flip,
    payload_of,
    seal,
)

STAMP, NEXT, LATER = Stamp(3, 1), Stamp(4, 1), Stamp(5, 1)
GROUP = (0, 1, 2)
SIZES = SnapshotSizes(1000, len(MANIFEST), BLOCK_BYTES)


def an_owner(rank: int, stamp: Stamp = STAMP) -> Slot:
    payload = random.Random(f"{rank} {stamp}").randbytes(SIZES.payload_bytes)
    return seal(a_memory(), JOB_DIR, rank, stamp, payload)


class HolderNode:
    """Node 0 of three, with a rank each."""

    def __init__(self) -> None:
        self.room = ReplicationRoom()
        self.room.join()
        self.holder = Holder(
            self.room.world,
            self.room.links,
            self.room.held,
            JOB_HASH,
            lambda rank, stamp: SIZES,
        )

    def receive(self, owner: Slot) -> None:
        """A whole copy."""
        self.holder.offered(an_offer(owner))
        self.room.settle()
        self._give(owner, copy_ranges_of(SIZES.payload_bytes, SIZES.manifest_bytes, BLOCK_BYTES))

    def _give(self, owner: Slot, ranges: list[BlockRange]) -> None:
        for is_payload in (False, True):
            for range_ in ranges:
                if (range_.part is Part.PAYLOAD) is is_payload:
                    self.room.give(owner.header().rank, owner, range_)
            self.room.settle()

    def encode(self, stamp: Stamp = STAMP) -> None:
        """A whole parity, of what ranks 1 and 2 have."""
        owners = [an_owner(rank, stamp) for rank in (1, 2)]
        for owner in owners:
            self.holder.offered(an_offer(owner, stripe_group=GROUP, tolerates=1))
        self.room.settle()
        stripes = contents_of(dict.fromkeys(GROUP, SIZES), GROUP, 1, 0).stripes
        for owner in owners:
            self._give(owner, ranges_for(stripes, SIZES, owner.header().rank, 0))

    def copies(self) -> set[tuple[int, Stamp]]:
        return set(self.room.held.copies.sealed())

    def parities(self) -> set[tuple[int, Stamp]]:
        return set(self.room.held.parities.sealed())

    def reached(self, kind: type[object]) -> list[tuple[int, int]]:
        """(node, rank) of all messages of that kind."""
        return [(node, message.rank) for node, message in self.room.sent(kind)]


def test_an_offer_without_a_group_becomes_a_copy() -> None:
    here, owner = HolderNode(), an_owner(1)
    here.receive(owner)
    assert (here.copies(), here.parities()) == ({(1, STAMP)}, set())
    assert here.reached(CopyAcked) == [(1, 1)]
    copy = here.room.held.copies.find(1, STAMP)
    assert copy is not None
    assert payload_of(copy) == payload_of(owner)


def test_offers_of_a_whole_group_become_a_parity() -> None:
    here = HolderNode()
    here.holder.offered(an_offer(an_owner(1), stripe_group=GROUP, tolerates=1))
    here.room.settle()
    assert not here.room.sent(CopyAccepted), "the other member has not offered"
    here.encode()
    assert (here.copies(), here.parities()) == (set(), {(0, STAMP)})
    assert sorted(here.reached(CopyAcked)) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("is_copy", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
@given(data=st.data())
def test_what_is_damaged_at_rest_is_given_up_and_asked_for_again(
    data: st.DataObject, is_known: bool, is_copy: bool
) -> None:
    # whose stamp it was: a damaged header names none
    first, last = (PAGE_BYTES, PAGE_BYTES + 500) if is_known else (0, PAGE_BYTES - 1)
    at = data.draw(st.integers(first, last))
    here = HolderNode()
    here.receive(an_owner(1))
    here.encode()
    held = here.room.held
    rank, root = (1, held.copies.root) if is_copy else (0, held.parities.root)
    path = slot_path(root, rank, 0)
    flip(here.room.memory, path, at)
    here.holder.damaged_at_rest(path, "why")
    here.holder.damaged_at_rest(path, "why")
    left = (set(), {(0, STAMP)}) if is_copy else ({(1, STAMP)}, set())
    assert (here.copies(), here.parities()) == left
    assert len(here.room.journal.of("damaged")) == 1
    if is_copy:
        assert here.reached(CopyUnavailable) == [(1, 1)]
    elif is_known:
        assert sorted(here.reached(CopyUnavailable)) == [(1, 1), (2, 2)]
    if is_known:
        assert {message.stamp for _, message in here.room.sent(CopyUnavailable)} == {STAMP}


def test_what_proves_again_is_not_given_up() -> None:
    here = HolderNode()
    here.receive(an_owner(1))
    here.holder.damaged_at_rest(slot_path(here.room.held.copies.root, 1, 0), "why")
    assert here.copies() == {(1, STAMP)}
    assert not here.room.sent(CopyUnavailable)


def test_only_what_is_kept_stays() -> None:
    here = HolderNode()
    here.receive(an_owner(1))
    here.receive(an_owner(2))
    here.encode()
    here.holder.keep_only({2}, set())
    assert (here.copies(), here.parities()) == ({(2, STAMP)}, set())


def test_a_slot_that_was_being_made_is_for_nobody_in_another_mesh() -> None:
    here = HolderNode()
    here.holder.offered(an_offer(an_owner(1)))
    here.holder.end()
    here.room.settle()
    assert not here.room.sent(CopyAccepted)


def test_the_newest_committed_stays_whatever_is_offered() -> None:
    here = HolderNode()
    here.receive(an_owner(1, STAMP))
    here.holder.follow(Horizon(1, committed=STAMP, alive=frozenset({STAMP, NEXT})))
    here.receive(an_owner(1, NEXT))
    here.receive(an_owner(1, LATER))
    assert here.copies() == {(1, STAMP), (1, NEXT)}
    assert [message.stamp for _, message in here.room.sent(CopyUnavailable)] == [LATER]
    here.holder.follow(Horizon(1, committed=NEXT, alive=frozenset({NEXT, LATER})))
    here.receive(an_owner(1, LATER))
    assert here.copies() == {(1, NEXT), (1, LATER)}
