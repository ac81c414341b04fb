"""Whole: a slot and its neighbours make one snapshot, bit for bit, or none at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.coding.checksum import block_checksums
from keepstep.edge.shm.memory import MEMORY, SharedMemory
from keepstep.edge.shm.proven_payload import ProvenPayload
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.slot_header import MOST_BLOCKS
from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.shares import Share, bits_of, blocks_of
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.ports import Memory
from tests.contracts import simulated

BLOCK_BYTES = PAGE_BYTES
BLOCKS = 6
END_BYTES = 300
NBYTES = BLOCKS * BLOCK_BYTES + END_BYTES
JOB = bytes(range(16))
STAMP = Stamp(5, 1)
LAYOUT = lay_out([TensorSpec("w", "uint8", (NBYTES,), NBYTES)])


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


REAL = SmallBlocks()


def simulated_memory() -> Memory:
    memory = simulated.memory()
    memory.block_bytes = BLOCK_BYTES  # type: ignore[attr-defined, misc]
    return memory


MEMORIES: dict[str, Callable[[], Memory]] = {"real": lambda: REAL, "simulated": simulated_memory}


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> Memory:
    return MEMORIES[request.param]()


def payload_of(rank: int) -> bytes:
    common = random.Random(1).randbytes(BLOCKS * BLOCK_BYTES)
    return common + bytes([rank]) * END_BYTES


def write(
    memory: Memory,
    job_dir: Path,
    rank: int,
    lacking: frozenset[int],
    stamp: Stamp = STAMP,
    payload: bytes | None = None,
    index: int = 0,
) -> Slot:
    """As the session does: what is lacking is hashed, and not there."""
    data = payload_of(rank) if payload is None else payload
    path = slot_path(job_dir, rank, index)
    slot = Slot.create(memory, path, NBYTES, 5000)
    slot.begin(JOB, rank, 2, 7, stamp)
    slot.shed(lacking)
    for block in range(BLOCKS + 1):
        if block not in lacking:
            at = slice(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, NBYTES))
            slot.payload[at] = data[at]
    sums = block_checksums(memoryview(data), BLOCK_BYTES)
    manifest = json.dumps(LAYOUT.to_json()).encode()
    header = slot.write_table(NBYTES, manifest, {block: sums[block] for block in lacking})
    slot.seal(header, LAYOUT.hash(), 0.5, 1, Share(99, 2))
    return slot


def test_what_is_lacking_takes_no_memory_and_the_header_tells_it(
    memory: Memory, tmp_path: Path
) -> None:
    lacking = frozenset({1, 2, 4})
    with closing(write(memory, tmp_path, 0, frozenset(), index=1)) as full:
        nbytes = memory.size(full.path)
        assert not full.lacking() and full.header().share == Share(99, 2)
    with closing(write(memory, tmp_path, 0, lacking)) as slot:
        assert memory.size(slot.path) == nbytes - 3 * BLOCK_BYTES
        found = slot.header()
        assert blocks_of(found.lacking) == lacking == slot.lacking()
        assert found.share == Share(99, 2) and found.state is SlotState.SEALED
        slot.prefault()
        assert memory.size(slot.path) == nbytes - 3 * BLOCK_BYTES, "holes stay holes"
        slot.void()
        assert slot.lacking() == lacking, "whatever its state"
        slot.begin(JOB, 0, 2, 8, Stamp(6, 1))
        assert slot.lacking() == lacking
        with pytest.raises(AssertionError):
            slot.shed(frozenset({1}))
    with closing(Slot(memory, slot.path)) as again:
        assert again.lacking() == lacking


def test_a_damaged_header_over_holes_says_that_all_may_be_holes(tmp_path: Path) -> None:
    with closing(write(REAL, tmp_path, 0, frozenset({1}))) as slot:
        slot._region.view[200] ^= 1
        assert slot.lacking() == frozenset(range(BLOCKS + 1))
        slot.void()
        assert slot.lacking() == frozenset(range(BLOCKS + 1))
    with closing(write(REAL, tmp_path, 1, frozenset())) as full:
        full._region.view[200] ^= 1
        assert full.lacking() == frozenset()


def test_a_slot_alone_proves_what_it_has(memory: Memory, tmp_path: Path) -> None:
    with closing(write(memory, tmp_path, 0, frozenset({1, 2}))) as slot:
        slot.verify_bytes()
        slot.payload[1 * BLOCK_BYTES] ^= 1 if memory is not REAL else 0
        slot.payload[0] ^= 1
        with pytest.raises(DamageError, match="block 0"):
            slot.verify_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(lacks=st.lists(st.sets(st.integers(0, BLOCKS - 1)), min_size=1, max_size=4))
def test_a_snapshot_is_whole_when_each_block_is_with_somebody(
    tmp_path_factory: pytest.TempPathFactory, lacks: list[set[int]]
) -> None:
    job_dir = tmp_path_factory.mktemp("w")
    slots = [write(REAL, job_dir, rank, frozenset(lack)) for rank, lack in enumerate(lacks)]
    with_nobody = set.intersection(*lacks)
    for rank, slot in enumerate(slots):
        if lacks[rank] and with_nobody:
            with pytest.raises(LookupError, match="with nobody"), whole(REAL, slot):
                pass
            continue
        with whole(REAL, slot) as found:
            header, layout = found.verify(threads=2)
            assert bytes(found.payload[:NBYTES]) == payload_of(rank)
            assert (header.rank, layout) == (rank, LAYOUT)
    for slot in slots:
        assert slot.lock(exclusive=True), "nobody holds it any more"
        slot.close()


def test_both_worlds_join(memory: Memory, tmp_path: Path) -> None:
    one = write(memory, tmp_path, 0, frozenset({1, 2}))
    other = write(memory, tmp_path, 1, frozenset({0, 3, 4, 5}))
    with whole(memory, one) as found:
        found.verify()
        assert bytes(found.payload[:NBYTES]) == payload_of(0)
    one.close()
    other.close()


@pytest.mark.parametrize("what", ["another stamp", "other bytes", "voided", "locked", "damaged"])
def test_what_is_no_share_of_it_is_never_taken(tmp_path: Path, what: str) -> None:
    slot = write(REAL, tmp_path, 0, frozenset({3}))
    other = bytearray(payload_of(1))
    if what == "other bytes":
        other[3 * BLOCK_BYTES + 9] ^= 1
    stamp = Stamp(5, 2) if what == "another stamp" else STAMP
    neighbour = write(REAL, tmp_path, 1, frozenset(), stamp, bytes(other))
    if what == "voided":
        neighbour.void()
    if what == "locked":
        assert neighbour.lock(exclusive=True), "it is being overwritten"
    if what == "damaged":
        neighbour.payload[3 * BLOCK_BYTES] ^= 1  # at rest: its table knows nothing of it
        with whole(REAL, slot) as found, pytest.raises(DamageError, match="block 3"):
            found.verify()
    else:
        with pytest.raises(LookupError, match="with nobody"), whole(REAL, slot):
            pass
    slot.close()
    neighbour.close()


def test_neighbours_stand_still_while_it_is_read(tmp_path: Path) -> None:
    slot, neighbour = (
        write(REAL, tmp_path, 0, frozenset({3})),
        write(REAL, tmp_path, 1, frozenset()),
    )
    with whole(REAL, slot):
        assert not neighbour.lock(exclusive=True)
    assert neighbour.lock(exclusive=True)
    slot.close()
    neighbour.close()


def test_who_still_looks_keeps_the_map(tmp_path: Path) -> None:
    slot, neighbour = (
        write(REAL, tmp_path, 0, frozenset({3})),
        write(REAL, tmp_path, 1, frozenset()),
    )
    with whole(REAL, slot) as found:
        look = memoryview(found.payload)[3 * BLOCK_BYTES : 3 * BLOCK_BYTES + 8]
    slot.close()
    neighbour.close()
    assert bytes(look) == payload_of(0)[3 * BLOCK_BYTES : 3 * BLOCK_BYTES + 8]
    look.release()


def test_any_span_of_a_proven_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.edge.shm.proven_payload.MEMORY", REAL)
    slot, neighbour = (
        write(REAL, tmp_path, 0, frozenset({3})),
        write(REAL, tmp_path, 1, frozenset()),
    )
    payload = ProvenPayload(slot)
    chance = random.Random(3)
    for _ in range(40):
        at = chance.randrange(NBYTES)
        target = bytearray(chance.randrange(1, NBYTES - at + 1))
        payload.read_into(at, memoryview(target))
        assert target == payload_of(0)[at : at + len(target)]
    payload.close()
    neighbour.close()
    slot.close()


def test_the_header_has_room_for_a_bitmap_of_so_many_blocks() -> None:
    assert len(bits_of({MOST_BLOCKS - 1})) == MOST_BLOCKS // 8
    assert MOST_BLOCKS * MEMORY.block_bytes > 100 * 2**30, "100 GiB a rank"
