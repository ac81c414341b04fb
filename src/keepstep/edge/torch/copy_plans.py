"""Copy plans: what is ordered on devices for one slot, and where. Worked out once and kept until
the slot or the state's plan goes: a boundary only orders it (`device_copy.py`).

Tensors are cut into pieces, and pieces into buckets, in the order in which the optimizers overwrite
them. Many small ones that lie side by side in the slot are packed on the device first and leave it
as one. What replicas share is digested where it is (`device_digests.py`), and so are frozen tensors
(`frozen_digests.py`); what is to be finite is looked at there (`numbers/device_looks.py`).

Comes in: the pairs of a state, one slot. Goes out: buckets of device tensors and places in the
slot. Decides nothing but the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.device_copy import FIRST, Bucket, DeviceCopy, Run, Streams
from keepstep.edge.torch.device_digests import BlockDigests, DigestKeys, SharedBlocks
from keepstep.edge.torch.digests import WORD_BYTES
from keepstep.edge.torch.frozen_digests import FrozenDigests, FrozenWay
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.numbers.device_looks import DeviceLooks
from keepstep.edge.torch.plan import CopyOrder, Pair
from keepstep.edge.torch.tree import has_words, is_flat
from keepstep.edge.torch.views import overlay
from keepstep.model.layout import Segment
from keepstep.model.shares import runs_of
from keepstep.model.units import KIB, MIB, round_up

PIECE_BYTES = 32 * MIB
BUCKET_BYTES = 256 * MIB
SMALL_BYTES = 256 * KIB  # what costs more to order than to move
ALONE = SharedBlocks()


class CopyPlans:
    """The buckets of each slot, as long as the slot is open and the state's plan holds. They look
    into the slot's map, so they go before it does."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._staging: dict[torch.device, torch.Tensor] = {}
        self._keys: DigestKeys | None = None  # once something is digested
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
        known_bad: KnownBad | None = None,
        way: FrozenWay = FrozenWay.COPIED,
    ) -> DeviceCopy:
        """copies: the plan's, which is kept from gather to gather, and then what is found anew. Of
        that, where it lies matters on a device, and where it is digested: random states of the host
        are other tensors each time. known_bad: whether it is looked at what is finite. way: what
        becomes of the plan's frozen tensors; where a device has no room for digests they are
        copied."""
        lasting, *others = copies
        key = (
            lasting,
            -(-payload_bytes // slot.block_bytes),
            among,
            known_bad,
            way,
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
            cut = self._cut(slot, copies, payload_bytes, among, known_bad, way)
            known = self._known[slot] = (key, cut)
        cut = known[1]
        return DeviceCopy(
            cut.buckets, self._streams, cut.digests, cut.looks, cut.frozen, cut.compared
        )

    def _looks_at(self, pair: Pair, among: SharedBlocks) -> bool:
        """Whether its memory is in what is worked out."""
        item = pair[0]
        return item.local.device in self._streams or (item.lazy and bool(among.shared))

    def _forget(self, slot: Slot) -> None:
        self._known.pop(slot, None)

    def _cut(
        self,
        slot: Slot,
        copies: Sequence[CopyOrder],
        payload_bytes: int,
        among: SharedBlocks,
        known_bad: KnownBad | None,
        way: FrozenWay,
    ) -> _Cut:
        frozen = self._digests_of_frozen(slot, copies[0], among.seed, way)
        compared = _compared(frozen) if way is FrozenWay.COMPARED else []
        on_device = [
            pair
            for order in copies
            for pair in self._there(order.pairs)
            if not (compared and frozen is not None and frozen.has(pair))
        ]
        devices = list(dict.fromkeys(item.local.device for item, _ in on_device))
        looks = None
        if known_bad is not None and devices:
            looks = DeviceLooks(devices, len(on_device))
        digests = self._digests(slot, on_device, copies, among)
        made = _Cut(among.lacking, digests, looks, frozen, compared)
        made.buckets = [
            self._bucket(slot, device, optimizer, pairs, made)
            for device in self._streams
            for optimizer, pairs in _in_buckets(on_device, device)
        ]
        # As they are ordered, and so waited for: all devices' moving tensors come first.
        made.buckets.sort(key=lambda bucket: bucket.optimizer != FIRST)
        _find_blocks(slot, made.buckets, copies, payload_bytes, among.lacking)
        return made

    def _there(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Those that lie on a device of ours."""
        return (
            pair
            for pair in pairs
            if pair[0].address is None
            and pair[0].local.device in self._streams
            and pair[1].spec.nbytes
        )

    def _digests_of_frozen(
        self, slot: Slot, planned: CopyOrder, seed: bytes, way: FrozenWay
    ) -> FrozenDigests | None:
        """None where nobody asks for them, or where a device has no room for the keys."""
        pairs = list(self._there(planned.frozen.pairs))
        if way is FrozenWay.COPIED or not pairs:
            return None
        keys = self._digest_keys(seed, slot.block_bytes)
        with suppress(torch.OutOfMemoryError):
            return FrozenDigests(pairs, keys, self._streams, slot.block_bytes)
        return None

    def _digest_keys(self, seed: bytes, size: int) -> DigestKeys:
        if self._keys is None or (self._keys.seed, self._keys.block_bytes) != (seed, size):
            self._keys = DigestKeys(seed, size)
        return self._keys

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
        made = BlockDigests(there & among.shared, self._digest_keys(among.seed, size))
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
            if not others and cut.looks is not None and item.lazy:
                bucket.looks += cut.looks.tensor(device, group[0])
            if cut.frozen is not None:
                bucket.digested += cut.frozen.pieces_of(group)
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
        if cut.looks is not None and group[0][0].lazy:
            run.looks += cut.looks.packed(device, packed, first, group)
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
        if has_words(flat):
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
    """What is worked out for one slot. `digests`: of the shared blocks; `looks`: whether what is
    there is finite; `frozen`: digests of what the slot is to have, or has, at a later boundary;
    `compared`: where that is all that is read of them."""

    lacking: frozenset[int]
    digests: BlockDigests | None
    looks: DeviceLooks | None
    frozen: FrozenDigests | None
    compared: Sequence[Bucket]
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


def _compared(frozen: FrozenDigests | None) -> list[Bucket]:
    """In which nothing is copied."""
    if frozen is None:
        return []
    devices = dict.fromkeys(item.local.device for item, _ in frozen.pairs)
    return [
        Bucket(
            device,
            FIRST,
            digested=list(frozen.pieces_of(p for p in frozen.pairs if p[0].local.device == device)),
        )
        for device in devices
    ]


def _bytes_of(slot: Slot, begin: int, end: int) -> torch.Tensor:
    return torch.frombuffer(slot.payload, dtype=torch.uint8, count=end - begin, offset=begin)


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
