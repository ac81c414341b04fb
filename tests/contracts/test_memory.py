"""What every `Memory` does: files outlive maps, names change in one instant, locks end with who
took them, nothing is half there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.edge.shm.memory import SharedMemory
from keepstep.model.units import PAGE_BYTES
from keepstep.ports import Memory
from tests.contracts import simulated

MEMORIES: dict[str, Callable[[], Memory]] = {"shared": SharedMemory, "simulated": simulated.memory}
NOISE = random.Random(1).randbytes(3 * PAGE_BYTES + 17)


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> Memory:
    return MEMORIES[request.param]()


def write(memory: Memory, path: Path, data: bytes) -> None:
    region = memory.create(path, len(data))
    region.view[:] = data
    region.close()


def read(memory: Memory, path: Path) -> bytes:
    region = memory.open(path)
    data = bytes(region.view)
    region.close()
    return data


def test_a_new_file_is_zeros_below_directories_that_come_with_it(
    memory: Memory, tmp_path: Path
) -> None:
    region = memory.create(tmp_path / "held" / "rank-00003" / "slot-0", 5000)
    assert (
        bytes(region.view) == bytes(5000)
        and region.path == tmp_path / "held" / "rank-00003" / "slot-0"
    )
    region.close()
    assert memory.names(tmp_path) == ["held"] and memory.names(
        tmp_path / "held" / "rank-00003"
    ) == ["slot-0"]


def test_what_is_written_outlives_the_map_and_all_maps_are_the_same_memory(
    memory: Memory, tmp_path: Path
) -> None:
    write(memory, tmp_path / "a", NOISE)
    one, other = memory.open(tmp_path / "a"), memory.open(tmp_path / "a")
    assert one.view == other.view == NOISE
    one.view[4999:5001] = b"xy"
    assert other.view[4999:5001] == b"xy"
    one.close()
    other.view[0] = 7
    other.close()
    assert read(memory, tmp_path / "a") == b"\x07" + NOISE[1:4999] + b"xy" + NOISE[5001:]


def test_prefaulting_changes_nothing(memory: Memory, tmp_path: Path) -> None:
    write(memory, tmp_path / "a", NOISE)
    region = memory.open(tmp_path / "a")
    region.prefault()
    assert region.view == NOISE
    region.close()


def test_what_is_given_up_reads_as_zeros_and_counts_no_more(memory: Memory, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(6 * PAGE_BYTES)
    write(memory, tmp_path / "a", data)
    region, free = memory.open(tmp_path / "a"), memory.free_bytes(tmp_path)
    assert not region.has_holes() and memory.size(tmp_path / "a") == len(data)
    region.punch(PAGE_BYTES, 2 * PAGE_BYTES)
    kept = data[:PAGE_BYTES] + bytes(2 * PAGE_BYTES) + data[3 * PAGE_BYTES :]
    assert region.has_holes() and region.view == kept
    assert memory.size(tmp_path / "a") == 4 * PAGE_BYTES
    region.prefault(0, PAGE_BYTES)
    region.prefault(3 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert memory.size(tmp_path / "a") == 4 * PAGE_BYTES, "what is touched beside it stays given up"
    region.close()
    assert read(memory, tmp_path / "a") == kept
    if isinstance(memory, SharedMemory):
        return  # of a filesystem that others use, too
    assert memory.free_bytes(tmp_path) == free + 2 * PAGE_BYTES
    memory.remove(tmp_path / "a")
    assert memory.free_bytes(tmp_path) == free + len(data), "and only once"


def test_stretches_of_files_are_one_map(memory: Memory, tmp_path: Path) -> None:
    datas = [random.Random(seed).randbytes(3 * PAGE_BYTES) for seed in range(2)]
    for name, data in zip("ab", datas, strict=True):
        write(memory, tmp_path / name, data)
    one, other = memory.open(tmp_path / "a"), memory.open(tmp_path / "b")
    joined = memory.join(
        [(one, 0, PAGE_BYTES), (other, PAGE_BYTES, PAGE_BYTES), (one, 2 * PAGE_BYTES, PAGE_BYTES)]
    )
    pages = [data[at : at + PAGE_BYTES] for data in datas for at in range(0, len(data), PAGE_BYTES)]
    assert joined.view == pages[0] + pages[4] + pages[2]
    assert joined.path == one.path and joined.is_there() and not joined.has_holes()
    look = joined.view[:10]
    joined.close()
    assert look == pages[0][:10], "who still looks keeps it"
    look.release()
    one.close()
    other.close()


def test_what_is_not_there_cannot_be_opened(memory: Memory, tmp_path: Path) -> None:
    memory.create(tmp_path / "directory" / "a", 10).close()
    for path in (tmp_path / "missing", tmp_path / "directory" / "missing"):
        with pytest.raises(OSError, match=path.name):
            memory.open(path)
    with pytest.raises((OSError, ValueError), match="directory"):
        memory.open(tmp_path / "directory")


def test_creating_again_is_another_file(memory: Memory, tmp_path: Path) -> None:
    write(memory, tmp_path / "a", NOISE)
    old = memory.open(tmp_path / "a")
    memory.create(tmp_path / "a", 50).close()
    assert read(memory, tmp_path / "a") == bytes(50)
    assert old.view == NOISE, "who has the old one mapped still has it"
    old.close()


def test_ensuring_makes_once(memory: Memory, tmp_path: Path) -> None:
    one = memory.ensure(tmp_path / "rank-00000" / "status", 100)
    assert bytes(one.view) == bytes(100)
    other = memory.ensure(tmp_path / "rank-00000" / "status", 100)
    one.view[:] = NOISE[:100]
    assert other.view == NOISE[:100]
    one.close()
    other.close()
    again = memory.ensure(tmp_path / "rank-00000" / "status", 100)
    assert again.view == NOISE[:100]
    again.close()


def test_names_are_in_order(memory: Memory, tmp_path: Path) -> None:
    assert memory.names(tmp_path / "missing") == []
    for name in ("slot-1", "status", "slot-0"):
        memory.create(tmp_path / "d" / name, 10).close()
    memory.create(tmp_path / "d" / "below" / "slot-7", 10).close()
    assert memory.names(tmp_path / "d") == ["below", "slot-0", "slot-1", "status"]
    assert memory.names(tmp_path / "d" / "status") == []


def test_renaming_replaces(memory: Memory, tmp_path: Path) -> None:
    write(memory, tmp_path / "a.new", b"new")
    write(memory, tmp_path / "a", b"old")
    old, fresh = memory.open(tmp_path / "a"), memory.open(tmp_path / "a.new")
    memory.rename(tmp_path / "a.new", tmp_path / "a")
    assert memory.names(tmp_path) == ["a"] and read(memory, tmp_path / "a") == b"new"
    fresh.view[0] = ord("N")
    assert read(memory, tmp_path / "a") == b"New" and old.view == b"old"
    old.close()
    fresh.close()
    with pytest.raises(OSError, match="missing"):
        memory.rename(tmp_path / "missing", tmp_path / "a")
    assert read(memory, tmp_path / "a") == b"New"


def test_a_directory_leaves_its_name_with_all_that_is_in_it(memory: Memory, tmp_path: Path) -> None:
    write(memory, tmp_path / "job" / "rank-00000" / "slot-0", NOISE)
    memory.rename(tmp_path / "job", tmp_path / "job.ending")
    assert memory.names(tmp_path) == ["job.ending"] and memory.names(tmp_path / "job") == []
    assert read(memory, tmp_path / "job.ending" / "rank-00000" / "slot-0") == NOISE


def test_what_is_removed_is_gone_but_for_who_has_it_mapped(memory: Memory, tmp_path: Path) -> None:
    for name in ("rank-00000/slot-0", "rank-00000/slot-1", "rank-00001/slot-0"):
        write(memory, tmp_path / name, NOISE)
    mapped = memory.open(tmp_path / "rank-00000" / "slot-1")
    memory.remove(tmp_path / "rank-00000" / "slot-0")
    assert memory.names(tmp_path / "rank-00000") == ["slot-1"]
    memory.remove(tmp_path / "rank-00000")
    memory.remove(tmp_path / "rank-00000")
    memory.remove(tmp_path / "missing")
    assert memory.names(tmp_path) == ["rank-00001"] and mapped.view == NOISE
    with pytest.raises(OSError, match="slot-1"):
        memory.open(tmp_path / "rank-00000" / "slot-1")
    mapped.close()


def test_locks(memory: Memory, tmp_path: Path) -> None:
    write(memory, tmp_path / "a", NOISE)
    one, two, three = (memory.open(tmp_path / "a") for _ in range(3))
    assert one.lock(exclusive=False) and two.lock(exclusive=False)
    assert not three.lock(exclusive=True)
    one.unlock()
    assert not three.lock(exclusive=True), "two still has it"
    two.close()
    assert (
        three.lock(exclusive=True)
        and not one.lock(exclusive=False)
        and not one.lock(exclusive=True)
    )
    assert three.lock(exclusive=False) and one.lock(exclusive=False), "from exclusive to shared"
    one.close()
    three.close()


def test_a_lock_is_the_files_not_its_names(memory: Memory, tmp_path: Path) -> None:
    write(memory, tmp_path / "a", NOISE)
    holder = memory.open(tmp_path / "a")
    assert holder.lock(exclusive=True)
    memory.rename(tmp_path / "a", tmp_path / "b")
    moved = memory.open(tmp_path / "b")
    assert not moved.lock(exclusive=False)
    memory.create(tmp_path / "a", 10).close()
    another = memory.open(tmp_path / "a")
    assert another.lock(exclusive=True)
    for region in (holder, moved, another):
        region.close()


def test_whether_a_name_still_leads_to_a_file(memory: Memory, tmp_path: Path) -> None:
    for name in ("rank-00000/status", "rank-00001/status", "rank-00002/status", "job/a"):
        write(memory, tmp_path / name, NOISE)
    kept, removed, replaced, moved = (
        memory.open(tmp_path / name)
        for name in ("rank-00000/status", "rank-00001/status", "rank-00002/status", "job/a")
    )
    assert all(region.is_there() for region in (kept, removed, replaced, moved))
    memory.remove(tmp_path / "rank-00001")
    memory.create(tmp_path / "rank-00002" / "status", len(NOISE)).close()
    memory.ensure(tmp_path / "rank-00000" / "status", len(NOISE)).close()
    memory.rename(tmp_path / "job", tmp_path / "job.ending")
    assert [region.is_there() for region in (kept, removed, replaced, moved)] == [
        True,
        False,
        False,
        False,
    ]
    write(memory, tmp_path / "rank-00001" / "status", NOISE)
    assert not removed.is_there(), "another file, whatever is in it"
    for region in (kept, removed, replaced, moved):
        region.close()


def test_free_bytes_are_told(memory: Memory, tmp_path: Path) -> None:
    memory.create(tmp_path / "a", 10).close()
    assert memory.free_bytes(tmp_path) > 0
