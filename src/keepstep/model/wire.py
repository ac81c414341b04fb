"""What keepers of different nodes say to each other: values that cross a connection, and what a
connection tells its owner.

`core/wire/connection.py` turns them into bytes and back, `edge/net/carrier.py` moves the bytes.
Nothing here does either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

from keepstep.model.bounds import Count, Range
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB

if TYPE_CHECKING:
    from keepstep.model.messages.peers import KeeperMessage

MAX_BLOCK_BYTES = 64 * MIB
MAX_AT_DOOR = 64  # connections to a keeper whose other side has not proven itself yet
MAX_STREAMS = 16  # of a link, for the blocks of one direction
MAX_ADDRESSES = 16  # of a node, on as many interfaces
MAX_ADDENDS = 256  # of a sum: a codeword has no more blocks

Address = tuple[str, int]


class Part(IntEnum):
    """Which of a snapshot's objects a block belongs to."""

    PAYLOAD = 0
    TABLE = 1
    MANIFEST = 2
    HEADER = 3
    PARITY = 4
    META = 5  # header page, table and manifest, one behind the other
    KEPT = 6  # of the payload, what the slot does not lack, one block behind the other
    SUM = 7  # of pieces of a codeword, added up; its offset is the number of who asked


class Refusal(IntEnum):
    """Why something was not listened to. The numbers cross the wire: they are never reused."""

    STRANGER = 1  # does not begin as a keeper does
    VERSION = 2
    WRONG_JOB = 3
    WRONG_SECRET = 4
    OLD_INCARNATION = 5
    NOT_EXPECTED = 6  # a node or channel nobody announced
    FORGOTTEN = 7  # resumes a link that was given up here
    BUSY = 8
    DAMAGED = 9
    OUT_OF_ORDER = 10  # replayed, reordered or lost
    OVERSIZED = 11
    MALFORMED = 12
    UNKNOWN_KIND = 13
    UNSIGNED = 14  # cannot send blocks under MACs, and has to
    ENCRYPTION = 15  # one of the two encrypts, and the other does not
    LATE = 16  # has not knocked in time


class Signal(IntEnum):
    """What the two ends of a link tell each other beside messages and blocks, each with a number.
    The values cross the wire, as types of frames: they are never reused."""

    PING = 3  # are you there?
    PONG = 4  # yes
    CONFIRMED = 5  # all messages up to this number have arrived
    BLOCK_GOT = 6  # the block of this number is here, whole
    BLOCK_DAMAGED = 7  # it came, and was not what its header says
    BLOCK_UNWANTED = 8  # it came, and nobody wants it


@dataclass(frozen=True, slots=True)
class Identity:
    """Which keeper: its job (16 bytes), its node, and which of the node's lives it is."""

    job_hash: bytes
    node: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Dial:
    """What a connection is for, chosen by the side that dials: the link it belongs to (a number
    that grows with every link the dialer makes), which of its channels it is (0 carries messages,
    1, 3, 5 ... blocks of the side that dials, 2, 4, 6 ... those of the other one), and whether the
    link has been open before."""

    link: int
    channel: int
    resuming: bool = False


class BlockRange(NamedTuple):
    """Bytes of one of a snapshot's objects."""

    part: Part
    offset: Count
    length: Annotated[int, Range(1, MAX_BLOCK_BYTES)]


class Span(NamedTuple):
    """Bytes of a snapshot's object: `length` of them, from `offset`."""

    rank: int
    stamp: Stamp
    part: Part
    offset: int
    length: int

    def __str__(self) -> str:
        return (
            f"{self.part.name.lower()} bytes {self.offset} to {self.offset + self.length} of "
            f"rank {self.rank}, {self.stamp}"
        )


class BlockHeader(NamedTuple):
    """A span about to cross: `checksum` (XXH3-64) of its bytes, `number` names it on its link,
    `tag` is the MAC of its bytes, zeros without one."""

    span: Span
    checksum: int
    number: int
    tag: bytes = bytes(16)


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes to `node` at this moment: the bytes that the kernel has taken and the other one has
    not acknowledged, and the shortest round trip it has seen. Of a connection, or of all that carry
    a link's blocks."""

    node: int
    queued_bytes: int
    round_trip_ns: int


# What a connection tells its owner.


@dataclass(frozen=True, slots=True)
class Opened:
    """The other side has proven the secret and is this keeper, on this channel."""

    peer: Identity
    dial: Dial


class Received(NamedTuple):
    """A message. `number` is its place among the link's messages."""

    message: KeeperMessage
    number: int


class Signalled(NamedTuple):
    """The other end of the link tells this."""

    signal: Signal
    number: int


class BlockComing(NamedTuple):
    """The next `header.span.length` bytes are the block's: put them where you like, then tell the
    connection their checksum and MAC."""

    header: BlockHeader


class BlockWhole(NamedTuple):
    """The block's bytes are what the sender had."""

    header: BlockHeader


@dataclass(frozen=True, slots=True)
class BlockDamaged:
    """The block's bytes are not what the sender had."""

    header: BlockHeader
    found: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Not listened to, or (`by_peer`) not listened to by the other side, which says so before it
    has proven anything.

    `number` is that of a message which came whole and unaltered and still says nothing known: only
    such a one leaves the connection usable.
    """

    reason: Refusal
    why: str
    by_peer: bool = False
    number: int = 0

    def __str__(self) -> str:
        by_whom = "refused by the peer: " if self.by_peer else ""
        return f"{by_whom}{self.reason.name.lower().replace('_', ' ')}: {self.why}"


WireEvent = Opened | Received | Signalled | BlockComing | BlockWhole | BlockDamaged | Refused


# What a link's health asks for.


@dataclass(frozen=True, slots=True)
class SendPing:
    """Say that we are here."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Give the control connection up and make a new one."""

    why: str


@dataclass(frozen=True, slots=True)
class Dead:
    """Give the link up."""

    why: str
