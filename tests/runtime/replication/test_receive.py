"""Receive: what comes another way than over the wire gets into the slot only when it is what was
expected, and only where nothing is yet."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keepstep.coding.checksum import checksum
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.receive import IncomingSnapshot, blocks, copy_ranges_of

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
