"""Capture: a state's bytes from live tensors into a slot, behind the trainer's back where they
stand still.

Between two updates parameters and optimizer state do not move (DataStates-LLM, HPDC'24: "lazy";
CheckFreq, FAST'21: the fence before the update), so a thread copies them during the next forward
and backward. Everything else (buffers move in forward, RNG and Python state at any time) is copied
at the boundary.

Two proofs that nothing moved: the optimizers' pre-step hook waits for `fence`, and tensor version
counters before and after are equal. The hook is the one that counts for `fused` optimizers, whose
updates leave the counters as they are (measured, torch 2.13). A copy that fails the second proof is
torn: it is dropped and the moved tensors are named.

On CUDA the copies run on a side stream into pinned pages, and the fence makes the *device* wait,
not the trainer.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from keepstep.edge.shm import memory
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.state import State
from keepstep.edge.torch.tree import StateItem
from keepstep.edge.torch.views import write
from keepstep.model.layout import Segment
from keepstep.ports import Acts


@dataclass
class TensorCopy:
    """One snapshot on its way from live tensors to a slot. Made on the trainer's thread, carried on
    by the capture thread."""

    state: State
    slot: Slot
    # every byte has left the live tensors (or is ordered to)
    done: threading.Event = field(default_factory=threading.Event)
    # lazily copied tensors that changed under the copy
    moved: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    copy_ns: int = 0

    def __post_init__(self) -> None:
        self._pairs = list(zip(self.state.items, self.state.layout.segments, strict=True))
        self._versions = [
            (item.spec.name, item.local, item.local._version)
            for item in self.state.items
            if item.lazy
        ]
        self._check = threading.Lock()
        self._checked = False
        self._devices = {
            item.local.device for item in self.state.items if item.local.device.type == "cuda"
        }
        self._streams = {d: _side_stream(d) for d in self._devices}
        # nothing is copied before what the trainer has queued so far
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy_moving(self) -> None:
        """On the trainer's thread, before the next step begins: whatever could move."""
        self._write([(i, s) for i, s in self._pairs if not i.lazy])
        # on the device, what follows waits; the trainer does not
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        objects = self.state.objects
        at = self.state.layout.objects_offset
        self.slot.payload[at : at + len(objects)] = objects

    def copy_still(self) -> Acts[None]:
        """In the background: what stands still until the next update."""
        yield
        began_ns = time.perf_counter_ns()
        try:
            self._write([(i, s) for i, s in self._pairs if i.lazy])
            if not self._streams:
                self.check()
        finally:
            self.done.set()
        for stream in self._streams.values():
            stream.synchronize()
        self.check()
        self.copy_ns = time.perf_counter_ns() - began_ns

    def end(self) -> None:
        """Nobody is to wait for this copy any more."""
        self.done.set()

    def fence(self) -> None:
        """In the optimizer's pre-step hook: return when the update may overwrite the tensors."""
        self.done.wait()
        self.check()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def check(self) -> None:
        """Compare version counters once: by whoever comes first after the copies were ordered."""
        with self._check:
            if not self._checked:
                self.moved = [
                    name for name, tensor, version in self._versions if tensor._version != version
                ]
                self._checked = True
                self._versions = []

    def _write(self, pairs: Sequence[tuple[StateItem, Segment]]) -> None:
        base = self.slot.payload_address
        memory.copy_all(
            [(base + s.offset, i.address, s.spec.nbytes) for i, s in pairs if i.address]
        )
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


def pin(slot: Slot) -> bool:
    """Page-lock a slot's payload for CUDA, so that copies into it run at link speed; False when the
    driver refuses."""
    if not torch.cuda.is_initialized():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(slot.payload_address, slot.capacity, 0)) == 0


def lower_priority() -> None:
    """Let the trainer's threads win when cores are short (Linux gives each thread its own nice
    value)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.setpriority(0, threading.get_native_id(), 5)
