"""Device copy: what of one snapshot is on devices, ordered in one go at the boundary.

    what may move       ordered first; the trainer's stream waits for it
    what stands still   in buckets, in the order in which the optimizers overwrite them, each with
                        a landing; an optimizer's step waits for its own (REFT's hierarchical
                        snapshot)

Tensors are cut into pieces, and pieces leave the device by turns, so that a `loss.item()` of the
trainer's waits for a turn and not for a tensor; many small ones that lie side by side in the slot
are packed on the device first and leave it as one. What is ordered, and where, is worked out once
for a slot and a plan of the state, and kept until either goes (`CopyPlans`): a boundary only orders
it.

Comes in: pairs of a tensor and its place, one slot, streams. Goes out: bytes in the slot, and which
blocks of it are whole after which landing. Decides nothing but the cuts. What it
orders is tried on a fake device that reorders (`tests/edge/torch/test_device_order.py`), and on a
real one in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from keepstep.coding.checksum import checksum, in_threads
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_stream import CopyStream, Landing, TimedWait
from keepstep.edge.torch.plan import CopyOrder, Pair
from keepstep.edge.torch.tree import AT_BOUNDARY
from keepstep.edge.torch.views import overlay
from keepstep.model.layout import Segment
from keepstep.model.units import KIB, MIB

PIECE_BYTES = 32 * MIB
TURN_BYTES = 64 * MIB  # a millisecond of the bus
BUCKET_BYTES = 256 * MIB
SMALL_BYTES = 256 * KIB  # what costs more to order than to move
FIRST = AT_BOUNDARY[0]  # the bucket of what may move

Streams = Mapping[torch.device, CopyStream]


@dataclass(eq=False)
class Run:
    """Small tensors side by side: into `packed`, which is cut in `parts` for them, and from there
    to the host as one."""

    host: torch.Tensor
    packed: torch.Tensor
    parts: list[torch.Tensor]
    sources: list[torch.Tensor]


@dataclass(eq=False)
class BusTurn:
    """Pieces that are ordered in one go, and what else leaves the device waits for."""

    hosts: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0


@dataclass(eq=False)
class Bucket:
    """What leaves one device under one landing. `optimizer`: whose update overwrites it; `blocks`:
    of the slot, that are whole once it has landed."""

    device: torch.device
    optimizer: int
    turns: list[BusTurn] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def order(self, stream: CopyStream) -> Landing:
        for run in self.runs:
            stream.take_turns()
            stream.clear(run.packed)  # what lies between the tensors, too
            stream.copy(run.parts, run.sources)
            stream.copy([run.host], [run.packed])
        for turn in self.turns:
            stream.take_turns()
            stream.copy(turn.hosts, turn.sources)
        return stream.mark()

    def add(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """One more piece."""
        if not self.turns or self.turns[-1].nbytes + host.nbytes > TURN_BYTES:
            self.turns.append(BusTurn())
        turn = self.turns[-1]
        turn.hosts.append(host)
        turn.sources.append(source)
        turn.nbytes += host.nbytes


class DeviceCopy:
    """One snapshot's. All but `hash_landed` on the trainer's thread; `order_still` on another one
    where the slot's memory is not locked, because it would hold the trainer."""

    def __init__(self, buckets: Sequence[Bucket], streams: Streams) -> None:
        self._buckets = buckets
        self._streams = streams
        self._landings: list[tuple[Bucket, Landing]] = []
        self._reached: list[Landing] = []  # the boundary, by each device
        self._led: set[int] = set()  # optimizers whose updates are behind the copies already
        self._waits: list[TimedWait] = []
        self.is_ordered = False

    @property
    def has_any(self) -> bool:
        return bool(self._buckets)

    @property
    def is_captured(self) -> bool:
        return any(stream.is_captured for stream in self._streams.values())

    def order_moving(self) -> None:
        """What follows on the device waits for these, and the trainer does not."""
        for stream in self._streams.values():
            stream.follow()
            self._reached.append(stream.mark())
        for bucket in self._buckets:
            if bucket.optimizer == FIRST:
                self._order(bucket)
        self._lead({FIRST})

    def order_still(self) -> None:
        for bucket in self._buckets:
            if bucket.optimizer != FIRST:
                self._order(bucket)
        self.is_ordered = True

    def _order(self, bucket: Bucket) -> None:
        landing = bucket.order(self._streams[bucket.device])
        self._landings.append((bucket, landing))

    def lead(self, optimizer: int | None) -> bool:
        """An update of that optimizer, or of any (None), comes next: it waits on the device for
        what it overwrites. Whether every update may come now."""
        theirs = {bucket.optimizer for bucket in self._buckets}
        self._lead(theirs if optimizer is None else {optimizer})
        return theirs <= self._led

    def _lead(self, optimizers: set[int]) -> None:
        wanted = optimizers - self._led
        self._led |= wanted
        last: dict[torch.device, Landing] = {}  # a stream's copies land in the order of ordering
        for bucket, landing in self._landings:
            if bucket.optimizer in wanted:
                last[bucket.device] = landing
        for device, landing in last.items():
            if not landing.is_over():
                self._waits.append(self._streams[device].lead(landing))

    def wait_begun(self) -> None:
        """On the host, until the devices have come to the boundary. Raises RuntimeError when one
        has failed."""
        for reached in self._reached:
            reached.wait()

    def wait(self) -> None:
        """On the host, until all that is ordered has landed. Raises RuntimeError when a device has
        failed."""
        for _, landing in self._landings:
            landing.wait()

    def hash_landed(self, slot: Slot, payload_bytes: int, threads: int) -> dict[int, int]:
        """Wait for each bucket in turn, and take the checksums of the blocks that are whole then,
        while the next one comes. Raises RuntimeError when a device has failed."""
        payload, size = slot.payload, slot.block_bytes
        sums: dict[int, int] = {}
        for bucket, landing in self._landings:
            landing.wait()
            blocks = bucket.blocks

            def sum_of(number: int, blocks: Sequence[int] = blocks) -> int:
                at = blocks[number] * size
                return checksum(payload[at : min(at + size, payload_bytes)])

            found = in_threads(sum_of, range(len(blocks)), threads)
            sums.update(zip(blocks, found, strict=True))
        return sums

    def waited_ns(self) -> int | None:
        """How long devices have waited for these copies; None while that is not known."""
        waited = [wait.ns() for wait in self._waits]
        known = [ns for ns in waited if ns is not None]
        return sum(known) if len(known) == len(waited) else None


