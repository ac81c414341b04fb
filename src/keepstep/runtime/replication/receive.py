"""Receiving: snapshots on their way in: where each block goes, and whether the whole is what its
owner sealed.

Bytes go straight into a slot, or into scratch memory. Called on the links' threads but for `seal`,
which the loop calls when `told` said that everything is in. Never seals anything that is not
proven: the table under the header, every block under the table, the manifest under the header.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from keepstep.coding.checksum import BLOCK_BYTES, checksum, unpack_table
from keepstep.edge.shm.slot import Slot, parse_page
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span


def blocks(part: Part, nbytes: int) -> list[BlockRange]:
    """An object in pieces as they cross; of the payload these are the blocks of its table."""
    return [
        BlockRange(part, at, min(BLOCK_BYTES, nbytes - at)) for at in range(0, nbytes, BLOCK_BYTES)
    ]


def ranges_of(payload_bytes: int, manifest_bytes: int) -> list[BlockRange]:
    """Everything of a snapshot, the header last."""
    table_bytes = 8 * -(-payload_bytes // BLOCK_BYTES)
    return [
        *blocks(Part.PAYLOAD, payload_bytes),
        *blocks(Part.TABLE, table_bytes),
        *blocks(Part.MANIFEST, manifest_bytes),
        BlockRange(Part.HEADER, 0, PAGE_BYTES),
    ]


def range_of(span: Span) -> BlockRange:
    """Which bytes of its snapshot a span is."""
    return BlockRange(span.part, span.offset, span.length)


_OURSELVES = -1  # no node's number


class Scratch:
    """Ranges that are wanted, each in memory of its own until somebody takes it. `told` is called
    after each arrival."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._wanted: dict[tuple[int, BlockRange], bytearray] = {}
        self._here: dict[tuple[int, BlockRange], bytearray] = {}

    def want(self, rank: int, range_: BlockRange) -> None:
        with self._lock:
            self._wanted[(rank, range_)] = bytearray(range_.length)

    def place(self, node: int, span: Span) -> memoryview | None:
        with self._lock:
            found = self._wanted.get((span.rank, range_of(span)))
        return None if found is None else memoryview(found)

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        key = (span.rank, range_of(span))
        with self._lock:
            found = self._wanted.pop(key, None)
            if found is not None:
                self._here[key] = found
        if found is not None:
            self._told()

    def has(self, rank: int, range_: BlockRange) -> bool:
        with self._lock:
            return (rank, range_) in self._here

    def take(self, rank: int, range_: BlockRange) -> bytearray:
        with self._lock:
            return self._here.pop((rank, range_))


