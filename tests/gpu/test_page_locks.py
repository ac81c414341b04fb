"""Page locks on a device: what CUDA says of the pages, and what lies in the file afterwards. Slots
have to lie in tmpfs: run with `--basetemp` below /dev/shm. Skipped without CUDA."""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_bytes
from keepstep.edge.torch import page_locks
from keepstep.edge.torch.cuda_pages import CudaPages
from keepstep.edge.torch.cuda_runtime import place_on_bus
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

NBYTES = 64 * MIB


class Training:
    """One tensor on the device, and slots for it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        protected = Protected.of({"tensor": self.tensor}, lazy=True)
        self.live = TorchState(protected, 0, 1, resolve(None, {}, "j"))

    def slot(self, name: str = "slot-0") -> Slot:
        return Slot.create(MEMORY, self.home / name, NBYTES + MIB, 64 * KIB)

    def save(self, slot: Slot, value: int) -> None:
        """Whatever the tensor is now, as a capture does it."""
        self.tensor.fill_(value)
        gathered = self.live.gather()
        slot.begin(bytes(16), 0, 1, 1, Stamp(value, 1))
        copy = self.live.copy(gathered, slot)
        copy.copy_moving()
        run_acts(copy.copy_still())
        run_acts(copy.settle())
        text = json.dumps(gathered.layout.to_json()).encode()
        header = slot.write_table(gathered.payload_bytes, text, copy.sums)
        slot.seal(header, gathered.layout.hash(), 0.0, wall_ns=1)

    def saved(self, name: str = "slot-0") -> set[int]:
        """The values in the file."""
        slot = Slot(MEMORY, self.home / name)
        slot.verify()
        values = set(bytes(slot.payload[:NBYTES]))
        slot.close()
        return values


def is_pinned(slot: Slot) -> bool:
    return torch.frombuffer(slot.payload, dtype=torch.uint8).is_pinned()


def test_a_slot_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(3):  # each map may lie where the one before it did
        slot = training.slot()
        assert not is_pinned(slot) and training.live.pin(slot) is None and is_pinned(slot)
        training.save(slot, 7)
        slot.close()
        assert training.saved() == {7}


PLACINGS = 5
FILLERS = 2000  # more than there are holes of that size, from what was mapped before


def in_between(training: Training) -> tuple[Slot, list[mmap.mmap]]:
    """A slot, and maps that fill what is free above it and below: the next map of that size lies
    where the slot did. A kernel looks for room from the top."""
    scratch = training.home / "scratch"
    with open(scratch, "w+b") as file:
        file.truncate(slot_bytes(NBYTES + MIB, 64 * KIB, MEMORY.block_bytes))
        above = [mmap.mmap(file.fileno(), 0) for _ in range(FILLERS)]
        slot = training.slot()
        return slot, [*above, mmap.mmap(file.fileno(), 0)]


def replaced(home: Path) -> set[int]:
    """What lies in a file that has taken a locked slot's place, after a copy of 8s. Tried anew
    where something else took the room: other threads map memory, too."""
    for number in range(PLACINGS):
        place = home / str(number)
        place.mkdir()
        found = replaced_there(Training(place))
        if found is not None:
            return found
    raise AssertionError("no map lies where the old one lay")


def replaced_there(training: Training) -> set[int] | None:
    """None: the new map lies elsewhere."""
    tmp_path = training.home
    first, fillers = in_between(training)
    training.live.pin(first)
    training.save(first, 7)
    training.slot("other").close()
    os.replace(tmp_path / "other", tmp_path / "slot-0")
    address = first.payload_address
    gc.collect()  # a copy that this very thread has carried on is in a cycle, and has the map
    first.close()
    second = Slot(MEMORY, tmp_path / "slot-0")
    is_there = second.payload_address == address
    if is_there:
        assert training.live.pin(second) is None
        training.save(second, 8)
    second.close()
    for filler in fillers:
        filler.close()
    return training.saved() if is_there else None


def test_what_is_mapped_in_place_of_a_replaced_file_gets_the_device_s_bytes(tmp_path: Path) -> None:
    assert replaced(tmp_path) == {8}


def test_with_locks_that_outlive_their_map_it_would_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail. The new map lies where the old one lay."""
    monkeypatch.setattr(PageLocks, "_end", lambda self, slot: page_locks._kept.clear())
    addresses: set[int] = set()
    monkeypatch.setattr(PageLocks, "lock", once_for_each_address(PageLocks.lock, addresses))
    try:
        assert replaced(tmp_path) != {8}
    finally:
        for address in addresses:
            CudaPages(torch.device("cuda", torch.cuda.current_device())).unregister(address)


def once_for_each_address(lock: Any, seen: set[int]) -> Any:
    """As it was when registrations were never ended: the second is refused, and nobody looks."""

    def locked(self: PageLocks, slot: Slot) -> str | None:
        if slot.payload_address in seen:
            return None
        seen.add(slot.payload_address)
        why: str | None = lock(self, slot)
        return why

    return locked


def test_a_slot_that_is_not_locked_gets_the_device_s_bytes(tmp_path: Path) -> None:
    training = Training(tmp_path)
    slot = training.slot()
    training.save(slot, 9)
    slot.close()
    assert training.saved() == {9}


def test_a_refusal_does_not_reach_the_program_s_next_kernel(tmp_path: Path) -> None:
    slot = Training(tmp_path).slot()
    pages = CudaPages(torch.device("cuda", torch.cuda.current_device()))
    assert pages.register(slot.payload_address, slot.capacity) is None
    assert "712" in (pages.register(slot.payload_address, slot.capacity) or "")
    torch.ones(8, device="cuda").add_(1)
    torch.cuda.synchronize()
    assert pages.unregister(slot.payload_address) is None
    slot.close()


def test_another_thread_locks_and_unlocks(tmp_path: Path) -> None:
    """As the one does that makes more slots."""
    training, slots = Training(tmp_path), []

    def make() -> None:
        slot = training.slot()
        assert training.live.pin(slot) is None
        slots.append(slot)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [slot] = slots
    assert is_pinned(slot)
    closing = threading.Thread(target=slot.close)
    closing.start()
    closing.join()
    fresh = training.slot()
    assert not is_pinned(fresh)
    fresh.close()


def test_a_device_knows_its_place_on_the_bus() -> None:
    """By which sysfs tells the node of its memory."""
    place = place_on_bus(torch.device("cuda", torch.cuda.current_device()))
    assert place is not None and re.fullmatch(
        r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[\dA-Fa-f]{2}\.\d", place
    )