class CopyPlans:
    """The buckets of each slot, as long as the slot is open and the state's plan holds. They look
    into the slot's map, so they go before it does."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._staging: dict[torch.device, torch.Tensor] = {}
        self._known: WeakKeyDictionary[Slot, tuple[tuple[Any, ...], list[Bucket]]] = (
            WeakKeyDictionary()
        )

    @property
    def devices(self) -> Set[torch.device]:
        return self._streams.keys()

    def behind(self) -> Callable[[], bool]:
        """Asks whether a device has still something to do of what the trainer has queued until now.
        One that has failed has not; nor has what goes into a CUDA graph."""
        streams = self._streams.values()
        here = [s.trainers_mark() for s in streams if not s.is_captured]

        def is_behind() -> bool:
            try:
                return not all(landing.is_over() for landing in here)
            except RuntimeError:
                return False

        return is_behind

    def of(self, slot: Slot, copies: Sequence[CopyOrder], payload_bytes: int) -> DeviceCopy:
        """copies: the plan's, which is kept from gather to gather, and then what is found anew. Of
        that, where it lies matters only on a device: random states of the host are other tensors
        each time."""
        lasting, *others = copies
        key = (
            lasting,
            -(-payload_bytes // slot.block_bytes),
            *(
                _place(pair) if pair[0].local.device in self._streams else _goes_to(pair)
                for order in others
                for pair in order.pairs
            ),
        )
        known = self._known.get(slot)
        if known is None or known[0][0] is not lasting or known[0][1:] != key[1:]:
            if known is None:
                slot.before_close(lambda: self._forget(slot))
            known = self._known[slot] = (key, self._cut(slot, copies, payload_bytes))
        return DeviceCopy(known[1], self._streams)

    def _forget(self, slot: Slot) -> None:
        self._known.pop(slot, None)

    def _cut(self, slot: Slot, copies: Sequence[CopyOrder], payload_bytes: int) -> list[Bucket]:
        on_device = [
            pair
            for order in copies
            for pair in order.pairs
            if pair[0].address is None
            and pair[0].local.device in self._streams
            and pair[1].spec.nbytes
        ]
        buckets = [
            self._bucket(slot, device, optimizer, pairs)
            for device in self._streams
            for optimizer, pairs in _in_buckets(on_device, device)
        ]
        # As they are ordered, and so waited for: all devices' moving tensors come first.
        buckets.sort(key=lambda bucket: bucket.optimizer != FIRST)
        _find_blocks(slot, buckets, copies, payload_bytes)
        return buckets

    def _bucket(
        self, slot: Slot, device: torch.device, optimizer: int, pairs: Sequence[Pair]
    ) -> Bucket:
        bucket = Bucket(device, optimizer)
        for group in _side_by_side(sorted(pairs, key=lambda pair: pair[1].offset)):
            bucket.segments += [segment for _, segment in group]
            if len(group) > 1:
                bucket.runs.append(self._run(slot, device, group))
                continue
            [(item, segment)] = group
            for host, source in _pieces(overlay(slot, segment), item.local):
                bucket.add(host, source)
        return bucket

    def _run(self, slot: Slot, device: torch.device, group: Sequence[Pair]) -> Run:
        first, end = group[0][1].offset, group[-1][1].end
        if device not in self._staging:
            self._staging[device] = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        packed = self._staging[device][: end - first]
        host = torch.frombuffer(slot.payload, dtype=torch.uint8, count=end - first, offset=first)
        parts = [
            packed[s.offset - first : s.end - first].view(i.local.dtype).view(i.local.shape)
            for i, s in group
        ]
        return Run(host, packed, parts, [item.local for item, _ in group])


def _place(pair: Pair) -> tuple[Any, ...]:
    """Equal for two tensors that are the same memory, and go to the same place."""
    item, _ = pair
    local = item.local
    look = (local.data_ptr(), local.dtype, local.shape, local.stride(), local.device)
    return *_goes_to(pair), item.turn, *look


def _goes_to(pair: Pair) -> tuple[int, int]:
    return pair[1].offset, pair[1].spec.nbytes


def _in_buckets(
    on_device: Sequence[Pair], device: torch.device
) -> Iterator[tuple[int, list[Pair]]]:
    """In the order of the updates: all that may move as one bucket, the rest cut by size."""
    waiting: list[Pair] = []
    nbytes, optimizer = 0, FIRST
    there = [pair for pair in on_device if pair[0].local.device == device]
    for pair in sorted(there, key=lambda pair: pair[0].turn):
        turn = pair[0].turn[0]
        is_full = optimizer != FIRST and nbytes >= BUCKET_BYTES
        if waiting and (turn != optimizer or is_full):
            yield optimizer, waiting
            waiting, nbytes = [], 0
        optimizer = turn
        waiting.append(pair)
        nbytes += pair[1].spec.nbytes
    if waiting:
        yield optimizer, waiting


def _is_small(pair: Pair) -> bool:
    item, segment = pair
    return segment.spec.nbytes <= SMALL_BYTES and _is_flat(item.local)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether its memory is, value for value, what is kept."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _side_by_side(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Small ones with nothing but their alignment between them, as many as fit into a piece; each
    other one by itself."""
    run: list[Pair] = []
    for pair in pairs:
        segment = pair[1]
        is_next = (
            bool(run)
            and _is_small(pair)
            and segment.offset - run[-1][1].end < SMALL_GAP_BYTES
            and segment.end - run[0][1].offset <= PIECE_BYTES
        )
        if not is_next and run:
            yield run
            run = []
        if _is_small(pair):
            run.append(pair)
        else:
            yield [pair]
    if run:
        yield run


