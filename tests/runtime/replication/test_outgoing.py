"""Outgoing: every holder is sent exactly what it needs, whenever its link takes it, and the slot
stands still for as long."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.protection import Assignment
from keepstep.core.redundancy.stripes import stripes_of_snapshots
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.encode import SnapshotSizes, ranges_for
from keepstep.runtime.replication.outgoing import Delivery, OutgoingSnapshot
from keepstep.runtime.replication.receive import range_of
from keepstep.runtime.slot_locks import Pin
from tests.runtime.replication.room import BLOCK_BYTES, MANIFEST, ReplicationRoom, bytes_of

STAMP = Stamp(5, 1)
FLOOR = Stamp(4, 1)
PAYLOAD = random.Random(1).randbytes(5 * BLOCK_BYTES + 100)
COPY = Assignment(0, 0, (1,))
CODED = Assignment(0, 0, (1, 2), (0, 1, 2), 1)


class Sending:
    """Rank 0's snapshot on its way."""

    def __init__(self, assignment: Assignment = COPY) -> None:
        self.room = ReplicationRoom()
        self.room.join()
        slot = self.room.seal(0, STAMP, PAYLOAD)
        self.slot = Slot(self.room.memory, slot.path)  # the rank's own map of it
        assert slot.lock(exclusive=False)
        header = slot.header()
        self.failures: list[str] = []
        self.outgoing = OutgoingSnapshot(
            self.room.links,
            self.room.time,
            assignment,
            STAMP,
            Pin(slot, Slot.unlock),
            header,
            tuple(slot.table(header)),
            lambda outgoing, why: self.failures.append(why),
        )

    def to(self, node: int) -> Delivery:
        return self.outgoing.deliveries[node]

    def begin(self, node: int = 1) -> Delivery:
        delivery = self.to(node)
        self.outgoing.offer(delivery, FLOOR)
        self.outgoing.accepted(delivery)
        self.outgoing.pump(delivery)
        return delivery

    def pump(self, delivery: Delivery, takes: int = 10**9) -> None:
        self.room.net.takes = takes
        self.outgoing.pump(delivery)

    def ranges(self, node: int = 1) -> list[BlockRange]:
        return [range_of(block.span) for block in self.room.net.blocks if block.node == node]

    @property
    def may_be_written(self) -> bool:
        free = self.slot.lock(exclusive=True)
        if free:
            self.slot.unlock()
        return free


block_ranges = st.integers(0, 5).map(
    lambda i: BlockRange(
        Part.PAYLOAD, i * BLOCK_BYTES, min(BLOCK_BYTES, len(PAYLOAD) - i * BLOCK_BYTES)
    )
)


