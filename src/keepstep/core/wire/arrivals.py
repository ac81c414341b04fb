"""Arrivals: a block on its way in: where its next bytes go, what is made of them, and by which tag
they are proven once all are there.

Bytes that cross as they are go straight into the place that somebody named for them, and are hashed
there. Encrypted ones go into a buffer that is shorter than a core's own cache, and from there,
decrypted, into the same place, so there is one pass over memory in both cases.
"""

from __future__ import annotations

from typing import Protocol

from keepstep.core.wire.macs import NO_TAG, TAG_BYTES, RunningMac
from keepstep.core.wire.seals import Unsealing
from keepstep.core.wire.traffic import RunningHash
from keepstep.model.units import KIB
from keepstep.model.wire import BlockHeader, Signal

# received, decrypted and hashed at once: few enough that they are still in a core's own cache, and
# enough that what Python does between two pieces does not count
PIECE_BYTES = 256 * KIB
DRAIN_BYTES = 256 * KIB  # of what nobody wants, received at once


class Wanted(Protocol):
    """A block on its way into the place that somebody named for it."""

    header: BlockHeader
    hash: RunningHash

    def next(self) -> memoryview:
        """Where what comes next goes; never empty."""

    def took(self, nbytes: int) -> bool:
        """So many bytes are there. Whether that was the rest."""

    def tag(self) -> bytes:
        """By which all of it is proven."""


class Placed:
    """Its bytes cross as they are."""

    def __init__(
        self, header: BlockHeader, place: memoryview, hash: RunningHash, mac: RunningMac | None
    ) -> None:
        self.header = header
        self.hash = hash
        self._mac = mac
        self._place = place
        self._at = 0

    def next(self) -> memoryview:
        """See `Wanted`."""
        return self._place[self._at : self._at + PIECE_BYTES]

    def took(self, nbytes: int) -> bool:
        """See `Wanted`."""
        piece = self._place[self._at : self._at + nbytes]
        self.hash.update(piece)
        if self._mac is not None:
            self._mac.update(piece)
        self._at += nbytes
        return self._at == len(self._place)

    def tag(self) -> bytes:
        """Of what came."""
        return NO_TAG if self._mac is None else self._mac.tag()


class Deciphered:
    """Its bytes cross encrypted, and behind them comes a tag. `scratch`: PIECE_BYTES, for itself
    until all of it is there."""

    def __init__(
        self,
        header: BlockHeader,
        place: memoryview,
        hash: RunningHash,
        unsealing: Unsealing,
        scratch: memoryview,
    ) -> None:
        self.header = header
        self.hash = hash
        self._unsealing = unsealing
        self._place = place
        self._scratch = scratch
        self._at = 0
        self._tag = memoryview(bytearray(TAG_BYTES))
        self._tag_at = 0

    def next(self) -> memoryview:
        """See `Wanted`."""
        left_bytes = len(self._place) - self._at
        return self._scratch[:left_bytes] if left_bytes else self._tag[self._tag_at :]

    def took(self, nbytes: int) -> bool:
        """See `Wanted`."""
        if self._at == len(self._place):
            self._tag_at += nbytes
            return self._tag_at == TAG_BYTES
        piece = self._place[self._at : self._at + nbytes]
        self._unsealing.update(self._scratch[:nbytes], piece)
        self.hash.update(piece)
        self._at += nbytes
        return False

    def tag(self) -> bytes:
        """The one that came."""
        return bytes(self._tag)


class Unwanted:
    """A block that is read and thrown away: nobody wants it, or it came before. `tag_bytes`: of the
    tag behind it."""

    def __init__(self, header: BlockHeader, answer: Signal, tag_bytes: int) -> None:
        self.header = header
        self.answer = answer
        self._left_bytes = header.span.length + tag_bytes
        self._scratch = memoryview(bytearray(min(self._left_bytes, DRAIN_BYTES)))

    def next(self) -> memoryview:
        """See `Wanted`."""
        return self._scratch[: self._left_bytes]

    def took(self, nbytes: int) -> bool:
        """See `Wanted`."""
        self._left_bytes -= nbytes
        return self._left_bytes == 0
