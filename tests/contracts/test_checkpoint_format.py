"""What every `CheckpointFormat` does: two nodes write one checkpoint, which gives each rank its
bytes again, or there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest
import torch

from keepstep.edge.os.clock import SystemClock
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.store.draft import Draft
from keepstep.edge.store.store import Store
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.dcp.format import DcpFormat
from keepstep.edge.torch.dcp.read import read_checkpoint
from keepstep.edge.torch.state import Protected
from keepstep.errors import DamageError, KeepstepError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.layout import Layout, TensorSpec, lay_out
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from keepstep.ports import CheckpointFormat
from keepstep.sim.protocol.job.checkpoint_format import SimFormat, read_state
from keepstep.sim.protocol.job.persisters import open_store
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE_BYTES = 3000
STEP = 5
NODES = (2, 1)  # ranks of each
ATTEMPT = CheckpointAttempt("job", Stamp(STEP, 1), 17, NODES)

Format = CheckpointFormat[Draft, Any]


class Side(Protocol):
    """One world's format and store."""

    store: Store
    format: Format

    def seal(self, path: Path, rank: int) -> Slot:
        """Its state in a slot, as its rank writes it."""

    def read(self, rank: int) -> bytes:
        """The state that the checkpoint gives this rank."""


class TorchSide:
    def __init__(self, room: Path) -> None:
        self.store = Store(room / "store")
        self.format: Format = DcpFormat(self.store, SystemClock())

    def seal(self, path: Path, rank: int) -> Slot:
        tensor = torch.frombuffer(bytearray(state_of(rank)), dtype=torch.uint8)
        state = Protected.of({"state": tensor}, lazy=False).gather()
        slot = begun(path, rank, state.payload_bytes)
        copy = TensorCopy(state, slot)
        copy.copy_moving()
        run_acts(copy.copy_still())
        return sealed(slot, state.payload_bytes, state.layout)

    def read(self, rank: int) -> bytes:
        blank = torch.zeros(STATE_BYTES, dtype=torch.uint8)
        template = Protected.of({"state": blank}, lazy=False).tree()
        loaded = read_checkpoint(self.store, STEP, rank, ATTEMPT.world_size, template)
        return bytes(loaded.tree["state"].numpy())


class SimSide:
    def __init__(self, room: Path) -> None:
        machine = Machine(World(1), 0, None, 1 << 20)
        self.store = open_store("simulated://s", SharedDisk(Random(1)), machine.start("persister"))
        self.format: Format = SimFormat(self.store, machine.clock)

    def seal(self, path: Path, rank: int) -> Slot:
        layout = lay_out([TensorSpec("state", "uint8", (STATE_BYTES,), STATE_BYTES)])
        slot = begun(path, rank, STATE_BYTES)
        slot.payload[:STATE_BYTES] = state_of(rank)
        return sealed(slot, STATE_BYTES, layout)

    def read(self, rank: int) -> bytes:
        return read_state(self.store, STEP, rank, STATE_BYTES)


SIDES: dict[str, Callable[[Path], Side]] = {"torch": TorchSide, "simulated": SimSide}


def state_of(rank: int) -> bytes:
    return Random(rank).randbytes(STATE_BYTES)


def begun(path: Path, rank: int, payload_bytes: int) -> Slot:
    slot = Slot.create(MEMORY, path, payload_bytes, 64 * KIB)
    slot.begin(bytes(16), rank, ATTEMPT.world_size, 1, ATTEMPT.stamp)
    return slot


def sealed(slot: Slot, payload_bytes: int, layout: Layout) -> Slot:
    manifest = json.dumps(layout.to_json()).encode()
    slot.seal(slot.write_table(payload_bytes, manifest), layout.hash(), 0.5, wall_ns=1)
    return slot


class Writing:
    """Two nodes that write one checkpoint."""

    def __init__(self, side: Side, room: Path) -> None:
        self.side = side
        ranks = range(ATTEMPT.world_size)
        self.slots = {rank: side.seal(slot_path(room, rank, 0), rank) for rank in ranks}
        leads = side.store.draft(ATTEMPT.name)
        self.drafts = [leads, side.store.draft(ATTEMPT.name)]
        self.values: dict[int, Any] = {}

    def survey(self, nodes: Sequence[int] = (0, 1)) -> None:
        for node in nodes:
            slots = [self.slots[rank] for rank in ATTEMPT.ranks_of(node)]
            self.values[node] = self.side.format.survey(self.drafts[node], ATTEMPT, node, slots)

    def part(self, nodes: Sequence[int] = (1, 0)) -> int:
        values = self.values
        draft, write = self.drafts, self.side.format.write_part
        return sum(write(draft[node], ATTEMPT, node, values[node]) for node in nodes)

    def publish(self) -> None:
        self.side.format.publish(self.drafts[0], ATTEMPT)

    def all(self) -> None:
        self.survey()
        self.part()
        self.publish()


@pytest.fixture(params=SIDES)
def writing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Writing]:
    made = Writing(SIDES[request.param](tmp_path), tmp_path)
    yield made
    made.values.clear()
    for slot in made.slots.values():
        slot.close()


def test_each_rank_gets_its_own_bytes_again(writing: Writing) -> None:
    writing.survey((1, 0))
    assert writing.part() >= ATTEMPT.world_size * STATE_BYTES
    writing.publish()
    side = writing.side
    assert [side.read(rank) for rank in range(3)] == [state_of(rank) for rank in range(3)]
    [manifest] = side.store.published()
    assert (manifest.step, manifest.job, manifest.world_size) == (STEP, "job", 3)
    assert manifest.metrics == {"loss": 0.5}
    assert side.format.already_there(ATTEMPT)


def test_until_it_is_published_there_is_none(writing: Writing) -> None:
    for act in (writing.survey, writing.part):
        act()
        assert not writing.side.format.already_there(ATTEMPT)
        assert not writing.side.store.published()


@pytest.mark.parametrize("node", [0, 1])
def test_without_a_nodes_survey_nobody_writes(writing: Writing, node: int) -> None:
    writing.survey([node])
    with pytest.raises(KeepstepError):
        writing.part([node])


@pytest.mark.parametrize("node", [0, 1])
def test_without_a_nodes_part_nothing_is_published(writing: Writing, node: int) -> None:
    writing.survey()
    writing.part([node])
    with pytest.raises(KeepstepError):
        writing.publish()
    assert not writing.side.store.published()


@pytest.mark.parametrize("rank", range(3))
def test_a_slot_that_does_not_prove_is_in_no_survey(writing: Writing, rank: int) -> None:
    writing.slots[rank].payload[100] ^= 4
    with pytest.raises(DamageError):
        writing.survey()


def test_a_node_surveys_its_own_ranks(writing: Writing) -> None:
    with pytest.raises(KeepstepError):
        writing.side.format.survey(writing.drafts[0], ATTEMPT, 0, [writing.slots[2]])


def test_another_jobs_checkpoint_is_told_apart(writing: Writing) -> None:
    writing.all()
    other = CheckpointAttempt("other", ATTEMPT.stamp, 18, NODES)
    assert not writing.side.format.already_there(other)


@pytest.mark.parametrize("rank", range(3))
def test_a_damaged_checkpoint_is_not_there(writing: Writing, rank: int) -> None:
    writing.all()
    side = writing.side
    place = side.store.place(STEP, ATTEMPT.data_name(rank))
    raw = bytearray(place.fs.cat_file(place.path))
    raw[len(raw) // 2] ^= 4
    place.fs.pipe_file(place.path, bytes(raw))
    assert not side.format.already_there(ATTEMPT)
    with pytest.raises(DamageError):
        side.read(rank)
