"""Maps of files and copies between addresses. What every `Memory` does is in
tests/contracts/test_memory.py."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import resource
import socket
from pathlib import Path

import pytest

from keepstep.edge.shm.double_buffered_page import DoubleBufferedPage
from keepstep.edge.shm.memory import (
    MEMORY,
    MappedFile,
    copy,
    copy_to_fresh,
    equal,
    resident_bytes,
)
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.text_file import read_text
from keepstep.errors import DamageError, MemoryBudgetError
from keepstep.model.units import KIB, MIB, PAGE_BYTES


def region(path: Path, nbytes: int) -> MappedFile:
    return MEMORY.create(path, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 100_001])
def test_copy_moves_exactly_those_bytes(tmp_path: Path, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    source = ctypes.create_string_buffer(data, max(nbytes, 1))
    target = region(tmp_path / "r", nbytes + 2 * PAGE_BYTES)
    copy(target.address + PAGE_BYTES, ctypes.addressof(source), nbytes)
    assert bytes(target.view) == bytes(PAGE_BYTES) + data + bytes(PAGE_BYTES)
    assert equal(target.address + PAGE_BYTES, ctypes.addressof(source), nbytes)
    target.close()


@pytest.mark.parametrize("has_populate", [True, False])
@pytest.mark.parametrize("at", [0, 1, PAGE_BYTES - 1])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES - 1])
def test_copy_into_fresh_memory_moves_exactly_those_bytes(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, at: int, has_populate: bool
) -> None:
    if not has_populate:
        monkeypatch.setattr("keepstep.edge.shm.memory.MADV_POPULATE_WRITE", -1)
    source = random.Random(nbytes).randbytes(nbytes)
    target = mmap.mmap(-1, 8 * PAGE_BYTES)
    anchor = ctypes.c_char.from_buffer(target)
    begin = ctypes.addressof(anchor) + at
    held = ctypes.create_string_buffer(source, nbytes + 1)
    copy_to_fresh(begin, ctypes.addressof(held), nbytes)
    del anchor
    assert target[:] == bytes(at) + source + bytes(8 * PAGE_BYTES - at - nbytes)


def test_equal_sees_one_bit(tmp_path: Path) -> None:
    one, other = region(tmp_path / "a", 1000), region(tmp_path / "b", 1000)
    assert equal(one.address, other.address, 1000)
    other.view[999] = 1
    assert not equal(one.address, other.address, 1000)
    assert equal(one.address, other.address, 999)
    one.close()
    other.close()


def test_a_map_that_is_still_looked_at_stays_until_it_is_not(tmp_path: Path) -> None:
    mapped = region(tmp_path / "r", PAGE_BYTES)
    look = memoryview(mapped.view[10:20])
    mapped.close()
    look[0] = 9
    assert (tmp_path / "r").read_bytes()[10] == 9


def test_pages_are_there_and_nobody_else_s(tmp_path: Path) -> None:
    region(tmp_path / "d" / "r", 100_000).close()
    stat = (tmp_path / "d" / "r").stat()
    assert (
        stat.st_size == 100_000
        and stat.st_blocks * 512 >= 100_000
        and stat.st_mode & 0o777 == 0o600
    )
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


def test_an_empty_file_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        MEMORY.open(tmp_path / "empty")


def test_who_is_making_a_page_this_moment_is_helped(tmp_path: Path) -> None:
    """Two processes make the same page at once: the other one has made the name, and not yet room
    for it."""
    (tmp_path / "status").touch()
    mapped = MEMORY.ensure(tmp_path / "status", PAGE_BYTES)
    assert bytes(mapped.view) == bytes(PAGE_BYTES)
    mapped.close()


def test_what_a_later_writer_writes_is_newer_than_all_before(tmp_path: Path) -> None:
    for count in (1, 3, 2):  # an odd number in all: neither half always holds the newest
        writer = DoubleBufferedPage.ensure(MEMORY, tmp_path / "page")
        for number in range(count):
            body = b"%d of %d" % (number, count)
            writer.write(body)
            reader = DoubleBufferedPage.open(MEMORY, tmp_path / "page")
            assert reader.read() == body
            reader.close()
        writer.close()


def put_something_else(path: Path, what: str) -> None:
    match what:
        case "directory":
            path.mkdir()
            (path / "file").touch()
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(os.path.relpath(path))
        case "link":
            (path.parent / "elsewhere").write_bytes(bytes(PAGE_BYTES))
            path.symlink_to(path.parent / "elsewhere")


ODD = pytest.mark.parametrize("what", ["directory", "fifo", "socket", "link"])


@ODD
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / "slot-0"
    put_something_else(path, what)
    with pytest.raises(ValueError, match=r"slot-0: expected a file"):
        MEMORY.open(path)
    with pytest.raises(ValueError, match="expected a file"):
        DoubleBufferedPage.open(MEMORY, path)
    with pytest.raises(DamageError, match="expected a slot, found none"):
        Slot(MEMORY, path)
    assert read_text(MEMORY, path) is None


@ODD
@pytest.mark.parametrize("how", ["create", "ensure", "rename"])
def test_what_is_no_file_makes_place_for_one(tmp_path: Path, what: str, how: str) -> None:
    path = tmp_path / "slot-0"
    put_something_else(path, what)
    if how == "rename":
        region(tmp_path / "new", PAGE_BYTES).close()
        MEMORY.rename(tmp_path / "new", path)
        made = MEMORY.open(path)
    else:
        made = getattr(MEMORY, how)(path, PAGE_BYTES)
    made.put(0, b"ours")
    made.close()
    assert path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"ours"
    elsewhere = tmp_path / "elsewhere"
    assert not elsewhere.exists() or elsewhere.read_bytes() == bytes(PAGE_BYTES)


def test_what_is_not_there_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for nowhere in (tmp_path / "nowhere", tmp_path / "file" / "below"):
        assert MEMORY.names(nowhere) == [] and resident_bytes(nowhere) == 0


def test_what_files_take_up_is_counted_without_holes(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for path in (tmp_path / "one", tmp_path / "below" / "two"):
        with path.open("wb") as file:
            file.write(bytes(64 * KIB))
            file.truncate(1 << 30)
    assert 128 * KIB <= resident_bytes(tmp_path) < MIB


def test_a_limit_on_the_size_of_files_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * PAGE_BYTES, before[1]))
    try:
        with pytest.raises(
            MemoryBudgetError,
            match=r"/r: expected room for a file of 1.0 MiB, found .* \(`ulimit -f`: 256.0 KiB\)",
        ):
            region(tmp_path / "r", 256 * PAGE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_without_memory_for_locks_is_as_a_lock_that_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that captures died of it, and the rank stood still at its end."""
    region = MEMORY.ensure(tmp_path / "file", 4096)

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert region.lock(exclusive=True)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    region.unlock()
    assert not region.lock(exclusive=True) and not region.lock(exclusive=False)
    region.close()
