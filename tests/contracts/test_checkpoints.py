"""What every `Checkpoints` tells a keeper: which checkpoints are whole, what is wrong with the
others, and that a store that is unreadable, or damaged throughout, is not an empty one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.config import resolve
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.errors import ConfigError, StoreError
from keepstep.model.checkpoint import CheckpointName, StoreListing
from keepstep.ports import Checkpoints
from keepstep.runtime.keeper.process import StoredCheckpoints
from keepstep.sim.protocol.job.persisters import open_store
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import World

FILE = "__0_1.distcp"


class Side(Protocol):
    """`written`: the store, as a persister has it. `checkpoints`: what the keeper asks."""

    written: Store
    checkpoints: Checkpoints

    def cut(self) -> None:
        """Nobody can read the store any more."""


class RealSide:
    def __init__(self, room: Path) -> None:
        self._place = room / "store"
        self.written = Store(self._place)
        self.checkpoints: Checkpoints = StoredCheckpoints(
            resolve({"store": str(self._place), "job": "job"}, {}, "job")
        )

    def cut(self) -> None:
        self._place.rename(self._place.with_name("away"))
        self._place.write_bytes(b"no directory")


class SimSide:
    def __init__(self, room: Path) -> None:
        machine = Machine(World(1), 0, None, 1 << 20)
        self._disk = SharedDisk(Random(1))
        self.written = open_store("simulated://s", self._disk, machine.start("persister"))
        self.checkpoints: Checkpoints = open_store(
            "simulated://s", self._disk, machine.start("keeper")
        )

    def cut(self) -> None:
        self._disk.away = 1.0


SIDES: dict[str, Callable[[Path], Side]] = {"real": RealSide, "simulated": SimSide}
sides = pytest.mark.parametrize("kind", SIDES)


def write(store: Store, step: int, publish: bool = True) -> None:
    with store.draft(CheckpointName(step)) as draft:
        with draft.open(FILE) as file:
            file.write(b"state")
        draft.read_back([FILE])
        if publish:
            draft.publish(Manifest("job", step, 1, {}, 1, {}, dict(draft.files)))


def change(store: Store, step: int, how: str) -> None:
    """Something happens to a checkpoint."""
    place = store.place(step, MANIFEST if "manifest" in how else FILE)
    if how.endswith("gone"):
        place.fs.rm_file(place.path)
        return
    raw = bytearray(place.fs.cat_file(place.path))
    place.fs.pipe_file(place.path, bytes(raw[: len(raw) // 2]))


@sides
def test_an_empty_store_has_none(kind: str, tmp_path: Path) -> None:
    assert SIDES[kind](tmp_path).checkpoints.look() == StoreListing([])


@sides
@given(
    fates=st.dictionaries(
        st.integers(0, 20),
        st.sampled_from(["whole", "unpublished", "file gone", "file cut", "manifest cut"]),
        max_size=5,
    )
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whole_ones_newest_first_and_damaged_ones_by_what_is_wrong(
    kind: str, fates: dict[int, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    side = SIDES[kind](tmp_path_factory.mktemp("store"))
    for step, fate in fates.items():
        write(side.written, step, publish=fate != "unpublished")
        if fate not in ("whole", "unpublished"):
            change(side.written, step, fate)
    intact = sorted((s for s, fate in fates.items() if fate == "whole"), reverse=True)
    unfinished = {s for s, f in fates.items() if f in ("unpublished", "manifest gone")}
    found = side.checkpoints.look()
    assert found.usable == intact
    assert set(found.damaged) == set(fates) - set(intact) - unfinished
    assert set(found.unfinished) <= unfinished, "what was never published, and cleaned up"
    assert all([*found.damaged.values(), *found.unfinished.values()])
    assert not found.unreachable


@sides
def test_a_store_that_cannot_be_read_is_not_an_empty_one(kind: str, tmp_path: Path) -> None:
    side = SIDES[kind](tmp_path)
    write(side.written, 3)
    side.cut()
    with pytest.raises((StoreError, ConfigError)):
        side.checkpoints.look()
