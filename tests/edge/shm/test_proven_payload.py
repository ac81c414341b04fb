"""Proven payload: the slot's bytes in any order and size, and never one of a damaged block."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.proven_payload import ProvenPayload
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES

NBYTES = 2 * BLOCK_BYTES + 12345


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot.create(MEMORY, tmp_path / "slot-0", NBYTES, 4096)
    made.begin(bytes(16), 0, 1, 1, Stamp(7, 1))
    made.payload[:NBYTES] = random.Random(1).randbytes(NBYTES)
    layout = lay_out([TensorSpec("w", "uint8", (NBYTES,), NBYTES)])
    text = json.dumps(layout.to_json()).encode()
    made.seal(made.write_table(NBYTES, text), layout.hash(), 0.5, wall_ns=1)
    yield made
    made.close()


def test_any_span_in_any_order(slot: Slot) -> None:
    payload, rng = ProvenPayload(slot), random.Random(2)
    whole = bytes(slot.payload[:NBYTES])
    spans = [(0, NBYTES), (BLOCK_BYTES - 5, 10), (NBYTES - 1, 1), (3, 0)]
    spans += [(at := rng.randrange(NBYTES), rng.randrange(NBYTES - at)) for _ in range(20)]
    for at, nbytes in spans:
        target = bytearray(nbytes)
        payload.read_into(at, memoryview(target))
        assert target == whole[at : at + nbytes]
    payload.close()


@pytest.mark.parametrize("block", range(3))
def test_no_byte_of_a_damaged_block(slot: Slot, block: int) -> None:
    slot.payload[block * BLOCK_BYTES + 100] ^= 8
    payload = ProvenPayload(slot)
    for other in {0, 1, 2} - {block}:
        payload.read_into(other * BLOCK_BYTES, memoryview(bytearray(10)))
    with pytest.raises(DamageError, match=f"block {block}"):
        payload.read_into(block * BLOCK_BYTES, memoryview(bytearray(10)))
    payload.close()


def test_a_file_that_was_cut_short_is_damage(slot: Slot) -> None:
    payload = ProvenPayload(slot)
    with open(slot.path, "r+b") as file:
        file.truncate(PAGE_BYTES + BLOCK_BYTES + 100)
    payload.read_into(0, memoryview(bytearray(10)))
    with pytest.raises(DamageError, match="block 1"):
        payload.read_into(BLOCK_BYTES, memoryview(bytearray(10)))
    payload.close()


def test_a_slot_that_was_replaced_meanwhile(slot: Slot) -> None:
    slot.path.rename(slot.path.with_name("old"))
    slot.path.write_bytes(b"another")
    with pytest.raises(LookupError, match="replaced"):
        ProvenPayload(slot)
