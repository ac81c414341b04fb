"""Snapshots of which ranks of their node keep blocks for each other: what is not there is neither
sent, nor received, nor given, and a copy has the holes of its owner's slot."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from keepstep.coding.checksum import checksum
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.errors import DamageError
from keepstep.model.kept import kept_of
from keepstep.model.shares import Share
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.ports import Memory
from keepstep.runtime.replication.fetch import replace_bytes
from keepstep.runtime.replication.receive import IncomingSnapshot, make_holes, ranges_of
from tests.runtime.replication.room import BLOCK_BYTES, JOB_DIR, a_memory

JOB = bytes(range(16))
STAMP = Stamp(7, 1)
PAYLOAD = bytes(range(7)) * BLOCK_BYTES  # and no two blocks are the same
PAYLOAD = PAYLOAD[: 6 * BLOCK_BYTES + BLOCK_BYTES // 2]
MANIFEST = b"{}"
LACKING = frozenset({1, 2, 4})


def a_slot(memory: Memory, index: int = 0) -> Slot:
    slot = Slot.create(memory, slot_path(JOB_DIR, 3, index), len(PAYLOAD), 100)
    slot.begin(JOB, 3, 4, 0, STAMP)
    return slot


def an_owners(memory: Memory, lacking: frozenset[int] = LACKING) -> Slot:
    """A sealed one, of rank 3."""
    slot = a_slot(memory)
    slot.shed(lacking)
    sums = {}
    for block in range(7):
        data = PAYLOAD[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        sums[block] = checksum(data)
        if block not in lacking:
            slot.payload[block * BLOCK_BYTES : block * BLOCK_BYTES + len(data)] = data
    header = slot.write_table(len(PAYLOAD), MANIFEST, sums)
    slot.seal(header, "00" * 16, 0.0, 1, Share(5, 2))
    return slot


def received(
    memory: Memory, owner: Slot, header: SlotHeader, lacking: frozenset[int]
) -> IncomingSnapshot:
    slot = a_slot(memory, 1)
    make_holes(slot, len(PAYLOAD), lacking)
    ranges = ranges_of(len(PAYLOAD), len(MANIFEST), BLOCK_BYTES, lacking)
    incoming = IncomingSnapshot(
        slot, 3, STAMP, len(PAYLOAD), len(MANIFEST), ranges, lambda: None, lacking=lacking
    )
    for range_ in ranges:
        part, offset, length = range_
        incoming.put(range_, owner.part(part, header)[offset : offset + length])
    assert not incoming.missing()
    return incoming


def test_a_copy_has_the_holes_of_its_owners_slot_and_proves() -> None:
    memory = a_memory()
    owner = an_owners(memory)
    incoming = received(memory, owner, owner.header(), LACKING)
    incoming.seal(JOB)
    header, _ = incoming.slot.verify_bytes()
    assert incoming.slot.lacking() == LACKING and header.share == Share(5, 2)
    for block in LACKING:
        assert not any(incoming.slot.payload[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])


@pytest.mark.parametrize("lacking", [frozenset({1}), frozenset({1, 2, 3}), frozenset[int]()])
def test_what_lacks_other_blocks_than_was_offered_is_refused(lacking: frozenset[int]) -> None:
    memory = a_memory()
    owner = an_owners(memory)
    incoming = received(memory, owner, owner.header(), lacking)
    with pytest.raises(DamageError, match="lacks 3, or others"):
        incoming.seal(JOB)


@pytest.mark.parametrize("lacking", [{6}, {7}, {1, 3000}])
def test_a_block_that_is_not_full_or_not_there_is_nobodys_to_leave(lacking: Iterable[int]) -> None:
    slot = a_slot(a_memory())
    with pytest.raises(DamageError, match="that it lacks block"):
        make_holes(slot, len(PAYLOAD), frozenset(lacking))


def test_a_slot_is_mended_around_its_holes() -> None:
    memory = a_memory()
    owner = an_owners(memory)
    incoming = received(memory, owner, owner.header(), LACKING)
    incoming.seal(JOB)
    owner.payload[0] ^= 1
    assert replace_bytes(memory, owner, incoming.slot.path) is None
    owner.verify_bytes()
    assert owner.lacking() == LACKING


def test_a_slot_with_holes_is_not_mended_by_what_has_none() -> None:
    """Memory that was given up may not be there any more."""
    memory = a_memory()
    whole = an_owners(memory, frozenset())
    incoming = received(memory, whole, whole.header(), frozenset())
    incoming.seal(JOB)
    slot = a_slot(memory)
    slot.shed(LACKING)
    why = replace_bytes(memory, slot, incoming.slot.path)
    assert why is not None and "holes" in why


def test_what_is_kept_is_given_one_block_behind_the_other() -> None:
    owner = an_owners(a_memory())
    header = owner.header()
    kept = kept_of(len(PAYLOAD), BLOCK_BYTES, header.lacking)
    expected = b"".join(
        PAYLOAD[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        for block in range(7)
        if block not in LACKING
    )
    assert bytes(owner.kept(kept, 0, kept.nbytes)) == expected
    within = BLOCK_BYTES // 2
    assert bytes(owner.kept(kept, within, 10)) == expected[within : within + 10]
