"""Receive: what comes another way than over the wire gets into the slot only when it is what was
expected, and only where nothing is yet."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keepstep.coding.checksum import checksum, pack_table
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.receive import (
    IncomingSnapshot,
    WantedRanges,
    blocks,
    copy_ranges_of,
    meta_ranges_of,
)

BYTES = 5000
BLOCK_BYTES = MEMORY.block_bytes
RIGHT, WRONG = random.Random(1).randbytes(BYTES), random.Random(2).randbytes(BYTES)
STAMP = Stamp(4, 1)


class Coming:
    """A snapshot on its way. `whole`: the one range of its payload."""

    def __init__(self, job_dir: Path) -> None:
        self.slot = Slot.create(MEMORY, slot_path(job_dir, 0, 0), BYTES, 100)
        ranges = copy_ranges_of(BYTES, 2, BLOCK_BYTES)
        self.snapshot = IncomingSnapshot(self.slot, 0, STAMP, BYTES, 2, ranges, lambda: None)
        [self.whole] = blocks(Part.PAYLOAD, BYTES, BLOCK_BYTES)
        self.span = Span(0, STAMP, Part.PAYLOAD, 0, BYTES)

    @property
    def found(self) -> bytes:
        return bytes(self.slot.payload[:BYTES])

    @property
    def missing(self) -> list[BlockRange]:
        return [range_ for range_ in self.snapshot.missing() if range_.part is Part.PAYLOAD]


@pytest.fixture
def coming(tmp_path: Path) -> Coming:
    return Coming(tmp_path)


def test_what_is_not_what_was_expected_is_still_missing(coming: Coming) -> None:
    coming.snapshot.put(coming.whole, WRONG, expected=checksum(RIGHT))
    assert coming.missing == [coming.whole]
    assert not coming.snapshot.in_use
    coming.snapshot.put(coming.whole, RIGHT, expected=checksum(RIGHT))
    assert (coming.found, coming.missing) == (RIGHT, [])


def test_what_is_here_is_not_written_over(coming: Coming) -> None:
    coming.snapshot.put(coming.whole, RIGHT)
    coming.snapshot.put(coming.whole, WRONG)
    assert coming.found == RIGHT


class Prying(bytes):
    """Bytes that look, as they are read, whether a link would get the place that they go to."""

    def seen_by(self, coming: Coming) -> Prying:
        self.coming = coming
        return self

    def __len__(self) -> int:
        assert self.coming.snapshot.place(1, self.coming.span) is None
        assert self.coming.snapshot.in_use
        return super().__len__()


def test_no_link_writes_where_bytes_are_being_put(coming: Coming) -> None:
    coming.snapshot.put(coming.whole, Prying(RIGHT).seen_by(coming))
    assert (coming.found, coming.missing) == (RIGHT, [])


def test_what_is_coming_over_the_wire_is_not_written_over(coming: Coming) -> None:
    place = coming.snapshot.place(1, coming.span)
    assert place is not None
    place[:] = RIGHT
    coming.snapshot.put(coming.whole, WRONG)
    assert coming.missing == [coming.whole]
    coming.snapshot.arrived(1, coming.span, checksum(RIGHT))
    assert (coming.found, coming.missing) == (RIGHT, [])


def test_once_the_table_is_believed_a_block_that_differs_is_still_missing(coming: Coming) -> None:
    [meta] = meta_ranges_of(BYTES, 2, BLOCK_BYTES)
    coming.snapshot.put(meta, bytes(PAGE_BYTES) + pack_table([checksum(RIGHT)]) + b"{}")
    told: list[int] = []
    coming.snapshot.believe_table(lambda node, why: told.append(node))
    for node, data in ((1, WRONG), (2, RIGHT)):
        place = coming.snapshot.place(node, coming.span)
        assert place is not None
        place[:] = data
        coming.snapshot.arrived(node, coming.span, checksum(data))
        assert coming.missing == ([coming.whole] if data is WRONG else [])
    assert told == [1]
    assert (coming.found, coming.snapshot.in_use) == (RIGHT, False)


def test_of_who_is_refused_nothing_is_taken_any_more(coming: Coming) -> None:
    coming.snapshot.refuse(1)
    assert coming.snapshot.place(1, coming.span) is None
    assert coming.snapshot.place(2, coming.span) is not None


def test_a_range_that_is_wanted_of_another_is_taken_of_that_one_alone() -> None:
    """What is still on its way from the first would be taken for the other's."""
    arrivals: list[str] = []
    ranges = WantedRanges(lambda: arrivals.append("it"))
    span = Span(0, STAMP, Part.TABLE, 0, 8)
    wanted = BlockRange(Part.TABLE, 0, 8)
    ranges.want(1, 0, wanted)
    late = ranges.place(1, span)
    ranges.want(2, 0, wanted)
    place = ranges.place(2, span)
    assert late is not None and place is not None
    assert ranges.place(1, span) is None
    late[:] = b"from one"
    ranges.arrived(1, span, 0)
    assert not ranges.has(0, wanted) and not arrivals
    place[:] = b"from two"
    ranges.arrived(2, span, 0)
    assert bytes(ranges.take(0, wanted)) == b"from two" and arrivals == ["it"]


def test_what_has_come_from_one_is_not_taken_for_anothers() -> None:
    ranges = WantedRanges(lambda: None)
    span, wanted = Span(0, STAMP, Part.TABLE, 0, 8), BlockRange(Part.TABLE, 0, 8)
    ranges.want(1, 0, wanted)
    ranges.arrived(1, span, 0)
    ranges.want(2, 0, wanted)
    assert not ranges.has(0, wanted)
