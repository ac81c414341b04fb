"""The simulated format: states come back as they were, also for another number of ranks, and what
is not what nodes have said is refused."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, StoreError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.job.checkpoint_format import SimFormat, SurveyedStates, read_state
from keepstep.sim.protocol.job.oracle import advance
from keepstep.sim.protocol.job.persisters import open_store
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import World

STEP = 7
NBYTES = 300
RANKS = (2, 1)
MIXED = bytes(range(16))
ATTEMPT = CheckpointAttempt("j", Stamp(STEP, 1), 5, RANKS)


class Nodes:
    """Two nodes, whose ranks hold the step, and a store."""

    def __init__(self) -> None:
        world = World(1)
        self.disk = SharedDisk(Random(1))
        self.machines = [Machine(world, node, None, 1 << 20) for node in range(len(RANKS))]
        processes = [machine.start("persister") for machine in self.machines]
        self.stores = [open_store("simulated://s", self.disk, process) for process in processes]
        self.formats = [
            SimFormat(store, machine.clock)
            for store, machine in zip(self.stores, self.machines, strict=True)
        ]
        self.drafts = [store.draft(ATTEMPT.name) for store in self.stores]
        memories = [
            SimMemory(machine.files, process)
            for machine, process in zip(self.machines, processes, strict=True)
        ]
        self.slots = [
            [_slot(memories[node], rank) for rank in ATTEMPT.ranks_of(node)]
            for node in range(len(RANKS))
        ]

    @property
    def store(self) -> Store:
        return self.stores[0]

    def survey(self, node: int) -> SurveyedStates:
        return self.formats[node].survey(self.drafts[node], ATTEMPT, node, self.slots[node])

    def write_part(self, node: int, values: SurveyedStates) -> int:
        return self.formats[node].write_part(self.drafts[node], ATTEMPT, node, values)

    def publish(self) -> None:
        self.formats[0].publish(self.drafts[0], ATTEMPT)


def _slot(memory: SimMemory, rank: int) -> Slot:
    layout = lay_out([TensorSpec("state", "uint8", (NBYTES,), NBYTES)])
    slot = Slot.create(memory, slot_path(Path("/memory/j"), rank, 0), NBYTES, 4096)
    slot.begin(bytes(16), rank, sum(RANKS), 1, ATTEMPT.stamp)
    slot.payload[:NBYTES] = advance(MIXED, rank, STEP, NBYTES)
    table = slot.write_table(NBYTES, json.dumps(layout.to_json()).encode())
    slot.seal(table, layout.hash(), 0.25, wall_ns=1)
    return slot


def _written() -> Nodes:
    nodes = Nodes()
    surveyed = [nodes.survey(node) for node in range(len(RANKS))]
    for node, values in enumerate(surveyed):
        assert nodes.write_part(node, values) == RANKS[node] * NBYTES
    return nodes


def test_every_rank_reads_what_it_wrote_and_others_go_on_from_the_same() -> None:
    nodes = _written()
    assert not nodes.formats[1].already_there(ATTEMPT)
    nodes.publish()
    assert nodes.formats[1].already_there(ATTEMPT)
    for rank in range(5):
        expected = advance(MIXED, rank, STEP, NBYTES)
        assert read_state(nodes.stores[1], STEP, rank, NBYTES) == expected
    assert nodes.store.read_manifest(STEP).metrics == {"loss": 0.25}


def test_a_part_needs_the_surveys_of_all() -> None:
    nodes = Nodes()
    with pytest.raises(StoreError):
        nodes.write_part(0, nodes.survey(0))


def test_nothing_is_published_without_all_parts() -> None:
    nodes = Nodes()
    surveyed = [nodes.survey(node) for node in range(len(RANKS))]
    nodes.write_part(0, surveyed[0])
    with pytest.raises(StoreError):
        nodes.publish()
    assert nodes.store.look().usable == []


def test_a_state_that_changed_after_its_survey_is_not_written() -> None:
    nodes = Nodes()
    surveyed = [nodes.survey(node) for node in range(len(RANKS))]
    nodes.slots[1][0].payload[NBYTES - 1] ^= 1
    with pytest.raises(DamageError):
        nodes.write_part(1, surveyed[1])


def test_another_jobs_checkpoint_is_not_taken_for_ours() -> None:
    nodes = _written()
    nodes.publish()
    theirs = CheckpointAttempt("theirs", ATTEMPT.stamp, 6, RANKS)
    assert not nodes.formats[0].already_there(theirs)


def test_every_single_bit_of_a_state_is_guarded() -> None:
    nodes = _written()
    nodes.publish()
    data = nodes.disk.files[f"s/{ATTEMPT.name.directory}/{ATTEMPT.data_name(1)}"].data
    for bit in range(0, 8 * NBYTES, 97):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamageError):
            read_state(nodes.store, STEP, 1, NBYTES)
        data[bit // 8] ^= 1 << bit % 8
    assert len(read_state(nodes.store, STEP, 1, NBYTES)) == NBYTES
