"""Serve: sends what other nodes ask for to restore: from own slots, copies, parities, and the small
parts kept beside parities.

Comes in: requests for ranges of snapshots. Goes out: blocks, or why they cannot be sent.
Nothing is verified here beforehand: every block goes out with the checksum its table names, so a
damaged one cannot arrive as a good one; the asker hears of it and asks elsewhere. A header crosses
as it was when it was asked for: a copy may be given up before its link comes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keepstep.coding.checksum import checksum
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.kept import kept_of
from keepstep.model.messages.peers import CopyUnavailable
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.peer_inbox import BlockTaker
from keepstep.runtime.slot_locks import Pin

META = (Part.HEADER, Part.TABLE, Part.MANIFEST)


@dataclass(eq=False)
class ServingPhase:
    """While slots stand still for those who restore."""

    is_over: bool = False


@dataclass(eq=False)
class ServedRequest:
    """What one asker wants of one snapshot. Once its phase is over the asker hears nothing of it:
    one of today would take that for an answer."""

    node: int
    rank: int
    stamp: Stamp
    waiting: deque[BlockRange]
    phase: ServingPhase


class SnapshotServer:
    """Of one mesh."""

    def __init__(
        self,
        links: MeshLinks,
        held: HeldSnapshots,
        on_damaged: Callable[[], None],
    ) -> None:
        """`on_damaged` is called when something from here arrives damaged: it may have been so
        before it left, and would be offered again and again."""
        self._links, self._held = links, held
        self._on_damaged = on_damaged
        self._phase = ServingPhase()
        self._requests: list[ServedRequest] = []
        self._pins: dict[tuple[int, Stamp], Pin] = {}  # of what is asked for this moment

    def release(self) -> None:
        """Everybody has what it needs, or another mesh begins: slots may be overwritten again."""
        self._phase.is_over = True
        self._phase = ServingPhase()
        self._requests.clear()
        self._unpin_unasked()

    def _unpin_unasked(self) -> None:
        """Snapshots are asked for while ranks train, too: they need their slots. What is on its way
        stands still until it is there."""
        asked = {(request.rank, request.stamp) for request in self._requests}
        for key in [key for key in self._pins if key not in asked]:
            self._pins.pop(key).let_go()

    def asked(self, node: int, rank: int, stamp: Stamp, ranges: tuple[BlockRange, ...]) -> None:
        """A node wants these parts of a snapshot."""
        request = ServedRequest(node, rank, stamp, deque(ranges), self._phase)
        self._requests.append(request)
        self._pump(request)

    def writable(self, node: int) -> None:
        """The link to that node takes blocks again."""
        for request in [r for r in self._requests if r.node == node]:
            self._pump(request)

    def link_is_dead(self, node: int) -> None:
        """What that node still waited for it asks anew over another link, or needs no more."""
        self._requests = [request for request in self._requests if request.node != node]
        self._unpin_unasked()

    def _pump(self, request: ServedRequest) -> None:
        try:
            while request.waiting:
                part, offset, length = request.waiting[0]
                source, known = self._find(request.rank, request.stamp, part, offset, length)
                span = Span(request.rank, request.stamp, part, offset, length)
                if not self._send(request, span, source, known):
                    return
                request.waiting.popleft()
        except LookupError as error:
            self._refuse(request, str(error))
        except DamageError as error:
            self._refuse(request, str(error))
            self.doubt()
        if request in self._requests:
            self._requests.remove(request)
        self._unpin_unasked()

    def _send(
        self, request: ServedRequest, span: Span, source: memoryview, known: int | None
    ) -> bool:
        pin = self._pins.get((request.rank, request.stamp))
        if pin is not None:
            pin.take()

        def done(why: str | None) -> None:
            if pin is not None:
                pin.let_go()
            # What is not wanted came another way, or was asked for in a mesh before: that is no
            # failure.
            if why is not None and "damaged" in why:
                self._links.call_in_loop(lambda: self._arrived_damaged(request, f"{span}: {why}"))

        is_taken = self._links.send_block(request.node, span, source, done, known)
        if not is_taken and pin is not None:
            pin.let_go()
        return is_taken

    def _arrived_damaged(self, request: ServedRequest, why: str) -> None:
        self._refuse(request, why)
        self.doubt()

    def doubt(self) -> None:
        """What was given from here does not prove at its asker."""
        self._on_damaged()

    def _refuse(self, request: ServedRequest, why: str) -> None:
        request.waiting.clear()
        if not request.phase.is_over:
            version, rank, stamp = self._links.version, request.rank, request.stamp
            self._links.send(request.node, CopyUnavailable(version, rank, stamp, why))

    def _find(
        self, rank: int, stamp: Stamp, part: Part, offset: int, length: int
    ) -> tuple[memoryview, int | None]:
        """The bytes, and their checksum where a table names it. Raises LookupError, DamageError."""
        if part is Part.PARITY:
            return self._find_parity(rank, stamp, offset, length), None
        slot = self._snapshot(rank, stamp)
        if slot is not None:
            header = slot.header()
            if part is Part.KEPT:
                return _find_kept(slot, header, offset, length)
            data = _within(slot.part(part, header), offset, length)
            if part is Part.HEADER:
                # no table proves it: given up while this waits for its link, it would cross blank
                return memoryview(bytes(data)), None
            if part is Part.PAYLOAD:
                _check_kept(slot, offset, length)
            if part is Part.PAYLOAD and _is_whole_block(slot, header, offset, length):
                return data, slot.table(header)[offset // slot.block_bytes]
            return data, None
        if part in META:
            return self._find_beside_parity(rank, stamp, part, offset, length), None
        raise LookupError(f"{part.name.lower()} of rank {rank} at {stamp} is not here")

    def _find_parity(self, rank: int, stamp: Stamp, offset: int, length: int) -> memoryview:
        slot = self._held.parities.find(rank, stamp)
        if slot is None:
            raise LookupError(f"no parity of rank {rank} at {stamp} rests here")
        return _within(slot.payload[: slot.header().payload_bytes], offset, length)

    def _find_beside_parity(
        self, rank: int, stamp: Stamp, part: Part, offset: int, length: int
    ) -> memoryview:
        for (mine, at), slot in self._held.parities.sealed().items():
            contents = self._held.contents(mine, at, slot)
            if at == stamp and rank in contents.metas:
                start, nbytes = contents.where(rank, part)
                return _within(slot.payload[start : start + nbytes], offset, length)
        raise LookupError(f"{part.name.lower()} of rank {rank} at {stamp} is not here")

    def _snapshot(self, rank: int, stamp: Stamp) -> Slot | None:
        if (rank, stamp) not in self._pins:
            slot = self._held.own.pin(stamp, rank)
            if slot is None:
                return self._held.copies.find(rank, stamp)
            self._pins[(rank, stamp)] = Pin(slot, self._held.own.unpin)
        return self._pins[(rank, stamp)].slot

    def copy_here(
        self, rank: int, stamp: Stamp, range_: BlockRange, taker: BlockTaker, node: int
    ) -> None:
        """The asker is this node itself: no link is needed. Raises LookupError, DamageError."""
        span = Span(rank, stamp, *range_)
        with self._found_here(span) as (source, known):
            place = taker.place(node, span)
            if place is not None:
                taker.arrived(node, span, _copied(span, source, known, place))

    def read_here(self, rank: int, stamp: Stamp, range_: BlockRange) -> bytearray:
        """These bytes. Raises LookupError, DamageError."""
        span = Span(rank, stamp, *range_)
        found = bytearray(range_.length)
        with self._found_here(span) as (source, known):
            _copied(span, source, known, memoryview(found))
        return found

    @contextmanager
    def _found_here(self, span: Span) -> Iterator[tuple[memoryview, int | None]]:
        """See `_find`. They stand still meanwhile."""
        try:
            yield self._find(*span)
        except DamageError:
            self.doubt()
            raise
        finally:
            self._unpin_unasked()


def _copied(span: Span, source: memoryview, known: int | None, place: memoryview) -> int:
    """The checksum of what lies in `place` now. Raises DamageError."""
    place[:] = source
    found = checksum(place)
    if known not in (None, found):
        raise DamageError(f"{span} is damaged here: checksum {found:016x}, expected {known:016x}")
    return found


def _is_whole_block(slot: Slot, header: SlotHeader, offset: int, length: int) -> bool:
    is_whole = length == min(slot.block_bytes, header.payload_bytes - offset)
    return offset % slot.block_bytes == 0 and is_whole


def _find_kept(
    slot: Slot, header: SlotHeader, offset: int, length: int
) -> tuple[memoryview, int | None]:
    kept = kept_of(header.payload_bytes, slot.block_bytes, header.lacking)
    if offset + length > kept.nbytes:
        raise LookupError(
            f"expected a range within {kept.nbytes} bytes, found {offset} to {offset + length}"
        )
    block = kept.block_at(offset, length)
    return slot.kept(kept, offset, length), None if block is None else slot.table(header)[block]


def _check_kept(slot: Slot, offset: int, length: int) -> None:
    """Raises LookupError where the bytes are with another rank: here they read as zeros."""
    size = slot.block_bytes
    lacks = slot.lacking().intersection(range(offset // size, -(-(offset + length) // size)))
    if lacks:
        raise LookupError(f"{slot.path} lacks block {min(lacks)}, which another rank keeps")


def _within(data: memoryview, offset: int, length: int) -> memoryview:
    if offset + length > len(data):
        raise LookupError(
            f"expected a range within {len(data)} bytes, found {offset} to {offset + length}"
        )
    return data[offset : offset + length]
