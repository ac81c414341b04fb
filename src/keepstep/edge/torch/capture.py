"""Capture: a state's bytes from live tensors into a slot, behind the trainer's back where they
stand still.

Between two updates parameters and optimizer state do not move (DataStates-LLM, HPDC'24: "lazy";
CheckFreq, FAST'21: the fence before the update), so a thread copies them during the next forward
and backward. Everything else (buffers move in forward, RNG and Python state at any time) is copied
at the boundary. What the thread copies it hashes in the same pass, unless the update waits for it.

Three proofs that nothing moved. The optimizers' pre-step hook waits for `fence`. Tensor version
counters before and after are equal: after, that is when whatever ran as the copy ended is over too
(`operations.py`), for a counter moves behind its kernel. And in front of the update a few of the
bytes are compared once more, others each time: for what no counter sees (measured, torch 2.13:
`fused` updates, `.data`, collectives). A copy that fails one is torn: it is dropped, and the
tensors that moved are named.

On CUDA the copies run on a side stream into page-locked slots (`page_locks.py`), and the fence
makes the *device* wait, not the trainer.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from keepstep.edge.shm import memory
from keepstep.edge.shm.one_pass import SlotCopy, copy_and_hash
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.looks import VERSION
from keepstep.edge.torch.operations import Operation
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.state import State
from keepstep.edge.torch.tree import StateItem
from keepstep.edge.torch.views import write
from keepstep.model.layout import Segment
from keepstep.ports import Acts

FIRST_LOOK_S = 0.0005  # most operations are over by then
LOOK_EVERY_S = 0.01
# Of the second look, which the update waits for: 16 tensors, 4 KiB of each.
LOOKS = 16
LOOK_BYTES = 4096
GOLDEN_RATIO = 0.6180339887498949  # multiples of it, without their whole part, fill a range evenly


@dataclass
class TensorCopy:
    """One snapshot on its way from live tensors to a slot. Made on the trainer's thread, carried on
    by the capture thread."""

    state: State
    slot: Slot
    # every byte has left the live tensors (or is ordered to)
    done: threading.Event = field(default_factory=threading.Event)
    # how many copies there were before: each looks at other bytes a second time
    turn: int = 0
    locks: PageLocks | None = None  # that the slot may have; None without a device
    # lazily copied tensors that changed under the copy
    moved: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    copy_ns: int = 0
    sums: Mapping[int, int] = field(default_factory=dict)  # see `StateCopy`

    def __post_init__(self) -> None:
        self._lazy_count = sum(len(copies.lazy) for copies in self.state.copies)
        self._versions = self._versions_now()
        self._thread = threading.get_ident(), threading.get_native_id()
        self._lock = threading.Lock()
        self._is_awaited = threading.Event()  # the update waits
        self._is_settled = threading.Event()  # what has `moved` by counters is known for good
        self._is_copied = False
        self._is_fenced = False  # whatever moves from here on may
        self._streams = {
            device: _side_stream(device)
            for copies in self.state.copies
            for device in copies.devices
            if device.type == "cuda"
        }
        # nothing is copied before what the trainer has queued so far
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy_moving(self) -> None:
        """On the trainer's thread, before the next step begins: whatever could move."""
        if self._streams and self.locks is not None:
            self.locks.begin_copy(self.slot)
        try:
            for copies in self.state.copies:
                self._write(copies.eager)
        except BaseException:  # nobody carries this copy on
            self._wait_for_device()
            raise
        # on the device, what follows waits; the trainer does not
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        at = self.state.layout.objects_offset
        for section in self.state.sections:
            self.slot.payload[at : at + len(section)] = section
            at += len(section)

    def copy_still(self) -> Acts[None]:
        """In the background: what stands still until the next update."""
        yield
        began_ns = time.perf_counter_ns()
        try:
            self._write_hashed([pair for copies in self.state.copies for pair in copies.lazy])
            self._is_copied = True
        finally:
            self.done.set()
            self._wait_for_device()
        self._operation = Operation(*self._thread)
        self._compare(is_last=False)  # a copy that is torn already need not be hashed
        self.copy_ns = time.perf_counter_ns() - began_ns

    def _wait_for_device(self) -> None:
        try:
            for stream in self._streams.values():
                stream.synchronize()
        finally:  # what raises has ended whatever the device did
            if self._streams and self.locks is not None:
                self.locks.end_copy(self.slot)

    def settle(self) -> Acts[None]:
        """In the background, after `copy_still`: wait until what the trainer had begun by then is
        over, or the trainer has come by; `moved` is complete."""
        yield
        wait_s = FIRST_LOOK_S
        while not self._is_settled.is_set():
            if self._operation.is_over():
                self._compare(is_last=True)
            else:
                self._is_settled.wait(wait_s)
                wait_s = min(2 * wait_s, LOOK_EVERY_S)

    def end(self) -> None:
        """Nobody is to wait for this copy any more."""
        self.done.set()

    def fence(self) -> None:
        """In the optimizer's pre-step hook: return when the update may overwrite the tensors."""
        self._is_awaited.set()
        self.done.wait()
        self.passed()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def passed(self) -> None:
        """On the trainer's thread, between two operations, before anything may move."""
        if not self.done.is_set():
            return
        self._compare(is_last=True)
        with self._lock:
            if self._is_copied and not self._is_fenced:
                self._look_again()
            self._is_fenced = True

    def _compare(self, is_last: bool) -> None:
        """Compare version counters: for the last time, when nothing that could still move them runs
        any more."""
        with self._lock:
            if self._is_settled.is_set():
                return
            self.moved = self._counted_moves()
            if is_last:
                self._is_settled.set()

    def _counted_moves(self) -> list[str]:
        """Whose counters have moved by now."""
        now = self._versions_now()
        if now == self._versions:
            return []
        names = chain.from_iterable(copies.counted_names for copies in self.state.copies)
        triples = zip(names, now, self._versions, strict=True)
        return list(dict.fromkeys(name for name, new, old in triples if new != old))

    def _versions_now(self) -> list[int]:
        counted = chain.from_iterable(copies.counted for copies in self.state.copies)
        return list(map(VERSION, counted))

    def _look_again(self) -> None:
        """Compare some bytes of some tensors with their copies."""
        # What a counter has seen is known: it is in `moved`, or came behind the copy's end.
        counted = set(self._counted_moves())
        first = self.turn * LOOKS
        for number in range(first, first + min(LOOKS, self._lazy_count)):
            item, segment = self._lazy_pair(number % self._lazy_count)
            if item.spec.name not in counted and self._differs(item, segment, number):
                self.moved.append(item.spec.name)

    def _lazy_pair(self, index: int) -> tuple[StateItem, Segment]:
        for copies in self.state.copies:
            if index < len(copies.lazy):
                return copies.lazy[index]
            index -= len(copies.lazy)
        raise IndexError(index)

    def _differs(self, item: StateItem, segment: Segment, number: int) -> bool:
        """Whether those bytes of the tensor that are due are not as they were copied."""
        if item.address is None or item.address != item.local.data_ptr():
            return False
        nbytes = min(LOOK_BYTES, segment.spec.nbytes)
        at = int(number * GOLDEN_RATIO % 1 * (segment.spec.nbytes - nbytes))
        copied = self.slot.payload_address + segment.offset + at
        live = ctypes.string_at(item.address + at, nbytes)
        return live != ctypes.string_at(copied, nbytes)

    def _write(self, pairs: Sequence[tuple[StateItem, Segment]]) -> None:
        base = self.slot.payload_address
        memory.copy_all(
            [(base + s.offset, i.address, s.spec.nbytes) for i, s in pairs if i.address]
        )
        self._write_through_torch(pairs)

    def _write_hashed(self, pairs: Sequence[tuple[StateItem, Segment]]) -> None:
        """The same, and take the checksums of the blocks that torch, and the device, are done
        with."""
        copies = [SlotCopy(s.offset, i.address, s.spec.nbytes) for i, s in pairs if i.address]
        nbytes = self.state.payload_bytes
        self.sums = copy_and_hash(
            self.slot, copies, nbytes, self._blocks_of_torch(), self._is_awaited.is_set
        )
        self._write_through_torch(pairs)

    def _blocks_of_torch(self) -> set[int]:
        """The numbers of the blocks that have something of a tensor whose bytes go through
        torch."""
        size = self.slot.block_bytes
        segments = chain.from_iterable(copies.through_torch for copies in self.state.copies)
        return {
            block
            for s in segments
            if s.spec.nbytes
            for block in range(s.offset // size, (s.offset + s.spec.nbytes - 1) // size + 1)
        }

    def _write_through_torch(self, pairs: Sequence[tuple[StateItem, Segment]]) -> None:
        for item, segment in pairs:
            self.copied_bytes += segment.spec.nbytes
            if item.address is not None:
                continue
            stream = self._streams.get(item.local.device)
            if stream is None:
                write(self.slot, segment, item.local)
            else:
                with torch.cuda.stream(stream):
                    write(self.slot, segment, item.local, non_blocking=True)
                    item.local.record_stream(stream)


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
