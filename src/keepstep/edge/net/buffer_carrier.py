"""Buffer carrier: a carrier of which large pieces cross by registered memory, and all else, with
the handshake, the frames and what says where the pieces are, over its socket.

The side that sends fills a buffer and says which (`core/wire/records.py`); the other side reads it
by NIXL, says so, and hands on the bytes as if they had come by the socket. What they mean, and
whether they are as they were sent, is found out where it always is. So nothing else is different
over this carrier: windows, answers, what is sent again after a loss.

Where buffers are not to be had (none is free, the other side cannot reach them, the process that
has them is gone) the same bytes go over the socket.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from keepstep.edge.net.carrier import Carrier
from keepstep.edge.net.nixl_buffers import BufferSource, NixlBuffers
from keepstep.edge.net.tcp import Pacer
from keepstep.model.buffers import BUFFER_BYTES, BufferOffer, BufferRecord, RecordKind
from keepstep.model.links import LinkCount
from keepstep.model.units import KIB
from keepstep.model.wire import Flow, Refusal, Refused

if TYPE_CHECKING:
    from keepstep.core.wire.endpoint import Endpoint
    from keepstep.core.wire.records import Records

MIN_BY_BUFFER = 64 * KIB  # below it a socket is quicker
LOOK_S = 0.5  # between two looks while the other side reads


class BufferCarrier(Carrier):
    """Of one connection. `limit_s`: how long one read may take."""

    def __init__(
        self,
        sock: socket.socket,
        buffers: NixlBuffers,
        limit_s: float,
        pacer: Pacer | None = None,
        copy_dscp: int = 0,
    ) -> None:
        super().__init__(sock, pacer, copy_dscp)
        self._buffers = buffers
        self._limit_s = limit_s
        self._records: Records | None = None  # from the handshake on, where there are any
        self._lock = threading.Lock()
        self._to_say: deque[tuple[BufferRecord, bytes]] = deque()
        self._source: BufferSource | None = None
        self._has_offered = False
        self._is_read = False  # the other side has said that it reads
        self._began_ns = 0  # what is out, or has gone last
        self._busy_ns = 0

    # for the endpoint

    def flow(self, node: int) -> Flow:
        found = super().flow(node)
        records = self._records
        out_bytes = records.out.nbytes if records is not None else 0
        return Flow(node, found.queued_bytes + out_bytes, found.round_trip_ns)

    def sent_counts(self) -> LinkCount:
        count = super().sent_counts()
        records = self._records
        if records is None:
            return count
        with self._lock:
            out = records.out
            now_ns = time.monotonic_ns() if out.nbytes else self._began_ns
            busy_ns = self._busy_ns + now_ns - self._began_ns
            return count._replace(
                acked_bytes=count.acked_bytes + out.done,
                sent_bytes=count.sent_bytes + out.done + out.nbytes,
                busy_ns=count.busy_ns + busy_ns,
            )

    # its life

    def _shake_hands(self, endpoint: Endpoint, limit_s: float) -> None:
        super()._shake_hands(endpoint, limit_s)
        if endpoint.index and endpoint.closing is None:
            self._records = endpoint.records

    def _is_over(self) -> None:
        """Nothing of it moves. Should the other side still read what was out, that is answered by
        nobody: it has lost the connection, too."""
        if self._records is not None:
            with self._lock:
                left = self._records.out.drop()
            self._buffers.give(left)
        if self._source is not None:
            self._buffers.unload(self._source)

    # what comes

    def _receive(self, endpoint: Endpoint, why_closed: str) -> None:
        if self._records is None:
            return super()._receive(endpoint, why_closed)
        head = self._exactly(self._records.head_bytes)
        if head is None:
            endpoint.cut(why_closed)
            return None
        heard = self._records.hear(head)
        if isinstance(heard, Refused):
            return endpoint.refuse(heard)
        match heard.kind:
            case RecordKind.INLINE:
                self._inline(endpoint, heard.length, why_closed)
            case RecordKind.BUFFER:
                self._by_buffer(endpoint, heard)
            case RecordKind.FREED:
                self._freed(endpoint, heard.length)
            case RecordKind.OFFER:
                self._offered(endpoint, self._exactly(heard.length + self._records.seal_bytes))
            case RecordKind.READY:
                self._is_read = True
        return None

    def _exactly(self, nbytes: int) -> bytes | None:
        """None: the other side has closed."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self._sock.recv(nbytes - len(data), socket.MSG_WAITALL)
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _inline(self, endpoint: Endpoint, left: int, why_closed: str) -> None:
        while left and endpoint.closing is None:
            flags = socket.MSG_WAITALL if endpoint.awaits_all else 0
            nbytes = self._sock.recv_into(endpoint.get_buffer()[:left], 0, flags)
            if not nbytes:
                endpoint.cut(why_closed)
                return
            endpoint.buffer_updated(nbytes, time.monotonic_ns())
            left -= nbytes

    def _by_buffer(self, endpoint: Endpoint, record: BufferRecord) -> None:
        source = self._source
        if source is None or not source.offer.holds(record):
            refused = Refused(Refusal.MALFORMED, f"{record.length} bytes in no buffer of an offer")
            return endpoint.refuse(refused)
        buffer = self._buffers.read(
            source, record, self._limit_s, lambda: endpoint.closing is not None
        )
        if buffer is None:
            endpoint.cut("what is in registered memory could not be read")
            return None
        try:
            at = 0
            while at < record.length and endpoint.closing is None:
                place = endpoint.get_buffer()[: record.length - at]
                nbytes = self._buffers.look_at(buffer, at, place)
                endpoint.buffer_updated(nbytes, time.monotonic_ns())
                at += nbytes
        finally:
            self._buffers.done_with(buffer)
        return self._queue(BufferRecord(RecordKind.FREED, 1))

    def _freed(self, endpoint: Endpoint, count: int) -> None:
        assert self._records is not None
        with self._lock:
            free = self._records.out.freed(count)
            if not self._records.out.nbytes:
                now_ns = time.monotonic_ns()
                self._busy_ns += now_ns - self._began_ns
                self._began_ns = now_ns
        if free is None:
            endpoint.refuse(
                Refused(Refusal.MALFORMED, f"{count} buffers freed, so many are not out")
            )
        else:
            self._buffers.give(free)
            self.wake()

    def _offered(self, endpoint: Endpoint, sealed: bytes | None) -> None:
        assert self._records is not None and endpoint.link is not None
        heard: BufferOffer | Refused | None = None
        if sealed is not None:
            heard = self._records.hear_offer(sealed)
        if isinstance(heard, BufferOffer) and self._source is None:
            self._source = self._buffers.load(endpoint.link.node, heard, self._limit_s)
            if self._source is not None:
                self._queue(BufferRecord(RecordKind.READY))
        elif isinstance(heard, Refused):
            endpoint.refuse(heard)
        else:
            endpoint.cut("closed within an offer, or a second one")

    # what goes

    def _queue(self, record: BufferRecord, body: bytes = b"") -> None:
        """To be said by the thread that sends."""
        self._to_say.append((record, body))
        self.wake()

    def _say_all(self, records: Records) -> None:
        while self._to_say:
            record, body = self._to_say.popleft()
            self._send(records.say(record, body), 0)

    def _send_all(self, endpoint: Endpoint) -> None:
        records = self._records
        if records is None:
            return super()._send_all(endpoint)
        while True:
            is_proof = endpoint.owes_proof
            if not is_proof:
                self._say_all(records)
            pieces = endpoint.next_pieces()
            if not pieces:
                return None
            if is_proof:
                self._send_pieces(pieces)
                continue
            for piece in pieces:
                self._send_record(records, endpoint, memoryview(piece))

    def _send_record(self, records: Records, endpoint: Endpoint, piece: memoryview) -> None:
        at = 0
        while len(piece) - at >= MIN_BY_BUFFER:
            chunk = piece[at : at + BUFFER_BYTES]
            buffer = self._take(records, endpoint)
            if buffer is None:
                break
            self._buffers.fill(buffer, chunk)
            with self._lock:
                if not records.out.nbytes:
                    self._began_ns = time.monotonic_ns()
                records.out.add(buffer, len(chunk))
            if self._pacer is not None:
                self._pacer.take(len(chunk))
            self._send(records.say(BufferRecord(RecordKind.BUFFER, len(chunk), buffer)), 0)
            at += len(chunk)
        if at < len(piece):
            rest = piece[at:]
            self._send(records.say(BufferRecord(RecordKind.INLINE, len(rest))), socket.MSG_MORE)
            self._send(rest, 0)

    def _take(self, records: Records, endpoint: Endpoint) -> int | None:
        """A buffer to fill, once the other side has read enough of those before. None: it does not
        read any, or there is none."""
        if not self._is_read:
            if not self._has_offered:
                self._has_offered = True
                body = self._buffers.offer.to_bytes()
                self._queue(BufferRecord(RecordKind.OFFER, len(body)), body)
                self._say_all(records)
            return None
        until = time.monotonic() + 2 * self._limit_s
        while not records.out.has_room:
            if endpoint.closing is not None:
                raise ConnectionError("the connection is over")
            if time.monotonic() > until:
                raise TimeoutError("the other side does not read registered memory")
            self._bell.wait(LOOK_S)
            self._bell.clear()
            self._say_all(records)
        return self._buffers.take()
