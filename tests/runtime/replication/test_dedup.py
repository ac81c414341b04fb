"""Dedup: a holder takes from its own ranks what it already has, proves it, and asks for nothing
else twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keepstep.coding.checksum import block_checksums
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Part
from keepstep.runtime.replication.dedup import BlockDedup, older_copy, take_unchanged
from keepstep.runtime.replication.receive import IncomingSnapshot, copy_ranges_of
from keepstep.runtime.slot_locks import OwnSlots

BLOCK_BYTES = 4096
STAMP, NEXT = Stamp(7, 1), Stamp(8, 1)
TAIL = 1000
BYTES = 2 * BLOCK_BYTES + TAIL


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


MEMORY = SmallBlocks()


def state(seed: int) -> bytes:
    return random.Random(seed).randbytes(BYTES)


def seal(job_dir: Path, rank: int, payload: bytes, stamp: Stamp = STAMP) -> Slot:
    slot = Slot.create(MEMORY, slot_path(job_dir, rank, stamp.step % 2), len(payload), 100)
    slot.begin(bytes(16), rank, 4, 1, stamp)
    slot.payload[: len(payload)] = payload
    slot.seal(slot.write_table(len(payload), b"{}"), "00" * 16, 0.5, 1)
    return slot


class Arriving:
    """A snapshot that is on its way, of which only the table is known."""

    def __init__(self, job_dir: Path, payload: bytes, stamp: Stamp = STAMP) -> None:
        self.slot = Slot.create(MEMORY, slot_path(job_dir / "held", 9, 0), len(payload), 100)
        self.table = tuple(block_checksums(memoryview(payload), BLOCK_BYTES))
        ranges = copy_ranges_of(len(payload), 2, BLOCK_BYTES)
        self.whole = IncomingSnapshot(self.slot, 9, stamp, len(payload), 2, ranges, lambda: None)

    def taken(self) -> bytes:
        return bytes(self.slot.payload[:BYTES])


def test_what_is_here_is_taken_and_the_rest_is_asked_for(tmp_path: Path) -> None:
    ours, other = state(1), state(2)
    seal(tmp_path, 0, other).close()
    seal(tmp_path, 1, ours).close()
    wanted = ours[:BLOCK_BYTES] + state(3)[BLOCK_BYTES : 2 * BLOCK_BYTES] + other[2 * BLOCK_BYTES :]
    arriving = Arriving(tmp_path, wanted)
    missing = BlockDedup(OwnSlots(MEMORY, tmp_path), BLOCK_BYTES).take_over(
        arriving.whole, arriving.table, range(2), STAMP
    )
    assert missing == [(Part.PAYLOAD, BLOCK_BYTES, BLOCK_BYTES)]
    assert (
        arriving.taken()[:BLOCK_BYTES] == ours[:BLOCK_BYTES]
        and arriving.taken()[2 * BLOCK_BYTES :] == other[2 * BLOCK_BYTES :]
    )


def test_one_block_may_be_wanted_often(tmp_path: Path) -> None:
    seal(tmp_path, 0, bytes(BYTES)).close()
    arriving = Arriving(tmp_path, bytes(BYTES))
    assert (
        BlockDedup(OwnSlots(MEMORY, tmp_path), BLOCK_BYTES).take_over(
            arriving.whole, arriving.table, [0], STAMP
        )
        == []
    )


def test_a_block_of_another_length_is_no_twin(tmp_path: Path) -> None:
    payload = state(1)
    seal(tmp_path, 0, payload[: BLOCK_BYTES + 10]).close()
    arriving = Arriving(tmp_path, payload)
    missing = BlockDedup(OwnSlots(MEMORY, tmp_path), BLOCK_BYTES).take_over(
        arriving.whole, arriving.table, [0], STAMP
    )
    assert missing == [
        (Part.PAYLOAD, BLOCK_BYTES, BLOCK_BYTES),
        (Part.PAYLOAD, 2 * BLOCK_BYTES, TAIL),
    ]


@pytest.mark.parametrize("what", ["payload", "overwritten", "removed", "shorter"])
def test_what_changed_since_its_table_was_read_is_not_taken(tmp_path: Path, what: str) -> None:
    payload = state(1)
    slot = seal(tmp_path, 0, payload)
    twins = BlockDedup(OwnSlots(MEMORY, tmp_path), BLOCK_BYTES)
    first = Arriving(tmp_path, payload)
    assert twins.take_over(first.whole, first.table, [0], STAMP) == []
    if what == "payload":
        slot.payload[2 * BLOCK_BYTES + 5] ^= 1
    elif what == "overwritten":
        slot.begin(bytes(16), 0, 4, 1, NEXT)
    elif what == "removed":
        MEMORY.remove(slot.path)
    else:
        seal(tmp_path, 0, payload[: 2 * BLOCK_BYTES]).close()
    again = Arriving(tmp_path, payload)
    missing = twins.take_over(again.whole, again.table, [0], STAMP)
    lacks = [(Part.PAYLOAD, 2 * BLOCK_BYTES, TAIL)]
    everything = [(Part.PAYLOAD, 0, BLOCK_BYTES), (Part.PAYLOAD, BLOCK_BYTES, BLOCK_BYTES), *lacks]
    assert missing == (lacks if what in ("payload", "shorter") else everything)
    slot.close()


def test_a_rank_that_comes_later_is_looked_at_and_another_generation_is_another_matter(
    tmp_path: Path,
) -> None:
    payload, later = state(1), state(2)
    twins = BlockDedup(OwnSlots(MEMORY, tmp_path), BLOCK_BYTES)
    early = Arriving(tmp_path, payload)
    assert len(twins.take_over(early.whole, early.table, range(2), STAMP)) == 3, (
        "nothing is sealed yet"
    )
    seal(tmp_path, 0, payload).close()
    arriving = Arriving(tmp_path, payload)
    assert twins.take_over(arriving.whole, arriving.table, range(2), STAMP) == []
    seal(tmp_path, 0, later, NEXT).close()
    arriving = Arriving(tmp_path, later, NEXT)
    assert twins.take_over(arriving.whole, arriving.table, range(2), NEXT) == []
    arriving = Arriving(tmp_path, payload, NEXT)
    assert len(twins.take_over(arriving.whole, arriving.table, range(2), NEXT)) == 3, (
        "of that stamp nothing is the same"
    )


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("what", ["begun", "damaged", "empty"])
def test_of_older_copies_the_newest_whole_one_is_compared_with(
    tmp_path: Path, what: str, order: int
) -> None:
    ours, wanted = state(1), state(1)[:BLOCK_BYTES] + state(2)[BLOCK_BYTES:]
    held = tmp_path / "held"
    slots = [Slot.create(MEMORY, slot_path(held, 0, index), BYTES, 100) for index in range(3)]
    for slot, step, payload in zip(slots, (3, 5, 9), (wanted, ours, wanted), strict=True):
        slot.begin(bytes(16), 0, 4, 1, Stamp(step, 1))
        slot.payload[:BYTES] = payload
        slot.seal(slot.write_table(BYTES, b"{}"), "00" * 16, 0.5, 1)
    if what == "begun":
        slots[2].begin(bytes(16), 0, 4, 1, Stamp(10, 1))
    elif what == "empty":
        slots[2].void()
    else:
        with slots[2].path.open("r+b") as file:
            file.write(b"x" * 64)
    older = older_copy(slots[::order])
    assert older is not None and bytes(older.payload) == ours
    arriving = Arriving(tmp_path / "elsewhere", wanted)
    take_unchanged(arriving.whole, arriving.table, older)
    assert arriving.taken() == ours[:BLOCK_BYTES] + bytes(BYTES - BLOCK_BYTES)
    assert older_copy(slots[2:]) is None and older_copy([]) is None
