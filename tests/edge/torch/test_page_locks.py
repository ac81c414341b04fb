"""Page locks: a map is registered once and for as long as it is there, whoever closes it and
whenever; what is refused is told and costs nothing else. The locker is a fake, the maps are
real."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY, SharedMemory
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.slot_store import Shelf
from keepstep.edge.torch import capture, live_state
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.cuda_pages import PORTABLE, CudaPages
from keepstep.edge.torch.live_state import TorchState, cuda_device
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from tests.edge.torch.fake_locker import FakeLocker, file_at


class SmallBlocks(SharedMemory):
    block_bytes = 4 * KIB


class Room:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.locker = FakeLocker()
        self.locks = PageLocks(self.locker)

    def slot(self, name: str = "slot-0", nbytes: int = 8 * KIB) -> Slot:
        return Slot.create(MEMORY, self.home / name, nbytes, KIB)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path)
    yield made
    made.locker.look()
    assert made.locker.wrong == []


def test_a_slot_s_payload_is_locked_once_until_it_is_closed(room: Room) -> None:
    slot = room.slot()
    address = slot.payload_address
    assert room.locks.lock(slot) is None and room.locks.lock(slot) is None
    assert room.locker.registered == {address}
    slot.close()
    assert room.locker.calls == [("register", address), ("unregister", address)]
    assert file_at(address) is None, "nobody keeps the map any more"


def test_what_a_slot_lacks_is_not_locked_and_its_memory_is_given_up(tmp_path: Path) -> None:
    """A lock holds pages, and takes new ones where there are none."""
    locker = FakeLocker()
    locks = PageLocks(locker)
    size = SmallBlocks.block_bytes
    slot = Slot.create(SmallBlocks(), tmp_path / "slot-0", 8 * size, KIB)
    begin = slot.payload_address
    assert locks.lock(slot) is None and locker.registered == {begin}
    slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    locks.begin_copy(slot)
    slot.shed(frozenset({2, 3, 5}))
    assert locks.lock(slot) is None and locker.registered == {begin}, "a copy is under way"
    locks.end_copy(slot)
    assert locks.lock(slot) is None
    wanted = {begin, begin + 4 * size, begin + 6 * size}
    assert locker.registered == wanted and locks.is_locked(slot)
    assert locks.lock(slot) is None and locker.registered == wanted
    slot.close()
    assert locker.registered == set() and not locks.is_locked(slot)
    with closing(Slot(SmallBlocks(), tmp_path / "slot-0")) as adopted:
        begin = adopted.payload_address
        locks.lock(adopted)
        assert locker.registered == {begin, begin + 4 * size, begin + 6 * size}


def test_a_slot_of_which_a_part_is_refused_is_not_locked(tmp_path: Path) -> None:
    locker = FakeLocker()
    locks = PageLocks(locker)
    with closing(Slot.create(SmallBlocks(), tmp_path / "s", 8 * 4 * KIB, KIB)) as slot:
        slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        slot.shed(frozenset({2}))
        locker.refuses_from = 1
        assert "does not page-lock" in (locks.lock(slot) or "")
        assert locker.registered == set() and not locks.is_locked(slot)


def test_a_slot_that_is_void_stays_locked(room: Room) -> None:
    slot = room.slot()
    room.locks.lock(slot)
    slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    slot.void()
    assert room.locker.registered == {slot.payload_address}
    slot.close()
    assert room.locker.registered == set()


def test_what_is_mapped_in_place_of_a_replaced_file_is_locked_anew(room: Room) -> None:
    """As after a fetch: the name leads to another file, and the map may get the same address."""
    first = room.slot()
    room.locks.lock(first)
    room.slot("other").close()
    os.replace(room.home / "other", room.home / "slot-0")
    first.close()
    second = Slot(MEMORY, room.home / "slot-0")
    room.locks.lock(second)
    room.locker.look()
    assert room.locker.registered == {second.payload_address}
    second.close()
    assert room.locker.registered == set()


def test_whoever_retires_a_locked_slot_unlocks_it(room: Room) -> None:
    shelf = Shelf(MEMORY, room.home)
    (room.home / "rank-00003").mkdir()
    slot = shelf.take(3, 0, 8 * KIB, KIB)
    room.locks.lock(slot)
    larger = shelf.take(3, 0, 16 * KIB, KIB)
    assert room.locker.registered == set()
    room.locks.lock(larger)
    shelf.retire(larger)
    assert room.locker.registered == set()


def test_a_map_that_a_tensor_still_looks_at_is_unlocked_and_stays(room: Room) -> None:
    slot = room.slot()
    room.locks.lock(slot)
    address = slot.payload_address
    tensor = torch.frombuffer(slot.payload, dtype=torch.uint8)
    slot.close()
    assert room.locker.registered == set() and file_at(address) is not None
    del tensor, slot
    assert file_at(address) is None


def test_a_slot_that_nobody_closes_stays_mapped_when_it_is_collected(tmp_path: Path) -> None:
    """With its locks, as after a test that failed. Seen on a device: the next map lay at its
    address, and was written to by nobody."""
    room = Room(tmp_path)
    slot, locker = room.slot(), room.locker
    room.locks.lock(slot)
    address = slot.payload_address
    del slot, room
    gc.collect()
    locker.look()
    assert locker.wrong == [] and file_at(address) is not None


def test_while_a_device_copies_the_lock_and_the_map_outlive_the_slot(room: Room) -> None:
    slot = room.slot()
    room.locks.lock(slot)
    address = slot.payload_address
    room.locks.begin_copy(slot)
    room.locks.begin_copy(slot)
    slot.close()
    room.locks.end_copy(slot)
    assert room.locker.registered == {address} and file_at(address) is not None
    room.locks.end_copy(slot)
    room.locks.end_copy(slot)
    assert room.locker.registered == set() and len(room.locker.calls) == 2
    del slot
    assert file_at(address) is None


def test_a_copy_that_is_over_leaves_the_lock(room: Room) -> None:
    slot = room.slot()
    room.locks.lock(slot)
    room.locks.begin_copy(slot)
    room.locks.end_copy(slot)
    assert room.locker.registered == {slot.payload_address}
    slot.close()
    assert room.locker.registered == set()


def test_a_refusal_is_one_line_and_the_slot_is_as_before(room: Room) -> None:
    room.locker.refuses = "out of memory (error 2)"
    slot = room.slot()
    address = slot.payload_address
    told = room.locks.lock(slot)
    assert told is not None and "\n" not in told
    assert "slot-0 (8.0 KiB): out of memory (error 2)" in told and "ulimit -l" in told
    room.locks.begin_copy(slot)
    slot.payload[:4] = b"abcd"
    room.locks.end_copy(slot)
    slot.close()
    assert room.locker.calls == [("register", address)] and file_at(address) is None


def test_what_cuda_does_not_let_go_of_stays_mapped(room: Room) -> None:
    """Else something else would be mapped where the device still writes."""
    slot = room.slot()
    room.locks.lock(slot)
    address = slot.payload_address
    room.locker.holds = "an illegal memory access was encountered (error 700)"
    slot.close()
    assert file_at(address) is not None


def test_a_forked_child_leaves_the_locks_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    slot, other = room.slot(), room.slot("slot-1")
    room.locks.lock(slot)
    before = list(room.locker.calls)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert room.locks.lock(other) is None
    slot.close()
    other.close()
    assert room.locker.calls == before


WHAT = st.lists(
    st.tuples(st.sampled_from(["lock", "close", "replace", "begin", "end"]), st.integers(0, 2)),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(WHAT, st.booleans())
def test_whatever_comes_in_whatever_order_nothing_is_unmapped_while_it_is_registered(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[str, int]], refuses: bool
) -> None:
    room = Room(tmp_path_factory.mktemp("p"))
    room.locker.refuses = "no" if refuses else None
    slots = [room.slot(f"slot-{number}") for number in range(3)]
    copied: list[Slot] = []
    for what, number in story:
        slot = slots[number]
        if what == "lock":
            room.locks.lock(slot)
        elif what == "begin":
            room.locks.begin_copy(slot)
            copied.append(slot)
        elif what == "end" and copied:
            room.locks.end_copy(copied.pop(number % len(copied)))
        elif what in ("close", "replace"):
            if what == "replace":
                room.slot("fresh").close()
                os.replace(room.home / "fresh", slot.path)
            slot.close()
            slots[number] = Slot(MEMORY, slot.path)
        room.locker.look()
    for slot in slots:
        slot.close()
    room.locker.look()
    for slot in copied:
        room.locks.end_copy(slot)
    assert room.locker.wrong == [] and room.locker.registered == set()


# -- a copy from a device


class FakeDeviceCopy:
    """Copies on a device that has always just ended, or failed. See `DeviceCopy`."""

    has_any, is_captured, is_ordered = True, False, False

    def __init__(self, room: Room, error: str | None = None) -> None:
        self.room, self.error = room, error
        self.locked_at_end: list[set[int]] = []

    def order_moving(self) -> None:
        """Nothing is queued."""

    def order_still(self) -> None:
        """Nothing is queued."""

    def wait_begun(self) -> None:
        """It has come by."""

    digested, frozen = (), None

    def hash_landed(self, *_: object) -> dict[int, int]:
        return {}

    def digest_host(self) -> None:
        """Nothing is shared."""

    def digests(self) -> dict[int, int]:
        return {}

    def wait(self) -> None:
        self.locked_at_end.append(self.room.locker.registered)
        if self.error is not None:
            raise RuntimeError(self.error)


def copy_on(
    room: Room, device: FakeDeviceCopy, monkeypatch: pytest.MonkeyPatch
) -> tuple[TensorCopy, Slot]:
    """A copy that takes its state to be on a device."""
    protected = Protected.of({"weight": torch.ones(8)}, lazy=True)
    state = protected.gather()
    slot = room.slot(nbytes=state.payload_bytes)
    room.locks.lock(slot)
    slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
    copy = TensorCopy(state, slot, locks=room.locks)
    monkeypatch.setattr(copy, "_device", device)
    return copy, slot


@pytest.mark.parametrize("error", [None, "the device is lost"])
def test_a_slot_that_is_closed_under_a_copy_is_locked_until_the_device_is_through(
    room: Room, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    stream = FakeDeviceCopy(room, error)
    copy, slot = copy_on(room, stream, monkeypatch)
    copy.copy_moving()
    monkeypatch.setattr(copy, "_write_hashed", lambda pairs: slot.close())
    if error is None:
        run_acts(copy.copy_still())
    else:
        with pytest.raises(RuntimeError):
            run_acts(copy.copy_still())
    assert stream.locked_at_end == [{slot.payload_address}] and room.locker.registered == set()
    assert copy.done.is_set()


def test_the_time_until_the_device_comes_to_the_boundary_is_none_of_the_copy_s(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may be ahead of it by as long as a step takes."""
    now_ns = [0]
    monkeypatch.setattr(capture, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))
    stream = FakeDeviceCopy(room)
    monkeypatch.setattr(stream, "wait_begun", lambda: now_ns.append(now_ns.pop() + 1000))
    monkeypatch.setattr(stream, "hash_landed", lambda *_: now_ns.append(now_ns.pop() + 30) or {})
    copy, slot = copy_on(room, stream, monkeypatch)
    copy.copy_moving()
    run_acts(copy.copy_still())
    assert copy.copy_ns == 30
    slot.close()


