"""Arena: slots, each one snapshot in a file that outlives its writer and describes itself.

    page 0      header: state, identity, step, sizes, checksums; its last 8 bytes checksum the page
    payload     tensors and the pickled tree, as the layout says (capacity rounded to pages)
    table       one checksum a payload block, of those that lie with other ranks, too
    manifest    the layout as JSON

Order of writing: header WRITING, payload, table, manifest, header SEALED. A kill anywhere leaves a
slot that says WRITING or fails its header checksum, never one that says SEALED and is not.

Blocks that another rank keeps (`SlotHeader.lacking`) are holes in the file: they read as zeros, and
`whole.py` puts the other's in their place.

One writer (the rank's session), any number of readers in other processes. Readers map the file on
their own, compare the header before and after (`sequence`), and hold `flock(LOCK_SH)` when they
need it to stand still.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepstep.coding.checksum import (
    BLOCK_BYTES,
    NOTHING_KNOWN,
    block_checksums,
    checksum,
    first_mismatch,
    pack_table,
    unpack_table,
)
from keepstep.edge.shm.slot_header import (
    CHECK_AT,
    EMPTY,
    MAGIC,
    capacities_of,
    claim_of,
    is_unchanged,
    page_of,
    parse_page,
    sequence_of,
    would_be_sound,
)
from keepstep.errors import DamageError, IdentityError
from keepstep.model.kept import KeptBlocks
from keepstep.model.layout import Layout, layout_from_text
from keepstep.model.shares import Share, bits_of, blocks_of, runs_of
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import PAGE_BYTES, round_up
from keepstep.model.wire import Part
from keepstep.ports import Memory, Region

_RANK_NAME = re.compile(r"rank-(\d{5,9})", re.ASCII)
_SLOT_NUMBERS = {f"slot-{index}": index for index in range(10)}


# asked for at every look at a page or slot, and making a path costs as much as reading a page
@lru_cache(maxsize=1 << 14)
def rank_dir(job_dir: Path, rank: int) -> Path:
    return job_dir / f"rank-{rank:05d}"


@lru_cache(maxsize=1 << 14)
def slot_path(job_dir: Path, rank: int, index: int) -> Path:
    return rank_dir(job_dir, rank) / f"slot-{index}"


def slot_paths(memory: Memory, job_dir: Path, rank: int) -> list[Path]:
    """The rank's slot files in order of their number."""
    names = memory.names(rank_dir(job_dir, rank))
    return [
        slot_path(job_dir, rank, index)
        for name in names
        if (index := _SLOT_NUMBERS.get(name)) is not None
    ]


def ranks_in(memory: Memory, root: Path) -> list[int]:
    """Whose directories are below a job directory, or a part of it; other names are not ours."""
    return [int(found[1]) for name in memory.names(root) if (found := _RANK_NAME.fullmatch(name))]


def readable_headers(memory: Memory, root: Path, rank: int) -> Iterator[SlotHeader]:
    """Of that rank's slots, as far as they can be read. Nothing behind the header is proven."""
    for path in slot_paths(memory, root, rank):
        try:
            with contextlib.closing(Slot(memory, path)) as slot:
                header = slot.header()
        except (DamageError, OSError):
            continue
        yield header


def slot_bytes(
    payload_capacity: int, manifest_capacity: int, block_bytes: int = BLOCK_BYTES
) -> int:
    """Size of a slot file."""
    return _offsets(payload_capacity, block_bytes)[1] + round_up(manifest_capacity, PAGE_BYTES)


