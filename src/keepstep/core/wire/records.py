"""Records: how the bytes of a connection are cut where some of them cross by registered memory.

Over a socket a stream is one run of bytes. Where both sides have buffers that the other one's
network card may read (`transport`), the socket carries records, and each says where the next bytes
of the same run are: behind it, or in a buffer of the side that says it. What the bytes mean, and
whether they are believed, is decided above as ever: frames have their MACs, blocks their MAC, tag
and checksum, however they came.

    head   kind, length, sequence, buffer, MAC
    body   of an offer: where the buffers are, with a MAC

Records are sealed as frames are, under keys of their own (`Connection.beside`): nobody on the way
can have the other side read elsewhere, or load an offer that is not its peer's. Never allocates by
a length that the other side claims.
"""

from __future__ import annotations

import struct
from collections import deque

from keepstep.core.wire.macs import TAG_BYTES
from keepstep.core.wire.seals import BODY, HEAD, Seal
from keepstep.model.buffers import MAX_OFFER_BYTES, BufferOffer, BufferRecord, RecordKind
from keepstep.model.wire import Refusal, Refused

_HEAD = struct.Struct("<B3xIQQ")
# Of one connection, filled and not yet read by the other side: it reads one while the next one is
# filled, and a connection that stands still keeps few from the others.
MAX_OUT = 4


_KINDS = {int(kind): kind for kind in RecordKind}


class Records:
    """Of one connection. What is said belongs to one thread, what is heard to one."""

    head_bytes = _HEAD.size + TAG_BYTES
    seal_bytes = TAG_BYTES  # behind an offer

    def __init__(self, ours: Seal, theirs: Seal) -> None:
        self.out = BuffersOut()
        self._ours, self._theirs = ours, theirs
        self._said = self._heard = 0
        self._head: bytes | None = None  # heard last

    def say(self, record: BufferRecord, body: bytes = b"") -> bytes:
        """Its bytes. Only an offer has a `body`."""
        head = _HEAD.pack(record.kind, record.length, self._said, record.buffer)
        sealed = self._ours.close(HEAD, self._said, head)
        if body:
            sealed += self._ours.close(BODY, self._said, body, head)
        self._said += 1
        return sealed

    def hear(self, sealed: bytes) -> BufferRecord | Refused:
        """What a head says."""
        self._head = self._theirs.open(HEAD, self._heard, sealed)
        if self._head is None:
            return Refused(Refusal.DAMAGED, f"the head of record {self._heard} fails its MAC")
        kind, length, sequence, buffer = _HEAD.unpack(self._head)
        if sequence != self._heard:
            return Refused(
                Refusal.OUT_OF_ORDER, f"expected record {self._heard}, found record {sequence}"
            )
        if kind not in _KINDS:
            return Refused(Refusal.UNKNOWN_KIND, f"a record of type {kind}")
        if kind == RecordKind.OFFER and not 0 < length <= MAX_OFFER_BYTES:
            return Refused(
                Refusal.OVERSIZED, f"an offer of {length} bytes, at most {MAX_OFFER_BYTES} allowed"
            )
        self._heard += 1
        return BufferRecord(_KINDS[kind], length, buffer)

    def hear_offer(self, sealed: bytes) -> BufferOffer | Refused:
        """What follows the head that was heard last."""
        assert self._head is not None, "a head comes first"
        body = self._theirs.open(BODY, self._heard - 1, sealed, self._head)
        if body is None:
            return Refused(Refusal.DAMAGED, f"the offer in record {self._heard - 1} fails its MAC")
        return BufferOffer.from_bytes(body) or Refused(Refusal.MALFORMED, "an offer of nothing")


class BuffersOut:
    """Of one connection: what was filled and is not yet read by the other side, in order. `done`:
    how many bytes were."""

    def __init__(self) -> None:
        self._out: deque[tuple[int, int]] = deque()
        self.nbytes = 0
        self.done = 0

    @property
    def has_room(self) -> bool:
        """For one more."""
        return len(self._out) < MAX_OUT

    def add(self, buffer: int, nbytes: int) -> None:
        """It was filled with so many bytes."""
        self._out.append((buffer, nbytes))
        self.nbytes += nbytes

    def freed(self, count: int) -> list[int] | None:
        """The other side has read so many. Which those are; None: there are not so many."""
        if not 0 < count <= len(self._out):
            return None
        read = [self._out.popleft() for _ in range(count)]
        nbytes = sum(one for _, one in read)
        self.nbytes -= nbytes
        self.done += nbytes
        return [buffer for buffer, _ in read]

    def drop(self) -> list[int]:
        """The connection is over: all that were out."""
        left = [buffer for buffer, _ in self._out]
        self._out.clear()
        self.nbytes = 0
        return left
