"""Carrier: moves the bytes of one connection: a socket, a thread that receives, one that sends.

Comes in: a connected socket and this keeper's end of the connection (`core/wire/endpoint.py`),
which says where received bytes go and what to send. Both threads spend their time in system calls
and checksums, without the GIL and without any lock; a block's bytes go straight from the memory of
its sender to the socket, and from the socket to the memory of its receiver.

Decides nothing, and never interprets a byte. Invariant: once the endpoint has heard `lost`, no
thread touches what it gave.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.edge.net.tcp import Pacer, queued_bytes, round_trip_ns, sent_counts, yield_to_others
from keepstep.model.links import LinkCount
from keepstep.model.units import S_NS
from keepstep.model.wire import Flow

if TYPE_CHECKING:
    from keepstep.core.wire.channel import Pieces
    from keepstep.core.wire.endpoint import Endpoint


def _nobody_waits() -> None:
    """For the end of the handshake."""


class Carrier:
    """Of one connection. `Transport` to its endpoint. `pacer`: all bytes sent keep to its rate.
    `copy_dscp`: see `yield_to_others`."""

    def __init__(self, sock: socket.socket, pacer: Pacer | None = None, copy_dscp: int = 0) -> None:
        self._sock = sock
        self._pacer = pacer
        self._copy_dscp = copy_dscp
        self._bell = threading.Event()  # there may be something to send

    # for the endpoint

    def wake(self) -> None:
        if not self._bell.is_set():
            self._bell.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._bell.set()

    def flow(self, node: int) -> Flow:
        return Flow(node, queued_bytes(self._sock), round_trip_ns(self._sock))

    def sent_counts(self) -> LinkCount:
        return sent_counts(self._sock)

    # for who made it

    def carry(
        self, endpoint: Endpoint, handshake_s: float, shaken: Callable[[], None] = _nobody_waits
    ) -> None:
        """All of it, on this thread and another one, until the connection is over. The handshake
        takes `handshake_s` at most; then, however it went, `shaken` is called."""
        writer = threading.Thread(target=self._write, args=(endpoint,), name="writer", daemon=True)
        try:
            try:
                self._shake_hands(endpoint, handshake_s)
            finally:
                shaken()
            if endpoint.closing is None:
                if endpoint.index:
                    with contextlib.suppress(OSError):
                        yield_to_others(self._sock, self._copy_dscp)
                writer.start()
                while endpoint.closing is None:
                    self._receive(endpoint, "closed by the other side")
        except OSError as error:
            endpoint.cut(error.strerror or str(error))
        finally:
            endpoint.cut("interrupted")
            if writer.ident is not None:
                writer.join()
            self._is_over()
            with self._sock:
                endpoint.lost("interrupted", time.monotonic_ns())

    def _is_over(self) -> None:
        """No thread of it moves anything any more."""

    def _shake_hands(self, endpoint: Endpoint, limit_s: float) -> None:
        """Until both sides have proven themselves or the connection is to end. Raises OSError."""
        deadline_ns = time.monotonic_ns() + round(limit_s * S_NS)
        self._send_all(endpoint)
        while not endpoint.is_proven and endpoint.closing is None:
            left_s = (deadline_ns - time.monotonic_ns()) / S_NS
            if left_s <= 0:
                raise TimeoutError(f"no handshake within {limit_s} s")
            self._sock.settimeout(left_s)
            self._receive(endpoint, "closed during the handshake")
            if not endpoint.is_proven:
                self._send_all(endpoint)
        self._sock.settimeout(None)

    def _receive(self, endpoint: Endpoint, why_closed: str) -> None:
        # a piece of a block comes whole: one call, where each segment would take one
        flags = socket.MSG_WAITALL if endpoint.awaits_all else 0
        nbytes = self._sock.recv_into(endpoint.get_buffer(), 0, flags)
        if nbytes:
            endpoint.buffer_updated(nbytes, time.monotonic_ns())
        else:
            endpoint.cut(why_closed)

    def _write(self, endpoint: Endpoint) -> None:
        try:
            while endpoint.closing is None:
                self._bell.clear()
                self._send_all(endpoint)
                pause_ns = endpoint.pause_ns
                if endpoint.closing is None:
                    self._bell.wait(None if pause_ns is None else pause_ns / S_NS)
        except OSError as error:
            endpoint.cut(error.strerror or str(error))

    def _send_all(self, endpoint: Endpoint) -> None:
        """All there is to send now."""
        while pieces := endpoint.next_pieces():
            self._send_pieces(pieces)

    def _send_pieces(self, pieces: Pieces) -> None:
        for piece in pieces[:-1]:
            self._send(piece, socket.MSG_MORE)
        self._send(pieces[-1], 0)

    def _send(self, piece: bytes | memoryview, flags: int) -> None:
        pacer = self._pacer
        if pacer is None:
            self._sock.sendall(piece, flags)
            return
        for at in range(0, len(piece), pacer.chunk_bytes):
            chunk = piece[at : at + pacer.chunk_bytes]
            pacer.take(len(chunk))
            self._sock.sendall(chunk, flags)
