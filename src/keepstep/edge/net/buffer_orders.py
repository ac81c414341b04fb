"""Buffer orders: what a keeper and its NIXL process say to each other, over a SOCK_SEQPACKET pair:
one struct a packet. Values only."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from keepstep.model.buffers import BUFFER_BYTES, BUFFERS, MAX_OFFER_BYTES

MEMORY_BYTES = 2 * BUFFERS * BUFFER_BYTES  # those that are filled here, and the others
PACKET_BYTES = MAX_OFFER_BYTES + 64

_ORDER = struct.Struct("<BQQQII")
_ANSWER = struct.Struct("<QBQ")


class OrderKind(IntEnum):
    """Of an order."""

    LOAD = 1  # the agent whose description follows: `peer` is its number
    UNLOAD = 2
    READ = 3  # from `address` in `peer` into `buffer`
    AWAKE = 4  # others may read here now
    REST = 5


@dataclass(frozen=True, slots=True)
class BufferOrder:
    """`number`: what the answer names; an order without one is not answered."""

    kind: OrderKind
    number: int = 0
    peer: int = 0
    address: int = 0
    nbytes: int = 0
    buffer: int = 0
    agent: bytes = b""

    def to_bytes(self) -> bytes:
        """As a packet."""
        return (
            _ORDER.pack(self.kind, self.number, self.peer, self.address, self.nbytes, self.buffer)
            + self.agent
        )

    @classmethod
    def from_bytes(cls, packet: bytes) -> BufferOrder:
        """The inverse."""
        kind, number, peer, address, nbytes, buffer = _ORDER.unpack_from(packet)
        agent = packet[_ORDER.size :]
        return cls(OrderKind(kind), number, peer, address, nbytes, buffer, agent)


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """`number`: of the order; 0 is the first word: `address` is where the memory lies in that
    process, `text` describes its agent. Where it `failed`, `text` says why."""

    number: int
    failed: bool = False
    address: int = 0
    text: bytes = b""

    def to_bytes(self) -> bytes:
        """As a packet."""
        return _ANSWER.pack(self.number, self.failed, self.address) + self.text

    @classmethod
    def from_bytes(cls, packet: bytes) -> OrderAnswer:
        """The inverse."""
        number, failed, address = _ANSWER.unpack_from(packet)
        return cls(number, bool(failed), address, packet[_ANSWER.size :])
