"""Receive: snapshots on their way in: where each block goes, and whether the whole is what its
owner sealed.

Comes in: blocks, placed straight into a slot or into memory of their own. Goes out: who waits is
told what has come. Called on the links' threads but for `seal`, which the loop calls once
everything is there.

Invariant: nothing is sealed that is not proven: the table under the header, every block under the
table, the manifest under the header.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from keepstep.coding.checksum import checksum, copy_hashed, unpack_table
from keepstep.edge.shm.slot import Slot, table_bytes
from keepstep.edge.shm.slot_header import parse_page
from keepstep.errors import DamageError
from keepstep.model.shares import blocks_of
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import MIB, PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span

ASKED_AT_ONCE = 2000  # ranges in one message
META_BLOCK_BYTES = 4 * MIB  # of what proves a payload, in one piece


def blocks(
    part: Part, nbytes: int, block_bytes: int, lacking: Collection[int] = ()
) -> list[BlockRange]:
    """An object in pieces as they cross; of the payload these are the blocks of its table, without
    those that are `lacking`."""
    return [
        BlockRange(part, at, min(block_bytes, nbytes - at))
        for at in range(0, nbytes, block_bytes)
        if at // block_bytes not in lacking
    ]


def ranges_of(
    payload_bytes: int, manifest_bytes: int, block_bytes: int, lacking: Collection[int] = ()
) -> list[BlockRange]:
    """Everything of a snapshot that lacks these blocks, the header last. `block_bytes`:
    `Memory.block_bytes`, never what somebody else said it is."""
    return [
        *blocks(Part.PAYLOAD, payload_bytes, block_bytes, lacking),
        *blocks(Part.TABLE, table_bytes(payload_bytes, block_bytes), block_bytes),
        *blocks(Part.MANIFEST, manifest_bytes, block_bytes),
        BlockRange(Part.HEADER, 0, PAGE_BYTES),
    ]


def copy_ranges_of(
    payload_bytes: int, manifest_bytes: int, block_bytes: int, lacking: Collection[int] = ()
) -> list[BlockRange]:
    """The same, as it crosses for a copy: what proves the payload in one piece behind it, or in as
    few as there can be. Of small snapshots that is most of what crosses."""
    return [
        *blocks(Part.PAYLOAD, payload_bytes, block_bytes, lacking),
        *meta_ranges_of(payload_bytes, manifest_bytes, block_bytes),
    ]


def meta_ranges_of(payload_bytes: int, manifest_bytes: int, block_bytes: int) -> list[BlockRange]:
    """Header page, table and manifest as they cross for a copy."""
    nbytes = PAGE_BYTES + table_bytes(payload_bytes, block_bytes) + manifest_bytes
    return blocks(Part.META, nbytes, META_BLOCK_BYTES)


def check_holes(payload_bytes: int, lacking: frozenset[int], block_bytes: int, where: str) -> None:
    """That a snapshot of that size may lack these blocks: its last one is never another's. Raises
    DamageError; `where` is named in it."""
    if max(lacking, default=-1) >= payload_bytes // block_bytes:
        raise DamageError(
            f"{where}: expected a snapshot of {payload_bytes} bytes, found that it lacks block "
            f"{max(lacking)}"
        )


def make_holes(slot: Slot, payload_bytes: int, lacking: frozenset[int]) -> None:
    """In a slot that is being written, where a snapshot of that size lacks blocks. Raises
    DamageError when it cannot."""
    check_holes(payload_bytes, lacking, slot.block_bytes, str(slot.path))
    slot.shed(lacking)


def range_of(span: Span) -> BlockRange:
    """Which bytes of its snapshot a span is."""
    return BlockRange(span.part, span.offset, span.length)


def in_runs(
    ranges: Sequence[BlockRange], most: int = ASKED_AT_ONCE
) -> list[tuple[BlockRange, ...]]:
    """The ranges in runs of at most `most`: a message has room for so many."""
    return [tuple(ranges[at : at + most]) for at in range(0, len(ranges), most)]


# no nodes' numbers: threads of ours at work in the slot, and the range that one of them writes
_OURSELVES, _BY_HAND = -1, -2
_ANY_RANGE = BlockRange(Part.PAYLOAD, 0, 0)
_WITH_TABLE = (Part.TABLE, Part.META)


def prove(
    header: SlotHeader,
    table: bytes | bytearray | memoryview,
    manifest: bytes | bytearray | memoryview,
    where: str,
) -> None:
    """That these are the table and the manifest which the header names. Raises DamageError; `where`
    is named in it."""
    if checksum(table) != header.table_checksum:
        raise DamageError(
            f"{where}: the checksum table that arrived is not the one the header names"
        )
    if checksum(manifest) != header.manifest_checksum:
        raise DamageError(f"{where}: the manifest that arrived is not the one the header names")


class WantedRanges:
    """Ranges that are wanted, each of one node and in memory of its own until somebody takes it.
    `on_arrival` is called after each."""

    def __init__(self, on_arrival: Callable[[], None]) -> None:
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._wanted: dict[tuple[int, BlockRange], tuple[int, bytearray]] = {}  # and of whom
        self._here: dict[tuple[int, BlockRange], bytearray] = {}

    def want(self, node: int, rank: int, range_: BlockRange) -> None:
        """Of that rank's snapshot, from that node alone: what came from another one, or still
        comes, is wanted no more."""
        with self._lock:
            self._here.pop((rank, range_), None)
            self._wanted[(rank, range_)] = (node, bytearray(range_.length))

    def place(self, node: int, span: Span) -> memoryview | None:
        """See `BlockTaker`."""
        with self._lock:
            giver, memory = self._wanted.get((span.rank, range_of(span)), (None, b""))
        return memoryview(memory) if giver == node else None

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        """See `BlockTaker`."""
        key = (span.rank, range_of(span))
        with self._lock:
            giver, memory = self._wanted.get(key, (None, bytearray()))
            if giver != node:
                return
            del self._wanted[key]
            self._here[key] = memory
        self._on_arrival()

    def give_up(self, rank: int, range_: BlockRange) -> None:
        """It is wanted no more, whether it is here or still comes."""
        with self._lock:
            self._wanted.pop((rank, range_), None)
            self._here.pop((rank, range_), None)

    def has(self, rank: int, range_: BlockRange) -> bool:
        """Whether it is here."""
        with self._lock:
            return (rank, range_) in self._here

    def take(self, rank: int, range_: BlockRange) -> bytearray:
        """What has come. Raises KeyError."""
        with self._lock:
            return self._here.pop((rank, range_))


class IncomingSnapshot:
    """A snapshot on its way into a slot, in these `ranges`. `on_whole` is called once, when
    everything has arrived; `on_table` when the table has. Header, table and manifest wait beside
    the slot until all is proven. `lacking`: its blocks that are with its owner's neighbours; the
    slot has holes there."""

    def __init__(
        self,
        slot: Slot,
        rank: int,
        stamp: Stamp,
        payload_bytes: int,
        manifest_bytes: int,
        ranges: Iterable[BlockRange],
        on_whole: Callable[[], None],
        on_table: Callable[[], None] = lambda: None,
        lacking: frozenset[int] = frozenset(),
    ) -> None:
        self.slot, self.rank, self.stamp = slot, rank, stamp
        self._lacking = lacking
        self._on_whole, self._on_table = on_whole, on_table
        self._lock = threading.Lock()
        self._sizes = (payload_bytes, manifest_bytes)
        manifest_at = PAGE_BYTES + table_bytes(payload_bytes, slot.block_bytes)
        meta = memoryview(bytearray(manifest_at + manifest_bytes))
        self._memory = {
            Part.PAYLOAD: slot.payload[:payload_bytes],
            Part.META: meta,
            Part.HEADER: meta[:PAGE_BYTES],
            Part.TABLE: meta[PAGE_BYTES:manifest_at],
            Part.MANIFEST: meta[manifest_at:],
        }
        self._missing = set(ranges)
        # which ranges are being written this moment, and which node's blocks they are
        self._filling: set[tuple[int, BlockRange]] = set()
        self._sums: dict[int, int] = {}  # checksums of payload blocks, by their number
        self._expected: tuple[int, ...] = ()  # the same, as the table has them, once it is believed
        self._on_unproven: Callable[[int, str], None] = lambda node, why: None
        self._refused: set[int] = set()  # nodes

    def believe_table(self, on_unproven: Callable[[int, str], None]) -> None:
        """The table is here, and proven. From now on a block that comes and differs from it is
        still missing, and `on_unproven` hears who gave it, and how it differs."""
        self._expected, self._on_unproven = self.table(), on_unproven

    def refuse(self, node: int) -> None:
        """Take nothing of that node any more, but what is being written this moment."""
        with self._lock:
            self._refused.add(node)

    def put(
        self, range_: BlockRange, data: bytes | bytearray | memoryview, expected: int | None = None
    ) -> None:
        """Bytes that came another way. Nothing happens when that range is here or coming already.
        What is proven is what has been written, whatever becomes of its source: when it has another
        checksum than expected, the range is still missing."""
        part, offset, length = range_
        with self._lock:
            if range_ not in self._missing or any(range_ == each for _, each in self._filling):
                return
            self._filling.add((_BY_HAND, range_))
        found = copy_hashed(self._memory[part][offset : offset + length], data)
        with self._lock:
            self._filling.discard((_BY_HAND, range_))
        if expected in (None, found):
            self._note(range_, found)

    @property
    def payload(self) -> memoryview:
        """Where bytes that are computed here belong; `computed` says that they are there."""
        return self._memory[Part.PAYLOAD]

    def computed(self, range_: BlockRange, found: int) -> None:
        """Those bytes of `payload` have been computed, and that is their checksum."""
        self._note(range_, found)

    def place(self, node: int, span: Span) -> memoryview | None:
        """See `BlockTaker`."""
        wanted = range_of(span)
        with self._lock:
            self._filling.discard((node, wanted))  # it came before, and not whole
            is_wanted = wanted in self._missing and node not in self._refused
            if not is_wanted or (_BY_HAND, wanted) in self._filling:
                return None
            self._filling.add((node, wanted))
        return self._memory[span.part][span.offset : span.offset + span.length]

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        """See `BlockTaker`."""
        range_ = range_of(span)
        with self._lock:
            self._filling.discard((node, range_))
        if range_.part is Part.PAYLOAD and self._expected:
            block = range_.offset // self.slot.block_bytes
            if checksum != (want := self._expected[block]):
                self._on_unproven(node, self._differs(block, checksum, want))
                return
        self._note(range_, checksum)

    def _note(self, range_: BlockRange, found: int) -> None:
        with self._lock:
            if range_ not in self._missing:
                return
            self._missing.discard(range_)
            if range_.part is Part.PAYLOAD:
                self._sums[range_.offset // self.slot.block_bytes] = found
            whole = not self._missing
            table = range_.part in _WITH_TABLE and not any(
                part in _WITH_TABLE for part, _, _ in self._missing
            )
        if table:
            self._on_table()
        if whole:
            self._on_whole()

    def table(self) -> tuple[int, ...]:
        """As it arrived: what it says is believed only once `seal` has proven it."""
        return unpack_table(bytes(self._memory[Part.TABLE]))

    def work(self, is_on: bool) -> None:
        """Some thread of ours writes into the slot, or does so no more."""
        with self._lock:
            if is_on:
                self._filling.add((_OURSELVES, _ANY_RANGE))
            else:
                self._filling.discard((_OURSELVES, _ANY_RANGE))

    def link_is_gone(self, node: int) -> None:
        """That node writes nowhere any more."""
        with self._lock:
            self._filling = {each for each in self._filling if each[0] != node}

    def missing(self) -> list[BlockRange]:
        """What has not come, in order."""
        with self._lock:
            return sorted(self._missing)

    @property
    def in_use(self) -> bool:
        """Whether some thread may be writing into the slot this moment."""
        with self._lock:
            return bool(self._filling)

    def seal(self, job_hash: bytes) -> SlotHeader:
        """Prove it and make it a snapshot. Raises DamageError naming what differs; the slot holds
        nothing then."""
        header = parse_page(bytes(self._memory[Part.HEADER]), self.slot.path)
        who = (header.state, header.job_hash)
        found = (header.rank, header.stamp, header.payload_bytes, header.manifest_bytes)
        expected = (self.rank, self.stamp, *self._sizes)
        if who != (SlotState.SEALED, job_hash) or found != expected:
            raise DamageError(
                f"{self.slot.path}: expected a header of {expected}, found one of {found}"
            )
        if blocks_of(header.lacking) != self._lacking:
            raise DamageError(
                f"{self.slot.path}: expected a snapshot that lacks {len(self._lacking)} blocks, "
                f"found one that lacks {len(blocks_of(header.lacking))}, or others"
            )
        prove(header, self._memory[Part.TABLE], self._memory[Part.MANIFEST], str(self.slot.path))
        for block, want in enumerate(self.table()):
            if block not in self._lacking and (found_sum := self._sums[block]) != want:
                raise DamageError(self._differs(block, found_sum, want))
        for part in (Part.TABLE, Part.MANIFEST):
            self.slot.part(part, header)[:] = self._memory[part]
        self.slot.adopt(header)
        return header

    def _differs(self, block: int, found: int, want: int) -> str:
        return (
            f"{self.slot.path}: block {block} arrived with checksum {found:016x}, expected "
            f"{want:016x}"
        )
