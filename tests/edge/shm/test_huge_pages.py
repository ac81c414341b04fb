"""Huge pages of a tmpfs that gives them to who asks."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.edge.shm.huge_pages import HUGE_BYTES, _gives_to_who_asks, take_huge_pages
from keepstep.edge.shm.memory import SharedMemory
from keepstep.errors import MemoryBudgetError
from keepstep.model.units import MIB


def mounts(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mounts"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_whether_one_has_to_ask_is_read_off_the_mount_that_is_seen(tmp_path: Path) -> None:
    found = mounts(
        tmp_path,
        "overlay / overlay rw 0 0",
        "tmpfs /dev/shm tmpfs rw,size=4k 0 0",
        "tmpfs /mnt/asked tmpfs rw,relatime,huge=advise,size=4k 0 0",
        "tmpfs /mnt/asked/within tmpfs rw,huge=within_size 0 0",
        "tmpfs /mnt/two\\040words tmpfs rw,huge=advise 0 0",
        "ext4 /mnt/disk ext4 rw,huge=advise 0 0",
        "tmpfs /mnt/over tmpfs rw,huge=advise 0 0",
        "tmpfs /mnt/over tmpfs rw 0 0",
    )
    asked = [
        place
        for place in (
            "/dev/shm/a",
            "/mnt/asked",
            "/mnt/asked/job/rank",
            "/mnt/asked/within/job",
            "/mnt/askedelsewhere",
            "/mnt/two words/job",
            "/mnt/disk",
            "/mnt/over",
        )
        if _gives_to_who_asks(Path(place), found)
    ]
    assert asked == ["/mnt/asked", "/mnt/asked/job/rank", "/mnt/two words/job"]


def test_where_mounts_cannot_be_read_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "w+b") as file:
        take_huge_pages(file.fileno(), path, 4 * HUGE_BYTES, mounts=tmp_path / "nothing")
        assert os.fstat(file.fileno()).st_size == 0


def test_elsewhere_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "w+b") as file:
        take_huge_pages(file.fileno(), path, 4 * HUGE_BYTES)
        assert os.fstat(file.fileno()).st_size == 0


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB that gives huge pages to who asks."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    options = "size=64m,huge=advise"
    command = ("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place))
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs with huge pages needs root, and a kernel that has them")
    yield place
    subprocess.run(("umount", str(place)), check=True)


def test_a_slot_there_has_them(asked: Path) -> None:
    region = SharedMemory().create(asked / "slot", 16 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    region.prefault()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 16 * MIB / mmap.PAGESIZE / 4
    region.close()


def test_a_file_that_does_not_fit_there_is_refused_and_nothing_is_left(asked: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        SharedMemory().create(asked / "slot", 128 * MIB)
    assert list(asked.iterdir()) == []
    SharedMemory().create(asked / "slot", 48 * MIB).close()


def test_what_is_there_keeps_its_bytes(asked: Path) -> None:
    region = SharedMemory().create(asked / "slot", 4 * MIB)
    region.put(3 * MIB, b"kept")
    region.close()
    again = SharedMemory().ensure(asked / "slot", 4 * MIB)
    assert bytes(again.view[3 * MIB : 3 * MIB + 4]) == b"kept"
    again.close()
