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

On a device all copies are ordered at the boundary, on streams of their own, into page-locked slots
(`device_copy.py`, `page_locks.py`), and the fence makes the *device* wait, not the trainer. What
has been copied by then is only known to the device, so a fence that comes too late to be ordered is
ordered all the same, and each optimizer's update waits for its own tensors alone.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from keepstep.edge.shm.one_pass import copy_and_hash, make_kept
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.copy_stream import begin_host_thread, copy_stream
from keepstep.edge.torch.device_copy import DeviceCopy
from keepstep.edge.torch.device_digests import SharedBlocks
from keepstep.edge.torch.frozen import FrozenInSlots, HeldFrozen, differing
from keepstep.edge.torch.frozen_digests import FrozenWay
from keepstep.edge.torch.numbers.copied import KnownBad, LookAtCopy
from keepstep.edge.torch.operations import Operation
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.plan import CopyShare, Pair
from keepstep.edge.torch.state import State
from keepstep.edge.torch.tree import StateItem
from keepstep.edge.torch.views import write
from keepstep.model.layout import Segment
from keepstep.model.numbers import NotFinite
from keepstep.model.units import MIB
from keepstep.ports import Acts

FIRST_LOOK_S = 0.0005  # most operations are over by then
LOOK_EVERY_S = 0.01
# Of the second look, which the update waits for: 16 tensors, 4 KiB of each.
LOOKS = 16
LOOK_BYTES = 4096
AT_ONCE_BYTES = MIB  # so little is copied quicker than a thread is woken
GOLDEN_RATIO = 0.6180339887498949  # multiples of it, without their whole part, fill a range evenly


