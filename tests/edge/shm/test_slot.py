"""Slots: what is sealed comes back, what is not whole never says it is, and one flipped bit is
always found."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import keepstep.edge.shm.memory
from keepstep.coding.checksum import BLOCK_BYTES, checksum
from keepstep.edge.shm.memory import MEMORY, SharedMemory
from keepstep.edge.shm.slot import (
    Slot,
    check_identity,
    rank_dir,
    ranks_in,
    readable_headers,
    slot_bytes,
    slot_path,
    slot_paths,
)
from keepstep.edge.shm.slot_header import MAGIC
from keepstep.errors import DamageError, IdentityError, MemoryBudgetError
from keepstep.model.layout import Layout, TensorSpec, lay_out
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import KIB, PAGE_BYTES

JOB = bytes(range(16))
PAYLOAD_BYTES = 20_000
LAYOUT = lay_out(
    [TensorSpec("w", "float32", (50, 50), 10_000), TensorSpec("b", "uint8", (9_900,), 9_900)]
)
MANIFEST = b'{"objects_offset":0,"segments":[]}'


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot.create(MEMORY, tmp_path / "slot-0", 30_000, 5_000)
    yield made
    made.close()


def manifest_of(layout: Layout) -> bytes:
    return json.dumps(layout.to_json()).encode()


def seal(slot: Slot, stamp: Stamp, seed: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Write a whole snapshot as the session does; returns its payload."""
    data = random.Random(seed).randbytes(payload_bytes)
    slot.begin(JOB, 3, 4, 7, stamp)
    slot.payload[:payload_bytes] = data
    slot.seal(slot.write_table(payload_bytes, manifest_of(LAYOUT)), LAYOUT.hash(), 0.25, wall_ns=1)
    return data


def reread(path: Path) -> tuple[SlotHeader, Layout, bytes]:
    """Everything a stranger finds in the file."""
    stranger = Slot(MEMORY, path)
    try:
        header, layout = stranger.verify()
        return header, layout, bytes(stranger.payload[: header.payload_bytes])
    finally:
        stranger.close()


# ----------------------------------------------------------------------------------------------
# what is sealed


def test_a_sealed_slot_tells_everything_to_a_stranger(slot: Slot) -> None:
    data = seal(slot, Stamp(41, 2), seed=1)
    header, layout, found = reread(slot.path)
    assert found == data and layout == LAYOUT
    assert header.state is SlotState.SEALED
    assert (header.job_hash, header.layout_hash.hex(), header.rank, header.world_size) == (
        JOB,
        LAYOUT.hash(),
        3,
        4,
    )
    assert (header.incarnation, header.stamp, header.loss) == (7, Stamp(41, 2), 0.25)
    assert (header.payload_bytes, header.block_bytes, header.block_count) == (
        PAYLOAD_BYTES,
        BLOCK_BYTES,
        1,
    )


def test_a_slot_is_used_again(slot: Slot) -> None:
    seal(slot, Stamp(0, 1), seed=1)
    before = slot.header().sequence
    data = seal(slot, Stamp(2, 1), seed=2, payload_bytes=5_000)
    header, _, found = reread(slot.path)
    assert found == data and header.stamp == Stamp(2, 1) and header.sequence > before


