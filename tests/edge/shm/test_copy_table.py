"""Copy table: however copies are joined, cut and made at once, the bytes are those of one copy
after the other, and what cannot be read costs an error, not the process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.edge.shm import copy_table, memory
from keepstep.edge.shm.copy_table import CopyTable, SlotCopy
from keepstep.edge.shm.memory import MEMORY, copy
from keepstep.edge.shm.slot import Slot
from keepstep.model.layout import ALIGN_BYTES
from keepstep.model.units import KIB, MIB, PAGE_BYTES, round_up

CAPACITY = 64 * KIB
SMALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot.create(MEMORY, tmp_path / "slot-0", CAPACITY, 100)
    yield made
    made.close()


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", 4 * KIB)
    monkeypatch.setattr(copy_table, "GATHERED_BYTES", 1000)
    monkeypatch.setattr(copy_table, "MOST_RANGES", 16)
    monkeypatch.setattr(memory, "MOST_RANGES", 16)


def scattered(
    source: int, chance: random.Random, sizes: list[int], gaps: list[int]
) -> list[SlotCopy]:
    """Copies to aligned places, in no order, some of them neighbours in both."""
    copies, at, place = [], 0, source
    for nbytes, gap in zip(sizes, gaps, strict=False):
        at = round_up(at + gap, ALIGN_BYTES)
        place += gap + -gap % ALIGN_BYTES if chance.random() < 0.5 else chance.randrange(99)
        copies.append(SlotCopy(at, place, nbytes))
        at, place = at + nbytes, place + nbytes
    chance.shuffle(copies)
    return copies


@SMALL
@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 60, 64, 128, 999, 1000, 5000]), max_size=40),
    gaps=st.lists(st.sampled_from([0, 0, 0, 1, 64, 200]), min_size=40, max_size=40),
    seed=st.integers(0, 99),
)
@pytest.mark.usefixtures("small_limits")
def test_the_bytes_are_those_of_one_copy_after_the_other(
    slot: Slot, sizes: list[int], gaps: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    data = ctypes.create_string_buffer(chance.randbytes(2 * CAPACITY), 2 * CAPACITY)
    copies = [c for c in scattered(ctypes.addressof(data), chance, sizes, gaps) if c.end < CAPACITY]
    noise = chance.randbytes(CAPACITY)
    slot.payload[:] = noise
    for one in copies:
        copy(slot.payload_address + one.offset, one.source, one.nbytes)
    expected = bytearray(slot.payload)
    slot.payload[:] = noise
    table = CopyTable(copies)
    table.make(slot)
    found = bytes(slot.payload)
    for one, following in zip(sorted(copies), sorted(copies)[1:], strict=False):
        between = range(one.end, following.offset)
        if len(between) < ALIGN_BYTES:  # nobody's: left as they were, or zeros
            zeros = [at for at in between if found[at] != expected[at]]
            assert not any(found[at] for at in zeros)
            for at in zeros:
                expected[at] = 0
    assert found == expected
    offsets = [move.offset for move in table.moves]
    assert offsets == sorted(offsets)
    for move in table.moves:
        last = move.copies[-1]
        assert (last.end - 1) // (4 * KIB) == move.offset // (4 * KIB), "across a window's edge"


def test_many_small_ones_are_few_calls(tmp_path: Path) -> None:
    many = 5000
    data = ctypes.create_string_buffer(os.urandom(many * 32), many * 32)
    copies = [SlotCopy(64 * i, ctypes.addressof(data) + 32 * i, 32) for i in range(many)]
    table = CopyTable(copies)
    assert len(table.moves) == -(-2 * many // memory.MOST_RANGES)
    slot = Slot.create(MEMORY, tmp_path / "slot-0", MIB, 100)
    table.make(slot)
    assert all(
        slot.payload[64 * i : 64 * i + 64] == data.raw[32 * i : 32 * i + 32] + bytes(32)
        for i in range(many)
    )
    slot.close()


def test_neighbours_in_both_places_are_one_copy() -> None:
    halves = [SlotCopy(64, 1000, 64), SlotCopy(128, 1064, 100)]
    assert [move.copies for move in CopyTable(halves).moves] == [(SlotCopy(64, 1000, 164),)]
    apart = [SlotCopy(64, 1000, 64), SlotCopy(128, 1065, 100)]
    assert [move.copies for move in CopyTable(apart).moves] == [tuple(apart)]


def unmapped() -> int:
    """An address where nothing is."""
    held = mmap.mmap(-1, PAGE_BYTES)
    anchor = ctypes.c_char.from_buffer(held)
    address = ctypes.addressof(anchor)
    del anchor
    held.close()
    return address


@pytest.mark.parametrize("first", [0, 3])
def test_what_is_no_memory_any_more_is_an_error(slot: Slot, first: int) -> None:
    data = ctypes.create_string_buffer(64)
    nothing = unmapped()
    copies = [
        SlotCopy(64 * i, nothing if i == first else ctypes.addressof(data), 64) for i in range(8)
    ]
    with pytest.raises(OSError) as caught:
        CopyTable(copies).make(slot)
    assert caught.value.errno == errno.EFAULT


def test_a_limit_on_files_is_none_on_copies(slot: Slot) -> None:
    data = ctypes.create_string_buffer(os.urandom(512), 512)
    copies = [SlotCopy(128 * i, ctypes.addressof(data) + 64 * (7 - i), 64) for i in range(8)]
    copies += [SlotCopy(128 * i + 64, ctypes.addressof(data), 10) for i in range(8)]
    table = CopyTable(copies)
    assert any(move.ranges for move in table.moves)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            ranges = next(move.ranges for move in table.moves if move.ranges)
            slot.gather(0, ranges.address, ranges.count)
        assert caught.value.errno == errno.EFBIG
        table.make(slot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for one in copies:
        at = one.source - ctypes.addressof(data)
        assert slot.payload[one.offset : one.end] == data.raw[at : at + one.nbytes]


def test_a_closed_slots_descriptor_is_nobody_elses(tmp_path: Path) -> None:
    slot = Slot.create(MEMORY, tmp_path / "slot-0", CAPACITY, 100)
    data = ctypes.create_string_buffer(b"x" * 64, 64)
    copies = [SlotCopy(64 * i, ctypes.addressof(data), 60) for i in range(8)]
    slot.close()
    other = [os.open(tmp_path / f"other-{i}", os.O_RDWR | os.O_CREAT) for i in range(3)]
    with pytest.raises(OSError) as caught:
        CopyTable(copies).make(slot)
    assert caught.value.errno == errno.EBADF
    assert [os.fstat(fd).st_size for fd in other] == [0, 0, 0]
    for fd in other:
        os.close(fd)


def test_a_slot_that_is_closed_under_a_copy_keeps_its_descriptor_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot.create(MEMORY, tmp_path / "slot-0", CAPACITY, 100)
    data = ctypes.create_string_buffer(b"x" * 64, 64)
    seen: list[bool] = []

    class Libc:
        def pwritev(self, fd: int, *_: int) -> int:
            before = os.fstat(fd).st_ino
            slot.close()
            other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
            seen.append(os.fstat(fd).st_ino == before)
            os.close(other)
            return 8 * 64 - 4

    monkeypatch.setattr(memory, "_libc", Libc())
    CopyTable([SlotCopy(64 * i, ctypes.addressof(data), 60) for i in range(8)]).make(slot)
    assert seen == [True]
