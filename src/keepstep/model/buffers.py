"""Buffers: registered memory by which blocks cross between keepers, and what is said of it beside
them. Values only: `core/wire/records.py` says what they are as bytes, `edge/net/` moves them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from keepstep.model.units import KIB, MIB

BUFFER_BYTES = 1 * MIB
# Of each kind: filled here and read by others, or read from others. 64 MiB in all, which RDMA
# locks.
BUFFERS = 32
MAX_OFFER_BYTES = 64 * KIB

_OFFER = struct.Struct("<QII")


class RecordKind(IntEnum):
    """Of a record."""

    INLINE = 1  # so many bytes follow
    BUFFER = 2  # so many bytes lie in that buffer
    FREED = 3  # so many buffers, the oldest ones, have been read
    OFFER = 4  # where this side's buffers are; so many bytes follow, and their MAC
    READY = 5  # this side reads them


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """Where the next bytes are, or what became of those before."""

    kind: RecordKind
    length: int = 0
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class BufferOffer:
    """Where a side's buffers are: so many of so many bytes, one behind the other from `address` on
    in the process that `agent` describes."""

    address: int
    buffer_bytes: int
    buffers: int
    agent: bytes

    def to_bytes(self) -> bytes:
        """As it crosses."""
        return _OFFER.pack(self.address, self.buffer_bytes, self.buffers) + self.agent

    @classmethod
    def from_bytes(cls, data: bytes) -> BufferOffer | None:
        """The inverse; None: it is none."""
        if len(data) <= _OFFER.size:
            return None
        address, buffer_bytes, buffers = _OFFER.unpack_from(data)
        is_one = buffer_bytes and buffers and address + buffer_bytes * buffers < 1 << 64
        return cls(address, buffer_bytes, buffers, data[_OFFER.size :]) if is_one else None

    def holds(self, record: BufferRecord) -> bool:
        """Whether what that names lies in one of these, and fits into one of ours."""
        most = min(self.buffer_bytes, BUFFER_BYTES)
        return record.buffer < self.buffers and 0 < record.length <= most
