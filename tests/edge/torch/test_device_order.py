"""What is ordered on a device, in every order that the device may choose.

A rank trains on a fake device: gradients, a collective of NCCL's, two optimizers, a snapshot each
step. Trainer, device, capture thread and whoever hears of a lost peer act in an order that is
drawn. What is sealed must be the state of its step, byte for byte, as an undisturbed run has it;
and without a loss everything is sealed, and the training itself has computed what it should.

Each rule that holds this is taken away once, and the loss of it seen.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm import copy_table
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import (
    capture,
    copy_plans,
    device_copy,
    device_digests,
    page_locks,
    tree,
)
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import CopyStream
from keepstep.edge.torch.device_copy import DeviceCopy
from keepstep.edge.torch.device_digests import BlockDigests
from keepstep.edge.torch.digests import DigestPiece, digest_of, keys_of
from keepstep.edge.torch.groups import TorchGroup
from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import Protected
from keepstep.edge.torch.still import still_blocks
from keepstep.edge.torch.works import QueuedWork
from keepstep.errors import DamageError
from keepstep.model.layout import Layout, Segment
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.units import KIB
from tests.edge.torch.fake_device import FakeDevice, FakeEvent, FakeNccl
from tests.edge.torch.worked_off import WorkedOff

CPU = torch.device("cpu")  # stands for the device
STEPS = 4
SIZES = (3000, 40, 50, 700)  # some are cut in pieces, some are packed
SEEDS = 150
CONSUMERS = ("wait", "future", "callback")


class SmallBlocks(SharedMemory):
    """Several blocks in a small slot."""

    block_bytes = 4 * KIB


MEMORY = SmallBlocks()


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plans, "PIECE_BYTES", 4 * KIB)
    monkeypatch.setattr(device_copy, "TURN_BYTES", 4 * KIB)
    monkeypatch.setattr(copy_plans, "BUCKET_BYTES", 4 * KIB)
    monkeypatch.setattr(copy_plans, "SMALL_BYTES", KIB)
    # Else each run that shares takes 128 MiB of addresses until its cycles are collected, and a
    # process that has taken more than the machine has cannot fork.
    monkeypatch.setattr(device_digests, "PIECE_BYTES", 4 * KIB)
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", KIB)
    monkeypatch.setattr(tree, "by_address", lambda tensor: False)  # as of a tensor on a device
    monkeypatch.setattr(capture, "begin_host_thread", lambda: None)


def after(step: int, index: int) -> float:
    """The value of each parameter then: every step adds what two ranks have computed."""
    return float(index + sum(2 * (k + 1 + index) for k in range(step + 1)))


class Training:
    """One rank on a fake device. `draw` is asked whose turn it is."""

    def __init__(
        self,
        home: Path,
        draw: random.Random,
        loses: bool,
        locked: bool = True,
        shares: bool = False,
    ) -> None:
        self.home, self.draw, self.shares = home, draw, shares
        self.device = FakeDevice(draw.randrange, self._somebody_hears)
        self.nccl = FakeNccl(self.device)
        self.members = Membership()
        self.members.device = CPU
        self.members.watched = True
        self.group = TorchGroup(
            dist.HashStore(),
            0,
            2,
            timedelta(seconds=10),
            "g",
            self.members,
            build=lambda *_: self.nccl,
        )
        self.parameters = [
            torch.nn.Parameter(torch.full((n,), float(i))) for i, n in enumerate(SIZES)
        ]
        self.gradients = [torch.zeros(n) for n in SIZES]
        self.optimizers = [
            torch.optim.SGD(self.parameters[:2], 0.1),
            torch.optim.SGD(self.parameters[2:], 0.1),
        ]
        things = {f"p{i}": p for i, p in enumerate(self.parameters)}
        self.protected = Protected.of(
            {**things, "one": self.optimizers[0], "two": self.optimizers[1]}, lazy=True
        )
        self.locks = PageLocks(self.device.pages)
        self.locked, self.refused = locked, 0
        self.plans = CopyPlans({CPU: CopyStream(CPU, self.device, self.device)})
        self.shared = self.lacking = frozenset[int]()
        if shares:
            self.shared = still_blocks(self.protected.gather(), MEMORY.block_bytes, {CPU})
            self.lacking = frozenset(b for b in self.shared if draw.random() < 0.6)
        self.digests: dict[int, dict[int, int]] = {}  # by step
        self.slots: list[Slot] = []
        for index in range(2):
            self.slots.append(self._slot(index))
        self.busy: set[int] = set()
        self.sealed: dict[int, int] = {}  # the step in each slot
        self.begun_count = self.sealed_count = 0
        self.torn: list[str] = []
        self.copy: TensorCopy | None = None
        self.background: list[Iterator[None]] = []
        self.step = -1
        self.loses = loses
        self.is_told = False
        self.speed = draw.randrange(1, 5)  # of the device, beside the trainer's
        self.consumer = CONSUMERS[draw.randrange(len(CONSUMERS))]

    def _slot(self, index: int) -> Slot:
        nbytes = self.protected.gather().payload_bytes
        slot = Slot.create(MEMORY, self.home / f"slot-{index}", nbytes + 4 * KIB, 16 * KIB)
        if self.locked and self.locks.lock(slot) is not None:
            self.refused += 1
        there = (slot.payload_address, slot.payload_address + slot.capacity)
        self.device.pages.hosts.add(there)
        slot.before_close(lambda: self.device.pages.hosts.discard(there))
        return slot

    # -- the trainer

    def program(self) -> Iterator[None]:
        for step in range(STEPS):
            self.step = step
            self.members.begin_body()
            yield from self._backward(step)
            for number, optimizer in enumerate(self.optimizers):
                if self.members.is_lost and self.members.is_worthless:
                    return  # the body is given up
                if self.copy is not None:
                    self.copy.fence(optimizer)
                self._update(2 * number)
                yield
            if self.members.is_lost:
                return
            self._boundary(step)
            yield

    def _backward(self, step: int) -> Iterator[None]:
        for index, gradient in enumerate(self.gradients):
            value = float(step + 1 + index)
            self.device.current.order(lambda g=gradient, v=value: g.fill_(v))  # type: ignore[misc]
            yield
            work = self.group.allreduce([gradient], self._options())
            if self.consumer == "wait":
                work.wait()
            elif self.consumer == "future":
                work.get_future().wait()
            else:  # a hook of DDP's: what it returns is waited for
                work.get_future().then(lambda done: done.value()).wait()
            yield

    def _options(self) -> Any:
        """Some callers say that they wait at once."""
        options = c10d.AllreduceOptions()
        if self.consumer == "wait":
            options.asyncOp = self.draw.random() < 0.5
        return options

    def _update(self, first: int) -> None:
        """Kernels, which no version counter sees."""
        for parameter, gradient in list(zip(self.parameters, self.gradients, strict=True))[
            first : first + 2
        ]:
            self.device.current.order(
                lambda p=parameter.data, g=gradient: p.add_(g)  # type: ignore[misc]
            )

    def _boundary(self, step: int) -> None:
        if self.copy is not None:
            self.copy.passed()
            self.torn += self.copy.moved
        index = next((i for i in range(2) if i not in self.busy), None)
        if index is None:
            self.copy = None
            return
        if self.draw.random() < 0.2:  # the keeper has brought another file to its place
            self.slots[index].close()
            self.slots[index] = self._slot(index)
        slot = self.slots[index]
        self.busy.add(index)
        self.sealed.pop(index, None)
        self.begun_count += 1
        slot.begin(bytes(16), 0, 1, 1, Stamp(step, 1))
        self.copy = TensorCopy(
            self.protected.gather(),
            slot,
            done=WorkedOff(lambda: self._advance(self.background)),
            turn=step,
            lacking=self.lacking,
            shared=self.shared,
            locks=self.locks,
            plans=self.plans,
        )
        self.copy.copy_moving()
        mark = self.members.mark()
        self.background.append(self._capture(index, step, self.copy, mark))

    # -- beside it

    def _capture(self, index: int, step: int, copy: TensorCopy, mark: Any) -> Iterator[None]:
        slot = self.slots[index]
        yield
        slot.shed(self.lacking)
        run_acts(copy.copy_still())
        yield
        text = json.dumps(copy.state.layout.to_json()).encode()
        header = slot.write_table(copy.state.payload_bytes, text, copy.sums)
        yield
        if copy.moved or not self.members.stands(mark):
            slot.void()
        else:
            slot.seal(header, copy.state.layout.hash(), 0.0, wall_ns=1)
            self.digests[step] = dict(copy.digests)
            assert all(copy.sums[block] == copy.digests[block] for block in self.lacking)
            if self.shares:
                self.locks.lock(slot)
            self.sealed[index] = step
            self.sealed_count += 1
        self.busy.discard(index)

    def _advance(self, some: list[Iterator[None]]) -> None:
        """One after the other, as the capture thread does."""
        try:
            next(some[0])
        except StopIteration:
            some.pop(0)

    def _somebody_hears(self) -> bool:
        """Of the lost peer; whether that was news."""
        if not self.nccl.is_peer_lost or self.is_told:
            return False
        self.is_told = True
        self.members.lose("rank 1 was killed")
        self.group.abort()
        return True

    # -- all of it

    def run(self) -> Training:
        trainer = [self.program()]
        while trainer or self.background:
            moves: list[Callable[[], Any]] = [self.device.run_one] * self.speed
            if trainer:
                moves += [lambda: self._advance(trainer)] * 2
            if self.background:
                moves.append(lambda: self._advance(self.background))
            if self.loses and self.draw.random() < 0.02:
                self.nccl.is_peer_lost = True
            if self.nccl.is_peer_lost and self.draw.random() < 0.1:
                self._somebody_hears()
            moves[self.draw.randrange(len(moves))]()
        self._somebody_hears()
        self.device.synchronize()
        return self

    def _check_kept(self, slot: Slot, segment: Segment, value: float) -> None:
        """And what is not kept reads as zeros: nothing was written there."""
        found = slot.payload[segment.offset : segment.end].cast("f").tolist()
        size = MEMORY.block_bytes
        for at, one in enumerate(found):
            is_there = (segment.offset + 4 * at) // size not in self.lacking
            assert one == (value if is_there else 0), f"value {at} of {segment.spec.name}"

    def _check_digests(self, layout: Layout) -> None:
        """Of all that is shared, at each step that was sealed."""
        size = MEMORY.block_bytes
        keys = keys_of(bytes(16), size // 4)
        for step, digests in self.digests.items():
            assert digests.keys() == self.shared
            payload = bytearray(layout.objects_offset)
            for segment in layout.segments:
                if segment.spec.name[0] == "p":
                    number = int(segment.spec.name[1:])
                    values = struct.pack("f", after(step, number)) * SIZES[number]
                    payload[segment.offset : segment.end] = values
            for block, found in digests.items():
                expected = digest_of(payload[block * size : (block + 1) * size], keys)
                assert found == expected, f"step {step}, block {block}"

    def check(self) -> None:
        """Against an undisturbed run."""
        layout = self.protected.gather().layout
        for index, step in self.sealed.items():
            self.slots[index].close()
            slot = Slot(MEMORY, self.home / f"slot-{index}")
            header, layout = slot.verify()
            assert (header.state, header.stamp.step) == (SlotState.SEALED, step)
            for segment in layout.segments:
                if segment.spec.name[0] != "p":
                    continue
                number = int(segment.spec.name[1:])
                if self.shares:
                    self._check_kept(slot, segment, after(step, number))
                    continue
                found = slot.payload[segment.offset : segment.end].cast("f").tolist()
                assert len(found) == SIZES[number]
                # sets: pytest would spend minutes on telling two long lists apart
                assert set(found) == {after(step, number)}, f"step {step}, {segment.spec.name}"
            slot.close()
        self._check_digests(layout)
        if not self.nccl.is_peer_lost:
            assert self.torn == [] and self.sealed_count == self.begun_count > 0
            for index, parameter in enumerate(self.parameters):
                assert parameter.tolist() == [after(STEPS - 1, index)] * SIZES[index]


def trained(
    draw: random.Random, loses: bool, locked: bool = True, shares: bool = False
) -> Training:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-order-") as home:
        training = Training(Path(home), draw, loses, locked, shares)
        try:
            training.run().check()
        finally:
            for slot in training.slots:
                slot.before_close(lambda: None)
        return training


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans())
def test_what_is_sealed_is_the_state_of_its_step_in_whatever_order_the_device_works(
    seed: int, loses: bool, locked: bool, shares: bool
) -> None:
    assert trained(random.Random(seed), loses, locked, shares).refused == 0


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("loses", [False, True], ids=["all stay", "one is lost"])
def test_many_orders(loses: bool, shares: bool) -> None:
    found = [trained(random.Random(seed), loses, shares=shares) for seed in range(SEEDS)]
    sealed = sum(training.sealed_count for training in found)
    assert sealed > SEEDS // 2, "a run that seals nothing proves nothing"
    digested = sum(len(digests) for training in found for digests in training.digests.values())
    assert (digested > SEEDS) == shares


def is_found(loses: bool, shares: bool = False) -> bool:
    """Whether some order shows it."""
    for seed in range(SEEDS):
        try:
            trained(random.Random(seed), loses, shares=shares)
        except AssertionError:
            return True
    return False


def test_a_collective_that_counts_as_over_when_it_is_queued_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(QueuedWork, "has_ended", lambda self: True)
    assert is_found(loses=True)


def test_a_snapshot_that_is_sealed_though_its_collectives_had_not_ended_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "stands", lambda self, mark: True)
    assert is_found(loses=True)


def test_an_abort_before_anybody_has_looked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hears = Training._somebody_hears

    def in_the_wrong_order(self: Training) -> bool:
        if self.nccl.is_peer_lost and not self.is_told:
            self.nccl.abort()
            self.device.synchronize()
        return hears(self)

    monkeypatch.setattr(Training, "_somebody_hears", in_the_wrong_order)
    assert is_found(loses=True)


def test_a_bare_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Done when the collective is queued, and nobody is made to wait on the device."""

    def bare(self: QueuedWork) -> Future[Any]:
        own: Future[Any] = Future()
        self._inner.get_future().add_done_callback(lambda done: own.set_result(done.value()))
        return own

    monkeypatch.setattr(QueuedWork, "get_future", bare)
    monkeypatch.setattr(QueuedWork, "wait", lambda self, timeout=None: bool(bare(self).wait()))
    assert is_found(loses=False)


