"""Encode: one parity of a stripe group on its way into being, from the pieces that its other
members send.

Each piece is added to the parity as it arrives (XOR, or Reed-Solomon by ISA-L), so only one block a
link is ever kept beside it. What it is added to is proven in the same pass and hashed anew
(`parity_sums.py`): a bit that flips in a parity under way is found. After the parity lie the
headers, tables and manifests of the group's other members: who lost everything is rebuilt from
here, and proven by its own table. Called on the links' threads but for `seal`.

Invariants: every piece is added exactly once, to zeros or to what the one before it has left;
parity and data carry one stamp (otherwise a kill between writing both would leave a parity that
decodes to garbage: the write hole).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepstep.coding.checksum import checksum
from keepstep.coding.reed_solomon import solve
from keepstep.core.redundancy.stripes import Stripes, contribution, stripes_of_snapshots
from keepstep.edge.shm.slot import Slot, table_bytes
from keepstep.edge.shm.slot_header import MOST_BLOCKS, parse_page
from keepstep.errors import DamageError
from keepstep.model.decoding import a_count, an_object, counts, decoding, from_json
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.shares import blocks_of
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.parity_sums import ParitySums
from keepstep.runtime.replication.receive import blocks, range_of

LAYOUT_HASH = "00" * 16  # a parity has no tensors


@dataclass(frozen=True, slots=True)
class SnapshotSizes:
    """Of a snapshot, as a member of the stripe group announced it. `block_bytes`:
    `Memory.block_bytes`; `lacking_blocks`: so many of its payload are with others on its node, and
    in no parity of it."""

    payload_bytes: int
    manifest_bytes: int
    block_bytes: int
    lacking_blocks: int = 0

    @property
    def kept_bytes(self) -> int:
        """Of its payload, what the parity is computed over."""
        return self.payload_bytes - self.lacking_blocks * self.block_bytes

    @property
    def table_bytes(self) -> int:
        """Of its checksum table."""
        return table_bytes(self.payload_bytes, self.block_bytes)


@dataclass(frozen=True, slots=True)
class ParityContents:
    """What a parity's slot holds, as its manifest tells: the stripes, and where each other member's
    header, table and manifest lie."""

    stripes: Stripes
    metas: Mapping[int, tuple[int, SnapshotSizes]]

    @property
    def nbytes(self) -> int:
        """Of the slot's payload."""
        return self.stripes.parity_bytes + sum(
            PAGE_BYTES + s.table_bytes + s.manifest_bytes for _, s in self.metas.values()
        )

    @property
    def beyond(self) -> frozenset[int]:
        """The blocks of its slot that no byte of it is in, where members share what they have: it
        was larger before they did. Elsewhere none: sizes grow and shrink a little."""
        sizes = [known for _, known in self.metas.values()]
        if not any(known.lacking_blocks for known in sizes):
            return frozenset()
        return frozenset(range(-(-self.nbytes // sizes[0].block_bytes), MOST_BLOCKS))

    def where(self, rank: int, part: Part) -> tuple[int, int]:
        """(offset in the slot's payload, bytes) of a member's header, table or manifest. Raises
        KeyError."""
        at, sizes = self.metas[rank]
        nbytes = {
            Part.HEADER: PAGE_BYTES,
            Part.TABLE: sizes.table_bytes,
            Part.MANIFEST: sizes.manifest_bytes,
        }[part]
        before = {
            Part.HEADER: 0,
            Part.TABLE: PAGE_BYTES,
            Part.MANIFEST: PAGE_BYTES + sizes.table_bytes,
        }[part]
        return at + before, nbytes

    def to_text(self) -> bytes:
        """The manifest of the parity's slot."""
        metas = {
            str(r): [at, s.payload_bytes, s.manifest_bytes, s.lacking_blocks]
            for r, (at, s) in self.metas.items()
        }
        said = {
            "row": self.stripes.members,
            "tolerates": self.stripes.tolerates,
            "data_bytes": self.stripes.data_bytes,
            "metas": metas,
        }
        return json.dumps(said, separators=(",", ":")).encode()


def sizes_of_offer(offer: CopyOffer, block_bytes: int) -> SnapshotSizes:
    """Of the snapshot that another node offers."""
    lacks = len(offer.lacks)
    return SnapshotSizes(offer.payload_bytes, offer.manifest_bytes, block_bytes, lacks)


def sizes_of_header(header: SlotHeader, block_bytes: int) -> SnapshotSizes:
    """Of the snapshot in a slot."""
    lacks = len(blocks_of(header.lacking))
    return SnapshotSizes(header.payload_bytes, header.manifest_bytes, block_bytes, lacks)


def contents_of(
    sizes: Mapping[int, SnapshotSizes], group: tuple[int, ...], tolerates: int, mine: int
) -> ParityContents:
    """For the parity that the member `mine` keeps."""
    nbytes = [sizes[rank].kept_bytes for rank in group]
    stripes = stripes_of_snapshots(group, tolerates, nbytes, sizes[mine].block_bytes)
    metas, at = {}, stripes.parity_bytes
    for rank in (r for r in group if r != mine):
        metas[rank] = (at, sizes[rank])
        at += PAGE_BYTES + sizes[rank].table_bytes + sizes[rank].manifest_bytes
    return ParityContents(stripes, metas)


def contents_from(manifest: bytes, block_bytes: int) -> ParityContents:
    """The inverse of `ParityContents.to_text`, from a proven manifest of a slot with blocks of
    `block_bytes`. Raises DamageError when it says nothing that can be."""
    with decoding("contents of a parity"):
        said = an_object(from_json(manifest))
        group, data_bytes = counts(said["row"]), counts(said["data_bytes"])
        tolerates = a_count(said["tolerates"], least=1)
        if not tolerates < len(group) == len(data_bytes):
            raise ValueError(f"{len(group)} members that tolerate {tolerates}")
        stripes = stripes_of_snapshots(group, tolerates, data_bytes, block_bytes)
        metas = {}
        for rank, (at, payload, text, *lacks) in an_object(said["metas"]).items():
            lacking = a_count(lacks[0]) if lacks else 0  # a release before does not tell it
            sizes = SnapshotSizes(a_count(payload), a_count(text), block_bytes, lacking)
            metas[int(rank)] = (a_count(at), sizes)
        return ParityContents(stripes, metas)


def ranges_for(stripes: Stripes, sizes: SnapshotSizes, owner: int, keeper: int) -> list[BlockRange]:
    """What `owner` sends to `keeper` for its parity."""
    pieces = contribution(stripes, owner, keeper)
    data = [
        BlockRange(part, p.start + at, length)
        for p in pieces
        for part, at, length in blocks(Part.PAYLOAD, p.nbytes, sizes.block_bytes)
    ]
    metas = [
        *blocks(Part.TABLE, sizes.table_bytes, sizes.block_bytes),
        *blocks(Part.MANIFEST, sizes.manifest_bytes, sizes.block_bytes),
        BlockRange(Part.HEADER, 0, PAGE_BYTES),
    ]
    return [*data, *metas]


class Encoding:
    """The parity of `mine` at one stamp, whatever lies in its slot. `on_whole` is called once, when
    everything has been added."""

    def __init__(
        self,
        slot: Slot,
        contents: ParityContents,
        mine: int,
        stamp: Stamp,
        on_whole: Callable[[], None],
    ) -> None:
        self.slot, self.contents, self.mine, self.stamp = slot, contents, mine, stamp
        self._on_whole = on_whole
        self._lock = threading.Lock()
        self._scratch: dict[tuple[int, Span], bytearray] = {}  # by node, of what comes this moment
        self._spare: list[bytearray] = []  # of which nothing is needed any more
        self._stopped = False
        stripes = contents.stripes
        self._missing = {
            (rank, range_)
            for rank, (_, sizes) in contents.metas.items()
            for range_ in ranges_for(stripes, sizes, rank, mine)
        }
        self._payload = slot.payload
        self._parity = ParitySums(
            self._payload[: stripes.parity_bytes],
            stripes.block_bytes,
            contents.metas[self.ranks[0]][1].block_bytes,
        )

    @property
    def ranks(self) -> list[int]:
        """Whose pieces are awaited."""
        return list(self.contents.metas)

    def place(self, node: int, span: Span) -> memoryview | None:
        """See `BlockTaker`."""
        with self._lock:
            if (span.rank, range_of(span)) not in self._missing:
                return None
            scratch = self._scratch.pop((node, span), None) or self._room(span.length)
            self._scratch[node, span] = scratch
        return memoryview(scratch)[: span.length]

    def _room(self, nbytes: int) -> bytearray:
        """Of as many bytes at least. With the lock held."""
        spare = self._spare.pop() if self._spare else b""
        return spare if isinstance(spare, bytearray) and len(spare) >= nbytes else bytearray(nbytes)

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        """See `BlockTaker`."""
        wanted = (span.rank, range_of(span))
        with self._lock:  # several streams may add to the same bytes
            scratch = self._scratch.pop((node, span), None)
            if scratch is None or self._stopped or wanted not in self._missing:
                return
            self._add(span, memoryview(scratch)[: span.length])
            self._spare.append(scratch)
            self._missing.discard(wanted)
            whole = not self._missing
        if whole:
            self._on_whole()

    def _add(self, span: Span, data: memoryview) -> None:
        if span.part is not Part.PAYLOAD:
            at, _ = self.contents.where(span.rank, span.part)
            self._payload[at + span.offset : at + span.offset + span.length] = data
            return
        stripes = self.contents.stripes
        for piece in contribution(stripes, span.rank, self.mine):
            if piece.start <= span.offset < piece.stop:
                break
        else:
            raise AssertionError(f"{span} is in no piece")
        codeword = next(
            c
            for c in range(len(stripes.members))
            if stripes.piece(c, stripes.members.index(span.rank)) == piece
        )
        row = (stripes.members.index(self.mine) - codeword) % len(stripes.members)
        rows = solve(stripes.k, stripes.tolerates, tuple(range(stripes.k)), (stripes.k + row,))
        self._parity.add(row, span.offset - piece.start, rows, piece.position, data)

    def stop(self) -> None:
        """Nothing is added any more when this returns."""
        with self._lock:
            self._stopped = True

    def seal(self, wall_ns: int) -> SlotHeader:
        """The parity is whole: make it one that is found. Raises DamageError when its header was
        damaged meanwhile, or given up, when a bit has flipped in it, and when what was sent beside
        the pieces is no member's proven header, table and manifest."""
        for rank in self.contents.metas:
            self._prove_meta(rank)
        known = self._parity.finish(self.slot.path)
        header = self.slot.write_table(self.contents.nbytes, self.contents.to_text(), known)
        if header.state is not SlotState.WRITING:
            raise DamageError(
                f"{self.slot.path}: expected a parity that is being written, found a slot "
                "that holds nothing"
            )
        self.slot.seal(header, LAYOUT_HASH, math.nan, wall_ns)
        return header

    def _prove_meta(self, rank: int) -> None:
        """A bit may have flipped at its owner between a look and the sending: the link's checksum
        is of what was sent."""
        page, table, manifest = (
            self._meta(rank, part) for part in (Part.HEADER, Part.TABLE, Part.MANIFEST)
        )
        header = parse_page(bytes(page), self.slot.path)
        sizes = self.contents.metas[rank][1]
        expected = (
            rank,
            self.stamp,
            sizes.payload_bytes,
            sizes.manifest_bytes,
            checksum(table),
            checksum(manifest),
        )
        found = (
            header.rank,
            header.stamp,
            header.payload_bytes,
            header.manifest_bytes,
            header.table_checksum,
            header.manifest_checksum,
        )
        if found != expected:
            raise DamageError(
                f"header, table and manifest of rank {rank} at {self.stamp} do not belong together"
            )

    def _meta(self, rank: int, part: Part) -> memoryview:
        at, nbytes = self.contents.where(rank, part)
        return self._payload[at : at + nbytes]
