"""Endpoint: this keeper's end of one connection, from its first byte to its last.

Who moves bytes (a socket with two threads, a simulated pipe) makes one for each connection, gives
it what arrives, sends what it hands out, and ends the connection when it is told to. First comes
the handshake; then the connection belongs to a channel of a link, perhaps after a while, when the
one it replaces is gone; from then on the channel's stream says what the bytes mean.

The shape is that of asyncio's BufferedProtocol: `get_buffer`, then `buffer_updated`. Until
`is_proven` one thread does everything; from then on one may receive while another sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from keepstep.core.wire.channel import NOTHING, Pieces, Stream
from keepstep.core.wire.connection import Connection
from keepstep.core.wire.records import Records
from keepstep.core.wire.traffic import Lock
from keepstep.model.links import LinkCount
from keepstep.model.units import KIB
from keepstep.model.wire import Flow, Opened, Refused

if TYPE_CHECKING:
    from keepstep.core.wire.link import PeerLink

HANDSHAKE_BYTES = 1 * KIB  # more than any record


class Transport(Protocol):
    """The connection's bytes, as whoever moves them has it. Called from any thread, perhaps with a
    lock held: quick, and calls nothing back."""

    def wake(self) -> None:
        """There may be something to send: ask `Endpoint.next_pieces`."""

    def close(self) -> None:
        """End the connection now: whoever waits for its bytes, or to send some, waits no more."""

    def flow(self, node: int) -> Flow:
        """What is under way on it."""

    def sent_counts(self) -> LinkCount:
        """What has been sent over it, as the kernel counts; nothing where nobody counts."""


class EndpointOwner(Protocol):
    """Who decides what connections are for: the table of links."""

    def proven(self, endpoint: Endpoint, met: Opened, now_ns: int) -> None:
        """Both sides have proven themselves."""

    def refused(self, endpoint: Endpoint, refused: Refused) -> None:
        """One side does not listen to the other; the connection ends."""

    def lost(self, endpoint: Endpoint, why: str, now_ns: int) -> None:
        """The connection is over, and nobody touches it any more."""


class Endpoint:
    """`link` and `index`: the link and the channel it is for; the accepting side learns them."""

    def __init__(
        self,
        owner: EndpointOwner,
        transport: Transport,
        wire: Connection,
        lock: Lock,
        link: PeerLink | None = None,
        index: int = 0,
    ) -> None:
        self.wire = wire
        self.link = link
        self.index = index
        self.met: Opened | None = None
        self.refusal: Refused | None = None
        self.closing: str | None = None
        self.is_lost = False
        self.owes_proof = False  # what is sent next ends the handshake
        self.records: Records | None = None  # once proven, where both sides have buffers
        self._owner = owner
        self._transport = transport
        self._lock = lock
        self._stream: Stream | None = None
        self._out = wire.take()  # of the handshake, to be sent
        self._held = b""  # the last of it, until there is a stream
        self._buffer = memoryview(bytearray(HANDSHAKE_BYTES))

    @property
    def is_proven(self) -> bool:
        return self.met is not None

    # for whoever moves the bytes

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty. Not to be asked once `closing` is set."""
        if self._stream is not None:
            return self._stream.get_buffer()
        return self._buffer[: self.wire.wanted]

    @property
    def awaits_all(self) -> bool:
        """See `Stream`."""
        return self._stream is not None and self._stream.awaits_all

    def buffer_updated(self, nbytes: int, now_ns: int) -> None:
        """So many bytes have arrived, at the beginning of what `get_buffer` gave."""
        if self._stream is not None:
            self._stream.buffer_updated(nbytes, now_ns)
        elif self.is_proven:
            self.cut("it spoke before it was answered")
        else:
            self._shake_hands(nbytes, now_ns)

    def next_pieces(self) -> Pieces:
        """What to send next, one directly after the other; nothing when there is nothing now. To
        ask again says that they are out. When `closing` is set, what is left is to be sent before
        the connection ends."""
        stream = self._stream  # looked at first: when there is one, `_out` has been set
        if self._out:
            out = self._out
            self._out = b""
            self.owes_proof = False
            return (out,)
        if stream is None or self.closing is not None:
            return NOTHING
        return stream.next_pieces()

    @property
    def pause_ns(self) -> int | None:
        """After `next_pieces` has returned nothing: when to ask again though nobody says `wake`."""
        return self._stream.pause_ns if self._stream is not None else None

    def lost(self, why: str, now_ns: int) -> None:
        """The connection is over, and no thread will touch this any more. To be said once, always;
        `why` counts when nobody here has ended it."""
        self.cut(why)
        self.is_lost = True
        self._owner.lost(self, self.closing or why, now_ns)

    # for who decides

    def cut(self, why: str) -> bool:
        """End the connection; False when that was said before: the first reason counts."""
        with self._lock:
            if self.closing is not None:
                return False
            self.closing = why
        self._transport.close()
        return True

    def refuse(self, refused: Refused) -> None:
        """What came beside the stream is not listened to: the connection ends."""
        self._owner.refused(self, refused)
        self.cut(str(refused))

    def begin(self, stream: Stream) -> None:
        """From now on it carries that."""
        self._out = self._held
        self._held = b""
        self._stream = stream
        self._transport.wake()

    def wake(self) -> None:
        self._transport.wake()

    def flow(self) -> Flow:
        """With the link's lock held: of all connections that carry the link's blocks."""
        assert self.link is not None
        return self.link.flow()

    def flow_of_connection(self) -> Flow:
        assert self.link is not None
        return self._transport.flow(self.link.node)

    def sent_counts(self) -> LinkCount:
        """Over its connection."""
        return self._transport.sent_counts()

    def _shake_hands(self, nbytes: int, now_ns: int) -> None:
        event = self.wire.receive(self._buffer[:nbytes])
        out = self.wire.take()
        match event:
            case Opened():
                self.met = event
                self._held = (
                    out  # the accepting side's proof: sent when all is ready for what follows
                )
                self.owes_proof = bool(out)
                if self.wire.beside is not None:
                    self.records = Records(*self.wire.beside)
                self._owner.proven(self, event, now_ns)
            case Refused():
                self._out = out
                self.refusal = event
                self.closing = str(event)  # once that is sent
                self._owner.refused(self, event)
            case _:
                self._out = out
        if self._out:
            self._transport.wake()
