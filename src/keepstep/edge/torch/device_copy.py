"""Device copy: what of one snapshot is on devices, ordered in one go at the boundary.

    what may move       ordered first; the trainer's stream waits for it
    what stands still   in buckets, in the order in which the optimizers overwrite them, each with
                        a landing; an optimizer's step waits for its own (REFT's hierarchical
                        snapshot)

Tensors are cut into pieces, and pieces leave the device by turns, so that a `loss.item()` of the
trainer's waits for a turn and not for a tensor; many small ones that lie side by side in the slot
are packed on the device first and leave it as one. What is ordered, and where, is worked out once
for a slot and a plan of the state, and kept until either goes (`CopyPlans`): a boundary only orders
it. Blocks that replicas share (REFT) are digested where they are, behind the copies of their
bucket; of what others keep nothing leaves the device.

Comes in: pairs of a tensor and its place, one slot, streams. Goes out: bytes in the slot, and which
blocks of it are whole after which landing. Decides nothing but the cuts. What it
orders is tried on a fake device that reorders (`tests/edge/torch/test_device_order.py`), and on a
real one in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from keepstep.coding.checksum import checksum, in_threads
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_stream import CopyStream, Landing, TimedWait
from keepstep.edge.torch.device_digests import BlockDigests, DigestKeys, SharedBlocks
from keepstep.edge.torch.digests import WORD_BYTES, DigestPiece
from keepstep.edge.torch.plan import CopyOrder, Pair
from keepstep.edge.torch.tree import AT_BOUNDARY
from keepstep.edge.torch.views import overlay
from keepstep.model.layout import Segment
from keepstep.model.shares import runs_of
from keepstep.model.units import KIB, MIB, round_up

PIECE_BYTES = 32 * MIB
TURN_BYTES = 64 * MIB  # a millisecond of the bus
BUCKET_BYTES = 256 * MIB
SMALL_BYTES = 256 * KIB  # what costs more to order than to move
FIRST = AT_BOUNDARY[0]  # the bucket of what may move
ALONE = SharedBlocks()

Streams = Mapping[torch.device, CopyStream]


@dataclass(eq=False)
class Run:
    """Small tensors side by side: into `packed`, which is cut in `parts` for them, and from there
    to the host as one, but for what others keep: `hosts` get what is `leaving`."""

    packed: torch.Tensor
    parts: list[torch.Tensor]
    sources: list[torch.Tensor]
    hosts: list[torch.Tensor] = field(default_factory=list)
    leaving: list[torch.Tensor] = field(default_factory=list)
    digested: list[DigestPiece] = field(default_factory=list)


@dataclass(eq=False)
class BusTurn:
    """Pieces that are ordered in one go, and what else leaves the device waits for."""

    hosts: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0


@dataclass(eq=False)
class Bucket:
    """What leaves one device, or is digested there, under one landing. `optimizer`: whose update
    overwrites it; `blocks`: of the slot, that are whole once it has landed."""

    device: torch.device
    optimizer: int
    turns: list[BusTurn] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    digested: list[DigestPiece] = field(default_factory=list)

    def order(self, stream: CopyStream) -> Landing:
        for run in self.runs:
            stream.take_turns()
            stream.clear(run.packed)  # what lies between the tensors, too
            stream.copy(run.parts, run.sources)
            if run.hosts:
                stream.copy(run.hosts, run.leaving)
            for piece in run.digested:
                stream.digest(piece)
        for turn in self.turns:
            stream.take_turns()
            stream.copy(turn.hosts, turn.sources)
        for piece in self.digested:
            stream.digest(piece)
        return stream.mark()

    @property
    def leaving_bytes(self) -> int:
        """That cross the bus."""
        by_runs = sum(part.nbytes for run in self.runs for part in run.leaving)
        return by_runs + sum(turn.nbytes for turn in self.turns)

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

    def __init__(
        self, buckets: Sequence[Bucket], streams: Streams, digests: BlockDigests | None = None
    ) -> None:
        self._buckets = buckets
        self._streams = streams
        self._digests = digests
        self._host_sums: torch.Tensor | None = None
        self._read_back: list[Landing] = []
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
        if self._digests is not None:
            self._digests.begin(self._streams)
        for bucket in self._buckets:
            if bucket.optimizer != FIRST:
                self._order(bucket)
        if self._digests is not None:
            self._read_back = self._digests.read_back(self._streams)
        self.is_ordered = True

    @property
    def digested(self) -> Collection[int]:
        """The blocks of which digests are taken."""
        return () if self._digests is None else self._digests.blocks

    @property
    def leaving_bytes(self) -> int:
        """That cross the bus."""
        return sum(bucket.leaving_bytes for bucket in self._buckets)

    def digest_host(self) -> None:
        """What of these blocks lies on the host, before an update moves it."""
        if self._digests is not None:
            self._host_sums = self._digests.host_sums()

    def digests(self) -> dict[int, int]:
        """By block. Waits for the device. Raises RuntimeError when one has failed."""
        if self._digests is None:
            return {}
        assert self._host_sums is not None, "what lies on the host was not digested"
        for landing in self._read_back:
            landing.wait()
        return self._digests.found(self._host_sums)

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
        for landing in [*(landing for _, landing in self._landings), *self._read_back]:
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
        self._keys: DigestKeys | None = None  # once something is shared
        self._known: WeakKeyDictionary[Slot, tuple[tuple[Any, ...], _Cut]] = WeakKeyDictionary()

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

    def of(
        self,
        slot: Slot,
        copies: Sequence[CopyOrder],
        payload_bytes: int,
        among: SharedBlocks = ALONE,
    ) -> DeviceCopy:
        """copies: the plan's, which is kept from gather to gather, and then what is found anew. Of
        that, where it lies matters on a device, and where it is digested: random states of the host
        are other tensors each time."""
        lasting, *others = copies
        key = (
            lasting,
            -(-payload_bytes // slot.block_bytes),
            among,
            *(
                _place(pair) if self._looks_at(pair, among) else _goes_to(pair)
                for order in others
                for pair in order.pairs
            ),
        )
        known = self._known.get(slot)
        if known is None or known[0][0] is not lasting or known[0][1:] != key[1:]:
            if known is None:
                slot.before_close(lambda: self._forget(slot))
            known = self._known[slot] = (key, self._cut(slot, copies, payload_bytes, among))
        return DeviceCopy(known[1].buckets, self._streams, known[1].digests)

    def _looks_at(self, pair: Pair, among: SharedBlocks) -> bool:
        """Whether its memory is in what is worked out."""
        item = pair[0]
        return item.local.device in self._streams or (item.lazy and bool(among.shared))

    def _forget(self, slot: Slot) -> None:
        self._known.pop(slot, None)

    def _cut(
        self, slot: Slot, copies: Sequence[CopyOrder], payload_bytes: int, among: SharedBlocks
    ) -> _Cut:
        on_device = [
            pair
            for order in copies
            for pair in order.pairs
            if pair[0].address is None
            and pair[0].local.device in self._streams
            and pair[1].spec.nbytes
        ]
        made = _Cut(among.lacking, self._digests(slot, on_device, copies, among))
        made.buckets = [
            self._bucket(slot, device, optimizer, pairs, made)
            for device in self._streams
            for optimizer, pairs in _in_buckets(on_device, device)
        ]
        # As they are ordered, and so waited for: all devices' moving tensors come first.
        made.buckets.sort(key=lambda bucket: bucket.optimizer != FIRST)
        _find_blocks(slot, made.buckets, copies, payload_bytes, among.lacking)
        return made

    def _digests(
        self,
        slot: Slot,
        on_device: Sequence[Pair],
        copies: Sequence[CopyOrder],
        among: SharedBlocks,
    ) -> BlockDigests | None:
        """For the shared blocks that have something on a device; None when there are none."""
        size = slot.block_bytes
        there = {block for _, segment in on_device for block in _blocks_of(segment, size)}
        if there.isdisjoint(among.shared):
            return None
        if self._keys is None or (self._keys.seed, self._keys.block_bytes) != (among.seed, size):
            self._keys = DigestKeys(among.seed, size)
        made = BlockDigests(there & among.shared, self._keys)
        for device in dict.fromkeys(item.local.device for item, _ in on_device):
            made.use(device, self._streams[device])
        on_host = [(i, s) for c in copies for i, s in c.lazy.pairs if i.address is not None]
        made.add_host([(i, s) for i, s in on_host if s.spec.nbytes])
        return made

    def _bucket(
        self, slot: Slot, device: torch.device, optimizer: int, pairs: Sequence[Pair], cut: _Cut
    ) -> Bucket:
        bucket = Bucket(device, optimizer)
        for group in _side_by_side(sorted(pairs, key=lambda pair: pair[1].offset)):
            bucket.segments += [segment for _, segment in group]
            [(item, segment), *others] = group
            if others:
                bucket.runs.append(self._run(slot, device, group, cut))
            elif cut.is_shared(segment, slot.block_bytes):
                self._leave(bucket, slot, item.local, segment, cut)
            else:
                for host, source in _pieces(overlay(slot, segment), item.local):
                    bucket.add(host, source)
        return bucket

    def _packed(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """So many bytes there, rounded to words, that the next run overwrites."""
        if device not in self._staging:
            self._staging[device] = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        return self._staging[device][: round_up(nbytes, WORD_BYTES)]

    def _run(self, slot: Slot, device: torch.device, group: Sequence[Pair], cut: _Cut) -> Run:
        first, end = group[0][1].offset, group[-1][1].end
        packed = self._packed(device, end - first)
        parts = [
            packed[s.offset - first : s.end - first].view(i.local.dtype).view(i.local.shape)
            for i, s in group
        ]
        run = Run(packed, parts, [item.local for item, _ in group])
        for at, stop in cut.kept(first, end, slot.block_bytes):
            run.hosts.append(_bytes_of(slot, at, stop))
            run.leaving.append(packed[at - first : stop - first])
        if cut.digests is not None:
            run.digested += cut.digests.pieces(device, packed, first)
        return run

    def _leave(
        self, bucket: Bucket, slot: Slot, tensor: torch.Tensor, segment: Segment, cut: _Cut
    ) -> None:
        """A large one of which replicas share blocks: what this rank keeps goes to the host, and
        all that is shared is digested. Its memory is, value for value, what is kept."""
        flat, first = tensor.detach().reshape(-1).view(torch.uint8), segment.offset
        for at, stop in cut.kept(first, segment.end, slot.block_bytes):
            for begin in range(at, stop, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, stop)
                bucket.add(_bytes_of(slot, begin, end), flat[begin - first : end - first])
        if cut.digests is None:
            return
        if _has_words(flat):
            bucket.digested += cut.digests.pieces(bucket.device, flat, first)
            return
        for begin in range(0, flat.nbytes, PIECE_BYTES):
            part = flat[begin : begin + PIECE_BYTES]
            packed = self._packed(bucket.device, part.nbytes)
            run = Run(packed, [packed[: part.nbytes]], [part])
            run.digested += cut.digests.pieces(bucket.device, packed, first + begin)
            bucket.runs.append(run)


@dataclass(eq=False)
class _Cut:
    """What is worked out for one slot. `digests`: of the shared blocks."""

    lacking: frozenset[int]
    digests: BlockDigests | None
    buckets: list[Bucket] = field(default_factory=list)

    def is_shared(self, segment: Segment, size: int) -> bool:
        """Whether some of it is digested."""
        shared = () if self.digests is None else self.digests.blocks
        return any(block in shared for block in _blocks_of(segment, size))

    def kept(self, begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
        """The stretches of the payload from `begin` to `end` that nobody else keeps."""
        at = begin
        for first, count in runs_of(b for b in self.lacking if begin < (b + 1) * size):
            stop = min(first * size, end)
            if stop > at:
                yield at, stop
            at = max(at, (first + count) * size)
        if at < end:
            yield at, end


def _bytes_of(slot: Slot, begin: int, end: int) -> torch.Tensor:
    return torch.frombuffer(slot.payload, dtype=torch.uint8, count=end - begin, offset=begin)


def _has_words(flat: torch.Tensor) -> bool:
    """Whether its bytes can be looked at as whole words where they are."""
    return flat.nbytes % WORD_BYTES == 0 and flat.storage_offset() % WORD_BYTES == 0


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
    return segment.spec.nbytes <= SMALL_BYTES and is_flat(item.local)


def is_flat(tensor: torch.Tensor) -> bool:
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
    if not is_flat(source):
        yield host, source  # torch makes it so, on the device
        return
    count = max(1, PIECE_BYTES // source.element_size())
    flat_host, flat_source = host.reshape(-1), source.reshape(-1)
    for at in range(0, source.numel(), count):
        end = min(at + count, source.numel())
        yield flat_host[at:end], flat_source[at:end]


def _find_blocks(
    slot: Slot,
    buckets: Sequence[Bucket],
    copies: Sequence[CopyOrder],
    payload_bytes: int,
    lacking: frozenset[int],
) -> None:
    """Which blocks are whole after which bucket. A block that has something else in it besides
    tensors of devices and alignment is in none: whoever writes the rest hashes it; nor is one that
    others keep."""
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
        if is_whole and block not in others and block not in lacking:
            buckets[number].blocks.append(block)


def _blocks_of(segment: Segment, size: int) -> range:
    return range(segment.offset // size, (segment.end - 1) // size + 1)
