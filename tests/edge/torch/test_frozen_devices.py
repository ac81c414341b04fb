"""Frozen tensors on a device, in every order that the device may choose: what a slot has of them is
not copied again, and whatever is sealed is the boundary's, byte for byte.

A rank trains a head over a base that does not learn, on a fake device. Now and then something
writes to the base all the same: told by its counter, or behind it, as `.data` and kernels do. Each
rule that holds this is taken away once, and the loss of it seen.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm import copy_table
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import capture, copy_plans, device_copy, state, tree
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import CopyStream
from keepstep.edge.torch.device_copy import DeviceCopy
from keepstep.edge.torch.device_digests import BlockDigests
from keepstep.edge.torch.digests import DigestPiece
from keepstep.edge.torch.frozen import FrozenInSlots, HeldFrozen
from keepstep.edge.torch.frozen_digests import FrozenDigests, FrozenMarks
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import Protected
from keepstep.errors import DamageError
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from tests.edge.torch.fake_device import FakeDevice, FakeEvent
from tests.edge.torch.worked_off import WorkedOff

CPU = torch.device("cpu")  # stands for the device
STEPS = 8
BASE = (3000, 1300, 520, 5000)  # some share a block with others, some are packed
HEAD = (900, 30)
SEEDS = 200


class SmallBlocks(SharedMemory):
    block_bytes = 4 * KIB


MEMORY = SmallBlocks()


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nbytes in (("PIECE", 4), ("TURN", 4), ("BUCKET", 4), ("SMALL", 3)):
        room = device_copy if name == "TURN" else copy_plans
        monkeypatch.setattr(room, f"{name}_BYTES", nbytes * KIB)
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", KIB)
    monkeypatch.setattr(state, "FEWEST_BYTES", KIB)
    monkeypatch.setattr(tree, "by_address", lambda tensor: False)  # as of a tensor on a device
    monkeypatch.setattr(tree, "DIGESTING", {"cpu"})
    monkeypatch.setattr(capture, "begin_host_thread", lambda: None)


@dataclass
class Writes:
    """How often something writes to the base in a step, in percent. `is_learnt`: whether a tensor
    that was torn is copied at each boundary from then on, as the session does it."""

    counted: int = 0
    uncounted: int = 0
    is_learnt: bool = True


@dataclass(eq=False)
class Kept:
    """What a slot is to hold."""

    step: int
    base: list[float]
    head: float
    is_sealed: bool = False


@dataclass
class Seen:
    """Of one run."""

    sealed: int = 0
    compared: int = 0
    copied: list[int] = field(default_factory=list)  # bytes that left the device, by boundary
    torn: list[str] = field(default_factory=list)


class Training:
    def __init__(self, home: Path, draw: random.Random, writes: Writes, locked: bool = True):
        self.draw, self.writes, self.seen = draw, writes, Seen()
        self.device = FakeDevice(draw.randrange)
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(n), requires_grad=False) for n in BASE
        )
        self.head = [torch.nn.Parameter(torch.zeros(n)) for n in HEAD]
        self.optimizer = torch.optim.SGD(self.head, 0.1)
        things = {f"h{i}": h for i, h in enumerate(self.head)}
        self.protected = Protected.of(
            {"model": self.model, **things, "optimizer": self.optimizer}, lazy=True
        )
        self.base, self.told = [0.0] * len(BASE), 0.0  # what the program has made of them
        self.locks = PageLocks(self.device.pages)
        self.plans = CopyPlans({CPU: CopyStream(CPU, self.device, self.device)})
        self.frozen = FrozenInSlots()
        nbytes = self.protected.gather().payload_bytes
        self.slots = [
            Slot.create(MEMORY, home / f"slot-{i}", nbytes + 4 * KIB, 16 * KIB) for i in range(2)
        ]
        for slot in self.slots:
            there = (slot.payload_address, slot.payload_address + slot.capacity)
            self.device.pages.hosts.add(there)
            if locked:
                self.locks.lock(slot)
        self.busy: set[int] = set()
        self.kept: dict[int, Kept] = {}
        self.background: list[Iterator[None]] = []
        self.copy: TensorCopy | None = None
        self.speed = draw.randrange(1, 6)  # of the device, beside the trainer's

    # -- the trainer

    def program(self) -> Iterator[None]:
        for step in range(STEPS):
            self._write(self.writes.counted, is_counted=True)
            yield
            self._write(self.writes.uncounted, is_counted=False)
            yield
            if self.copy is not None:
                self.copy.fence(self.optimizer)
            self.told += 1
            for head in self.head:
                self._kernel(head, self.told)
            yield
            self._boundary(step)
            yield

    def _kernel(self, tensor: torch.Tensor, value: float) -> None:
        """No version counter sees it."""
        data = tensor.data
        self.device.current.order(lambda: data.fill_(value))

    def _write(self, percent: int, is_counted: bool) -> None:
        for number, tensor in enumerate(self.model):
            if self.draw.randrange(100) >= percent:
                continue
            self.base[number] += 1
            self._kernel(tensor, self.base[number])
            if is_counted:  # as soon as it is ordered
                tensor.detach()[:0].zero_()

    def _boundary(self, step: int) -> None:
        if self.copy is not None:
            self.copy.passed()
        index = next((i for i in range(2) if i not in self.busy), None)
        if index is None:
            self.copy = None
            return
        slot = self.slots[index]
        self.busy.add(index)
        self.kept[index] = kept = Kept(step, list(self.base), self.told)
        slot.begin(bytes(16), 0, 1, 1, Stamp(step, 1))
        self.copy = TensorCopy(
            self.protected.gather(),
            slot,
            done=WorkedOff(lambda: self._advance(self.background)),
            turn=step,
            locks=self.locks,
            plans=self.plans,
            frozen=self.frozen,
        )
        self.copy.copy_moving()
        self.background.append(self._capture(index, kept, self.copy))

    # -- beside it

    def _capture(self, index: int, kept: Kept, copy: TensorCopy) -> Iterator[None]:
        slot = self.slots[index]
        yield
        run_acts(copy.copy_still())
        yield
        self.seen.copied.append(copy.device_bytes)
        self.seen.compared += copy._held is not None
        if copy.moved:
            slot.void()
            self.seen.torn += copy.moved
            if self.writes.is_learnt:
                self.protected.eager_names.update(copy.moved)
        else:
            layout = copy.state.layout
            text = json.dumps(layout.to_json()).encode()
            header = slot.write_table(copy.state.payload_bytes, text, copy.sums)
            slot.seal(header, layout.hash(), 0.0, wall_ns=1)
            self.check(index, kept)
            kept.is_sealed = True
            self.seen.sealed += 1
        self.busy.discard(index)

    def check(self, index: int, kept: Kept) -> None:
        _, layout = self.slots[index].verify()
        for segment in layout.segments:
            kind, number = segment.spec.name[0], segment.spec.name[-1]
            if kind not in "mh" or segment.spec.dtype != "float32":
                continue
            expected = kept.base[int(number)] if kind == "m" else kept.head
            found = self.slots[index].payload[segment.offset : segment.end].cast("f").tolist()
            assert set(found) == {expected}, f"step {kept.step}, {segment.spec.name}"

    def _advance(self, some: list[Iterator[None]]) -> None:
        try:
            next(some[0])
        except StopIteration:
            some.pop(0)

    def run(self) -> Seen:
        trainer = [self.program()]
        while trainer or self.background:
            moves: list[Callable[[], Any]] = [self.device.run_one] * self.speed
            if trainer:
                moves.append(lambda: self._advance(trainer))
            if self.background:
                moves.append(lambda: self._advance(self.background))
            moves[self.draw.randrange(len(moves))]()
        self.device.synchronize()
        for index, kept in self.kept.items():
            if kept.is_sealed:  # and nothing has come later
                self.check(index, kept)
        return self.seen


def trained(seed: int, writes: Writes, locked: bool = True) -> Seen:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-frozen-") as home:
        training = Training(Path(home), random.Random(seed), writes, locked)
        try:
            return training.run()
        finally:
            for slot in training.slots:
                slot.close()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 10, 40]),
    st.sampled_from([0, 10, 40]),
    st.booleans(),
    st.booleans(),
)
def test_what_is_sealed_is_the_boundary_s_whoever_writes_to_the_base(
    seed: int, counted: int, uncounted: int, learnt: bool, locked: bool
) -> None:
    seen = trained(seed, Writes(counted, uncounted, learnt), locked)
    assert counted or uncounted or not seen.torn


def test_each_slot_gets_them_once() -> None:
    base_bytes, used = 4 * sum(BASE), list[int]()
    for seed in range(20):
        seen = trained(seed, NEVER)
        assert seen.torn == [] and seen.sealed == len(seen.copied) > 2
        whole = [nbytes for nbytes in seen.copied if nbytes > base_bytes]
        used.append(len(whole))  # one for each slot
        rest = 4 * sum(HEAD) + torch.get_rng_state().nbytes
        assert {n for n in seen.copied if n not in whole} == {rest}, "nothing of the base"
        assert seen.compared == len(seen.copied) - len(whole)
    assert set(used) == {1, 2}


def test_what_changes_in_each_step_behind_its_counter_is_torn_once_and_copied_from_then_on() -> (
    None
):
    """An average of weights, as `.data` makes it."""
    for seed in range(20):
        seen = trained(seed, Writes(uncounted=100))
        assert len(seen.torn) <= 2 * len(BASE), "once, or once more by the snapshot under way"
        assert seen.sealed >= len(seen.copied) - 2


NEVER = Writes()
SOMETIMES = Writes(counted=10, uncounted=10, is_learnt=False)


def is_found(writes: Writes = SOMETIMES) -> bool:
    """Whether some order shows it: wrong bytes are sealed, or right ones torn."""
    for seed in range(SEEDS):
        try:
            if trained(seed, writes).torn and writes == NEVER:
                return True
        except (AssertionError, DamageError):
            return True
    return False


def test_a_base_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrozenDigests, "moved", lambda self, before, now: [])
    assert is_found()


def test_digests_that_are_read_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what the trainer has queued is over."""

    def early(self: FakeDevice, piece: DigestPiece) -> None:
        words = piece.words.clone()
        now = DigestPiece(words, piece.keys, piece.sums, piece.scratch)
        self.current.order(now.add)

    monkeypatch.setattr(FakeDevice, "digest", early)
    assert is_found()