@given(st.lists(block_ranges, max_size=6), st.lists(st.integers(0, 4), max_size=6))
def test_all_that_is_wanted_crosses_once_whenever_the_link_takes_it(
    wanted: list[BlockRange], takes: list[int]
) -> None:
    sending = Sending()
    sending.room.net.takes = 0
    delivery = sending.begin()
    assert sending.outgoing.wanted(delivery, tuple(wanted))
    for count in takes:
        before = len(sending.ranges())
        sending.pump(delivery, count)
        assert len(sending.ranges()) <= before + count
    sending.pump(delivery)
    small = [BlockRange(Part.META, 0, PAGE_BYTES + 6 * 8 + len(MANIFEST))]
    assert sending.ranges() == [*small, *wanted]
    table = sending.slot.table(sending.slot.header())
    for block, range_ in zip(sending.room.net.blocks, sending.ranges(), strict=True):
        assert block.data == bytes_of(sending.slot, range_)
        is_payload = range_.part is Part.PAYLOAD
        assert block.checksum == (table[range_.offset // BLOCK_BYTES] if is_payload else None)


def test_nothing_crosses_before_it_is_accepted() -> None:
    sending = Sending()
    delivery = sending.to(1)
    sending.outgoing.offer(delivery, FLOOR)
    sending.outgoing.pump(delivery)
    assert not sending.outgoing.wanted(delivery, (BlockRange(Part.PAYLOAD, 0, 10),))
    assert sending.room.net.blocks == []
    (offer,) = sending.room.said(CopyOffer, 1)
    header = sending.slot.header()
    assert (offer.rank, offer.stamp, offer.floor) == (0, STAMP, FLOOR)
    assert (offer.payload_bytes, offer.table_checksum) == (len(PAYLOAD), header.table_checksum)


def test_what_was_refused_is_sent_again_from_the_beginning_once_it_is_accepted() -> None:
    sending = Sending()
    delivery = sending.begin()
    first = sending.ranges()
    delivery.acked = True
    sending.outgoing.refused(delivery)
    assert not sending.outgoing.is_acked
    sending.outgoing.accepted(delivery)
    sending.outgoing.pump(delivery)
    assert sending.ranges() == [*first, *first]


def test_a_new_offer_forgets_what_still_waited() -> None:
    sending = Sending()
    sending.room.net.takes = 1
    delivery = sending.begin()
    sending.outgoing.offer(delivery, FLOOR)
    sending.pump(delivery)
    assert len(sending.ranges()) == 1


@pytest.mark.parametrize(
    "strange",
    [
        BlockRange(Part.PAYLOAD, len(PAYLOAD) - 9, 10),
        BlockRange(Part.PARITY, 0, 10),
        BlockRange(Part.HEADER, 0, 10),
    ],
)
def test_only_what_the_payload_has_is_given(strange: BlockRange) -> None:
    sending = Sending()
    delivery = sending.begin()
    before = sending.ranges()
    last = BlockRange(Part.PAYLOAD, len(PAYLOAD) - 10, 10)
    assert sending.outgoing.wanted(delivery, (strange, last))
    assert sending.ranges() == [*before, last]


@given(st.permutations(range(3)))
def test_the_slot_stands_still_until_its_last_block_is_over(order: list[int]) -> None:
    sending = Sending()
    delivery = sending.begin()
    ends = (BlockRange(Part.PAYLOAD, 0, 10), BlockRange(Part.PAYLOAD, len(PAYLOAD) - 10, 10))
    sending.outgoing.wanted(delivery, ends)
    assert len(sending.room.net.blocks) == 3
    assert sending.outgoing.is_moving
    sending.outgoing.end()
    for index in order:
        assert not sending.may_be_written
        sending.room.net.blocks[index].done(None)
    assert not sending.outgoing.is_moving
    assert sending.may_be_written


def test_a_block_that_the_link_does_not_take_holds_nothing() -> None:
    sending = Sending()
    sending.room.net.takes = 0
    sending.begin()
    assert not sending.outgoing.is_moving
    sending.outgoing.end()
    assert sending.may_be_written


@pytest.mark.parametrize(("why", "fails"), [(None, 0), ("not wanted", 0), ("damaged: it is", 1)])
def test_only_damage_is_a_failure_and_the_loop_is_told(why: str | None, fails: int) -> None:
    sending = Sending()
    sending.begin()
    sending.room.net.blocks[0].done(why)
    assert sending.failures == []
    sending.room.settle()
    assert len(sending.failures) == fails


@pytest.mark.parametrize("order", list(permutations(["proven", "size 1", "size 2", "accepted"])))
def test_a_member_sends_its_pieces_once_it_is_proven_and_all_sizes_are_known(
    order: tuple[str, ...],
) -> None:
    sending = Sending(CODED)
    sizes = {rank: SnapshotSizes(400 * rank, 20, BLOCK_BYTES) for rank in (1, 2)}
    own = SnapshotSizes(len(PAYLOAD), len(MANIFEST), BLOCK_BYTES)
    sending.outgoing.offer(sending.to(1), FLOOR)
    for what in order:
        sending.pump(sending.to(1))
        assert sending.room.net.blocks == []
        match what:
            case "proven":
                sending.outgoing.proven()
            case "accepted":
                sending.outgoing.accepted(sending.to(1))
            case _:
                sending.outgoing.announced(int(what[-1]), sizes[int(what[-1])])
    sending.pump(sending.to(1))
    sending.pump(sending.to(2))
    stripes = stripes_of_snapshots((0, 1, 2), 1, [len(PAYLOAD), 400, 800])
    assert sending.ranges(1) == ranges_for(stripes, own, 0, 1)
    assert sending.ranges(2) == []


def test_a_header_that_was_damaged_is_noticed() -> None:
    sending = Sending()
    sending.outgoing.verify_header()
    page = sending.slot.part(Part.HEADER, sending.slot.header())
    page[100] ^= 1
    with pytest.raises(DamageError):
        sending.outgoing.verify_header()
