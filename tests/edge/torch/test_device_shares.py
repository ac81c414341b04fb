"""Shares of what is on a device: what others keep never leaves it, its digest is that of the bytes
it would have had in the slot, and two replicas that differ in a bit share nothing. The device is a
fake; the slots are real."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.redundancy.shares import SharePlan
from keepstep.core.resume.cut import Holding, agree
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm import copy_table, proven_payload
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.proven_payload import ProvenPayload
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.whole import whole
from keepstep.edge.torch import capture, copy_plans, device_copy, device_digests, tree
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import CopyStream
from keepstep.edge.torch.digests import digest_of, keys_of
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import Protected
from keepstep.edge.torch.still import still_blocks
from keepstep.errors import DamageError
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from tests.edge.torch.fake_device import FakeDevice

CPU = torch.device("cpu")  # stands for the device
BLOCK_BYTES = 4 * KIB
JOB = bytes(range(16))
STAMP = Stamp(5, 1)
KEYS = keys_of(JOB, BLOCK_BYTES // 4)


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


MEMORY = SmallBlocks()


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nbytes in (("PIECE", 4), ("TURN", 8), ("BUCKET", 8), ("SMALL", 1)):
        room = device_copy if name == "TURN" else copy_plans
        monkeypatch.setattr(room, f"{name}_BYTES", nbytes * KIB)
    monkeypatch.setattr(device_digests, "PIECE_BYTES", 8 * KIB)
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", KIB)
    monkeypatch.setattr(capture, "begin_host_thread", lambda: None)
    # counters of steps are on the host, as torch's optimizers have them
    monkeypatch.setattr(tree, "by_address", lambda tensor: tensor.numel() == 1)


class Replica:
    """Parameters of all kinds under an optimizer, on a fake device."""

    def __init__(self, rank: int, job_dir: Path) -> None:
        self.rank, self.job_dir = rank, job_dir
        draw = torch.Generator().manual_seed(0)
        flat = torch.randn(9000, generator=draw).to(torch.bfloat16)
        values = [
            torch.randn(3001, generator=draw),
            flat[1:5002],  # no whole words, and none where it begins
            torch.randn(40, generator=draw),
            torch.randint(-128, 127, (5003,), dtype=torch.int8, generator=draw),
            torch.randn(700, generator=draw).to(torch.complex64),
            torch.randn(3, generator=draw).to(torch.bfloat16),
            torch.randn(2500, generator=draw).double(),
            torch.randint(0, 2, (4097,), generator=draw).bool(),
        ]
        self.parameters = [torch.nn.Parameter(v, requires_grad=False) for v in values]
        self.optimizer = torch.optim.SGD(self.parameters, 0.1)
        for number, parameter in enumerate(self.parameters):
            state = self.optimizer.state[parameter]
            state["step"] = torch.full((1,), float(number + 3))
            state["average"] = torch.randn(number * 300 + 2, generator=draw)
        things = {f"p{i}": p for i, p in enumerate(self.parameters)}
        self.protected = Protected.of({**things, "optimizer": self.optimizer}, lazy=True)
        torch.manual_seed(rank)  # random states are each rank's own
        self.device = FakeDevice(random.Random(0).randrange)
        self.locks = PageLocks(self.device.pages)
        self.plans = CopyPlans({CPU: CopyStream(CPU, self.device, self.device)})

    def still(self) -> frozenset[int]:
        return still_blocks(self.protected.gather(), BLOCK_BYTES, {CPU})

    def copied(self, slot: Slot, lacking: frozenset[int], shared: frozenset[int]) -> TensorCopy:
        slot.begin(JOB, self.rank, 2, 1, STAMP)
        self.locks.lock(slot)
        there = slot.payload_address, slot.payload_address + slot.capacity
        self.device.pages.hosts.add(there)
        copy = TensorCopy(
            self.protected.gather(),
            slot,
            locks=self.locks,
            plans=self.plans,
            lacking=lacking,
            shared=shared,
            known_bad=KnownBad(),
        )
        copy.copy_moving()
        slot.shed(lacking)
        run_acts(copy.copy_still())
        assert not copy.not_finite()
        slot.before_close(lambda: self.device.pages.hosts.discard(there))
        return copy

    def slot(self, index: int) -> Slot:
        path = slot_path(self.job_dir, self.rank, index)
        path.parent.mkdir(exist_ok=True)
        nbytes = self.protected.gather().payload_bytes
        return Slot.create(MEMORY, path, nbytes + 4 * KIB, 64 * KIB)

    def alone(self) -> bytes:
        """Its payload, all of which it keeps: the oracle."""
        with closing(self.slot(9)) as slot:
            copy = self.copied(slot, frozenset(), frozenset())
            return bytes(slot.payload[: copy.state.payload_bytes])

    def sealed(self, plan: SharePlan) -> tuple[Slot, TensorCopy, Holding]:
        """As the session does it."""
        slot = self.slot(0)
        copy = self.copied(slot, plan.lacked_by(self.rank), plan.shared)
        layout = copy.state.layout
        text = json.dumps(layout.to_json()).encode()
        is_digested = bool(copy.digests)
        header = slot.write_table(copy.state.payload_bytes, text, copy.sums, is_digested)
        told = [copy.digests.get(block, s) for block, s in enumerate(slot.table(header))]
        share = plan.share(told, lacks=True)
        slot.seal(header, layout.hash(), 0.0, 1, share)
        return slot, copy, Holding(frozenset({STAMP}), None, 5, shares=((STAMP, share),))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Replica]]:
    yield [Replica(rank, tmp_path) for rank in range(2)]


def plan_for(replicas: list[Replica]) -> SharePlan:
    ranks = tuple(replica.rank for replica in replicas)
    return SharePlan(ranks, tuple(sorted(replicas[0].still())), BLOCK_BYTES)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_digests_are_those_of_the_bytes_and_what_others_keep_stays(seed: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-shares-") as home:
        look_at_digests(random.Random(seed), Replica(0, Path(home)))


def look_at_digests(draw: random.Random, replica: Replica) -> None:
    payload, still = replica.alone(), replica.still()
    assert len(still) > 10
    shared = frozenset(block for block in still if draw.random() < 0.7)
    lacking = frozenset(block for block in shared if draw.random() < 0.5)
    with closing(replica.slot(1)) as slot:
        full_bytes = MEMORY.size(slot.path)
        copy = replica.copied(slot, lacking, shared)
        left_bytes = full_bytes - MEMORY.size(slot.path)
        assert left_bytes == len(lacking) * BLOCK_BYTES, "nobody has touched what is not there"
        for block in range(len(payload) // BLOCK_BYTES):
            at = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            found = bytes(slot.payload[at])
            assert found == (bytes(BLOCK_BYTES) if block in lacking else payload[at]), block
            if block in shared:
                assert copy.digests[block] == digest_of(payload[at], KEYS), block
        assert copy.digests.keys() == shared
        assert {b: copy.sums[b] for b in lacking} == {b: copy.digests[b] for b in lacking}
        assert copy.device_bytes <= len(payload) - len(lacking) * BLOCK_BYTES


def test_two_replicas_keep_one_snapshot_and_each_gets_all_of_it_back(pair: list[Replica]) -> None:
    """REFT's sharded snapshot: of two, half of what is shared leaves each device."""
    plan = plan_for(pair)
    expected = [replica.alone() for replica in pair]
    sealed = [replica.sealed(plan) for replica in pair]
    assert agree(STAMP, [holding for _, _, holding in sealed])
    whole_bytes = sum(s.spec.nbytes for s in sealed[0][1].state.layout.segments)
    for slot, copy, _ in sealed:
        own = (len(expected[0]) // BLOCK_BYTES + 1 - len(plan.blocks)) * BLOCK_BYTES
        assert copy.device_bytes <= whole_bytes / 2 + own + BLOCK_BYTES
        slot.verify_bytes()
    for (slot, _, _), payload in zip(sealed, expected, strict=True):
        with whole(MEMORY, slot) as found:
            header, layout = found.verify()
            end = layout.objects_offset
            assert bytes(found.payload[:end]) == payload[:end] and not found.lacking()
            assert header.is_digested
    for slot, _, _ in sealed:
        slot.close()


def test_it_is_read_block_by_block_too(
    pair: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(proven_payload, "MEMORY", MEMORY)
    plan, payload = plan_for(pair), pair[0].alone()
    sealed = [replica.sealed(plan) for replica in pair]
    with closing(ProvenPayload(sealed[0][0])) as proven:
        target = bytearray(proven.layout.objects_offset)
        proven.read_into(0, memoryview(target))
        assert bytes(target) == payload[: len(target)]
    sealed[1][0].payload[max(plan.kept_by(1)) * BLOCK_BYTES] ^= 1
    with closing(ProvenPayload(sealed[0][0])) as proven, pytest.raises(DamageError):
        proven.read_into(0, memoryview(target))
    for slot, _, _ in sealed:
        slot.close()


@pytest.mark.parametrize("number", range(8))
def test_a_bit_that_differs_on_one_device_is_found_and_nothing_of_it_is_taken(
    pair: list[Replica], number: int
) -> None:
    """Wherever it is: also where nobody copies it to the host."""
    plan = plan_for(pair)
    values = pair[1].parameters[number].data
    with torch.no_grad():
        bits = values.view(torch.uint8)
        bits[len(bits) // 2] ^= 1
    sealed = [replica.sealed(plan) for replica in pair]
    assert not agree(STAMP, [holding for _, _, holding in sealed])
    for slot, _, _ in sealed:
        with pytest.raises(LookupError, match="with nobody"), whole(MEMORY, slot):
            pass
        slot.close()


def test_a_counter_on_the_host_that_differs_is_found(pair: list[Replica]) -> None:
    plan = plan_for(pair)
    pair[1].optimizer.state[pair[1].parameters[2]]["step"] += 1
    sealed = [replica.sealed(plan) for replica in pair]
    assert not agree(STAMP, [holding for _, _, holding in sealed])
    for slot, _, _ in sealed:
        slot.close()


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_lies_elsewhere_by_now_is_digested_there(tmp_path: Path, is_watched: bool) -> None:
    """What is worked out for a slot holds until a tensor is another one; an optimizer with hooks is
    asked each time which it has."""
    replica = Replica(0, tmp_path)
    if not is_watched:
        replica.optimizer.register_state_dict_pre_hook(lambda optimizer: None)
    still = replica.still()
    with closing(replica.slot(0)) as slot:
        before = replica.copied(slot, frozenset(), still).digests
        states = [replica.optimizer.state[parameter] for parameter in replica.parameters]
        for state in states:
            state["step"] = state["step"] + 1
        payload = replica.alone()
        found = replica.copied(slot, frozenset(), still).digests
        assert found != before
        for block in still:
            at = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            assert found[block] == digest_of(payload[at], KEYS), block