def test_a_copy_that_fails_at_the_boundary_does_not_keep_the_lock(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeDeviceCopy(room)
    copy, slot = copy_on(room, stream, monkeypatch)

    def fails(pairs: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(copy, "_write", fails)
    with pytest.raises(OSError):
        copy.copy_moving()
    assert stream.locked_at_end == [{slot.payload_address}]
    slot.close()
    assert room.locker.registered == set()


# -- where it comes from that there is a device


def state_of(**parts: Any) -> TorchState:
    return TorchState(Protected.of(parts, lazy=True), 0, 1, resolve(None, {}, "j"))


def test_a_state_in_host_memory_locks_nothing(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "CudaPages", lambda device: room.locker)
    model = torch.nn.Linear(2, 2)
    state = state_of(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), step=1)
    slot = room.slot()
    assert state.pin(slot) is None and room.locker.calls == []
    slot.close()


def test_a_state_on_a_device_locks_every_slot_for_that_device(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def pages(device: torch.device) -> FakeLocker:
        asked.append(device)
        return room.locker

    copies: list[PageLocks | None] = []

    def copy(state: object, slot: Slot, locks: PageLocks | None, **_: object) -> None:
        copies.append(locks)

    device = torch.device("cuda", 3)
    monkeypatch.setattr(live_state, "CudaPages", pages)
    monkeypatch.setattr(live_state, "cuda_device", lambda parts: device)
    monkeypatch.setattr(capture, "TensorCopy", copy)
    state = state_of(weight=torch.ones(2))
    slots = [room.slot(), room.slot("slot-1")]
    assert [state.pin(slot) for slot in slots] == [None, None] and asked == [device]
    assert room.locker.registered == {slot.payload_address for slot in slots}
    state.copy(state.gather(), slots[0])
    [locks] = copies
    assert locks is not None
    room.locker.refuses = "no"
    third = room.slot("slot-2")
    assert "no" in (state.pin(third) or "")
    for slot in (*slots, third):
        slot.close()
    assert room.locker.registered == set()


class OnDevice:
    """A tensor as far as its device is asked for."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_the_device_is_that_of_the_first_tensor_that_is_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    parts = [model, object(), optimizer, torch.ones(2)]
    assert cuda_device(parts) is None
    monkeypatch.setattr(model, "buffers", lambda: [OnDevice("cuda:2")])
    assert cuda_device(parts) == torch.device("cuda:2")
    monkeypatch.undo()
    optimizer.param_groups[0]["params"] = [OnDevice("cpu"), OnDevice("cuda:1")]
    assert cuda_device(parts) == torch.device("cuda:1")


# -- the calls of CUDA


class FakeCudart:
    """What `torch.cuda.cudart()` returns. `code`: what every call does."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, *about: int) -> int:
        self.calls.append(("register", *about))
        return self.code

    def cudaHostUnregister(self, *about: int) -> int:
        self.calls.append(("unregister", *about))
        return self.code

    def cudaGetErrorString(self, code: int) -> str:
        return f"words of {code}"


class Cuda:
    """CUDA without a device. `chosen`: the device of the calling thread, at each call and kernel;
    `fills`: kernels that were launched; `error`: what a launch raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.cudart = FakeCudart(code)
        self.now: torch.device | None = None
        self.chosen: list[torch.device | None] = []
        self.fills = 0
        self.error: Exception | None = None
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "cudart", self._cudart)
        monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(fill_=self._fill))

    def _device(self, device: torch.device) -> Cuda:
        self.entering = device
        return self

    def __enter__(self) -> None:
        self.now = self.entering

    def __exit__(self, *_: object) -> None:
        self.now = None

    def _cudart(self) -> FakeCudart:
        self.chosen.append(self.now)
        return self.cudart

    def _fill(self, value: int) -> None:
        self.chosen.append(self.now)
        self.fills += 1
        if self.error is not None:
            raise self.error


DEVICE = torch.device("cuda", 3)


def test_every_call_is_made_on_the_state_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread of ours would make a context on device 0."""
    cuda, pages = Cuda(monkeypatch), CudaPages(DEVICE)
    assert pages.register(4096, 8192) is None and pages.unregister(4096) is None
    assert cuda.cudart.calls == [("register", 4096, 8192, PORTABLE), ("unregister", 4096)]
    assert set(cuda.chosen) == {DEVICE} and cuda.fills == 0


def test_a_refusal_is_in_cuda_s_words_and_does_not_stay_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch, code=2)
    cuda.error = RuntimeError("CUDA error: out of memory")
    assert CudaPages(DEVICE).register(4096, 8192) == "words of 2 (error 2)"
    assert cuda.fills == 1 and set(cuda.chosen) == {DEVICE}


@pytest.mark.parametrize("error", [AttributeError("no cudart"), RuntimeError("sticky\nmore")])
def test_what_torch_cannot_do_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails() -> None:
        raise error

    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", fails)
    assert CudaPages(DEVICE).register(4096, 8192) == str(error).partition("\n")[0]