def table_bytes(payload_bytes: int, block_bytes: int) -> int:
    """Size of a checksum table."""
    return 8 * -(-payload_bytes // block_bytes)


def _offsets(payload_capacity: int, block_bytes: int) -> tuple[int, int]:
    """(table, manifest): where they begin for a payload capacity."""
    table = PAGE_BYTES + round_up(payload_capacity, PAGE_BYTES)
    return table, table + round_up(table_bytes(payload_capacity, block_bytes), PAGE_BYTES)


class Slot:
    """One mapped slot file."""

    def __init__(
        self,
        memory: Memory,
        path: Path,
        joined: Region | None = None,
        table: Sequence[int] | None = None,
    ) -> None:
        """Map an existing slot. `joined`: a map of it in which nothing is lacking; `table`: the
        checksums of its blocks. Raises DamageError when the file is no slot, OSError when there is
        none."""
        self._memory = memory
        self.block_bytes = memory.block_bytes
        self._is_joined = joined is not None
        self._joined_table = table
        try:
            self._region: Region = joined or memory.open(path)
        except ValueError as error:
            raise DamageError(f"{path}: expected a slot, found none: {error}") from error
        try:
            self.capacity, self._table_at, self._manifest_at = self._measure()
        except DamageError:
            self._region.close()
            raise
        self.path = path
        self.is_there = self._region.is_there  # whether `path` still leads to this file
        self.manifest_capacity = len(self._region.view) - self._manifest_at
        # of a page that was parsed or written here: its checksum as it lies there, what it says
        self._known: tuple[bytes, SlotHeader] | None = None
        self.payload_address = self._region.address + PAGE_BYTES
        self._before_close: list[Callable[[], None]] = []

    @classmethod
    def create(
        cls, memory: Memory, path: Path, payload_capacity: int, manifest_capacity: int
    ) -> Slot:
        """A new, empty, pre-faulted slot; replaces `path` only once it is whole. Raises
        MemoryBudgetError."""
        capacity = round_up(max(payload_capacity, 1), PAGE_BYTES)
        fresh = path.with_name(path.name + ".new")
        region = memory.create(fresh, slot_bytes(capacity, manifest_capacity, memory.block_bytes))
        empty = EMPTY._replace(block_bytes=memory.block_bytes)
        region.view[:PAGE_BYTES] = page_of(empty, capacity)
        region.close()
        memory.rename(fresh, path)
        slot = cls(memory, path)
        slot.prefault()  # this map: what another one has touched is slow here all the same
        return slot

    def prefault(self) -> None:
        """Map every page of an adopted slot now, so that the first copy into it is not the slow
        one. What it lacks stays a hole."""
        end = len(self._region.view)
        at = 0
        for first, count in runs_of(self.lacking()):
            hole = self._place_of(first)[0]
            self._region.prefault(at, hole - at)
            at = min(end, hole + count * self.block_bytes)
        self._region.prefault(at, end - at)

    def _place_of(self, block: int) -> tuple[int, int]:
        """Where in the file a block of the payload begins and, at the latest, ends."""
        at = PAGE_BYTES + block * self.block_bytes
        return at, min(at + self.block_bytes, PAGE_BYTES + self.capacity)

    def lacking(self) -> frozenset[int]:
        """The blocks that are not in this file. Where the header does not prove, and the file has
        holes, all may be."""
        return frozenset() if self._is_joined else blocks_of(self._holes())

    def fits(
        self, payload_bytes: int, manifest_bytes: int, lacking: frozenset[int] = frozenset()
    ) -> bool:
        """Whether such a snapshot has room, and there is no hole but in these blocks: what was
        given up is not taken back, where there may be no memory any more."""
        has_room = self.capacity >= payload_bytes and self.manifest_capacity >= manifest_bytes
        return has_room and self.lacking() <= lacking

    def _holes(self) -> bytes:
        """The same, as a bitmap."""
        try:
            return self.header().lacking
        except DamageError:
            all_blocks = range(-(-self.capacity // self.block_bytes))
            return bits_of(all_blocks) if self._region.has_holes() else b""

    def shed(self, blocks: frozenset[int]) -> None:
        """Give up the memory of these blocks of the payload, in which nothing is kept from here on.
        The slot is being written, and lacks none but some of these."""
        header, lacks = self.header(), self.lacking()
        assert header.state is SlotState.WRITING and lacks <= blocks, f"{lacks - blocks} are holes"
        if lacks == blocks:
            return
        self._write(header._replace(lacking=bits_of(blocks)))  # first: a hole must be known
        for first, count in runs_of(blocks - lacks):
            at = self._place_of(first)[0]
            self._region.punch(at, self._place_of(first + count - 1)[1] - at)

    def _measure(self) -> tuple[int, int, int]:
        """The payload's capacity, where the table begins, and where the manifest does."""
        # The capacity is kept twice, so that one flipped bit cannot send a reader to wrong offsets.
        # The page's checksum says which one is right: a slot with a flipped bit there can be
        # opened, and mended like any other.
        view = self._region.view
        if len(view) < PAGE_BYTES:
            raise DamageError(f"{self._region.path}: expected a slot, found {len(view)} bytes")
        capacity, again = capacities_of(view)
        if bytes(view[:8]) != MAGIC or capacity != again:
            page = bytes(view[:PAGE_BYTES])
            capacity = again = next((c for c in (capacity, again) if would_be_sound(page, c)), -1)
        if capacity < 0:
            raise DamageError(
                f"{self._region.path}: expected a slot ({MAGIC!r}), found "
                f"{bytes(view[:8])!r} and no page that its checksum fits"
            )
        table, manifest = (
            _offsets(capacity, self.block_bytes) if capacity <= len(view) else (0, len(view) + 1)
        )
        if manifest > len(view):
            raise DamageError(
                f"{self._region.path}: header damaged: capacity {capacity} and its "
                f"repetition {again} in a file of {len(view)}"
            )
        return capacity, table, manifest

    @property
    def payload(self) -> memoryview:
        """The whole payload area; only `payload_bytes` of it are in use."""
        return self._region.view[PAGE_BYTES : PAGE_BYTES + self.capacity]

    def gather(self, offset: int, ranges: int, count: int) -> int:
        """`Region.gather` into the payload."""
        return self._region.gather(PAGE_BYTES + offset, ranges, count)

    def claims(self, stamp: Stamp) -> bool:
        """Whether the page says that it is a snapshot of `stamp`. A glance, for who then proves it:
        a damaged page may claim anything."""
        return claim_of(self._region.view) == (SlotState.SEALED, stamp.step, stamp.epoch)

    def header(self) -> SlotHeader:
        """Raises DamageError when the page fails its checksum."""
        view, known = self._region.view, self._known
        if known is not None and is_unchanged(view, known[0]):
            return known[1]
        page = bytes(view[:PAGE_BYTES])
        header = parse_page(page, self.path)
        self._known = page[CHECK_AT:], header
        return header

    def _write(self, header: SlotHeader) -> None:
        page = page_of(header, self.capacity)
        self._known = page[CHECK_AT:], header
        self._region.put(0, page)

    def _sequence(self) -> int:
        known = self._known
        if known is not None and sequence_of(self._region.view) == known[1].sequence:
            return known[1].sequence  # as this map has read or written it: the page need not prove
        try:
            return self.header().sequence
        except DamageError:
            return 0

    def clear_gaps(self, layout: Layout) -> None:
        """Zeros between the tensors of a layout, where the slot lacks nothing."""
        lacks, size = self.lacking(), self.block_bytes
        at = 0
        for segment in (*layout.segments, None):
            begin = layout.objects_offset if segment is None else segment.offset
            if begin > at and at // size not in lacks:  # no gap is as long as to end in another one
                self.payload[at:begin] = bytes(begin - at)
            at = begin if segment is None else segment.end

    def _blank(self, **who: Any) -> SlotHeader:
        """Of a slot that holds nothing any more. Its holes stay."""
        lacking = self._holes()
        return EMPTY._replace(
            sequence=self._sequence() + 1, block_bytes=self.block_bytes, lacking=lacking, **who
        )

    def begin(
        self, job_hash: bytes, rank: int, world_size: int, incarnation: int, stamp: Stamp
    ) -> None:
        """From here until `seal` the slot holds nothing."""
        self._write(
            self._blank(
                state=SlotState.WRITING,
                job_hash=job_hash,
                rank=rank,
                world_size=world_size,
                incarnation=incarnation,
                stamp=stamp,
            )
        )

    def joined(self, keepers: Sequence[Slot], table: Sequence[int] | None = None) -> Slot:
        """This slot with each block of the payload taken from one of these, to read from; the last
        one, and all behind the payload, are its own. `table`: by which they prove; None: by its
        own. Close it before them."""
        stretches: list[tuple[Region, int, int]] = [(self._region, 0, PAGE_BYTES)]
        for block, keeper in enumerate(keepers):
            at, end = self._place_of(block)
            last = stretches[-1]
            if last[0] is keeper._region and last[1] + last[2] == at:
                stretches[-1] = (last[0], last[1], last[2] + end - at)
            else:
                stretches.append((keeper._region, at, end - at))
        end = sum(nbytes for _, _, nbytes in stretches)
        stretches.append((self._region, end, len(self._region.view) - end))
        return Slot(self._memory, self.path, self._memory.join(stretches), table)

    def kept(self, of: KeptBlocks, at: int, nbytes: int) -> memoryview:
        """These bytes of what is kept of the payload: a copy of them where they are not in one
        place."""
        runs = [self.payload[begin : begin + count] for begin, count in of.stretches(at, nbytes)]
        return runs[0] if len(runs) == 1 else memoryview(b"".join(runs))

    def part(self, part: Part, header: SlotHeader) -> memoryview:
        """The bytes of an object as `header` gives its size; of the header, the page. META lies in
        three places: of that it is a copy."""
        view = self._region.view
        table_end = self._table_at + 8 * header.block_count
        manifest_end = self._manifest_at + header.manifest_bytes
        match part:
            case Part.PAYLOAD:
                return view[PAGE_BYTES : PAGE_BYTES + header.payload_bytes]
            case Part.META:
                table = view[self._table_at : table_end]
                manifest = view[self._manifest_at : manifest_end]
                return memoryview(b"".join((view[:PAGE_BYTES], table, manifest)))
            case Part.TABLE:
                return view[self._table_at : table_end]
            case Part.MANIFEST:
                return view[self._manifest_at : manifest_end]
            case Part.HEADER:
                return view[:PAGE_BYTES]
            case _:
                raise AssertionError(f"a slot has no {part.name}")

    def write_table(
        self,
        payload_bytes: int,
        manifest: bytes,
        known: Mapping[int, int] = NOTHING_KNOWN,
        is_digested: bool = False,
    ) -> SlotHeader:
        """Hash the payload, write table and manifest, return the header that `seal` will write.
        `known`: checksums of blocks that were hashed as they were written, by their number;
        `is_digested`: digests of some, see `SlotHeader`."""
        assert payload_bytes <= self.capacity and len(manifest) <= self.manifest_capacity
        sums = block_checksums(self.payload[:payload_bytes], self.block_bytes, known)
        table = pack_table(sums)
        self._region.view[self._table_at : self._table_at + len(table)] = table
        self._region.view[self._manifest_at : self._manifest_at + len(manifest)] = manifest
        return self.header()._replace(
            payload_bytes=payload_bytes,
            manifest_bytes=len(manifest),
            block_count=len(sums),
            table_checksum=checksum(table),
            manifest_checksum=checksum(manifest),
            is_digested=is_digested,
        )

    def seal(
        self,
        header: SlotHeader,
        layout_hash: str,
        loss: float,
        wall_ns: int,
        share: Share | None = None,
        replicas: tuple[int, int] = (0, 0),
    ) -> None:
        """The last write: the slot is a snapshot from here on. `replicas`: group and digest, as in
        `SlotHeader`."""
        assert header.state is SlotState.WRITING
        self._write(
            header._replace(
                state=SlotState.SEALED,
                sequence=header.sequence + 1,
                layout_hash=bytes.fromhex(layout_hash),
                sealed_wall_ns=wall_ns,
                loss=loss,
                share=share,
                replica_group=replicas[0],
                digest=replicas[1],
            )
        )

    def adopt(self, header: SlotHeader) -> None:
        """The last write of a copy: everything else of the snapshot that `header` (another slot's)
        describes is here and proven."""
        assert header.state is SlotState.SEALED and header.payload_bytes <= self.capacity
        self._write(header._replace(sequence=self._sequence() + 1))

    def void(self) -> None:
        """Forget what the slot holds."""
        self._write(self._blank())

    def manifest(self, header: SlotHeader) -> Layout:
        """Raises DamageError when the manifest fails its checksum."""
        return layout_from_text(self.manifest_text(header), f"{self.path}: layout")

    def manifest_text(self, header: SlotHeader) -> bytes:
        """As it was written. Raises DamageError when it fails its checksum."""
        at = self._manifest_at
        raw = bytes(self._region.view[at : at + header.manifest_bytes])
        if (
            header.manifest_bytes > self.manifest_capacity
            or checksum(raw) != header.manifest_checksum
        ):
            raise DamageError(
                f"{self.path}: manifest damaged: checksum expected "
                f"{header.manifest_checksum:016x}, found {checksum(raw):016x}"
            )
        return raw

    def table(self, header: SlotHeader) -> Sequence[int]:
        """Raises DamageError when the checksum table fails its own checksum."""
        at = self._table_at
        raw = self._region.view[at : at + 8 * header.block_count]
        if checksum(raw) != header.table_checksum:
            raise DamageError(
                f"{self.path}: checksum table damaged: expected "
                f"{header.table_checksum:016x}, found {checksum(raw):016x}"
            )
        return unpack_table(raw) if self._joined_table is None else tuple(self._joined_table)

    def verify(self, threads: int = 1) -> tuple[SlotHeader, Layout]:
        """`verify_bytes`, and the layout."""
        header, manifest = self.verify_bytes(threads)
        return header, layout_from_text(manifest, f"{self.path}: layout")

    def verify_frame(self) -> SlotHeader:
        """Prove a sealed slot but for its payload: header, manifest and table. Raises as
        `verify_bytes` does."""
        header = self._sealed_header()
        with self._read_whole(header):
            self.manifest_text(header)
            self.table(header)
        return header

    def verify_bytes(self, threads: int = 1) -> tuple[SlotHeader, bytes]:
        """Prove a sealed slot: header, manifest, table, every block that it does not lack. Raises
        DamageError naming what differs. Returns header and manifest.

        Raises LookupError when the slot holds no snapshot, or was overwritten while being read.
        """
        header = self._sealed_header()
        with self._read_whole(header):
            manifest = self.manifest_text(header)
            payload = self.payload[: header.payload_bytes]
            wrong = first_mismatch(
                payload, self.table(header), header.block_bytes, threads, self.lacking()
            )
            if wrong:
                block, want, found = wrong
                at = block * header.block_bytes
                raise DamageError(
                    f"{self.path}: {header.stamp} of rank {header.rank} damaged: block "
                    f"{block} (payload bytes {at} to "
                    f"{min(at + header.block_bytes, header.payload_bytes)}) has checksum "
                    f"{found:016x}, expected {want:016x}"
                )
        return header, manifest

    def _sealed_header(self) -> SlotHeader:
        header = self.header()
        if header.state is not SlotState.SEALED:
            raise LookupError(f"{self.path} holds no sealed snapshot ({header.state.name})")
        return header

    @contextlib.contextmanager
    def _read_whole(self, header: SlotHeader) -> Iterator[None]:
        """What does not prove because somebody writes it is no damage."""
        try:
            yield
        except DamageError:
            if self._sequence() not in (0, header.sequence):
                raise LookupError(f"{self.path} was overwritten while it was read") from None
            raise

    def lock(self, exclusive: bool) -> bool:
        """Try to lock the slot's file for this mapping of it; False when others hold it."""
        return self._region.lock(exclusive)

    def unlock(self) -> None:
        self._region.unlock()

    def before_close(self, then: Callable[[], None]) -> None:
        """`then` is called once, by `close`, while the map is still there."""
        self._before_close.append(then)

    def close(self) -> None:
        while self._before_close:
            self._before_close.pop()()
        self._region.close()


def check_identity(header: SlotHeader, path: Path, job: str, job_hash: bytes, rank: int) -> None:
    """Raises IdentityError when a slot belongs to another job or rank."""
    if header.job_hash != job_hash:
        raise IdentityError(
            f"{path}: expected a snapshot of job {job!r} ({job_hash.hex()[:8]}), found one "
            f"of another job ({header.job_hash.hex()[:8]})"
        )
    if header.rank != rank:
        raise IdentityError(
            f"{path}: expected a snapshot of rank {rank}, found one of rank {header.rank}"
        )