@pytest.mark.parametrize("which", ["lead", "follow"])
def test_a_fence_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    if which == "lead":
        monkeypatch.setattr(DeviceCopy, "lead", lambda self, optimizer: True)
    else:
        monkeypatch.setattr(CopyStream, "follow", lambda self: None)
    assert is_found(loses=False)


def test_digests_that_no_update_waits_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are fenced, the digests are not."""

    def beside(self: FakeDevice, piece: DigestPiece) -> None:
        own, before = self.new_stream("own"), FakeEvent(self)
        before.record(self.current)
        own.wait_event(before)
        own.order(piece.add)

    monkeypatch.setattr(FakeDevice, "digest", beside)
    assert is_found(loses=False, shares=True)


def test_sums_that_are_read_before_they_have_landed_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = BlockDigests.read_back
    monkeypatch.setattr(BlockDigests, "read_back", lambda self, streams: read(self, streams)[:0])
    assert is_found(loses=False, shares=True)


def test_sums_that_begin_with_those_of_the_last_snapshot_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockDigests, "begin", lambda self, streams: None)
    assert is_found(loses=False, shares=True)


def test_turns_that_do_not_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def just_switches(self: CopyStream) -> None:
        self._turn = 1 - self._turn

    monkeypatch.setattr(CopyStream, "take_turns", just_switches)
    with pytest.raises((DamageError, AssertionError)):
        for seed in range(SEEDS):
            trained(random.Random(seed), loses=False)


def test_a_fence_for_the_wrong_optimizer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lead = DeviceCopy.lead
    monkeypatch.setattr(
        DeviceCopy, "lead", lambda self, number: lead(self, None if number is None else 0)
    )
    assert is_found(loses=False)


def test_pages_that_stay_locked_behind_their_map_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next map may lie at the same address, over other pages."""

    def forgets(self: PageLocks, slot: Slot) -> None:
        lock = self._locks.pop(slot, None)
        if lock is not None:
            for address, _ in lock.ranges:
                page_locks._kept.pop(address).release()

    monkeypatch.setattr(PageLocks, "_end", forgets)
    assert is_found(loses=False)