@pytest.mark.parametrize("payload_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_payloads_of_any_length(tmp_path: Path, payload_bytes: int) -> None:
    slot = Slot.create(MEMORY, tmp_path / "slot-0", payload_bytes, 5_000)
    data = seal(slot, Stamp(0, 1), seed=3, payload_bytes=payload_bytes)
    header, _, found = reread(slot.path)
    assert found == data and header.block_count == -(-payload_bytes // BLOCK_BYTES)
    slot.close()


def test_a_new_slot_is_empty_and_of_the_size_that_was_said(slot: Slot) -> None:
    assert slot.header().state is SlotState.EMPTY
    assert slot.path.stat().st_size == slot_bytes(30_000, 5_000)
    assert slot.path.stat().st_blocks * 512 >= slot_bytes(30_000, 5_000), (
        "every page is reserved: no write can meet a full filesystem"
    )
    assert slot.path.stat().st_mode & 0o777 == 0o600
    assert list(slot.path.parent.iterdir()) == [slot.path]
    with pytest.raises(LookupError, match="holds no sealed snapshot .EMPTY."):
        slot.verify()


def test_creating_again_replaces_the_file_and_leaves_old_readers_theirs(slot: Slot) -> None:
    data = seal(slot, Stamp(0, 1), seed=1)
    Slot.create(MEMORY, slot.path, 60_000, 5_000).close()
    assert bytes(slot.payload[:PAYLOAD_BYTES]) == data
    with pytest.raises(LookupError):
        reread(slot.path)


def test_void_forgets(slot: Slot) -> None:
    seal(slot, Stamp(0, 1), seed=1)
    before = slot.header().sequence
    slot.void()
    assert slot.header().sequence > before
    with pytest.raises(LookupError, match="EMPTY"):
        slot.verify()


def test_slot_files_are_found_in_order(tmp_path: Path) -> None:
    rank_dir(tmp_path, 2).mkdir(parents=True)
    for index in (1, 0, 2):
        Slot.create(MEMORY, slot_path(tmp_path, 2, index), 100, 100).close()
    (rank_dir(tmp_path, 2) / "slot-3.new").touch()  # a creator that was killed
    assert slot_paths(MEMORY, tmp_path, 2) == [slot_path(tmp_path, 2, i) for i in range(3)]
    assert slot_paths(MEMORY, tmp_path, 0) == []


# ----------------------------------------------------------------------------------------------
# what is torn


def stages(slot: Slot) -> list[bytes]:
    """The file after each step of the protocol: an older snapshot, begun, payload, table and
    manifest, sealed."""
    seal(slot, Stamp(4, 1), seed=4)
    files = [slot.path.read_bytes()]
    data = random.Random(5).randbytes(PAYLOAD_BYTES)
    slot.begin(JOB, 3, 4, 7, Stamp(5, 1))
    files.append(slot.path.read_bytes())
    slot.payload[:PAYLOAD_BYTES] = data
    files.append(slot.path.read_bytes())
    header = slot.write_table(PAYLOAD_BYTES, manifest_of(LAYOUT))
    files.append(slot.path.read_bytes())
    slot.seal(header, LAYOUT.hash(), 0.5, wall_ns=1)
    files.append(slot.path.read_bytes())
    return files


def torn(before: bytes, after: bytes, rng: random.Random) -> Iterator[bytes]:
    """Files a kill in the middle of that step may leave: words written upwards, downwards, or in
    any order."""
    words = [at for at in range(0, len(before), 8) if before[at : at + 8] != after[at : at + 8]]
    orders = [words, words[::-1], *(rng.sample(words, len(words)) for _ in range(4))]
    for order in orders:
        inner = range(1, len(order))
        for count in sorted({*inner[:30], *inner[-1:], *rng.sample(inner, min(40, len(inner)))}):
            mixed = bytearray(before)
            for at in order[:count]:
                mixed[at : at + 8] = after[at : at + 8]
            yield bytes(mixed)


def test_a_write_killed_anywhere_is_never_taken_for_a_snapshot(slot: Slot, tmp_path: Path) -> None:
    files = stages(slot)
    copy, tried = tmp_path / "copy", 0
    rng = random.Random(6)
    for before, after in itertools.pairwise(files):
        for torn_file in [after, *torn(before, after, rng)]:
            copy.write_bytes(torn_file)
            if torn_file in (files[0], files[-1]):
                continue
            tried += 1
            with pytest.raises((DamageError, LookupError)):
                reread(copy)
    assert tried > 500
    for whole, stamp in ((files[0], Stamp(4, 1)), (files[-1], Stamp(5, 1))):
        copy.write_bytes(whole)
        assert reread(copy)[0].stamp == stamp


def test_between_begin_and_seal_it_says_writing(slot: Slot) -> None:
    slot.begin(JOB, 0, 1, 1, Stamp(5, 1))
    with pytest.raises(LookupError, match="WRITING"):
        slot.verify()
    slot.write_table(100, MANIFEST)
    with pytest.raises(LookupError, match="WRITING"):
        slot.verify()


# ----------------------------------------------------------------------------------------------
# what is damaged


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def used_and_unused(slot: Slot) -> tuple[list[int], list[int]]:
    """Offsets of the bytes a snapshot consists of, and of those that mean nothing."""
    manifest_at = slot.path.stat().st_size - slot.manifest_capacity
    table_at = PAGE_BYTES + slot.capacity
    header = slot.header()
    used = [
        *range(PAGE_BYTES + header.payload_bytes),
        *range(table_at, table_at + 8 * header.block_count),
        *range(manifest_at, manifest_at + header.manifest_bytes),
    ]
    rest = set(range(slot.path.stat().st_size)) - set(used)
    return used, sorted(rest)


def test_a_thousand_flipped_bits_a_thousand_found(slot: Slot) -> None:
    data = seal(slot, Stamp(5, 1), seed=7)
    used, _ = used_and_unused(slot)
    rng = random.Random(8)
    areas = [
        used[:PAGE_BYTES],
        used[PAGE_BYTES : PAGE_BYTES + PAYLOAD_BYTES],
        used[PAGE_BYTES + PAYLOAD_BYTES :],
    ]
    bits = [8 * rng.choice(areas[i % 3]) + rng.randrange(8) for i in range(1000)]
    detected = 0
    for bit in bits:
        flip(slot.path, bit)
        with pytest.raises(DamageError, match="slot-0"):
            reread(slot.path)
        detected += 1
        flip(slot.path, bit)
    assert detected == 1000
    assert reread(slot.path)[2] == data


def test_every_bit_of_the_header_s_fields_is_guarded(slot: Slot) -> None:
    seal(slot, Stamp(5, 1), seed=7)
    for bit in range(8 * 200):
        flip(slot.path, bit)
        with pytest.raises(DamageError):
            reread(slot.path)
        flip(slot.path, bit)


def test_a_slot_with_any_one_flipped_bit_of_its_header_can_be_opened_and_written_again(
    slot: Slot,
) -> None:
    """Else nobody could mend it."""
    seal(slot, Stamp(3, 1), seed=5)
    for bit in range(8 * 164):
        flip(slot.path, bit)
        damaged = Slot(MEMORY, slot.path)
        assert (damaged.capacity, damaged.manifest_capacity) == (
            slot.capacity,
            slot.manifest_capacity,
        )
        with pytest.raises(DamageError):
            damaged.header()
        damaged.close()
        flip(slot.path, bit)
    with open(slot.path, "r+b") as file:  # both repetitions: nothing tells the size any more
        file.seek(148)
        file.write(struct.pack("<QQ", 1, 2))
    with pytest.raises(DamageError, match="no page that its checksum fits"):
        Slot(MEMORY, slot.path)


def test_flips_in_bytes_that_mean_nothing_do_no_harm(slot: Slot) -> None:
    data = seal(slot, Stamp(5, 1), seed=7)
    _, unused = used_and_unused(slot)
    rng = random.Random(9)
    for at in rng.sample(unused, 200):
        flip(slot.path, 8 * at + rng.randrange(8))
    assert reread(slot.path)[2] == data


def test_damage_is_named_by_file_step_block_and_checksums(tmp_path: Path) -> None:
    slot = Slot.create(MEMORY, tmp_path / "slot-1", BLOCK_BYTES + 100, 5_000)
    seal(slot, Stamp(5, 1), seed=7, payload_bytes=BLOCK_BYTES + 100)
    want = slot.table(slot.header())[1]
    slot.payload[BLOCK_BYTES + 50] ^= 4
    found = checksum(slot.payload[BLOCK_BYTES : BLOCK_BYTES + 100])
    with pytest.raises(DamageError) as caught:
        slot.verify()
    assert caught.value.args[0] == (
        f"{slot.path}: step 5 of rank 3 damaged: block 1 (payload bytes {BLOCK_BYTES} to "
        f"{BLOCK_BYTES + 100}) "
        f"has checksum {found:016x}, expected {want:016x}"
    )
    slot.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"a shopping list\n" * 1000,
        MAGIC,
        MAGIC + bytes(PAGE_BYTES - 8),
        MAGIC + b"\xff" * PAGE_BYTES,
    ],
)
def test_a_foreign_file_is_no_slot(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "slot-0"
    path.write_bytes(content)
    with pytest.raises(DamageError, match=str(path)):
        Slot(MEMORY, path).verify()


def test_a_file_cut_short_is_damaged(slot: Slot) -> None:
    seal(slot, Stamp(5, 1), seed=7)
    whole = slot.path.read_bytes()
    for nbytes in (PAGE_BYTES, PAGE_BYTES + 10_000, len(whole) - 2 * PAGE_BYTES):
        slot.path.with_name("short").write_bytes(whole[:nbytes])
        with pytest.raises(DamageError):
            reread(slot.path.with_name("short"))


def test_another_format_is_refused(slot: Slot) -> None:
    page = bytearray(slot.path.read_bytes()[:PAGE_BYTES])
    struct.pack_into("<I", page, 8, 1)
    page[-8:] = struct.pack("<Q", checksum(page[:-8]))
    with open(slot.path, "r+b") as file:
        file.write(page)
    with pytest.raises(DamageError, match="expected slot format 2, found 1"):
        slot.header()


# ---------------------------------------------------------------------------------------------- who
# else is there


class Overtaken(Slot):
    """A reader that the writer overtakes between the header and the payload."""

    writer: Slot

    def table(self, header: SlotHeader) -> tuple[int, ...]:
        seal(self.writer, Stamp(6, 1), seed=10)
        return tuple(super().table(header))


def test_overwritten_while_it_was_read_is_not_damage(slot: Slot) -> None:
    seal(slot, Stamp(5, 1), seed=7)
    reader = Overtaken(MEMORY, slot.path)
    reader.writer = slot
    with pytest.raises(LookupError, match="overwritten while it was read"):
        reader.verify()
    reader.close()
    assert reread(slot.path)[0].stamp == Stamp(6, 1)


def test_readers_share_a_lock_and_the_writer_waits_for_none(slot: Slot) -> None:
    readers = [Slot(MEMORY, slot.path), Slot(MEMORY, slot.path)]
    assert all(reader.lock(exclusive=False) for reader in readers)
    assert not slot.lock(exclusive=True)
    readers[0].unlock()
    assert not slot.lock(exclusive=True)
    readers[1].close()  # as the kernel does for a killed reader
    assert slot.lock(exclusive=True)
    assert not readers[0].lock(exclusive=False)
    slot.unlock()
    assert readers[0].lock(exclusive=False)
    readers[0].close()


def test_who_wants_to_know_is_told_once_while_the_map_is_still_there(tmp_path: Path) -> None:
    made = Slot.create(MEMORY, tmp_path / "slot-0", 30_000, 5_000)
    heard = []
    made.before_close(lambda: heard.append(made.header().state))
    made.before_close(lambda: heard.append(made.header().state))
    assert heard == []
    made.close()
    assert heard == [SlotState.EMPTY] * 2


def test_a_slot_of_another_job_or_rank(slot: Slot) -> None:
    seal(slot, Stamp(5, 1), seed=7)
    header = slot.header()
    check_identity(header, slot.path, "mine", JOB, 3)
    with pytest.raises(
        IdentityError,
        match=r"expected a snapshot of job 'mine' \(ffffffff\), "
        r"found one of another job \(00010203\)",
    ):
        check_identity(header, slot.path, "mine", b"\xff" * 16, 3)
    with pytest.raises(IdentityError, match="expected a snapshot of rank 2, found one of rank 3"):
        check_identity(header, slot.path, "mine", JOB, 2)


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "tiny"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(where)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_filesystem_is_said_with_numbers_and_nothing_is_left(tiny_tmpfs: Path) -> None:
    first = Slot.create(MEMORY, tiny_tmpfs / "slot-0", 64 * KIB, 100)
    data = seal(first, Stamp(0, 1), seed=1)
    with pytest.raises(
        MemoryBudgetError,
        match=r"a file of 76.0 KiB does not fit into .*/tiny: 52.0 KiB are free there",
    ):
        Slot.create(MEMORY, tiny_tmpfs / "slot-1", 64 * KIB, 100)
    assert list(tiny_tmpfs.iterdir()) == [first.path]
    assert reread(first.path)[2] == data
    first.close()


NO_ROOM = [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE]


@pytest.mark.parametrize("number", NO_ROOM, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["os.open", "os.mkdir", "os.posix_fallocate", "mmap.mmap"])
def test_whatever_there_is_none_of_is_said_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """A tmpfs also runs out of files, a user of its quota, a process of descriptors and maps."""

    def refuse(*args: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    module, name = call.split(".")
    monkeypatch.setattr(getattr(keepstep.edge.shm.memory, module), name, refuse)
    path = tmp_path / "held" / "rank-00001" / "slot-0"
    with pytest.raises(MemoryBudgetError, match=os.strerror(number)):
        Slot.create(MEMORY, path, 64 * KIB, 100)
    monkeypatch.undo()
    assert not any(each.is_file() for each in tmp_path.rglob("*"))


class SmallBlocks(SharedMemory):
    block_bytes = 512


def test_the_memory_says_how_large_a_block_is(tmp_path: Path) -> None:
    memory = SmallBlocks()
    slot = Slot.create(memory, tmp_path / "slot-0", 30_000, 5_000)
    data = seal(slot, Stamp(5, 1), seed=3)
    slot.close()
    again = Slot(memory, tmp_path / "slot-0")
    header, layout = again.verify()
    assert layout == LAYOUT and bytes(again.payload[: header.payload_bytes]) == data
    assert (header.block_bytes, header.block_count) == (512, -(-PAYLOAD_BYTES // 512))
    again.payload[3 * 512 + 1] ^= 1
    with pytest.raises(DamageError, match="block 3 .payload bytes 1536 to 2048."):
        again.verify()
    again.void()
    assert again.header().block_bytes == 512
    again.close()


def test_the_first_write_into_a_new_slot_faults_no_page_in(tmp_path: Path) -> None:
    """A page fault costs twenty times what copying the page does."""
    pages = 2_000
    slot = Slot.create(MEMORY, tmp_path / "slot", pages * PAGE_BYTES, 100)
    page = bytes(PAGE_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(0, pages * PAGE_BYTES, PAGE_BYTES):
        slot.payload[at : at + PAGE_BYTES] = page
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages / 10
    slot.close()


def test_names_that_are_no_rank_are_not_ours(tmp_path: Path) -> None:
    for name in ("rank-00003", "rank-abc", "rank-00000.bak", "rank-", "rank-00012"):
        (tmp_path / name).mkdir()
    assert ranks_in(MEMORY, tmp_path) == [3, 12]


def test_headers_are_read_as_far_as_they_can_be(tmp_path: Path) -> None:
    for index in range(3):
        one = Slot.create(MEMORY, slot_path(tmp_path, 3, index), 30_000, 5_000)
        seal(one, Stamp(index, 1), index)
        one.close()
    slot_path(tmp_path, 3, 3).write_bytes(b"torn")
    slot_path(tmp_path, 3, 4).mkdir()
    with slot_path(tmp_path, 3, 1).open("r+b") as file:
        file.write(b"x" * 64)
    found = [header.stamp.step for header in readable_headers(MEMORY, tmp_path, 3)]
    assert found == [0, 2]
    assert list(readable_headers(MEMORY, tmp_path, 4)) == []