def test_marks_that_the_next_write_does_not_wait_for_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy is fenced, its digest is not: it may be of other bytes."""

    def beside(self: FakeDevice, piece: DigestPiece) -> None:
        own, before = self.new_stream("own"), FakeEvent(self)
        own.is_slow = True
        before.record(self.current)
        own.wait_event(before)
        own.order(piece.add)

    monkeypatch.setattr(FakeDevice, "digest", beside)
    assert is_found()


def test_digests_of_the_other_slot_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    are_in = FrozenInSlots.are_in

    def others(self: FrozenInSlots, slot: Slot, plan: Any) -> HeldFrozen | None:
        own = are_in(self, slot, plan)
        found = [h.marks for h in self._held.values() if h.plan is plan and h is not own]
        if own is None or own.marks is None or found[:1] in ([], [None]):
            return own
        marks = FrozenMarks(found[0].digests, own.marks.sums)
        return HeldFrozen(plan, own.versions, marks)

    monkeypatch.setattr(FrozenInSlots, "are_in", others)
    assert is_found()


def test_a_digest_that_is_told_before_it_has_landed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = FrozenDigests.read_back
    monkeypatch.setattr(FrozenDigests, "read_back", lambda self, streams: read(self, streams)[:0])
    assert is_found(NEVER)


def test_sums_that_begin_with_those_of_the_last_boundary_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They tear what is right."""
    monkeypatch.setattr(BlockDigests, "begin", lambda self, streams: None)
    assert is_found(NEVER)