def test_hashing_before_the_bytes_have_landed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepstep.edge.torch.copy_stream import Landing

    monkeypatch.setattr(Landing, "wait", lambda self: None)
    with pytest.raises((DamageError, AssertionError)):
        for seed in range(SEEDS):
            trained(random.Random(seed), loses=False)


def test_what_an_updated_optimizer_keeps_on_the_host_tears_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counters of steps are there also where everything else is on a device."""
    monkeypatch.setattr(tree, "by_address", lambda tensor: tensor.numel() == 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-order-") as home:
        device = FakeDevice(random.Random(0).randrange)
        parameters = [torch.nn.Parameter(torch.ones(900)) for _ in range(2)]
        optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in parameters]
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            optimizer.state[parameter]["step"] = torch.zeros(1)
        things = dict(zip(("a", "b", "one", "two"), (*parameters, *optimizers), strict=True))
        protected = Protected.of(things, lazy=True)
        locks = PageLocks(device.pages)
        slot = Slot.create(
            MEMORY, Path(home) / "slot-0", protected.gather().payload_bytes, 16 * KIB
        )
        locks.lock(slot)
        slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        plans = CopyPlans({CPU: CopyStream(CPU, device, device)})
        copy = TensorCopy(protected.gather(), slot, locks=locks, plans=plans)
        copy.copy_moving()
        assert copy.done.is_set(), "no update waits for a thread"
        assert not copy.fence(optimizers[0]), "the other one has to wait as well"
        optimizers[0].state[parameters[0]]["step"] += 1
        assert copy.fence(optimizers[1])
        run_acts(copy.copy_still())
        assert copy.moved == []
        slot.close()
