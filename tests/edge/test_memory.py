"""Maps of files and copies between addresses."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest

from keepstep.edge.memory import Region, allocate, copy, equal
from keepstep.model.units import PAGE_BYTES


def region(path: Path, nbytes: int) -> Region:
    allocate(path, nbytes)
    return Region(path)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 100_001])
def test_copy_moves_exactly_those_bytes(tmp_path: Path, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    source = ctypes.create_string_buffer(data, max(nbytes, 1))
    target = region(tmp_path / "r", nbytes + 2 * PAGE_BYTES)
    copy(target.address + PAGE_BYTES, ctypes.addressof(source), nbytes)
    assert bytes(target.view) == bytes(PAGE_BYTES) + data + bytes(PAGE_BYTES)
    assert equal(target.address + PAGE_BYTES, ctypes.addressof(source), nbytes)
    target.close()


def test_equal_sees_one_bit(tmp_path: Path) -> None:
    one, other = region(tmp_path / "a", 1000), region(tmp_path / "b", 1000)
    assert equal(one.address, other.address, 1000)
    other.view[999] = 1
    assert not equal(one.address, other.address, 1000)
    assert equal(one.address, other.address, 999)
    one.close()
    other.close()


def test_two_maps_of_a_file_are_the_same_memory(tmp_path: Path) -> None:
    one = region(tmp_path / "r", 5000)
    other = Region(tmp_path / "r")
    one.view[4999] = 7
    assert other.view[4999] == 7
    one.close()
    assert (tmp_path / "r").read_bytes()[4999] == 7, "what was written outlives the map"
    other.close()


def test_prefaulting_changes_nothing(tmp_path: Path) -> None:
    mapped = region(tmp_path / "r", 3 * PAGE_BYTES)
    mapped.view[:] = random.Random(1).randbytes(3 * PAGE_BYTES)
    before = bytes(mapped.view)
    mapped.prefault()
    assert bytes(mapped.view) == before
    mapped.close()


def test_a_map_that_is_still_looked_at_stays_until_it_is_not(tmp_path: Path) -> None:
    mapped = region(tmp_path / "r", PAGE_BYTES)
    look = memoryview(mapped.view[10:20])
    mapped.close()
    look[0] = 9
    assert (tmp_path / "r").read_bytes()[10] == 9


def test_no_file_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Region(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        Region(tmp_path / "empty")


def test_allocated_pages_are_there(tmp_path: Path) -> None:
    allocate(tmp_path / "r", 100_000)
    stat = (tmp_path / "r").stat()
    assert stat.st_size == 100_000 and stat.st_blocks * 512 >= 100_000 and stat.st_mode & 0o777 == 0o600


def test_allocating_where_there_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        allocate(tmp_path / "missing" / "r", 100)
