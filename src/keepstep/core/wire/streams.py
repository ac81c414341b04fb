"""Streams: over how many connections this side spreads the blocks that it sends on one link.

One TCP connection moves what one core at each end moves: receiving, hashing and the MAC of a block
happen on the thread of its connection, and a path that is long or shared gives each connection its
own part. So a link begins with few streams and doubles them while blocks wait and doubling helps.

Comes in: that a block has landed, whether others wait, and that the gate holds blocks back. Goes
out: how many streams are used. A stretch is a time in which blocks always waited: what lands in it
is what the streams in use can do. More of them are kept when they bring a fifth more than before,
else given up for a while that grows; those that were opened for it stay, and carry nothing.

Never opens a connection, has no clock. Invariant: 1 <= first <= in_use <= most <= MAX_STREAMS.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.units import MS_NS, S_NS
from keepstep.model.wire import MAX_STREAMS

STRETCH_NS = 500 * MS_NS  # measured at once
STRETCH_BLOCKS = 8
SETTLE_NS = 500 * MS_NS  # a new connection is made, and finds its rate
GAIN_RATIO = 1.2
AGAIN_FIRST_NS, AGAIN_MAX_NS = 60 * S_NS, 960 * S_NS  # until more are tried again


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """A link begins with `first` streams in each direction, or as many as there are pairs of
    addresses, and has at most `most`."""

    first: int = 1
    # at 2 to 4 GB/s each they fill 100 Gbit/s with half of them, and 200 with all
    most: int = 8

    def __post_init__(self) -> None:
        assert 1 <= self.first <= self.most <= MAX_STREAMS

    @classmethod
    def of(cls, asked: int | None) -> StreamLimits:
        """So many always; None: as many as help."""
        return cls() if asked is None else cls(asked, asked)


@dataclass(frozen=True, slots=True)
class _Before:
    """What was reached before more streams were tried."""

    in_use: int
    bytes_per_s: float


class StreamCount:
    """Of what one side sends on one link. Not for several threads at once."""

    def __init__(self, limits: StreamLimits) -> None:
        self.in_use = limits.first
        self._most = limits.most
        self._before: _Before | None = None
        self._settled_ns = 0  # what lands earlier tells nothing
        self._again_ns = 0
        self._wait_ns = AGAIN_FIRST_NS
        # of the present stretch
        self._since_ns: int | None = None
        self._nbytes = self._blocks = 0

    def at_least(self, streams: int) -> None:
        """Each pair of addresses carries one, whatever was allowed for a single one."""
        streams = min(streams, MAX_STREAMS)
        self._most = max(self._most, streams)
        if self.in_use < streams:
            self.in_use = streams
            self._before = None
            self._break()

    def landed(self, now_ns: int, nbytes: int, has_more: bool) -> bool:
        """A block is at its place, and others wait or do not. Whether more streams are used from
        now on."""
        if not has_more or now_ns < self._settled_ns:
            self._break()
            return False
        if self._since_ns is None:
            self._since_ns = now_ns
            return False
        self._nbytes += nbytes
        self._blocks += 1
        took_ns = now_ns - self._since_ns
        if took_ns < STRETCH_NS or self._blocks < STRETCH_BLOCKS:
            return False
        bytes_per_s = self._nbytes * S_NS / took_ns
        self._break()
        return self._judge(now_ns, bytes_per_s)

    def held_back(self) -> None:
        """Blocks wait because they may not go now: that tells nothing of the streams."""
        self._break()

    def _break(self) -> None:
        self._since_ns = None
        self._nbytes = self._blocks = 0

    def _judge(self, now_ns: int, bytes_per_s: float) -> bool:
        before = self._before
        self._before = None
        if before is not None and bytes_per_s < GAIN_RATIO * before.bytes_per_s:
            self.in_use = before.in_use
            self._again_ns = now_ns + self._wait_ns
            self._wait_ns = min(2 * self._wait_ns, AGAIN_MAX_NS)
            return False
        if before is not None:
            self._wait_ns = AGAIN_FIRST_NS
        if now_ns < self._again_ns or self.in_use == self._most:
            return False
        self._before = _Before(self.in_use, bytes_per_s)
        self.in_use = min(2 * self.in_use, self._most)
        self._settled_ns = now_ns + SETTLE_NS
        return True
