"""One pass: the bytes are where they belong, and what is known of them is what a second pass would
have found, whenever somebody waits."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.coding.checksum import block_checksums
from keepstep.edge.shm import copy_table
from keepstep.edge.shm.copy_table import CopyTable, SlotCopy
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.one_pass import copy_and_hash
from keepstep.edge.shm.slot import Slot
from keepstep.model.layout import ALIGN_BYTES
from keepstep.model.units import round_up

BLOCK_BYTES = 4096
WINDOW_BYTES = 1024
WINDOWS = 4  # of a block


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


MEMORY = SmallBlocks()
SMALL_WINDOWS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slot:
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", WINDOW_BYTES)
    return Slot.create(MEMORY, tmp_path / "slot-0", 10 * BLOCK_BYTES, 100)


def awaited_after(times: int) -> Callable[[], bool]:
    asked = 0

    def is_awaited() -> bool:
        nonlocal asked
        asked += 1
        return asked > times

    return is_awaited


@SMALL_WINDOWS
@given(
    sizes=st.lists(st.integers(1, 2 * BLOCK_BYTES), max_size=6),
    gaps=st.lists(st.integers(0, 600), min_size=6, max_size=6),
    patience=st.integers(0, 40),
    not_yet=st.sets(st.integers(0, 9)),
    seed=st.integers(0, 99),
)
def test_bytes_and_checksums(
    slot: Slot,
    sizes: list[int],
    gaps: list[int],
    patience: int,
    not_yet: set[int],
    seed: int,
) -> None:
    chance = random.Random(seed)
    slot.payload[:] = expected = bytearray(chance.randbytes(len(slot.payload)))
    sources = [ctypes.create_string_buffer(chance.randbytes(nbytes), nbytes) for nbytes in sizes]
    copies, end = [], 0
    for source, gap in zip(sources, gaps, strict=False):
        at = round_up(end + gap, ALIGN_BYTES)
        if at - end < ALIGN_BYTES:  # nobody's
            slot.payload[end:at] = expected[end:at] = bytes(at - end)
        end = at + len(source)
        expected[at:end] = source.raw
        copies.append(SlotCopy(at, ctypes.addressof(source), len(source)))
    chance.shuffle(copies)
    half = len(copies) // 2
    tables = [CopyTable(copies[:half]), CopyTable(copies[half:])]
    end = min(end + 100, slot.capacity)
    known = copy_and_hash(slot, tables, end, not_yet, awaited_after(patience))
    assert slot.payload == expected
    right = block_checksums(memoryview(expected)[:end], BLOCK_BYTES)
    if patience >= WINDOWS * len(right):
        assert set(known) == set(range(len(right))) - not_yet
    assert known == {block: right[block] for block in known}
    assert not set(known) & not_yet
    assert patience or not known


@SMALL_WINDOWS
@given(
    sizes=st.lists(st.integers(1, 3 * BLOCK_BYTES), max_size=6),
    gaps=st.lists(st.integers(0, 600), min_size=6, max_size=6),
    patience=st.integers(0, 40),
    lacking=st.sets(st.integers(0, 9)),
    seed=st.integers(0, 99),
)
def test_what_is_lacking_is_hashed_where_it_lies_and_never_written(
    slot: Slot,
    sizes: list[int],
    gaps: list[int],
    patience: int,
    lacking: set[int],
    seed: int,
) -> None:
    chance = random.Random(seed)
    slot.payload[:] = before = bytearray(len(slot.payload))
    whole = bytearray(len(slot.payload))
    sources = [ctypes.create_string_buffer(chance.randbytes(nbytes), nbytes) for nbytes in sizes]
    copies, end = [], 0
    for source, gap in zip(sources, gaps, strict=False):
        at = end + gap
        if at + len(source) > len(whole):
            break
        end = at + len(source)
        whole[at:end] = source.raw
        copies.append(SlotCopy(at, ctypes.addressof(source), len(source)))
    chance.shuffle(copies)
    blocks = range(end // BLOCK_BYTES)  # of which all is tensors, or between them
    lacking &= set(blocks)
    half = len(copies) // 2
    tables = [CopyTable(copies[:half]), CopyTable(copies[half:])]
    known = copy_and_hash(slot, tables, end, set(), awaited_after(patience), lacking)
    right = block_checksums(memoryview(whole)[:end], BLOCK_BYTES)
    assert lacking <= set(known) and known == {block: right[block] for block in known}
    for block in range(-(-end // BLOCK_BYTES)):
        at = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
        assert slot.payload[at] == (before if block in lacking else whole)[at]
