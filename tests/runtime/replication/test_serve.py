"""Serve: who asks is given the very bytes of the snapshot it named, or hears that they cannot be
had."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyUnavailable
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.encode import ParityContents, SnapshotSizes, contents_of
from keepstep.runtime.replication.receive import WantedRanges
from keepstep.runtime.replication.serve import SnapshotServer
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_HASH,
    MANIFEST,
    VERSION,
    ReplicationRoom,
    bytes_of,
    fill,
    flip,
)

STAMP = Stamp(5, 1)
PAYLOAD = random.Random(3).randbytes(3 * BLOCK_BYTES + 77)
FIRST = BlockRange(Part.PAYLOAD, 0, BLOCK_BYTES)
HEADER = BlockRange(Part.HEADER, 0, PAGE_BYTES)
ASKER = 2


class Serving:
    """Node 0, whose own rank's snapshot lies here."""

    def __init__(self) -> None:
        self.room = ReplicationRoom()
        self.room.join()
        self.own = self.room.seal(0, STAMP, PAYLOAD)
        self.doubts: list[str] = []
        self.server = SnapshotServer(
            self.room.links, self.room.held, lambda: self.doubts.append("look")
        )

    def copy(self, rank: int = 1, payload: bytes = PAYLOAD) -> Slot:
        slot = self.room.held.copies.take(rank, 0, len(payload), 64)
        return fill(slot, rank, STAMP, payload)

    def ask(self, *ranges: BlockRange, rank: int = 0, stamp: Stamp = STAMP) -> None:
        self.server.asked(ASKER, rank, stamp, ranges)

    def arrive(self) -> None:
        """All that is on its way."""
        for block in self.room.net.blocks:
            block.done(None)

    def refused(self) -> list[tuple[int, int, Stamp, int]]:
        self.room.settle()
        told = self.room.sent(CopyUnavailable)
        return [(node, word.rank, word.stamp, word.mesh_version) for node, word in told]

    @property
    def given(self) -> list[bytes]:
        return [block.data for block in self.room.net.blocks]


NO = (ASKER, 0, STAMP, VERSION)
within = st.integers(0, len(PAYLOAD) - 1).flatmap(
    lambda at: st.builds(
        BlockRange, st.just(Part.PAYLOAD), st.just(at), st.integers(1, len(PAYLOAD) - at)
    )
)

whole = st.integers(0, 3).map(
    lambda i: BlockRange(
        Part.PAYLOAD, i * BLOCK_BYTES, min(BLOCK_BYTES, len(PAYLOAD) - i * BLOCK_BYTES)
    )
)


