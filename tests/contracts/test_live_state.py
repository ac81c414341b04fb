"""What a `LiveState` promises: what was copied at one moment comes back byte for byte, and a copy
that mixes two moments says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.coding.checksum import block_checksums
from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.errors import DamageError, LayoutError, StoreError
from keepstep.model.layout import Layout
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.model.units import KIB
from keepstep.ports import Gathered, LiveState, Memory, StateCopy
from keepstep.sim.protocol.job.live_state import SimState
from tests.contracts import simulated

FLOATS = 40_000


class Training(Protocol):
    """A state, and what a program does to it."""

    live: LiveState
    memory: Memory
    path: Path

    def value(self) -> bytes: ...

    def change(self, by: int) -> None:
        """An operation in place, outside an optimizer's step."""


class TorchTraining:
    def __init__(self, tmp_path: Path) -> None:
        self.memory: Memory = MEMORY
        self.path = tmp_path / "slot"
        model = torch.nn.Linear(FLOATS, 1, bias=False)
        self.weight = model.weight.detach()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)  # what it updates may be copied late
        protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
        self.live: LiveState = TorchState(protected, 0, 1, resolve(None, {}, "j"))

    def value(self) -> bytes:
        return bytes(self.weight.numpy())

    def change(self, by: int) -> None:
        self.weight.add_(by)


class SimTraining:
    def __init__(self, tmp_path: Path) -> None:
        self.memory = simulated.memory()
        self.path = Path("/memory/slot")
        self._live = SimState(4 * FLOATS, self._read_checkpoint)
        self._live.state = bytes(4 * FLOATS)
        self.live: LiveState = self._live

    def _read_checkpoint(self, step: int) -> bytes:
        raise StoreError("there is no store")

    def value(self) -> bytes:
        return self._live.state

    def change(self, by: int) -> None:
        self._live.state = bytes((byte + by) % 256 for byte in self._live.state)
        self._live.changed()


SIDES: dict[str, Callable[[Path], Training]] = {"torch": TorchTraining, "simulated": SimTraining}


@pytest.fixture(params=SIDES)
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    yield SIDES[request.param](tmp_path)


class Snapshot:
    """One copy, from its beginning to its seal."""

    def __init__(self, training: Training) -> None:
        self.gathered: Gathered = training.live.gather()
        self.slot = Slot.create(
            training.memory, training.path, self.gathered.payload_bytes, 64 * KIB
        )
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        self.copy: StateCopy = training.live.copy(self.gathered, self.slot)
        self.copy.copy_moving()

    def finish(self) -> None:
        run_acts(self.copy.copy_still())
        run_acts(self.copy.settle())
        self.copy.end()

    def seal(self) -> tuple[SlotHeader, Layout]:
        layout = self.gathered.layout
        manifest = json.dumps(layout.to_json()).encode()
        table = self.slot.write_table(self.gathered.payload_bytes, manifest, self.copy.sums)
        self.slot.seal(table, layout.hash(), 0.0, wall_ns=1)
        return self.slot.verify()


def saved(training: Training) -> tuple[Slot, SlotHeader, Layout]:
    snapshot = Snapshot(training)
    snapshot.finish()
    assert not snapshot.copy.moved
    return (snapshot.slot, *snapshot.seal())


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.integers(1, 5) | st.sampled_from(["save", "load"]), max_size=8))
def test_what_was_copied_comes_back(training: Training, acts: list[int | str]) -> None:
    kept, value = saved(training), training.value()
    for act in acts:
        if act == "save":
            kept[0].close()
            kept, value = saved(training), training.value()
        elif act == "load":
            training.live.load(*kept)
            assert training.live.differing(*kept) == []
            assert training.value() == value
        else:
            training.change(int(act))
    kept[0].close()


def test_what_differs_from_the_snapshot_is_told(training: Training) -> None:
    kept = saved(training)
    assert training.live.differing(*kept) == []
    training.change(1)
    assert len(training.live.differing(*kept)) == 1


def test_a_bit_that_flips_in_the_slot_is_no_difference_of_the_program(training: Training) -> None:
    kept = saved(training)
    training.live.load(*kept)
    kept[0].payload[100] ^= 4
    with suppress(DamageError):  # or what was sealed is still known
        assert training.live.differing(*kept) == []


def test_a_copy_that_mixes_two_moments_says_so(training: Training) -> None:
    snapshot = Snapshot(training)
    training.change(1)
    snapshot.finish()
    assert len(snapshot.copy.moved) == 1


def test_what_is_copied_eagerly_is_of_the_boundary(training: Training) -> None:
    first = Snapshot(training)
    training.change(1)
    first.finish()
    training.live.copy_eagerly(first.copy.moved)
    first.slot.close()
    before = training.value()
    snapshot = Snapshot(training)
    training.change(1)
    snapshot.finish()
    assert not snapshot.copy.moved
    training.live.load(snapshot.slot, *snapshot.seal())
    assert training.value() == before


def test_after_the_fence_the_state_may_be_overwritten(training: Training) -> None:
    before = training.value()
    snapshot = Snapshot(training)
    run_acts(snapshot.copy.copy_still())
    snapshot.copy.fence()
    training.change(1)
    run_acts(snapshot.copy.settle())
    snapshot.copy.end()
    assert not snapshot.copy.moved
    training.live.load(snapshot.slot, *snapshot.seal())
    assert training.value() == before


def test_sums_are_those_of_the_payload(training: Training) -> None:
    snapshot = Snapshot(training)
    snapshot.finish()
    size = snapshot.slot.block_bytes
    true = block_checksums(snapshot.slot.payload[: snapshot.gathered.payload_bytes], size)
    assert all(true[block] == found for block, found in snapshot.copy.sums.items())


def test_what_is_coming_has_room_for_what_is_there(training: Training) -> None:
    gathered = training.live.gather()
    payload_bytes, manifest_bytes, _ = training.live.coming_bytes()
    assert payload_bytes >= gathered.payload_bytes >= gathered.layout.objects_offset
    assert manifest_bytes >= len(json.dumps(gathered.layout.to_json()))


def test_what_does_not_fit_changes_nothing(training: Training) -> None:
    slot, header, layout = saved(training)
    training.change(1)
    before = training.value()
    spec = layout.segments[0].spec
    other = replace(layout.segments[0], spec=replace(spec, name="another"))
    with pytest.raises(LayoutError):
        training.live.load(slot, header, replace(layout, segments=(other, *layout.segments[1:])))
    assert training.value() == before


def test_a_checkpoint_that_cannot_be_had_changes_nothing(training: Training) -> None:
    before = training.value()
    with pytest.raises(StoreError):
        training.live.load_checkpoint(3)
    assert training.value() == before
