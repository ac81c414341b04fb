"""The shared disk: what all machines see of it, what is torn, and what is wrong while it is."""

from __future__ import annotations

import errno
from random import Random

import pytest

from keepstep.sim.protocol.world.filesystem import SharedDisk, SimFileSystem
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Killed, World

DATA = bytes(range(200))


class Place:
    """A disk, and two processes on two machines that use it."""

    def __init__(self, seed: int = 1) -> None:
        world = World(seed)
        self.disk = SharedDisk(Random(seed))
        self.writer = Machine(world, 0, None, 0).start("persister")
        self.reader = Machine(world, 1, None, 0).start("rank")
        self.here = SimFileSystem(self.disk, self.writer)
        self.there = SimFileSystem(self.disk, self.reader)
        self.here.makedirs("store/step")

    def write(self, path: str = "store/step/a", data: bytes = DATA) -> None:
        with self.here.open(path, "wb") as file:
            file.write(data)


def test_what_one_machine_writes_all_read() -> None:
    place = Place()
    place.write()
    assert place.there.cat_file("simulated://store/step/a") == DATA
    assert place.there.cat_file("store/step/a", start=10, end=20) == DATA[10:20]
    assert place.there.size("store/step/a") == len(DATA)
    assert place.there.ls("store", detail=False) == ["store/step"]
    assert [e["type"] for e in place.there.ls("store/step")] == ["file"]


def test_a_rename_replaces_and_removing_takes_all() -> None:
    place = Place()
    place.write("store/step/a", b"old")
    place.write("store/step/b", b"new")
    place.here.mv("store/step/b", "store/step/a")
    assert place.there.ls("store/step", detail=False) == ["store/step/a"]
    assert place.there.cat_file("store/step/a") == b"new"
    with pytest.raises(OSError, match="not empty"):
        place.here.rmdir("store/step")
    place.here.rm("store/step", recursive=True)
    assert place.there.ls("store", detail=False) == []
    with pytest.raises(FileNotFoundError):
        place.there.info("store/step/a")


def test_who_is_killed_while_writing_leaves_a_torn_file_and_does_nothing_more() -> None:
    lengths = set()
    for seed in range(20):
        place = Place(seed)
        place.writer.dies_at_call = 2  # to open, to write
        with pytest.raises(Killed):
            place.write()
        torn = place.there.cat_file("store/step/a")
        assert DATA.startswith(torn)
        lengths.add(len(torn))
        with pytest.raises(Killed):
            place.here.rm_file("store/step/a")
        assert place.there.exists("store/step/a")
    assert len(lengths) > 5


def test_a_full_disk_takes_no_more_and_can_be_emptied() -> None:
    place = Place()
    place.write("store/step/before")
    place.disk.full = True
    with pytest.raises(OSError, match="No space") as raised:
        place.write()
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        place.here.makedirs("store/other")
    place.here.rm("store/step", recursive=True)
    place.disk.heal()
    place.here.makedirs("store/step")
    place.write()
    assert place.there.cat_file("store/step/a") == DATA


def test_a_disk_that_is_away_fails_every_call() -> None:
    place = Place()
    place.write()
    place.disk.away = 1.0
    for call in (place.there.ls, place.there.cat_file, place.there.rm_file, place.there.info):
        with pytest.raises(OSError, match="does not answer"):
            call("store/step/a")
    assert not place.there.exists("store/step/a")
    place.disk.heal()
    assert place.there.exists("store/step/a")


def test_a_slow_disk_takes_its_time() -> None:
    place = Place()
    place.write()
    assert place.writer.spent_ns() == 0
    place.disk.slow_ns = 10**9
    place.write()
    assert 0 < place.writer.spent_ns() < 3 * 10**9
    assert place.writer.spent_ns() == 0


def test_what_a_disk_lies_about_others_read_differently() -> None:
    noticed = set()
    for seed in range(20):
        place = Place(seed)
        place.disk.lying = True
        place.write()
        place.disk.heal()
        assert place.disk.has_lied
        noticed.add(place.here.cat_file("store/step/a") != DATA)
        assert place.there.cat_file("store/step/a") != DATA
    assert noticed == {True, False}


def test_lists_that_fall_behind_show_what_was_there_and_files_are_as_they_are() -> None:
    place = Place()
    place.write("store/step/old")
    place.write("store/step/gone")
    place.disk.is_behind = True
    place.write("store/step/new", b"new")
    place.here.makedirs("store/more")
    place.here.rm_file("store/step/gone")
    assert place.there.ls("store", detail=False) == ["store/step"]
    shown = {each["name"]: each["size"] for each in place.there.ls("store/step")}
    assert shown == {"store/step/gone": 0, "store/step/old": len(DATA)}
    assert place.there.cat_file("store/step/new") == b"new" and place.there.exists("store/more")
    with pytest.raises(FileNotFoundError):
        place.there.cat_file("store/step/gone")
    with pytest.raises(FileNotFoundError):
        place.there.ls("store/more")
    place.disk.heal()
    assert place.there.ls("store", detail=False) == ["store/more", "store/step"]
    assert place.there.ls("store/step", detail=False) == ["store/step/new", "store/step/old"]
    assert place.disk.hidden == {"store/more", "store/step/new"}