class Whole:
    """A snapshot on its way into a slot. `told` is called once, when everything has arrived;
    `on_table` when the table has."""

    def __init__(
        self,
        slot: Slot,
        rank: int,
        stamp: Stamp,
        payload_bytes: int,
        manifest_bytes: int,
        told: Callable[[], None],
        on_table: Callable[[], None] = lambda: None,
    ) -> None:
        self.slot, self.rank, self.stamp = slot, rank, stamp
        self._told, self._on_table = told, on_table
        self._lock = threading.Lock()
        self._header = bytearray(PAGE_BYTES)
        self._sizes = {
            Part.PAYLOAD: payload_bytes,
            Part.MANIFEST: manifest_bytes,
            Part.HEADER: PAGE_BYTES,
        }
        self._sizes[Part.TABLE] = 8 * -(-payload_bytes // BLOCK_BYTES)
        shape = SlotHeader(
            *(SlotState.WRITING, 0, bytes(16), bytes(16), rank, 0, 0, stamp),
            *(
                payload_bytes,
                manifest_bytes,
                BLOCK_BYTES,
                self._sizes[Part.TABLE] // 8,
                0,
                0,
                0,
                0.0,
            ),
        )
        parts = (Part.PAYLOAD, Part.TABLE, Part.MANIFEST)
        self._memory = {part: slot.part(part, shape) for part in parts} | {
            Part.HEADER: memoryview(self._header)
        }
        self._missing: set[BlockRange] = set(ranges_of(payload_bytes, manifest_bytes))
        self._filling: dict[int, BlockRange] = {}  # by node: its blocks come one after the other
        self._sums: dict[int, int] = {}

    def put(
        self, range_: BlockRange, data: bytes | bytearray | memoryview, expected: int | None = None
    ) -> None:
        """Bytes that came another way; not taken when they have another checksum than expected."""
        part, offset, length = range_
        self._memory[part][offset : offset + length] = data
        found = checksum(self._memory[part][offset : offset + length])
        if expected is None or found == expected:
            self._note(range_, found)

    @property
    def payload(self) -> memoryview:
        """Where bytes that are computed here belong; `put_in_place` says that they are there."""
        return self._memory[Part.PAYLOAD]

    def put_in_place(self, range_: BlockRange) -> None:
        part, offset, length = range_
        self._note(range_, checksum(self._memory[part][offset : offset + length]))

    def place(self, node: int, span: Span) -> memoryview | None:
        wanted = range_of(span)
        with self._lock:
            self._filling.pop(node, None)
            if wanted not in self._missing:
                return None
            self._filling[node] = wanted
        return self._memory[span.part][span.offset : span.offset + span.length]

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        with self._lock:
            self._filling.pop(node, None)
        self._note(range_of(span), checksum)

    def _note(self, range_: BlockRange, found: int) -> None:
        with self._lock:
            if range_ not in self._missing:
                return
            self._missing.discard(range_)
            if range_.part is Part.PAYLOAD:
                self._sums[range_.offset // BLOCK_BYTES] = found
            whole = not self._missing
            table = range_.part is Part.TABLE and not any(
                part is Part.TABLE for part, _, _ in self._missing
            )
        if table:
            self._on_table()
        if whole:
            self._told()

    def table(self) -> tuple[int, ...]:
        """As it arrived: what it says is believed only once `seal` has proven it."""
        return unpack_table(bytes(self._memory[Part.TABLE]))

    def work(self, is_on: bool) -> None:
        """Some thread of ours writes into the slot, or does so no more."""
        with self._lock:
            if is_on:
                self._filling[_OURSELVES] = BlockRange(Part.PAYLOAD, 0, 0)
            else:
                self._filling.pop(_OURSELVES, None)

    def gone(self, node: int) -> None:
        """The link to that node is dead: it writes nowhere any more."""
        with self._lock:
            self._filling.pop(node, None)

    def missing(self) -> list[BlockRange]:
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
        header = parse_page(bytes(self._header), self.slot.path)
        said = (
            header.state,
            header.job_hash,
            header.rank,
            header.stamp,
            header.payload_bytes,
            header.manifest_bytes,
        )
        sizes = (self._sizes[Part.PAYLOAD], self._sizes[Part.MANIFEST])
        expected = (SlotState.SEALED, job_hash, self.rank, self.stamp, *sizes)
        if said != expected:
            raise DamageError(
                f"{self.slot.path}: expected a header of {expected[2:]}, found one of {said[2:]}"
            )
        table = bytes(self._memory[Part.TABLE])
        if checksum(table) != header.table_checksum:
            raise DamageError(
                f"{self.slot.path}: the checksum table that arrived is not the one the header names"
            )
        if checksum(self._memory[Part.MANIFEST]) != header.manifest_checksum:
            raise DamageError(
                f"{self.slot.path}: the manifest that arrived is not the one the header names"
            )
        for block, want in enumerate(unpack_table(table)):
            if self._sums[block] != want:
                raise DamageError(
                    f"{self.slot.path}: block {block} arrived with checksum "
                    f"{self._sums[block]:016x}, expected {want:016x}"
                )
        self.slot.adopt(header)
        return header