SMALL_GAP_BYTES = 64  # a layout's alignment: anything more is somebody else's


def _pieces(
    host: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = source.detach()
    if not _is_flat(source):
        yield host, source  # torch makes it so, on the device
        return
    count = max(1, PIECE_BYTES // source.element_size())
    flat_host, flat_source = host.reshape(-1), source.reshape(-1)
    for at in range(0, source.numel(), count):
        end = min(at + count, source.numel())
        yield flat_host[at:end], flat_source[at:end]


def _find_blocks(
    slot: Slot, buckets: Sequence[Bucket], copies: Sequence[CopyOrder], payload_bytes: int
) -> None:
    """Which blocks are whole after which bucket. A block that has something else in it besides
    tensors of devices and alignment is in none: whoever writes the rest hashes it."""
    size = slot.block_bytes
    last: dict[int, int] = {}
    there: set[int] = set()
    for number, bucket in enumerate(buckets):
        for segment in bucket.segments:
            there.add(segment.offset)
            for block in _blocks_of(segment, size):
                last[block] = max(number, last.get(block, number))
    segments = [s for order in copies for _, s in order.pairs if s.spec.nbytes]
    others = {b for s in segments if s.offset not in there for b in _blocks_of(s, size)}
    tensors_end = max((s.end for s in segments), default=0)
    for block, number in sorted(last.items()):
        is_whole = min((block + 1) * size, payload_bytes) <= tensors_end
        if is_whole and block not in others:
            buckets[number].blocks.append(block)


def _blocks_of(segment: Segment, size: int) -> range:
    return range(segment.offset // size, (segment.end - 1) // size + 1)