@dataclass(eq=False)
class TensorCopy:
    """One snapshot on its way from live tensors to a slot. Made on the trainer's thread, carried on
    by the capture thread. Equal to nothing but itself: tensors cannot be compared in passing."""

    state: State
    slot: Slot
    # every byte has left the live tensors (or is ordered to)
    done: threading.Event = field(default_factory=threading.Event)
    # how many copies there were before: each looks at other bytes a second time
    turn: int = 0
    locks: PageLocks | None = None  # that the slot may have; None without a device
    # blocks of the payload that other ranks keep: only their checksums are taken
    lacking: frozenset[int] = frozenset()
    # those and the ones that this rank keeps for others
    shared: frozenset[int] = frozenset()
    known_bad: KnownBad | None = None  # None: nobody asks what is finite
    plans: CopyPlans | None = None  # likewise
    frozen: FrozenInSlots = field(default_factory=FrozenInSlots)  # its own knows of no slot
    hash_threads: int = 1
    # lazily copied tensors that changed under the copy
    moved: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    copy_ns: int = 0
    sums: Mapping[int, int] = field(default_factory=dict)  # see `StateCopy`
    digests: Mapping[int, int] = field(default_factory=dict)  # likewise

    def __post_init__(self) -> None:
        self._lazy_count = sum(len(copies.lazy.pairs) for copies in self.state.copies)
        self._look: LookAtCopy | None = None
        if self.known_bad is not None:
            size = self.slot.block_bytes
            looked_at = self.known_bad.of_kept(self.state.copies, self.lacking, size)
            self._look = LookAtCopy(self.slot, looked_at, self.known_bad)
        self._thread = threading.get_ident(), threading.get_native_id()
        self._lock = threading.Lock()
        self._is_awaited = threading.Event()  # the update waits
        self._has_landed = threading.Event()  # nothing is under way on a device
        self._is_settled = threading.Event()  # what has `moved` by counters is known for good
        self._is_copied = False
        self._is_fenced = False  # whatever moves from here on may
        self._waited_begun_ns = 0
        self._updated: set[int] = set()  # optimizers whose updates have come already
        # the plan's frozen tensors, where they are to be in the slot already, and where they will
        # be after this
        self._held: HeldFrozen | None = None
        self._to_hold: HeldFrozen | None = None
        self._device: DeviceCopy | None = None
        self._choose_ways()

    def _choose_ways(self) -> None:
        """What of frozen tensors is copied, and what is ordered on devices."""
        planned, slot = self.state.copies[0], self.slot
        way = FrozenWay.COPIED
        if planned.frozen.pairs and not self.lacking:
            self._held = self.frozen.are_in(slot, planned)
            way = FrozenWay.MARKED if self._held is None else FrozenWay.COMPARED
        if self.plans is None:
            return
        nbytes = self.state.payload_bytes
        among = SharedBlocks(self.shared, self.lacking, slot.header().job_hash)
        device = self._device = self.plans.of(
            slot, self.state.copies, nbytes, among, self.known_bad, way
        )
        if self._held is not None and self._held.marks is not None and not device.compares:
            self._held = None  # no room for digests by now

    def copy_moving(self) -> None:
        """On the trainer's thread, before the next step begins: whatever could move; and, from a
        device into locked memory, everything else, which holds nobody. Raises RuntimeError while
        the program captures a CUDA graph."""
        device = self._device
        if device is not None:
            if device.is_captured:
                raise RuntimeError("the step ends in the midst of a CUDA graph's capture")
            if self.locks is not None:
                self.locks.begin_copy(self.slot)
        try:
            if device is not None:
                device.order_moving()
                if self.locks is not None and self.locks.is_locked(self.slot):
                    device.order_still()
            for copies in self.state.copies:
                self._write(copies.eager)
            self._write_frozen()
            if device is not None and device.is_ordered:
                self._write_small_rest()
        except BaseException:  # nobody carries this copy on
            self._wait_for_device()
            raise
        at = self.state.layout.objects_offset
        for section in self.state.sections:
            self.slot.payload[at : at + len(section)] = section
            at += len(section)

    def copy_still(self) -> Acts[None]:
        """In the background: what stands still until the next update."""
        yield
        began_ns = time.perf_counter_ns()
        try:
            if not self._is_copied:
                if self._device is not None and not self._device.is_ordered:
                    self._device.order_still()
                self._write_hashed([copies.lazy for copies in self.state.copies])
                self._is_copied = True
        finally:
            self.done.set()
            self._land()
        self._prove_frozen()  # while whoever updates waits for nobody
        self._operation = Operation(*self._thread)
        if not self.sums:
            self._compare(is_last=False)  # a copy that is torn already need not be hashed
        self.copy_ns = time.perf_counter_ns() - began_ns - self._waited_begun_ns

    def _write_frozen(self) -> None:
        """What no optimizer moves, unless the slot has it already."""
        planned, *others = self.state.copies
        for copies in others:  # found anew each time
            self._write(copies.frozen)
        if self._held is not None or not planned.frozen.pairs:
            return
        self.frozen.forget(self.slot)
        self._write(planned.frozen)
        if not self.lacking:
            self._to_hold = self.frozen.copied(self.slot, planned)

    def _prove_frozen(self) -> None:
        """What was not copied is in the slot as it is, or has moved."""
        held, moved = self._held, list[str]()
        if held is not None:
            moved += differing(self.slot, held.plan)
        digests = None if self._device is None else self._device.frozen
        if digests is not None:
            marks = digests.marks(self.slot, self.sums, self.hash_threads)
            self.sums = {**self.sums, **digests.sums_of_blocks(marks)}
            if self._to_hold is not None:
                self._to_hold.marks = marks
            if held is not None and held.marks is not None:
                moved += digests.moved(held.marks, marks)
                held.marks = None if moved else held.marks  # else it gets all the next time
        if moved:
            with self._lock:
                self.moved = list(dict.fromkeys([*self.moved, *moved]))

    def _write_small_rest(self) -> None:
        """With everything else ordered on a device, what stands still on the host is counters of
        steps and the like: when they are copied, too, no update waits for a thread of ours."""
        rest = [copies.lazy for copies in self.state.copies]
        held = (place for r in rest for place in r.device_bytes.items())
        if sum(n for device, n in held if not self._is_copied_from(device)) <= AT_ONCE_BYTES:
            for share in rest:
                make_kept(self.slot, share.table, self.lacking)
                self._write_through_torch(share)
            self._note_kept()
            self._is_copied = True
            self.done.set()

    def _land(self) -> None:
        """Wait for the device, and hash what has landed while the rest lands."""
        if self._device is None:
            return
        begin_host_thread()
        try:
            ordered_ns = time.perf_counter_ns()
            self._device.wait_begun()  # the trainer may be ahead of its device
            self._waited_begun_ns = time.perf_counter_ns() - ordered_ns
            nbytes = self.state.payload_bytes
            landed = self._device.hash_landed(self.slot, nbytes, self.hash_threads)
            self.digests = self._device.digests()
            left = {block: d for block, d in self.digests.items() if block in self.lacking}
            self.sums = {**self.sums, **landed, **left}
        finally:
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self._device is None:
            return
        try:
            self._device.wait()
        finally:  # what raises has ended whatever the device did
            self._has_landed.set()
            if self.locks is not None:
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

    def not_finite(self) -> NotFinite:
        """Of parameters, and of the optimizer's state."""
        if self._look is None:
            return NotFinite()
        devices: Collection[torch.device] = ()
        suspects: Sequence[Pair] = ()
        if self._device is not None and self.plans is not None and self._device.looks:
            devices, suspects = self.plans.devices, self._device.suspects()
        # What the slot had already has been looked at as it came there.
        bad = self._look.not_finite(devices, suspects, with_frozen=self._held is None)
        if bad:
            self.frozen.forget(self.slot)
        return bad

    def end(self) -> None:
        """Nobody is to wait for this copy any more."""
        self.done.set()
        self._has_landed.set()

    def fence(self, update: object = None) -> bool:
        """In an optimizer's pre-step hook: return when its update may overwrite what it overwrites.
        `update`: whose; None: anybody's. Whether everybody's may come now."""
        self._is_awaited.set()
        self.done.wait()
        if self._device is not None and self._device.is_captured:
            # Nothing runs now, and nothing of the device may be asked: replays come later.
            self._has_landed.wait()
            return False
        turn = self.state.turn_of(update)
        if self._device is None or turn is None or self._device.lead(turn):
            self.passed()
            return True
        self._compare(is_last=False)
        with self._lock:  # from here on it moves what is its own
            self._updated.add(turn)
        return False

    def passed(self) -> None:
        """On the trainer's thread, between two operations, before anything may move."""
        if not self.done.is_set():
            return
        if self._device is not None:
            self._device.lead(None)  # whatever comes next on the device comes behind the copies
        self._compare(is_last=True)
        with self._lock:
            if self._is_copied and not self._is_fenced:
                self._look_again()
            self._is_fenced = True

    @property
    def device_bytes(self) -> int:
        """That leave devices."""
        return 0 if self._device is None else self._device.leaving_bytes

    @property
    def is_on_device(self) -> bool:
        return self._device is not None and self._device.has_any

    def waited_ns(self) -> int | None:
        return 0 if self._device is None else self._device.waited_ns()

    def _compare(self, is_last: bool) -> None:
        """Compare version counters: for the last time, when nothing that could still move them runs
        any more."""
        with self._lock:
            if self._is_settled.is_set():
                return
            self.moved = list(dict.fromkeys([*self.moved, *self.counted_moves()]))
            if is_last:
                self._is_settled.set()

    def counted_moves(self) -> list[str]:
        """Whose counters have moved by now, but for what updates have overwritten that did not have
        to wait."""
        moved: dict[str, None] = {}
        for copies, before in zip(self.state.copies, self.state.versions, strict=True):
            now = copies.versions()
            if now != before:
                triples = zip(copies.counted_for, now, before, strict=True)
                moved.update(
                    (item.spec.name, None)
                    for item, new, old in triples
                    if new != old and item.turn[0] not in self._updated
                )
        return list(moved)

    def _look_again(self) -> None:
        """Compare some bytes of some tensors with their copies."""
        first = self.turn * LOOKS
        found = []
        for number in range(first, first + min(LOOKS, self._lazy_count)):
            item, segment = self._lazy_pair(number % self._lazy_count)
            if item.turn[0] not in self._updated and self._differs(item, segment, number):
                found.append(item.spec.name)
        if found:
            # What a counter has seen is known: it is in `moved`, or came behind the copy's end.
            counted = set(self.counted_moves())
            self.moved += [name for name in found if name not in counted]

    def _lazy_pair(self, index: int) -> tuple[StateItem, Segment]:
        for copies in self.state.copies:
            if index < len(copies.lazy.pairs):
                return copies.lazy.pairs[index]
            index -= len(copies.lazy.pairs)
        raise IndexError(index)

    def _differs(self, item: StateItem, segment: Segment, number: int) -> bool:
        """Whether those bytes of the tensor that are due are not as they were copied."""
        if item.address is None or item.address != item.local.data_ptr():
            return False
        nbytes = min(LOOK_BYTES, segment.spec.nbytes)
        at = int(number * GOLDEN_RATIO % 1 * (segment.spec.nbytes - nbytes))
        if self.lacking and not self._keeps(segment.offset + at, nbytes):
            return False  # whoever keeps it looks
        copied = self.slot.payload_address + segment.offset + at
        live = ctypes.string_at(item.address + at, nbytes)
        return live != ctypes.string_at(copied, nbytes)

    def _keeps(self, offset: int, nbytes: int) -> bool:
        """Whether all of these bytes are copied."""
        size = self.slot.block_bytes
        blocks = range(offset // size, (offset + max(nbytes, 1) - 1) // size + 1)
        return self.lacking.isdisjoint(blocks)

    def _write(self, share: CopyShare) -> None:
        share.table.make(self.slot)
        self._write_through_torch(share)

    def _write_hashed(self, shares: Sequence[CopyShare]) -> None:
        """The same, and take the checksums of the blocks that torch, and the device, are done
        with."""
        tables = [share.table for share in shares]
        nbytes = self.state.payload_bytes
        look = None if self._look is None else self._look.there
        self.sums = copy_and_hash(
            self.slot,
            tables,
            nbytes,
            self._blocks_of_torch(),
            self._is_awaited.is_set,
            self.lacking,
            look,
            () if self._device is None else self._device.digested,
        )
        for share in shares:
            self._write_through_torch(share)
        self._note_kept()

    def _note_kept(self) -> None:
        """All is copied, or ordered to be, but for what others keep; of what they keep, and lies on
        the host, the digest is taken before it may move."""
        self.copied_bytes -= len(self.lacking) * self.slot.block_bytes
        if self._device is not None:
            self._device.digest_host()

    def _blocks_of_torch(self) -> set[int]:
        """The numbers of the blocks that have something of a tensor whose bytes go through
        torch."""
        size = self.slot.block_bytes
        segments = chain.from_iterable(copies.segments_of_torch for copies in self.state.copies)
        return {
            block
            for s in segments
            if s.spec.nbytes
            for block in range(s.offset // size, (s.offset + s.spec.nbytes - 1) // size + 1)
        }

    def _write_through_torch(self, share: CopyShare) -> None:
        self.copied_bytes += share.nbytes
        for device, pairs in share.through_torch.items():
            if not self._is_copied_from(device):
                for item, segment in pairs:
                    write(self.slot, segment, item.local)

    def _is_copied_from(self, device: torch.device) -> bool:
        """Whether the copies of what lies there are ordered on it."""
        return self.plans is not None and device in self.plans.devices


def copy_plans(devices: Iterable[torch.device]) -> CopyPlans | None:
    """For a state that is on these; None where none of them is one to copy from."""
    streams = {device: copy_stream(device) for device in devices if device.type == "cuda"}
    return CopyPlans(streams) if streams else None
