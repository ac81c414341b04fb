"""Channel: what one connection after another carries of a link; here, what both kinds have in
common.

A link has one channel for messages (`message_channel.py`) and one or more for blocks
(`block_channel.py`). A channel lives as long as its link, a `Stream` as long as one connection: it
is made when both sides have proven themselves, and dropped when the connection is over. What was
under way is then sent again on the next one.

A stream is driven in the manner of asyncio's BufferedProtocol: `get_buffer` says where the next
bytes from the other side go, `buffer_updated` that they are there, `next_pieces` what to send. One
thread may receive while another sends.
"""

from __future__ import annotations

from typing import Protocol

from keepstep.core.wire.connection import Connection
from keepstep.core.wire.traffic import Traffic
from keepstep.model.wire import Flow, Refusal, Refused

Pieces = tuple[bytes | memoryview, ...]
NOTHING: Pieces = ()


class Line(Protocol):
    """The connection under a stream, as far as the stream needs it."""

    @property
    def closing(self) -> str | None:
        """Why the connection is to end, once it is."""

    def cut(self, why: str) -> bool:
        """End the connection; False when that was said before."""

    def wake(self) -> None:
        """There may be something to send. May be called with the link's lock held."""

    def flow(self) -> Flow:
        """With the link's lock held: what is under way, on all streams of the link together."""


class Stream(Protocol):
    """One connection's part of a channel."""

    # None, or how long after `next_pieces` has returned nothing it is to be asked again though
    # nobody calls `Line.wake`
    pause_ns: int | None

    @property
    def awaits_all(self) -> bool:
        """All of what `get_buffer` gives is certain to come: who receives may wait for the whole
        of it."""

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty. Not asked once the line is closing."""

    def buffer_updated(self, nbytes: int, now_ns: int) -> None:
        """So many bytes are there, from the beginning of what `get_buffer` gave."""

    def next_pieces(self) -> Pieces:
        """What to send next, one directly after the other; nothing when there is nothing now. To
        ask again says that they are out."""


class Channel:
    """One channel of a link. `failures`: attempts to connect since the last one that succeeded,
    that one among them when it is over; `in_vain`: those before the one that succeeded last, or
    that have failed since; `finals`: how many of the last were refused in a way that dialling again
    does not change. `carried_ns`: when its connection began."""

    def __init__(self, traffic: Traffic, index: int) -> None:
        self._traffic = traffic
        self.index = index
        self.failures = 0
        self.in_vain = 0
        self.finals = 0
        self.carried_ns = 0

    def open(self, wire: Connection, line: Line) -> Stream:
        """With the lock held: a new connection is there, nothing has crossed it."""
        raise NotImplementedError

    def away(self, why: str, now_ns: int, is_stranger: bool = False) -> None:
        """With the lock held: its connection is no more, or could not be made; `is_stranger`: see
        `Health.cut`."""


def refuse(traffic: Traffic, line: Line, why: str) -> None:
    """The other side breaks the rules of the wire: count it, and end the connection."""
    traffic.counts.refused(Refused(Refusal.MALFORMED, why))
    line.cut(why)