def test_a_slot_that_counts_as_whole_before_all_has_landed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fence is not there: the copy is of two moments, and its digest of a third."""
    monkeypatch.setattr(DeviceCopy, "_lead", lambda self, optimizers: None)
    assert is_found()


# -- one by one


class One:
    """Boundaries one after the other, on a device that does at once what the host waits for."""

    def __init__(self, home: Path) -> None:
        self.training = Training(home, random.Random(0), Writes())

    def capture(self, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        training = self.training
        training._boundary(len(training.seen.copied))
        meanwhile()
        before = list(training.seen.torn)
        while training.background:
            training._advance(training.background)
        return training.seen.torn[len(before) :]


@pytest.fixture
def one(tmp_path: Path) -> Iterator[One]:
    made = One(tmp_path)
    yield made
    for slot in made.training.slots:
        slot.close()


def test_one_that_changes_behind_its_counter_as_it_is_compared_is_named_and_copied(
    one: One,
) -> None:
    training = one.training
    training.writes.is_learnt = False
    assert one.capture() == []
    tensor = training.model[0]

    def change() -> None:
        training.base[0] += 1
        training._kernel(tensor, training.base[0])
        training.device.synchronize()  # before anybody has looked

    training.seen.copied.clear()
    names = one.capture(change)
    # a block that is torn names whoever has something in it
    assert names and "model.0" in names and "model.3" not in names
    assert one.capture() == [], "the next one gets it whole"
    assert training.seen.copied[1] > 4 * sum(BASE)


def test_a_byte_that_has_changed_in_the_slot_is_not_sealed(one: One) -> None:
    one.capture()
    slot = one.training.slots[0]
    _, layout = slot.verify()
    for number in range(len(BASE)):
        [segment] = [s for s in layout.segments if s.spec.name == f"model.{number}"]
        for at in (segment.offset, segment.end - 1):
            slot.payload[at] ^= 1
            one.training.protected.eager_names.clear()
            assert f"model.{number}" in one.capture()
            one.training.protected.eager_names.clear()
            assert one.capture() == [], "it got all of them anew"
            assert one.capture() == []


def test_where_a_device_has_no_room_for_digests_they_are_copied(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.capture()

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(BlockDigests, "use", refuse)
    for _ in range(3):
        assert one.capture() == []
    assert min(one.training.seen.copied) > 4 * sum(BASE)
    monkeypatch.undo()


def test_what_a_device_cannot_digest_is_copied_each_time(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole words, or not side by side."""
    flat = torch.zeros(4001, dtype=torch.bfloat16)
    for tensor in (flat[1:4001], torch.zeros(4001, dtype=torch.int8), torch.zeros(60, 40).t()):
        assert not tree.can_be_digested(tensor)
    assert tree.can_be_digested(flat[2:]) is False  # 3999 values of two bytes
    assert tree.can_be_digested(flat[:4000])
    monkeypatch.setattr(tree, "DIGESTING", {"cuda"})
    assert not tree.can_be_digested(flat[:4000])


def test_marks_of_another_set_of_blocks_are_no_proof(one: One) -> None:
    one.capture()
    training = one.training
    plan = training.protected.gather().copies[0]
    held = training.frozen.are_in(training.slots[0], plan)
    assert held is not None and held.marks is not None
    cut = training.plans._known[training.slots[0]][1]
    assert cut.frozen is not None
    fewer = FrozenMarks({}, held.marks.sums)
    assert set(cut.frozen.moved(fewer, held.marks)) == {f"model.{i}" for i in range(len(BASE))}
