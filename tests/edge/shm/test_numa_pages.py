"""Files that get their pages from one node. A machine with one node hears of node 0 as well."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.edge.shm import numa_pages
from keepstep.edge.shm.memory import MappedFile, SharedMemory
from keepstep.edge.shm.numa_pages import prefer_node
from keepstep.errors import MemoryBudgetError
from keepstep.model.units import MIB

MAPS = Path("/proc/self/numa_maps")
NOWHERE = 900  # more than any kernel has


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-numa-") as found:
        yield Path(found)


def policy_of(region: MappedFile) -> str:
    """Of its map, as the kernel tells it."""
    [line] = [line for line in MAPS.read_text().splitlines() if str(region.path) in line]
    return line.split()[1]


needs_numa = pytest.mark.skipif(not MAPS.exists(), reason="a kernel without NUMA")


@needs_numa
def test_a_new_file_gets_its_pages_there_whoever_maps_it(home: Path) -> None:
    SharedMemory(numa_node=0).create(home / "slot", 4 * MIB).close()
    region = SharedMemory().open(home / "slot")
    assert policy_of(region) == "prefer:0"
    assert os.stat(region.path).st_blocks * 512 == 4 * MIB, "and all are there"
    region.close()


@needs_numa
def test_nobody_asks_where_no_device_is(home: Path) -> None:
    region = SharedMemory().create(home / "slot", 4 * MIB)
    assert policy_of(region) == "default"
    region.close()


@pytest.mark.parametrize("refuses", ["a node that is not there", "a machine that is not known"])
def test_where_it_is_refused_a_file_is_as_it_would_have_been(
    home: Path, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refuses == "a machine that is not known":
        monkeypatch.setattr(numa_pages, "MBIND", {})
    with open(home / "other", "w+b") as file:
        assert not prefer_node(file.fileno(), 4 * MIB, NOWHERE)
    region = SharedMemory(numa_node=NOWHERE).create(home / "slot", 4 * MIB)
    assert region.nbytes == 4 * MIB and not region.has_holes()
    assert bytes(region.view[:MIB]) == bytes(MIB)
    region.close()


def test_what_is_there_stays_as_it_is(home: Path) -> None:
    region = SharedMemory().create(home / "slot", 4 * MIB)
    region.put(3 * MIB, b"kept")
    region.close()
    again = SharedMemory(numa_node=0).ensure(home / "slot", 4 * MIB)
    assert bytes(again.view[3 * MIB : 3 * MIB + 4]) == b"kept"
    with open(home / "slot", "r+b") as file:
        assert not prefer_node(file.fileno(), MIB, 0)
    assert again.nbytes == os.stat(home / "slot").st_size == 4 * MIB
    again.close()


def test_a_file_that_does_not_fit_is_refused_and_nothing_is_left(home: Path) -> None:
    most = SharedMemory().free_bytes(home)
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        SharedMemory(numa_node=0).create(home / "slot", 4 * most)
    assert list(home.iterdir()) == []