@given(st.lists(within | whole, min_size=1, max_size=6), st.booleans(), st.integers(0, 6))
def test_the_bytes_that_were_asked_for_cross_with_the_checksums_of_the_table(
    ranges: list[BlockRange], is_copy: bool, takes: int
) -> None:
    serving = Serving()
    rank = 1 if is_copy else 0
    slot = serving.copy() if is_copy else serving.own
    serving.room.net.takes = takes
    serving.ask(*ranges, rank=rank)
    serving.room.net.takes = 100
    serving.server.writable(1)  # of another node's link
    assert len(serving.given) == min(takes, len(ranges))
    serving.server.writable(ASKER)
    assert [block.node for block in serving.room.net.blocks] == [ASKER] * len(ranges)
    table = slot.table(slot.header())
    for block, (_, offset, length) in zip(serving.room.net.blocks, ranges, strict=True):
        assert block.span == Span(rank, STAMP, Part.PAYLOAD, offset, length)
        assert block.data == PAYLOAD[offset : offset + length]
        is_whole = offset % BLOCK_BYTES == 0 and length == min(BLOCK_BYTES, len(PAYLOAD) - offset)
        assert block.checksum == (table[offset // BLOCK_BYTES] if is_whole else None)
    assert serving.refused() == []


@pytest.mark.parametrize("range_", [FIRST, HEADER, BlockRange(Part.PARITY, 0, 64)])
@pytest.mark.parametrize("state", ["none", "written", "empty", "another stamp"])
def test_nothing_is_given_but_what_is_sealed(state: str, range_: BlockRange) -> None:
    serving = Serving()
    match state:
        case "none":
            serving.room.memory.remove(serving.own.path)
        case "written":
            serving.own.begin(JOB_HASH, 0, 3, 0, STAMP)
        case "empty":
            serving.own.void()
    serving.ask(range_, stamp=Stamp(5, 0) if state == "another stamp" else STAMP)
    assert serving.given == []
    assert [told[:2] for told in serving.refused()] == [(ASKER, 0)]


def test_a_copy_that_is_replaced_meanwhile_is_told_and_none_of_the_new_bytes_cross() -> None:
    serving = Serving()
    copy = serving.copy()
    serving.room.net.takes = 1
    serving.ask(FIRST, FIRST, rank=1)
    fill(copy, 1, Stamp(6, 1), bytes(len(PAYLOAD)))
    serving.room.net.takes = 100
    serving.server.writable(ASKER)
    assert serving.given == [PAYLOAD[:BLOCK_BYTES]]
    assert serving.refused() == [(ASKER, 1, STAMP, VERSION)]
    serving.server.writable(ASKER)
    assert len(serving.refused()) == 1


def test_the_header_of_a_copy_that_is_given_up_on_its_way_crosses_as_it_was() -> None:
    """What waits for a slow link crosses as it lies there by then, and no table names a header's
    checksum. A blank one would end the asker's fetch, where another holder has the same."""
    serving = Serving()
    copy = serving.copy()
    page = bytes_of(copy, HEADER)
    serving.ask(HEADER, rank=1)
    copy.void()
    [waiting] = serving.room.net.blocks
    assert bytes(waiting.source) == page


def test_an_own_slot_stands_still_while_it_is_given_and_no_longer() -> None:
    """It is asked for while its rank trains, too: by a holder, or to mend a damaged one."""
    serving = Serving()
    rank_map = Slot(serving.room.memory, serving.own.path)
    serving.room.net.takes = 1
    serving.ask(FIRST, FIRST)
    assert not rank_map.lock(exclusive=True)
    serving.room.net.takes = 100
    serving.server.writable(ASKER)
    assert len(serving.given) == 2 and not rank_map.lock(exclusive=True)
    serving.arrive()
    assert rank_map.lock(exclusive=True)


def test_nobody_holds_an_own_slot_when_all_have_what_they_need() -> None:
    serving = Serving()
    rank_map = Slot(serving.room.memory, serving.own.path)
    serving.room.net.takes = 1
    serving.ask(FIRST, FIRST)
    serving.server.release()
    assert not rank_map.lock(exclusive=True), "a block of it is on its way"
    serving.arrive()
    assert rank_map.lock(exclusive=True)


def test_nobody_holds_an_own_slot_for_an_asker_that_is_gone() -> None:
    serving = Serving()
    rank_map = Slot(serving.room.memory, serving.own.path)
    serving.room.net.takes = 1
    serving.ask(FIRST, FIRST)
    serving.arrive()
    serving.server.link_is_dead(1)  # another node's
    assert not rank_map.lock(exclusive=True)
    serving.server.link_is_dead(ASKER)
    assert rank_map.lock(exclusive=True)
    serving.room.net.takes = 100
    serving.server.writable(ASKER)
    assert len(serving.given) == 1 and serving.refused() == []


@given(st.integers(0, 2 * len(PAYLOAD)), st.integers(1, 2 * len(PAYLOAD)))
def test_what_is_not_within_the_snapshot_is_refused(offset: int, length: int) -> None:
    serving = Serving()
    serving.ask(BlockRange(Part.PAYLOAD, offset, length))
    is_within = offset + length <= len(PAYLOAD)
    assert len(serving.given) == is_within
    assert serving.refused() == ([] if is_within else [NO])


def test_damage_on_the_way_is_told_and_the_rest_is_given_up() -> None:
    serving = Serving()
    serving.room.net.takes = 1
    serving.ask(FIRST, FIRST)
    serving.room.net.blocks[0].done("damaged: it is not what the table names")
    assert serving.refused() == [NO]
    serving.room.net.takes = 100
    serving.server.writable(ASKER)
    assert len(serving.given) == 1
    assert serving.doubts == ["look"], "it may have lain here so, and would be offered again"


def test_a_block_that_nobody_wants_any_more_is_no_failure() -> None:
    serving = Serving()
    serving.ask(FIRST)
    serving.room.net.blocks[0].done("not wanted")
    assert serving.refused() == [] and serving.doubts == []


def test_an_asker_of_a_phase_that_is_over_hears_nothing() -> None:
    serving = Serving()
    serving.room.net.takes = 1
    serving.ask(FIRST, FIRST)
    serving.server.release()
    serving.room.net.blocks[0].done("damaged: it is not what the table names")
    serving.room.net.takes = 100
    serving.server.writable(ASKER)
    assert serving.refused() == []
    assert len(serving.given) == 1


def a_parity(serving: Serving) -> tuple[Slot, ParityContents]:
    """Of ranks 1 and 2, kept by rank 0: any bytes do."""
    sizes = {rank: SnapshotSizes(900, len(MANIFEST), BLOCK_BYTES) for rank in range(3)}
    contents = contents_of(sizes, (0, 1, 2), 1, 0)
    text = contents.to_text()
    slot = serving.room.held.parities.take(0, 0, contents.nbytes, len(text))
    slot.begin(JOB_HASH, 0, 3, 0, STAMP)
    slot.payload[: contents.nbytes] = random.Random(4).randbytes(contents.nbytes)
    slot.seal(slot.write_table(contents.nbytes, text), "00" * 16, 0.0, 1)
    return slot, contents


def test_a_parity_is_given_and_what_lies_beside_it_of_the_others() -> None:
    serving = Serving()
    slot, contents = a_parity(serving)
    serving.ask(BlockRange(Part.PARITY, 64, 100))
    serving.ask(BlockRange(Part.TABLE, 8, 8), BlockRange(Part.MANIFEST, 0, 5), rank=2)
    payload = bytes(slot.payload)
    table_at, _ = contents.where(2, Part.TABLE)
    manifest_at, _ = contents.where(2, Part.MANIFEST)
    assert serving.given == [
        payload[64:164],
        payload[table_at + 8 : table_at + 16],
        payload[manifest_at : manifest_at + 5],
    ]
    serving.ask(FIRST, rank=2)
    serving.ask(BlockRange(Part.MANIFEST, 0, 5), rank=2, stamp=Stamp(6, 1))
    serving.ask(BlockRange(Part.PARITY, 0, 5), rank=1)
    assert len(serving.given) == 3
    assert len(serving.refused()) == 3


@given(within)
def test_this_node_itself_takes_what_it_wants_without_a_link(wanted: BlockRange) -> None:
    serving = Serving()
    arrivals: list[Path] = []
    taker = WantedRanges(lambda: arrivals.append(serving.own.path))
    taker.want(0, 0, wanted)
    serving.server.copy_here(0, STAMP, wanted, taker, 0)
    assert len(arrivals) == 1
    assert bytes(taker.take(0, wanted)) == bytes_of(serving.own, wanted)
    assert serving.given == []


def test_this_node_itself_is_not_given_what_was_damaged_here() -> None:
    """It has no link whose other end would tell: so it was offered to itself again and again."""
    serving = Serving()
    flip(serving.room.memory, serving.own.path, PAGE_BYTES + 5)
    arrivals: list[str] = []
    taker = WantedRanges(lambda: arrivals.append("it"))
    taker.want(0, 0, FIRST)
    with pytest.raises(DamageError, match="damaged here"):
        serving.server.copy_here(0, STAMP, FIRST, taker, 0)
    assert (arrivals, serving.doubts) == ([], ["look"])
    assert serving.own.lock(exclusive=True), "it is pinned still"


def test_this_node_itself_hears_at_once_what_it_cannot_have() -> None:
    serving = Serving()
    taker = WantedRanges(lambda: None)
    with pytest.raises(LookupError):
        serving.server.copy_here(0, Stamp(6, 1), FIRST, taker, 0)
