"""Parity holder: a parity is the sum of exactly one generation of all members, or it is none."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.stripes import contribution
from keepstep.edge.shm.slot import Slot
from keepstep.model.messages.peers import CopyAccepted, CopyAcked, CopyUnavailable
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.encode import SnapshotSizes, contents_of, ranges_for
from keepstep.runtime.replication.holder_replies import HolderReplies
from keepstep.runtime.replication.parity_holder import ParityHolder
from keepstep.runtime.replication.slot_room import SlotRoom
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_HASH,
    MANIFEST,
    ReplicationRoom,
    an_offer,
    bytes_of,
    payload_of,
)

STAMP = Stamp(5, 1)
OTHER = Stamp(6, 1)
GROUP = (0, 1, 2)
BYTES = {0: 1500, 1: 1900, 2: 1000}  # of each member's payload
MINE = 0


class Holding:
    """Node 0, which keeps the parity of ranks 1 and 2 for rank 0."""

    def __init__(self) -> None:
        self.room = ReplicationRoom()
        self.room.join()
        elsewhere = self.room.job_dir.with_name("elsewhere")
        self.slots = {
            (rank, stamp): self.room.seal(
                rank,
                stamp,
                random.Random(f"{rank}/{stamp}").randbytes(BYTES[rank]),
                index,
                elsewhere,
            )
            for rank in GROUP
            for index, stamp in enumerate([STAMP, OTHER])
        }
        self.sealed_here = {STAMP, OTHER}
        replies = HolderReplies(self.room.links)
        self.holder = ParityHolder(
            self.room.world,
            self.room.links,
            self.room.held,
            SlotRoom(self.room.held, replies, self.room.journal),
            replies,
            JOB_HASH,
            self._own_sizes,
        )
        sizes = {rank: SnapshotSizes(BYTES[rank], len(MANIFEST), BLOCK_BYTES) for rank in GROUP}
        self.contents = contents_of(sizes, GROUP, 1, MINE)
        self.sizes = sizes

    def _own_sizes(self, rank: int, stamp: Stamp) -> SnapshotSizes | None:
        return self.sizes[rank] if stamp in self.sealed_here else None

    def offer(self, rank: int, stamp: Stamp = STAMP, **changes: Any) -> None:
        slot = self.slots[(rank, stamp)]
        about: dict[str, Any] = {"stripe_group": GROUP, "tolerates": 1, **changes}
        self.holder.offered(an_offer(slot, **about))
        self.room.settle()

    def offer_all(self, stamp: Stamp = STAMP) -> None:
        self.offer(1, stamp)
        self.offer(2, stamp)

    def pieces(self, rank: int) -> list[tuple[int, BlockRange]]:
        ranges = ranges_for(self.contents.stripes, self.sizes[rank], rank, MINE)
        return [(rank, range_) for range_ in ranges]

    def come(self, pieces: list[tuple[int, BlockRange]], stamp: Stamp = STAMP) -> list[bool]:
        """Whether each was wanted."""
        came = [self.room.give(r, self.slots[(r, stamp)], range_) for r, range_ in pieces]
        self.room.settle()
        return came

    def told(self, kind: type[Any]) -> list[tuple[int, Stamp]]:
        return sorted((node, word.stamp) for node, word in self.room.sent(kind))

    def parity(self, stamp: Stamp = STAMP) -> Slot | None:
        return self.room.held.parities.find(MINE, stamp)

    def expected(self, stamp: Stamp = STAMP) -> bytes:
        """The XOR of what the members give, each continued with zeros."""
        stripes = self.contents.stripes
        total = 0
        for rank in (1, 2):
            payload = payload_of(self.slots[(rank, stamp)])
            for piece in contribution(stripes, rank, MINE):
                data = payload[piece.start : piece.stop].ljust(stripes.parity_bytes, b"\0")
                total ^= int.from_bytes(data, "big")
        return total.to_bytes(stripes.parity_bytes, "big")

    def views(self) -> list[SlotState]:
        return [view.state for view in self.room.held.parities.views(MINE)]


BOTH = [(1, STAMP), (2, STAMP)]


@given(st.randoms(use_true_random=False), st.integers(0, 5))
def test_whatever_the_order_the_parity_is_the_sum_of_all_pieces_added_once(
    rng: random.Random, repeats: int
) -> None:
    holding = Holding()
    holding.offer_all()
    pieces = holding.pieces(1) + holding.pieces(2)
    rng.shuffle(pieces)
    last = pieces.pop()
    assert all(holding.come(pieces))
    assert not any(holding.come(pieces[:repeats]))
    assert holding.told(CopyAcked) == []
    assert holding.parity() is None
    holding.come([last])
    assert holding.told(CopyAcked) == BOTH
    slot = holding.parity()
    assert slot is not None
    assert payload_of(slot)[: holding.contents.stripes.parity_bytes] == holding.expected()
    slot.verify_bytes()


def test_beside_the_parity_lies_what_proves_the_others() -> None:
    holding = Holding()
    holding.offer_all()
    holding.come(holding.pieces(1) + holding.pieces(2))
    slot = holding.parity()
    assert slot is not None
    for rank in (1, 2):
        source = holding.slots[(rank, STAMP)]
        for part in (Part.HEADER, Part.TABLE, Part.MANIFEST):
            at, nbytes = holding.contents.where(rank, part)
            assert payload_of(slot)[at : at + nbytes] == bytes_of(
                source, BlockRange(part, 0, nbytes)
            )


def test_a_block_of_another_stamp_has_no_place() -> None:
    holding = Holding()
    holding.offer_all()
    assert not any(holding.come(holding.pieces(1), OTHER))
    assert all(holding.come(holding.pieces(1) + holding.pieces(2)))
    slot = holding.parity()
    assert slot is not None
    assert payload_of(slot)[: holding.contents.stripes.parity_bytes] == holding.expected()


def test_nobody_is_accepted_before_all_have_offered_and_the_own_member_is_sealed() -> None:
    holding = Holding()
    holding.sealed_here = set()
    holding.offer_all()
    assert holding.told(CopyAccepted) == []
    assert not any(holding.come(holding.pieces(1)))
    holding.sealed_here = {STAMP}
    holding.holder.try_groups(OTHER)
    holding.room.settle()
    assert holding.told(CopyAccepted) == []
    holding.holder.try_groups(STAMP)
    holding.room.settle()
    assert holding.told(CopyAccepted) == BOTH


def test_offers_of_two_stamps_make_no_group() -> None:
    holding = Holding()
    holding.offer(1, STAMP)
    holding.offer(2, OTHER)
    assert holding.told(CopyAccepted) == []
    holding.offer(1, OTHER)
    assert holding.told(CopyAccepted) == [(1, OTHER), (2, OTHER)]


def test_an_owner_that_begins_anew_has_all_of_it_added_anew() -> None:
    holding = Holding()
    holding.offer_all()
    first = holding.pieces(1)
    holding.come(first)
    holding.offer(1)
    assert holding.told(CopyAccepted) == sorted(BOTH * 2)
    holding.come(holding.pieces(2))
    assert holding.parity() is None
    holding.come(first)
    slot = holding.parity()
    assert slot is not None
    assert payload_of(slot)[: holding.contents.stripes.parity_bytes] == holding.expected()


def test_what_is_here_already_is_acknowledged_at_once_unless_it_is_of_another_snapshot() -> None:
    holding = Holding()
    holding.offer_all()
    holding.come(holding.pieces(1) + holding.pieces(2))
    holding.offer(1)
    assert holding.told(CopyAcked) == sorted([*BOTH, (1, STAMP)])
    holding.offer(1, payload_bytes=BYTES[1] - 1)
    assert holding.told(CopyAcked) == sorted([*BOTH, (1, STAMP)])
    assert holding.parity() is None


@pytest.mark.parametrize("part", [Part.HEADER, Part.TABLE, Part.MANIFEST])
def test_what_does_not_prove_a_member_is_not_kept(part: Part) -> None:
    holding = Holding()
    holding.offer_all()
    for rank, range_ in holding.pieces(1) + holding.pieces(2):
        source = holding.slots[(rank, STAMP)]
        data = bytearray(bytes_of(source, range_))
        if rank == 2 and range_.part is part:
            data[3] ^= 1
        span = Span(rank, STAMP, range_.part, range_.offset, range_.length)
        assert holding.room.block_comes(rank, span, bytes(data))
    holding.room.settle()
    assert holding.told(CopyUnavailable) == BOTH
    assert holding.told(CopyAcked) == []
    assert SlotState.SEALED not in holding.views()
    assert holding.room.journal.kinds == ["copy-refused"]


@pytest.mark.parametrize(
    "stop",
    [ParityHolder.end, lambda holder: holder.keep_only([3])],
    ids=["another mesh", "another policy"],
)
def test_what_is_on_its_way_is_given_up(stop: Any) -> None:
    holding = Holding()
    holding.offer_all()
    holding.come(holding.pieces(1))
    stop(holding.holder)
    assert not any(holding.come(holding.pieces(2)))
    assert set(holding.views()) == {SlotState.EMPTY}


def test_what_is_kept_goes_on() -> None:
    holding = Holding()
    holding.offer_all()
    holding.holder.keep_only([MINE])
    assert all(holding.come(holding.pieces(1) + holding.pieces(2)))
    assert holding.told(CopyAcked) == BOTH


def test_the_generation_before_stays_while_the_next_is_on_its_way() -> None:
    holding = Holding()
    holding.offer_all()
    holding.come(holding.pieces(1) + holding.pieces(2))
    holding.offer_all(OTHER)
    holding.come(holding.pieces(1), OTHER)
    slot = holding.parity()
    assert slot is not None
    slot.verify_bytes()
    holding.come(holding.pieces(2), OTHER)
    assert holding.told(CopyAcked) == [(1, STAMP), (1, OTHER), (2, STAMP), (2, OTHER)]
    fresh = holding.parity(OTHER)
    assert fresh is not None
    assert payload_of(fresh)[: holding.contents.stripes.parity_bytes] == holding.expected(OTHER)
